// Which feature runs under which dialect, as a table: tests/conformance.md. Every cell that says
// "runs" was trained here and compared with unsharded data parallel. SHARDWRIGHT_UPDATE_GOLDEN=1
// rewrites the file; review the diff.

#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "schedule/plan.h"
#include "schedule/wrap.h"
#include "tests/executor/harness.h"
#include "tests/executor/tiny_training.h"

namespace shardwright::testing {
namespace {

constexpr std::int64_t kRanks = 4;

struct Feature {
  std::string name;
  std::function<void(Setup&)> make;    // of the run and of what it is compared with
  std::function<void(Setup&)> choose;  // of the run alone
  double tolerance = 100 * 6e-8 * 10;  // see runtime_test.cc
};

void Nothing(Setup& /*setup*/) {}

void Tie(Setup& s) {
  s.model = TinyNetwork(3, true);
  s.plan.units = Wrap(s.model, ParseWrap("root", "test"), {}, s.plan.dialect, "test");
}

void Freeze(Setup& s) {  // whole blocks, which every dialect can
  for (Parameter& p : s.model.params) {
    p.trainable = !p.fqn.starts_with("block1.");
  }
}

void FreezeMixed(Setup& s) {
  for (std::size_t p = 0; p < s.model.params.size(); p += 3) {
    s.model.params[p].trainable = false;
  }
}

void Nest(Setup& s) {
  UnitPlan inner = s.plan.units.front();
  inner.name = "block1.down";
  inner.modules = {"block1.down"};
  s.plan.units.insert(s.plan.units.begin(), inner);
}

void Half(Setup& s, DType dtype) {
  s.job.precision = {DType::kFp32, dtype, dtype};
}

std::vector<Feature> Features() {
  const double bf16 = 0.05;  // 8 bits of precision in every weight, activation and gradient
  return {
      {"plain", Nothing, Nothing},
      {"nested units", Nothing, Nest},
      {"tied parameters", Tie, Nothing},
      {"reshard to a smaller group", Nothing,
       [](Setup& s) {
         for (UnitPlan& unit : s.plan.units) {
           unit.reshard = {Reshard::Kind::kToGroup, 2};
         }
       }},
      {"keep gathered (reshard never)", Nothing,
       [](Setup& s) {
         for (UnitPlan& unit : s.plan.units) {
           unit.reshard = {Reshard::Kind::kNever, 0};
         }
       }},
      {"replicas of shards (HSDP)", Nothing,
       [](Setup& s) {
         s.plan.shard_size = 2;
         s.plan.replicate_size = 2;
       }},
      {"accumulation, sync every", [](Setup& s) { s.plan.accumulation = 3; }, Nothing},
      {"accumulation, sync last",
       [](Setup& s) {
         s.plan.accumulation = 3;
         s.plan.sync = SyncMode::kLast;
       },
       Nothing},
      {"accumulation, replicas last", [](Setup& s) { s.plan.accumulation = 3; },
       [](Setup& s) {
         s.plan.shard_size = 2;
         s.plan.replicate_size = 2;
         s.plan.sync = SyncMode::kReplicateLast;
       }},
      {"offload of parameters", Nothing, [](Setup& s) { s.plan.offload.parameters = true; }},
      {"offload of the optimizer", Nothing, [](Setup& s) { s.plan.offload.optimizer = true; }},
      {"offload of activations", Nothing, [](Setup& s) { s.plan.offload.activations = true; }},
      {"recompute", Nothing,
       [](Setup& s) {
         s.plan.recompute = RecomputeBlocks(s.model, RecomputeKind::kFull, 1, "test");
       }},
      {"clipping",
       [](Setup& s) {
         s.job.clip_gradients = true;
         s.training.clip_norm = 0.05;
       },
       Nothing},
      {"clipping with offload",
       [](Setup& s) {
         s.job.clip_gradients = true;
         s.training.clip_norm = 0.05;
       },
       [](Setup& s) { s.plan.offload.parameters = true; }},
      {"bf16 compute and reduction", Nothing, [](Setup& s) { Half(s, DType::kBf16); }, bf16},
      {"fp16 compute and reduction", Nothing, [](Setup& s) { Half(s, DType::kFp16); }, bf16},
      {"frozen units", Freeze, Nothing},
      {"frozen and trainable mixed", FreezeMixed, Nothing},
  };
}

// "runs", or why not.
std::string CellOf(const Feature& feature, Dialect dialect, const Outcome& expected) {
  Setup setup = TinySetup(dialect, kRanks);
  setup.job.optimizer.kind = OptimizerKind::kSgd;
  setup.training.optimizer.learning_rate = 0.5;
  try {
    feature.make(setup);
    feature.choose(setup);
    ValidatePlan(setup.model, setup.job, setup.plan, "plan");
    (void)ResolveUnits(setup.model, setup.plan, "plan");
  } catch (const InputError&) {
    return "not defined";
  }
  try {
    const Outcome outcome = Train(setup);
    const double difference = RelativeDifference(outcome, expected);
    if (!outcome.findings.empty() || !outcome.replicas_agree || !(difference < feature.tolerance)) {
      return "WRONG (" + std::to_string(difference) + ")";
    }
  } catch (const InputError& error) {
    return std::string("REFUSED: ") + error.what();
  }
  return "runs";
}

}  // namespace

TEST_CASE("Conformance: what runs under which dialect") {
  const std::vector<Dialect> dialects = {Dialect::kNative, Dialect::kFsdp2,    Dialect::kFsdp1,
                                         Dialect::kDdp,    Dialect::kZero1,    Dialect::kZero2,
                                         Dialect::kZero3,  Dialect::kFairscale};
  std::string text =
      "# What the executor runs\n\n"
      "Written by tests/executor/conformance_test.cc. *runs*: trained on 4 host ranks there, "
      "equal to unsharded data\nparallel within rounding. *not defined*: the framework has no such "
      "thing, and a plan that asks for it is refused.\n\n| feature |";
  std::string line = "|---|";
  for (const Dialect dialect : dialects) {
    text += " " + std::string(NameOf(dialect)) + " |";
    line += "---|";
  }
  text += "\n" + line + "\n";
  for (const Feature& feature : Features()) {
    Setup reference = TinySetup(Dialect::kDdp, kRanks);
    reference.job.optimizer.kind = OptimizerKind::kSgd;
    reference.training.optimizer.learning_rate = 0.5;
    feature.make(reference);
    const Outcome expected = Train(reference);
    text += "| " + feature.name + " |";
    for (const Dialect dialect : dialects) {
      const std::string cell = CellOf(feature, dialect, expected);
      CHECK_MESSAGE((cell == "runs" || cell == "not defined"),
                    (feature.name + " under " + std::string(NameOf(dialect)) + ": " + cell));
      text += " " + cell + " |";
    }
    text += "\n";
  }
  const std::string file = "conformance.md";
  if (std::getenv("SHARDWRIGHT_UPDATE_GOLDEN") != nullptr) {
    WriteFileAtomically(file, text);
  }
  CHECK(ReadTextFile(file) == text);
}

}  // namespace shardwright::testing
