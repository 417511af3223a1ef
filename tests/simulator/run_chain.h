#pragma once

// Runs a lowered chain model with given durations.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "simulator/engine.h"
#include "tests/schedule/chain_model.h"

namespace shardwright::testing {

// Durations of the ops of one block, in picoseconds.
struct Durations {
  std::int64_t gather = 0, copy_out = 0, forward = 0, backward = 0, copy_in = 0, reduce = 0;
};

// Prices the ops of the blocks; the root's ops, the optimizer and all issuing cost nothing.
inline PriceTable BlockPrices(const Program& program, const Durations& d) {
  PriceTable table;
  table.prices.resize(program.shapes.size());
  for (const Op& op : program.step.ops) {
    const OpShape& shape = program.ShapeOf(op);
    std::int64_t& duration = table.prices[op.shape.value].duration.value;
    const bool of_model_op = shape.code == OpCode::kCompute;
    const std::string& subject = op.subject == kNoSubject ? std::string()
                                 : of_model_op            ? program.model_op_names[op.subject]
                                                          : program.units[op.subject].name;
    if (shape.code == OpCode::kAllReduce) {
      duration = d.reduce;  // of buckets, which belong to no block
    }
    if (subject.rfind("block", 0) != 0) {
      continue;
    }
    if (of_model_op) {
      duration = op.phase == Phase::kForward ? d.forward : d.backward;
    } else if (shape.code == OpCode::kAllGather) {
      duration = d.gather;
    } else if (shape.code == OpCode::kGatherCopyOut) {
      duration = d.copy_out;
    } else if (shape.code == OpCode::kReduceCopyIn) {
      duration = d.copy_in;
    } else if (shape.code == OpCode::kReduceScatter) {
      duration = d.reduce;
    }
  }
  return table;
}

struct Run {
  Program program;
  std::map<std::string, Span> spans;  // of the first step after a warm-up, by op name

  [[nodiscard]] std::int64_t Start(const std::string& op) const { return spans.at(op).start.value; }
  [[nodiscard]] std::int64_t End(const std::string& op) const { return spans.at(op).end.value; }
};

inline Run RunChain(const ChainSpec& spec, const Plan& plan, const Durations& d) {
  const Model model = ChainModel(spec);
  const Job job = ChainJob(spec, {DType::kFp32, DType::kFp32, DType::kFp32});
  Run run;
  run.program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  REQUIRE(Verify(run.program).empty());
  EngineWorkspace workspace;
  EngineOptions options;
  options.contention = false;
  std::vector<Span> spans;
  (void)RunEngineWithSpans(run.program, BlockPrices(run.program, d), options, workspace, spans);
  for (const Span& span : spans) {
    if (span.body == BodyKind::kStep) {
      run.spans.emplace(OpName(run.program, run.program.step.ops[span.op.value]), span);
    }
  }
  return run;
}

inline std::string Block(int i, const std::string& what) {
  return "mb0.block" + std::to_string(i) + "." + what;
}

}  // namespace shardwright::testing
