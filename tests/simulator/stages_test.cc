// Pipelines of equal stages by closed forms, and by hand where transfers take time.

#include "simulator/stages.h"

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/builder.h"
#include "schedule/pipeline.h"
#include "schedule/verify.h"

namespace shardwright {
namespace {

using Kind = StageAction::Kind;

struct Times {
  std::int64_t forward = 0, backward = 0, transfer = 0;
  bool meets = false;  // all ranks, at the end of a step

  // Gradients of inputs and of weights take half of backward each.
  [[nodiscard]] std::int64_t Of(Kind pass) const {
    return pass == Kind::kForward ? forward : pass == Kind::kBackward ? backward : backward / 2;
  }
};

// One program per rank: a compute op per pass, and the transfers between as lowering orders them.
struct Chain {
  std::vector<Program> programs;
  std::vector<PriceTable> prices;

  [[nodiscard]] PipelineTiming Run() const {
    EngineOptions options;
    options.contention = false;
    return RunStages(programs, prices, options);
  }
  [[nodiscard]] std::vector<Finding> Verified() const {
    std::vector<const Program*> classes;
    for (const Program& program : programs) {
      classes.push_back(&program);
    }
    return VerifyRanks(classes);
  }
};

struct Writer {
  Writer(Program& p, PriceTable& t) : program(p), prices(t), shapes(p), builder(p, p.step) {}

  OpId Add(OpCode code, Stream stream, std::int64_t duration, OpId after, std::uint32_t group) {
    OpShape shape;
    shape.code = code;
    shape.stream = stream;
    shape.bytes = Bytes(0);
    shape.group = InfoOf(code).is_collective ? GroupId(group) : GroupId();
    shape.divisor = code == OpCode::kCompute ? static_cast<double>(duration) : 1.0;  // kept apart
    const ShapeId id = shapes.Intern(shape);
    prices.prices.resize(program.shapes.size());
    prices.prices[id.value].duration = SimTime(duration);
    const OpId op = builder.Add({id});
    if (after.valid()) {
      builder.After(after);
    }
    return op;
  }

  Program& program;
  PriceTable& prices;
  ShapeInterner shapes;
  BodyBuilder builder;
};

void WriteRank(const Pipeline& pipeline, std::int64_t rank, const Times& times, Writer& w) {
  const std::vector<StageAction> actions = AddTransfers(pipeline, rank);
  OpId pass, moved;
  const bool is_early = pipeline.schedule > PipelineSchedule::k1F1B;  // receives
  std::map<std::tuple<bool, std::int32_t, std::int32_t>, OpId> coming;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const Kind kind = actions[i].kind;
    if (kind <= Kind::kWeightGrads) {
      if (is_early) {
        moved = kind == Kind::kWeightGrads
                    ? OpId()
                    : coming[{kind == Kind::kForward, actions[i].stage, actions[i].micro_batch}];
      }
      pass = w.Add(OpCode::kCompute, Stream::kCompute, times.Of(kind), moved, 0);
    } else if (kind == Kind::kWaitForSends) {
      (void)w.Add(OpCode::kStreamWait, Stream::kCompute, 0, moved, 0);
    } else if (kind < Kind::kWaitForSends) {
      const bool is_pair = pipeline.ranks == 2 && pipeline.stages_per_rank > 1;
      const bool is_down = kind == Kind::kSendActivation || kind == Kind::kReceiveGradient;
      const bool goes_up = IsVShaped(pipeline.schedule) && actions[i].stage >= pipeline.ranks;
      const bool is_next = is_pair ? rank == 0 : is_down != goes_up;
      const bool sends = kind == Kind::kSendActivation || kind == Kind::kSendGradient;
      const OpId op =
          w.Add(actions[i].joins_next ? OpCode::kSendReceive
                : sends               ? OpCode::kSend
                                      : OpCode::kReceive,
                is_next ? Stream::kNext : Stream::kPrevious, times.transfer, pass, is_next ? 0 : 1);
      const bool is_awaited = !is_early && (actions[i].joins_next || !sends);
      if (is_early && !sends) {
        coming[{kind == Kind::kReceiveActivation, actions[i].stage, actions[i].micro_batch}] = op;
      }
      moved = is_awaited ? op : moved;
      i += actions[i].joins_next ? 1 : 0;
      if (is_awaited) {  // as compute waits in lowering
        pass = w.Add(OpCode::kStreamWait, Stream::kCompute, 0, op, 0);
      }
    }
  }
  if (times.meets) {
    (void)w.Add(OpCode::kAllReduce, Stream::kCompute, 0, OpId(), 2);
  }
}

Chain MakeChain(PipelineSchedule schedule, std::int64_t ranks, std::int64_t micro_batches,
                const Times& times, std::int64_t stages = 1) {
  Chain chain;
  chain.programs.resize(static_cast<std::size_t>(ranks));
  chain.prices.resize(static_cast<std::size_t>(ranks));
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    Program& program = chain.programs[r];
    program.pipeline_size = ranks;
    program.pipeline_rank = rank;
    program.groups = {{"pp.next", ranks, 1}, {"pp.previous", ranks, 1}, {"pp", ranks, 1}};
    BodyBuilder(program, program.init).Finish();
    Writer writer(program, chain.prices[r]);
    WriteRank({schedule, ranks, stages, micro_batches}, rank, times, writer);
    writer.builder.Finish();
  }
  return chain;
}

