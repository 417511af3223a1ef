#include "executor/data/sampler.h"

#include <algorithm>
#include <bit>

#include "core/error.h"
#include "core/units.h"
#include "executor/initialize.h"

namespace shardwright {
namespace {

// Steps of one epoch; not for kCarry, whose steps straddle epochs.
std::int64_t StepsPerEpoch(const Sampler& sampler) {
  return sampler.tail == EpochTail::kDrop ? sampler.dataset_size / sampler.global_batch
                                          : CeilDiv(sampler.dataset_size, sampler.global_batch);
}

}  // namespace

std::int64_t Permuted(std::int64_t index, std::int64_t size, std::uint64_t key) {
  SW_CHECK(index >= 0 && index < size, std::to_string(index) + " of " + std::to_string(size));
  // Two halves of `half_bits` bits, so that 4^half_bits >= size; the walk takes four rounds of the
  // network at most on average, since the domain is less than four times the range.
  const auto bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(size - 1)));
  const int half_bits = std::max(1, (bits + 1) / 2);
  const std::uint64_t mask = (std::uint64_t{1} << half_bits) - 1;
  auto value = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = value >> half_bits;
    std::uint64_t right = value & mask;
    for (std::uint64_t round = 0; round < 6; ++round) {
      const std::uint64_t mixed = Philox(key, right, round + 1).word[0] & mask;
      const std::uint64_t next = left ^ mixed;
      left = right;
      right = next;
    }
    value = (left << half_bits) | right;
  } while (value >= static_cast<std::uint64_t>(size));
  return static_cast<std::int64_t>(value);
}

SamplePlace SampleAt(const Sampler& sampler, std::int64_t step, std::int64_t place) {
  SamplePlace result;
  std::int64_t index = 0;
  if (sampler.tail == EpochTail::kCarry) {
    const std::int64_t position = step * sampler.global_batch + place;
    result.epoch = position / sampler.dataset_size;
    index = position % sampler.dataset_size;
  } else {
    const std::int64_t steps = StepsPerEpoch(sampler);
    result.epoch = step / steps;
    index = step % steps * sampler.global_batch + place;
    if (index >= sampler.dataset_size) {
      result.sample = -1;
      return result;
    }
  }
  result.sample = sampler.shuffle
                      ? Permuted(index, sampler.dataset_size,
                                 InitKey(sampler.seed, "epoch " + std::to_string(result.epoch)))
                      : index;
  return result;
}

std::int64_t EpochOf(const Sampler& sampler, std::int64_t step) {
  return sampler.tail == EpochTail::kCarry ? step * sampler.global_batch / sampler.dataset_size
                                           : step / StepsPerEpoch(sampler);
}

std::int64_t FirstStepOf(const Sampler& sampler, std::int64_t epoch) {
  return sampler.tail == EpochTail::kCarry ? epoch * sampler.dataset_size / sampler.global_batch
                                           : epoch * StepsPerEpoch(sampler);
}

std::int64_t EndOfEpoch(const Sampler& sampler, std::int64_t epoch) {
  return sampler.tail == EpochTail::kCarry
             ? CeilDiv((epoch + 1) * sampler.dataset_size, sampler.global_batch)
             : FirstStepOf(sampler, epoch + 1);
}

std::int64_t SamplesIn(const Sampler& sampler, std::int64_t step, std::int64_t epoch) {
  if (sampler.tail != EpochTail::kCarry) {
    const std::int64_t begin = (step - FirstStepOf(sampler, epoch)) * sampler.global_batch;
    return EpochOf(sampler, step) == epoch
               ? std::min(sampler.global_batch, sampler.dataset_size - begin)
               : 0;
  }
  const std::int64_t begin = std::max(step * sampler.global_batch, epoch * sampler.dataset_size);
  const std::int64_t end =
      std::min((step + 1) * sampler.global_batch, (epoch + 1) * sampler.dataset_size);
  return std::max<std::int64_t>(end - begin, 0);
}

void CheckSampler(const Sampler& sampler, const std::string& where) {
  if (sampler.dataset_size < 1) {
    throw InputError(where, "no samples", "at least one");
  }
  if (sampler.tail == EpochTail::kDrop && sampler.dataset_size < sampler.global_batch) {
    throw InputError(where, std::to_string(sampler.dataset_size) + " samples",
                     "at least the " + std::to_string(sampler.global_batch) +
                         " of a global batch, since incomplete batches are dropped");
  }
}

}  // namespace shardwright
