#pragma once

// Which rows go to which expert.

#include <cstdint>

#include "executor/host/kernels/rows.h"
#include "executor/model_op.h"

namespace shardwright {

// Rows by expert: expert e has rows[offsets[e]] .. rows[offsets[e + 1] - 1], ascending.
struct Dispatch {
  const std::int64_t* offsets;
  const std::int64_t* rows;
};

// The rows for which the router's output, input 1, is not 0; `is_dense`: all rows, for each expert.
[[nodiscard]] Dispatch MakeDispatch(const ModelOpCall& call, bool is_dense, Scratch& scratch);

// The rows that came from all ranks, as the numbers in ModelOpCall::exchange say; and their sum.
[[nodiscard]] Dispatch DispatchOfCame(const ModelOpCall& call, Scratch& scratch);
[[nodiscard]] std::int64_t CameRows(const ModelOpCall& call);

}  // namespace shardwright
