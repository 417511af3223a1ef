#include "planner/bounds.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <utility>

#include "models/stacked_experts.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower.h"
#include "schedule/lower/analysis.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/optimizer.h"
#include "simulator/costs/collectives.h"
#include "simulator/costs/kernels.h"
#include "simulator/simulate.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

// A copy of this size hides its latency; copies are priced by their rate alone.
constexpr double kCopyBytes = 1e12;

double SizeInBytes(DType dtype) {
  return static_cast<double>(SizeOf(dtype));
}

std::int64_t OutsideBytesOf(const SearchInput& input, const OuterChoice& outer,
                            const DialectFacts& facts) {
  const MemoryProfile& memory = input.profile.memory;
  std::int64_t groups = (outer.shard_size > 1 ? 1 : 0) + (outer.replicate_size > 1 ? 1 : 0);
  groups += !facts.one_communicator && outer.shard_size > 1 && input.job.mode == JobMode::kTrain;
  if (groups == 0) {
    return memory.context.value.value;
  }
  return memory.context.value.value + memory.first_communicator.value.value +
         (groups > 1 ? (groups - 1) * memory.next_communicator.value.value : 0);
}

// The storages that the result depends on. What nothing reads, or nothing but a dead branch, may be
// gathered less often and need not have a gradient.
std::set<std::uint32_t> ReadStorages(const Model& model) {
  const std::vector<bool> reaches = OpsBehindResult(model);
  std::set<std::uint32_t> storages;
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    for (const ParamId id : model.ops[i].params) {
      const ParamId tied = model.params[id.value].tied_to;
      if (reaches[i]) {
        storages.insert((tied.valid() ? tied : id).value);
      }
    }
  }
  return storages;
}

}  // namespace

