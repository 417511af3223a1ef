// Costs of blocks under each checkpointing pattern, read off a few lowered programs.
//
// Example: 12 equal blocks and 6 patterns. The base program has no checkpointing. The second
// program has pattern 1 in the last block, pattern 2 in the one before, ... pattern 5 in the fifth
// from the end. Two programs thus give all costs: a block's kernels and kept bytes under pattern p,
// less those under pattern 0. With offloaded activations two more programs give the bytes that are
// copied.
//
// The same programs show the tail (logits and their gradients between the last block's forward and
// its backward), the widest op, and the first and last parameters of a step. The plan is that of
// the first outer choice, with one micro-batch and without offloading.

#include "planner/measure.h"

#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower.h"
#include "simulator/costs/pricer.h"

namespace shardwright {
namespace {

constexpr std::size_t kOutside = static_cast<std::size_t>(-1);

// One lowered program's costs: of the whole model, of each block, and of the ops outside of blocks.
struct Reading {
  Measured whole;
  std::vector<BlockCost> blocks;
};

class Prober {
 public:
  Prober(const Problem& input, const SearchOptions& options, const Space& space,
         std::int64_t micro_batch, std::optional<std::int64_t> rank)
      : in_(input), space_(space), rank_(rank.value_or(0)) {
    OuterChoice outer = space.outer.front();
    outer.micro_batch = micro_batch;
    outer.accumulation = 1;
    outer.sync = SyncMode::kEvery;
    outer.offload = {};
    plan_ = OuterPlan(outer, options);
    plan_.units = space.families.front().units;
    if (!rank) {
      plan_.pipeline_size = plan_.pipeline_stages = plan_.pipeline_edge_layers = 1;
    }
    plan_.pipeline_schedule = plan_.pipeline_stages == 1 ? PipelineSchedule::kGPipe
                              : IsVShaped(plan_.pipeline_schedule)
                                  ? PipelineSchedule::kZbvZeroBubble
                                  : PipelineSchedule::kLoopedBfs;
    job_ = input.job;
    job_.global_batch = 0;
    // The update, of which nothing is read, in as few kernels as there can be.
    job_.optimizer = OptimizerSpec();
    job_.optimizer.kind = OptimizerKind::kSgd;
    job_.optimizer.impl = OptimizerImpl::kFused;
    job_.clip_gradients = false;
    FindBlocks();
  }

  [[nodiscard]] const std::vector<std::size_t>& block_of() const { return block_of_; }

  // The program with pattern `patterns[b]` in block b; nothing where the plan is not allowed.
  [[nodiscard]] std::optional<Reading> Read(const std::vector<std::size_t>& patterns,
                                            bool offload) const {
    Plan plan = plan_;
    plan.offload.activations = offload;
    for (std::size_t b = 0; b < patterns.size(); ++b) {
      AppendRegions(space_.patterns[patterns[b]], space_.blocks[b], plan.recompute);
    }
    try {
      const Program program = LowerStage({in_.model, in_.kernels, job_, plan}, rank_);
      return ReadProgram(program);
    } catch (const InputError&) {
      return std::nullopt;
    }
  }

 private:
  // The innermost block around each model op, and the model op of each name.
  void FindBlocks() {
    std::map<std::uint32_t, std::size_t> index;
    for (std::size_t b = 0; b < space_.blocks.size(); ++b) {
      index[FindModule(in_.model, space_.blocks[b]).value] = b;
    }
    for (const ModelOp& op : in_.model.ops) {
      std::size_t block = kOutside;
      for (ModuleId m = op.module; m.valid() && block == kOutside;
           m = in_.model.modules[m.value].parent) {
        const auto found = index.find(m.value);
        block = found == index.end() ? kOutside : found->second;
      }
      block_of_.push_back(block);
    }
  }

