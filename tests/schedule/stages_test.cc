// Stages of a pipeline, lowered: whose layers they have, what they send, and what is refused. The
// order of actions is torch's in torch_pipeline_orders.py, the programs' in torch_pipeline.py.

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/cut_experts.h"
#include "models/cut_stage.h"
#include "models/cut_tensor.h"
#include "models/loader.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

struct Piped {
  Model model;
  Job job;
  Plan plan;

  [[nodiscard]] std::vector<Program> Lowered() const {
    return LowerStages({model, FindKernelSet("torch-eager", "test"), job, plan});
  }
  [[nodiscard]] std::string Refusal() const {
    try {
      (void)Lowered();
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  }
};

Piped Of(const char* model, std::int64_t shard, std::int64_t stages, std::int64_t micro_batches,
         PipelineSchedule schedule = PipelineSchedule::k1F1B) {
  Piped p;
  LoadOptions options;
  options.sequence_length = p.job.sequence_length = 256;
  p.job.precision = testing::kMixed;
  p.model = LoadModel(model, options);
  p.plan.shard_size = shard;
  p.plan.pipeline_size = stages;
  p.plan.pipeline_schedule = schedule;
  p.plan.accumulation = micro_batches;
  p.plan.sync = SyncMode::kLast;
  p.plan.units = Wrap(p.model, ParseWrap("block", "test"), {true, {Reshard::Kind::kNever, 0}},
                      Dialect::kFsdp2, "test");
  return p;
}

std::int64_t Count(const Program& program, OpCode code) {
  return std::count_if(program.step.ops.begin(), program.step.ops.end(),
                       [&](const Op& op) { return program.ShapeOf(op).code == code; });
}

Bytes BytesSent(const Program& program) {
  for (const Op& op : program.step.ops) {
    if (IsTransfer(program.ShapeOf(op).code)) {
      return program.ShapeOf(op).bytes;
    }
  }
  return {};
}

std::int64_t BlocksOfStage(const Model& model, std::int64_t stages, std::int64_t stage,
                           std::int64_t edge_layers = 1) {
  Model part = model;
  CutStage(part, stages, stage, stages, "test", edge_layers);
  std::int64_t blocks = 0;
  for (const ModuleId block : BlocksOf(part)) {
    blocks += std::any_of(part.ops.begin(), part.ops.end(),
                          [&](const ModelOp& op) { return IsInside(part, op.module, block); });
  }
  return blocks;
}

TEST_CASE("CutStage counts embedding and head as a block each") {
  const Model llama = LoadModel("llama-3-8b", {});
  // 34 layers: 9, 9, 8, 8; parallelism.md's example of torchtitan for 8: 5, 5, 4, 4, 4, 4, 4, 4.
  const std::vector<std::int64_t> four = {8, 9, 8, 7}, eight = {4, 5, 4, 4, 4, 4, 4, 3};
  std::int64_t parameters = 0;
  for (std::int64_t stage = 0; stage < 8; ++stage) {
    CHECK(BlocksOfStage(llama, 8, stage) == eight[static_cast<std::size_t>(stage)]);
    if (stage < 4) {
      CHECK(BlocksOfStage(llama, 4, stage) == four[static_cast<std::size_t>(stage)]);
    }
    Model part = llama;
    CutStage(part, 8, stage, 8, "test");
    CHECK(part.stages[0].received.valid() == (stage > 0));
    CHECK(part.stages[0].sent.valid() == (stage < 7));
    parameters += CountParameters(part);
  }
  CHECK(parameters == CountParameters(llama));
}

TEST_CASE("CutStage cuts 32 blocks evenly where embedding and head count as none") {
  const Model llama = LoadModel("llama-3-8b", {});
  const std::vector<std::int64_t> five = {7, 7, 6, 6, 6};  // as divmod(32, 5) says
  for (std::int64_t stage = 0; stage < 8; ++stage) {
    CHECK(BlocksOfStage(llama, 8, stage, 0) == 4);
    if (stage < 5) {
      CHECK(BlocksOfStage(llama, 5, stage, 0) == five[static_cast<std::size_t>(stage)]);
    }
  }
}

TEST_CASE("Stages gather and reduce each unit once a step, whatever the micro-batches") {
  for (const PipelineSchedule schedule : {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B}) {
    const std::vector<Program> stages = Of("llama-3-8b", 8, 4, 6, schedule).Lowered();
    REQUIRE(stages.size() == 4);
    std::vector<const Program*> classes;
    for (const Program& program : stages) {
      classes.push_back(&program);
      const auto with_params =
          std::count_if(program.units.begin(), program.units.end(),
                        [](const UnitInfo& unit) { return unit.padded_elements > 0; });
      CHECK(Count(program, OpCode::kAllGather) == with_params);
      CHECK(Count(program, OpCode::kReduceScatter) == with_params);
      // Behind all passes and transfers.
      const auto is = [&](OpCode code) {
        return [&program, code](const Op& op) { return program.ShapeOf(op).code == code; };
      };
      const std::vector<Op>& ops = program.step.ops;
      const auto reduces = std::find_if(ops.begin(), ops.end(), is(OpCode::kReduceScatter));
      CHECK(std::none_of(reduces, ops.end(), [&](const Op& op) {
        return IsTransfer(program.ShapeOf(op).code) || is(OpCode::kCompute)(op);
      }));
    }
    const std::vector<Finding> findings = VerifyRanks(classes);
    CHECK(findings.empty());
    if (!findings.empty()) {
      MESSAGE(findings[0].text);
    }
    // 6 activations down and 6 gradients up; 1F1B joins some of them.
    const auto moves = [&](std::size_t stage) {
      return Count(stages[stage], OpCode::kSend) + Count(stages[stage], OpCode::kReceive) +
             2 * Count(stages[stage], OpCode::kSendReceive);
    };
    CHECK(moves(0) == 12);
    CHECK(moves(1) == 24);
    CHECK(moves(3) == 12);
    CHECK((Count(stages[0], OpCode::kSendReceive) > 0) == (schedule == PipelineSchedule::k1F1B));
  }
}

TEST_CASE("Clipping sums the norm over the stages, too") {
  Piped p = Of("llama-3-8b", 4, 2, 2);
  const auto sums = [](const Program& program) { return Count(program, OpCode::kAllReduce); };
  p.job.clip_gradients = false;
  CHECK(sums(p.Lowered()[1]) == 0);
  p.job.clip_gradients = true;
  CHECK(sums(p.Lowered()[1]) == 2);
  CHECK(sums(p.Lowered()[0]) == 2);
}

// 62 passes of 64 micro-batches, all of them forward, are no sign of 32 times as many ops.
TEST_CASE("A schedule with many forward passes first is not taken for a larger one") {
  Piped p = Of("llama-3-8b", 8, 4, 512, PipelineSchedule::kGPipe);
  CHECK(p.Lowered().size() == 4);
  p.plan.accumulation = 60'000;
  CHECK(p.Refusal().find("a step of at most 5000000 ops") != std::string::npos);
}

TEST_CASE("Replicas and one dtype, and DDP") {
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kDdp}) {
    Piped p = Of("llama-3-8b", dialect == Dialect::kDdp ? 1 : 2, 2, 4);
    p.job.precision = testing::kAllFp32;
    p.plan.dialect = dialect;
    p.plan.replicate_size = 2;
    if (dialect == Dialect::kDdp) {
      p.plan.units = Wrap(p.model, ParseWrap("root", "test"), {}, dialect, "test");
    }
    const std::vector<Program> stages = p.Lowered();
    const std::vector<const Program*> classes = {&stages[0], &stages[1]};
    CHECK(VerifyRanks(classes).empty());
    CHECK(Count(stages[0], OpCode::kAllReduce) > 0);
  }
}

