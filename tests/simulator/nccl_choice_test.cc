#include "simulator/costs/nccl_choice.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

constexpr double kTolerance = 1e-9;  // a handful of additions

constexpr double kKib = 1024;
constexpr double kMib = 1024 * 1024;

// The protocol with the least estimate.
std::string Chosen(const NcclPlace& place, double bytes) {
  std::string best;
  Seconds least(1e9);
  for (const char* protocol : {"LL", "LL128", "Simple"}) {
    const Seconds estimate = NcclRingEstimate(place, protocol, bytes).value();
    if (estimate < least) {
      least = estimate;
      best = protocol;
    }
  }
  return best;
}

double NvlsChunkOf(const NcclPlace& place, double bytes) {
  return NvlsChunksOf(place, bytes).chunk;
}

// "ring LL" and so on: the algorithm and protocol with the least estimate for an all-reduce.
std::string ChosenForAllReduce(const NcclPlace& place, double bytes) {
  std::string best;
  Seconds least(1e9);
  const auto consider = [&](const char* name, NcclAlgorithm algorithm, const char* protocol) {
    const std::optional<Seconds> estimate =
        NcclAllReduceEstimate(place, algorithm, protocol, bytes);
    if (estimate && *estimate < least) {
      least = *estimate;
      best = std::string(name) + " " + protocol;
    }
  };
  for (const char* protocol : {"LL", "LL128", "Simple"}) {
    consider("ring", NcclAlgorithm::kRing, protocol);
    consider("tree", NcclAlgorithm::kTree, protocol);
  }
  consider("NVLS", NcclAlgorithm::kNvls, "Simple");
  consider("NVLSTree", NcclAlgorithm::kNvlsTree, "Simple");
  return best;
}

NcclPlace OneNode(const char* architecture, double gigabytes_per_s) {
  NcclPlace place;
  place.architecture = architecture;
  place.rank_count = 8;
  place.intra_rate = BytesPerSecond(gigabytes_per_s * 1e9);
  return place;
}

// Two nodes of eight with eight adapters of 50 GB/s.
NcclPlace TwoNodes(const char* architecture, double gigabytes_per_s, bool is_amd) {
  NcclPlace place = OneNode(architecture, gigabytes_per_s);
  place.is_amd_host = is_amd;
  place.rank_count = 16;
  place.node_count = 2;
  place.nic_channels = 8;
  place.inter_rate = BytesPerSecond(400e9);
  return place;
}

TEST_CASE("NCCL's estimates inside a node, by hand") {
  // Hopper, 450 GB/s: the search reaches 12 x 30 = 360. 7 hops; 8 MB, of which 7 are sent.
  const NcclPlace place = OneNode("hopper", 450);
  const auto micros = [&](const char* protocol) {
    return 1e6 * NcclRingEstimate(place, protocol, 8e6).value().value;
  };
  CHECK(micros("LL") == doctest::Approx(6.6 + 7 * 0.6 + 7000.0 / 141).epsilon(kTolerance));
  CHECK(micros("LL128") == doctest::Approx(14 + 7 * 1.9 + 7000.0 / 331.2).epsilon(kTolerance));
  CHECK(micros("Simple") == doctest::Approx(8.4 + 7 * 3.4 + 7000.0 / 360).epsilon(kTolerance));
}

TEST_CASE("NCCL's estimates between nodes, by hand") {
  // 14 hops inside, 1 between; 8 x 48 GB/s. 16 MB, of which 15 are sent.
  const auto micros = [](const NcclPlace& place, const char* protocol) {
    return 1e6 * NcclRingEstimate(place, protocol, 16e6).value().value;
  };
  const NcclPlace intel = TwoNodes("hopper", 450, false);
  // The host posts in 1 us, which is more than an NVLink hop of LL.
  CHECK(micros(intel, "LL") == doctest::Approx(6.6 + 14 + 2.7 + 15000.0 / 39).epsilon(kTolerance));
  CHECK(micros(intel, "LL128") ==
        doctest::Approx(14 + 14 * 1.9 + 4 + 15000.0 / (8 * 36.7)).epsilon(kTolerance));
  // NVLink's 360 GB/s are below the network's 384.
  CHECK(micros(intel, "Simple") ==
        doctest::Approx(8.4 + 14 * 3.4 + 14 + 15000.0 / 360).epsilon(kTolerance));
  const NcclPlace amd = TwoNodes("blackwell", 900, true);
  CHECK(micros(amd, "LL") ==
        doctest::Approx(6.6 + 14 * 2 + 2.7 + 15000.0 / 22.5).epsilon(kTolerance));
  // Three posts of 2 us per step.
  CHECK(micros(amd, "Simple") ==
        doctest::Approx(8.4 + 14 * 6 + 14 + 15000.0 / 384).epsilon(kTolerance));
}

