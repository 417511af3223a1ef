#include "core/error.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

TEST_CASE("Error: text of an input error") {
  CHECK(std::string(InputError("f.json: a[3]", "\"400\"", "a rate").what()) ==
        "f.json: a[3]: got \"400\", expected a rate");
  CHECK(std::string(InputError("x", "1", "2", "see y").what()) == "x: got 1, expected 2; see y");
}

TEST_CASE("InputError: what is found may be megabytes, what is shown is not") {
  const std::string shown = std::string(3999, 'a');
  CHECK(std::string(InputError("x", shown + "\u00e9" + shown, "2", shown + "bcd").what()) ==
        "x: got " + shown + "..., expected 2; " + shown + "b...");
  CHECK(std::string(InputError("x", shown + "b", "2").what()) ==
        "x: got " + shown + "b, expected 2");
}

TEST_CASE("Error: paths") {
  const Path root("f.json");
  CHECK(root.str() == "f.json");
  CHECK(root.Field("links").Index(3).Field("bandwidth").str() == "f.json: links[3].bandwidth");
  CHECK(Path().Field("a").str() == "a");
  CHECK(root.str() == "f.json");
}

TEST_CASE("Error: nearest match") {
  const std::vector<std::string> names = {"dgx-a100", "dgx-h100", "dgx-h200", "p5"};
  CHECK(NearestMatch("dgx-h10", names) == "dgx-h100");
  CHECK(NearestMatch("dgx-h300", names) == "dgx-h100");  // two at distance 1: the first
  CHECK(NearestMatch("something-else", names).empty());
  // Two swapped letters are a smaller mistake than one too many.
  CHECK(NearestMatch("modle", std::vector<std::string>{"mode", "model"}) == "model");
  CHECK(NearestMatch(std::string(100000, 'x'), names).empty());
  CHECK(DidYouMean("p6", names) == "did you mean \"p5\"?");
  CHECK(DidYouMean("something-else", names).empty());
}

}  // namespace
}  // namespace shardwright
