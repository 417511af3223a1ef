// Verify and Place on lowered programs of every dialect, against the brute-force order.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "models/loader.h"
#include "models/model.h"
#include "schedule/lower.h"
#include "schedule/place.h"
#include "schedule/plan.h"
#include "schedule/plan_names.h"
#include "schedule/program.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/check_mutants.h"
#include "tests/schedule/check_placement.h"
#include "tests/schedule/random_plan.h"

namespace shardwright {
namespace {

using testing::DrawCase;
using testing::DrawMatrixRule;
using testing::LowerCase;
using testing::RandomCase;

// The next random lowered program with at most `max_ops` ops in its bodies: the brute force needs
// time and memory that grow with the square.
Program DrawProgram(std::mt19937& random, std::size_t max_ops, std::string& description) {
  for (;;) {
    RandomCase c = DrawCase(random);
    DrawMatrixRule(random, c);
    Program program = LowerCase(c);
    if (program.init.size() + program.warmup.size() + program.step.size() <= max_ops) {
      description = c.description;
      return program;
    }
  }
}

// SHARDWRIGHT_ALL_MUTANTS=1 looks at all mutants instead of a sample: minutes instead of seconds.
std::size_t Stride() {
  return std::getenv("SHARDWRIGHT_ALL_MUTANTS") != nullptr ? 1 : 29;
}

TEST_CASE("Verify judges mutants of 200 random lowered programs as the brute force does") {
  std::mt19937 random(20260101);
  MutantCounts counts;
  std::map<std::string, int> programs;
  for (int trial = 0; trial < 200; ++trial) {
    std::string description;
    const Program program = DrawProgram(random, 200, description);
    CAPTURE(trial);
    CAPTURE(description);
    ++programs[program.dialect];
    CheckMutants(program, counts, Stride());
  }
  CHECK(programs.size() == kDialectNames.size());
  for (const Mutation mutation :
       {Mutation::kDeleteEdge, Mutation::kDeleteEvent, Mutation::kMoveFreeEarlier,
        Mutation::kDropPoint, Mutation::kDuplicatePoint, Mutation::kSwitchSide}) {
    CAPTURE(static_cast<int>(mutation));
    CHECK(counts.illegal[mutation] > 0);
  }
  MESSAGE(counts.Text());
}

TEST_CASE("Place: whoever shares bytes is ordered, in lowered programs") {
  struct Ratios {
    int count = 0;
    double sum = 0.0;
    double worst = 0.0;
  };
  std::map<std::string, Ratios> ratios;
  std::mt19937 random(20260102);
  for (int trial = 0; trial < 200; ++trial) {
    std::string description;
    const Program program = DrawProgram(random, 500, description);
    CAPTURE(trial);
    CAPTURE(description);
    const Placement placement = CheckPlacement(program);
    const Bytes peak = PeakAllocated(program);
    if (peak >= kMiB) {  // below that the alignment of small buffers decides
      Ratios& entry = ratios[program.dialect];
      ++entry.count;
      entry.sum += Ratio(placement.device_size, peak);
      entry.worst = std::max(entry.worst, Ratio(placement.device_size, peak));
    }
  }
  for (const auto& [dialect, entry] : ratios) {
    MESSAGE(dialect, ": arena over allocated peak in ", entry.count, " programs: mean ",
            entry.sum / entry.count, ", worst ", entry.worst);
  }
}

// Llama-3-8B on 8 GPUs, each block a unit, with and without recomputation.
Program LowerLlama(Dialect dialect, bool recomputes, bool bounded_memory) {
  const Model model = LoadModel("llama-3-8b", {2048});
  Job job;
  job.sequence_length = 2048;
  Plan plan;
  plan.dialect = dialect;
  plan.shard_size = dialect == Dialect::kDdp ? 1 : 8;
  plan.replicate_size = dialect == Dialect::kDdp ? 8 : 1;
  plan.bounded_memory = bounded_memory;
  plan.units = Wrap(model, ParseWrap(DefaultWrap(dialect), "test"), {}, dialect, "test");
  if (recomputes) {
    plan.recompute = RecomputeBlocks(model, RecomputeKind::kFull, 1, "test");
  }
  return Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
}

TEST_CASE("Verify: an in-place rope on a packed tensor") {
  // GPT-NeoX rotates q and k out of one packed tensor: the second output has no input of its own.
  const Model model = LoadModel("pythia-70m", {64});
  Job job;
  job.sequence_length = 64;
  Plan plan;
  plan.dialect = Dialect::kNative;
  plan.shard_size = 4;
  plan.units = Wrap(model, ParseWrap(DefaultWrap(plan.dialect), "test"), {}, plan.dialect, "test");
  for (const char* set : {"shardwright-cuda", "shardwright-host"}) {
    CAPTURE(set);
    const Program program = Lower({model, FindKernelSet(set, "test"), job, plan});
    const auto findings = Verify(program);
    CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
  }
}

// Bytes that kernels of a step read and write, and ops with kernels.
struct Traffic {
  std::int64_t bytes = 0, ops = 0;
};
Traffic TrafficOf(const LowerInput& in) {
  const Program program = Lower(in);
  const auto findings = Verify(program);
  CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
  Traffic traffic;
  for (const Op& op : program.step.ops) {
    const auto kernels = program.KernelsOf(program.ShapeOf(op));
    traffic.ops += kernels.empty() ? 0 : 1;
    for (const Kernel& kernel : kernels) {
      traffic.bytes += (kernel.read + kernel.written).value;
    }
  }
  return traffic;
}

// A layer has two residuals. A sum and the norm behind it read and write e less together, and a
// norm's gradient and the sum with the one that came past it 2 e (the norm's is neither written nor
// read again). The model's last norm has a sum before it and no gradient beside its own.
TEST_CASE("Verify: norms that make the sums before them") {
  struct Case {
    const char* model;
    std::int64_t layers, width;
    const char* last_norm;
    std::int64_t adding;  // linear layers of a layer that add to a gradient: k, q and gate
  };
  for (const Case& c : {Case{"gpt2", 12, 768, "transformer.ln_f.weight", 0},
                        Case{"llama-3-8b", 32, 4096, "model.norm.weight", 3}}) {
    CAPTURE(c.model);
    Model model = LoadModel(c.model, {64});
    const KernelSetOptions plain = FindKernelSet("shardwright-cuda-plain", "test");
    KernelSetOptions fused = plain;
    fused.fused_residual = true;
    Job job;
    job.sequence_length = 64;
    Plan plan;
    plan.dialect = Dialect::kNative;
    plan.shard_size = 4;
    plan.micro_batch = 2;
    plan.units =
        Wrap(model, ParseWrap(DefaultWrap(plan.dialect), "test"), {}, plan.dialect, "test");
    const std::int64_t e = 2 * 64 * c.width * SizeOf(job.precision.param);
    // Products that add: a sum apart reads two and writes one, and the product writes before it.
    const std::int64_t products = c.layers * c.adding;
    const auto check = [&](std::int64_t bytes, std::int64_t ops) {
      const Traffic apart = TrafficOf({model, plain, job, plan});
      const Traffic together = TrafficOf({model, fused, job, plan});
      CHECK(apart.bytes - together.bytes == bytes);
      CHECK(apart.ops - together.ops == ops);
    };
    check(2 * c.layers * (e + 2 * e) + products * 2 * e, 2 * c.layers * 2 + products);
    plan.offload.activations = true;
    check(2 * c.layers * (e + 2 * e) + products * 2 * e, 2 * c.layers * 2 + products);
    plan.offload.activations = false;
    // Blocks run again one by one: the sum that one ends with and the next one's norm stay apart,
    // and the pair inside a block saves twice.
    for (const RecomputeKind kind : {RecomputeKind::kFull, RecomputeKind::kSelective}) {
      plan.recompute = RecomputeBlocks(model, kind, 1, "test");
      check(c.layers * (e + e) + 2 * c.layers * 2 * e + products * 2 * e,
            c.layers * 2 + 2 * c.layers + products);
    }
    plan.recompute.clear();
    job.mode = JobMode::kForward;
    check(2 * c.layers * e, 2 * c.layers);
    job.mode = JobMode::kTrain;
    for (Parameter& p : model.params) {
      p.trainable = p.fqn == c.last_norm;
    }
    check(2 * c.layers * e, 2 * c.layers);
  }
}

// Units that begin before a checkpointed block, or end behind it, with other parts of it elsewhere:
// what it runs again is gathered again, too.
TEST_CASE("Verify: units that reach into recomputed blocks") {
  const Model model = testing::ChainModel({.blocks = 3, .linears = 2});
  Plan plan;
  plan.shard_size = 4;
  plan.recompute = RecomputeBlocks(model, RecomputeKind::kFull, 1, "test");
  plan.units = {{"a", {"stem", "block0.lin0"}, {}, Gap::kHold, false, {}, {}},
                {"b", {"block0.lin1", "block1.lin0"}, {}, Gap::kHold, false, {}, {}},
                {"c", {"block1.lin1", "block2.lin1"}, {}, Gap::kHold, false, {}, {}},
                {"root", {""}, {}, Gap::kHold, false, {}, {}}};
  const auto check = [&] {
    const Program program = Lower({model, FindKernelSet("torch-eager", "test"), Job(), plan});
    const auto findings = Verify(program);
    CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
  };
  plan.dialect = Dialect::kFsdp2;
  check();
  plan.dialect = Dialect::kNative;
  for (const Gap gap : {Gap::kHold, Gap::kRegather}) {
    plan.units[2].gap = gap;
    for (const Transfers transfers : {Transfers::kAtOnce, Transfers::kInTurn}) {
      plan.transfers = transfers;
      check();
    }
  }
}

TEST_CASE("Place: the arena of a real model is close to what it allocates") {
  // FSDP1 with bounded_memory: otherwise compute waits for no reduction before the
  // end of backward, so that fixed offsets cannot give the bytes of one gradient to the next
  // (PyTorch's allocator asks the device at run time whether they are free). ZeRO-3 is left out:
  // its gathers never wait for compute, either.
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kDdp, Dialect::kNative, Dialect::kFsdp1,
                                Dialect::kZero1, Dialect::kZero2}) {
    for (const bool recomputes : {false, true}) {
      CAPTURE(NameOf(dialect));
      CAPTURE(recomputes);
      const bool is_flat = dialect == Dialect::kFsdp1;
      const Program program = LowerLlama(dialect, recomputes, is_flat);
      const double ratio = Ratio(Place(program).device_size, PeakAllocated(program));
      CHECK(ratio <= 1.05);
      if (is_flat) {
        const Program unbounded = LowerLlama(dialect, recomputes, false);
        const double without = Ratio(Place(unbounded).device_size, PeakAllocated(unbounded));
        CHECK(without > ratio);
        MESSAGE("without bounded_memory: ", without);
      }
      const std::string name = std::string(NameOf(dialect)) + (recomputes ? ", recompute" : "");
      MESSAGE(name, ": ", ratio);
    }
  }
}

}  // namespace
}  // namespace shardwright
