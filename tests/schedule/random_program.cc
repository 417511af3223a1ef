#include "tests/schedule/random_program.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "schedule/builder.h"

namespace shardwright {
namespace {

constexpr std::uint32_t kStreams = static_cast<std::uint32_t>(kStreamCount);

std::uint32_t IndexOf(Stream stream) {
  return static_cast<std::uint32_t>(stream);
}

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : engine_(seed) {}
  // Uniform in [0, n) but for a negligible bias; std distributions differ between libraries.
  std::uint32_t Below(int n) {
    return static_cast<std::uint32_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  bool Chance(int percent) { return Below(100) < static_cast<std::uint32_t>(percent); }

 private:
  std::mt19937_64 engine_;
};

struct Use {
  BufferId buffer;
  AccessMode mode;
  Role role = Role::kInput;
};

// Writes one body and keeps it legal: it knows for every op all that happens before it.
class SafeWriter {
 public:
  // `past_streams[b]`: streams that may use buffer b, in this and in other runs of bodies.
  SafeWriter(Program& program, Body& body, std::vector<std::uint16_t>& past_streams, Rng& rng,
             int redundant_percent)
      : program_(program),
        body_(body),
        builder_(program, body),
        past_streams_(past_streams),
        rng_(rng),
        redundant_percent_(redundant_percent) {
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      last_[s].assign(kStreams, false);
      last_[s][s] = true;  // own slot: the stream's queue orders it
    }
  }

  BodyBuilder& builder() { return builder_; }

  OpId Emit(const BodyBuilder::OpArgs& args, const std::vector<Use>& uses,
            const std::vector<OpId>& extra_edges = {}) {
    const OpId op = builder_.Add(args);
    const Stream stream = program_.ShapeOf(body_.ops[op.value]).stream;
    std::vector<bool> known = last_[IndexOf(stream)];
    MergeInto(known, last_[IndexOf(Stream::kHost)]);
    for (const OpId edge : extra_edges) {
      AddEdge(edge, known);
    }
    for (const Use& use : uses) {
      OrderAfterConflicts(use, stream, known);
    }
    std::vector<Pending>& pending = pending_[IndexOf(stream)];
    for (const Pending& entry : pending) {
      OrderAfterAll(entry, stream, known);
    }
    pending.clear();
    for (const Use& use : uses) {
      builder_.Use(use.buffer, use.mode, use.role);
      AccessesOf(use.buffer).push_back({op, stream, use.mode != AccessMode::kRead});
    }
    known.resize(kStreams + op.value + 1);
    known[kStreams + op.value] = true;
    last_[IndexOf(stream)] = known;
    before_.push_back(std::move(known));
    last_op_[IndexOf(stream)] = op;
    return op;
  }

  // `streams`: all that will ever use it. Its lives in other runs come before or after this one.
  BufferId NewAllocated(const Buffer& buffer, std::initializer_list<Stream> streams) {
    const BufferId id = builder_.NewAllocated(buffer);
    past_streams_.resize(program_.buffers.size());
    for (const Stream s : streams) {
      past_streams_[id.value] =
          static_cast<std::uint16_t>(past_streams_[id.value] | 1U << IndexOf(s));
    }
    Entry(id) = {{}, false};
    return id;
  }

  // Begins a new life of the buffer in this body.
  void Alloc(BufferId buffer, PointKind kind = PointKind::kAlloc) {
    builder_.Alloc(buffer, kind);
    Entry(buffer) = {{}, false};
  }

  void Free(BufferId buffer) {
    const Stream owner = program_.buffers[buffer.value].owner;
    std::uint16_t recorded = 0;
    if (rng_.Chance(30)) {
      for (const Accessor& a : AccessesOf(buffer)) {
        recorded = static_cast<std::uint16_t>(recorded | (1U << IndexOf(a.stream)));
      }
      if (Entry(buffer).is_from_past) {
        recorded = static_cast<std::uint16_t>(recorded | past_streams_[buffer.value]);
      }
    }
    builder_.Free(buffer, recorded);
    pending_[IndexOf(owner)].push_back(
        {AccessesOf(buffer), recorded,
         Entry(buffer).is_from_past ? past_streams_[buffer.value] : std::uint16_t{0}});
  }