  [[nodiscard]] static bool IsCompute(const Program& program, const Op& op) {
    const OpCode code = program.ShapeOf(op).code;
    return code == OpCode::kCompute || code == OpCode::kAccumulateGrad;
  }

  // Of ranks that cut a layer or tokens; of the block whose op is right before it.
  [[nodiscard]] static bool MovesTokens(const Program& program, const Op& op) {
    const OpShape& shape = program.ShapeOf(op);
    return (program.tensor_size > 1 || program.context_size > 1) &&
           shape.stream == Stream::kCompute &&
           (shape.code == OpCode::kAllGather || shape.code == OpCode::kReduceScatter ||
            (shape.code == OpCode::kAllToAll && program.expert_size == 1));
  }

  [[nodiscard]] std::size_t SlotOf(const Op& op) const {
    return std::min(block_of_[op.subject], space_.blocks.size());
  }

  [[nodiscard]] Reading ReadProgram(const Program& program) const {
    Reading reading;
    reading.blocks.resize(space_.blocks.size() + 1);
    ReadWork(program, reading);
    ReadMemory(program, reading);
    return reading;
  }

  // Walks the ops of a step once and adds each kernel's time to its block and to its load. Load 8
  // means that the kernel uses 8/16 of the memory bandwidth, by which contention slows it down.
  void ReadWork(const Program& program, Reading& reading) const {
    const PriceTable prices = PriceProgram(program, in_.cluster, in_.profile);
    Measured& whole = reading.whole;
    bool is_first = true;
    std::uint32_t last = 0;                // model op
    std::vector<ParamId> backward_params;  // that backward reads
    bool has_gradients = false;            // a gradient of a parameter is there
    for (const Op& op : program.step.ops) {
      if (!IsCompute(program, op)) {
        if (MovesTokens(program, op)) {
          Work work;  // nothing else runs on the stream meanwhile
          work.seconds.front() = ToSeconds(prices.prices[op.shape.value].duration).value;
          whole.base.Add(work);
          reading.blocks[std::min(block_of_[last], space_.blocks.size())].work.Add(work);
        }
        continue;
      }
      const std::vector<ParamId>& params = in_.model.ops[op.subject].params;
      last = op.subject;
      if (std::exchange(is_first, false)) {
        whole.first_elements = Elements(params, false);
        whole.first_trainable = Elements(params, true);
      }
      const Price& price = prices.prices[op.shape.value];
      const double share = prices.contention.classes[price.contention_class].hbm_share;
      Work work;
      work.seconds[static_cast<std::size_t>(std::lround(share * (kLoadCount - 1)))] =
          ToSeconds(price.duration).value;
      work.issue = ToSeconds(price.issue).value;
      whole.base.Add(work);
      reading.blocks[SlotOf(op)].work.Add(work);
      whole.widest_op_bytes = std::max(whole.widest_op_bytes, WeightBytes(program, op));
      if (op.phase == Phase::kForward) {
        whole.forward.Add(work);
        whole.turn_forward = params.empty() ? whole.turn_forward : Work();
        whole.turn_forward.Add(work);
      } else if (!has_gradients) {
        whole.turn_backward.Add(work);
        has_gradients = Elements(params, true) > 0;
      }
      if (op.phase == Phase::kBackward) {
        const bool is_behind = std::all_of(block_of_.begin() + op.subject, block_of_.end(),
                                           [](std::size_t block) { return block == kOutside; });
        whole.all_blocks_copy = whole.all_blocks_copy || (is_behind && !params.empty());
        if (ReadsParameters(program, op)) {
          backward_params.insert(backward_params.end(), params.begin(), params.end());
        }
      }
    }
    whole.last_elements = Elements(in_.model.ops[last].params, true);
    whole.last_has_params = !in_.model.ops[last].params.empty();
    whole.backward_elements = Elements(backward_params, false);
  }

