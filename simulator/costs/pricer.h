#pragma once

// Prices of all op shapes of a program on one cluster with one profile.

#include <cstdint>
#include <utility>
#include <vector>

#include "schedule/program.h"
#include "simulator/costs/collectives.h"
#include "simulator/costs/contention.h"
#include "simulator/costs/kernels.h"
#include "simulator/costs/price.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {

// Prices programs one after another; what it has learned about groups of ranks is kept. Refers to
// the cluster and the profile, which must outlive it. Not thread-safe.
class Pricer {
 public:
  Pricer(const Cluster& cluster, const Profile& profile);

  // Fills `table`; allocates nothing once it has seen the program's groups and `table` is large
  // enough. Throws InputError when a group does not fit the cluster or the profile lacks a number.
  // O(shapes + kernels).
  void Price(const Program& program, PriceTable& table);

 private:
  struct KnownPath {
    GroupShape shape;
    CollectivePath path;
  };

  const CollectivePath& PathOf(const Group& group);
  [[nodiscard]] const KernelRates& RatesOf(OpCode code) const;
  // The class of an op that keeps so many cores busy, should ops run on cores at all.
  [[nodiscard]] std::uint8_t ClassWithCores(ContentionClass load, double cores,
                                            PriceTable& table) const;
  [[nodiscard]] shardwright::Price PriceKernels(const Program& program, const OpShape& shape,
                                                PriceTable& table) const;
  [[nodiscard]] shardwright::Price PriceCollective(const Program& program, const OpShape& shape,
                                                   PriceTable& table);
  [[nodiscard]] shardwright::Price PriceHostCopy(const OpShape& shape, PriceTable& table) const;
  [[nodiscard]] shardwright::Price PriceHostOptimizer(const Program& program,
                                                      const OpShape& shape) const;
  void AddStepWork(const Program& program, PriceTable& table) const;
  [[nodiscard]] std::uint16_t ResourceIndex(ResourceKind kind, std::int32_t level,
                                            PriceTable& table);

  const Cluster& cluster_;
  const Profile& profile_;
  KernelRates kernels_;
  KernelRates norm_kernels_, clip_kernels_;  // of gradients
  HostCopyRates copies_;
  BytesPerSecond host_memory_;  // one GPU's share of its node's host memory bandwidth
  std::vector<KnownPath> paths_;
  std::vector<std::pair<ResourceKind, std::int32_t>> resources_;
};

// Part of the device's memory bandwidth that a collective with this bus rate (bytes/s) takes,
// alone. Contention classes have it rounded up to sixteenths.
[[nodiscard]] double MemoryShare(OpCode code, double bus_rate, const GpuSpec& gpu,
                                 const Profile& profile);

// Prices of one program.
[[nodiscard]] PriceTable PriceProgram(const Program& program, const Cluster& cluster,
                                      const Profile& profile);

}  // namespace shardwright
