// Lower bounds for all plans with one mesh, batch and offload: how much memory each needs at least,
// and how long a step takes at least. docs/planning.md derives them.
//
// Example of memory: 1e9 trainable parameters, AdamW, fp32 beside bf16, shard 4, fsdp2.
//
//   States      (1 master + 2 moments) x 4 bytes x 0.25e9           3.0 GB
//   LeastPeak   + the widest op: 50e6 weights, whole, x (2 + 2)     + 0.2 GB
//   at turn     + activations of all blocks under the leanest pattern, the tail, memory outside
//
// The larger of both moments is the bound. If it is above the limit, no plan of this kind is
// lowered.
//
// Example of time: 10 s of kernels, 4.5 s of gathers; dual.h shows how the bound of 11 s follows.
// The terms that it needs are collected here: seconds of traffic at the best rate of any message
// size (AddTraffic), and the parts of a step that run beside nothing (AddEnds).
//
// Every number errs on the low side. A bound that is too high would hide the best plan, and the
// reported gap would be false; tests hold it against random plans.

#include "planner/bounds.h"

#include <algorithm>
#include <cmath>

#include "models/stacked_experts.h"
#include "models/totals.h"
#include "schedule/lower.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/optimizer.h"
#include "simulator/costs/collectives.h"
#include "simulator/simulate.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

double SizeInBytes(DType dtype) {
  return static_cast<double>(SizeOf(dtype));
}

bool UpdatesOnHost(const OuterChoice& outer) {
  return outer.offload.optimizer || outer.offload.parameters;
}

}  // namespace

// Finds, once per search, which storages the result depends on and which are used outside of
// blocks.
Bounds::Bounds(const Problem& input, const SearchOptions& options, const Limits& limits)
    : in_(input),
      options_(options),
      limits_(limits),
      facts_(FactsOf(options.base)),
      rates_(FindKernelRates(input.cluster.gpu, input.profile.compute, input.cluster.RankCount())),
      is_train_(input.job.mode == JobMode::kTrain),
      master_(SizeInBytes(input.job.precision.master)),
      param_(GathersFp8(input.kernels.fp8) ? 1.0 : SizeInBytes(input.job.precision.param)),
      reduce_(SizeInBytes(input.job.precision.reduce)),
      sent_(facts_.reduces_masters ? master_ : reduce_),
      is_read_(input.model.params.size()),
      is_outside_(input.model.params.size()) {
  // Parameters that nothing reads, or a dead branch alone, may be gathered less often and need not
  // have a gradient.
  const std::vector<bool> reaches = OpsBehindResult(input.model);
  for (std::size_t i = 0; i < input.model.ops.size(); ++i) {
    const ModelOp& op = input.model.ops[i];
    ModuleId block = op.module;
    while (block.valid() && !IsBlock(input.model, block)) {
      block = input.model.modules[block.value].parent;
    }
    for (const ParamId param : op.params) {
      const ParamId tied = input.model.params[param.value].tied_to;
      const std::size_t storage = (tied.valid() ? tied : param).value;
      is_read_[storage] = is_read_[storage] || reaches[i];
      is_outside_[storage] = is_outside_[storage] || !block.valid();
    }
  }
  whole_ = SizesOn(1, 1);
}

