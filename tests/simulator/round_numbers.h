#pragma once

// A cluster and a profile with round numbers, so that times can be worked out by hand.

#include <cstdint>

#include "core/units.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright::testing {

// Nodes of 8 GPUs: 400 GB/s between GPUs, 8 NICs of 25 GB/s, 50 GB/s to the host, 1 TB/s memory,
// 100 multiprocessors, 1000 TFLOP/s.
inline Cluster RoundCluster(std::int64_t nodes) {
  Cluster cluster = LoadCluster(
      "h100-80 x8, nvlink 400 GB/s, nic 8x200 Gbit/s, pcie 50 GB/s, host 2 TiB, network roce",
      nodes);
  cluster.gpu.memory_bandwidth.value = BytesPerSecond(1e12);
  cluster.gpu.sm_count.value = 100;
  for (auto& peak : cluster.gpu.peak_flops) {
    peak = Number<FlopsPerSecond>{FlopsPerSecond(1e15), {}, 0};
  }
  return cluster;
}

inline Profile RoundProfile() {
  Profile profile;
  profile.name = "round";
  for (auto& fraction : profile.compute.gemm) {
    fraction = Number<double>{0.5, {}, 0};
  }
  profile.compute.gemm_ramp.value = Seconds(5e-6);
  profile.compute.attention.forward.value = 0.4;
  profile.compute.attention.backward.value = 0.2;
  profile.compute.elementwise.value = 0.8;
  profile.compute.reduction.value = 0.5;
  profile.compute.optimizer.value = 0.4;
  profile.compute.kernel_floor.value = Seconds(2e-6);
  profile.compute.kernel_gap.value = Seconds(1e-6);
  profile.host.kernel_launch.value = Seconds(4e-6);
  profile.host.op_issue.value = Seconds(3e-6);
  profile.host.collective_issue.value = Seconds(30e-6);
  profile.host.unit_hook.value = Seconds(20e-6);
  profile.host.wake.value = Seconds(15e-6);
  profile.host.malloc.value = Seconds(100e-6);
  profile.host.free.value = Seconds(200e-6);
  profile.host.copy_issue.value = Seconds(6e-6);
  profile.copy.to_device.value = 0.8;
  profile.copy.to_host.value = 0.8;
  profile.copy.both_ways.value = 0.6;
  profile.copy.latency.value = Seconds(10e-6);
  const auto protocol = [](const char* name, double base, double hop, double bandwidth) {
    ProtocolProfile p;
    p.name = name;
    p.base_latency.value = Seconds(base);
    p.hop_latency.value = Seconds(hop);
    p.bandwidth.value = bandwidth;
    return p;
  };
  TransportProfile nvlink;
  nvlink.name = "nvlink";
  nvlink.efficiency.value = 0.8;
  nvlink.channels.value = 20;
  nvlink.protocols = {protocol("LL", 2e-6, 0.5e-6, 0.1), protocol("Simple", 10e-6, 1e-6, 1)};
  TransportProfile roce;
  roce.name = "roce";
  roce.efficiency.value = 0.5;
  roce.channels.value = 10;
  roce.protocols = {protocol("Simple", 30e-6, 20e-6, 1)};
  profile.transports = {nvlink, roce};
  profile.overlap.gather_memory_traffic.value = 2;
  profile.overlap.reduce_memory_traffic.value = 3;
  profile.overlap.collective_rate.value = 0.9;
  profile.overlap.compute_sensitivity.value = 0.5;
  profile.memory.context.value = Bytes(500);
  profile.memory.first_communicator.value = Bytes(300);
  profile.memory.next_communicator.value = Bytes(100);
  return profile;
}

}  // namespace shardwright::testing
