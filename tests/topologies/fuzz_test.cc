// Damaged files must end in an InputError, never in a crash, a hang or a silent success of
// nonsense.

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

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

// One to four random edits: a byte replaced, a piece cut, a piece doubled, a number made huge.
std::string Damage(std::string text, Random& random) {
  constexpr std::string_view kBytes = "{}[]\",:0123456789-eE. \n\\GxnT\x80\xff";
  for (std::size_t edit = 0; edit <= random.Draw(4); ++edit) {
    const std::size_t at = random.Draw(text.size());
    const std::size_t length = 1 + random.Draw(30);
    switch (random.Draw(4)) {
      case 0:
        text[at] = kBytes[random.Draw(kBytes.size())];
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(random.Draw(text.size()), text.substr(at, length));
        break;
      default: {
        const std::size_t digit = text.find_first_of("0123456789", at);
        text.insert(digit == std::string::npos ? at : digit, "99999999");
        break;
      }
    }
    if (text.empty()) {
      return text;
    }
  }
  return text;
}

TEST_CASE("Fuzz: damaged cluster files, 3000 of them") {
  std::ifstream in("data/topologies/new_cluster.json");
  const std::string good((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  REQUIRE_FALSE(good.empty());
  Random random(2026);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    const std::string text = Damage(good, random);
    CAPTURE(i);
    try {
      const Cluster cluster = ParseCluster(text, "f.json");
      // What was accepted must work.
      CHECK(ParseCluster(ClusterJson(cluster), "f.json") == cluster);
      CHECK(FindRing(cluster, {cluster.RankCount(), 1}).Rate().value >= 0);
      CHECK(FindHostCopyRates(cluster).to_device_together.value >= 0);
    } catch (const InputError& e) {
      ++refused;
      CHECK(std::string(e.what()).find("f.json") != std::string::npos);
    }
  }
  CHECK(refused > 1500);  // most damage is visible
}

TEST_CASE("Fuzz: damaged profiles, 500 of them") {
  const std::string good = ProfileJson(LoadProfile("h100-torch-eager"));
  Random random(7);
  for (int i = 0; i < 500; ++i) {
    const std::string text = Damage(good, random);
    CAPTURE(i);
    try {
      const Profile profile = ParseProfile(text, "f.json");
      CHECK(ParseProfile(ProfileJson(profile), "f.json") == profile);
    } catch (const InputError& e) {
      CHECK(std::string(e.what()).find("f.json") != std::string::npos);
    }
  }
}

TEST_CASE("Fuzz: damaged descriptions, 3000 of them") {
  const std::string good =
      "a100-80 x4, nvlink 300 GB/s, pcie 25 GB/s, host 1 TiB, nic 2x100 Gbit/s, nodes 64, level "
      "leaf 16 nodes 2:1";
  Random random(99);
  for (int i = 0; i < 3000; ++i) {
    CAPTURE(i);
    try {
      const Cluster cluster = LoadCluster(Damage(good, random));
      CHECK(cluster.RankCount() >= 1);
    } catch (const InputError& e) {
      CHECK_FALSE(std::string(e.what()).empty());
    }
  }
}

}  // namespace
}  // namespace shardwright
