#include "planner/bounds.h"

#include <algorithm>
#include <set>
#include <utility>

#include "schedule/lower/optimizer.h"
#include "simulator/costs/kernels.h"
#include "simulator/simulate.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

// A copy of this size hides its latency; copies are priced by their rate alone.
constexpr double kCopyBytes = 1e12;

// A way to use less memory: bytes given up for seconds (of weighted cost).
struct Saving {
  double bytes = 0;
  double seconds = 0;
};

// The cheapest seconds for `needed` bytes when any fraction of a saving may be taken, or for all of
// them if there are no more. Sorts `savings`.
double CheapestSavings(std::vector<Saving>& savings, double needed) {
  std::sort(savings.begin(), savings.end(), [](const Saving& x, const Saving& y) {
    return x.seconds * y.bytes < y.seconds * x.bytes;
  });
  double seconds = 0;
  for (const Saving& saving : savings) {
    if (needed <= 0) {
      break;
    }
    const double part = std::min(1.0, needed / saving.bytes);
    seconds += part * saving.seconds;
    needed -= part * saving.bytes;
  }
  return seconds;
}

// Lower convex hull of (bytes given up, seconds) from the cheapest point on, as savings. Returns
// the cheapest point itself.
Saving AppendHull(std::vector<Saving> points, double count, std::vector<Saving>& savings) {
  std::sort(points.begin(), points.end(), [](const Saving& x, const Saving& y) {
    return x.bytes != y.bytes ? x.bytes < y.bytes : x.seconds < y.seconds;
  });
  std::size_t cheapest = 0;
  for (std::size_t i = 1; i < points.size(); ++i) {
    cheapest = points[i].seconds <= points[cheapest].seconds ? i : cheapest;
  }
  std::vector<Saving> hull = {points[cheapest]};
  for (std::size_t i = cheapest + 1; i < points.size(); ++i) {
    if (points[i].bytes <= hull.back().bytes) {
      continue;
    }
    const auto above = [&] {
      const Saving& a = hull[hull.size() - 2];
      const Saving& b = hull.back();
      return (b.seconds - a.seconds) * (points[i].bytes - a.bytes) >=
             (points[i].seconds - a.seconds) * (b.bytes - a.bytes);
    };
    while (hull.size() > 1 && above()) {
      hull.pop_back();
    }
    hull.push_back(points[i]);
  }
  for (std::size_t i = 1; i < hull.size(); ++i) {
    savings.push_back({count * (hull[i].bytes - hull[i - 1].bytes),
                       count * (hull[i].seconds - hull[i - 1].seconds)});
  }
  return hull.front();
}

double SizeInBytes(DType dtype) {
  return static_cast<double>(SizeOf(dtype));
}

double Weighted(const Work& work, const std::array<double, kLoadCount>& prices) {
  double sum = 0;
  for (std::size_t i = 0; i < kLoadCount; ++i) {
    sum += work.seconds[i] * prices[i];
  }
  return sum;
}

// Freeing parameters after forward: memory given up, and gathers before backward of a whole step.
struct Regather {
  double saved_bytes = 0;
  double seconds = 0;
  Occupancy::Transfer transfer = Occupancy::kGather;
};

// Everything that Bounds::Of knows about one outer choice besides the weights.
struct Terms {
  const Measured* measured = nullptr;
  double passes = 1;     // micro-batches
  double needed = 0;     // bytes that plans without checkpointing have too many of
  double optimizer = 0;  // seconds on the compute stream, by kernels of full load
  std::vector<Regather> regathers;
  bool offloads_activations = false;
  double to_host_seconds_per_byte = 0, to_device_seconds_per_byte = 0;
  Occupancy::Weights seconds{};  // at least, of a whole step
  std::array<bool, Occupancy::kTransferCount> is_used{};
};

