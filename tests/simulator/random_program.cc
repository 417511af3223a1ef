#include "tests/simulator/random_program.h"

#include <algorithm>
#include <string>
#include <vector>

#include "schedule/builder.h"

namespace shardwright {
namespace {

// An op of the pattern that all layers of a pass repeat.
struct PatternOp {
  ShapeId shape;
  std::vector<std::uint32_t> distances;  // edges to the ops this far back
  int far_op = -1;                       // backward: edge to this op of the matching forward layer
  std::size_t layers_back = 0;           // > 0: edge to an op of the layer so many before, if any
  int carried_slot = -1;
  Bytes allocated{0};    // a buffer allocated before the op and ...
  int freed_after = -1;  // ... freed before the op this many ops later; -1: by the backward layer
};

class Generator {
 public:
  Generator(std::uint64_t seed, const RandomProgramOptions& options)
      : random_(seed), options_(options), interner_(result_.program) {}

  RandomProgram Make();

 private:
  std::int64_t Draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool Chance(int percent) { return Draw(1, 100) <= percent; }

  ShapeId NewShape(Stream stream);
  std::vector<PatternOp> NewPattern(bool is_backward, std::size_t forward_ops);
  std::vector<PatternOp> Variant(const std::vector<PatternOp>& pattern, bool is_backward,
                                 std::size_t forward_ops);
  std::vector<std::size_t> DrawKinds(int layers);
  void AddLayer(BodyBuilder& builder, const std::vector<PatternOp>& pattern,
                const std::vector<OpId>* forward, std::vector<OpId>& ops);
  void FillBody(Body& body, int micro_batches, int layers);

