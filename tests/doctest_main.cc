#define DOCTEST_CONFIG_IMPLEMENT
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "tests/skip.h"

namespace shardwright {
namespace {

std::vector<std::string>& SkipReasons() {
  static std::vector<std::string> reasons;
  return reasons;
}

}  // namespace

void SkipTest(std::string_view reason) {
  SkipReasons().emplace_back(reason);
}

}  // namespace shardwright

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  const int result = context.run();
  for (const std::string& reason : shardwright::SkipReasons()) {
    std::cout << "[SKIPPED] " << reason << "\n";
  }
  const bool skipped = result == 0 && !shardwright::SkipReasons().empty();
  return skipped ? shardwright::kSkipExitCode : result;
}
