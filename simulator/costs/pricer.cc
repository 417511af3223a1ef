// The price of each op shape of a program: duration on its stream, time of the host to issue it,
// and the load that it puts on the device.
//
// Example: an op with 3 kernels of 20 us, op_issue 4 us, kernel_launch 3 us, gap 1 us. Its duration
// is 3 x 21 = 63 us, issue 4 + 9 = 13 us, its first launch 7 us, and its tail 21 us: the op ends no
// earlier than 21 us behind its last launch.
//
// A program of 10,000 ops has some dozens of shapes, so pricing costs O(shapes), not O(ops).

#include "simulator/costs/pricer.h"

#include <cmath>
#include <string>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

// Three kinds of other resources and these uplinks fit into kMaxLinkResources.
constexpr std::int32_t kMostFabricLevels = kMaxLinkResources - 3;

// The class equal to `load`, added if it is new. When all 255 are taken the last one of the same
// kind stands for it; real programs have some dozen.
std::uint8_t ClassOf(const ContentionClass& load, ContentionModel& model) {
  std::size_t same_kind = 0;
  for (std::size_t i = 0; i < model.classes.size(); ++i) {
    if (model.classes[i] == load) {
      return static_cast<std::uint8_t>(i);
    }
    same_kind = model.classes[i].kind == load.kind ? i : same_kind;
  }
  constexpr std::size_t kMostClasses = 255;
  if (model.classes.size() >= kMostClasses) {
    return static_cast<std::uint8_t>(same_kind);
  }
  model.classes.push_back(load);
  return static_cast<std::uint8_t>(model.classes.size() - 1);
}

// The price of an op may be anything up to this; far above any real one, far below the range of
// SimTime, so that sums stay in range (see CheckRange in engine.cc).
constexpr Seconds kLongestOp{1e6};

// ToSimTime with a check: slow links in a user's file must not overflow.
SimTime ToPrice(Seconds time, OpCode code) {
  if (!(time.value <= kLongestOp.value)) {
    const bool is_copy = code == OpCode::kCopyH2d || code == OpCode::kCopyD2h;
    if (is_copy && !std::isfinite(time.value)) {
      throw InputError("cluster: node.links", "no link from a GPU to host memory",
                       R"(one of type "pcie" from gpu to cpu, or "pcie 63 GB/s" in a description)");
    }
    throw InputError(
        "cluster and profile",
        std::isfinite(time.value)
            ? "rates that let one " + std::string(InfoOf(code).name) + " take " + Format(time)
            : "no link for " + std::string(InfoOf(code).name),
        "rates with which no op takes longer than " + Format(kLongestOp));
  }
  return ToSimTime(time);
}

// Rounded up to a sixteenth, so that ops of about equal load share a class.
double RoundShare(double share) {
  constexpr double kSteps = 16;
  return std::min(1.0, std::ceil(share * kSteps) / kSteps);
}

bool IsUpdate(OpCode code) {
  return code == OpCode::kOptimizerStep || code == OpCode::kHostOptimizerStep;
}

KernelRates WithUpdates(KernelRates rates, BytesPerSecond updates) {
  rates.optimizer = updates;
  return rates;
}

// Bytes that one rank's thread reads and writes in a collective of `size` ranks that are threads.
double BytesTouched(OpCode code, double bytes, double size) {
  const double gathered = 2 * bytes * (size - 1) / size;
  const double reduced = bytes + bytes / size;
  return code == OpCode::kAllReduce       ? reduced + gathered
         : code == OpCode::kReduceScatter ? reduced
                                          : gathered;
}

// To the nearest of 32 steps, so that ops of about equal load share a class.
double RoundCores(double cores) {
  constexpr double kSteps = 32;
  return std::round(cores * kSteps) / kSteps;
}

}  // namespace