  // The ops that last used the buffer, one per stream.
  std::vector<OpId> LastUses(BufferId buffer) {
    std::array<OpId, kStreams> last;
    for (const Accessor& a : AccessesOf(buffer)) {
      last[IndexOf(a.stream)] = a.op;
    }
    std::vector<OpId> result;
    std::copy_if(last.begin(), last.end(), std::back_inserter(result),
                 [](OpId op) { return op.valid(); });
    return result;
  }

  // Streams whose next op must still be ordered after some free.
  [[nodiscard]] std::vector<Stream> StreamsWithPendingFrees() const {
    std::vector<Stream> result;
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      if (!pending_[s].empty()) {
        result.push_back(static_cast<Stream>(s));
      }
    }
    return result;
  }

  // Slot s holds the last op of stream s.
  void Finish() {
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      if (last_op_[s].valid()) {
        builder_.SetCarry(s, last_op_[s]);
      }
    }
    builder_.Finish();
  }

 private:
  struct Accessor {
    OpId op;
    Stream stream;
    bool is_write;
  };
  struct Life {
    std::vector<Accessor> accesses;  // in this body
    bool is_from_past = true;        // no alloc point in this body yet
  };
  struct Pending {
    std::vector<Accessor> accesses;
    std::uint16_t recorded = 0;
    std::uint16_t past_streams = 0;
  };

  Life& Entry(BufferId buffer) {
    if (lives_.size() <= buffer.value) {
      lives_.resize(buffer.value + 1);
    }
    return lives_[buffer.value];
  }
  std::vector<Accessor>& AccessesOf(BufferId buffer) { return Entry(buffer).accesses; }

  static void MergeInto(std::vector<bool>& known, const std::vector<bool>& other) {
    known.resize(std::max(known.size(), other.size()));
    for (std::size_t i = 0; i < other.size(); ++i) {
      known[i] = known[i] || other[i];
    }
  }

  void AddEdge(OpId to, std::vector<bool>& known) {
    builder_.After(to);
    MergeInto(known, before_[to.value]);
  }

  // Adds the edge if the order does not hold yet, or now and then anyway.
  void OrderAfter(OpId to, std::vector<bool>& known) {
    const std::size_t bit = kStreams + to.value;
    const bool holds = bit < known.size() && known[bit];
    if (!holds || rng_.Chance(redundant_percent_)) {
      AddEdge(to, known);
    }
  }

  void OrderAfterPast(std::uint16_t streams, Stream mine, std::vector<bool>& known) {
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      const bool is_needed = ((streams >> s) & 1U) != 0 && s != IndexOf(mine);
      if (is_needed && (!known[s] || rng_.Chance(redundant_percent_))) {
        builder_.AfterSlot(s);
        known[s] = true;
      }
    }
  }

  void OrderAfterConflicts(const Use& use, Stream stream, std::vector<bool>& known) {
    const Life& life = Entry(use.buffer);
    OrderAfterPast(past_streams_[use.buffer.value], stream, known);
    for (auto a = life.accesses.rbegin(); a != life.accesses.rend(); ++a) {
      if ((a->is_write || use.mode != AccessMode::kRead) && a->stream != stream) {
        OrderAfter(a->op, known);
      }
    }
  }

  void OrderAfterAll(const Pending& entry, Stream stream, std::vector<bool>& known) {
    for (auto a = entry.accesses.rbegin(); a != entry.accesses.rend(); ++a) {
      const bool is_recorded = ((entry.recorded >> IndexOf(a->stream)) & 1U) != 0;
      if (a->stream != stream && !is_recorded) {
        OrderAfter(a->op, known);
      }
    }
    OrderAfterPast(static_cast<std::uint16_t>(entry.past_streams & ~entry.recorded), stream, known);
  }

  Program& program_;
  Body& body_;
  BodyBuilder builder_;
  std::vector<std::uint16_t>& past_streams_;
  Rng& rng_;
  int redundant_percent_;
  std::vector<Life> lives_;
  std::array<std::vector<Pending>, kStreams> pending_;
  // Bits: slots of the streams, then ops of this body.
  std::array<std::vector<bool>, kStreams> last_;
  std::vector<std::vector<bool>> before_;
  std::array<OpId, kStreams> last_op_;
};

