// Ranks that cut layers (tensor parallel) or tokens (context parallel) or have other layers each
// (pipeline parallel), run on the host: random decoders on random meshes. The expected values are
// those of one rank that has the whole model and reads all samples.

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "executor/data/batch.h"
#include "models/loader.h"
#include "models/trainable.h"
#include "schedule/lower.h"
#include "schedule/plan_file.h"
#include "schedule/plan_names.h"
#include "schedule/wrap.h"
#include "tests/executor/bounded.h"
#include "tests/executor/harness.h"
#include "tests/sanitizers.h"

namespace shardwright::testing {
namespace {

constexpr double kRate = 8.0;
constexpr std::int64_t kLength = 16;

enum class Cut : std::uint8_t {
  kLayers,
  kTokens,
  kStages,
  kSplitStages,  // with gradients of weights in passes of their own
};
bool HasStages(Cut cut_by) {
  return cut_by >= Cut::kStages;
}

// A model, whole, and a plan that cuts it.
struct Case {
  Model model;
  Plan plan;
  bool clips = false;
  Precision precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  std::string type, adapted, description;

  [[nodiscard]] Mesh mesh() const { return MeshOf(plan); }
};

template <class T, std::size_t N>
T OneOf(const std::array<T, N>& values, std::mt19937& random) {
  return values[random() % N];
}

// `layers` 0: 1 or 2.
Model DecoderOf(const std::string& type, std::mt19937& random, std::int64_t layers = 0) {
  const auto field = [](const char* name, std::int64_t value) {
    return ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  const auto flag = [&](const char* name) {
    return ", \"" + std::string(name) + "\": " + (random() % 2 == 0 ? "true" : "false");
  };
  std::string text = R"({"model_type": ")" + type + '"';
  const std::int64_t heads = OneOf(std::array{4, 8}, random);
  text += field("hidden_size", type == "opt" ? 24 : OneOf(std::array{16, 24, 40}, random)) +
          field("num_hidden_layers",
                layers > 0 ? layers : 1 + static_cast<std::int64_t>(random() % 2)) +
          field("num_attention_heads", heads) +
          field("num_key_value_heads",
                std::min(heads, OneOf(std::array<std::int64_t, 3>{2, 4, 8}, random))) +
          field("head_dim", OneOf(std::array{4, 8}, random)) +
          field("intermediate_size", OneOf(std::array{20, 36}, random)) +
          field("vocab_size", OneOf(std::array{40, 52}, random)) +
          field("max_position_embeddings", 64) +
          (layers > 0 ? R"(, "tie_word_embeddings": false)" : flag("tie_word_embeddings"));
  if (type == "llama") {
    text += flag("attention_bias") + flag("mlp_bias");
    text += random() % 2 == 0 ? R"(, "rope_theta": 100.0)" : "";
  }
  if (type == "mistral") {
    text += field("sliding_window", 5);
  }
  if (type == "opt") {
    text += field("ffn_dim", 28) + R"(, "do_layer_norm_before": true, "dropout": 0.0)" +
            R"(, "activation_function": "gelu", "word_embed_proj_dim": 24)";
  }
  if (type == "gpt_neox") {
    text += R"(, "rotary_pct": 1.0)";
  }
  if (type == "phi3") {
    text += R"(, "pad_token_id": 0)";
  }
  if (type == "gpt2") {
    text += R"(, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0)";
  }
  if (type == "mixtral") {
    text += field("num_local_experts", 4) + field("num_experts_per_tok", 2);
  }
  LoadOptions options;
  options.sequence_length = kLength;
  return ModelFromJson(JsonValue::Parse(text + "}", "test"), type, options);
}

// Their last matrices start at random instead of at zero, for gradients of the first ones.
void AddAdapters(Model& model, const std::vector<std::string>& targets, std::int64_t rank) {
  ApplyTrainable(model, {.lora_rank = rank, .lora_targets = targets}, Path("job"));
  for (Parameter& param : model.params) {
    if (param.fqn.ends_with("lora_B.weight")) {
      param.fqn += "_2";
    }
  }
}

// On some or all products, of one model in three.
void DrawAdapters(Case& c, std::mt19937& random) {
  if (random() % 3 != 0) {
    return;
  }
  std::vector<std::string> targets;
  for (const ModelOp& op : c.model.ops) {
    const std::string& name = c.model.modules[FirstNameOf(c.model, op.module).value].name;
    if (c.model.SpecOf(op).kind == OpKind::kLinear && name != "lm_head" &&
        (targets.empty() || random() % 2 == 0) &&
        std::find(targets.begin(), targets.end(), name) == targets.end()) {
      targets.push_back(name);
    }
  }
  AddAdapters(c.model, targets, 3);
  c.adapted = ", adapters";
}

// In bf16 roundings swap close scores of a router: one rank's run is then another network's.
void ChooseAllExperts(Model& model) {
  for (OpSpec& spec : model.specs) {
    spec.experts_per_token = spec.experts;
  }
}

void CutAndWrap(Case& c) {
  Model cut = c.model;
  CutForPlan(cut, {}, c.plan, {"ep", "tp", "cp"});
  c.plan.units = Wrap(cut, ParseWrap("block", "test"), {}, c.plan.dialect, "test");
  AddExpertUnits(cut, c.plan.units);
}

// 2 or 4 stages, or twice as many, by a schedule that has them; beside them the cuts of a stage.
void DrawPipeline(Case& c, std::mt19937& random, bool is_split) {
  Plan& plan = c.plan;
  plan.pipeline_size = OneOf(std::array{2, 4}, random);
  plan.pipeline_schedule =
      OneOf(std::array{PipelineSchedule::kGPipe, PipelineSchedule::k1F1B,
                       PipelineSchedule::kInterleaved1F1B, PipelineSchedule::kLoopedBfs},
            random);
  if (is_split) {
    plan.pipeline_schedule =
        OneOf(std::array{PipelineSchedule::kInterleavedZeroBubble, PipelineSchedule::kZbvZeroBubble,
                         PipelineSchedule::kDualPipeV},
              random);
  }
  if (IsVShaped(plan.pipeline_schedule)) {
    plan.pipeline_stages = 2;
  } else if (plan.pipeline_schedule > PipelineSchedule::k1F1B) {
    plan.pipeline_stages = OneOf(std::array{1, 2}, random);
  }
  const int blocks = OneOf(std::array{3, 6, 7}, random);
  c.model = DecoderOf(c.type, random, blocks);
  if (!is_split) {
    DrawAdapters(c, random);
  }
  if (blocks >= plan.pipeline_size * plan.pipeline_stages) {
    plan.pipeline_edge_layers = OneOf(std::array{0, 1}, random);
  }
  plan.shard_size = OneOf(std::array{1, 2}, random);
  plan.replicate_size = OneOf(std::array{1, 1, 2}, random);
  plan.sync = SyncMode::kLast;
  plan.accumulation = plan.pipeline_size * OneOf(std::array{1, 2}, random) +
                      static_cast<std::int64_t>(random() % 2);
  if (!is_split && random() % 4 == 0) {
    plan.dialect = Dialect::kDdp;
    plan.replicate_size *= std::exchange(plan.shard_size, 1);
  } else if (const auto beside = random() % 4; beside == 0) {
    plan.tensor_size = 2;
  } else if (beside == 1) {
    plan.context_size = plan.shard_size = 2;
    plan.context_method = OneOf(std::array{ContextMethod::kGather, ContextMethod::kRing}, random);
  } else if (beside == 2 && c.type == "mixtral") {
    plan.expert_size = plan.shard_size = 2;
  }
}

const char* DrawType(std::mt19937& random, Cut cut_by) {
  return cut_by == Cut::kTokens || cut_by == Cut::kStages
             ? OneOf(std::array{"llama", "qwen2", "qwen3", "mistral", "gemma", "mixtral"}, random)
         : cut_by == Cut::kSplitStages
             ? OneOf(std::array{"llama", "qwen2", "qwen3", "gemma", "mixtral", "gpt_neox", "gpt2",
                                "opt"},
                     random)
             : OneOf(std::array{"llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt2",
                                "gpt_neox", "opt"},
                     random);
}

// May be a plan that is refused.
Case Draw(std::mt19937& random, Cut cut_by) {
  const bool cuts_tokens = cut_by == Cut::kTokens;
  Case c;
  c.type = DrawType(random, cut_by);
  c.model = DecoderOf(c.type, random);
  if (!HasStages(cut_by)) {
    DrawAdapters(c, random);
  }
  c.plan.dialect = Dialect::kFsdp2;
  const std::int64_t ranks = OneOf(std::array{2, 4}, random);
  c.plan.shard_size = 1 + static_cast<std::int64_t>(random() % 4);
  if (cuts_tokens) {
    c.plan.context_size = ranks;
    c.plan.shard_size *= ranks;
    c.plan.tensor_size = random() % 3 == 0 ? 2 : 1;
    c.plan.expert_size = c.type == "mixtral" && random() % 2 == 0 ? 2 : 1;
    c.plan.context_method = OneOf(std::array{ContextMethod::kGather, ContextMethod::kUlysses,
                                             ContextMethod::kRing, ContextMethod::kRingGather},
                                  random);
  } else {
    c.plan.tensor_size = ranks;
  }
  c.plan.replicate_size = 1 + static_cast<std::int64_t>(random() % 2);
  c.plan.micro_batch = 1 + static_cast<std::int64_t>(random() % 2);
  c.plan.accumulation = 1 + static_cast<std::int64_t>(random() % 2);
  c.plan.sync =
      OneOf(std::array{SyncMode::kEvery, SyncMode::kLast, SyncMode::kReplicateLast}, random);
  if (HasStages(cut_by)) {
    c.plan.tensor_size = 1;
    DrawPipeline(c, random, cut_by == Cut::kSplitStages);
  }
  // Gradients of several micro-batches in a dtype of their own.
  if (random() % 4 == 0) {
    c.precision.param = DType::kBf16;
    ChooseAllExperts(c.model);
  }
  CutAndWrap(c);
  if (c.plan.dialect == Dialect::kDdp) {
    c.plan.units = Wrap(c.model, ParseWrap("root", "test"), {}, Dialect::kDdp, "test");
  } else if (random() % 3 == 0 || HasStages(cut_by)) {
    for (UnitPlan& unit : c.plan.units) {
      unit.reshard = {Reshard::Kind::kNever, 0};
    }
  }
  if (cut_by != Cut::kSplitStages && random() % 2 == 0) {
    Model cut = c.model;
    CutForPlan(cut, {}, c.plan, {"ep", "tp", "cp"});
    const auto kind = random() % 2 == 0 ? RecomputeKind::kFull : RecomputeKind::kSelective;
    c.plan.recompute = RecomputeBlocks(cut, kind, 1, "test");
  }
  c.clips = random() % 3 == 0;
  c.description =
      c.type + ", shard " + std::to_string(c.plan.shard_size) + " x " +
      std::to_string(c.plan.replicate_size) + ", tp=" + std::to_string(c.plan.tensor_size) +
      ", cp=" + std::to_string(c.plan.context_size) + ", ep=" + std::to_string(c.plan.expert_size) +
      " by " + std::string(NameIn(kContextMethodNames, c.plan.context_method)) + ", micro-batch " +
      std::to_string(c.plan.micro_batch) + " x " + std::to_string(c.plan.accumulation) + ", " +
      std::to_string(c.plan.recompute.size()) + " regions" + (c.clips ? ", clipped" : "") +
      (c.precision.param == DType::kBf16 ? ", bf16" : "") + c.adapted;
  if (HasStages(cut_by)) {
    c.description += ", pp=" + std::to_string(c.plan.pipeline_size) + "x" +
                     std::to_string(c.plan.pipeline_stages) + ":" +
                     std::string(NameIn(kPipelineScheduleNames, c.plan.pipeline_schedule)) +
                     (c.plan.pipeline_edge_layers == 0 ? ":even" : "") +
                     (c.plan.dialect == Dialect::kDdp ? ", ddp" : "");
  }
  return c;
}

// The job with this plan. Plain descent; the last step alone changes the weights.
Setup SetupOf(const Case& c, const Plan& plan) {
  Setup s = DescentSetup(c.model, 1e-50);  // 0 in fp32
  CutForPlan(s.model, {}, plan, {"ep", "tp", "cp"});
  s.plan = plan;
  const bool is_whole = plan.context_size == 1 || SplitsBackward(plan.pipeline_schedule);
  s.loss_chunks = is_whole ? 1 : 1 + plan.micro_batch;
  s.job.precision = c.precision;
  s.job.sequence_length = kLength;
  s.job.clip_gradients = c.clips;
  s.training.clip_norm = 0.05;
  s.training.schedule = {.kind = ScheduleKind::kStep, .gamma = kRate * 1e50};
  s.steps = 2;
  const std::shared_ptr<Dataset> data = OpenDataset("random:64", s.model, 3);
  const Sampler sampler{data->size(),
                        MeshOf(plan).DataCount() * plan.micro_batch * plan.accumulation};
  s.run.inputs = [data, sampler](const BatchKey& key, std::span<const View> views) {
    WriteBatch(*key.model, *data, sampler, {key.step, key.first_sample, key.count, key.cut}, views);
  };
  return s;
}

Case DrawLegal(std::mt19937& random, Cut cut_by) {
  while (true) {
    try {
      Case c = Draw(random, cut_by);
      if (c.mesh().RankCount() > 8) {
        continue;
      }
      (void)LowerAllStages(SetupOf(c, c.plan));
      return c;
    } catch (const InputError& refused) {
      if (std::getenv("SHARDWRIGHT_VERBOSE") != nullptr) {
        MESSAGE("refused: " << std::string(refused.what()));
      }
      continue;
    }
  }
}

// One rank that has it all: the same micro-batches, each whole.
Plan WholePlan(const Case& c) {
  Plan plan;
  plan.dialect = Dialect::kFsdp2;
  plan.micro_batch = c.plan.micro_batch * c.mesh().DataCount();
  plan.accumulation = c.plan.accumulation;
  plan.units = Wrap(c.model, ParseWrap("root", "test"), {}, plan.dialect, "test");
  return plan;
}

// A sum of n terms in another order, or cut in two, differs by Gamma(2 n) of its terms' magnitude.
// Here n is at most the rows of the batch and a hundred features; some forty such sums stand one
// behind the other between the first layer's loss and the first layer's gradients. In bf16 a number
// has 16 bits less.
double Bound(const Case& c) {
  const auto rows = static_cast<double>(c.mesh().DataCount() * c.plan.micro_batch *
                                        c.plan.accumulation * kLength);
  return c.precision.param == DType::kBf16 ? 0.125 : 40.0 * Gamma(2.0 * (rows + 100.0));
}

struct Worst {
  double update = 0.0, loss = 0.0, update16 = 0.0;
  std::map<std::string, int> types;
};

void Check(const Case& c, Worst& worst) {
  CAPTURE(c.description);
  if (std::getenv("SHARDWRIGHT_VERBOSE") != nullptr) {
    MESSAGE(c.description);
  }
  const Setup whole = SetupOf(c, WholePlan(c));
  Setup setup = SetupOf(c, c.plan);
  const Outcome expected = Train(whole);
  const Outcome outcome = Train(setup);
  CHECK(outcome.findings == std::vector<std::string>{});
  CHECK(outcome.replicas_agree);
  REQUIRE(outcome.losses.size() == expected.losses.size());
  const bool is_narrow = c.precision.param == DType::kBf16;
  for (std::size_t s = 0; s < outcome.losses.size(); ++s) {
    const double difference = std::abs(outcome.losses[s] / expected.losses[s] - 1.0);
    CHECK(difference < (is_narrow ? 0.01 : 16 * kUnit));
    worst.loss = is_narrow ? worst.loss : std::max(worst.loss, difference);
  }
  REQUIRE(outcome.norms.size() == (c.clips ? outcome.losses.size() : 0));
  for (std::size_t s = 0; s < outcome.norms.size(); ++s) {  // large tensors decide it
    CHECK(std::abs(outcome.norms[s] / expected.norms[s] - 1.0) < Bound(c) / 16);
  }
  setup.steps = 0;
  const double difference = UpdateDifference(outcome, expected, Train(setup));
  CHECK(difference < Bound(c));
  double& most = is_narrow ? worst.update16 : worst.update;
  most = std::max(most, difference / Bound(c));
  ++worst.types[c.type];
}

void CheckRandom(Cut cut_by) {
  const char* const deep = std::getenv("SHARDWRIGHT_DEEP");
  const int most = HasStages(cut_by) ? 300 : 150;
  const int count = deep != nullptr ? most : kHasSanitizer ? 3 : 10;
  std::mt19937 random(20261130);
  Worst worst;
  for (int i = 0; i < count; ++i) {
    Check(DrawLegal(random, cut_by), worst);
  }
  std::string types;
  for (const auto& [type, jobs] : worst.types) {
    types += " " + type + " " + std::to_string(jobs);
  }
  MESSAGE(count << " jobs:" << types << "; the largest difference of an update is " << worst.update
                << " of its bound, in bf16 " << worst.update16 << ", of a loss " << worst.loss);
  CHECK(worst.update > 1e-4);  // a bound that anything passes would be worth nothing
}

}  // namespace

TEST_CASE("cut layers: random decoders train like one rank") {
  CheckRandom(Cut::kLayers);
}

TEST_CASE("cut tokens: random decoders train like one rank") {
  CheckRandom(Cut::kTokens);
}

TEST_CASE("pipelines: random decoders train like one rank") {
  CheckRandom(Cut::kStages);
}

TEST_CASE("pipelines: gradients of weights in passes of their own train like one rank") {
  CheckRandom(Cut::kSplitStages);
}

TEST_CASE("pipelines: experts that ranks share out keep their numbers of rows and count once") {
  std::mt19937 random(3);
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B, PipelineSchedule::kInterleavedZeroBubble,
        PipelineSchedule::kZbvZeroBubble, PipelineSchedule::kDualPipeV}) {
    Case c;
    c.type = "mixtral";
    c.model = DecoderOf(c.type, random, 3);
    c.plan.dialect = Dialect::kFsdp2;
    c.plan.shard_size = c.plan.expert_size = c.plan.pipeline_size = 2;
    c.plan.pipeline_schedule = schedule;
    c.plan.pipeline_stages = IsVShaped(schedule) ? 2 : 1;
    c.plan.micro_batch = 2;
    c.plan.accumulation = SplitsBackward(schedule) ? 4 : 3;
    c.plan.sync = SyncMode::kLast;
    c.clips = true;
    CutAndWrap(c);
    for (UnitPlan& unit : c.plan.units) {
      unit.reshard = {Reshard::Kind::kNever, 0};
    }
    Worst worst;
    Check(c, worst);
  }
}

