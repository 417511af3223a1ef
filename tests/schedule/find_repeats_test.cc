// FindRepeats against planted repeats and against a naive search on random sequences.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "schedule/program.h"
#include "schedule/repetition.h"

namespace shardwright {
namespace {

// A body written as text: each letter is an op of that shape; '|' marks a layer, '/' a micro-batch.
// Ops of capital letters run on the gather stream.
struct Sequence {
  Program program;
  ShapeInterner interner{program};
  BodyBuilder builder{program, program.step};

  OpId Add(char letter) {
    OpShape shape;
    shape.bytes = Bytes(letter);
    shape.code = OpCode::kCast;
    shape.stream = letter < 'a' ? Stream::kGather : Stream::kCompute;
    return builder.Add({interner.Intern(shape)});
  }
  void Mark(char kind) {
    if (kind == '|') {
      builder.MarkLayer();
    } else {
      builder.MarkMicroBatch();
    }
  }
  Sequence& Write(const std::string& text) {
    for (const char c : text) {
      if (c == '|' || c == '/') {
        Mark(c);
      } else {
        Add(c);
      }
    }
    return *this;
  }
  std::vector<Repeat> Find() {
    builder.Finish();
    return FindRepeats(program, program.step);
  }
};

TEST_CASE("FindRepeats: planted repeats") {
  Sequence s;
  SUBCASE("one run between other ops") {
    s.Write("xy|ab|ab|ab|ab|z");
    CHECK(s.Find() == std::vector<Repeat>{{2, 2, 4}});
  }
  SUBCASE("two of a kind are too few") {
    s.Write("|ab|ab|z");
    CHECK(s.Find().empty());
  }
  SUBCASE("a period of two marks") {
    s.Write("|a|b|a|b|a|b|");
    CHECK(s.Find() == std::vector<Repeat>{{0, 2, 3}});
  }
  SUBCASE("forward and backward") {
    s.Write("|f|f|f|f|l|gg|gg|gg|gg|");
    CHECK(s.Find() == std::vector<Repeat>{{0, 1, 4}, {5, 2, 4}});
  }
  SUBCASE("micro-batches, each with layers") {
    s.Write("/|a|a|a|b/|a|a|a|b/|a|a|a|b/o");
    CHECK(s.Find() == std::vector<Repeat>{{0, 4, 3}, {0, 1, 3}, {4, 1, 3}, {8, 1, 3}});
  }
  SUBCASE("the first micro-batch differs") {
    s.Write("/|a|a|a|c/|a|a|a|b/|a|a|a|b/|a|a|a|b/o");
    CHECK(s.Find() == std::vector<Repeat>{{0, 1, 3}, {4, 4, 3}, {4, 1, 3}, {8, 1, 3}, {12, 1, 3}});
  }
  SUBCASE("layers that run across a micro-batch border are two runs") {
    s.Write("/|a|a|a/|a|a|a|b");
    CHECK(s.Find() == std::vector<Repeat>{{0, 1, 3}, {3, 1, 3}});
  }
  SUBCASE("no marks, no repeats") {
    s.Write("aaaaaa");
    CHECK(s.Find().empty());
  }
  SUBCASE("an empty body") {
    CHECK(s.Find().empty());
  }
}

TEST_CASE("FindRepeats: edges and memory points belong to a stretch") {
  // Four layers "ab"; b waits for a. `variant` spoils the third.
  for (const int variant : {0, 1, 2}) {
    CAPTURE(variant);
    Sequence s;
    for (int layer = 0; layer < 4; ++layer) {
      s.Mark('|');
      const bool is_odd_one = layer == 2 && variant != 0;
      const BufferId buffer =
          s.builder.NewAllocated({Bytes(is_odd_one && variant == 1 ? 128 : 64)});
      OpShape gather;
      gather.code = OpCode::kCast;
      gather.stream = Stream::kGather;
      const OpId a = s.builder.Add({s.interner.Intern(gather)});
      s.Add('b');
      if (!(is_odd_one && variant == 2)) {
        s.builder.After(a);
      }
      s.builder.Free(buffer);
    }
    s.Mark('|');
    s.Add('z');
    const std::vector<Repeat> found = s.Find();
    // The first layer's points differ from the others': no free precedes it. Without an odd one
    // the run begins with the second layer.
    CHECK(found == (variant == 0 ? std::vector<Repeat>{{2, 2, 3}} : std::vector<Repeat>{}));
  }
}

TEST_CASE("FindRepeats: far edges may reach ever further back") {
  // Backward op i waits for forward op n - 1 - i, on another stream; or for one without pattern.
  const std::vector<std::uint32_t> scattered = {0, 2, 3, 5, 1, 4};
  for (const bool is_mirrored : {true, false}) {
    CAPTURE(is_mirrored);
    Sequence s;
    const std::uint32_t n = 6;
    std::vector<OpId> forward;
    for (std::uint32_t i = 0; i < n; ++i) {
      OpShape shape;
      shape.code = OpCode::kCast;
      shape.stream = Stream::kGather;
      forward.push_back(s.builder.Add({s.interner.Intern(shape)}));
    }
    s.Write("xxx");
    for (std::uint32_t i = 0; i < n; ++i) {
      s.Mark('|');
      s.Add('b');
      s.builder.After(is_mirrored ? forward[n - 1 - i] : forward[scattered[i]]);
    }
    s.Mark('|');
    s.Add('z');
    const std::vector<Repeat> found = s.Find();
    CHECK(found == (is_mirrored ? std::vector<Repeat>{{9, 1, 6}} : std::vector<Repeat>{}));
  }
}

TEST_CASE("FindRepeats: what is before the first micro-batch of a run may differ") {
  for (const char mark : {'/', '|'}) {
    Sequence s;
    s.Mark(mark);
    OpId before = s.Add('X');
    s.Add('y');
    for (int m = 0; m < 4; ++m) {
      s.Mark(mark);
      s.Add('a');
      s.builder.After(before);  // two ops back at first, then one
      before = s.Add('B');
    }
    const Repeat all{2, 2, 4};
    const Repeat all_but_first{4, 2, 3};
    CHECK(s.Find() == std::vector<Repeat>{mark == '/' ? all : all_but_first});
  }
}

TEST_CASE("FindRepeats: carried edges may name any slots") {
  Sequence s;
  for (std::uint32_t layer = 0; layer < 4; ++layer) {
    s.Mark('|');
    s.Add('a');
    s.builder.AfterSlot(layer);
  }
  s.Mark('|');
  s.Add('a');  // without an edge
  CHECK(s.Find() == std::vector<Repeat>{{0, 1, 4}});
}

// The naive reading of repetition.h: is [a + length, a + 2 length) a copy of [a, a + length)?
bool IsCopy(const Program& program, std::uint32_t a, std::uint32_t length) {
  const Body& body = program.step;
  for (std::uint32_t i = a; i < a + length; ++i) {
    const std::uint32_t j = i + length;
    if (!(body.ops[i].shape == body.ops[j].shape)) {
      return false;
    }
    const auto points_i = body.PointsBefore(OpId(i));
    const auto points_j = body.PointsBefore(OpId(j));
    const auto edges_i = body.EdgesOf(OpId(i));
    const auto edges_j = body.EdgesOf(OpId(j));
    if (points_i.size() != points_j.size() || edges_i.size() != edges_j.size()) {
      return false;
    }
    for (std::size_t p = 0; p < points_i.size(); ++p) {
      const Bytes size_i = program.buffers[points_i[p].buffer.value].size;
      const Bytes size_j = program.buffers[points_j[p].buffer.value].size;
      if (points_i[p].kind != points_j[p].kind || size_i != size_j) {
        return false;
      }
    }
    for (std::size_t e = 0; e < edges_i.size(); ++e) {
      const std::int64_t back_i = std::int64_t{i} - edges_i[e].value;
      const std::int64_t back_j = std::int64_t{j} - edges_j[e].value;
      const bool is_far = back_i > 2 * std::int64_t{length} && back_j > 2 * std::int64_t{length};
      if (back_i != back_j && !(is_far && edges_j[e].value <= edges_i[e].value)) {
        return false;
      }
    }
  }
  return true;
}

std::uint32_t CopiesFrom(const Program& program, const std::vector<std::uint32_t>& marks,
                         std::size_t m, std::size_t p) {
  const std::uint32_t length = marks[m + p] - marks[m];
  std::uint32_t count = 1;
  while (m + (count + 1) * p < marks.size() &&
         marks[m + (count + 1) * p] == marks[m] + (count + 1) * length &&
         IsCopy(program, marks[m] + (count - 1) * length, length)) {
    ++count;
  }
  return count;
}

// The runs that a greedy search over `marks` must report.
std::vector<Repeat> NaiveRuns(const Program& program, const std::vector<std::uint32_t>& marks) {
  std::vector<Repeat> runs;
  std::size_t m = 0;
  while (m + 1 < marks.size()) {
    std::size_t next = m + 1;
    for (std::size_t p = 1; p <= 8 && m + p < marks.size(); ++p) {
      const std::uint32_t count = CopiesFrom(program, marks, m, p);
      if (count >= 3) {
        runs.push_back({marks[m], marks[m + p] - marks[m], count});
        next = m + count * p;
        break;
      }
    }
    m = next;
  }
  return runs;
}

TEST_CASE("FindRepeats: random sequences") {
  std::mt19937 random(11);
  const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  std::size_t nested = 0;
  std::size_t plain = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    CAPTURE(trial);
    Sequence s;
    // A few words over a small alphabet, so that equal neighbours are frequent.
    const std::uint32_t micro_batches = 1 + below(5);
    const bool are_equal = below(2) == 0;
    std::vector<std::uint32_t> words;
    for (std::uint32_t w = 0; w < 3 + below(6); ++w) {
      words.push_back(below(3));
    }
    for (std::uint32_t m = 0; m < micro_batches; ++m) {
      s.Mark('/');
      for (std::uint32_t& word : words) {
        word = are_equal || below(4) != 0 ? word : below(3);
        s.Mark('|');
        const BufferId buffer = s.builder.NewAllocated({Bytes(64)});
        OpShape gather;
        gather.code = OpCode::kCast;
        gather.stream = Stream::kGather;
        const OpId a = s.builder.Add({s.interner.Intern(gather)});
        s.Add(static_cast<char>('a' + word));
        if (word == 1 || below(30) == 0) {
          s.builder.After(a);
        }
        s.builder.Free(buffer);
      }
    }
    const Program& program = s.program;
    const std::vector<Repeat> found = s.Find();
    const auto end = static_cast<std::uint32_t>(program.step.size());
    std::vector<std::uint32_t> outer = program.step.micro_batch_marks;
    outer.push_back(end);
    std::vector<Repeat> expected;
    const std::vector<Repeat> outer_runs = NaiveRuns(program, outer);
    for (std::size_t m = 0; m + 1 < outer.size(); ++m) {
      for (const Repeat& run : outer_runs) {
        if (run.first == outer[m]) {
          expected.push_back(run);
          ++nested;
        }
      }
      std::vector<std::uint32_t> inner;
      const std::vector<std::uint32_t>& layers = program.step.layer_marks;
      std::copy_if(layers.begin(), layers.end(), std::back_inserter(inner),
                   [&](std::uint32_t mark) { return mark >= outer[m] && mark < outer[m + 1]; });
      inner.push_back(outer[m + 1]);
      const std::vector<Repeat> runs = NaiveRuns(program, inner);
      plain += runs.size();
      expected.insert(expected.end(), runs.begin(), runs.end());
    }
    CHECK(found == expected);
  }
  CHECK(nested > 100);
  CHECK(plain > 100);
}

}  // namespace
}  // namespace shardwright