  std::mt19937_64 random_;
  RandomProgramOptions options_;
  RandomProgram result_;
  ShapeInterner interner_;
  bool host_waits_ = false;
  int next_shape_ = 0;
  std::uint32_t layer_count_ = 0;                           // added so far
  std::vector<std::vector<PatternOp>> forward_, backward_;  // by kind of layer
  std::vector<std::size_t> kinds_,
      last_kinds_;                        // of the layers; in the last micro-batch's backward
  std::vector<std::vector<OpId>> added_;  // ops of the layers of this body so far
  std::vector<PatternOp> tail_;
  // Buffers of the layers in forward that backward frees, per layer; and those to free soon.
  struct Pending {
    std::size_t due = 0;
    BufferId buffer;
  };
  std::vector<Pending> pending_;
  std::vector<std::vector<BufferId>> kept_;
};

ShapeId Generator::NewShape(Stream stream) {
  OpShape shape;
  shape.stream = stream;
  shape.bytes = Bytes(++next_shape_);  // keeps shapes apart
  switch (stream) {
    case Stream::kHost:
      shape.code = OpCode::kHostWait;
      break;
    case Stream::kGather:
      shape.code = OpCode::kAllGather;
      shape.group = GroupId(0);
      break;
    case Stream::kReduce:
      shape.code = OpCode::kReduceScatter;
      shape.group = GroupId(Chance(50) ? 0 : 1);
      break;
    case Stream::kReplicate:
      shape.code = OpCode::kAllReduce;
      shape.group = GroupId(2);
      break;
    default:
      shape.code = stream == Stream::kCompute ? OpCode::kCompute : OpCode::kCast;
  }
  const ShapeId id = interner_.Intern(shape);
  Price price;
  // Round numbers make ties; odd ones make none.
  const std::int64_t grain = Chance(50) ? 1000 : 1;
  price.duration = SimTime(Draw(0, 40) * grain);
  const std::int64_t launches = Draw(1, 3);
  price.first_launch = SimTime(Draw(0, 6) * grain);
  price.issue = price.first_launch * launches;
  price.tail = price.duration / launches;
  if (options_.contention) {
    price.contention_class = static_cast<std::uint8_t>(Draw(0, 3));
  }
  if (stream == Stream::kHost) {
    price = Price{};
  }
  result_.prices.prices.resize(id.value + 1);
  result_.prices.prices[id.value] = price;
  return id;
}

std::vector<PatternOp> Generator::NewPattern(bool is_backward, std::size_t forward_ops) {
  std::vector<PatternOp> pattern(static_cast<std::size_t>(Draw(1, options_.ops_per_layer)));
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    PatternOp& op = pattern[i];
    const bool is_wait = host_waits_ && Chance(10);
    op.shape = NewShape(is_wait      ? Stream::kHost
                        : Chance(45) ? Stream::kCompute
                                     : static_cast<Stream>(Draw(1, kStreamCount - 1)));
    const auto reach = static_cast<std::int64_t>(2 * pattern.size());
    for (std::int64_t e = Draw(0, 2) + (is_wait ? 1 : 0); e > 0; --e) {
      op.distances.push_back(static_cast<std::uint32_t>(Draw(1, reach)));
    }
    if (is_backward && Chance(30)) {
      op.far_op = static_cast<int>(Draw(0, static_cast<std::int64_t>(forward_ops) - 1));
    }
    if (Chance(5)) {
      op.carried_slot = static_cast<int>(Draw(0, 1));
    }
    if (Chance(50)) {
      op.allocated = Bytes(Draw(1, 1000));
      op.freed_after = is_backward || Chance(50) ? static_cast<int>(Draw(1, reach)) : -1;
    }
  }
  return pattern;
}

// The pattern without some of its ops and with some new ones, as layers of a unit that gathers once
// for several, or layers that are checkpointed and others that are not.
std::vector<PatternOp> Generator::Variant(const std::vector<PatternOp>& pattern, bool is_backward,
                                          std::size_t forward_ops) {
  std::vector<PatternOp> variant;
  for (const PatternOp& op : pattern) {
    if (Chance(75)) {
      variant.push_back(op);
    }
  }
  if (variant.empty() || Chance(50)) {
    const std::vector<PatternOp> more = NewPattern(is_backward, forward_ops);
    const auto at = static_cast<std::ptrdiff_t>(Draw(0, std::ssize(variant)));
    variant.insert(variant.begin() + at, more.begin(), more.end());
  }
  for (PatternOp& op : variant) {
    op.layers_back = Chance(30) ? static_cast<std::size_t>(Draw(1, 5)) : op.layers_back;
  }
  return variant;
}

// Stretches of layers, each of which repeats a few kinds in turns: 0 0 1 0 0 1 0 1 1 1 1 ...
std::vector<std::size_t> Generator::DrawKinds(int layers) {
  std::vector<std::size_t> kinds;
  while (std::ssize(kinds) < layers) {
    std::vector<std::size_t> turn(static_cast<std::size_t>(Draw(1, 5)), 0);
    for (std::size_t& kind : turn) {
      kind = static_cast<std::size_t>(Chance(50) ? 0 : Draw(0, options_.kinds - 1));
    }
    for (std::int64_t times = Draw(1, 8); times > 0; --times) {
      kinds.insert(kinds.end(), turn.begin(), turn.end());
    }
  }
  kinds.resize(static_cast<std::size_t>(layers));
  return kinds;
}

void Generator::AddLayer(BodyBuilder& builder, const std::vector<PatternOp>& pattern,
                         const std::vector<OpId>* forward, std::vector<OpId>& ops) {
  builder.MarkLayer();
  ++layer_count_;
  std::vector<BufferId> kept;
  if (forward != nullptr && !kept_.empty()) {
    for (const BufferId buffer : kept_.back()) {
      builder.Free(buffer);
    }
    kept_.pop_back();
  }
  for (const PatternOp& p : pattern) {
    const std::size_t position = builder.last().valid() ? builder.last().value + 1 : 0;
    for (std::size_t i = 0; i < pending_.size();) {
      if (pending_[i].due == position) {
        builder.Free(pending_[i].buffer);
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    if (p.allocated.value > 0) {
      const BufferId buffer =
          builder.NewAllocated({p.allocated, static_cast<Category>(p.allocated.value % 12)});
      if (p.freed_after < 0) {
        kept.push_back(buffer);
      } else {
        pending_.push_back({position + static_cast<std::size_t>(p.freed_after), buffer});
      }
    }
    const OpId op = builder.Add({p.shape});
    for (const std::uint32_t distance : p.distances) {
      if (distance <= op.value) {
        builder.After(OpId(op.value - distance));
      }
    }
    if (p.far_op >= 0) {
      builder.After((*forward)[static_cast<std::size_t>(p.far_op) % forward->size()]);
    }
    if (p.layers_back > 0 && p.layers_back <= added_.size()) {
      const std::vector<OpId>& before = added_[added_.size() - p.layers_back];
      builder.After(before[p.shape.value % before.size()]);
    }
    if (p.carried_slot >= 0) {
      // Every other such op takes the slots in turns, from layer to layer.
      const std::uint32_t turn = p.shape.value % 2 == 0 ? layer_count_ % 2 : 0;
      builder.AfterSlot(static_cast<std::uint32_t>(p.carried_slot) ^ turn);
    }
    ops.push_back(op);
  }
  added_.push_back(ops);
  if (forward == nullptr) {
    kept_.push_back(kept);
  }
}

void Generator::FillBody(Body& body, int micro_batches, int layers) {
  BodyBuilder builder(result_.program, body);
  pending_.clear();
  kept_.clear();
  added_.clear();
  for (int m = 0; m < micro_batches; ++m) {
    builder.MarkMicroBatch();
    std::vector<std::vector<OpId>> forward(static_cast<std::size_t>(layers));
    for (std::size_t l = 0; l < forward.size(); ++l) {
      AddLayer(builder, forward_[kinds_[l]], nullptr, forward[l]);
    }
    for (std::size_t l = forward.size(); l-- > 0;) {
      const auto& kinds = m + 1 == micro_batches ? last_kinds_ : kinds_;
      std::vector<OpId> ops;
      AddLayer(builder, backward_[kinds[l]], &forward[l], ops);
    }
  }
  // The optimizer: different from every layer.
  builder.MarkMicroBatch();
  builder.MarkLayer();
  for (const PatternOp& p : tail_) {
    const OpId op = builder.Add({p.shape});
    builder.After(OpId(static_cast<std::uint32_t>(Draw(0, op.value))));
    if (op.value > 0) {
      builder.After(OpId(op.value - 1));
    }
  }
  for (const Pending& p : pending_) {
    builder.Free(p.buffer);
  }
  for (const auto& kept : kept_) {
    for (const BufferId buffer : kept) {
      builder.Free(buffer);
    }
  }
  if (Chance(50)) {
    builder.SetCarry(0, builder.last());
  }
  if (Chance(50)) {
    builder.SetCarry(1, OpId(static_cast<std::uint32_t>(Draw(0, builder.last().value))));
  }
  builder.Finish();
}

RandomProgram Generator::Make() {
  Program& program = result_.program;
  program.groups = {{"shard", 8, 1}, {"shard.reduce", 8, 1}, {"replicate", 2, 8}};
  const bool has_extras = Chance(50);
  host_waits_ = has_extras && Chance(50);
  const int layers = static_cast<int>(Draw(1, options_.layers));
  const int micro_batches = static_cast<int>(Draw(1, options_.micro_batches));
  forward_ = {NewPattern(false, 0)};
  backward_ = {NewPattern(true, forward_[0].size())};
  kinds_ = last_kinds_ = std::vector<std::size_t>(static_cast<std::size_t>(layers), 0);
  if (options_.kinds > 1) {
    while (std::ssize(forward_) < options_.kinds) {
      forward_.push_back(Variant(forward_[0], false, 0));
      backward_.push_back(Variant(backward_[0], true, forward_.back().size()));
    }
    kinds_ = DrawKinds(layers);
    last_kinds_ = Chance(50) ? kinds_ : DrawKinds(layers);
  }
  for (std::int64_t i = Draw(1, 4); i > 0; --i) {
    PatternOp op;
    op.shape = NewShape(Chance(70) ? Stream::kCompute : Stream::kReduce);
    tail_.push_back(op);
  }
  program.carry_slot_count = 2;
  if (has_extras) {
    FillBody(program.init, 1, 1);
  }
  if (has_extras && Chance(30)) {
    FillBody(program.warmup, micro_batches, layers);
  }
  FillBody(program.step, micro_batches, layers);
  program.micro_batch_count = micro_batches;
  result_.prices.prices.resize(program.shapes.size());
  result_.prices.wake_up = SimTime(Draw(0, 9));
  if (options_.contention) {
    ContentionModel& model = result_.prices.contention;
    model.resource_count = 1;
    model.compute_sensitivity = 0.7;
    model.collective_rate = 0.9;
    ContentionClass kernel;
    kernel.kind = LoadKind::kKernel;
    kernel.hbm_share = 0.6;
    ContentionClass collective;
    collective.kind = LoadKind::kCollective;
    collective.sm_share = 0.2;
    collective.hbm_share = 0.3;
    collective.bus_rate = 100;
    collective.links[0] = {0, 0.008};
    collective.link_count = 1;
    ContentionClass copy;
    copy.kind = LoadKind::kCopyToDevice;
    copy.hbm_share = 0.1;
    model.classes = {ContentionClass{}, kernel, collective, copy};
  }
  return result_;
}

}  // namespace

RandomProgram MakeRandomProgram(std::uint64_t seed, const RandomProgramOptions& options) {
  return Generator(seed, options).Make();
}

}  // namespace shardwright
