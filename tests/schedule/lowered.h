#pragma once

// Lowered programs of the chain model, and what tests ask about them.

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "tests/schedule/chain_model.h"

namespace shardwright::testing {

inline constexpr Precision kAllFp32{DType::kFp32, DType::kFp32, DType::kFp32};
inline constexpr Precision kMixed{DType::kFp32, DType::kBf16, DType::kFp32};
inline constexpr Precision kPure{DType::kBf16, DType::kBf16, DType::kBf16};

inline Program LowerChain(const ChainSpec& spec, const Plan& plan, Precision precision,
                          const std::function<void(Job&)>& change = {}) {
  const Model model = ChainModel(spec);
  Job job = ChainJob(spec, precision);
  if (change) {
    change(job);
  }
  Program program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  const auto findings = Verify(program);
  CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
  return program;
}

using Bytes64 = std::array<std::int64_t, kCategoryCount>;

// Bytes per category in a steady step when the op called `name` is issued (its own points taken).
inline Bytes64 AliveAt(const Program& program, const std::string& name) {
  Bytes64 alive{};
  std::vector<bool> exists(program.buffers.size(), false);
  const auto apply = [&](std::span<const MemoryPoint> points) {
    for (const MemoryPoint& p : points) {
      const Buffer& b = program.buffers[p.buffer.value];
      const bool begins = p.kind != PointKind::kFree;
      if (b.on_host || exists[p.buffer.value] == begins) {
        continue;
      }
      exists[p.buffer.value] = begins;
      alive[static_cast<std::size_t>(b.category)] += begins ? b.size.value : -b.size.value;
    }
  };
  apply(program.init.points);
  apply(program.step.points);  // the step before
  for (std::uint32_t i = 0; i < program.step.size(); ++i) {
    apply(program.step.PointsBefore(OpId(i)));
    if (OpName(program, program.step.ops[i]) == name) {
      return alive;
    }
  }
  FAIL("no op is called " << name);
  return alive;
}

inline std::int64_t Of(const Bytes64& alive, Category c) {
  return alive[static_cast<std::size_t>(c)];
}

inline std::int64_t Communication(const Bytes64& alive) {
  return Of(alive, Category::kAllGather) + Of(alive, Category::kUnshardedParameter) +
         Of(alive, Category::kUnshardedGradient) + Of(alive, Category::kReduceScatter);
}

inline int Count(const Program& p, OpCode code, const std::string& group = {}) {
  int count = 0;
  for (const Op& op : p.step.ops) {
    const OpShape& s = p.ShapeOf(op);
    count += s.code == code && (group.empty() || p.groups[s.group.value].name == group) ? 1 : 0;
  }
  return count;
}

// The op of block i in the first micro-batch.
inline std::string Block(int i, const std::string& what) {
  return "mb0.block" + std::to_string(i) + "." + what;
}

}  // namespace shardwright::testing
