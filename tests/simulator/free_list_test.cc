#include "simulator/internal/free_list.h"

#include <cstdint>
#include <iterator>
#include <random>
#include <set>
#include <tuple>

#include <doctest/doctest.h>

namespace shardwright::internal {
namespace {

using Key = std::tuple<std::int64_t, std::int64_t, std::uint32_t>;  // size, address, block

Key KeyOf(const FreeEntry& entry) {
  return {entry.size, entry.address, entry.block};
}

FreeEntry EntryOf(const Key& key) {
  return {std::get<0>(key), std::get<1>(key), std::get<2>(key)};
}

void CompareAll(const FreeList& list, const std::set<Key>& expected) {
  REQUIRE(list.empty() == expected.empty());
  auto it = expected.begin();
  for (auto p = list.begin(); p != list.end(); p = list.Next(p)) {
    REQUIRE(it != expected.end());
    REQUIRE(KeyOf(list.at(p)) == *it);
    ++it;
  }
  REQUIRE(it == expected.end());
  if (!expected.empty()) {
    REQUIRE(KeyOf(list.at(list.Last())) == *std::prev(expected.end()));
  }
}

// Random inserts, erases and replacements on a list of up to some thousand entries (many chunks),
// in phases of growth and shrinkage, against std::set. Few sizes, so that the address often
// decides.
TEST_CASE("FreeList: equals std::set under random changes") {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const std::int64_t sizes = seed % 2 == 0 ? 5 : 100'000;
    const int phase_length = seed % 3 == 0 ? 100 : 1500;
    FreeList list;
    std::set<Key> expected;
    const auto new_key = [&] {
      // Unique addresses; a block number that shows whether the entry came along.
      const auto address = static_cast<std::int64_t>(random() % (std::uint64_t{1} << 40));
      return Key{static_cast<std::int64_t>(random()) % sizes, address,
                 static_cast<std::uint32_t>(random())};
    };
    const auto position_of = [&](const Key& key) {
      const auto p = list.LowerBound(std::get<0>(key), std::get<1>(key));
      REQUIRE(p != list.end());
      REQUIRE(KeyOf(list.at(p)) == key);
      return p;
    };
    for (int step = 0; step < 6000; ++step) {
      const bool grows = (step / phase_length) % 2 == 0;
      const std::uint64_t choice = random() % 10;
      const auto pick = [&] {
        const auto from = expected.lower_bound(new_key());
        return from == expected.end() ? *expected.begin() : *from;
      };
      if (expected.empty() || choice < (grows ? 6u : 1u)) {
        const Key key = new_key();
        list.Insert(EntryOf(key));
        expected.insert(key);
      } else if (choice < 8) {
        const Key key = pick();
        list.Erase(position_of(key));
        expected.erase(key);
      } else {
        const Key old_key = pick();
        Key key = new_key();
        if (choice == 9) {  // close to the old place
          std::get<0>(key) = std::get<0>(old_key) + static_cast<std::int64_t>(random() % 3) - 1;
        }
        list.Replace(position_of(old_key), EntryOf(key));
        expected.erase(old_key);
        expected.insert(key);
      }
      const Key probe = new_key();
      const auto at = list.LowerBound(std::get<0>(probe), std::get<1>(probe));
      const auto at_expected =
          expected.lower_bound({std::get<0>(probe), std::get<1>(probe), std::uint32_t{0}});
      REQUIRE((at == list.end()) == (at_expected == expected.end()));
      if (at != list.end()) {
        REQUIRE(KeyOf(list.at(at)) == *at_expected);
      }
      if (step % 50 == 0) {
        CompareAll(list, expected);
      }
    }
    CompareAll(list, expected);
    list.Clear();
    CompareAll(list, {});
    list.Insert({1, 2, 3});
    CompareAll(list, {{1, 2, 3}});
  }
}

// Every new entry is the smallest so far, so the beginning of the first chunk moves with each
// insertion, or with each replacement; all entries must be found afterwards.
TEST_CASE("FreeList: entries that come in descending order are found") {
  for (const bool replaces : {false, true}) {
    CAPTURE(replaces);
    FreeList list;
    std::set<Key> expected;
    if (replaces) {
      for (std::uint32_t i = 0; i < 60; ++i) {
        list.Insert({10'000 + i, 0, i});
      }
      for (std::uint32_t i = 0; i < 60; ++i) {
        list.Replace(list.LowerBound(10'000 + i, 0), {9'000 - i, 0, i});
        expected.insert({9'000 - i, 0, i});
      }
    }
    for (std::uint32_t i = 0; i < 500; ++i) {
      // The first half continues downwards, the second half lies between the others.
      const std::int64_t size = i < 250 ? 8'000 - 4 * i : 8'002 - 4 * (i - 250);
      list.Insert({size, 0, i});
      expected.insert({size, 0, i});
      CompareAll(list, expected);
      for (const Key& key : expected) {
        const auto p = list.LowerBound(std::get<0>(key), std::get<1>(key));
        REQUIRE(p != list.end());
        REQUIRE(KeyOf(list.at(p)) == key);
      }
    }
  }
}

}  // namespace
}  // namespace shardwright::internal