Bounds::Bounds(const SearchInput& input, const SearchOptions& options, const Limits& limits)
    : in_(input),
      options_(options),
      limits_(limits),
      facts_(FactsOf(options.base)),
      copy_rates_(FindHostCopyRates(input.cluster)) {
  const std::int64_t ranks = input.cluster.RankCount();
  for (std::int64_t shard = 1; shard <= ranks; ++shard) {
    if (ranks % shard == 0) {
      sizes_[shard] = SizesOn(shard);
    }
  }
  elements_ = sizes_.at(1).all;
  read_ = sizes_.at(1).read;
  trainable_ = sizes_.at(1).trainable;
  std::set<std::uint32_t> outside;
  for (const ModelOp& op : input.model.ops) {
    ModuleId m = op.module;
    while (m.valid() && !IsBlock(input.model, m)) {
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

// With the padding of weights that are cut over so many ranks one by one.
Bounds::Sizes Bounds::SizesOn(std::int64_t ranks) const {
  const Model& model = in_.model;
  const std::set<std::uint32_t> read = ReadStorages(model);
  ResolvedUnit whole;
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    if (!model.params[p].tied_to.valid()) {
      whole.params.push_back(ParamId(p));
    }
  }
  const bool is_cut = facts_.cuts_first_dimension;
  const UnitInfo layout = LayoutPerParameter(
      model, whole, is_cut ? ranks : 1,
      is_cut && StacksExperts(in_.kernels.name) ? StackExperts(model) : ParamStacks());
  Sizes sizes;
  for (const ParamSlot& slot : layout.params) {
    const auto elements = static_cast<double>(slot.padded_elements);
    const bool is_read = read.contains(slot.param.value);
    const bool learns = is_read && model.params[slot.param.value].trainable;
    sizes.all += elements;
    sizes.read += is_read ? elements : 0;
    sizes.trainable += learns && in_.job.mode == JobMode::kTrain ? elements : 0;
  }
  return sizes;
}

// Memory that every plan of `outer` has when backward begins, besides activations.
double Bounds::PersistentBytes(const OuterChoice& outer) const {
  const bool is_train = in_.job.mode == JobMode::kTrain;
  const double shard = static_cast<double>(outer.shard_size);
  const double master = SizeInBytes(in_.job.precision.master);
  const double param = SizeInBytes(in_.job.precision.param);
  const double reduce = SizeInBytes(in_.job.precision.reduce);
  const Sizes& sizes = sizes_.at(outer.shard_size);
  double bytes = 0;
  if (!outer.offload.parameters) {
    bytes = facts_.whole_parameters      ? sizes.all * std::min(param, master)
            : facts_.shards_are_gathered ? sizes.all / shard * param
                                         : sizes.all / shard * master;
    if (facts_.shards_are_gathered && is_train && !outer.offload.optimizer) {
      bytes += sizes.trainable / shard * master;  // beside the weights
    }
    // Muon and SOAP keep others, Muon's shared out among the ranks: nothing is counted.
    if (is_train && !outer.offload.optimizer && !outer.offload.moments &&
        in_.job.optimizer.matrices == MatrixRule::kNone) {
      bytes += StateCount(in_.job.optimizer.kind) * sizes.trainable / shard * master;
    }
  }
  // Gradients of earlier micro-batches. With the parameters their shards are on the host, too.
  if (is_train && outer.accumulation > 1 && facts_.frees_units) {
    if (outer.sync == SyncMode::kLast) {
      bytes += std::max(0.0, trainable_ - tail_elements_) *
               (facts_.grads_as_reduced ? reduce : std::min(param, reduce));
    } else if (!outer.offload.parameters) {
      bytes += sizes.trainable / shard * std::min(master, reduce);
    }
  }
  return bytes;
}

// A unit that is sharded, or kept on the host, is on the device as a whole while one of its ops
// runs, besides its shard.
Bytes Bounds::WhileWidestOpRuns(const OuterChoice& outer, const Measured& measured) const {
  if (outer.shard_size == 1 && !outer.offload.parameters) {
    return Bytes(0);
  }
  OuterChoice once = outer;  // earlier gradients of the op may be those that it adds to
  once.accumulation = 1;
  const double bytes = PersistentBytes(once) + measured.widest_op_bytes;
  return Bytes(static_cast<std::int64_t>(bytes) + OutsideBytesOf(in_, outer, facts_));
}

// Behind the last backward, where something waits for all gradients: their shards exist beside
// those of masters and states.
Bytes Bounds::BeforeUpdate(const OuterChoice& outer) const {
  const bool on_host = outer.offload.optimizer || outer.offload.parameters;
  if (on_host || !facts_.frees_units || !IsOrdered(outer)) {
    return Bytes(0);
  }
  OuterChoice once = outer;
  once.accumulation = 1;
  const Precision& precision = in_.job.precision;
  const double gradients = sizes_.at(outer.shard_size).trainable /
                           static_cast<double>(outer.shard_size) *
                           std::min(SizeInBytes(precision.master), SizeInBytes(precision.reduce));
  return Bytes(static_cast<std::int64_t>(PersistentBytes(once) + gradients) +
               OutsideBytesOf(in_, outer, facts_));
}

// Masters and states on the host, per device.
double Bounds::HostBytes(const OuterChoice& outer) const {
  const bool has_masters = outer.offload.optimizer || outer.offload.parameters;
  const int states = has_masters || outer.offload.moments ? StateCount(in_.job.optimizer.kind) : 0;
  return (states + (has_masters ? 1 : 0)) * sizes_.at(outer.shard_size).trainable /
         static_cast<double>(outer.shard_size) * SizeInBytes(in_.job.precision.master);
}

Bounds::Traffic Bounds::TrafficOf(const OuterChoice& outer) const {
  Traffic traffic;
  if (!facts_.counts_transfers) {
    return traffic;  // only compute is counted
  }
  const bool copies = outer.offload.activations || outer.offload.moments;
  if (copies && in_.job.mode == JobMode::kTrain) {
    traffic.bytes[Occupancy::kToHost] = traffic.bytes[Occupancy::kToDevice] = kCopyBytes;
  }
  const double param = SizeInBytes(in_.job.precision.param);
  const double reduce = ReduceBytes();
  const auto passes = static_cast<double>(outer.accumulation);
  const Sizes& sizes = sizes_.at(outer.shard_size);
  if (outer.shard_size > 1) {
    traffic.bytes[Occupancy::kGather] = sizes.read * param;
    traffic.bytes[Occupancy::kReduce] = sizes.trainable * reduce;
  }
  if (outer.replicate_size > 1) {
    traffic.bytes[Occupancy::kReplicate] =
        sizes.trainable / static_cast<double>(outer.shard_size) * reduce;
  }
  const bool may_keep = outer.sync == SyncMode::kLast && facts_.keeps_unsynced;
  traffic.times = {may_keep ? 1 : passes, outer.sync == SyncMode::kLast ? 1 : passes,
                   outer.sync == SyncMode::kEvery ? passes : 1, passes};
  if (outer.shard_size > 1 && in_.job.mode == JobMode::kTrain) {
    traffic.bytes[Occupancy::kPartial] = std::max(0.0, read_ - tail_elements_) * param;
    for (std::int64_t size = 2; size < outer.shard_size; ++size) {
      if (outer.shard_size % size == 0) {
        traffic.partial_groups.push_back(size);
      }
    }
  }
  return traffic;
}

// Of one element in a reduction.
double Bounds::ReduceBytes() const {
  return SizeInBytes(facts_.reduces_masters ? in_.job.precision.master : in_.job.precision.reduce);
}

// Does compute wait for all reductions at the end of every backward, and everything of the next
// forward and the update for compute?
bool Bounds::EndsEachPass() const {
  return facts_.pass_end == PassEnd::kReductions;
}

// Does compute wait for the norm of all gradients, or the host for all gradients, once per step,
// and everything of the next step for that? Frozen parameters wait for no update on the device.
bool Bounds::IsOrdered(const OuterChoice& outer) const {
  const bool on_host = outer.offload.optimizer || outer.offload.parameters;
  const bool for_norm = facts_.pass_end == PassEnd::kNorm &&
                        (on_host || (TakesGradNorm(in_.job) && trainable_ == elements_));
  return in_.job.mode == JobMode::kTrain && (for_norm || EndsEachPass());
}

// Do updates with moments from the host run on the compute stream, as others do behind the norm?
bool Bounds::StagesOnCompute() const {
  return in_.job.precision.param == DType::kFp16;
}

// The update, at least: on the compute stream, or on the host, which then waits for all gradients
// and issues nothing. What runs on another stream does not count.
StreamingWork Bounds::Update(const OuterChoice& outer) const {
  const bool on_host = outer.offload.optimizer || outer.offload.parameters;
  const bool is_counted =
      on_host || EndsEachPass() ||
      (TakesGradNorm(in_.job) && (!outer.offload.moments || StagesOnCompute()) &&
       facts_.pass_end == PassEnd::kNorm);
  StreamingWork update;
  if (in_.job.mode != JobMode::kTrain || !is_counted) {
    return update;
  }
  const KernelRates rates =
      FindKernelRates(in_.cluster.gpu, in_.profile.compute, in_.cluster.RankCount());
  const BytesPerSecond rate = on_host ? HostMemoryShare(in_.cluster) : rates.optimizer;
  const auto part = static_cast<std::int64_t>(sizes_.at(outer.shard_size).trainable /
                                              static_cast<double>(outer.shard_size));
  OptimizerSpec spec =
      on_host ? OnHost(in_.job.optimizer, options_.base.dialect) : in_.job.optimizer;
  spec.impl = spec.impl == OptimizerImpl::kForLoop ? OptimizerImpl::kForeach : spec.impl;
  update.seconds = in_.profile.host.step.value.value;  // as if in one launch
  if (in_.job.optimizer.matrices != MatrixRule::kNone) {
    return update;
  }
  for (const Kernel& kernel :
       LowerOptimizer(spec, part, 1, part, in_.job.precision.master).kernels) {
    update.seconds += ((kernel.read + kernel.written) / rate).value;
    update.streaming += ((kernel.read + kernel.written) / rates.streaming).value;
  }
  return update;
}

// The norm reads all gradients, clipping reads and writes them.
double Bounds::ClipSeconds(const OuterChoice& outer) const {
  const KernelRates rates =
      FindKernelRates(in_.cluster.gpu, in_.profile.compute, in_.cluster.RankCount());
  const double bytes =
      trainable_ / static_cast<double>(outer.shard_size) * SizeInBytes(in_.job.precision.master);
  return bytes / rates.grad_norm.value + 2 * bytes / rates.grad_clip.value;
}

// Of one collective of at least so many bytes, alone. Larger ones may take less where NCCL chooses
// another protocol.
double Bounds::MessageSeconds(OpCode code, GroupShape group, double bytes) const {
  if (group.size <= 1 || bytes <= 0) {
    return 0;
  }
  constexpr double kStep = 1.25;
  constexpr double kMost = 8;
  const CollectivePath path = FindCollectivePath(in_.cluster, in_.profile, group);
  double least = INFINITY;
  for (double factor = 1; factor <= kMost; factor *= kStep) {
    const Bytes size(static_cast<std::int64_t>(bytes * factor));
    least = std::min(least, CollectiveTime(code, size, path).value);
  }
  return least;
}

// What cannot run beside anything at both ends of a step, or of each pass: the gather of what the
// first op reads, and the reduction of the gradients that the last op writes.
void Bounds::AddEnds(const OuterChoice& outer, const Traffic& traffic, Terms& terms) const {
  terms.is_ordered = IsOrdered(outer);
  const bool on_host = outer.offload.optimizer || outer.offload.parameters;
  const bool ends_each = EndsEachPass();
  const StreamingWork update = Update(outer);
  terms.update = on_host || ends_each ? StreamingWork() : update;
  if (!terms.is_ordered) {
    return;
  }
  const Measured& m = *terms.measured;
  const double shard = static_cast<double>(outer.shard_size);
  const double master = SizeInBytes(in_.job.precision.master);
  const double reduce = ReduceBytes();
  terms.first_forwards = ends_each ? terms.passes : 1;
  terms.forward_gathers_end = ends_each || m.last_has_params;
  terms.regathers_follow_forward = facts_.regathers_after_forward;
  terms.serial = on_host || ends_each ? update.seconds : 0;
  terms.serial += on_host || !TakesGradNorm(in_.job) ? 0 : ClipSeconds(outer);
  const auto times = [&](Occupancy::Transfer t) { return ends_each ? traffic.times[t] : 1; };
  terms.head = times(Occupancy::kGather) *
               MessageSeconds(OpCode::kAllGather, {outer.shard_size, 1},
                              m.first_elements * SizeInBytes(in_.job.precision.param));
  terms.tail =
      times(Occupancy::kReduce) *
          MessageSeconds(OpCode::kReduceScatter, {outer.shard_size, 1}, m.last_elements * reduce) +
      times(Occupancy::kReplicate) * MessageSeconds(OpCode::kAllReduce,
                                                    {outer.replicate_size, outer.shard_size},
                                                    m.last_elements / shard * reduce);
  if (on_host) {  // the gradient leaves before the update, the parameter comes back behind it
    const CopyProfile& copy = in_.profile.copy;
    terms.tail += m.last_elements / shard * master /
                  (copy_rates_.to_host_together * copy.to_host.value).value;
    terms.head += m.first_trainable / shard * master /
                  (copy_rates_.to_device_together * copy.to_device.value).value;
  }
}

void Bounds::AddGathers(const Traffic& traffic, const Occupancy& occupancy, Terms& terms) const {
  for (const auto t : {Occupancy::kReduce, Occupancy::kReplicate}) {
    terms.seconds[t] = traffic.times[t] * traffic.bytes[t] * occupancy.SecondsPerByte(t);
  }
  const double param = SizeInBytes(in_.job.precision.param);
  const double backward = terms.measured->backward_elements;
  const bool may_stay = traffic.bytes[Occupancy::kPartial] > 0;
  const double times = traffic.times[Occupancy::kGather];
  double gathered = times * traffic.bytes[Occupancy::kGather];
  if (may_stay && times > 1) {  // parts where there is no backward serve the next micro-batch
    gathered = traffic.bytes[Occupancy::kGather] + (times - 1) * backward * param;
  }
  terms.seconds[Occupancy::kGather] = gathered * occupancy.SecondsPerByte(Occupancy::kGather);
  terms.gather_copies = Copies(gathered, gathered);
  const double reduced = traffic.times[Occupancy::kReduce] * traffic.bytes[Occupancy::kReduce];
  terms.reduce_copies = Copies(reduced / ReduceBytes() * std::min(param, ReduceBytes()), reduced);
  if (!may_stay) {
    return;
  }
  const double kept = std::max(0.0, backward - tail_elements_) * param;
  const double again = terms.passes * kept;
  const StreamingWork copies = Copies(again, again);
  terms.after_forward = {
      {kept, 0, Occupancy::kRegather, {}},
      {0, again * occupancy.SecondsPerByte(Occupancy::kGather), Occupancy::kRegather, copies}};
  for (std::size_t i = 0; i < traffic.partial_groups.size(); ++i) {
    terms.after_forward.push_back({kept / static_cast<double>(traffic.partial_groups[i]),
                                   again * occupancy.PartialSecondsPerByte(i), Occupancy::kPartial,
                                   copies});
  }
}

// Of so many bytes on compute, where the dialect makes them.
StreamingWork Bounds::Copies(double read, double written) const {
  if (!facts_.copies_units) {
    return {};
  }
  const KernelRates rates =
      FindKernelRates(in_.cluster.gpu, in_.profile.compute, in_.cluster.RankCount());
  return {(read + written) / rates.copies.value, (read + written) / rates.streaming.value};
}

// Offloaded moments come to the device and leave it once per step. Where updates follow the norm,
// all but those in flight do both behind it and before the last unit of forward is updated; that is
// before compute goes on where updates run there.
void Bounds::AddMoments(const OuterChoice& outer, const Occupancy& occupancy, Terms& terms) const {
  if (!outer.offload.moments || in_.job.mode != JobMode::kTrain) {
    return;
  }
  const double in_flight = static_cast<double>(MostMomentsInFlight(options_).value);
  const double bytes = std::max(0.0, HostBytes(outer) - (terms.is_ordered ? in_flight : 0));
  terms.seconds[Occupancy::kMomentsToHost] = bytes * occupancy.SecondsPerByte(Occupancy::kToHost);
  terms.seconds[Occupancy::kMomentsToDevice] =
      bytes * occupancy.SecondsPerByte(Occupancy::kToDevice);
  terms.moments_end_before_forward = StagesOnCompute();
}

Occupancy Bounds::OccupancyOf(const OuterChoice& outer) const {
  const Traffic traffic = TrafficOf(outer);
  return {in_, outer, facts_, traffic.bytes, traffic.partial_groups};
}

OuterBound Bounds::Of(const OuterChoice& outer, const Measured& measured,
                      const Occupancy& occupancy) const {
  const bool is_train = in_.job.mode == JobMode::kTrain;
  Terms terms;
  terms.measured = &measured;
  terms.passes = static_cast<double>(outer.accumulation);
  terms.offloads_activations = outer.offload.activations && is_train;
  double least_kept = 0;
  for (const BlockClass& c : measured.classes) {
    double least = INFINITY;
    for (std::size_t p = 0; p < c.costs.size(); ++p) {
      const double bytes = c.costs[p].BytesOnDevice(terms.offloads_activations);
      least = measured.pattern_is_allowed[p] ? std::min(least, bytes) : least;
    }
    least_kept += static_cast<double>(c.blocks.size()) * least;
  }
  const double tail =
      terms.offloads_activations ? measured.staying_tail_bytes : measured.tail_bytes;
  const double fixed =
      PersistentBytes(outer) + tail + static_cast<double>(OutsideBytesOf(in_, outer, facts_));
  OuterBound bound;
  bound.memory_at_turn = Bytes(static_cast<std::int64_t>(fixed + least_kept));
  bound.memory =
      std::max({bound.memory_at_turn, WhileWidestOpRuns(outer, measured), BeforeUpdate(outer)});
  bound.deficit = std::max(Bytes(0), bound.memory - limits_.device);
  if (limits_.host > Bytes(0) && in_.job.optimizer.matrices == MatrixRule::kNone) {
    const double host = HostBytes(outer) * static_cast<double>(in_.cluster.gpus_per_node);
    bound.deficit = std::max(bound.deficit, Bytes(static_cast<std::int64_t>(host)) - limits_.host);
  }
  if (bound.deficit > Bytes(0)) {
    return bound;
  }
  const Traffic traffic = TrafficOf(outer);
  AddEnds(outer, traffic, terms);
  AddGathers(traffic, occupancy, terms);
  AddMoments(outer, occupancy, terms);
  terms.to_host_per_byte = occupancy.SecondsPerByte(Occupancy::kToHost);
  terms.to_device_per_byte = occupancy.SecondsPerByte(Occupancy::kToDevice);
  terms.device_limit = static_cast<double>(limits_.device.value);
  terms.device_excess = fixed - terms.device_limit;
  terms.has_host_limit = terms.offloads_activations && limits_.host > Bytes(0);
  if (terms.has_host_limit) {
    terms.host_limit =
        static_cast<double>(limits_.host.value) / static_cast<double>(in_.cluster.gpus_per_node);
    terms.host_excess = HostBytes(outer) - terms.host_limit;
  }
  // The host issues one op after another.
  bound.time = Seconds(std::max(terms.passes * measured.base.issue, LeastTime(terms, occupancy)));
  return bound;
}

}  // namespace shardwright
