#pragma once

// What a foreign file may cost. Each reader counts what it takes of each kind (bytes of text,
// values, rows, names) against a limit that no honest file comes near, so that a small file cannot
// make it fill the memory or run for minutes. docs/security.md lists the limits.

#include <cstdint>
#include <string>

namespace shardwright {

// Counts one kind of thing against its limit.
class Budget {
 public:
  // `what` is what is counted, in the plural; `where` names the file in errors.
  Budget(std::string where, std::string what, std::int64_t limit);

  // Throws InputError, with the limit and the flag that lifts it, when `count` more pass the limit.
  void Take(std::int64_t count = 1) {
    if (count > left_) {
      Refuse();
    }
    left_ -= count;
  }

 private:
  [[noreturn]] void Refuse() const;

  std::string where_;
  std::string what_;
  std::int64_t limit_;
  std::int64_t left_;
};

// All limits are multiplied by this: how patient the user is, and how much memory there is to
// spare, is the same for every reader of a process. 1 until set; set once, before the first file is
// read (--budget N of the program).
inline constexpr std::int64_t kLargestBudgetFactor = 1000;
void SetBudgetFactor(std::int64_t factor);
[[nodiscard]] std::int64_t BudgetFactor();

// The memory that this process may still take, in bytes: what the machine has free, or less where a
// control group or a limit of the process says so.
[[nodiscard]] std::int64_t AvailableMemory();

}  // namespace shardwright
