#pragma once

// Table lookups. The gradient of a table row is one sum over the positions that looked it up, in
// order and without atomics: every position is linked to the next one with its id, and a block
// walks each list.

#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

struct EmbeddingArgs {
  const std::int64_t* ids = nullptr;
  std::int64_t rows = 0, features = 0, vocab = 0;
  std::int64_t index_offset = 0;  // added to every id
  Array table = {}, y = {};
  Fault* fault = nullptr;
};

// Block per position. An id out of range is reported, and gets zeros.
struct EmbeddingKernel {
  static constexpr KernelId kId = KernelId::kEmbedding;
  using Args = EmbeddingArgs;
  static constexpr int kThreads = 128;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t position = block.index();
      const std::int64_t row = args.ids[position] + args.index_offset;
      const bool is_there = row >= 0 && row < args.vocab;
      if (!is_there && t == 0) {
        Report(args.fault, FaultKind::kTableRow, row, args.vocab);
      }
      for (std::int64_t i = t; i < args.features; i += kThreads) {
        const float value = is_there ? Load(args.table, row * args.features + i) : 0.0F;
        Store(args.y, position * args.features + i, value);
      }
    });
  }
};

// next[i] = the first position behind i with the same id, or -1; tails[j] = 1 where j is such a
// position, zero before. O(rows) per thread: 64 k positions are 4e9 comparisons.
struct EmbeddingLinksArgs {
  const std::int64_t* ids = nullptr;
  std::int64_t rows = 0;
  std::int64_t* next = nullptr;
  std::int64_t* tails = nullptr;  // by position: 1 where an earlier position links to it
};
struct EmbeddingLinksKernel {
  static constexpr KernelId kId = KernelId::kEmbeddingLinks;
  using Args = EmbeddingLinksArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= args.rows) {
        return;
      }
      const std::int64_t id = args.ids[i];
      std::int64_t j = i + 1;
      while (j < args.rows && args.ids[j] != id) {
        ++j;
      }
      args.next[i] = j < args.rows ? j : -1;
      if (j < args.rows) {
        args.tails[j] = 1;  // exactly one position links to j
      }
    });
  }
};

// Block per position; those that an earlier one links to have nothing to do. The gradient may hold
// `copies` arrays of all positions, of which the sum counts.
struct EmbeddingGradArgs {
  const std::int64_t* ids = nullptr;
  const std::int64_t* next = nullptr;
  const std::int64_t* tails = nullptr;
  std::int64_t rows = 0, features = 0, vocab = 0, index_offset = 0, copies = 1;
  std::int64_t padding_row = -1;  // gets no gradient
  Array dy = {}, grad = {};
  bool adds = false;
};
struct EmbeddingGradKernel {
  static constexpr KernelId kId = KernelId::kEmbeddingGrad;
  using Args = EmbeddingGradArgs;
  static constexpr int kThreads = 128;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t first = block.index();
      const std::int64_t row = args.ids[first] + args.index_offset;
      if (args.tails[first] != 0 || row < 0 || row >= args.vocab || row == args.padding_row) {
        return;
      }
      for (std::int64_t i = t; i < args.features; i += kThreads) {
        float sum = 0.0F;
        for (std::int64_t position = first; position >= 0; position = args.next[position]) {
          for (std::int64_t copy = 0; copy < args.copies; ++copy) {
            sum += Load(args.dy, (copy * args.rows + position) * args.features + i);
          }
        }
        StoreOrAdd(args.grad, row * args.features + i, sum, args.adds);
      }
    });
  }
};

}  // namespace shardwright::gpu
