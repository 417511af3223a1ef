#pragma once

// The op "other" of a model.json: one that says itself what it costs.

#include <vector>

#include "models/internal/op_reader.h"

namespace shardwright {

[[nodiscard]] std::vector<FileTensor> AddOther(OpReader& reader);

}  // namespace shardwright