Pricer::Pricer(const Cluster& cluster, const Profile& profile)
    : cluster_(cluster),
      profile_(profile),
      kernels_(FindKernelRates(cluster.gpu, profile.compute, cluster.RankCount())),
      norm_kernels_(WithUpdates(kernels_, kernels_.grad_norm)),
      clip_kernels_(WithUpdates(kernels_, kernels_.grad_clip)),
      copies_(FindHostCopyRates(cluster)),
      host_memory_(HostMemoryShare(cluster)) {}

const CollectivePath& Pricer::PathOf(const Group& group) {
  const GroupShape shape{group.size, group.stride};
  for (const KnownPath& known : paths_) {
    if (known.shape == shape) {
      return known.path;
    }
  }
  paths_.push_back({shape, FindCollectivePath(cluster_, profile_, shape)});
  return paths_.back().path;
}

std::uint16_t Pricer::ResourceIndex(ResourceKind kind, std::int32_t level, PriceTable& table) {
  const std::pair<ResourceKind, std::int32_t> key(kind, level);
  auto it = FindIn(resources_, key);
  if (it == resources_.end()) {
    resources_.push_back(key);
    it = resources_.end() - 1;
  }
  const auto index = static_cast<std::uint16_t>(it - resources_.begin());
  table.contention.resource_count = std::max<std::uint16_t>(table.contention.resource_count,
                                                            static_cast<std::uint16_t>(index + 1));
  return index;
}

const KernelRates& Pricer::RatesOf(OpCode code) const {
  return code == OpCode::kGradNorm   ? norm_kernels_
         : code == OpCode::kGradClip ? clip_kernels_
                                     : kernels_;
}

std::uint8_t Pricer::ClassWithCores(ContentionClass load, double cores, PriceTable& table) const {
  if (cluster_.SharedCores() > 0) {
    load.cores = RoundCores(cores);
    // A core's own rate ends far below the memory's; busy neighbours are `busy_cores`.
    load.hbm_share = 0;
  }
  return ClassOf(load, table.contention);
}

shardwright::Price Pricer::PriceKernels(const Program& program, const OpShape& shape,
                                        PriceTable& table) const {
  Seconds time, alone;  // of all threads of the rank, of one
  Bytes bytes;
  const auto add = [&](Seconds kernel) {
    alone += kernel + kernels_.gap;
    time += ShareAmongThreads(kernel, cluster_, profile_).time + kernels_.gap;
  };
  for (const Kernel& kernel : program.KernelsOf(shape)) {
    add(KernelTime(kernel, RatesOf(shape.code)));
    bytes += kernel.read + kernel.written;
  }
  double launches = shape.kernel_count;
  if (shape.kernel_count == 0 && shape.bytes.value > 0) {
    // A device copy without a kernel list: every byte is read and written once.
    bytes = 2 * shape.bytes;
    add(std::max(bytes / kernels_.copies, kernels_.floor));
    launches = 1;
  }
  shardwright::Price price;
  const bool is_work = launches > 0 || shape.code == OpCode::kCompute;
  Seconds op_issue = is_work ? profile_.host.op_issue.value : Seconds(0);
  if (shape.issue == Issue::kHook) {
    op_issue += 2 * profile_.host.unit_hook.value;  // before the module and after it
  }
  const Seconds launch = profile_.host.kernel_launch.value;
  price.duration = ToPrice(time, shape.code);
  price.issue = ToSimTime(op_issue + launch * launches);
  price.first_launch = ToSimTime(op_issue + launch * std::min(launches, 1.0));
  price.tail = price.duration / std::max<std::int64_t>(shape.kernel_count, 1);
  if (time.value > 0) {
    ContentionClass load;
    load.kind = LoadKind::kKernel;
    load.hbm_share = RoundShare((bytes / kernels_.streaming).value / alone.value);
    // Beside it the host issues ops at the pace at which they run.
    const double cores = alone.value / time.value;
    price.contention_class =
        ClassWithCores(load, cores + Ratio(price.issue, price.duration), table);
  }
  return price;
}