// With the padding of weights that are cut over so many ranks one by one.
// Example: 8 experts in one tensor over 16 ranks of fsdp2 are padded to 16 rows, so they count
// twice.
Bounds::Sizes Bounds::SizesOn(std::int64_t ranks, double experts) const {
  const Model& model = in_.model;
  ResolvedUnit dense, shared;
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    if (!model.params[p].tied_to.valid()) {
      (model.params[p].parts > 1 ? shared : dense).params.push_back(ParamId(p));
    }
  }
  const bool is_cut = facts_.cuts_first_dimension;
  const ParamStacks stacks =
      is_cut && StacksExperts(in_.kernels.name) ? StackExperts(model) : ParamStacks();
  Sizes sizes;
  const auto add = [&](const ResolvedUnit& unit, std::int64_t shards, double times) {
    for (const ParamSlot& slot :
         LayoutPerParameter(model, unit, is_cut ? std::max<std::int64_t>(shards, 1) : 1, stacks)
             .params) {
      const double elements = times * static_cast<double>(slot.padded_elements);
      const bool is_read = is_read_[slot.param.value];
      const bool learns = is_train_ && is_read && model.params[slot.param.value].trainable;
      sizes.all += elements;
      sizes.read += is_read ? elements : 0;
      sizes.trainable += learns ? elements : 0;
      sizes.tail += is_outside_[slot.param.value] ? elements : 0;
    }
  };
  add(dense, ranks, 1);
  add(shared, Mesh{{1, ranks}, options_.base.expert_size}.SameExperts().size, experts);
  return sizes;
}

Bounds::Sizes Bounds::HeldBy(std::int64_t ranks) const {
  return SizesOn(ranks, static_cast<double>(options_.base.expert_size));
}

// Compares collectives of 1e9 bytes, where latency does not count.
double Bounds::ShareOfExperts(const OuterChoice& outer) const {
  constexpr double kLarge = 1e9;  // bytes
  const Mesh mesh = {MeshOf(outer).size, options_.base.expert_size};
  if (mesh.expert == 1) {
    return 1;
  }
  double share = 1;
  for (const OpCode code : {OpCode::kAllGather, OpCode::kReduceScatter}) {
    share = std::min(share, MessageSeconds(code, mesh.SameExperts(), kLarge) /
                                MessageSeconds(code, mesh.Of({Axis::kShard}), kLarge));
  }
  return share;
}

// Elements that learn, on one rank.
double Bounds::Shard(const OuterChoice& outer) const {
  return HeldBy(outer.shard_size).trainable / static_cast<double>(outer.shard_size);
}

double Bounds::FrozenWidth(double as_learned) const {
  constexpr double kHalf = 0.5, kOne = 1.0;
  switch (in_.job.frozen_format) {
    case FrozenFormat::kMaster:
      return as_learned;
    case FrozenFormat::kParam:
      return std::min(as_learned, param_);
    case FrozenFormat::kInt8:
      return kOne;
    default:
      return kHalf;
  }
}

// Bytes of parameters and optimizer states on the device.
// Frozen parameters count as the job stores them, without states. Packed states and those of Muon
// and SOAP count as nothing, which keeps the bound low.
double Bounds::States(const OuterChoice& outer) const {
  if (outer.offload.parameters) {
    return 0;
  }
  const double all = HeldBy(outer.shard_size).all;
  const double part = all / static_cast<double>(outer.shard_size);
  double bytes = facts_.whole_parameters      ? all * std::min(param_, master_)
                 : facts_.shards_are_gathered ? part * param_
                                              : part * master_;
  if (in_.job.frozen_format != FrozenFormat::kMaster) {
    const Sizes held = HeldBy(1);
    const double learns = held.trainable;
    bytes = (learns * master_ + std::max(0.0, held.all - learns) * FrozenWidth(master_)) /
            static_cast<double>(outer.shard_size);
  }
  if (is_train_ && !outer.offload.optimizer) {
    // Muon and SOAP keep others, Muon's shared out among the ranks: nothing is counted.
    const bool has_states =
        !outer.offload.moments && in_.job.optimizer.matrices == MatrixRule::kNone;
    const int kept = (facts_.shards_are_gathered ? 1 : 0) +  // masters beside the weights
                     (has_states ? StateCount(in_.job.optimizer.kind) : 0);
    bytes += kept * Shard(outer) * (IsPacked() ? 0 : master_);
  }
  return bytes;
}

// Gradients of earlier micro-batches. With the parameters their shards are on the host, too.
double Bounds::EarlierGradients(const OuterChoice& outer) const {
  if (!is_train_ || outer.accumulation == 1 || !facts_.frees_units) {
    return 0;
  }
  if (outer.sync == SyncMode::kLast) {
    return std::max(0.0, whole_.trainable - whole_.tail) *
           (facts_.grads_as_reduced ? reduce_ : std::min(param_, reduce_));
  }
  return outer.offload.parameters ? 0 : Shard(outer) * std::min(master_, reduce_);
}