// Runs with `kernel`, or with a program in which a group's collectives of one kind and phase do
// nothing, and tells how far its updates are from one rank's, over the bound.
double ShareOfBound(const Case& c, const ModelKernel& kernel, OpCode lost = OpCode::kCompute,
                    Phase phase = Phase::kBackward) {
  const Outcome expected = Train(SetupOf(c, WholePlan(c)));
  Setup setup = SetupOf(c, c.plan);
  setup.kernel = kernel;
  const Program legal = LowerSetup(setup);
  Program program = legal;
  int count = 0;
  for (Op& op : program.step.ops) {
    const OpShape& shape = program.ShapeOf(op);
    if (shape.code == lost && op.phase == phase && shape.group.valid() &&
        (program.groups[shape.group.value].name == "tp" ||
         program.groups[shape.group.value].name == "cp")) {
      OpShape nothing;
      nothing.code = OpCode::kStreamWait;
      nothing.stream = shape.stream;
      program.shapes.push_back(nothing);
      op.shape = ShapeId(program.shapes.size() - 1);
      ++count;
    }
  }
  CHECK((lost == OpCode::kCompute || count > 0));
  const Outcome outcome = TrainProgram(setup, program, legal);
  setup.kernel = HostKernel;
  setup.steps = 0;
  return UpdateDifference(outcome, expected, Train(setup)) / Bound(c);
}

