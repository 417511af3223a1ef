"""Plants one violation of each rule that matters and expects clang-tidy 14, under .clang-tidy, to name it.

clang-tidy 14 ignores misspelt checks and options without a word, so only this shows that a rule is on.
Exits with 77, a skip, where clang-tidy-14 is not installed.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SKIP = 77

# check -> code that breaks it. Each snippet is a file of its own, so that no finding hides another.
VIOLATIONS = {
    "bugprone-use-after-move": """#include <string>
#include <utility>
std::string Twice(std::string text) {
  std::string taken = std::move(text);
  return taken + text;
}
""",
    "clang-analyzer-core.NullDereference": "int Read() {\n  int* nothing = nullptr;\n  return *nothing;\n}\n",
    "cppcoreguidelines-init-variables": "int Unset(bool set) {\n  int value;\n  if (set) {\n    value = 1;\n  }\n"
    "  return set ? value : 0;\n}\n",
    "cppcoreguidelines-narrowing-conversions": "int Narrow(double wide) {\n  int narrow = 0;\n  narrow += wide;\n"
    "  return narrow;\n}\n",
    "cppcoreguidelines-pro-type-cstyle-cast": "const char* Cast(const int* value) {\n"
    "  return (const char*)value;\n}\n",
    "google-build-using-namespace": "#include <string>\nusing namespace std;\n",
    "google-explicit-constructor": "struct Bytes {\n  Bytes(int count) : value(count) {}\n  int value;\n};\n",
    "modernize-use-override": "struct Base {\n  virtual ~Base() = default;\n  virtual void Run();\n};\n"
    "struct Derived : Base {\n  virtual void Run();\n};\n",
    "modernize-use-nodiscard": "class Box {\n public:\n  int value() const { return value_; }\n\n private:\n"
    "  int value_ = 0;\n};\n",
    "performance-unnecessary-value-param": "#include <string>\n#include <vector>\n"
    "std::size_t Count(std::vector<std::string> names) { return names.size(); }\n",
    "readability-braces-around-statements": "int Sign(int value) {\n  if (value < 0) return -1;\n  return 1;\n}\n",
    "readability-else-after-return": "int Sign(int value) {\n  if (value < 0) {\n    return -1;\n  } else {\n"
    "    return 1;\n  }\n}\n",
    "readability-function-cognitive-complexity": "int Deep(int n) {\n"
    + "  for (int i = 0; i < n; ++i) {\n" * 7
    + "  n -= i;\n"
    + "  }\n" * 7
    + "  return n;\n}\n",
    "readability-function-size": "int Long(int n) {\n" + "  n += 2;\n" * 71 + "  return n;\n}\n",
    "readability-identifier-naming": "enum class Kind { kGood, bad };\n",
}
# Spellings of the naming rule, one entry each: `invalid case style for <what> '<name>'`.
NAMES = {
    "class": "class snake_type {};\n",
    "function": "int lowerCase();\n",
    "variable": "int Sum() {\n  int CamelLocal = 0;\n  return CamelLocal;\n}\n",
    "parameter": "int Twice(int CamelParameter);\n",
    "private member": "class Box {\n  int value = 0;\n};\n",
    "enum constant": "enum class Kind { bad };\n",
    "global constant": "const int lower_constant = 1;\n",
    "constexpr variable": "constexpr int lower_constant = 1;\n",
    "macro definition": "#define lowerMacro 1\n",
}
CLEAN = """#include <cstdint>
#include <vector>

namespace shardwright {

enum class Kind { kGood, kBad };
constexpr std::int64_t kLimit = 70;

// An accessor may be lower case.
class Counter {
 public:
  [[nodiscard]] std::int64_t value() const { return value_; }
  void Add(std::int64_t amount) { value_ += amount; }

 private:
  std::int64_t value_ = 0;
};

std::int64_t Sum(const std::vector<std::int64_t>& values) {
  std::int64_t sum = 0;
  for (const std::int64_t value : values) {
    sum += value;
  }
  return sum < kLimit ? sum : kLimit;
}

}  // namespace shardwright
"""


def run(tool: str, config: pathlib.Path, file: pathlib.Path) -> str:
    command = [tool, f"--config-file={config}", "--quiet", str(file), "--", "-std=c++20"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def main() -> int:
    config = pathlib.Path(sys.argv[1]) / ".clang-tidy"
    tool = shutil.which("clang-tidy-14")
    if tool is None:
        print("[SKIPPED] clang-tidy-14 is not installed (scripts/install-deps.sh --ci)")
        return SKIP
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "planted.cc"
        for check, code in VIOLATIONS.items():
            file.write_text(code, encoding="utf-8")
            # A finding ends in "[check,alias,...]".
            if not re.search(rf"error: .*[\[,]{re.escape(check)}[,\]]", run(tool, config, file)):
                failures.append(f"{check}: the planted violation was not found")
        for what, code in NAMES.items():
            file.write_text(code, encoding="utf-8")
            if not re.search(rf"error: invalid case style for {what} ", run(tool, config, file)):
                failures.append(f"readability-identifier-naming: the planted {what} was not found")
        file.write_text(CLEAN, encoding="utf-8")
        findings = run(tool, config, file)
        if findings:
            failures.append(f"the clean sample is not accepted:\n{findings}")
    print("\n".join(failures) if failures else f"clang-tidy: {len(VIOLATIONS) + len(NAMES)} violations found")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