// Masters and states on the host, per device.
double Bounds::HostBytes(const OuterChoice& outer) const {
  const int states =
      UpdatesOnHost(outer) || outer.offload.moments ? StateCount(in_.job.optimizer.kind) : 0;
  return (states + (UpdatesOnHost(outer) ? 1 : 0)) * Shard(outer) * master_;
}

// Bytes that live outside of the allocator.
double Bounds::Outside(const OuterChoice& outer) const {
  Program program;
  program.groups = GroupsOf(outer);
  if (!facts_.one_communicator && is_train_) {
    program.groups.push_back(program.groups.front());
  }
  // One neighbour, and all stages where the norm is theirs.
  const std::int64_t ranks = options_.base.pipeline_size;
  program.groups.resize(program.groups.size() + (TakesGradNorm(in_.job) ? 2 : 1), {"pp", ranks, 1});
  return static_cast<double>(OutsideBytes(program, in_.profile.memory).value);
}

// States, and the most that is beside them at two other moments than the turn to backward.
double Bounds::LeastPeak(const OuterChoice& outer, const Measured& measured) const {
  // A unit that is sharded, or kept on the host, is on the device as a whole while one of its ops
  // runs, besides its shard. Earlier gradients of the op may be those that it adds to.
  const bool comes_whole = outer.shard_size > 1 || outer.offload.parameters;
  // Behind the last backward, where something waits for all gradients: their shards.
  const bool all_reduced = !UpdatesOnHost(outer) && facts_.frees_units && IsOrdered(outer);
  return States(outer) + std::max(comes_whole ? measured.widest_op_bytes : 0,
                                  all_reduced ? Shard(outer) * std::min(master_, reduce_) : 0);
}

// Does compute wait for the norm of all gradients, or the host for all gradients, once per step,
// and everything of the next step for that? Frozen parameters wait for no update on the device.
bool Bounds::IsOrdered(const OuterChoice& outer) const {
  const bool for_norm =
      facts_.pass_end == PassEnd::kNorm &&
      (UpdatesOnHost(outer) || (TakesGradNorm(in_.job) && whole_.trainable == whole_.all));
  return is_train_ && (for_norm || EndsEachPass());
}

// Of full arrays in one pass over the model, at least.
Occupancy::RowWeights Bounds::BytesOf(const OuterChoice& outer) const {
  // A copy of this size hides its latency; copies are priced by their rate alone.
  constexpr double kCopyBytes = 1e12;
  Occupancy::RowWeights bytes{};
  if (!facts_.counts_transfers) {
    return bytes;  // only compute is counted
  }
  const double experts = ShareOfExperts(outer);
  const Sizes sizes = SizesOn(outer.shard_size, experts);
  const Sizes unpadded = SizesOn(1, experts);
  const double reduced = sizes.trainable * sent_;
  if (outer.shard_size > 1) {
    bytes[Occupancy::kGather] = sizes.read * FrozenWidth(param_);
    bytes[Occupancy::kReduce] = reduced;
    const bool may_stay = is_train_ || facts_.keeps_unlearned;
    bytes[Occupancy::kPartial] =
        may_stay ? std::max(0.0, unpadded.read - unpadded.tail) * FrozenWidth(param_) : 0;
  }
  if (outer.replicate_size > 1) {
    bytes[Occupancy::kReplicate] = Shard(outer) * sent_;
  }
  if ((outer.offload.activations || outer.offload.moments) && is_train_) {
    bytes[Occupancy::kToHost] = bytes[Occupancy::kToDevice] = kCopyBytes;
  }
  return bytes;
}

// Parts of the shard group that may keep a copy after forward.
std::vector<std::int64_t> Bounds::PartialGroups(const OuterChoice& outer) const {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 2; size < outer.shard_size; ++size) {
    if (MeshOf(outer).SplitsInto(size)) {
      sizes.push_back(size);
    }
  }
  return sizes;
}

