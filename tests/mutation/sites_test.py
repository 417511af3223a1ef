"""What sites.py finds in a few lines, beside what a reader would."""

import unittest

import sites

TEXT = """#include <map>
namespace a {
constexpr int kSize = 3;  // a < b
template <class T>
int F(const std::vector<std::pair<int, int>>& v, int n) {
  SW_CHECK(n > 0, "n - 1");
  int sum = n << 2;
  for (const auto& [a, b] : v) {
    sum += a * b - n;
    Call(a, "x, y; {");
  }
  if (sum < n && !v.empty()) throw InputError("got " + std::to_string(n + 1));
  switch (n) {
    case 7:
      return n == kSize ? sum : n;
  }
  return {};
}
}  // namespace a
"""


class Sites(unittest.TestCase):
    def test_lines_and_changes(self) -> None:
        found = {(site.line, site.what) for site in sites.find(TEXT, 1)}
        constants = {(line, what) for line, what in found if what[1].isdigit()}
        self.assertEqual({(line, what.split(" ")[0]) for line, what in constants}, {(7, "`2`")})
        self.assertEqual(found - constants, {
            (9, "`+=` becomes `-=` in `sum += a * b - n`"),
            (9, "`*` becomes `/` in `a * b`"),
            (9, "`-` becomes `+` in `a * b - n`"),
            (9, "`sum += a * b - n;` is left out"),
            (10, "`Call(a, \"x, y; {\");` is left out"),
            (12, "`<` becomes `<=` in `sum < n`"),
            (12, "`&&` becomes `||` in `sum < n && !v.empty()`"),
            (12, "`sum < n && !v.empty()` is negated"),
            (15, "`==` becomes `!=` in `n == kSize`"),
            (15, "another value than `n == kSize ? sum : n` is returned"),
        })

    def test_the_text_around_stays(self) -> None:
        for site in sites.find(TEXT, 1):
            self.assertIn(TEXT[site.start:site.end], site.text)
            self.assertLessEqual(TEXT[:site.start].count("\n") + 1, site.line)

    def test_lines_without_code_are_not_drawn(self) -> None:
        self.assertEqual(sites.code_lines("// a\n\nint b;\n#define C\n"), [3])


if __name__ == "__main__":
    unittest.main()