TEST_CASE("NCCL switches protocols where published sweeps have their steps") {
  // 8x B200: from 8 to 16 MiB a reduce-scatter becomes faster (58 to 52 us).
  const NcclPlace b200 = OneNode("blackwell", 900);
  CHECK(Chosen(b200, 8 * kMib) == "LL");
  CHECK(Chosen(b200, 16 * kMib) != "LL");
  CHECK(Chosen(b200, 64 * kMib) == "Simple");
  // 8x H100: reduce-scatter 59 us at 4 MiB, 54 us at 8 MiB.
  const NcclPlace h100 = OneNode("hopper", 450);
  CHECK(Chosen(h100, 4 * kMib) == "LL");
  CHECK(Chosen(h100, 8 * kMib) == "LL128");
  CHECK(Chosen(h100, 32 * kMib) == "Simple");
  // Two a3-ultra nodes (Intel): 65 us at 512 KiB, 80 us at 1 MiB.
  const NcclPlace a3_ultra = TwoNodes("hopper", 450, false);
  CHECK(Chosen(a3_ultra, 512 * kKib) == "LL");
  CHECK(Chosen(a3_ultra, kMib) == "LL128");
  // Two B200 nodes (AMD): 42 us at 128 KiB, 80 us at 256 KiB; 248 us at 32 MiB, 490 us at 64 MiB.
  const NcclPlace vultr = TwoNodes("blackwell", 900, true);
  CHECK(Chosen(vultr, 128 * kKib) == "LL");
  CHECK(Chosen(vultr, 256 * kKib) == "LL128");
  CHECK(Chosen(vultr, 32 * kMib) == "LL128");
  CHECK(Chosen(vultr, 64 * kMib) == "Simple");
}

TEST_CASE("NCCL has no opinion on other protocols and other makers' GPUs") {
  CHECK_FALSE(NcclRingEstimate(OneNode("hopper", 450), "NVLS", 1e6).has_value());
  CHECK_FALSE(NcclRingEstimate(OneNode("cdna3", 448), "Simple", 1e6).has_value());
}

TEST_CASE("NCCL cuts small NVLS all-reduces into small chunks") {
  // Rounds of all blocks for all GPUs: 16 x 8 x 128 KiB = 16 MiB on 8 H100, 24 x 4 x 128 KiB =
  // 12 MiB on 4 B200. Below 64 of them 64 KiB, below 8 of those 32 KiB, below 2 of those 16 KiB.
  const NcclPlace h100 = OneNode("hopper", 450);
  CHECK(NvlsChunkOf(h100, 1024 * kMib) == 128 * kKib);
  CHECK(NvlsChunkOf(h100, 1023 * kMib) == 64 * kKib);
  CHECK(NvlsChunkOf(h100, 64 * kMib) == 64 * kKib);
  CHECK(NvlsChunkOf(h100, 63 * kMib) == 32 * kKib);
  CHECK(NvlsChunkOf(h100, 8 * kMib) == 32 * kKib);
  CHECK(NvlsChunkOf(h100, 7 * kMib) == 16 * kKib);
  NcclPlace four = OneNode("blackwell", 900);
  four.rank_count = 4;
  CHECK(NvlsChunkOf(four, 768 * kMib) == 128 * kKib);
  CHECK(NvlsChunkOf(four, 767 * kMib) == 64 * kKib);
  CHECK(NvlsChunkOf(four, 47 * kMib) == 32 * kKib);
  CHECK(NvlsChunkOf(four, 5 * kMib) == 16 * kKib);
  // GPUs without NVLS have nothing to cut.
  CHECK(NvlsChunkOf(OneNode("ampere", 300), kMib) == 128 * kKib);
  CHECK(NvlsChunksOf(h100, 8 * kMib).round == 16 * 8 * 32 * kKib);
}

TEST_CASE("NCCL cuts NVLSTree all-reduces by rounds of 32 blocks on two B200 nodes") {
  // 32 x 8 x 128 KiB = 32 MiB: below four of them 64 KiB, below one of those, 16 MiB, 32 KiB. Two
  // nodes of B200 take a third longer from 128 MiB on than the sizes below would say.
  NcclPlace b200 = TwoNodes("blackwell", 900, false);
  CHECK(NvlsChunkOf(b200, 128 * kMib) == 128 * kKib);
  CHECK(NvlsChunkOf(b200, 127 * kMib) == 64 * kKib);
  CHECK(NvlsChunkOf(b200, 16 * kMib) == 64 * kKib);
  CHECK(NvlsChunkOf(b200, 15 * kMib) == 32 * kKib);
  CHECK(NvlsChunksOf(b200, 15 * kMib).round == 8 * kMib);
  // Over four nodes 64 KiB at most.
  b200.node_count = 4;
  b200.rank_count = 32;
  CHECK(NvlsChunkOf(b200, 1024 * kMib) == 64 * kKib);
}