TEST_CASE("Ranks that cut layers send their part, and sum the norm over stages last") {
  const Piped whole = Of("llama-3-8b", 4, 2, 2);
  Piped p = whole;
  p.plan.tensor_size = 4;
  CutTensor(p.model, 4, "test");
  const std::vector<Program> stages = p.Lowered(), uncut = whole.Lowered();
  CHECK(VerifyRanks(std::vector<const Program*>{&stages[0], &stages[1]}).empty());
  // 256 tokens of 4,096 features in bf16.
  CHECK(BytesSent(uncut[0]) == Bytes(256 * 4096 * 2));
  CHECK(BytesSent(stages[0]) == BytesSent(uncut[0]) / 4);
  const auto pp = std::find_if(stages[0].groups.begin(), stages[0].groups.end(),
                               [](const Group& group) { return group.name == "pp.next"; });
  REQUIRE(pp != stages[0].groups.end());
  CHECK(pp->stride == 16);
}

TEST_CASE("A stage without experts beside one that shares them out") {
  Piped p = Of("qwen3-30b-a3b", 8, 50, 50);  // 48 blocks, embedding and head
  p.plan.expert_size = 4;
  p.job.clip_gradients = true;
  CutExperts(p.model, 4, "test");
  AddExpertUnits(p.model, p.plan.units);
  for (UnitPlan& unit : p.plan.units) {
    unit.reshard.kind = Reshard::Kind::kNever;
  }
  const std::vector<Program> stages = p.Lowered();
  std::vector<const Program*> classes;
  for (const Program& program : stages) {
    classes.push_back(&program);
  }
  CHECK(VerifyRanks(classes).empty());
  CHECK(Count(stages[0], OpCode::kAllToAll) == 0);
  CHECK(Count(stages[1], OpCode::kAllToAll) > 0);
  // Of the norm: over shards and stages; beside experts also over both of their groups.
  CHECK(Count(stages[0], OpCode::kAllReduce) == 2);
  CHECK(Count(stages[1], OpCode::kAllReduce) == 4);
}

