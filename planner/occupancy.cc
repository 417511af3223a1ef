#include "planner/occupancy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "simulator/costs/pricer.h"

namespace shardwright {
namespace {

constexpr std::array<OpCode, Occupancy::kRowTransferCount> kCodes = {
    OpCode::kAllGather, OpCode::kReduceScatter, OpCode::kAllReduce,
    OpCode::kAllGather, OpCode::kCopyD2h,       OpCode::kCopyH2d};
// Streams that run transfers, and the transfers of each.
constexpr std::array<Stream, Occupancy::kStreamCount> kStreams = {
    Stream::kGather, Stream::kReduce, Stream::kReplicate, Stream::kD2h, Stream::kH2d};
constexpr std::array<std::size_t, Occupancy::kRowTransferCount> kStreamOf = {0, 1, 2, 0, 3, 4};
constexpr std::size_t kMostLoad = kLoadCount - 1;  // all of the memory bandwidth

// A transfer over one group: its shape in `program`, of everything in one message.
struct Family {
  std::size_t transfer = 0;
  std::size_t shape = 0;
};

Family AddShape(std::size_t transfer, GroupId group, double bytes, Program& program) {
  OpShape shape;
  shape.code = kCodes[transfer];
  shape.stream = kStreams[kStreamOf[transfer]];
  shape.group = group;
  shape.bytes = Bytes(static_cast<std::int64_t>(bytes));
  program.shapes.push_back(shape);
  return {transfer, program.shapes.size() - 1};
}

}  // namespace

Occupancy::Occupancy(const SearchInput& input, const OuterChoice& outer, const DialectFacts& facts,
                     const RowWeights& bytes, const std::vector<std::int64_t>& partial_groups,
                     const std::array<bool, kLoadCount>& loads)
    : shares_communicator_(facts.one_communicator), copies_meet_(outer.offload.moments) {
  Program program;  // shapes of collectives, for the pricer; no ops
  program.shard_size = outer.shard_size;
  program.replicate_size = outer.replicate_size;
  program.groups = {{"shard", outer.shard_size, 1},
                    {"replicate", outer.replicate_size, outer.shard_size}};
  std::vector<Family> families;
  for (const Transfer t : {kGather, kReduce, kReplicate}) {
    if (bytes[t] > 0) {
      families.push_back(AddShape(t, GroupId(t == kReplicate ? 1 : 0), bytes[t], program));
    }
  }
  for (const Transfer t : {kToHost, kToDevice}) {
    if (bytes[t] > 0) {
      families.push_back(AddShape(t, GroupId(), bytes[t], program));
    }
  }
  for (const std::int64_t size : partial_groups) {
    program.groups.push_back({"reshard", size, 1});
    families.push_back(
        AddShape(kPartial, GroupId(program.groups.size() - 1), bytes[kPartial], program));
  }
  PriceTable table = PriceProgram(program, input.cluster, input.profile);
  Streams streams;
  for (std::vector<Variant>& variants : streams) {
    variants.push_back({.is_full = true});  // nothing runs
  }
  for (const Family& family : families) {
    const Price& price = table.prices[family.shape];
    const OpShape& shape = program.shapes[family.shape];
    const double best = ToSeconds(price.duration).value / static_cast<double>(shape.bytes.value);
    best_[family.transfer] = best;
    if (family.transfer == kPartial) {
      partial_.push_back(best);
    }
    if (best <= 0) {
      continue;
    }
    std::vector<Variant>& variants = streams[kStreamOf[family.transfer]];
    const ContentionClass full = table.contention.classes[price.contention_class];
    const auto level = static_cast<std::size_t>(std::lround(full.hbm_share * kMostLoad));
    // Gathers over parts of many sizes load the same links: they make the same rows.
    const bool is_known = std::any_of(variants.begin(), variants.end(), [&](const Variant& v) {
      return v.transfer == kPartial && v.contention_class == price.contention_class;
    });
    if (is_known) {
      continue;
    }
    variants.push_back({family.transfer, 1, price.contention_class, level, true});
    const double share = MemoryShare(shape.code, full.bus_rate, input.cluster.gpu, input.profile);
    // The numbers of classes have eight bits: of hundreds of group sizes only the first have slower
    // messages.
    constexpr std::size_t kMostClasses = 250;
    const bool may_be_slower = full.kind == LoadKind::kCollective &&
                               table.contention.classes.size() + level < kMostClasses;
    for (std::size_t less = 1; may_be_slower && less < level; ++less) {
      ContentionClass slower = full;
      slower.hbm_share = static_cast<double>(less) / kMostLoad;
      const double rate = slower.hbm_share / share;
      slower.bus_rate *= rate;
      variants.push_back({family.transfer, rate,
                          static_cast<std::uint8_t>(table.contention.classes.size()), less, false});
      table.contention.classes.push_back(slower);
    }
  }
  AddRows(table.contention, streams, loads);
}

// Those that may pay beside a kernel of this load. Smaller messages are slower and load the memory
// less. That pays where the memory is full with larger ones, and not beyond the point where it is
// just full: whatever runs where the memory is not full, or always is, is as good as the full rate
// for a part of the time.
Occupancy::Streams Occupancy::AtLoad(const Streams& streams, std::size_t load) {
  std::size_t most = load;  // sixteenths of the memory bandwidth
  for (const std::vector<Variant>& variants : streams) {
    std::size_t level = 0;
    for (const Variant& variant : variants) {
      level = std::max(level, variant.level);
    }
    most += level;
  }
  Streams result;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    for (const Variant& variant : streams[s]) {
      const bool fits = most > kMostLoad && load + variant.level <= kMostLoad;
      if (variant.is_full || (fits && load < kLoadCount)) {
        result[s].push_back(variant);
      }
    }
  }
  return result;
}

