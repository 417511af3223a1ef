#pragma once

// The op kinds of our own model.json: how each follows from its keys, inputs and parameters.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "models/internal/builder.h"
#include "models/internal/size_expression.h"
#include "models/model.h"

namespace shardwright {

// A tensor by its name in the file. Dims per sample: (rows, features), (channels, height, width),
// (n) for ids, or whatever an op "other" or "view" says.
struct FileTensor {
  TensorId id;
  std::vector<std::int64_t> dims;
  bool is_index = false;
};

// An op entry whose names are resolved.
struct FileOp {
  JsonValue json;
  ModuleId module;
  std::string name;
  std::vector<FileTensor> inputs;
  std::vector<ParamId> params;
  std::size_t output_count = 1;
  FileSizes* sizes = nullptr;                                       // never null where ops are read
  const std::function<RopeAngles(std::int64_t)>* angles = nullptr;  // TemplateSource's, if any
};

// The kinds that only rename a tensor (flatten, tokens, view) make no op.
[[nodiscard]] bool IsKnownOp(std::string_view kind);
[[nodiscard]] std::vector<std::string> KnownOps();
// Does the op read parameters, so that its module's own are meant when the entry names none?
[[nodiscard]] bool TakesParams(std::string_view kind);

// Appends an input of the model: an entry of "inputs", or an op "input" where another is to come
// first.
[[nodiscard]] FileTensor AddFileInput(ModelBuilder& builder, const JsonValue& entry,
                                      FileSizes& sizes);

// Checks the keys, counts and shapes of the entry and appends it to the builder. Returns its
// outputs.
[[nodiscard]] std::vector<FileTensor> AddFileOp(ModelBuilder& builder, const FileOp& op);

}  // namespace shardwright