// Units gathered by a program's ops, in order, or as its rank's actions ask for: by stage, each
// with the blocks that CutStage gives it.
std::vector<std::string> Gathered(const Program& program) {
  std::vector<std::string> names;
  for (const Op& op : program.step.ops) {
    if (program.ShapeOf(op).code == OpCode::kAllGather) {
      names.push_back(program.units[op.subject].name);
    }
  }
  return names;
}

std::vector<std::string> AskedFor(const Piped& p, std::int64_t rank) {
  const std::int64_t ranks = p.plan.pipeline_size, stages = ranks * p.plan.pipeline_stages;
  std::vector<std::string> names;
  for (const StageAction& action : AddTransfers(PipelineOf(p.plan), rank)) {
    if (action.kind != StageAction::Kind::kGather) {
      continue;
    }
    Model part = p.model;
    CutStage(part, stages, action.stage, stages, "test");
    const auto has = [&](const std::string& fqn) {
      return std::any_of(part.ops.begin(), part.ops.end(), [&](const ModelOp& op) {
        return !op.params.empty() && IsInside(part, op.module, FindModule(part, fqn));
      });
    };
    if (action.stage == 0 || action.stage == stages - 1) {
      const bool is_second = action.stage > 0 && IsVShaped(p.plan.pipeline_schedule);
      names.emplace_back(is_second ? "root@2" : "root");  // the embedding; last norm and head
    }
    for (const ModuleId block : BlocksOf(part)) {
      if (has(part.modules[block.value].fqn)) {
        names.push_back(part.modules[block.value].fqn);
      }
    }
  }
  return names;
}

