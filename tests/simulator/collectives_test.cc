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
  // flags. 28 hops of 1 us; the last chunk crosses the network 4 times, which
  // is 2 hops of 20 us; base 30 us; 100 GB/s.
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
        doctest::Approx(30 + 28 + 40 + 14 + 25.6 * 31 / 32).epsilon(kTolerance));
  CHECK(micros(2'400'000) == doctest::Approx(30 + 28 + 40 + 24.0 * 31 / 32).epsilon(kTolerance));
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
  // By hand: 320 GB/s, three quarters of it with NVLS; 10 us. S bytes per GPU.
  Profile profile = RoundProfile();
  ProtocolProfile nvls;
  nvls.name = "NVLS";
  nvls.base_latency.value = Seconds(10e-6);
  nvls.bandwidth.value = 0.75;
  Row(profile, "nvlink").protocols.push_back(nvls);
  const CollectivePath path = FindCollectivePath(RoundCluster(1), profile, {8, 1});
  const Bytes size(320'000'000);
  CHECK(Micros(CollectiveTime(OpCode::kAllReduce, size, path)) ==
        doctest::Approx(10 + 1000 / 0.75).epsilon(kTolerance));
  // Eight H100 cut 305 MiB into chunks of 64 KiB; each waits for an eighth of one.
  Row(profile, "nvlink").protocols.back().chunk_overhead.value = Bytes(8 * 1024);
  CHECK(Micros(CollectiveTime(OpCode::kAllReduce, size, path)) ==
        doctest::Approx(10 + 1000 / 0.75 * 1.125).epsilon(kTolerance));
  // Gathers do not use it: the ring as before.
  CHECK(Micros(CollectiveTime(OpCode::kAllGather, size, path)) ==
        doctest::Approx(17 + 875).epsilon(kTolerance));
  // Two nodes: the network carries S each way, at 100 GB/s; two network hops.
  const CollectivePath two = FindCollectivePath(RoundCluster(2), profile, {16, 1});
  CHECK(Micros(CollectiveTime(OpCode::kAllReduce, size, two)) ==
        doctest::Approx(10 + 2 * 20 + 3200).epsilon(kTolerance));
}

TEST_CASE("NVLS: a round of chunks passes the switch before all stages work") {
  // 320 GB/s; 8 H100 hand on 16 x 8 chunks of 16 KiB, 2 MiB, at a time below 4 MiB: 1 MiB is no
  // more than a part of a round, 64 MB are cut into 32 KiB, rounds of 4 MiB.
  Profile profile = RoundProfile();
  ProtocolProfile nvls;
  nvls.name = "NVLS";
  nvls.base_latency.value = Seconds(1e-6);
  nvls.bandwidth.value = 1;
  nvls.fill.value = 2;
  Row(profile, "nvlink").protocols = {nvls, Row(profile, "nvlink").protocols.back()};
  const CollectivePath path = FindCollectivePath(RoundCluster(1), profile, {8, 1});
  const auto micros = [&](std::int64_t bytes) {
    return Micros(CollectiveTime(OpCode::kAllReduce, Bytes(bytes), path));
  };
  const double per_byte = 1 / 320e3;
  CHECK(micros(1 << 20) == doctest::Approx(1 + 3 * (1 << 20) * per_byte).epsilon(kTolerance));
  CHECK(micros(64'000'000) ==
        doctest::Approx(1 + (64e6 + 2 * (4 << 20)) * per_byte).epsilon(kTolerance));
}

TEST_CASE("Trees: the busiest node sends S between two nodes, 3/2 S of three, 2 S of more") {
  // 100 GB/s between nodes, 320 inside; NVLink's base of 10 us, chains of 7 hops of 1 us up and
  // down, hops of 20 us. Two nodes: 3,200 us beat the ring's 6,400 * 15/16; three: 4,800 us and
  // two hops each way. Of four, two levels of tree, the ring is the faster: 30 us, 2 (28 + 60) us.
  const Profile profile = RoundProfile();
  const auto micros = [&](int nodes) {
    const CollectivePath path = FindCollectivePath(RoundCluster(nodes), profile, {8 * nodes, 1});
    return Micros(CollectiveTime(OpCode::kAllReduce, Bytes(320'000'000), path));
  };
  CHECK(micros(2) == doctest::Approx(10 + 2 * (7 + 20) + 3200).epsilon(kTolerance));
  CHECK(micros(3) == doctest::Approx(10 + 2 * (7 + 40) + 4800).epsilon(kTolerance));
  CHECK(micros(4) == doctest::Approx(30 + 2 * (28 + 60) + 6400.0 * 31 / 32).epsilon(kTolerance));
}