void Occupancy::AddRows(const ContentionModel& contention, const Streams& all_streams,
                        const std::array<bool, kLoadCount>& loads) {
  ContentionModel model = contention;
  for (std::size_t load = 0; load <= kLoadCount; ++load) {
    if (load < kLoadCount && !loads[load]) {
      continue;
    }
    std::uint8_t kernel = 0;  // the class of ops without load
    if (load < kLoadCount) {
      ContentionClass c;
      c.kind = LoadKind::kKernel;
      c.hbm_share = static_cast<double>(load) / (kLoadCount - 1);
      kernel = static_cast<std::uint8_t>(model.classes.size());
      model.classes.push_back(c);
    }
    const std::size_t first = rows_.size();
    const auto streams = AtLoad(all_streams, load);
    for (const Variant& gather : streams[0]) {
      for (const Variant& reduce : streams[1]) {
        if (shares_communicator_ && gather.rate > 0 && reduce.rate > 0) {
          continue;
        }
        for (const Variant& replicate : streams[2]) {
          for (const Variant& there : streams[3]) {
            for (const Variant& back : streams[4]) {
              if (copies_meet_ || there.rate == 0 || back.rate == 0) {
                AddRow(model, load, kernel, {&gather, &reduce, &replicate, &there, &back});
              }
            }
          }
        }
      }
    }
    DropWeakRows(first);
  }
}

void Occupancy::AddRow(const ContentionModel& model, std::size_t load, std::uint8_t kernel,
                       const Running& running) {
  RunningClasses classes{};
  classes[static_cast<std::size_t>(Stream::kCompute)] = kernel;
  for (std::size_t s = 0; s < kStreams.size(); ++s) {
    classes[static_cast<std::size_t>(kStreams[s])] = running[s]->contention_class;
  }
  const Speeds speeds = SolveSpeeds(model, classes);
  Row row;
  row.load = load;
  row.kernel_speed = speeds[static_cast<std::size_t>(Stream::kCompute)];
  for (std::size_t s = 0; s < kStreams.size(); ++s) {
    const Variant& variant = *running[s];
    if (variant.rate > 0) {
      row.progress[variant.transfer] = speeds[static_cast<std::size_t>(kStreams[s])] * variant.rate;
    }
  }
  rows_.push_back(row);
}

// A row says nothing where another one of the same kernels gets on at least as fast in everything.
void Occupancy::DropWeakRows(std::size_t first) {
  const auto is_weaker = [](const Row& a, const Row& b) {
    bool weaker = a.kernel_speed <= b.kernel_speed;
    for (std::size_t t = 0; t < kRowTransferCount; ++t) {
      weaker = weaker && a.progress[t] <= b.progress[t];
    }
    return weaker;
  };
  std::vector<Row> strong(rows_.begin(), rows_.begin() + static_cast<std::ptrdiff_t>(first));
  for (std::size_t i = first; i < rows_.size(); ++i) {
    bool is_weak = false;
    for (std::size_t k = first; k < rows_.size() && !is_weak; ++k) {
      const bool both = k != i && is_weaker(rows_[i], rows_[k]);
      is_weak = both && (k < i || !is_weaker(rows_[k], rows_[i]));
    }
    if (!is_weak) {
      strong.push_back(rows_[i]);
    }
  }
  rows_ = std::move(strong);
}

}  // namespace shardwright