  // Of their storages.
  [[nodiscard]] double Elements(const std::vector<ParamId>& params, bool trainable_only) const {
    std::set<std::uint32_t> storages;
    double sum = 0;
    for (const ParamId id : params) {
      const Parameter& param = in_.model.params[id.value];
      const ParamId storage = param.tied_to.valid() ? param.tied_to : id;
      if ((param.trainable || !trainable_only) && storages.insert(storage.value).second) {
        sum += static_cast<double>(param.Elements());
      }
    }
    return sum;
  }

  [[nodiscard]] static bool ReadsParameters(const Program& program, const Op& op) {
    const auto index = static_cast<std::size_t>(&op - program.step.ops.data());
    const std::span<const Access> accesses = program.step.AccessesOf(OpId(index));
    return IsIn(accesses, Role::kParameter, &Access::role);
  }

  // Parameters and weight gradients that exist, gathered, while the op runs, under every plan.
  [[nodiscard]] double WeightBytes(const Program& program, const Op& op) const {
    const DialectFacts& facts = FactsOf(plan_);
    if (!facts.frees_units) {
      return 0;  // resident anyway, or counted by the dialect's buckets
    }
    double bytes = 0;
    const bool reads = ReadsParameters(program, op);
    const Precision& precision = job_.precision;
    const std::int64_t grad = facts.grads_as_reduced
                                  ? SizeOf(precision.reduce)
                                  : std::min(SizeOf(precision.param), SizeOf(precision.reduce));
    for (const ParamId id : in_.model.ops[op.subject].params) {
      const Parameter& param = in_.model.params[id.value];
      const auto n = static_cast<double>(param.Elements());
      bytes += reads ? n * static_cast<double>(SizeOf(precision.param)) : 0;
      if (op.phase == Phase::kBackward && param.trainable) {
        bytes += n * static_cast<double>(grad);
      }
    }
    return bytes;
  }

  // The activations that exist at a moment.
  struct Alive {
    double bytes = 0;
    std::size_t slot = 0;              // of the last op that computes
    std::vector<std::size_t> slot_of;  // by buffer: of the op before which it was allocated
    std::set<BufferId> read_by_tail;   // of blocks, by ops behind them
  };

  // Follows them through forward and the beginning of backward, up to the first op of a block
  // there.
  // `most` is the largest sum of activations and weights behind the last block's forward. Less the
  // bytes that blocks keep anyway, it is the tail.
  void ReadMemory(const Program& program, Reading& reading) const {
    const Body& body = program.step;
    const auto is_of_block = [&](const Op& op) {
      return IsCompute(program, op) && block_of_[op.subject] != kOutside;
    };
    auto forward_left = CountIf(
        body.ops, [&](const Op& op) { return is_of_block(op) && op.phase == Phase::kForward; });
    Alive alive;
    alive.slot = space_.blocks.size();
    alive.slot_of.assign(program.buffers.size(), space_.blocks.size());
    double most = 0;
    bool in_backward = false;
    for (std::size_t i = 0; i < body.size(); ++i) {
      const Op& op = body.ops[i];
      const bool is_compute = IsCompute(program, op);
      in_backward = in_backward || (is_compute && op.phase != Phase::kForward);
      if (in_backward && is_of_block(op)) {
        break;
      }
      forward_left -= is_of_block(op) ? 1 : 0;
      ReadPoints(program, OpId(i), in_backward, alive, reading);
      if (program.ShapeOf(op).code == OpCode::kCopyD2h) {
        const Access& read = body.AccessesOf(OpId(i)).front();
        reading.blocks[alive.slot_of[read.buffer.value]].copied_bytes +=
            static_cast<double>(program.ShapeOf(op).bytes.value);
      }
      if (forward_left == 0 && is_compute && !is_of_block(op)) {
        most = std::max(most, alive.bytes + WeightBytes(program, op));
        ReadTail(program, OpId(i), alive, reading);
      }
    }
    for (std::size_t b = 0; b < space_.blocks.size(); ++b) {
      most -= reading.blocks[b].kept_bytes;
    }
    reading.whole.tail_bytes = std::max(0.0, most);
  }