// A training step in the manner of FSDP, with every choice drawn at random.
class Generator {
 public:
  Generator(std::uint64_t seed, const RandomProgramOptions& options)
      : rng_(seed), options_(options), interner_(program_) {}

  Program Run() {
    program_.dialect = "random";
    program_.shard_size = 2 + rng_.Below(3);
    program_.replicate_size = 2;
    program_.groups = {{"shard", program_.shard_size, 1},
                       {"shard.reduce", program_.shard_size, 1},
                       {"replicate", 2, program_.shard_size}};
    unit_count_ = 1 + rng_.Below(options_.max_units);
    program_.micro_batch_count = 1 + rng_.Below(options_.max_micro_batches);
    carries_gradients_ = rng_.Chance(50);
    for (std::uint32_t u = 0; u < unit_count_; ++u) {
      program_.units.push_back({"layers." + std::to_string(u), {}, 64, 64, 16});
      program_.model_op_names.push_back("layers." + std::to_string(u) + ".mlp");
      full_bytes_.push_back(Bytes(program_.shard_size * 16 * (std::int64_t{1} + rng_.Below(4))));
    }
    WriteInit();
    if (rng_.Chance(40)) {
      WriteStep(program_.warmup);
    }
    WriteStep(program_.step);
    return std::move(program_);
  }

 private:
  ShapeId Shape(OpCode code, Stream stream, Bytes bytes = Bytes(0), GroupId group = GroupId()) {
    OpShape shape;
    shape.code = code;
    shape.stream = stream;
    shape.bytes = bytes;
    shape.group = group;
    std::vector<Kernel> kernels(code == OpCode::kCompute ? 1 + rng_.Below(2) : 0);
    for (Kernel& kernel : kernels) {
      kernel.read = Bytes(64 * (std::int64_t{1} + rng_.Below(2)));
    }
    return interner_.Intern(shape, kernels);
  }

  Bytes ShardBytes(std::uint32_t u) const { return full_bytes_[u] / program_.shard_size; }