// The value of the dual at these weights: a lower bound of the step time. Scales `weights` down
// where they are not feasible.
double DualValue(const Terms& terms, const Occupancy& occupancy, Occupancy::Weights& weights) {
  const Occupancy::Prices prices = occupancy.KernelPrices(weights);
  const Measured& m = *terms.measured;
  const auto& backward = prices[Occupancy::kBackward];
  double value = terms.passes * (Weighted(m.base, backward) - Weighted(m.forward, backward) +
                                 Weighted(m.forward, prices[Occupancy::kForward])) +
                 terms.optimizer * *std::min_element(backward.begin(), backward.end());
  for (const auto t : {Occupancy::kGather, Occupancy::kReduce, Occupancy::kReplicate}) {
    value += weights[t] * terms.seconds[t];
  }
  // With offloaded activations forward lasts as long as all copies to the host, and backward as
  // long as the copies back.
  const double per_copied_byte = weights[Occupancy::kToHost] * terms.to_host_seconds_per_byte +
                                 weights[Occupancy::kToDevice] * terms.to_device_seconds_per_byte;
  std::vector<Saving> savings;
  double needed = terms.needed;
  for (const BlockClass& c : m.classes) {
    const auto bytes = [&](const BlockCost& cost) {
      return terms.offloads_activations ? cost.staying_bytes : cost.kept_bytes;
    };
    std::vector<Saving> points;
    for (std::size_t p = 0; p < c.costs.size(); ++p) {
      if (m.pattern_is_allowed[p]) {
        points.push_back({bytes(c.costs[0]) - bytes(c.costs[p]),
                          terms.passes * (Weighted(c.costs[p].work, backward) +
                                          per_copied_byte * c.costs[p].copied_bytes)});
      }
    }
    const auto count = static_cast<double>(c.blocks.size());
    // What the first layer of backward reads is not copied.
    const double kept = terms.offloads_activations ? std::max(0.0, count - 1) : count;
    const Saving first = AppendHull(std::move(points), kept, savings);
    value += kept * first.seconds;
    needed -= kept * first.bytes;
  }
  std::vector<Saving> regathers = {{0, 0}};
  for (const Regather& r : terms.regathers) {
    regathers.push_back({r.saved_bytes, weights[r.transfer] * r.seconds});
  }
  const Saving kept = AppendHull(std::move(regathers), 1, savings);
  value += kept.seconds;
  needed -= kept.bytes;
  return value + CheapestSavings(savings, needed);
}

// Maximises the dual, which is concave, along one weight at a time.
double BestDual(const Terms& terms, const Occupancy& occupancy) {
  Occupancy::Weights best{};
  double best_value = DualValue(terms, occupancy, best);
  constexpr int kRounds = 4;
  for (int round = 0; round < kRounds; ++round) {
    const double before = best_value;
    for (std::size_t t = 0; t < Occupancy::kTransferCount; ++t) {
      if (!terms.is_used[t]) {
        continue;
      }
      constexpr int kSteps = 8;
      const double width = round == 0 ? 1.0 : 1.0 / kSteps / (round * round);
      const double middle = best[t];
      for (int step = -kSteps; step <= kSteps; ++step) {
        const double weight = middle + width * step / kSteps;
        if (weight < 0 || weight > 1) {
          continue;
        }
        Occupancy::Weights weights = best;
        weights[t] = weight;
        const double value = DualValue(terms, occupancy, weights);
        if (value > best_value) {
          best_value = value;
          best = weights;
        }
      }
    }
    if (best_value <= before * (1 + 1e-5)) {
      break;
    }
  }
  return best_value;
}

std::int64_t OutsideBytesOf(const SearchInput& input, const OuterChoice& outer, Dialect dialect) {
  const MemoryProfile& memory = input.profile.memory;
  std::int64_t groups = (outer.shard_size > 1 ? 1 : 0) + (outer.replicate_size > 1 ? 1 : 0);
  groups += dialect == Dialect::kNative && outer.shard_size > 1 && input.job.mode == JobMode::kTrain
                ? 1
                : 0;
  if (groups == 0) {
    return memory.context.value.value;
  }
  return memory.context.value.value + memory.first_communicator.value.value +
         (groups > 1 ? (groups - 1) * memory.next_communicator.value.value : 0);
}

}  // namespace

