#pragma once

// Writes, for each test case, its name, its seconds and the mutants that it reached: a line of
// SW_MUTANT_TRACE.

#include <chrono>
#include <cstring>
#include <fstream>

#include <doctest/doctest.h>

#include "tests/mutation/switch.h"

namespace sw_mutant {

class Listener : public doctest::IReporter {
 public:
  explicit Listener(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& test) override {
    name_ = test.m_name;
    start_ = std::chrono::steady_clock::now();
    // What ran before the first case belongs to every case.
    if (kReached != nullptr && !is_first_) {
      std::memset(kReached, 0, kMost);
    }
    is_first_ = false;
  }
  void test_case_end(const doctest::CurrentTestCaseStats&) override {
    if (kReached == nullptr) {
      return;
    }
    std::ofstream out(std::getenv("SW_MUTANT_TRACE"), std::ios::app);
    out << name_ << '\t'
        << std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() << '\t';
    for (int i = 0; i < kMost; ++i) {
      if (kReached[i] != 0) {
        out << ' ' << i;
      }
    }
    out << '\n';
  }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}

 private:
  std::string name_;
  std::chrono::steady_clock::time_point start_;
  bool is_first_ = true;
};

REGISTER_LISTENER("sw_mutant", 1, Listener);

}  // namespace sw_mutant