shardwright::Price Pricer::PriceCollective(const Program& program, const OpShape& shape,
                                           PriceTable& table) {
  const CollectivePath& path = PathOf(program.groups[shape.group.value]);
  Seconds time = CollectiveTime(shape.code, shape.bytes, path);
  // Of n ranks each multiplies its own part while the next one is on its way: products of P and a
  // transfer of T take max(P, T + P / n), of which the products' own ops stand for P.
  Seconds products;
  for (const Kernel& kernel : program.KernelsOf(shape)) {
    products += KernelTime(kernel, kernels_);
  }
  time = std::max(Seconds(0), time - products + products / static_cast<double>(path.ring.size));
  shardwright::Price price;
  price.duration = ToPrice(time, shape.code);
  const bool has_hook = shape.issue == Issue::kHook;
  price.issue = ToSimTime(profile_.host.collective_issue.value +
                          (has_hook ? profile_.host.unit_hook.value : Seconds(0)));
  price.first_launch = price.issue;
  price.tail = price.duration;
  if (time.value <= 0 || path.ring.size <= 1) {
    return price;
  }
  ContentionClass load;
  load.kind = LoadKind::kCollective;
  load.sm_share =
      std::min(1.0, static_cast<double>(ChannelsOf(path)) / static_cast<double>(kernels_.sm_count));
  load.bus_rate = static_cast<double>(shape.bytes.value) *
                  BusBytesPerByte(shape.code, path.ring.size) / time.value;
  load.hbm_share = RoundShare(MemoryShare(shape.code, load.bus_rate, cluster_.gpu, profile_));
  for (const ResourceUse& use : path.ring.uses) {
    if (load.link_count == kMaxLinkUses || use.level >= kMostFabricLevels) {
      continue;  // the outermost tiers of a very deep fabric are shared without contention
    }
    const bool is_inside =
        use.kind == ResourceKind::kScaleUp || use.kind == ResourceKind::kNodePcie;
    const TransportProfile& transport = is_inside ? *path.intra : *path.network;
    // Trees and reduction in the switch move fewer bytes than the ring that bus rates are counted
    // for; alone they fill a link, and no more than that.
    const double per_rate = use.weight / (use.capacity.value * transport.efficiency.value);
    load.links[load.link_count++] = {ResourceIndex(use.kind, use.level, table),
                                     std::min(per_rate, 1 / load.bus_rate)};
  }
  // A core's rate of copying says how long the rank's thread does something.
  const double touched = BytesTouched(shape.code, static_cast<double>(shape.bytes.value),
                                      static_cast<double>(path.ring.size));
  const double busy = touched / kernels_.copies.value / time.value;
  price.contention_class = ClassWithCores(load, std::min(1.0, busy), table);
  return price;
}

shardwright::Price Pricer::PriceHostCopy(const OpShape& shape, PriceTable& table) const {
  const bool to_device = shape.code == OpCode::kCopyH2d;
  // All GPUs of a node copy at the same time.
  const BytesPerSecond rate = to_device ? copies_.to_device_together * profile_.copy.to_device.value
                                        : copies_.to_host_together * profile_.copy.to_host.value;
  const Seconds time = shape.bytes / rate + profile_.copy.latency.value;
  shardwright::Price price;
  price.duration = ToPrice(time, shape.code);
  price.issue = price.first_launch = ToSimTime(profile_.host.copy_issue.value);
  price.tail = price.duration;
  ContentionClass load;
  load.kind = to_device ? LoadKind::kCopyToDevice : LoadKind::kCopyToHost;
  load.hbm_share = RoundShare(Ratio(rate, cluster_.gpu.memory_bandwidth.value));
  price.contention_class = ClassWithCores(load, 1, table);
  return price;
}

