#pragma once

// Which sample of the data stands where in which step's global batch: a function of its arguments,
// so every rank computes its own share, and neither the number of ranks nor the split into
// micro-batches changes what a step trains on.

#include <cstdint>
#include <string>

#include "executor/training_options.h"

namespace shardwright {

struct Sampler {
  std::int64_t dataset_size = 0;  // samples; at least 1
  std::int64_t global_batch = 1;  // samples per step over all ranks
  std::uint64_t seed = 1;
  bool shuffle = true;
  EpochTail tail = EpochTail::kCarry;

  bool operator==(const Sampler&) const = default;
};

struct SamplePlace {
  std::int64_t epoch = 0;
  std::int64_t sample = 0;  // in the data; -1: none, a place that EpochTail::kPad left empty

  bool operator==(const SamplePlace&) const = default;
};

// The sample at `place` (0 .. global_batch - 1) of a step's batch.
[[nodiscard]] SamplePlace SampleAt(const Sampler& sampler, std::int64_t step, std::int64_t place);

// The epoch of a step's first sample.
[[nodiscard]] std::int64_t EpochOf(const Sampler& sampler, std::int64_t step);

// The first step of an epoch whose batch begins with that epoch's samples or carries them: with
// kCarry the step that holds the epoch's first sample. Epoch 0 begins at step 0.
[[nodiscard]] std::int64_t FirstStepOf(const Sampler& sampler, std::int64_t epoch);

// The number of steps after which all samples of an epoch were trained on. With kCarry the last of
// them may have samples of later epochs as well; epochs smaller than a batch end together.
[[nodiscard]] std::int64_t EndOfEpoch(const Sampler& sampler, std::int64_t epoch);

// How many samples of an epoch a step trains on.
[[nodiscard]] std::int64_t SamplesIn(const Sampler& sampler, std::int64_t step, std::int64_t epoch);

// Throws InputError naming `where` when no batch can be filled.
void CheckSampler(const Sampler& sampler, const std::string& where);

// A permutation of 0 .. size - 1 chosen by `key`, computed for one index without a table: a Feistel
// network on the next power of four, walked until it lands inside. O(1) expected.
[[nodiscard]] std::int64_t Permuted(std::int64_t index, std::int64_t size, std::uint64_t key);

}  // namespace shardwright
