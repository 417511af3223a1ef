// Verify against a brute-force reading of docs/execution_model.md section 3 (brute_force.h).

#include "schedule/verify.h"

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "schedule/program.h"
#include "tests/schedule/brute_force.h"
#include "tests/schedule/check_mutants.h"
#include "tests/schedule/random_program.h"

namespace shardwright {
namespace {

// Two streams and one buffer: compute writes, reduce reads after an edge, compute frees behind a
// wait. Each test below breaks one thing.
struct Tiny {
  Program program;
  ShapeInterner interner{program};
  BodyBuilder step{program, program.step};

  Tiny() { program.groups = {{"shard", 4, 1}}; }

  OpId Add(OpCode code, Stream stream, std::uint8_t occurrence, Bytes bytes = Bytes(0),
           GroupId group = GroupId()) {
    OpShape shape;
    shape.code = code;
    shape.stream = stream;
    shape.bytes = bytes;
    shape.group = group;
    return step.Add({interner.Intern(shape), Phase::kForward, kNoSubject, 0, occurrence});
  }
  OpId Compute(std::uint8_t occurrence) {
    return Add(OpCode::kCompute, Stream::kCompute, occurrence);
  }
  OpId Cast(std::uint8_t occurrence) { return Add(OpCode::kCast, Stream::kReduce, occurrence); }
  BufferId NewAllocated(Bytes size = Bytes(64)) { return step.NewAllocated({size}); }
};

// The rules that Verify reports; the brute force must find the same.
std::set<int> RulesOf(const Program& program) {
  std::set<int> rules;
  for (const Finding& finding : Verify(program)) {
    rules.insert(finding.rule);
  }
  CHECK(rules == BruteForceBrokenRules(program));
  return rules;
}

TEST_CASE("Verify: a write, an edge, a read and a free behind a wait are legal") {
  Tiny t;
  const BufferId buffer = t.NewAllocated();
  const OpId write = t.Compute(0);
  t.step.Use(buffer, AccessMode::kWrite, Role::kOutput);
  const OpId read = t.Cast(0);
  t.step.After(write);
  t.step.Use(buffer, AccessMode::kRead, Role::kInput);
  t.step.Free(buffer);
  t.Compute(1);
  t.step.After(read);
  t.step.Finish();
  CHECK(RulesOf(t.program).empty());
}

TEST_CASE("Verify: rule 5, an access without an edge, names both ops and the buffer") {
  Tiny t;
  const BufferId buffer = t.NewAllocated();
  t.Compute(0);
  t.step.Use(buffer, AccessMode::kWrite, Role::kOutput);
  const OpId other = t.Cast(0);
  t.step.Use(buffer, AccessMode::kWrite, Role::kOutput);
  t.Compute(1);
  t.step.After(other);
  t.step.Free(buffer);
  t.step.Finish();
  const std::vector<Finding> findings = Verify(t.program);
  REQUIRE(!findings.empty());
  CHECK(findings[0].rule == 5);
  CHECK(findings[0].first == "step 1: mb0.fwd");
  CHECK(findings[0].second == "step 1: mb0.fwd.cast");
  CHECK(findings[0].buffer == "temporary@mb0.fwd");
  CHECK(findings[0].text ==
        "step 1: mb0.fwd.cast writes temporary@mb0.fwd, which step 1: mb0.fwd accesses; "
        "nothing orders the two");
  CHECK(RulesOf(t.program) == std::set<int>{5});
}

TEST_CASE("Verify: rule 6, a free that the owner stream does not wait for") {
  Tiny t;
  const BufferId buffer = t.NewAllocated();
  const OpId write = t.Compute(0);
  t.step.AfterSlot(0);  // the read of the step before
  t.step.Use(buffer, AccessMode::kWrite, Role::kOutput);
  const OpId read = t.Cast(0);
  t.step.SetCarry(0, read);
  t.step.After(write);
  t.step.Use(buffer, AccessMode::kRead, Role::kInput);
  SUBCASE("plain") {
    t.step.Free(buffer);
    t.Compute(1);
    t.step.Finish();
    CHECK(RulesOf(t.program) == std::set<int>{6});
    const Finding finding = Verify(t.program)[0];
    CHECK(finding.first == "step 1: mb0.fwd.cast");
    CHECK(finding.second == "step 1: mb0.fwd#1");
    CHECK(finding.buffer == "temporary@mb0.fwd");
    CHECK(finding.text ==
          "temporary@mb0.fwd is freed, but its bytes may go to step 1: mb0.fwd#1 or later work of "
          "stream compute, and nothing orders that after step 1: mb0.fwd.cast");
  }
  SUBCASE("recorded on the reading stream") {
    t.step.Free(buffer, 1U << static_cast<unsigned>(Stream::kReduce));
    t.Compute(1);
    t.step.Finish();
    CHECK(RulesOf(t.program).empty());
  }
  SUBCASE("recorded on another stream") {
    t.step.Free(buffer, 1U << static_cast<unsigned>(Stream::kGather));
    t.Compute(1);
    t.step.Finish();
    CHECK(RulesOf(t.program) == std::set<int>{6});
  }
  SUBCASE("the next op of the owner stream comes in the next step, and waits") {
    t.step.Free(buffer);
    t.step.Finish();
    CHECK(RulesOf(t.program).empty());
  }
  SUBCASE("the next op of the owner stream comes in the next step, and does not wait") {
    t.step.Free(buffer);
    t.step.Finish();
    t.program.step.carries[0] = write;
    CHECK(RulesOf(t.program) == std::set<int>{5, 6});
    CHECK(Verify(t.program)[0].rule == 6);
    CHECK(Verify(t.program)[0].second == "step 2: mb0.fwd");
  }
}

TEST_CASE("Verify: rule 5, one buffer in two steps") {
  // A step is legal by itself, but the next one writes on compute without waiting for reduce.
  Tiny t;
  const BufferId buffer = t.NewAllocated();
  const OpId write = t.Compute(0);
  t.step.Use(buffer, AccessMode::kWrite, Role::kOutput);
  t.Cast(0);
  t.step.After(write);
  t.step.Use(buffer, AccessMode::kReadWrite, Role::kInput);
  t.step.Free(buffer, 1U << static_cast<unsigned>(Stream::kReduce));
  t.step.Finish();
  CHECK(RulesOf(t.program) == std::set<int>{5});
  const Finding finding = Verify(t.program)[0];
  CHECK(finding.first == "step 1: mb0.fwd.cast");
  CHECK(finding.second == "step 2: mb0.fwd");
}

TEST_CASE("Verify: rule 9, host memory is reached by copies alone") {
  const auto program_of = [](OpCode code, bool from_host, bool to_host) {
    Tiny t;
    const auto new_buffer = [&](bool on_host) {
      return t.step.NewAllocated({Bytes(64), Category::kParameterShard, Stream::kCompute, on_host,
                                  /*zero_filled=*/true});
    };
    const BufferId from = new_buffer(from_host);
    const BufferId to = new_buffer(to_host);
    t.Add(code, Stream::kCompute, 0, Bytes(64));
    t.step.Use(from, AccessMode::kRead, Role::kInput);
    t.step.Use(to, AccessMode::kWrite, Role::kOutput);
    t.step.Free(from);
    t.step.Free(to);
    t.step.Finish();
    return t.program;
  };
  CHECK(RulesOf(program_of(OpCode::kCopyH2d, true, false)).empty());
  CHECK(RulesOf(program_of(OpCode::kCopyD2h, false, true)).empty());
  CHECK(RulesOf(program_of(OpCode::kGatherCopyOut, false, false)).empty());
  const std::set<int> broken = {9};
  CHECK(RulesOf(program_of(OpCode::kCopyH2d, false, false)) == broken);
  CHECK(RulesOf(program_of(OpCode::kCopyH2d, true, true)) == broken);
  CHECK(RulesOf(program_of(OpCode::kCopyD2h, true, true)) == broken);
  CHECK(RulesOf(program_of(OpCode::kCopyD2h, false, false)) == broken);
  CHECK(RulesOf(program_of(OpCode::kGatherCopyOut, false, true)) == broken);
  const Program illegal = program_of(OpCode::kGatherCopyOut, true, false);
  CHECK(RulesOf(illegal) == broken);
  CHECK(
      Verify(illegal)[0].text ==
      "step: mb0.fwd.gather_copy_out reads parameter_shard@mb0.fwd.gather_copy_out in host memory, "
      "where gather_copy_out cannot reach it");
}

TEST_CASE("Verify: a host wait orders everything issued after it") {
  Tiny t;
  const BufferId buffer = t.NewAllocated();
  t.Compute(0);
  t.step.Use(buffer, AccessMode::kWrite, Role::kOutput);
  const OpId write = t.step.last();
  t.Add(OpCode::kHostWait, Stream::kHost, 0);
  t.step.After(write);
  t.Cast(0);
  t.step.Use(buffer, AccessMode::kReadWrite, Role::kInput);
  const OpId cast = t.step.last();
  t.Add(OpCode::kHostWait, Stream::kHost, 1);
  t.step.After(cast);
  t.step.Free(buffer);
  t.step.Finish();
  CHECK(RulesOf(t.program).empty());
}

TEST_CASE("Verify: rules 2 and 3, life of a buffer") {
  Tiny t;
  const BufferId buffer = t.NewAllocated();
  t.Compute(0);
  t.step.Use(buffer, AccessMode::kWrite, Role::kOutput);
  SUBCASE("never freed: the second step allocates again") {
    t.step.Finish();
    CHECK(RulesOf(t.program) == std::set<int>{2});
    const Finding finding = Verify(t.program)[0];
    CHECK(finding.first == "step 1: mb0.fwd");
    CHECK(finding.second == "step 2: mb0.fwd");
  }
  SUBCASE("freed twice") {
    t.step.Free(buffer);
    t.Compute(1);
    t.step.Free(buffer);
    t.step.Finish();
    CHECK(RulesOf(t.program) == std::set<int>{2});
    const Finding finding = Verify(t.program)[0];
    CHECK(finding.first == "step 1: mb0.fwd#1");
    CHECK(finding.second == "step 1: end");
  }
  SUBCASE("used after its free") {
    t.step.Free(buffer);
    t.Compute(1);
    t.step.Use(buffer, AccessMode::kRead, Role::kInput);
    t.step.Finish();
    CHECK(RulesOf(t.program) == std::set<int>{3});
  }
}

TEST_CASE("Verify: rule 4, a read before any write") {
  Tiny t;
  const BufferId buffer = t.NewAllocated();
  t.Compute(0);
  t.step.Use(buffer, AccessMode::kReadWrite, Role::kOutput);
  t.step.Free(buffer);
  t.step.Finish();
  CHECK(RulesOf(t.program) == std::set<int>{4});
  t.program.buffers[buffer.value].zero_filled = true;
  CHECK(RulesOf(t.program).empty());
}

TEST_CASE("Verify: rule 7, a collective larger than its buffers") {
  // 4 ranks gather 256 B in all: 64 B read, 256 B written.
  for (const auto& [shard, full] : {std::pair{64, 256}, {63, 256}, {64, 255}}) {
    Tiny t;
    const BufferId input = t.NewAllocated(Bytes(shard));
    const BufferId output = t.NewAllocated(Bytes(full));
    t.Add(OpCode::kCast, Stream::kGather, 0);
    t.step.Use(input, AccessMode::kWrite, Role::kOutput);
    t.Add(OpCode::kAllGather, Stream::kGather, 0, Bytes(256), GroupId(0));
    t.step.Use(input, AccessMode::kRead, Role::kInput);
    t.step.Use(output, AccessMode::kWrite, Role::kOutput);
    const std::uint8_t gather = 1U << static_cast<unsigned>(Stream::kGather);
    t.step.Free(input, gather);
    t.step.Free(output, gather);
    t.step.Finish();
    const bool is_legal = shard == 64 && full == 256;
    CHECK(RulesOf(t.program) == (is_legal ? std::set<int>{} : std::set<int>{7}));
  }
}

TEST_CASE("Verify: rule 7, a copy between host and device larger than its buffers") {
  // 256 B each way, from a buffer into another.
  for (const OpCode code : {OpCode::kCopyH2d, OpCode::kCopyD2h}) {
    for (const auto& [read, written] : {std::pair{256, 256}, {255, 256}, {256, 255}}) {
      Tiny t;
      const bool to_device = code == OpCode::kCopyH2d;
      const BufferId input = t.NewAllocated(Bytes(read));
      const BufferId output = t.NewAllocated(Bytes(written));
      t.program.buffers[(to_device ? input : output).value].on_host = true;
      t.Add(OpCode::kInitialize, Stream::kGather, 0);
      t.step.Use(input, AccessMode::kWrite, Role::kOutput);
      t.Add(code, Stream::kGather, 0, Bytes(256));
      t.step.Use(input, AccessMode::kRead, Role::kInput);
      t.step.Use(output, AccessMode::kWrite, Role::kOutput);
      const std::uint8_t gather = 1U << static_cast<unsigned>(Stream::kGather);
      t.step.Free(input, gather);
      t.step.Free(output, gather);
      t.step.Finish();
      const bool is_legal = read == 256 && written == 256;
      CHECK(RulesOf(t.program) == (is_legal ? std::set<int>{} : std::set<int>{7}));
    }
  }
}

TEST_CASE("Verify: rule 7, a copy of what is no buffer, such as a batch") {
  Tiny t;
  const BufferId batch = t.NewAllocated(Bytes(256));
  t.Add(OpCode::kCopyH2d, Stream::kGather, 0, Bytes(256));
  t.step.Use(batch, AccessMode::kWrite, Role::kOutput);
  t.step.Free(batch, 1U << static_cast<unsigned>(Stream::kGather));
  t.step.Finish();
  CHECK(RulesOf(t.program).empty());
}

TEST_CASE("Verify: rule 1, ids that lead nowhere") {
  Tiny t;
  t.Compute(0);
  t.Cast(0);
  t.step.After(OpId(0));
  t.step.Finish();
  CHECK(RulesOf(t.program).empty());
  SUBCASE("a forward edge") {
    t.program.step.edges[0] = Edge::FromOp(OpId(1));
  }
  SUBCASE("a slot that nobody sets") {
    t.program.step.edges[0] = Edge::FromSlot(0);
    t.program.carry_slot_count = 1;
  }
  SUBCASE("a shape out of range") {
    t.program.step.ops[1].shape = ShapeId(7);
  }
  CHECK(RulesOf(t.program) == std::set<int>{1});
}

TEST_CASE("Verify: findings stop at 20") {
  Tiny t;
  for (std::uint8_t i = 0; i < 50; ++i) {
    const BufferId buffer = t.NewAllocated();
    t.Compute(i);
    t.step.Use(buffer, AccessMode::kRead, Role::kInput);
    t.step.Free(buffer);
  }
  t.step.Finish();
  CHECK(Verify(t.program).size() == kMaxFindings);
}

TEST_CASE("VerifyRanks: two streams, two groups") {
  // Rank class 0 gathers on "shard", then reduces on "shard.reduce"; class 1 the other way round.
  const auto make = [](bool gather_first, bool one_stream, bool with_edge) {
    Tiny t;
    t.program.groups = {{"shard", 4, 1}, {"shard.reduce", 4, 1}};
    const auto gather = [&] { t.Add(OpCode::kBarrier, Stream::kGather, 0, Bytes(0), GroupId(0)); };
    const auto reduce = [&] {
      t.Add(OpCode::kBarrier, one_stream ? Stream::kGather : Stream::kReduce, 1, Bytes(0),
            GroupId(1));
    };
    gather_first ? gather() : reduce();
    const OpId first = t.step.last();
    gather_first ? reduce() : gather();
    if (with_edge) {
      t.step.After(first);
    }
    t.step.Finish();
    return t.program;
  };
  const auto findings = [](const Program& a, const Program& b) {
    const std::array<const Program*, 2> classes = {&a, &b};
    std::vector<Finding> found = VerifyRanks(classes);
    CHECK(found.empty() == BruteForceRanksAgree(classes));
    return found;
  };
  SUBCASE("equal") {
    CHECK(findings(make(true, true, false), make(true, true, false)).empty());
  }
  SUBCASE("independent streams") {
    CHECK(findings(make(true, false, false), make(false, false, false)).empty());
  }
  SUBCASE("on one stream the ranks wait for each other") {
    const auto found = findings(make(true, true, false), make(false, true, false));
    REQUIRE(found.size() == 1);
    CHECK(found[0].rule == 8);
    CHECK(found[0].first == "step 1: mb0.fwd.barrier");
    CHECK(found[0].second == "step 1: mb0.fwd.barrier#1");
  }
  SUBCASE("one rank leaves the last collective out") {
    const Program both = make(true, true, false);
    Tiny t;
    t.program.groups = both.groups;
    t.Add(OpCode::kBarrier, Stream::kGather, 0, Bytes(0), GroupId(0));
    t.step.Finish();
    for (const bool is_first : {true, false}) {
      const auto found = is_first ? findings(t.program, both) : findings(both, t.program);
      REQUIRE_FALSE(found.empty());
      CHECK(found[0].rule == 8);
      CHECK((is_first ? found[0].second : found[0].first) == "step 1: mb0.fwd.barrier#1");
      CHECK((is_first ? found[0].first : found[0].second) == "(none)");
    }
  }
  SUBCASE("through edges they do, too") {
    CHECK(findings(make(true, false, true), make(false, false, true)).size() == 1);
  }
}

TEST_CASE("Verify accepts random programs and judges their mutants as the brute force does") {
  MutantCounts counts;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    RandomProgramOptions options;
    options.max_units = seed % 10 == 0 ? 3 : 2;
    options.max_micro_batches = seed % 5 == 0 ? 2 : 1;
    CheckMutants(RandomProgram(seed, options), counts);
  }
  // Both verdicts must really occur, or the comparison proves nothing.
  for (const Mutation mutation :
       {Mutation::kDeleteEdge, Mutation::kDeleteEvent, Mutation::kDeleteWait,
        Mutation::kMoveFreeEarlier, Mutation::kDropPoint, Mutation::kDuplicatePoint}) {
    CAPTURE(static_cast<int>(mutation));
    CHECK(counts.legal[mutation] > 0);
    CHECK(counts.illegal[mutation] > 0);
  }
  CHECK(counts.legal[Mutation::kShrinkBuffer] == 0);
  CHECK(counts.swaps_legal > 0);
  CHECK(counts.swaps_illegal_alone > 0);
  CHECK(counts.swaps_illegal_together > 0);
  MESSAGE(counts.Text());
}

}  // namespace
}  // namespace shardwright
