// FindSegments: cuts and kinds worked out by hand.

#include <cstdint>
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
  void Write(const std::string& text) {
    for (const char c : text) {
      if (c == '|') {
        builder.MarkLayer();
      } else if (c == '/') {
        builder.MarkMicroBatch();
      } else {
        Add(c);
      }
    }
  }
  std::vector<Segment> Finish() {
    builder.Finish();
    return FindRepetitions(program).step.segments;
  }
};

TEST_CASE("FindSegments: layers and micro-batches cut, equal ones get equal kinds") {
  Sequence s;
  s.Write("x/|ab|ab|c/|ab|c");
  CHECK(s.Finish() == std::vector<Segment>{{0, 0, 0, 0, 1},
                                           {1, 1, 1, 0, 3},
                                           {3, 1, 1, 0, 3},
                                           {5, 2, 2, 0, 4},
                                           {6, 1, 1, 0, 5},
                                           {8, 2, 2, 0, 6}});
}

TEST_CASE("FindSegments: a copy of a repeat is one segment, a micro-batch always begins one") {
  Sequence s;
  s.Write("|a|b|a|b|a|b|c");
  CHECK(s.Finish() ==
        std::vector<Segment>{{0, 0, 0, 0, 3}, {2, 0, 0, 0, 3}, {4, 0, 0, 0, 3}, {6, 1, 1, 0, 4}});
  Sequence t;  // three equal micro-batches: the repeat of micro-batches hides no layers
  t.Write("/|ab|c/|ab|c/|ab|c");
  CHECK(t.Finish() == std::vector<Segment>{{0, 0, 0, 0, 1},
                                           {2, 1, 1, 0, 2},
                                           {3, 0, 0, 0, 3},
                                           {5, 1, 1, 0, 4},
                                           {6, 0, 0, 0, 5},
                                           {8, 1, 1, 0, 6}});
}

TEST_CASE(
    "FindSegments: where micro-batches part, their last shared op and their last op are cut") {
  Sequence s;
  s.Write("/|ab|cdef|gh/|ab|cdxf|gh/|ab|cdef|gh/i");  // d is the last op before they part
  CHECK(s.Finish() == std::vector<Segment>{{0, 0, 0, 0, 1},
                                           {2, 1, 1, 0, 2},
                                           {3, 2, 2, 0, 3},
                                           {6, 3, 3, 0, 4},
                                           {7, 4, 4, 0, 5},
                                           {8, 0, 0, 0, 6},
                                           {10, 1, 1, 0, 7},
                                           {11, 5, 5, 0, 8},
                                           {14, 3, 3, 0, 9},
                                           {15, 4, 4, 0, 10},
                                           {16, 0, 0, 0, 11},
                                           {18, 1, 1, 0, 12},
                                           {19, 2, 2, 0, 13},
                                           {22, 3, 3, 0, 14},
                                           {23, 4, 4, 0, 15},
                                           {24, 6, 6, 0, 16}});
  Sequence equal;  // nowhere do they part
  equal.Write("/ab/ab/c");
  CHECK(equal.Finish() == std::vector<Segment>{{0, 0, 0, 0, 2}, {2, 0, 0, 0, 2}, {4, 1, 1, 0, 3}});
}

TEST_CASE("FindSegments: near edges count, far ones only for exact kinds") {
  Sequence s;
  const OpId first = s.Add('A');
  s.Write("|b");
  s.builder.After(first);  // one segment back
  s.Write("|b|b|b|b");
  s.builder.After(first);  // five back: far, distance 5
  s.Write("|b");
  s.builder.After(first);  // far, distance 6
  s.Write("|b");
  s.builder.AfterSlot(3);  // to before the body, whichever slot
  s.Write("|b");
  s.builder.AfterSlot(4);
  const std::vector<Segment> found = s.Finish();
  REQUIRE(found.size() == 9);
  CHECK(found[2].kind == found[4].kind);
  CHECK(found[1].kind != found[2].kind);
  CHECK(found[5].kind != found[1].kind);
  CHECK(found[5].kind == found[6].kind);
  CHECK(found[5].exact_kind != found[6].exact_kind);
  CHECK(found[5].far_end == 1);  // op 0 is the last one that a far edge leads to
  CHECK(found[1].far_end == 0);
  CHECK(found[7].exact_kind == found[8].exact_kind);
  CHECK(found[7].kind != found[2].kind);
  CHECK(found[7].far_end == 0);
}

TEST_CASE("FindSegments: a body without marks is one segment, an empty one has none") {
  Sequence s;
  s.Write("aab");
  CHECK(s.Finish() == std::vector<Segment>{{0, 0, 0, 0, 1}});
  Sequence empty;
  CHECK(empty.Finish().empty());
}

}  // namespace
}  // namespace shardwright