TEST_CASE("Trees: own latency and efficiency, and the first chunk passes all hops") {
  // 1.6 times 50 percent of 200 GB/s; hops of 50 us. 10 channels of 100 kB: 1 MB is on its way
  // before the pipeline is full, 14 hops inside at 320 GB/s and, a half of it at a time, 2 between.
  Profile profile = RoundProfile();
  TransportProfile& roce = Row(profile, "roce");
  roce.all_reduce_gain.value = 1.6;
  roce.tree_chunk.value = Bytes(100'000);
  roce.protocols.front().tree_latency.value = Seconds(50e-6);
  roce.protocols.front().base_latency.value = Seconds(200e-6);  // of rings
  const CollectivePath path = FindCollectivePath(RoundCluster(2), profile, {16, 1});
  const auto micros = [&](std::int64_t bytes) {
    return Micros(CollectiveTime(OpCode::kAllReduce, Bytes(bytes), path));
  };
  const double latency = 10 + 2 * (7 + 50);
  CHECK(micros(320'000'000) ==
        doctest::Approx(latency + 14e6 / 320e3 + 1e6 / 160e3 + 2000).epsilon(kTolerance));
  CHECK(micros(160'000) ==
        doctest::Approx(latency + 0.16 * (14e6 / 320e3 + 1e6 / 160e3) + 1).epsilon(kTolerance));
}

TEST_CASE("Trees split messages, too, at half of a ring's price per hop") {
  // LL128 of 2 nodes, 10 channels of 4 messages: 320,000 bytes are 8,533 per message with flags.
  Profile profile = RoundProfile();
  TransportProfile& roce = Row(profile, "roce");
  roce.protocols.front().name = "LL128";
  roce.protocols.front().base_latency.value = Seconds(1);  // of rings
  Row(profile, "nvlink").protocols.back().name = "LL128";
  roce.split_above.value = Bytes(8192);
  roce.split_latency.value = Seconds(14e-6);
  const CollectivePath path = FindCollectivePath(RoundCluster(2), profile, {16, 1});
  const auto micros = [&](std::int64_t bytes) {
    return Micros(CollectiveTime(OpCode::kAllReduce, Bytes(bytes), path));
  };
  CHECK(micros(320'000) == doctest::Approx(10 + 14 + 2 * 27 + 3.2).epsilon(kTolerance));
  CHECK(micros(300'000) == doctest::Approx(10 + 14 + 2 * 20 + 3.0).epsilon(kTolerance));
}

TEST_CASE("All-reduce by ring: turning round costs, and its latency may hide behind the transfer") {
  // LL only: 2 us, 14 hops of .5 us; 32 GB/s. 3.2 MB: 100 us for all of it, half of it reduced at
  // half the rate: 7/8 (1 + 2).
  Profile profile = RoundProfile();
  TransportProfile& nvlink = Row(profile, "nvlink");
  nvlink.protocols.pop_back();
  nvlink.protocols.front().reduce_bandwidth.value = 0.5;
  nvlink.protocols.front().turn_latency.value = Seconds(100e-6);
  nvlink.all_reduce_protocols = {"LL"};
  const CollectivePath path = FindCollectivePath(RoundCluster(1), profile, {8, 1});
  const auto micros = [&] {
    return Micros(CollectiveTime(OpCode::kAllReduce, Bytes(3'200'000), path));
  };
  CHECK(micros() == doctest::Approx(2 + 7 + 100 + 262.5).epsilon(kTolerance));
  nvlink.protocols.front().turn_latency.value = Seconds(0);
  nvlink.protocols.front().reduce_bandwidth.value = 1;
  CHECK(micros() == doctest::Approx(2 + 7 + 175).epsilon(kTolerance));
  nvlink.protocols.front().turn_latency.value = Seconds(1e-6);
  nvlink.protocols.front().turn_overlap.value = 2;
  CHECK(micros() == doctest::Approx(std::hypot(10, 175)).epsilon(kTolerance));
}

TEST_CASE("All-reduce: protocols that are switched off are not used") {
  // LL would take 9 us; Simple takes 10 us and 14 hops of 1 us.
  Profile profile = RoundProfile();
  TransportProfile& nvlink = Row(profile, "nvlink");
  const auto micros = [&] {
    const CollectivePath path = FindCollectivePath(RoundCluster(1), profile, {8, 1});
    return Micros(CollectiveTime(OpCode::kAllReduce, Bytes(8), path));
  };
  CHECK(micros() == doctest::Approx(9).epsilon(1e-3));
  nvlink.all_reduce_protocols = {"Simple"};
  CHECK(micros() == doctest::Approx(24).epsilon(1e-3));
  // NCCL prefers LL on an H100 node; the gathers' choice counts where none is given for
  // all-reduces.
  nvlink.all_reduce_protocols.clear();
  nvlink.protocols[0].base_latency.value = Seconds(100e-6);
  CHECK(micros() == doctest::Approx(24).epsilon(1e-3));
  nvlink.choice = CollectiveChoice::kNccl;
  CHECK(micros() == doctest::Approx(107).epsilon(1e-3));
  nvlink.all_reduce_choice = CollectiveChoice::kCheapest;
  CHECK(micros() == doctest::Approx(24).epsilon(1e-3));
}

TEST_CASE("All-to-all: its own rate and latency, and peers that drift apart") {
  // 8 ranks, 7/8 of 320 MB at 400 GB/s x 0.8 x 0.625: 1,400 us; 15 us; sqrt(35 us x 1,400 us) = 221
  // us.
  Profile profile = RoundProfile();
  TransportProfile& nvlink = Row(profile, "nvlink");
  nvlink.p2p_gain.value = 0.625;
  nvlink.p2p_latency.value = Seconds(15e-6);
  nvlink.p2p_drift.value = Seconds(35e-6);
  const CollectivePath path = FindCollectivePath(RoundCluster(1), profile, {8, 1});
  CHECK(Micros(CollectiveTime(OpCode::kAllToAll, Bytes(320'000'000), path)) ==
        doctest::Approx(15 + 1400 + std::sqrt(35.0 * 1400)).epsilon(kTolerance));
  // Two nodes: half of a rank's bytes through an eighth of 200 GB/s, at half the gathers' rate.
  TransportProfile& roce = Row(profile, "roce");
  roce.p2p_gain.value = 0.5;
  roce.p2p_latency.value = Seconds(40e-6);
  const CollectivePath two = FindCollectivePath(RoundCluster(2), profile, {16, 1});
  CHECK(Micros(CollectiveTime(OpCode::kAllToAll, Bytes(320'000'000), two)) ==
        doctest::Approx(40 + 160e6 / (25e3 * 0.25)).epsilon(kTolerance));
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