// The host's kernels, but those of `kind` at another place.
ModelKernel Displaced(OpKind kind, CutPlace place) {
  return [=](const ModelOpCall& call, bool is_backward) {
    ModelOpCall changed = call;
    if (call.spec->kind == kind) {
      changed.cut = place;
    }
    HostKernel(changed, is_backward);
  };
}

TEST_CASE("cuts: planted faults are far from one rank's run") {
  std::mt19937 random(5);
  Case c;
  c.model = DecoderOf("qwen3", random);
  while (c.model.params.size() < 20) {  // two layers
    c.model = DecoderOf("qwen3", random);
  }
  c.plan.dialect = Dialect::kFsdp2;
  c.plan.shard_size = 2;
  c.plan.micro_batch = 2;
  const auto cut = [](Case& of, std::int64_t tensor, std::int64_t context, bool clips) {
    of.plan.tensor_size = tensor;
    of.plan.context_size = context;
    of.clips = clips;
    CutAndWrap(of);
  };
  cut(c, 1, 2, false);
  CHECK(ShareOfBound(c, HostKernel) < 1.0);
  for (const OpKind kind : {OpKind::kRope, OpKind::kAttention, OpKind::kGatherTokens}) {
    CAPTURE(static_cast<int>(kind));
    CHECK(ShareOfBound(c, Displaced(kind, {0, 0, 1})) > 10.0);
  }
  CHECK(ShareOfBound(c, HostKernel, OpCode::kReduceScatter) > 10.0);
  cut(c, 2, 1, false);
  CHECK(ShareOfBound(c, HostKernel) < 1.0);
  for (const OpKind kind : {OpKind::kEmbedding, OpKind::kCrossEntropy}) {
    CAPTURE(static_cast<int>(kind));
    CHECK(ShareOfBound(c, Displaced(kind, {0, 0, 1})) > 10.0);
  }
  CHECK(ShareOfBound(c, HostKernel, OpCode::kAllReduce) > 10.0);  // of the norms' gradients
  cut(c, 2, 1, true);
  CHECK(ShareOfBound(c, HostKernel) < 1.0);
  CHECK(ShareOfBound(c, HostKernel, OpCode::kAllReduce, Phase::kOptimizer) > 10.0);
  // With adapters no norm learns: lost are the sums of their whole matrices' gradients.
  for (const char* const target : {"q_proj", "down_proj"}) {
    CAPTURE(target);
    Case adapted = c;
    AddAdapters(adapted.model, {target}, 2);
    cut(adapted, 2, 1, false);
    CHECK(ShareOfBound(adapted, HostKernel) < 1.0);
    CHECK(ShareOfBound(adapted, HostKernel, OpCode::kAllReduce) > 10.0);
  }
}

TEST_CASE("cuts: random delays change no bit") {
  std::mt19937 random(11);
  const bool is_deep = std::getenv("SHARDWRIGHT_DEEP") != nullptr;
  for (int i = 0; i < (is_deep ? 60 : 3); ++i) {
    const Case c = DrawLegal(random, static_cast<Cut>(i % 3));
    CAPTURE(c.description);
    Setup setup = SetupOf(c, c.plan);
    const Outcome expected = Train(setup);
    for (int run = 0; run < 3; ++run) {
      setup.host.delay_percent = 10 + static_cast<int>(random() % 40);
      setup.host.max_delay = std::chrono::microseconds(20 + random() % 300);
      setup.host.delay_seed = random();
      const Outcome outcome = Train(setup);
      CHECK(outcome.weights == expected.weights);
      CHECK(outcome.losses == expected.losses);
      CHECK(outcome.findings == std::vector<std::string>{});
    }
  }
}

}  // namespace shardwright::testing
