// All sets of ops that can run at the same time, with the speeds that the simulator's contention
// model gives them.
//
// Example: gathers on one stream, reductions on another, kernels on compute. For each of 17 loads
// (and for no kernel) the sets are: kernel; kernel and gather; kernel and reduction; all three.
// With one communicator no set has both a gather and a reduction. For a kernel of load 12 beside a
// gather of load 6 the memory is asked for 18/16, so both slow down, and the row says by how much.
//
// Smaller messages are slower and load the memory less. They count as variants of a transfer, but
// only where the memory is full with large ones: elsewhere they never win. O(loads * product of
// variants).

#include "planner/occupancy.h"

#include <cmath>

#include "core/ranges.h"
#include "simulator/costs/pricer.h"

namespace shardwright {
namespace {

struct TransferKind {
  OpCode code;
  Stream stream;
};
constexpr std::array<TransferKind, Occupancy::kRowTransferCount> kKinds = {{
    {OpCode::kAllGather, Stream::kGather},
    {OpCode::kReduceScatter, Stream::kReduce},
    {OpCode::kAllReduce, Stream::kReplicate},
    {OpCode::kAllGather, Stream::kGather},
    {OpCode::kCopyD2h, Stream::kD2h},
    {OpCode::kCopyH2d, Stream::kH2d},
}};
constexpr auto kCompute = static_cast<std::size_t>(Stream::kCompute);
constexpr std::size_t kMostLoad = kLoadCount - 1;  // all of the memory bandwidth

}  // namespace

Occupancy::Occupancy(const Problem& input, const OuterChoice& outer, const DialectFacts& facts,
                     const RowWeights& bytes, const std::vector<std::int64_t>& partial_groups)
    : shares_communicator_(facts.one_communicator) {
  Program program;  // shapes of transfers, for the pricer; no ops
  program.shard_size = outer.shard_size;
  program.replicate_size = outer.replicate_size;
  program.tensor_size = outer.tensor_size;
  std::vector<Transfer> transfers;  // by shape
  const auto add = [&](Transfer t, GroupId group) {
    if (bytes[t] > 0) {
      OpShape shape;
      shape.code = kKinds[t].code;
      shape.stream = kKinds[t].stream;
      shape.group = group;
      shape.bytes = Bytes(static_cast<std::int64_t>(bytes[t]));
      program.shapes.push_back(shape);
      transfers.push_back(t);
    }
  };
  program.groups = GroupsOf(outer);
  add(kGather, GroupId(0));
  add(kReduce, GroupId(0));
  add(kReplicate, GroupId(1));
  add(kToHost, GroupId());
  add(kToDevice, GroupId());
  for (const std::int64_t size : partial_groups) {
    program.groups.push_back({"reshard", size, outer.tensor_size});
    add(kPartial, GroupId(program.groups.size() - 1));
  }
  PriceTable table = PriceProgram(program, input.cluster, input.profile);
  ContentionModel& model = table.contention;
  Streams streams;
  streams.fill({Variant()});  // nothing runs
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const Price& price = table.prices[i];
    const OpShape& shape = program.shapes[i];
    const double best = ToSeconds(price.duration).value / static_cast<double>(shape.bytes.value);
    best_[transfers[i]] = best;
    if (transfers[i] == kPartial) {
      partial_.push_back(best);
    }
    std::vector<Variant>& variants = streams[static_cast<std::size_t>(shape.stream)];
    // Gathers over parts of many sizes load the same links: they make the same rows.
    const bool is_known = AnyOf(variants, [&](const Variant& v) {
      return v.transfer == kPartial && v.contention_class == price.contention_class;
    });
    if (best > 0 && !is_known) {
      const ContentionClass& full = model.classes[price.contention_class];
      const auto level = static_cast<std::size_t>(std::lround(full.hbm_share * kMostLoad));
      variants.push_back({transfers[i], 1, price.contention_class, level});
      const double share = MemoryShare(shape.code, full.bus_rate, input.cluster.gpu, input.profile);
      AddSlower(variants.back(), share, model, variants);
    }
  }
  ContentionClass kernel;
  kernel.kind = LoadKind::kKernel;
  for (std::size_t load = 0; load <= kLoadCount; ++load) {
    Streams at_load = AtLoad(streams, load);
    const std::size_t first = rows_.size();
    if (load < kLoadCount) {
      kernel.hbm_share = static_cast<double>(load) / kMostLoad;
      at_load[kCompute][0].contention_class = static_cast<std::uint8_t>(model.classes.size());
      model.classes.push_back(kernel);
    }
    Running running{};
    AddRows(model, at_load, running, 0);
    std::for_each(rows_.begin() + static_cast<std::ptrdiff_t>(first), rows_.end(),
                  [&](Row& row) { row.load = load; });
  }
}