  void WriteInit() {
    SafeWriter writer(program_, program_.init, past_streams_, rng_,
                      options_.redundant_edge_percent);
    for (std::uint32_t u = 0; u < unit_count_; ++u) {
      shards_.push_back(writer.NewAllocated({ShardBytes(u), Category::kParameterShard},
                                            {Stream::kCompute, Stream::kGather}));
      gradients_.push_back(writer.NewAllocated({ShardBytes(u), Category::kShardedGradient},
                                               {Stream::kCompute, Stream::kReduce}));
      states_.push_back(writer.builder().NewBuffer(
          {ShardBytes(u) * 2, Category::kOptimizerState, Stream::kCompute, false, true}));
      past_streams_.resize(program_.buffers.size());
      past_streams_.back() = static_cast<std::uint16_t>(1U << IndexOf(Stream::kCompute));
      std::vector<Use> uses = {{shards_[u], AccessMode::kWrite, Role::kParameter}};
      if (carries_gradients_) {
        uses.push_back({gradients_[u], AccessMode::kWrite, Role::kParamGrad});
      }
      writer.Emit({Shape(OpCode::kInitialize, Stream::kCompute), Phase::kInit, u}, uses);
      if (!carries_gradients_) {
        writer.Free(gradients_[u]);
      }
    }
    // Every stream gets an op, so that every carry slot is set by some body.
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      const auto stream = static_cast<Stream>(s);
      const OpCode code = stream == Stream::kHost ? OpCode::kHostWait : OpCode::kStreamWait;
      writer.Emit({Shape(code, stream), Phase::kInit, kNoSubject, 0, static_cast<std::uint8_t>(s)},
                  {});
    }
    FlushFrees(writer, Phase::kInit);
    writer.Finish();
  }

  // Makes the next run of any body legal: after this nothing waits for an order any more.
  void FlushFrees(SafeWriter& writer, Phase phase) {
    for (const Stream stream : writer.StreamsWithPendingFrees()) {
      const OpCode code = stream == Stream::kHost ? OpCode::kHostWait : OpCode::kStreamWait;
      writer.Emit({Shape(code, stream), phase, kNoSubject, 0,
                   static_cast<std::uint8_t>(100 + IndexOf(stream))},
                  {});
    }
  }

  struct Activation {
    BufferId buffer;
    std::optional<BufferId> host_copy;
  };

  void WriteStep(Body& body) {
    SafeWriter writer(program_, body, past_streams_, rng_, options_.redundant_edge_percent);
    if (carries_gradients_) {
      for (const BufferId gradient : gradients_) {
        writer.Free(gradient);
      }
    }
    const auto micro_batches = static_cast<std::uint16_t>(program_.micro_batch_count);
    for (std::uint16_t m = 0; m < micro_batches; ++m) {
      writer.builder().MarkMicroBatch();
      gathered_.assign(unit_count_, std::nullopt);
      activations_.clear();
      for (std::uint32_t u = 0; u < unit_count_; ++u) {
        writer.builder().MarkLayer();
        Forward(writer, u, m);
      }
      BufferId gradient =
          writer.NewAllocated({Bytes(32), Category::kActivationGradient}, {Stream::kCompute});
      writer.Emit({Shape(OpCode::kCompute, Stream::kCompute), Phase::kBackward, kNoSubject, m},
                  {{activations_.back().buffer, AccessMode::kRead},
                   {gradient, AccessMode::kWrite, Role::kInputGrad}});
      for (std::uint32_t u = unit_count_; u-- > 0;) {
        writer.builder().MarkLayer();
        gradient = Backward(writer, u, m, gradient);
      }
      writer.Free(gradient);
      if (activations_[0].host_copy) {
        writer.Free(*activations_[0].host_copy);
      } else {
        writer.Free(activations_[0].buffer);
      }
    }
    Optimize(writer);
    FlushFrees(writer, Phase::kOptimizer);
    writer.Finish();
  }

  void Gather(SafeWriter& writer, std::uint32_t u, std::uint16_t m, Phase phase) {
    const bool on_compute = rng_.Chance(20);
    gathered_[u] = writer.NewAllocated(
        {full_bytes_[u], Category::kAllGather, on_compute ? Stream::kCompute : Stream::kGather},
        {Stream::kGather, Stream::kCompute});
    writer.Emit(
        {Shape(OpCode::kAllGather, Stream::kGather, full_bytes_[u], GroupId(0)), phase, u, m},
        {{shards_[u], AccessMode::kRead}, {*gathered_[u], AccessMode::kWrite, Role::kOutput}});
  }

  void DropGathered(SafeWriter& writer, std::uint32_t u, Phase phase, std::uint16_t m) {
    if (rng_.Chance(15)) {  // the host waits for the uses, as a rate limiter does
      writer.Emit({Shape(OpCode::kHostWait, Stream::kHost), phase, u, m, 0}, {},
                  writer.LastUses(*gathered_[u]));
    }
    writer.Free(*gathered_[u]);
    gathered_[u] = std::nullopt;
  }

  void Forward(SafeWriter& writer, std::uint32_t u, std::uint16_t m) {
    if (!gathered_[u]) {
      Gather(writer, u, m, Phase::kForward);
    }
    if (u + 1 < unit_count_ && rng_.Chance(50)) {
      Gather(writer, u + 1, m, Phase::kForward);  // prefetch
    }
    if (activations_.empty()) {
      const BufferId input = writer.NewAllocated({Bytes(32), Category::kInput, Stream::kH2d},
                                                 {Stream::kH2d, Stream::kCompute, Stream::kD2h});
      const BufferId host = writer.NewAllocated(
          {Bytes(32), Category::kInput, Stream::kHost, /*on_host=*/true, /*zero_filled=*/true},
          {Stream::kH2d});
      writer.Emit(
          {Shape(OpCode::kCopyH2d, Stream::kH2d, Bytes(32)), Phase::kForward, kNoSubject, m},
          {{host, AccessMode::kRead}, {input, AccessMode::kWrite, Role::kOutput}});
      writer.Free(host);
      activations_.push_back({input, std::nullopt});
    }
    const std::uint32_t steps = 1 + rng_.Below(options_.ops_per_unit);
    for (std::uint32_t i = 0; i < steps; ++i) {
      const bool is_last = i + 1 == steps;
      const Bytes size(32 * (std::int64_t{1} + rng_.Below(3)));
      const BufferId output =
          writer.NewAllocated({size, is_last ? Category::kActivation : Category::kTemporary},
                              {Stream::kCompute, Stream::kD2h});
      const BufferId workspace =
          writer.NewAllocated({Bytes(64), Category::kTemporary}, {Stream::kCompute});
      writer.Emit({Shape(OpCode::kCompute, Stream::kCompute), Phase::kForward, u, m,
                   static_cast<std::uint8_t>(i)},
                  {{activations_.back().buffer, AccessMode::kRead},
                   {*gathered_[u], AccessMode::kRead, Role::kParameter},
                   {output, AccessMode::kWrite, Role::kOutput},
                   {workspace, AccessMode::kWrite, Role::kWorkspace}});
      writer.Free(workspace);
      if (is_last) {
        MaybeOffload(writer, u, m);
        activations_.push_back({output, std::nullopt});
      } else {
        writer.Free(output);
      }
    }
    if (rng_.Chance(70)) {
      DropGathered(writer, u, Phase::kForward, m);
    }
  }

  // Moves the input of unit u to the host.
  void MaybeOffload(SafeWriter& writer, std::uint32_t u, std::uint16_t m) {
    Activation& input = activations_.back();
    if (!rng_.Chance(25)) {
      return;
    }
    const Bytes size = program_.buffers[input.buffer.value].size;
    const Stream owner = rng_.Chance(50) ? Stream::kHost : Stream::kD2h;
    input.host_copy = writer.NewAllocated({size, Category::kActivation, owner, /*on_host=*/true},
                                          {Stream::kD2h, Stream::kH2d});
    writer.Emit(
        {Shape(OpCode::kCopyD2h, Stream::kD2h, size), Phase::kForward, u, m},
        {{input.buffer, AccessMode::kRead}, {*input.host_copy, AccessMode::kWrite, Role::kOutput}});
    writer.Free(input.buffer);
  }

  // Returns the gradient of the unit's input; frees `gradient` and the unit's output.
  BufferId Backward(SafeWriter& writer, std::uint32_t u, std::uint16_t m, BufferId gradient) {
    if (!gathered_[u]) {
      Gather(writer, u, m, Phase::kBackward);
    }
    if (u > 0 && !gathered_[u - 1] && rng_.Chance(50)) {
      Gather(writer, u - 1, m, Phase::kBackward);
    }
    Activation& output = activations_.back();
    writer.Free(output.buffer);
    activations_.pop_back();
    Activation& input = activations_.back();
    if (input.host_copy) {
      const Bytes size = program_.buffers[input.host_copy->value].size;
      input.buffer = writer.NewAllocated({size, Category::kActivation, Stream::kH2d},
                                         {Stream::kH2d, Stream::kCompute});
      writer.Emit({Shape(OpCode::kCopyH2d, Stream::kH2d, size), Phase::kBackward, u, m},
                  {{*input.host_copy, AccessMode::kRead},
                   {input.buffer, AccessMode::kWrite, Role::kOutput}});
      if (u > 0) {
        writer.Free(*input.host_copy);
      }
    }
    const BufferId input_gradient =
        writer.NewAllocated({Bytes(32), Category::kActivationGradient}, {Stream::kCompute});
    const BufferId full = writer.NewAllocated({full_bytes_[u], Category::kReduceScatter},
                                              {Stream::kCompute, Stream::kReduce});
    writer.Emit({Shape(OpCode::kCompute, Stream::kCompute), Phase::kBackward, u, m},
                {{input.buffer, AccessMode::kRead},
                 {gradient, AccessMode::kRead, Role::kOutputGrad},
                 {*gathered_[u], AccessMode::kRead, Role::kParameter},
                 {input_gradient, AccessMode::kWrite, Role::kInputGrad},
                 {full, AccessMode::kWrite, Role::kParamGrad}});
    writer.Free(gradient);
    if (u == 0 && input.host_copy) {
      writer.Free(input.buffer);
    }
    DropGathered(writer, u, Phase::kBackward, m);
    Reduce(writer, u, m, full);
    return input_gradient;
  }

  void Reduce(SafeWriter& writer, std::uint32_t u, std::uint16_t m, BufferId full) {
    const Bytes shard = ShardBytes(u);
    const BufferId reduced = writer.NewAllocated({shard, Category::kReduceScatter, Stream::kReduce},
                                                 {Stream::kReduce, Stream::kReplicate});
    const GroupId group(rng_.Chance(50) ? 0 : 1);
    writer.Emit({Shape(OpCode::kReduceScatter, Stream::kReduce, full_bytes_[u], group),
                 Phase::kBackward, u, m},
                {{full, AccessMode::kRead}, {reduced, AccessMode::kWrite, Role::kOutput}});
    writer.Free(full);
    if (rng_.Chance(40)) {
      const Stream stream = rng_.Chance(50) ? Stream::kReplicate : Stream::kReduce;
      writer.Emit({Shape(OpCode::kAllReduce, stream, shard, GroupId(2)), Phase::kBackward, u, m},
                  {{reduced, AccessMode::kReadWrite}});
    }
    if (m == 0) {
      writer.Alloc(gradients_[u]);
    }
    writer.Emit(
        {Shape(OpCode::kGradStore, Stream::kReduce), Phase::kBackward, u, m},
        {{reduced, AccessMode::kRead},
         {gradients_[u], m == 0 ? AccessMode::kWrite : AccessMode::kReadWrite, Role::kParamGrad}});
    writer.Free(reduced);
  }

  void Optimize(SafeWriter& writer) {
    writer.builder().MarkMicroBatch();
    for (std::uint32_t u = 0; u < unit_count_; ++u) {
      writer.Alloc(states_[u], PointKind::kAllocOnce);
      writer.Emit({Shape(OpCode::kOptimizerStep, Stream::kCompute), Phase::kOptimizer, u},
                  {{gradients_[u], AccessMode::kRead},
                   {states_[u], AccessMode::kReadWrite, Role::kState},
                   {shards_[u], AccessMode::kReadWrite, Role::kParameter}});
      if (!carries_gradients_) {
        writer.Free(gradients_[u]);
      }
    }
  }

  Rng rng_;
  RandomProgramOptions options_;
  Program program_;
  ShapeInterner interner_;
  std::vector<std::uint16_t> past_streams_;
  std::uint32_t unit_count_ = 0;
  bool carries_gradients_ = false;
  std::vector<Bytes> full_bytes_;
  std::vector<BufferId> shards_, gradients_, states_;
  std::vector<std::optional<BufferId>> gathered_;
  std::vector<Activation> activations_;  // outputs of the units so far, the input first
};

}  // namespace

Program RandomProgram(std::uint64_t seed, const RandomProgramOptions& options) {
  return Generator(seed, options).Run();
}

}  // namespace shardwright