Occupancy Bounds::OccupancyOf(const OuterChoice& outer) const {
  return {in_, outer, facts_, BytesOf(outer), PartialGroups(outer)};
}

// The update, at least: on the compute stream, or on the host, which then waits for all gradients
// and issues nothing. Updates on another stream do not count.
StreamingWork Bounds::Update(const OuterChoice& outer) const {
  const bool on_host = UpdatesOnHost(outer);
  const bool on_compute = !outer.offload.moments || StagesOnCompute();
  const bool behind_norm =
      facts_.pass_end == PassEnd::kNorm && TakesGradNorm(in_.job) && on_compute;
  StreamingWork update;
  if (!is_train_ || !(on_host || EndsEachPass() || behind_norm)) {
    return update;
  }
  update.seconds = in_.profile.host.step.value.value;  // as if in one launch
  if (in_.job.optimizer.matrices != MatrixRule::kNone || IsPacked()) {
    return update;
  }
  OptimizerSpec spec =
      on_host ? OnHost(in_.job.optimizer, options_.base.dialect) : in_.job.optimizer;
  spec.impl = spec.impl == OptimizerImpl::kForLoop ? OptimizerImpl::kForeach : spec.impl;
  const auto part = static_cast<std::int64_t>(Shard(outer));
  for (const Kernel& kernel :
       LowerOptimizer(spec, part, 1, part, in_.job.precision.master).kernels) {
    const Bytes bytes = kernel.read + kernel.written;
    update.seconds += (bytes / (on_host ? HostMemoryShare(in_.cluster) : rates_.optimizer)).value;
    update.streaming += (bytes / rates_.streaming).value;
  }
  return update;
}

// Of so many bytes on compute, where the dialect makes them.
StreamingWork Bounds::Copies(double read, double written) const {
  if (!facts_.copies_units) {
    return {};
  }
  return {(read + written) / rates_.copies.value, (read + written) / rates_.streaming.value};
}

// Of one collective of at least so many bytes, alone. Larger ones may take less where NCCL chooses
// another protocol.
// A larger message may be faster because NCCL changes its protocol. So the least time of sizes from
// `bytes` to 8 times that is taken, in steps of 25 %.
double Bounds::MessageSeconds(OpCode code, GroupShape group, double bytes) const {
  constexpr double kStep = 1.25;
  const double most = 8 * bytes;
  if (group.size <= 1 || bytes <= 0) {
    return 0;
  }
  const CollectivePath path = FindCollectivePath(in_.cluster, in_.profile, group);
  double least = INFINITY;
  while (bytes < most) {
    const Bytes size(static_cast<std::int64_t>(bytes));
    least = std::min(least, CollectiveTime(code, size, path).value);
    bytes *= kStep;
  }
  return least;
}

// How often a step does it with all parameters, at least.
// Example: 4 micro-batches and `sync: last`. Gradients are reduced once, and gathers run 4 times,
// or once if the dialect, a pipeline's stages or the plan keep the parameters meanwhile.
Bounds::Times Bounds::TimesOf(const OuterChoice& outer) const {
  const auto passes = static_cast<double>(outer.accumulation);
  const bool is_last = outer.sync == SyncMode::kLast;
  const Plan& base = options_.base;
  const bool keeps = facts_.keeps_unsynced || base.pipeline_size > 1 || base.keeps_gathered;
  return {is_last && keeps ? 1 : passes, is_last ? 1 : passes,
          outer.sync == SyncMode::kEvery ? passes : 1};
}