Bounds::Bounds(const SearchInput& input, const SearchOptions& options, Bytes limit)
    : in_(input), options_(options), limit_(limit) {
  elements_ = static_cast<double>(CountParameters(input.model));
  trainable_ = input.job.mode == JobMode::kTrain
                   ? static_cast<double>(CountParameters(input.model, true))
                   : 0;
  std::set<std::uint32_t> outside;
  for (const ModelOp& op : input.model.ops) {
    ModuleId m = op.module;
    while (m.valid() && (input.model.block_class.empty() ||
                         input.model.modules[m.value].class_name != input.model.block_class)) {
      m = input.model.modules[m.value].parent;
    }
    for (const ParamId param : op.params) {
      const ParamId tied = input.model.params[param.value].tied_to;
      if (!m.valid() && outside.insert((tied.valid() ? tied : param).value).second) {
        tail_elements_ += static_cast<double>(input.model.params[param.value].Elements());
      }
    }
  }
}

// Memory that every plan of `outer` has when backward begins, besides activations.
double Bounds::PersistentBytes(const OuterChoice& outer) const {
  const Dialect dialect = options_.base.dialect;
  const bool is_train = in_.job.mode == JobMode::kTrain;
  const bool is_whole = dialect == Dialect::kDdp || IsZero(dialect);
  const double shard = static_cast<double>(outer.shard_size);
  const double master = SizeInBytes(in_.job.precision.master);
  const double param = SizeInBytes(in_.job.precision.param);
  const double reduce = SizeInBytes(in_.job.precision.reduce);
  if (outer.offload.parameters) {
    return 0;
  }
  double bytes = is_whole ? elements_ * std::min(param, master) : elements_ / shard * master;
  if (is_train && !outer.offload.optimizer) {
    bytes += StateCount(in_.job.optimizer.kind) * trainable_ / shard * master;
  }
  if (is_train && outer.accumulation > 1 && !is_whole) {  // gradients of earlier micro-batches
    bytes += outer.sync == SyncMode::kLast
                 ? std::max(0.0, trainable_ - tail_elements_) * std::min(param, reduce)
                 : trainable_ / shard * std::min(master, reduce);
  }
  return bytes;
}

Bounds::Traffic Bounds::TrafficOf(const OuterChoice& outer) const {
  const Dialect dialect = options_.base.dialect;
  Traffic traffic;
  if (IsZero(dialect) || dialect == Dialect::kDdp) {
    return traffic;  // gradients travel in buckets; only compute is counted
  }
  const double param = SizeInBytes(in_.job.precision.param);
  const double reduce = SizeInBytes(in_.job.precision.reduce);
  const auto passes = static_cast<double>(outer.accumulation);
  if (outer.shard_size > 1) {
    traffic.bytes[Occupancy::kGather] = elements_ * param;
    traffic.bytes[Occupancy::kReduce] = trainable_ * reduce;
  }
  if (outer.replicate_size > 1) {
    traffic.bytes[Occupancy::kReplicate] =
        trainable_ / static_cast<double>(outer.shard_size) * reduce;
  }
  // FSDP1 without synchronisation, and FairScale, keep units that never reshard for all passes.
  const bool may_keep = outer.sync == SyncMode::kLast &&
                        (dialect == Dialect::kFsdp1 || dialect == Dialect::kFairscale);
  traffic.times = {may_keep ? 1 : passes, outer.sync == SyncMode::kLast ? 1 : passes,
                   outer.sync == SyncMode::kEvery ? passes : 1, passes};
  if (outer.shard_size > 1 && in_.job.mode == JobMode::kTrain) {
    traffic.bytes[Occupancy::kRegather] = std::max(0.0, elements_ - tail_elements_) * param;
    for (std::int64_t size = 2; size < outer.shard_size; ++size) {
      const bool is_level = size == in_.cluster.gpus_per_node || size == outer.shard_size / 2;
      if (outer.shard_size % size == 0 && is_level) {
        traffic.regather_groups.push_back(size);
      }
    }
  }
  return traffic;
}