// Each receive has a buffer of its own, which the pass that reads it waits for.
void CheckReceives(const Piped& p, const Program& program) {
  std::vector<std::uint32_t> buffers;
  std::int64_t transfers = 0;
  const bool is_pair = p.plan.pipeline_size == 2;  // both neighbours are the other rank
  const Stream only = program.pipeline_rank == 0 ? Stream::kNext : Stream::kPrevious;
  for (const StageAction& action : AddTransfers(PipelineOf(p.plan), program.pipeline_rank)) {
    transfers += action.kind == StageAction::Kind::kReceiveActivation ||
                 action.kind == StageAction::Kind::kReceiveGradient;
  }
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    if (program.ShapeOf(program.step.ops[i]).code == OpCode::kReceive) {
      buffers.push_back(program.step.AccessesOf(OpId(i)).front().buffer.value);
    }
  }
  CHECK(std::all_of(program.step.ops.begin(), program.step.ops.end(), [&](const Op& op) {
    const OpShape& shape = program.ShapeOf(op);
    return !is_pair || !IsTransfer(shape.code) || shape.stream == only;
  }));
  CHECK(std::ssize(buffers) == transfers);
  std::sort(buffers.begin(), buffers.end());
  CHECK(std::adjacent_find(buffers.begin(), buffers.end()) == buffers.end());
}

// The first gather behind a pass waits for it, as the parameters of another stage were dropped.
void CheckGathers(const Program& program) {
  std::optional<std::size_t> pass;  // its last op
  bool waits = false;
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const OpShape& shape = program.ShapeOf(program.step.ops[i]);
    if (shape.code == OpCode::kCompute) {
      pass = i;
      waits = false;
    } else if (shape.code == OpCode::kStreamWait && shape.stream == Stream::kCopyIn && pass) {
      const std::span<const Edge> edges = program.step.EdgesOf(OpId(i));
      waits = waits || std::any_of(edges.begin(), edges.end(), [&](const Edge& edge) {
                return !edge.is_carried() && edge.op().value >= *pass;
              });
    } else if (shape.code == OpCode::kAllGather && pass) {
      CHECK(waits);
    }
  }
}

TEST_CASE("Several stages of a rank") {
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kInterleaved1F1B, PipelineSchedule::kLoopedBfs,
        PipelineSchedule::kInterleavedZeroBubble, PipelineSchedule::kZbvZeroBubble,
        PipelineSchedule::kDualPipeV}) {
    for (const auto& [ranks, stages] : {std::pair(2, 2), std::pair(4, 2), std::pair(2, 5)}) {
      if (IsVShaped(schedule) && stages != 2) {
        continue;
      }
      Piped p = Of("llama-3-8b", 4, ranks, 2 * ranks, schedule);
      p.plan.pipeline_stages = stages;
      const std::vector<Program> programs = p.Lowered();
      std::vector<const Program*> classes;
      for (const Program& program : programs) {
        classes.push_back(&program);
      }
      INFO(kPipelineScheduleNames[static_cast<std::size_t>(schedule)]
           << ": " << ranks << " ranks of " << stages << " stages");
      const std::vector<Finding> findings = VerifyRanks(classes);
      CHECK((findings.empty() ? "" : findings[0].text) == "");
      for (const Program& program : programs) {
        const std::vector<std::string> asked = AskedFor(p, program.pipeline_rank);
        CHECK(Gathered(program) == asked);
        CHECK((Count(program, OpCode::kReduceScatter) < std::ssize(asked)) == (stages > 3));
        CheckReceives(p, program);
        CheckGathers(program);
      }
    }
  }
  Model part = LoadModel("llama-3-8b", {});
  CutStage(part, 8, 1, 4, "test");
  REQUIRE(part.stages.size() == 2);
  CHECK_FALSE(part.ops[part.stages[0].begin].called_again.valid());
  CHECK(part.ops[part.stages[1].begin].called_again == ModuleId(0));
}

// Of a rank, by micro-batch: ops whose weights have a gradient written, how often.
std::map<std::pair<std::uint16_t, std::uint32_t>, int> WeightGrads(const Program& program) {
  std::map<std::pair<std::uint16_t, std::uint32_t>, int> written;
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const Op& op = program.step.ops[i];
    const std::span<const Access> accesses = program.step.AccessesOf(OpId(i));
    written[{op.micro_batch, op.subject}] +=
        program.ShapeOf(op).code == OpCode::kCompute &&
        std::any_of(accesses.begin(), accesses.end(),
                    [](const Access& access) { return access.role == Role::kParamGrad; });
  }
  std::erase_if(written, [](const auto& entry) { return entry.second == 0; });
  return written;
}