  void ReadPoints(const Program& program, OpId id, bool in_backward, Alive& alive,
                  Reading& reading) const {
    const Op& op = program.step.ops[id.value];
    alive.slot = IsCompute(program, op) ? SlotOf(op) : alive.slot;
    const bool is_of_op = IsCompute(program, op) || MovesTokens(program, op);
    const std::size_t slot = is_of_op ? alive.slot : space_.blocks.size();
    for (const MemoryPoint& point : program.step.PointsBefore(id)) {
      const Buffer& buffer = program.buffers[point.buffer.value];
      if (!IsActivation(buffer)) {
        continue;
      }
      const bool is_alloc = point.kind != PointKind::kFree;
      const double bytes = static_cast<double>(buffer.size.value) * (is_alloc ? 1 : -1);
      alive.bytes += bytes;
      std::size_t& slot_of = alive.slot_of[point.buffer.value];
      slot_of = is_alloc ? slot : slot_of;
      if (buffer.category == Category::kActivation && !in_backward) {
        reading.blocks[slot_of].kept_bytes += bytes;
      }
    }
  }

  void ReadTail(const Program& program, OpId id, Alive& alive, Reading& reading) const {
    for (const Access& access : program.step.AccessesOf(id)) {
      const bool is_of_block = alive.slot_of[access.buffer.value] < space_.blocks.size();
      if (is_of_block && alive.read_by_tail.insert(access.buffer).second) {
        const Buffer& buffer = program.buffers[access.buffer.value];
        reading.whole.read_by_tail += static_cast<double>(buffer.size.value);
      }
    }
  }

  // Tensors that came back from the host are left out: how many there are depends on the pattern.
  [[nodiscard]] static bool IsActivation(const Buffer& buffer) {
    const bool counts = buffer.category == Category::kActivation ||
                        buffer.category == Category::kActivationGradient ||
                        buffer.category == Category::kTemporary;
    return counts && !buffer.on_host && buffer.owner != Stream::kH2d;
  }

