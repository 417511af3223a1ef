#include "planner/measure.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>

#include "core/error.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower.h"
#include "simulator/costs/pricer.h"

namespace shardwright {
namespace {

constexpr std::size_t kOutside = static_cast<std::size_t>(-1);

// What one lowered program says about each block and about the rest.
struct Reading {
  Work forward;              // of all
  Work turn_forward;         // from the last op with parameters on
  Work turn_backward;        // up to the first op with trainable parameters
  std::vector<Work> work;    // by block, then outside
  std::vector<double> kept;  // likewise, bytes
  std::vector<double> copied;
  double tail = 0;
  std::uint32_t first_op = 0, last_op = 0;  // model ops that compute first and last
  std::vector<ParamId> backward_params;     // that backward reads
  bool tail_learns = false;                 // behind the last block parameters have a backward
  double widest_op = 0;                     // bytes of parameters and gradients
  double read_by_tail = 0;                  // bytes of blocks that what follows them reads
};

class Prober {
 public:
  Prober(const SearchInput& input, const SearchOptions& options, const Space& space,
         std::int64_t micro_batch)
      : in_(input), space_(space) {
    OuterChoice outer = space.outer.front();
    outer.micro_batch = micro_batch;
    outer.accumulation = 1;
    outer.sync = SyncMode::kEvery;
    outer.offload = {};
    plan_ = OuterPlan(outer, options);
    plan_.units = space.families.front().units;
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
      const Program program = Lower({in_.model, in_.kernels, job_, plan});
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

  [[nodiscard]] std::size_t SlotOf(const Op& op) const {
    const std::size_t block = block_of_[op.subject];
    return block == kOutside ? space_.blocks.size() : block;
  }

  [[nodiscard]] Reading ReadProgram(const Program& program) const {
    Reading reading;
    reading.work.resize(space_.blocks.size() + 1);
    const PriceTable prices = PriceProgram(program, in_.cluster, in_.profile);
    bool any = false;
    bool has_gradients = false;  // a gradient of a parameter is there
    for (const Op& op : program.step.ops) {
      const OpCode code = program.ShapeOf(op).code;
      if (code != OpCode::kCompute && code != OpCode::kAccumulateGrad) {
        continue;
      }
      reading.first_op = any ? reading.first_op : op.subject;
      reading.last_op = op.subject;
      any = true;
      reading.widest_op = std::max(reading.widest_op, WeightBytes(program, op));
      const Price& price = prices.prices[op.shape.value];
      const double share = prices.contention.classes[price.contention_class].hbm_share;
      const auto load = static_cast<std::size_t>(std::lround(share * (kLoadCount - 1)));
      const double seconds = ToSeconds(price.duration).value;
      Work& work = reading.work[SlotOf(op)];
      work.seconds[load] += seconds;
      work.issue += ToSeconds(price.issue).value;
      const ModelOp& model_op = in_.model.ops[op.subject];
      if (op.phase == Phase::kBackward) {
        ReadBackwardOp(program, op, reading);
      }
      if (op.phase == Phase::kForward) {
        reading.forward.seconds[load] += seconds;
        if (!model_op.params.empty()) {
          reading.turn_forward = Work();
        }
        reading.turn_forward.seconds[load] += seconds;
      } else if (!has_gradients) {
        reading.turn_backward.seconds[load] += seconds;
        has_gradients = HasTrainable(model_op);
      }
    }
    ReadMemory(program, reading);
    return reading;
  }

  [[nodiscard]] static bool ReadsParameters(const Program& program, const Op& op) {
    const auto index = static_cast<std::size_t>(&op - program.step.ops.data());
    const std::span<const Access> accesses = program.step.AccessesOf(OpId(index));
    return std::any_of(accesses.begin(), accesses.end(),
                       [](const Access& a) { return a.role == Role::kParameter; });
  }

  void ReadBackwardOp(const Program& program, const Op& op, Reading& reading) const {
    const std::vector<ParamId>& params = in_.model.ops[op.subject].params;
    if (ReadsParameters(program, op)) {
      reading.backward_params.insert(reading.backward_params.end(), params.begin(), params.end());
    }
    const bool is_behind = std::all_of(block_of_.begin() + op.subject, block_of_.end(),
                                       [](std::size_t block) { return block == kOutside; });
    reading.tail_learns = reading.tail_learns || (is_behind && !params.empty());
  }

  [[nodiscard]] bool HasTrainable(const ModelOp& op) const {
    return std::any_of(op.params.begin(), op.params.end(),
                       [&](const ParamId id) { return in_.model.params[id.value].trainable; });
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

  // Follows the activations through forward and the beginning of backward.
  void ReadMemory(const Program& program, Reading& reading) const {
    reading.kept.assign(space_.blocks.size() + 1, 0);
    reading.copied.assign(space_.blocks.size() + 1, 0);
    const Body& body = program.step;
    const std::size_t last_forward = LastForward(program);
    std::vector<std::size_t> slot_of(program.buffers.size(), space_.blocks.size());
    std::set<BufferId> read_by_tail;
    double alive = 0;
    bool in_backward = false;
    for (std::size_t i = 0; i < body.size(); ++i) {
      const Op& op = body.ops[i];
      const OpCode code = program.ShapeOf(op).code;
      const bool is_compute = code == OpCode::kCompute || code == OpCode::kAccumulateGrad;
      const bool is_outside = is_compute && block_of_[op.subject] == kOutside;
      in_backward = in_backward || (is_compute && op.phase != Phase::kForward);
      if (in_backward && is_compute && !is_outside) {
        break;
      }
      const std::size_t slot = is_compute ? SlotOf(op) : space_.blocks.size();
      for (const MemoryPoint& point : body.PointsBefore(OpId(i))) {
        const Buffer& buffer = program.buffers[point.buffer.value];
        if (!IsActivation(buffer)) {
          continue;
        }
        const bool is_alloc = point.kind != PointKind::kFree;
        const double bytes = static_cast<double>(buffer.size.value) * (is_alloc ? 1 : -1);
        alive += bytes;
        slot_of[point.buffer.value] = is_alloc ? slot : slot_of[point.buffer.value];
        if (buffer.category == Category::kActivation && !in_backward) {
          reading.kept[slot_of[point.buffer.value]] += bytes;
        }
      }
      if (code == OpCode::kCopyD2h) {
        const Access& read = body.AccessesOf(OpId(i)).front();
        reading.copied[slot_of[read.buffer.value]] +=
            static_cast<double>(program.ShapeOf(op).bytes.value);
      }
      if (i >= last_forward && is_outside) {
        reading.tail = std::max(reading.tail, alive + WeightBytes(program, op));
        for (const Access& access : body.AccessesOf(OpId(i))) {
          const bool is_of_block = slot_of[access.buffer.value] < space_.blocks.size();
          if (is_of_block && read_by_tail.insert(access.buffer).second) {
            const Buffer& buffer = program.buffers[access.buffer.value];
            reading.read_by_tail += static_cast<double>(buffer.size.value);
          }
        }
      }
    }
    const double kept = std::accumulate(reading.kept.begin(), reading.kept.end() - 1, 0.0);
    reading.tail = std::max(0.0, reading.tail - kept);
  }

  // The last op of a block in forward.
  [[nodiscard]] std::size_t LastForward(const Program& program) const {
    std::size_t last = 0;
    for (std::size_t i = 0; i < program.step.size(); ++i) {
      const Op& op = program.step.ops[i];
      const bool is_compute = program.ShapeOf(op).code == OpCode::kCompute;
      if (is_compute && op.phase == Phase::kForward && block_of_[op.subject] != kOutside) {
        last = i;
      }
    }
    return last;
  }

  // What came back from the host is left out: how much that is depends on the pattern.
  [[nodiscard]] static bool IsActivation(const Buffer& buffer) {
    const bool counts = buffer.category == Category::kActivation ||
                        buffer.category == Category::kActivationGradient ||
                        buffer.category == Category::kTemporary;
    return counts && !buffer.on_host && buffer.owner != Stream::kH2d;
  }

  const SearchInput& in_;
  const Space& space_;
  Plan plan_;
  Job job_;
  std::vector<std::size_t> block_of_;  // by model op
};

// Blocks that run equal ops on equal parameters.
std::vector<BlockClass> FindClasses(const SearchInput& input, const Space& space,
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

}  // namespace

double Work::Total() const {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

Work& Work::operator+=(const Work& other) {
  for (std::size_t i = 0; i < kLoadCount; ++i) {
    seconds[i] += other.seconds[i];
  }
  issue += other.issue;
  return *this;
}

Work& Work::operator-=(const Work& other) {
  for (std::size_t i = 0; i < kLoadCount; ++i) {
    seconds[i] -= other.seconds[i];
  }
  issue -= other.issue;
  return *this;
}

namespace {

// Each round tries as many patterns as the smallest class has blocks but one, from its last one on:
// the first block may lack the gradient of its input, and shows what a block without checkpointing
// is beside others with it.
class PatternRounds {
 public:
  PatternRounds(const Prober& prober, const Space& space, Measured& measured)
      : prober_(prober), space_(space), m_(measured), width_(space.patterns.size()) {
    for (const BlockClass& c : m_.classes) {
      width_ = std::min(width_, std::max<std::size_t>(1, c.blocks.size() - 1));
    }
  }

  void Run(const Reading& base, bool offload) {
    const std::size_t count = space_.patterns.size();
    for (std::size_t first = 1; first < count;) {
      const std::size_t last = std::min(count, first + width_);
      const std::optional<Reading> reading = prober_.Read(Assign(first, last), offload);
      if (!reading && last - first > 1) {
        width_ = 1;  // one of them is not allowed: one by one from here
        continue;
      }
      for (std::size_t p = first; p < last; ++p) {
        m_.pattern_is_allowed[p] = m_.pattern_is_allowed[p] && reading.has_value();
        for (BlockClass& c : m_.classes) {
          if (reading) {
            const std::size_t b = BlockOf(c, p - first);
            Set(*reading, base, b, offload, c.costs[p]);
          }
        }
      }
      first = last;
    }
  }

  static void Set(const Reading& reading, const Reading& base, std::size_t block, bool offload,
                  BlockCost& cost) {
    if (offload) {
      cost.staying_bytes = reading.kept[block];
      cost.copied_bytes = reading.copied[block];
      return;
    }
    cost.work = reading.work[block];
    cost.work -= base.work[block];
    cost.kept_bytes = reading.kept[block];
  }

 private:
  [[nodiscard]] static std::size_t BlockOf(const BlockClass& c, std::size_t i) {
    return c.blocks[c.blocks.size() - 1 - i];
  }

  [[nodiscard]] std::vector<std::size_t> Assign(std::size_t first, std::size_t last) const {
    std::vector<std::size_t> patterns(space_.blocks.size(), 0);
    for (const BlockClass& c : m_.classes) {
      for (std::size_t p = first; p < last; ++p) {
        patterns[BlockOf(c, p - first)] = p;
      }
    }
    return patterns;
  }

  const Prober& prober_;
  const Space& space_;
  Measured& m_;
  std::size_t width_;
};

}  // namespace

namespace {

double Elements(const Model& model, const std::vector<ParamId>& params, bool trainable_only) {
  std::set<std::uint32_t> storages;
  double sum = 0;
  for (const ParamId id : params) {
    const Parameter& param = model.params[id.value];
    const ParamId storage = param.tied_to.valid() ? param.tied_to : id;
    if ((param.trainable || !trainable_only) && storages.insert(storage.value).second) {
      sum += static_cast<double>(param.Elements());
    }
  }
  return sum;
}

void SetEnds(const Model& model, const Reading& base, Measured& m) {
  const std::vector<ParamId>& first = model.ops[base.first_op].params;
  const std::vector<ParamId>& last = model.ops[base.last_op].params;
  m.first_elements = Elements(model, first, false);
  m.first_trainable = Elements(model, first, true);
  m.last_elements = Elements(model, last, true);
  m.last_has_params = !last.empty();
  m.backward_elements = Elements(model, base.backward_params, false);
}

// Blocks that do less or keep less than the last one of their class say nothing about patterns:
// those before all that learns have no backward, the first that learns has no gradient of its
// input.
void DropLesser(const Reading& base, BlockClass& c) {
  constexpr double kEqual = 1 - 1e-9;
  const std::size_t last = c.blocks.back();
  const double work = base.work[last].Total() * kEqual;
  const double kept = base.kept[last] * kEqual;
  std::erase_if(c.blocks,
                [&](std::size_t b) { return base.work[b].Total() < work || base.kept[b] < kept; });
}

}  // namespace

Measured Measure(const SearchInput& input, const SearchOptions& options, const Space& space,
                 std::int64_t micro_batch) {
  const Prober prober(input, options, space, micro_batch);
  Measured m;
  m.classes = FindClasses(input, space, prober.block_of());
  m.pattern_is_allowed.assign(space.patterns.size(), true);
  for (BlockClass& c : m.classes) {
    c.costs.resize(space.patterns.size());
  }
  const std::vector<std::size_t> none(space.blocks.size(), 0);
  const bool any_offload =
      std::any_of(space.outer.begin(), space.outer.end(),
                  [](const OuterChoice& outer) { return outer.offload.activations; });
  for (const bool offload : {false, true}) {
    const std::optional<Reading> base =
        offload && !any_offload ? std::nullopt : prober.Read(none, offload);
    if (!base) {
      continue;
    }
    if (!offload) {
      for (const Work& work : base->work) {
        m.base += work;
      }
      m.forward = base->forward;
      m.turn_forward = base->turn_forward;
      m.turn_backward = base->turn_backward;
      m.widest_op_bytes = base->widest_op;
      SetEnds(input.model, *base, m);
      std::for_each(m.classes.begin(), m.classes.end(),
                    [&](BlockClass& c) { DropLesser(*base, c); });
    }
    (offload ? m.staying_tail_bytes : m.tail_bytes) = base->tail;
    m.all_blocks_copy = base->tail_learns;
    m.read_by_tail = base->read_by_tail;
    for (BlockClass& c : m.classes) {
      PatternRounds::Set(*base, *base, c.blocks.back(), offload, c.costs[0]);
    }
    PatternRounds(prober, space, m).Run(*base, offload);
  }
  return m;
}

}  // namespace shardwright