shardwright::Price Pricer::PriceHostOptimizer(const Program& program, const OpShape& shape) const {
  const Bytes bytes = Summed<Bytes>(
      program.KernelsOf(shape), [&](const Kernel& kernel) { return kernel.read + kernel.written; });
  shardwright::Price price;
  // Contention knows streams only: while the host of each rank updates, its streams are idle.
  const double own = cluster_.SharedCores() / static_cast<double>(cluster_.RanksOnCores());
  const double core = own > 0 ? std::min(1.0, own) : 1;
  const Seconds alone = bytes / (host_memory_ * core);
  price.duration = ToPrice(ShareAmongThreads(alone, cluster_, profile_).time, shape.code);
  return price;
}

void Pricer::Price(const Program& program, PriceTable& table) {
  table.wake_up = ToSimTime(profile_.host.wake.value);
  table.in_turn = profile_.overlap.gloo.value > 0;
  table.contention.classes.assign(1, ContentionClass());
  table.contention.resource_count = 0;
  table.contention.compute_sensitivity = profile_.overlap.compute_sensitivity.value;
  table.contention.collective_rate = profile_.overlap.collective_rate.value;
  table.loop_work = SimTime();
  table.contention.copies_both_ways = profile_.copy.both_ways.value;
  table.contention.cores = cluster_.SharedCores();
  table.contention.ranks_on_cores = static_cast<double>(cluster_.RanksOnCores());
  table.contention.busy_cores = profile_.overlap.busy_cores.value;
  table.contention.core_turns = profile_.overlap.core_turns.value;
  table.prices.clear();
  for (const OpShape& shape : program.shapes) {
    const OpCodeInfo& info = InfoOf(shape.code);
    if (info.is_collective) {
      table.prices.push_back(PriceCollective(program, shape, table));
    } else if (shape.code == OpCode::kCopyH2d || shape.code == OpCode::kCopyD2h) {
      table.prices.push_back(PriceHostCopy(shape, table));
    } else if (shape.code == OpCode::kHostOptimizerStep) {
      table.prices.push_back(PriceHostOptimizer(program, shape));
    } else if (info.runs_on_host) {
      table.prices.push_back(shardwright::Price());
    } else {
      table.prices.push_back(PriceKernels(program, shape, table));
    }
  }
  AddStepWork(program, table);
}

// The training loop's own work of a step, during which the device has nothing to do, stands behind
// the optimizer ops, which share it.
void Pricer::AddStepWork(const Program& program, PriceTable& table) const {
  const Seconds work = profile_.host.step.value;
  if (work.value <= 0) {
    return;
  }
  const auto is_update = [&](const Op& op) { return IsUpdate(program.ShapeOf(op).code); };
  const auto count = CountIf(program.step.ops, is_update);
  if (count == 0) {
    return;
  }
  const SimTime share = ToSimTime(work / static_cast<double>(count));
  table.loop_work = ToSimTime(work);
  for (std::size_t i = 0; i < program.shapes.size(); ++i) {
    if (IsUpdate(program.shapes[i].code)) {
      table.prices[i].duration += share;
    }
  }
}

double MemoryShare(OpCode code, double bus_rate, const GpuSpec& gpu, const Profile& profile) {
  const OverlapProfile& overlap = profile.overlap;
  double traffic = overlap.gather_memory_traffic.value;
  if (code == OpCode::kReduceScatter) {
    traffic = overlap.reduce_memory_traffic.value;
  } else if (code == OpCode::kAllReduce) {  // half of its bus traffic reduces, half gathers
    traffic = (overlap.gather_memory_traffic.value + overlap.reduce_memory_traffic.value) / 2;
  }
  return traffic * bus_rate / gpu.memory_bandwidth.value.value;
}

PriceTable PriceProgram(const Program& program, const Cluster& cluster, const Profile& profile) {
  PriceTable table;
  Pricer(cluster, profile).Price(program, table);
  return table;
}

}  // namespace shardwright