// Fills `seconds` of each transfer, and the choice that gathered parameters have after forward:
// stay (memory), be gathered again (time), or stay in part (both).
void Bounds::AddTraffic(const OuterChoice& outer, const Occupancy& occupancy, Terms& terms) const {
  const Occupancy::RowWeights bytes = BytesOf(outer);
  const Times times = TimesOf(outer);
  const auto seconds = [&](Occupancy::Transfer as, double all_bytes) {
    return all_bytes * occupancy.SecondsPerByte(as);
  };
  const double reduced = times.reduce * bytes[Occupancy::kReduce];
  terms.seconds[Occupancy::kReduce] = seconds(Occupancy::kReduce, reduced);
  terms.seconds[Occupancy::kReplicate] =
      seconds(Occupancy::kReplicate, times.replicate * bytes[Occupancy::kReplicate]);
  terms.reduce_copies = Copies(reduced / sent_ * std::min(param_, sent_), reduced);
  const double backward = terms.measured->backward_elements * FrozenWidth(param_) *
                          (options_.base.expert_size > 1 ? ShareOfExperts(outer) : 1);
  const bool may_stay = bytes[Occupancy::kPartial] > 0 && options_.base.pipeline_size == 1;
  // Parts where there is no backward serve the next micro-batch; where there is none at all, what
  // stays serves the next step, too.
  const double all = bytes[Occupancy::kGather];
  const double first = is_train_ || !may_stay ? all : 0;
  const double gathered = first + (times.gather - 1) * (may_stay ? backward : all);
  terms.seconds[Occupancy::kGather] = seconds(Occupancy::kGather, gathered);
  terms.gather_copies = Copies(gathered, gathered);
  if (may_stay) {
    const double kept = is_train_ ? std::max(0.0, backward - whole_.tail * FrozenWidth(param_))
                                  : bytes[Occupancy::kPartial];
    const double again = terms.passes * kept;
    const StreamingWork copies = Copies(again, again);
    terms.after_forward = {{kept, 0, Occupancy::kRegather, {}},
                           {0, seconds(Occupancy::kGather, again), Occupancy::kRegather, copies}};
    const std::vector<std::int64_t> groups = PartialGroups(outer);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      terms.after_forward.push_back({kept / static_cast<double>(groups[i]),
                                     again * occupancy.PartialSecondsPerByte(i),
                                     Occupancy::kPartial, copies});
    }
  }
  // Offloaded moments come to the device and leave it once per step. Where updates follow the norm,
  // all but those in flight do both behind it and before the last unit of forward is updated; that
  // is before compute goes on where updates run there.
  if (outer.offload.moments && is_train_) {
    const double in_flight = static_cast<double>(MostMomentsInFlight(options_).value);
    const double moments = std::max(0.0, HostBytes(outer) - (IsOrdered(outer) ? in_flight : 0));
    terms.seconds[Occupancy::kMomentsToHost] = seconds(Occupancy::kToHost, moments);
    terms.seconds[Occupancy::kMomentsToDevice] = seconds(Occupancy::kToDevice, moments);
    terms.moments_end_before_forward = StagesOnCompute();
  }
  terms.to_host_per_byte = seconds(Occupancy::kToHost, 1);
  terms.to_device_per_byte = seconds(Occupancy::kToDevice, 1);
}