  const Problem& in_;
  const Space& space_;
  std::int64_t rank_;
  Plan plan_;
  Job job_;
  std::vector<std::size_t> block_of_;  // by model op
};

// Blocks that run equal ops on equal parameters.
std::vector<BlockClass> FindClasses(const Problem& input, const Space& space,
                                    const std::vector<std::size_t>& block_of) {
  std::vector<std::vector<std::uint64_t>> signatures(space.blocks.size());
  for (std::size_t i = 0; i < input.model.ops.size(); ++i) {
    if (block_of[i] == kOutside) {
      continue;
    }
    const ModelOp& op = input.model.ops[i];
    std::vector<std::uint64_t>& signature = signatures[block_of[i]];
    signature.push_back(op.spec);
    for (const ParamId param : op.params) {
      signature.push_back(input.model.params[param.value].trainable ? 1 : 0);
    }
  }
  std::map<std::vector<std::uint64_t>, std::size_t> known;
  std::vector<BlockClass> classes;
  for (std::size_t b = 0; b < space.blocks.size(); ++b) {
    const auto [it, is_new] = known.emplace(signatures[b], classes.size());
    if (is_new) {
      classes.emplace_back();
    }
    classes[it->second].blocks.push_back(b);
  }
  return classes;
}

// Sets the cost of block `block` of the reading.
void SetCost(const Reading& reading, const Reading& base, std::size_t block, bool offload,
             BlockCost& cost) {
  const BlockCost& read = reading.blocks[block];
  if (offload) {
    cost.staying_bytes = read.kept_bytes;
    cost.copied_bytes = read.copied_bytes;
    return;
  }
  cost.work = read.work;
  cost.work.Add(base.blocks[block].work, -1);
  cost.kept_bytes = read.kept_bytes;
}

// Measures all patterns but the first. A round tries as many patterns as the smallest class has
// blocks, less one, from the last block backwards. The first block is left out, as it may lack the
// gradient of its input. It also shows the cost of a block without checkpointing beside others with
// it. If a program with several new patterns is refused, they are tried one by one, so that one
// pattern that the dialect lacks does not take the others with it.
void MeasurePatterns(const Prober& prober, const Space& space, const Reading& base, bool offload,
                     Measured& m) {
  const std::size_t count = space.patterns.size();
  std::size_t width = count;
  for (const BlockClass& c : m.classes) {
    width = std::min(width, std::max<std::size_t>(1, c.blocks.size() - 1));
  }
  for (std::size_t first = 1, last = 0; first < count; first = last) {
    last = std::min(count, first + width);
    std::vector<std::size_t> patterns(space.blocks.size(), 0);
    for (const BlockClass& c : m.classes) {
      for (std::size_t p = first; p < last; ++p) {
        patterns[c.FromLast(p - first)] = p;
      }
    }
    const std::optional<Reading> reading = prober.Read(patterns, offload);
    if (!reading && last - first > 1) {
      width = 1;  // one of them is not allowed: one by one from here
      last = first;
      continue;
    }
    for (std::size_t p = first; p < last; ++p) {
      m.pattern_is_allowed[p] = m.pattern_is_allowed[p] && reading.has_value();
      for (BlockClass& c : m.classes) {
        if (reading) {
          SetCost(*reading, base, c.FromLast(p - first), offload, c.costs[p]);
        }
      }
    }
  }
}

// Drops blocks that do less or keep less than the last one of their class: they say nothing about
// patterns. Blocks before all trainable parameters have no backward, and the first block that
// trains has no gradient of its input.
void DropLesser(const Reading& base, BlockClass& c) {
  constexpr double kEqual = 1 - 1e-9;
  const BlockCost& last = base.blocks[c.blocks.back()];
  std::erase_if(c.blocks, [&](std::size_t b) {
    return base.blocks[b].work.Total() < last.work.Total() * kEqual ||
           base.blocks[b].kept_bytes < last.kept_bytes * kEqual;
  });
}

}  // namespace

double Work::Total() const {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

void Work::Add(const Work& other, double times) {
  for (std::size_t i = 0; i < kLoadCount; ++i) {
    seconds[i] += times * other.seconds[i];
  }
  issue += times * other.issue;
}

Measured Measure(const Problem& input, const SearchOptions& options, const Space& space,
                 std::int64_t micro_batch, std::optional<std::int64_t> rank) {
  const Prober prober(input, options, space, micro_batch, rank);
  const std::vector<std::size_t> none(space.blocks.size(), 0);
  Measured m;
  std::optional<Reading> base = prober.Read(none, false);
  if (base) {
    m = base->whole;
  }
  m.classes = FindClasses(input, space, prober.block_of());
  m.pattern_is_allowed.assign(space.patterns.size(), true);
  for (BlockClass& c : m.classes) {
    c.costs.resize(space.patterns.size());
    if (base) {
      DropLesser(*base, c);
    }
  }
  const bool any_offload =
      AnyOf(space.outer, [](const OuterChoice& outer) { return outer.offload.activations; });
  for (const bool offload : {false, true}) {
    if (offload) {
      base = any_offload ? prober.Read(none, true) : std::nullopt;
    }
    if (!base) {
      continue;
    }
    if (offload) {
      m.staying_tail_bytes = base->whole.tail_bytes;
      m.read_by_tail = base->whole.read_by_tail;
    }
    for (BlockClass& c : m.classes) {
      SetCost(*base, *base, c.blocks.back(), offload, c.costs[0]);
    }
    MeasurePatterns(prober, space, *base, offload, m);
  }
  return m;
}

}  // namespace shardwright
