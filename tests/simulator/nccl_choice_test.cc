#include "simulator/costs/nccl_choice.h"

#include <cstdint>
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
  CHECK(NvlsChunk(h100, 1024 * kMib) == 128 * kKib);
  CHECK(NvlsChunk(h100, 1023 * kMib) == 64 * kKib);
  CHECK(NvlsChunk(h100, 64 * kMib) == 64 * kKib);
  CHECK(NvlsChunk(h100, 63 * kMib) == 32 * kKib);
  CHECK(NvlsChunk(h100, 8 * kMib) == 32 * kKib);
  CHECK(NvlsChunk(h100, 7 * kMib) == 16 * kKib);
  NcclPlace four = OneNode("blackwell", 900);
  four.rank_count = 4;
  CHECK(NvlsChunk(four, 768 * kMib) == 128 * kKib);
  CHECK(NvlsChunk(four, 767 * kMib) == 64 * kKib);
  CHECK(NvlsChunk(four, 47 * kMib) == 32 * kKib);
  CHECK(NvlsChunk(four, 5 * kMib) == 16 * kKib);
  // GPUs without NVLS have nothing to cut.
  CHECK(NvlsChunk(OneNode("ampere", 300), kMib) == 128 * kKib);
}

}  // namespace
}  // namespace shardwright