double WorkOf(const Program& program) {
  double flops = 0;
  for (const Op& op : program.step.ops) {
    for (const Kernel& kernel : program.KernelsOf(program.ShapeOf(op))) {
      flops += kernel.flops.value;
    }
  }
  return flops;
}

// Position of the op that the buffer is freed before.
std::size_t FreedAt(const Program& program, BufferId buffer) {
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    for (const MemoryPoint& point : program.step.PointsBefore(OpId(i))) {
      if (point.kind == PointKind::kFree && point.buffer == buffer) {
        return i;
      }
    }
  }
  return program.step.size();
}

TEST_CASE("A split backward pass does the work of a whole one") {
  const auto lowered = [](PipelineSchedule schedule) {
    Piped p = Of("llama-3-8b", 4, 2, 4, schedule);
    p.plan.pipeline_stages = 2;
    return p.Lowered();
  };
  const std::vector<Program> whole = lowered(PipelineSchedule::kInterleaved1F1B);
  const std::vector<Program> split = lowered(PipelineSchedule::kInterleavedZeroBubble);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(WorkOf(split[rank]) == doctest::Approx(WorkOf(whole[rank])).epsilon(1e-12));
    CHECK(WeightGrads(split[rank]) == WeightGrads(whole[rank]));
    CHECK(Count(split[rank], OpCode::kReduceScatter) == Count(whole[rank], OpCode::kReduceScatter));
  }
  CHECK(WeightGrads(lowered(PipelineSchedule::kZbvZeroBubble)[1]).size() ==
        WeightGrads(lowered(PipelineSchedule::kDualPipeV)[1]).size());
}

// torch's autograd graph of a micro-batch lives until its last weight has its gradient: attention's
// statistics, too, which only the gradients of activations read.
TEST_CASE("What forward has saved lives until the gradients of weights are there") {
  const Program program =
      Of("llama-3-8b", 4, 2, 4, PipelineSchedule::kInterleavedZeroBubble).Lowered()[1];
  std::map<std::uint16_t, std::size_t> first, last;  // gradients of weights, by micro-batch
  std::vector<std::pair<std::uint16_t, BufferId>> statistics, gradients;
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const Op& op = program.step.ops[i];
    const bool is_compute = program.ShapeOf(op).code == OpCode::kCompute;
    for (const Access& access : program.step.AccessesOf(OpId(i))) {
      if (!is_compute || op.phase != Phase::kBackward) {
        continue;
      }
      const std::string& name = program.model_op_names[op.subject];
      if (access.role == Role::kParamGrad) {
        first.emplace(op.micro_batch, i);
        last[op.micro_batch] = i;
      } else if (access.role == Role::kSaved && name.ends_with(".attn")) {
        statistics.emplace_back(op.micro_batch, access.buffer);
      } else if (access.role == Role::kOutputGrad && name.ends_with(".q_proj")) {
        gradients.emplace_back(op.micro_batch, access.buffer);
      }
    }
  }
  CHECK(!statistics.empty());
  for (const auto& [micro_batch, buffer] : statistics) {
    CHECK(FreedAt(program, buffer) > last.at(micro_batch));
  }
  CHECK(!gradients.empty());
  for (const auto& [micro_batch, buffer] : gradients) {
    CHECK(FreedAt(program, buffer) > first.at(micro_batch));
  }
}