// The same transfer in smaller messages, by the sixteenth of the memory bandwidth that they take;
// in one message it takes `share`.
void Occupancy::AddSlower(Variant full, double share, ContentionModel& model,
                          std::vector<Variant>& variants) {
  // The numbers of classes have eight bits: of hundreds of group sizes only the first have slower
  // messages.
  constexpr std::size_t kMostClasses = 230;
  Variant slower = full;
  slower.is_full = false;
  ContentionClass slower_class = model.classes[full.contention_class];
  if (slower_class.kind != LoadKind::kCollective ||
      model.classes.size() + full.level >= kMostClasses) {
    return;
  }
  const double bus_rate = slower_class.bus_rate;
  for (slower.level = 1; slower.level < full.level; ++slower.level) {
    slower_class.hbm_share = static_cast<double>(slower.level) / kMostLoad;
    slower.rate = slower_class.hbm_share / share;
    slower_class.bus_rate = bus_rate * slower.rate;
    slower.contention_class = static_cast<std::uint8_t>(model.classes.size());
    model.classes.push_back(slower_class);
    variants.push_back(slower);
  }
}

// Keeps the variants that may win beside a kernel of this load. Smaller messages are slower and
// load the memory less. They win only where the memory would be full with larger ones, and only
// down to the point where it is just full. Everywhere else the full rate for a part of the time is
// as good.
Occupancy::Streams Occupancy::AtLoad(const Streams& streams, std::size_t load) {
  std::size_t most = load;  // sixteenths of the memory bandwidth
  for (const std::vector<Variant>& variants : streams) {
    std::size_t level = 0;
    for (const Variant& variant : variants) {
      level = std::max(level, variant.level);
    }
    most += level;
  }
  Streams result = streams;
  for (std::vector<Variant>& variants : result) {
    std::erase_if(variants, [&](const Variant& variant) {
      return !variant.is_full && (most <= kMostLoad || load + variant.level > kMostLoad);
    });
  }
  return result;
}

// Of what runs on the streams before `stream`, with everything that may run on the rest.
void Occupancy::AddRows(const ContentionModel& model, const Streams& streams, Running& running,
                        std::size_t stream) {
  if (stream < kStreamCount) {
    for (const Variant& variant : streams[stream]) {
      running[stream] = &variant;
      AddRows(model, streams, running, stream + 1);
    }
    return;
  }
  Row row;
  RunningClasses classes{};
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    classes[s] = running[s]->contention_class;
    row.progress[running[s]->transfer] += running[s]->rate;
  }
  const bool gathers = row.progress[kGather] + row.progress[kPartial] > 0;
  if (shares_communicator_ && gathers && row.progress[kReduce] > 0) {
    return;
  }
  const Speeds speeds = SolveSpeeds(model, classes);
  row.kernel_speed = speeds[kCompute];
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    row.progress[running[s]->transfer] *= running[s]->rate > 0 ? speeds[s] : 1;
  }
  rows_.push_back(row);
}

}  // namespace shardwright