TEST_CASE("GPipe and 1F1B of equal stages, free transfers: the bubble is (P - 1) (f + b)") {
  for (const PipelineSchedule schedule : {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B}) {
    for (const std::int64_t ranks : {2, 3, 4, 8}) {
      for (const std::int64_t micro_batches : {8, 9, 21}) {
        const Times times = {100, 230, 0};
        const Chain chain = MakeChain(schedule, ranks, micro_batches, times);
        CHECK(chain.Verified().empty());
        const PipelineTiming timing = chain.Run();
        CHECK(timing.is_steady);
        CHECK(timing.step_time.value == (micro_batches + ranks - 1) * 330);
        for (const StepTiming& stage : timing.last) {
          CHECK(stage.busy[static_cast<std::size_t>(Stream::kCompute)].value ==
                micro_batches * 330);
        }
      }
    }
  }
}

TEST_CASE("Several stages per rank: the bubble of whole ranks is divided among them") {
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kInterleaved1F1B, PipelineSchedule::kLoopedBfs}) {
    for (const std::int64_t ranks : {2, 3, 4, 8}) {
      for (const std::int64_t stages : {2, 3, 4}) {
        const Times times = {100, 200, 0};
        const std::int64_t micro_batches = 2 * ranks;
        const Chain chain = MakeChain(schedule, ranks, micro_batches, times, stages);
        CHECK(chain.Verified().empty());
        const PipelineTiming timing = chain.Run();
        INFO(ranks << " ranks, " << stages << " stages");
        CHECK(timing.step_time.value == (micro_batches * stages + ranks - 1) * 300);
      }
    }
  }
}

// Forward 1, gradients of inputs and of weights 1 each, 2 stages per rank: a rank computes 6 a
// micro-batch, and waits for (P - 1) forwards, or for 3 (P - 1) where backward is whole. A pair of
// DualPipeV sends what both of its passes make behind the second, as torch's runtime does: in a
// walk through torch's own lists its steps take 26 and 54 so, and 25 and 51 where passes send
// apart.
TEST_CASE("Split backward passes fill the bubble") {
  using Schedule = PipelineSchedule;
  for (const auto& [schedule, ranks, micro_batches, expected] :
       std::initializer_list<std::tuple<Schedule, std::int64_t, std::int64_t, std::int64_t>>{
           {Schedule::kInterleaved1F1B, 2, 4, 27},
           {Schedule::kInterleavedZeroBubble, 2, 4, 25},
           {Schedule::kZbvZeroBubble, 2, 4, 25},
           {Schedule::kDualPipeV, 2, 4, 26},
           {Schedule::kInterleaved1F1B, 4, 8, 57},
           {Schedule::kInterleavedZeroBubble, 4, 8, 51},
           {Schedule::kZbvZeroBubble, 4, 8, 51},
           {Schedule::kDualPipeV, 4, 8, 54},
           {Schedule::kZbvZeroBubble, 4, 4, 30},  // too few micro-batches to fill it
           {Schedule::kInterleavedZeroBubble, 4, 4, 27}}) {
    const Chain chain = MakeChain(schedule, ranks, micro_batches, {100, 200, 0, true}, 2);
    CHECK(chain.Verified().empty());
    const PipelineTiming timing = chain.Run();
    INFO(kPipelineScheduleNames[static_cast<std::size_t>(schedule)] << ", " << ranks << " ranks");
    CHECK(timing.step_time.value == expected * 100);
    for (const StepTiming& rank : timing.last) {
      CHECK(rank.busy[static_cast<std::size_t>(Stream::kCompute)].value == 600 * micro_batches);
    }
  }
}

