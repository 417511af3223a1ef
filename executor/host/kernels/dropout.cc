#include "executor/host/kernels/dropout.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "executor/host/kernels/clones.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"

namespace shardwright {
namespace {

constexpr std::uint32_t kMultiplier0 = 0xD2511F53U;
constexpr std::uint32_t kMultiplier1 = 0xCD9E8D57U;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9U;
constexpr std::uint32_t kWeyl1 = 0xBB67AE85U;
constexpr int kRounds = 10;

// Counters that differ in their first word only, so that the rounds become vector code.
constexpr std::int64_t kBlocks = 64;
struct Blocks {
  std::array<std::array<std::uint32_t, kBlocks>, 4> words;
};

SHARDWRIGHT_CLONES void RunRounds(std::uint32_t key0, std::uint32_t key1, Blocks* blocks) {
  std::uint32_t* const w0 = blocks->words[0].data();
  std::uint32_t* const w1 = blocks->words[1].data();
  std::uint32_t* const w2 = blocks->words[2].data();
  std::uint32_t* const w3 = blocks->words[3].data();
  for (int round = 0; round < kRounds; ++round) {
    for (std::int64_t i = 0; i < kBlocks; ++i) {
      const std::uint64_t a = std::uint64_t{kMultiplier0} * w0[i];
      const std::uint64_t b = std::uint64_t{kMultiplier1} * w2[i];
      w0[i] = static_cast<std::uint32_t>(b >> 32U) ^ w1[i] ^ key0;
      w1[i] = static_cast<std::uint32_t>(b);
      w2[i] = static_cast<std::uint32_t>(a >> 32U) ^ w3[i] ^ key1;
      w3[i] = static_cast<std::uint32_t>(a);
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

// y = x times the factors of the call's elements, sample by sample.
void Apply(const ModelOpCall& call, const ConstView& x, const View& y) {
  const OpSpec& spec = *call.spec;
  const std::int64_t elements = spec.rows * spec.in;
  ForEachRowChunk(
      call.team, call.batch, elements,
      [&](std::int64_t sample, std::int64_t begin, std::int64_t n) {
        ChunkBuffer x_buffer;
        ChunkBuffer y_buffer;
        ChunkBuffer factors;
        const std::int64_t offset = sample * elements + begin;
        const float* const values = ReadFloats(x, offset, n, x_buffer.values.data());
        float* const result = ResultFloats(y, offset, y_buffer.values.data());
        if (call.is_training) {
          DropoutFactors(call.dropout, {sample, begin, n}, spec.dropout_p, factors.values.data());
          VectorProduct(values, factors.values.data(), result, n);
        } else {
          std::copy_n(values, n, result);
        }
        FinishFloats(result, n, y, offset);
      });
}

}  // namespace

std::array<std::uint32_t, 4> Philox(std::array<std::uint32_t, 4> counter,
                                    std::array<std::uint32_t, 2> key) {
  Blocks blocks;
  for (std::size_t i = 0; i < 4; ++i) {
    blocks.words[i].fill(counter[i]);
  }
  RunRounds(key[0], key[1], &blocks);
  return {blocks.words[0][0], blocks.words[1][0], blocks.words[2][0], blocks.words[3][0]};
}

void DropoutFactors(const DropoutKey& key, const DropoutRange& range, double p, float* factors) {
  const auto threshold = static_cast<std::uint32_t>(
      std::min(std::llround(p * 0x1p32), static_cast<long long>(0xffffffffU)));
  const auto keep = static_cast<float>(1.0 / (1.0 - p));
  const auto sample = static_cast<std::uint32_t>(key.first_sample + range.sample);
  for (std::int64_t done = 0; done < range.n; done += 4 * kBlocks) {
    Blocks blocks;
    const auto first = static_cast<std::uint32_t>((range.first + done) / 4);
    for (std::size_t i = 0; i < kBlocks; ++i) {
      blocks.words[0][i] = first + static_cast<std::uint32_t>(i);
    }
    blocks.words[1].fill(sample);
    blocks.words[2].fill(key.op);
    blocks.words[3].fill(static_cast<std::uint32_t>(key.step));
    RunRounds(static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32U),
              &blocks);
    const std::int64_t count = std::min(range.n - done, 4 * kBlocks);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t word =
          blocks.words[static_cast<std::size_t>(i % 4)][static_cast<std::size_t>(i / 4)];
      factors[done + i] = word < threshold ? 0.0F : keep;
    }
  }
}

void DropoutForward(const ModelOpCall& call) {
  Apply(call, call.inputs[0], call.outputs[0]);
}

void DropoutBackward(const ModelOpCall& call) {
  Apply(call, call.output_grads[0], call.input_grads[0]);
}

}  // namespace shardwright
