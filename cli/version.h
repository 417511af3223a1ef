#pragma once

namespace shardwright {

inline constexpr const char* kVersion = "0.1.0";
inline constexpr const char* kVersionText = "shardwright 0.1.0";

// What `shardwright --help` begins with: a line, a blank line, examples.
inline constexpr const char* kProgramAbout =
    R"(Plans, simulates and runs Fully Sharded Data Parallel training.

Examples:
  shardwright list models
  shardwright plan --model llama-3-8b --cluster dgx-h100 --nodes 2 --seq 8192 -o plan.json
  shardwright simulate plan.json --trace trace.json.gz
  shardwright run small.json --steps 10 --trace run.json.gz
  shardwright compare small.json run.json.gz

Exit codes: 0 ok, 1 the answer is no, 2 usage, 3 bad input, 4 environment, 5 run-time failure,
70 a bug of Shardwright, 130 interrupted.)";

}  // namespace shardwright