TEST_CASE("Stages whose steps would leave the range of times are refused") {
  // 2 micro-batches are 4 passes, and 9 steps count: 7.2e18 ps of the 9e18 in range for one rank,
  // but two may wait for each other.
  const std::int64_t pass = 200'000'000'000'000'000;
  CHECK_THROWS_AS(
      (void)MakeChain(PipelineSchedule::k1F1B, 2, 2, {.forward = pass, .backward = pass}).Run(),
      InputError);
  const Chain half =
      MakeChain(PipelineSchedule::k1F1B, 2, 2, {.forward = pass / 2, .backward = pass / 2});
  CHECK(half.Run().step_time.value == 3 * pass);
}

TEST_CASE("Two ranks by hand: a receive begins behind the pass before it") {
  // Rank 1 receives, runs, receives, ...: a micro-batch each f + t, and rank 0 likewise backward.
  const Times times = {100, 230, 7};
  CHECK(MakeChain(PipelineSchedule::kGPipe, 2, 5, times).Run().step_time.value ==
        6 * 330 + 2 * 5 * 7);
}

TEST_CASE("VerifyRanks finds stages that do not meet, and those that wait for each other") {
  const Times times = {100, 230, 7};
  Chain chain = MakeChain(PipelineSchedule::k1F1B, 3, 6, times);
  CHECK(chain.Verified().empty());
  SUBCASE("other sizes") {
    for (OpShape& shape : chain.programs[1].shapes) {
      shape.bytes = Bytes(shape.stream == Stream::kNext ? 0 : shape.bytes.value);
      shape.dtype = shape.stream == Stream::kNext ? DType::kFp32 : shape.dtype;
    }
    REQUIRE_FALSE(chain.Verified().empty());
    CHECK(chain.Verified()[0].rule == 8);
  }
  SUBCASE("GPipe beside 1F1B") {
    chain.programs[1] = MakeChain(PipelineSchedule::kGPipe, 3, 6, times).programs[1];
    REQUIRE_FALSE(chain.Verified().empty());
    CHECK(chain.Verified()[0].rule == 8);
  }
  SUBCASE("a sum of all stages before what it needs is sent") {
    Chain pair;
    pair.programs.resize(2);
    pair.prices.resize(2);
    for (std::size_t r = 0; r < 2; ++r) {
      Program& program = pair.programs[r];
      program.pipeline_size = 2;
      program.pipeline_rank = static_cast<std::int64_t>(r);
      program.groups = {{"pp.next", 2, 1}, {"pp.previous", 2, 1}, {"pp", 2, 1}};
      BodyBuilder(program, program.init).Finish();
      Writer w(program, pair.prices[r]);
      const auto sum = [&](OpId after) {
        return w.Add(OpCode::kAllReduce, Stream::kCompute, 5, after, 2);
      };
      const auto move = [&](OpCode code, Stream stream, std::uint32_t group, OpId after) {
        return w.Add(code, stream, 7, after, group);
      };
      if (r == 0) {
        (void)move(OpCode::kSend, Stream::kNext, 0, sum(OpId()));
      } else {
        (void)sum(move(OpCode::kReceive, Stream::kPrevious, 1, OpId()));
      }
      w.builder.Finish();
    }
    REQUIRE_FALSE(pair.Verified().empty());
    CHECK(pair.Verified()[0].text.find("wait for each other") != std::string::npos);
  }
}

}  // namespace
}  // namespace shardwright