// Seconds of the update on the compute stream, at least.
double Bounds::OptimizerSeconds(const OuterChoice& outer) const {
  const bool on_device = !outer.offload.optimizer && !outer.offload.parameters;
  const bool on_compute = in_.job.clip_gradients && !IsZero(options_.base.dialect);
  if (in_.job.mode != JobMode::kTrain || !on_device || !on_compute) {
    return 0;
  }
  const auto part = static_cast<std::int64_t>(trainable_ / static_cast<double>(outer.shard_size));
  const KernelRates rates =
      FindKernelRates(in_.cluster.gpu, in_.profile.compute, in_.cluster.RankCount());
  OptimizerSpec spec = in_.job.optimizer;
  spec.impl = spec.impl == OptimizerImpl::kForLoop ? OptimizerImpl::kForeach : spec.impl;
  double seconds = in_.profile.host.step.value.value;
  for (const Kernel& kernel :
       LowerOptimizer(spec, part, 1, part, in_.job.precision.master).kernels) {
    seconds += ((kernel.read + kernel.written) / rates.optimizer).value;
  }
  return seconds;
}

OuterBound Bounds::Of(const OuterChoice& outer, const Measured& measured) const {
  const bool is_train = in_.job.mode == JobMode::kTrain;
  Terms terms;
  terms.measured = &measured;
  terms.passes = static_cast<double>(outer.accumulation);
  terms.offloads_activations = outer.offload.activations && is_train;
  double kept = 0, least_kept = 0;
  for (const BlockClass& c : measured.classes) {
    const auto bytes = [&](const BlockCost& cost) {
      return terms.offloads_activations ? cost.staying_bytes : cost.kept_bytes;
    };
    double least = bytes(c.costs[0]);
    for (std::size_t p = 0; p < c.costs.size(); ++p) {
      least = measured.pattern_is_allowed[p] ? std::min(least, bytes(c.costs[p])) : least;
    }
    kept += static_cast<double>(c.blocks.size()) * bytes(c.costs[0]);
    least_kept += static_cast<double>(c.blocks.size()) * least;
  }
  const double tail =
      terms.offloads_activations ? measured.staying_tail_bytes : measured.tail_bytes;
  const double fixed = PersistentBytes(outer) + tail +
                       static_cast<double>(OutsideBytesOf(in_, outer, options_.base.dialect));
  OuterBound bound;
  bound.memory = Bytes(static_cast<std::int64_t>(fixed + least_kept));
  bound.deficit = std::max(Bytes(0), bound.memory - limit_);
  if (bound.deficit > Bytes(0)) {
    return bound;
  }
  Traffic traffic = TrafficOf(outer);
  if (terms.offloads_activations) {
    traffic.bytes[Occupancy::kToHost] = traffic.bytes[Occupancy::kToDevice] = kCopyBytes;
  }
  const Occupancy occupancy(in_, outer, options_.base.dialect, traffic.bytes,
                            traffic.regather_groups);
  for (const auto t : {Occupancy::kGather, Occupancy::kReduce, Occupancy::kReplicate}) {
    terms.seconds[t] = traffic.times[t] * traffic.bytes[t] * occupancy.SecondsPerByte(t);
  }
  const double gathered = traffic.bytes[Occupancy::kRegather];
  terms.needed = fixed + kept + gathered - static_cast<double>(limit_.value);
  if (gathered > 0) {
    terms.regathers.push_back(
        {gathered, terms.passes * gathered * occupancy.SecondsPerByte(Occupancy::kGather)});
  }
  for (std::size_t i = 0; i < traffic.regather_groups.size(); ++i) {
    const auto size = static_cast<double>(traffic.regather_groups[i]);
    terms.regathers.push_back({gathered * (1 - 1 / size),
                               terms.passes * gathered * occupancy.RegatherSecondsPerByte(i),
                               Occupancy::kRegather});
  }
  terms.optimizer = OptimizerSeconds(outer);
  terms.to_host_seconds_per_byte = occupancy.SecondsPerByte(Occupancy::kToHost);
  terms.to_device_seconds_per_byte = occupancy.SecondsPerByte(Occupancy::kToDevice);
  double best = terms.passes * measured.base.issue;  // the host issues one op after another
  for (std::size_t t = 0; t < Occupancy::kTransferCount; ++t) {
    terms.is_used[t] = traffic.bytes[t] > 0;
  }
  best = std::max(best, BestDual(terms, occupancy));
  bound.time = Seconds(best);
  return bound;
}

}  // namespace shardwright