TEST_CASE("NCCL's estimates of all-reduces, by hand") {
  const auto micros = [](const NcclPlace& place, NcclAlgorithm algorithm, const char* protocol,
                         double bytes) {
    return 1e6 * NcclAllReduceEstimate(place, algorithm, protocol, bytes).value().value;
  };
  // 8 H100, 12 x 30 GB/s: 14 hops, 14/8 of 8 MB; trees reach 0.92 of the bus, LL128 7/9 of that.
  const NcclPlace h100 = OneNode("hopper", 450);
  CHECK(micros(h100, NcclAlgorithm::kRing, "LL", 8e6) ==
        doctest::Approx(6.6 + 14 * 0.6 + 14000.0 / 141).epsilon(kTolerance));
  // 8 MB are 2^16.9 times 64 bytes: 0.8 of LL128's trees.
  CHECK(micros(h100, NcclAlgorithm::kTree, "LL128", 8e6) ==
        doctest::Approx(14 + 14 * 1.25 + 16000 / (0.92 * 360 * 7 / 9 * 0.8)).epsilon(kTolerance));
  CHECK(micros(h100, NcclAlgorithm::kNvls, "Simple", 8e6) ==
        doctest::Approx(25 + 14000 / (2 * 360 * 0.85 * 7 / 8)).epsilon(kTolerance));
  CHECK_FALSE(NcclAllReduceEstimate(h100, NcclAlgorithm::kNvlsTree, "Simple", 8e6).has_value());
  // Ampere's LL counts a quarter of 12 x 20 GB/s.
  CHECK(micros(OneNode("ampere", 300), NcclAlgorithm::kRing, "LL", 8e6) ==
        doctest::Approx(6.6 + 14 * 0.6 + 14000.0 / 60).epsilon(kTolerance));
  // Two nodes of H100, 8 x 48 GB/s, Intel: 28 hops inside at 3 posts of 1 us, 2 between; x 1.4.
  const NcclPlace two = TwoNodes("hopper", 450, false);
  CHECK(micros(two, NcclAlgorithm::kRing, "Simple", 16e6) ==
        doctest::Approx(1.4 * (8.4 + 28 * 3.4 + 2 * 14) + 30000.0 / 360).epsilon(kTolerance));
  // Trees of two nodes count the rate inside: 0.92 x 360, above the cap of 8 x 36.7 for LL128.
  CHECK(micros(two, NcclAlgorithm::kTree, "LL128", 1e6) ==
        doctest::Approx(14 + 2 * (7 * 1.25 + 8.5) + 2000 / (8 * 36.7 * 0.6)).epsilon(kTolerance));
  // With half the adapters' rate still those of 12 x 30 GB/s and 8 x 41.4, and 0.8 of them at 16
  // MB.
  NcclPlace half = two;
  half.inter_rate = BytesPerSecond(200e9);
  CHECK(micros(half, NcclAlgorithm::kTree, "Simple", 16e6) ==
        doctest::Approx(8.4 + 2 * (7 * 4 + 14) + 32000 / (0.92 * 360 * 0.8)).epsilon(kTolerance));
  // 2 x 48 GB/s per channel are above the caps of NVLSTree (57.7) and of the switch (67).
  CHECK(micros(two, NcclAlgorithm::kNvlsTree, "Simple", 16e6) ==
        doctest::Approx(25 + 2 * 20.9 + 32000 / (8 * 57.7)).epsilon(kTolerance));
  // A network whose plugin reports 75 us: each hop.
  NcclPlace slow = two;
  slow.reported_latency = Seconds(75e-6);
  CHECK(micros(slow, NcclAlgorithm::kTree, "LL128", 1e6) ==
        doctest::Approx(micros(two, NcclAlgorithm::kTree, "LL128", 1e6) + 2 * 75).epsilon(1e-9));
}

TEST_CASE("NCCL switches algorithms of all-reduces where published sweeps have their steps") {
  // 8 H100: 27 us at 1 MiB, 42 us at 2 MiB, where 16 KiB more would take 1 us.
  const NcclPlace h100 = OneNode("hopper", 450);
  CHECK(ChosenForAllReduce(h100, kMib) == "ring LL");
  CHECK(ChosenForAllReduce(h100, 2 * kMib) == "NVLS Simple");
  // Two B200 nodes: 47 us at 128 KiB, 67 us at 256 KiB; 116, 114 and 118 us at 1, 2 and 4 MiB.
  const NcclPlace b200 = TwoNodes("blackwell", 900, false);
  CHECK(ChosenForAllReduce(b200, 128 * kKib) == "tree LL");
  CHECK(ChosenForAllReduce(b200, 256 * kKib) == "tree LL128");
  CHECK(ChosenForAllReduce(b200, kMib) == "tree LL128");
  CHECK(ChosenForAllReduce(b200, 4 * kMib) == "NVLSTree Simple");
}

}  // namespace
}  // namespace shardwright
