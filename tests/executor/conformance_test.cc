// Which feature runs under which dialect, as a table: tests/conformance.md. Every cell that says
// "runs" was trained here and lies within the bound of an fp64 oracle. SHARDWRIGHT_UPDATE_GOLDEN=1
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
#include "tests/executor/tiny_oracle.h"
#include "tests/executor/tiny_training.h"

namespace shardwright::testing {
namespace {

constexpr std::int64_t kRanks = 4;

struct Feature {
  std::string name;
  std::function<void(Setup&)> make;    // of the run and of what it is compared with
  std::function<void(Setup&)> choose;  // of the run alone
  double most_bound = 1e-3;            // of the largest weight; a looser one would say nothing
};

void Nothing(Setup& /*setup*/) {}

void Tie(Setup& s) {
  s.model = TinyNetwork(3, true);
  s.plan.units = Wrap(s.model, ParseWrap("root", "test"), {}, s.plan.dialect, "test");
}

// The blocks' parameters with this end of a name become one.
void TieAll(Setup& s, const std::string& end, const std::string& wrap) {
  ParamId first;
  for (std::size_t p = 0; p < s.model.params.size(); ++p) {
    Parameter& param = s.model.params[p];
    if (param.fqn.ends_with(end)) {
      param.tied_to = first;
      first = first.valid() ? first : ParamId(p);
    }
  }
  s.plan.units = Wrap(s.model, ParseWrap(wrap, "test"), {}, s.plan.dialect, "test");
}

void TieWeights(Setup& s) {
  TieAll(s, ".up.weight", s.plan.dialect == Dialect::kZero3 ? "module" : "root");
}

void TieBiases(Setup& s) {
  TieAll(s, ".down.bias", s.plan.dialect == Dialect::kZero3 ? "module" : "root");
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

// Few layers and one step: the bound grows with each, and must stay below what a step changes.
void Half(Setup& s, DType dtype) {
  s.job.precision = {DType::kFp32, dtype, dtype};
  s.model = TinyNetwork(1);
  const std::string wrap = s.plan.dialect == Dialect::kDdp ? "root" : "block";
  s.plan.units = Wrap(s.model, ParseWrap(wrap, "test"), {}, s.plan.dialect, "test");
  s.steps = 1;
}

std::vector<Feature> Features() {
  return {
      {"plain", Nothing, Nothing},
      {"nested units", Nothing, Nest},
      {"tied parameters", Tie, Nothing},
      {"tied weights beside biases of their own", TieWeights, Nothing},
      {"tied biases beside weights of their own", TieBiases, Nothing},
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
      {"offload of moments", Nothing, [](Setup& s) { s.plan.offload.moments = true; }},
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
      {"bf16 compute and reduction", [](Setup& s) { Half(s, DType::kBf16); }, Nothing, 0.03},
      {"fp16 compute and reduction", [](Setup& s) { Half(s, DType::kFp16); }, Nothing, 0.003},
      {"frozen units", Freeze, Nothing},
      {"frozen and trainable mixed", FreezeMixed, Nothing},
  };
}

// Two steps of gradient descent: more would make the bound wider, and tell no more.
Setup StartOf(Dialect dialect) {
  Setup setup = TinySetup(dialect, kRanks);
  setup.job.optimizer.kind = OptimizerKind::kSgd;
  setup.training.optimizer.learning_rate = 0.1;
  setup.steps = 2;
  return setup;
}

// "runs", or why not.
std::string CellOf(const Feature& feature, Dialect dialect, const Weights& oracle) {
  Setup setup = StartOf(dialect);
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
    const BoundUse use = CompareAll(outcome.weights, oracle);
    const bool is_tight = use.bound < feature.most_bound * use.largest;
    if (!outcome.findings.empty() || !outcome.replicas_agree || outcome.skipped_steps > 0 ||
        use.most > 1.0 || !is_tight) {
      return "WRONG (" + std::to_string(use.most) + " of a bound of " +
             std::to_string(use.bound / use.largest) + ")";
    }
  } catch (const InputError& error) {
    return std::string("REFUSED: ") + error.what();
  }
  return "runs";
}

}  // namespace

TEST_CASE("Conformance: what runs under which dialect") {
  const std::vector<Dialect> dialects = {Dialect::kNative, Dialect::kFsdp2, Dialect::kFsdp1,
                                         Dialect::kDdp,    Dialect::kZero1, Dialect::kZero2,
                                         Dialect::kZero3};
  std::string text =
      "# What the executor runs\n\n"
      "Written by tests/executor/conformance_test.cc. *runs*: trained on 4 host ranks there, "
      "within the derived bound\nof an fp64 oracle. *not defined*: the framework has no such "
      "thing, and a plan that asks for it is refused.\n\n| feature |";
  std::string line = "|---|";
  for (const Dialect dialect : dialects) {
    text += " " + std::string(NameOf(dialect)) + " |";
    line += "---|";
  }
  text += "\n" + line + "\n";
  for (const Feature& feature : Features()) {
    Setup reference = StartOf(Dialect::kDdp);
    feature.make(reference);
    const Weights oracle = TinyOracle(reference);
    text += "| " + feature.name + " |";
    for (const Dialect dialect : dialects) {
      const std::string cell = CellOf(feature, dialect, oracle);
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
