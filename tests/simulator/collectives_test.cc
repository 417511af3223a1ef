#include "simulator/costs/collectives.h"

#include <cmath>
#include <cstdint>

#include <doctest/doctest.h>

#include "tests/simulator/round_numbers.h"

namespace shardwright {
namespace {

using testing::RoundCluster;
using testing::RoundProfile;

constexpr double kTolerance = 1e-9;  // a handful of additions and one power

double Micros(Seconds time) {
  return 1e6 * time.value;
}

TransportProfile& Row(Profile& profile, const char* name) {
  for (TransportProfile& transport : profile.transports) {
    if (transport.name == name) {
      return transport;
    }
  }
  FAIL("no row ", name);
  return profile.transports.front();
}

TEST_CASE("Latency of the Simple protocol hides behind the transfer") {
  // By hand: 32 ranks on 4 nodes, 200 GB/s at 50 percent; latency 30 + 28 + 60 = 118 us; with q = 2
  // the two add like the sides of a right angle.
  Profile profile = RoundProfile();
  Row(profile, "roce").overlap.value = 2;
  const CollectivePath path = FindCollectivePath(RoundCluster(4), profile, {32, 1});
  const double sent = 320.0 * 31 / 32;  // us, of 32 MB
  CHECK(Micros(CollectiveTime(OpCode::kAllGather, Bytes(32'000'000), path)) ==
        doctest::Approx(std::hypot(118, sent)).epsilon(kTolerance));
}

TEST_CASE("Small protocols split messages above a size, at a price per hop between nodes") {
  // 32 ranks on 4 nodes, 10 channels: 2,560,000 bytes are 8,000 per message, 8,533 with LL128's
  // flags. 28 hops of 1 us and 3 of 20 us, base 30 us; 100 GB/s.
  Profile profile = RoundProfile();
  TransportProfile& roce = Row(profile, "roce");
  roce.protocols.front().name = "LL128";
  Row(profile, "nvlink").protocols.back().name = "LL128";
  roce.split_above.value = Bytes(8192);
  roce.split_latency.value = Seconds(7e-6);
  const CollectivePath path = FindCollectivePath(RoundCluster(4), profile, {32, 1});
  const auto micros = [&](std::int64_t bytes) {
    return Micros(CollectiveTime(OpCode::kAllGather, Bytes(bytes), path));
  };
  CHECK(micros(2'560'000) ==
        doctest::Approx(30 + 28 + 60 + 21 + 25.6 * 31 / 32).epsilon(kTolerance));
  CHECK(micros(2'400'000) == doctest::Approx(30 + 28 + 60 + 24.0 * 31 / 32).epsilon(kTolerance));
}

TEST_CASE("Reducing on the way slows a reduce-scatter, not an all-gather") {
  Profile profile = RoundProfile();
  TransportProfile& nvlink = Row(profile, "nvlink");
  nvlink.protocols.pop_back();  // LL only: 2 us, .5 us per hop, 32 GB/s
  nvlink.protocols.front().reduce_bandwidth.value = 0.5;
  const CollectivePath path = FindCollectivePath(RoundCluster(1), profile, {8, 1});
  const Bytes size(3'200'000);  // 100 us for all of it
  CHECK(Micros(CollectiveTime(OpCode::kAllGather, size, path)) ==
        doctest::Approx(5.5 + 87.5).epsilon(kTolerance));
  CHECK(Micros(CollectiveTime(OpCode::kReduceScatter, size, path)) ==
        doctest::Approx(5.5 + 175).epsilon(kTolerance));
}

TEST_CASE("NVLS: all-reduce inside the switch, alone and under a tree over the nodes") {
  // By hand: 320 GB/s, three quarters of it with NVLS; 10 us. S (1 + 1/8) bytes per GPU.
  Profile profile = RoundProfile();
  ProtocolProfile nvls;
  nvls.name = "NVLS";
  nvls.base_latency.value = Seconds(10e-6);
  nvls.bandwidth.value = 0.75;
  Row(profile, "nvlink").protocols.push_back(nvls);
  const CollectivePath path = FindCollectivePath(RoundCluster(1), profile, {8, 1});
  const Bytes size(320'000'000);
  CHECK(Micros(CollectiveTime(OpCode::kAllReduce, size, path)) ==
        doctest::Approx(10 + 1000 * 1.125 / 0.75).epsilon(kTolerance));
  // Eight H100 cut 305 MiB into chunks of 64 KiB; each waits for an eighth of one.
  Row(profile, "nvlink").protocols.back().chunk_overhead.value = Bytes(8 * 1024);
  CHECK(Micros(CollectiveTime(OpCode::kAllReduce, size, path)) ==
        doctest::Approx(10 + 1000 * 1.125 / 0.75 * 1.125).epsilon(kTolerance));
  // Gathers do not use it: the ring as before.
  CHECK(Micros(CollectiveTime(OpCode::kAllGather, size, path)) ==
        doctest::Approx(17 + 875).epsilon(kTolerance));
  // Two nodes: the network carries S each way, at 100 GB/s; two network hops, both bases.
  const CollectivePath two = FindCollectivePath(RoundCluster(2), profile, {16, 1});
  CHECK(Micros(CollectiveTime(OpCode::kAllReduce, size, two)) ==
        doctest::Approx(10 + 30 + 2 * 20 + 3200).epsilon(kTolerance));
}

TEST_CASE("Trees between nodes send 2 (N-1)/N of the array, rings 2 (n-1)/n") {
  // 2 nodes of 8, 100 GB/s between them, 320 inside: the tree's 3,200 us beat the ring's
  // 6,400 * 15/16. Chains of 7 hops of 1 us up and down, one hop of 20 us each way.
  const Profile profile = RoundProfile();
  const CollectivePath path = FindCollectivePath(RoundCluster(2), profile, {16, 1});
  CHECK(Micros(CollectiveTime(OpCode::kAllReduce, Bytes(320'000'000), path)) ==
        doctest::Approx(30 + 2 * (7 + 20) + 3200).epsilon(kTolerance));
}

TEST_CASE("NCCL's choice is priced by the profile, also when it is not the cheapest") {
  // 8 ranks at 400 GB/s of NVLink: NCCL thinks LL of 8 bytes takes 10.8 us and Simple 32.2 us, and
  // takes LL although the profile's Simple costs less.
  Profile profile = RoundProfile();
  TransportProfile& nvlink = Row(profile, "nvlink");
  nvlink.protocols[0].base_latency.value = Seconds(100e-6);
  const CollectivePath path = FindCollectivePath(RoundCluster(1), profile, {8, 1});
  const auto micros = [&] { return Micros(CollectiveTime(OpCode::kAllGather, Bytes(8), path)); };
  CHECK(micros() == doctest::Approx(10 + 7 + 7.0 / 320e3).epsilon(kTolerance));
  nvlink.choice = CollectiveChoice::kNccl;
  CHECK(micros() == doctest::Approx(100 + 3.5 + 7.0 / 32e3).epsilon(kTolerance));
}

TEST_CASE("The slower of NVLink and network decides, each at its own efficiency") {
  // 400 GB/s inside at 80 percent, 200 between at 100 percent: 200; at 30 percent inside: 120.
  Profile profile = RoundProfile();
  Row(profile, "roce").efficiency.value = 1;
  const CollectivePath path = FindCollectivePath(RoundCluster(4), profile, {32, 1});
  const auto micros = [&] {
    return Micros(CollectiveTime(OpCode::kAllGather, Bytes(320'000'000), path));
  };
  CHECK(micros() == doctest::Approx(118 + 1600.0 * 31 / 32).epsilon(kTolerance));
  Row(profile, "nvlink").efficiency.value = 0.3;
  CHECK(micros() == doctest::Approx(118 + 320e3 / 120 * 31 / 32).epsilon(kTolerance));
}

}  // namespace
}  // namespace shardwright