// The work at both ends of a step, or of each pass, that cannot run beside anything. These are the
// gather of the parameters that the first op reads, and the reduction of the gradients that the
// last op writes. Example: the first gather has 100 MB over 8 ranks. Nothing runs beside it, so its
// time is added to the bound as `head`.
void Bounds::AddEnds(const OuterChoice& outer, Terms& terms) const {
  const bool on_host = UpdatesOnHost(outer);
  const bool ends_each = EndsEachPass();
  const StreamingWork update = Update(outer);
  terms.is_ordered = IsOrdered(outer);
  terms.update = on_host || ends_each ? StreamingWork() : update;
  if (!terms.is_ordered) {
    return;
  }
  const Measured& m = *terms.measured;
  terms.first_forwards = ends_each ? terms.passes : 1;
  terms.forward_gathers_end = ends_each || m.last_has_params;
  terms.regathers_follow_forward = facts_.regathers_after_forward;
  terms.serial = on_host || ends_each ? update.seconds : 0;
  const double shard = static_cast<double>(outer.shard_size);
  if (!on_host && TakesGradNorm(in_.job)) {  // reads all gradients; clipping reads and writes them
    const double bytes = whole_.trainable / shard * master_;
    terms.serial += bytes / rates_.grad_norm.value + 2 * bytes / rates_.grad_clip.value;
  }
  const Times times = ends_each ? TimesOf(outer) : Times();
  const GroupShape group = MeshOf(outer).Of({Axis::kShard});
  const GroupShape replicas = MeshOf(outer).Of({Axis::kReplicate});
  const double last = m.last_elements * sent_;
  terms.head = times.gather *
               MessageSeconds(OpCode::kAllGather, group, m.first_elements * FrozenWidth(param_));
  terms.tail = times.reduce * MessageSeconds(OpCode::kReduceScatter, group, last) +
               times.replicate * MessageSeconds(OpCode::kAllReduce, replicas, last / shard);
  if (on_host) {  // the gradient leaves before the update, the parameter comes back behind it
    const CopyProfile& copy = in_.profile.copy;
    const HostCopyRates together = FindHostCopyRates(in_.cluster);
    terms.tail +=
        m.last_elements / shard * master_ / (together.to_host_together * copy.to_host.value).value;
    terms.head += m.first_trainable / shard * master_ /
                  (together.to_device_together * copy.to_device.value).value;
  }
}

// Memory first, as it is cheap. The linear program of the time is built and solved only if memory
// may fit.
OuterBound Bounds::Of(const OuterChoice& outer, const Measured& measured,
                      const Occupancy& occupancy, double bubble) const {
  Terms terms;
  terms.measured = &measured;
  terms.passes = static_cast<double>(outer.accumulation);
  terms.offloads_activations = outer.offload.activations && is_train_;
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
  // A pipeline's rank keeps up to three of its stages gathered from the first pass to the last.
  const Plan& base = options_.base;
  const bool stays = base.pipeline_size > 1 && base.pipeline_stages <= 3 && outer.shard_size > 1;
  const double gathered = stays ? whole_.read * FrozenWidth(param_) : 0;
  const double fixed = States(outer) + EarlierGradients(outer) + gathered + tail + Outside(outer);
  const double peak = LeastPeak(outer, measured) + Outside(outer);
  OuterBound bound;
  bound.memory_at_turn = Bytes(static_cast<std::int64_t>(fixed + least_kept));
  bound.memory = std::max(bound.memory_at_turn, Bytes(static_cast<std::int64_t>(peak)));
  bound.deficit = std::max(Bytes(0), bound.memory - limits_.device);
  const double host_bytes = HostBytes(outer);
  const auto gpus = static_cast<double>(in_.cluster.gpus_per_node);
  if (limits_.host > Bytes(0) && in_.job.optimizer.matrices == MatrixRule::kNone) {
    bound.deficit =
        std::max(bound.deficit, Bytes(static_cast<std::int64_t>(host_bytes * gpus)) - limits_.host);
  }
  if (bound.deficit > Bytes(0)) {
    return bound;
  }
  AddTraffic(outer, occupancy, terms);
  AddEnds(outer, terms);
  terms.device_limit = static_cast<double>(limits_.device.value);
  terms.device_excess = fixed - terms.device_limit;
  terms.has_host_limit = terms.offloads_activations && limits_.host > Bytes(0);
  if (terms.has_host_limit) {
    terms.host_limit = static_cast<double>(limits_.host.value) / gpus;
    terms.host_excess = host_bytes - terms.host_limit;
  }
  // The host issues one op after another.
  bound.time = Seconds(std::max(terms.passes * measured.base.issue, LeastTime(terms, occupancy)));
  if (bubble > 0) {  // transfers and the update may run in it
    bubble = std::max(0.0, bubble - terms.serial - terms.update.seconds);
    terms.seconds.fill(0);
    terms.head = terms.tail = 0;
    terms.gather_copies = terms.reduce_copies = {};
    terms.after_forward.clear();
    bound.time = std::max(bound.time, Seconds(bubble + LeastTime(terms, occupancy)));
  }
  return bound;
}

}  // namespace shardwright
