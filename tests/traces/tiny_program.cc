#include "tests/traces/tiny_program.h"

#include <array>
#include <cstdint>

namespace shardwright::testing {
namespace {

constexpr std::int64_t kMicrosecond = 1'000'000;  // in picoseconds

OpShape Shape(OpCode code, Stream stream) {
  OpShape shape;
  shape.code = code;
  shape.stream = stream;
  return shape;
}

OpShape Collective(OpCode code, Stream stream) {
  OpShape shape = Shape(code, stream);
  shape.group = GroupId(0);
  shape.dtype = DType::kBf16;
  shape.bytes = Bytes(800);
  return shape;
}

Op MakeOp(std::uint32_t shape, std::uint32_t subject, Phase phase, std::uint32_t edge_begin) {
  Op op;
  op.shape = ShapeId(shape);
  op.subject = subject;
  op.phase = phase;
  op.edge_begin = edge_begin;
  return op;
}

struct Times {
  int issue_begin, issued, issue_end, ready, arrival, start, end;
};

Span MakeSpan(std::uint32_t op, Stream stream, const Times& times, std::int64_t base) {
  const auto at = [base](int time) { return SimTime((base + time) * kMicrosecond); };
  Span span;
  span.op = OpId(op);
  span.stream = stream;
  span.issue_begin = at(times.issue_begin);
  span.issued = at(times.issued);
  span.issue_end = at(times.issue_end);
  span.ready = at(times.ready);
  span.arrival = at(times.arrival);
  span.start = at(times.start);
  span.end = at(times.end);
  return span;
}

}  // namespace

Program TinyProgram(const std::string& unit, const std::string& model_op) {
  Program program;
  program.dialect = "native";
  program.shard_size = 2;
  program.shapes = {Shape(OpCode::kInitialize, Stream::kCompute),
                    Collective(OpCode::kAllGather, Stream::kGather),
                    Shape(OpCode::kCompute, Stream::kCompute),
                    Collective(OpCode::kReduceScatter, Stream::kReduce),
                    Shape(OpCode::kOptimizerStep, Stream::kCompute),
                    Shape(OpCode::kHostWait, Stream::kHost)};
  program.groups = {{"shard", 2, 1}};
  program.units.resize(1);
  program.units[0].name = unit;
  program.model_op_names = {model_op};
  program.carry_slot_count = 1;
  program.init.ops = {MakeOp(0, 0, Phase::kInit, 0)};
  program.init.carries = {OpId()};
  Body& step = program.step;
  step.ops = {MakeOp(1, 0, Phase::kForward, 0),
              MakeOp(2, 0, Phase::kForward, 1),
              MakeOp(2, 0, Phase::kBackward, 2),
              MakeOp(3, 0, Phase::kBackward, 2),
              MakeOp(4, kNoSubject, Phase::kOptimizer, 3),
              MakeOp(5, kNoSubject, Phase::kOptimizer, 4)};
  step.edges = {Edge::FromSlot(0), Edge::FromOp(OpId(0)), Edge::FromOp(OpId(2)),
                Edge::FromOp(OpId(3)), Edge::FromOp(OpId(4))};
  step.carries = {OpId(4)};
  return program;
}

Trace TinyTrace() {
  constexpr std::array<Times, 6> kStepTimes = {{
      {0, 1, 1, 0, 1, 2, 5},
      {1, 2, 2, 5, 5, 5, 8},
      {2, 3, 3, 8, 8, 8, 12},
      {3, 4, 4, 12, 12, 12, 15},
      {4, 5, 5, 15, 15, 15, 17},
      {5, 5, 5, 17, 18, 18, 18},
  }};
  constexpr std::array<Stream, 6> kStreams = {Stream::kGather, Stream::kCompute, Stream::kCompute,
                                              Stream::kReduce, Stream::kCompute, Stream::kHost};
  Trace trace;
  for (const std::uint32_t rank : {0U, 1U}) {
    Span init = MakeSpan(0, Stream::kCompute, {0, 1, 1, 0, 1, 1, 4}, 0);
    init.rank = Rank(rank);
    init.body = BodyKind::kInit;
    trace.spans.push_back(init);
    for (const std::uint32_t step : {0U, 1U}) {
      for (std::uint32_t op = 0; op < kStepTimes.size(); ++op) {
        Span span = MakeSpan(op, kStreams[op], kStepTimes[op], 10 + 20 * std::int64_t{step});
        span.rank = Rank(rank);
        span.step = step;
        trace.spans.push_back(span);
      }
    }
  }
  return trace;
}

}  // namespace shardwright::testing
