#pragma once

// Step times, rates and memory out of the text that a training loop prints.
//
// "step: 30 loss: 6.9 memory: 61.20GiB(64%) tps: 7,100" (torchtitan) says 7,100 tokens per second
// of one GPU and 61.2 GiB. A user may type the same: "7100 tokens/s/GPU 61 GiB".

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/units.h"

namespace shardwright {

// What a log says of the run's usual step. At least one of the first four is there.
struct StepLog {
  std::string framework;  // "torchtitan"; "typed" for words of the user
  std::int64_t count =
      0;  // values that the rate is the median of; the first of several is left out
  std::optional<Seconds> step_time;                 // of one optimizer step
  std::optional<double> tokens_per_second_per_gpu;  // images, for models of images
  std::optional<double> tokens_per_second;          // of all GPUs, or of one: loops differ
  std::optional<double> samples_per_second;         // of all GPUs
  std::optional<Bytes> memory;                      // the largest of one GPU that was printed
  bool is_reserved = true;  // `memory` is the allocator's segments, not what they hold
};

// Reads the lines of torchtitan, Trainer and TRL, axolotl, DeepSpeed, Megatron-LM, NeMo, LLM
// Foundry and progress bars, with the colours of a terminal in them or not. Of a log with several
// kinds of lines the kind that says most often how fast steps are. `file` names the text in errors.
// Throws InputError for a text without any. O(length * formats).
[[nodiscard]] StepLog ReadStepLog(std::string_view text, const std::string& file);

}  // namespace shardwright
