#pragma once

// Damaged files for programs that fuzz readers: each must be read or refused by an InputError.
// Prints what it did; a crash, a hang or another exception is the failure.
//
//   PROGRAM [ROUNDS]   so many files per reader, 300 without, always the same ones
//   PROGRAM SECONDSs   as many as fit in this time, per reader (scripts/deep.sh)

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "tests/traces/temporary_file.h"

namespace shardwright::testing {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::size_t Draw(std::size_t n) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::size_t>(state_ >> 33) % n;
  }

 private:
  std::uint64_t state_;
};

// One to four edits: a byte replaced, a piece cut or doubled, the rest cut off, a number made huge.
inline std::string Damage(std::string text, Random& random) {
  for (std::size_t edit = 0; edit <= random.Draw(4) && !text.empty(); ++edit) {
    const std::size_t at = random.Draw(text.size());
    const std::size_t length = 1 + random.Draw(40);
    switch (random.Draw(5)) {
      case 0:
        text[at] = static_cast<char>(random.Draw(256));
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(random.Draw(text.size()), text.substr(at, length));
        break;
      case 3:
        text.resize(random.Draw(8) == 0 ? at : text.size());
        break;
      default: {
        const std::size_t digit = text.find_first_of("0123456789", at);
        text.insert(digit == std::string::npos ? at : digit, "99999999999");
        break;
      }
    }
  }
  return text;
}

struct FuzzTarget {
  std::string name;
  std::string good;
  std::function<void(const std::string& content)> read;
};

// A reader of files whose names end with `ending`.
template <class Read>
std::function<void(const std::string&)> OfFile(Read read, const std::string& ending = "") {
  return [read, ending](const std::string& content) {
    const TemporaryFile file(content, ending);
    (void)read(file.name());
  };
}

// Returns false when even the undamaged file is refused: then nothing was tested.
inline bool Fuzz(const FuzzTarget& target, int rounds, std::optional<double> seconds) {
  const auto begin = std::chrono::steady_clock::now();
  const auto goes_on = [&](int round) {
    const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin;
    return seconds ? gone.count() < *seconds : round < rounds;
  };
  try {
    target.read(target.good);
  } catch (const InputError& error) {
    std::printf("%s: the undamaged file is refused: %s\n", target.name.c_str(), error.what());
    return false;
  }
  Random random(20261122);
  int read = 0, refused = 0;
  for (int round = 0; goes_on(round); ++round) {
    const std::string content = Damage(target.good, random);
    try {
      target.read(content);
      ++read;
    } catch (const InputError&) {
      ++refused;
    }
  }
  std::printf("%s: %d read, %d refused\n", target.name.c_str(), read, refused);
  return true;
}

// The exit code.
inline int FuzzAll(const std::vector<FuzzTarget>& targets, int argc, char** argv) {
  int rounds = 300;
  std::optional<double> seconds;
  if (argc > 1 && std::string_view(argv[1]).ends_with('s')) {
    seconds = std::atof(argv[1]);
  } else if (argc > 1) {
    rounds = std::atoi(argv[1]);
  }
  bool is_good = true;
  for (const FuzzTarget& target : targets) {
    is_good = Fuzz(target, rounds, seconds) && is_good;
  }
  return is_good ? 0 : 1;
}

}  // namespace shardwright::testing