// A receive that compute waits for tells that the sends before it on its stream are over. Of 16
// gradients that this rank sends, at most 10 are there at once.
TEST_CASE("Gradients that were sent are freed as the pipeline goes on") {
  Piped p = Of("llama-3-8b", 4, 4, 8, PipelineSchedule::kInterleaved1F1B);
  p.plan.pipeline_stages = 2;
  const Program program = p.Lowered()[1];
  std::int64_t alive = 0, most = 0, sent = 0;
  std::vector<bool> is_sent(program.buffers.size(), false);
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const Op& op = program.step.ops[i];
    for (const MemoryPoint& point : program.step.PointsBefore(OpId(i))) {
      alive -= point.kind == PointKind::kFree && is_sent[point.buffer.value] ? 1 : 0;
    }
    if (program.ShapeOf(op).code == OpCode::kSend && op.phase == Phase::kBackward) {
      is_sent[program.step.AccessesOf(OpId(i)).front().buffer.value] = true;
      most = std::max(most, ++alive);
      ++sent;
    }
  }
  CHECK(sent == 16);
  CHECK(most == 10);
  CHECK(alive == 0);
}

TEST_CASE("What no stage is lowered for is refused by name") {
  CHECK(Of("gpt2", 2, 2, 2).Refusal().find("would share parameter") != std::string::npos);
  CHECK(Of("flan-t5-xxl", 2, 4, 4).Refusal().find("pipeline_size") != std::string::npos);
  CHECK(Of("llama-3-8b", 2, 4, 3).Refusal().find("4 micro-batches or more") != std::string::npos);
  Piped split = Of("llama-3-8b", 2, 2, 4, PipelineSchedule::kInterleavedZeroBubble);
  CHECK(split.Refusal().empty());
  split.plan.recompute = {{"model.layers.0"}};
  CHECK(split.Refusal().find("with whole backward passes") != std::string::npos);
  Piped turning = Of("llama-3-8b", 2, 2, 4, PipelineSchedule::kDualPipeV);
  CHECK(turning.Refusal().find("pipeline_stages: got 1, expected 2 under") != std::string::npos);
  turning.plan.pipeline_stages = 2;
  CHECK(turning.Refusal().empty());
  turning.plan.accumulation = 3;
  CHECK(turning.Refusal().find("4 micro-batches or more") != std::string::npos);
  for (const PipelineSchedule schedule : {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B}) {
    Piped several = Of("llama-3-8b", 2, 2, 4, schedule);
    several.plan.pipeline_stages = 2;
    CHECK(several.Refusal().find("pipeline_stages: got 2, expected 1") != std::string::npos);
  }
  Piped spans = Of("llama-3-8b", 2, 2, 4, PipelineSchedule::kInterleaved1F1B);
  spans.plan.pipeline_stages = 2;
  spans.plan.units = Wrap(spans.model, ParseWrap("root", "test"),
                          {true, {Reshard::Kind::kNever, 0}}, Dialect::kFsdp2, "test");
  CHECK(spans.Refusal().find("expected units inside of one stage each") != std::string::npos);
  Piped none = Of("llama-3-8b", 2, 1, 4, PipelineSchedule::kInterleaved1F1B);
  none.plan.pipeline_stages = 2;
  CHECK(none.Refusal().find("pipeline_stages: got 2, expected 1") != std::string::npos);
  Piped ddp = Of("llama-3-8b", 1, 2, 2);
  ddp.plan.dialect = Dialect::kDdp;
  ddp.plan.units = Wrap(ddp.model, ParseWrap("root", "test"), {}, Dialect::kDdp, "test");
  ddp.job.precision = testing::kAllFp32;
  CHECK(ddp.Refusal().find("more micro-batches than ranks") != std::string::npos);
  Piped p = Of("llama-3-8b", 2, 2, 4);
  p.plan.sync = SyncMode::kEvery;
  CHECK(p.Refusal().find("sync last") != std::string::npos);
  p = Of("llama-3-8b", 2, 2, 4);
  p.plan.units[0].reshard.kind = Reshard::Kind::kAlways;
  CHECK(p.Refusal().find("reshard never") != std::string::npos);
  p = Of("llama-3-8b", 2, 2, 4);
  try {
    (void)Lower({p.model, FindKernelSet("torch-eager", "test"), p.job, p.plan});
    CHECK(false);
  } catch (const InputError& error) {
    CHECK(std::string(error.what()).find("pipeline_size: got 2") != std::string::npos);
  }
}

}  // namespace
}  // namespace shardwright
