#include "planner/occupancy.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "simulator/costs/pricer.h"

namespace shardwright {
namespace {

constexpr std::array<OpCode, Occupancy::kRowTransferCount> kCodes = {
    OpCode::kAllGather, OpCode::kReduceScatter, OpCode::kAllReduce,
    OpCode::kAllGather, OpCode::kCopyD2h,       OpCode::kCopyH2d};
// Streams that run transfers, and the transfers of each. The two copies never meet, so one place
// serves both.
constexpr std::array<Stream, Occupancy::kStreamCount> kStreams = {Stream::kGather, Stream::kReduce,
                                                                  Stream::kReplicate, Stream::kH2d};
constexpr std::array<std::size_t, Occupancy::kRowTransferCount> kStreamOf = {0, 1, 2, 0, 3, 3};

// Everything in one message, and in pieces of about the size of a layer: smaller messages are
// slower and load the device less. Rare transfers and copies, whose rate hardly depends on the
// size, only the first.
std::vector<Bytes> SizesOf(bool is_main, double bytes) {
  constexpr double kSmallest = 1 << 20;
  constexpr double kRatio = 256;
  std::vector<Bytes> sizes = {Bytes(static_cast<std::int64_t>(bytes))};
  if (is_main && bytes / kRatio >= kSmallest) {
    sizes.emplace_back(static_cast<std::int64_t>(bytes / kRatio));
  }
  return sizes;
}

// A transfer over one group: its shapes in `program`.
struct Family {
  std::size_t transfer = 0;
  std::size_t first = 0, last = 0;  // shapes [first, last)
};

Family AddShapes(std::size_t transfer, GroupId group, bool is_main, double bytes,
                 Program& program) {
  Family family = {transfer, program.shapes.size(), 0};
  for (const Bytes size : SizesOf(is_main, bytes)) {
    OpShape shape;
    shape.code = kCodes[transfer];
    shape.stream = kStreams[kStreamOf[transfer]];
    shape.group = group;
    shape.bytes = size;
    program.shapes.push_back(shape);
  }
  family.last = program.shapes.size();
  return family;
}

}  // namespace

Occupancy::Occupancy(const SearchInput& input, const OuterChoice& outer, Dialect dialect,
                     const RowWeights& bytes, const std::vector<std::int64_t>& partial_groups,
                     const std::array<bool, kLoadCount>& loads) {
  Program program;  // shapes of collectives, for the pricer; no ops
  program.dialect = NameOf(dialect);
  program.shard_size = outer.shard_size;
  program.replicate_size = outer.replicate_size;
  program.groups = {{"shard", outer.shard_size, 1},
                    {"replicate", outer.replicate_size, outer.shard_size}};
  std::vector<Family> families;
  for (const Transfer t : {kGather, kReduce, kReplicate}) {
    if (bytes[t] > 0) {
      const bool is_main = t != kReplicate || bytes[kReduce] == 0;
      families.push_back(
          AddShapes(t, GroupId(t == kReplicate ? 1 : 0), is_main, bytes[t], program));
    }
  }
  for (const Transfer t : {kToHost, kToDevice}) {
    if (bytes[t] > 0) {
      families.push_back(AddShapes(t, GroupId(), false, bytes[t], program));
    }
  }
  for (const std::int64_t size : partial_groups) {
    program.groups.push_back({"reshard", size, 1});
    families.push_back(
        AddShapes(kPartial, GroupId(program.groups.size() - 1), false, bytes[kPartial], program));
  }
  PriceTable table = PriceProgram(program, input.cluster, input.profile);
  std::array<std::vector<Variant>, kStreamCount> streams;
  for (std::vector<Variant>& variants : streams) {
    variants.emplace_back();  // nothing runs
  }
  for (const Family& family : families) {
    std::vector<Variant> variants;
    double best = 0;
    for (std::size_t s = family.first; s < family.last; ++s) {
      const double rate = ToSeconds(table.prices[s].duration).value /
                          static_cast<double>(program.shapes[s].bytes.value);
      if (rate > 0) {
        variants.push_back({family.transfer, rate, 0, table.prices[s].contention_class});
        best = best == 0 ? rate : std::min(best, rate);
      }
    }
    std::vector<Variant>& stream = streams[kStreamOf[family.transfer]];
    for (Variant& variant : variants) {
      variant.best = best;
      // Gathers over parts of many sizes load the same links: they make the same rows.
      const bool is_known = std::any_of(stream.begin(), stream.end(), [&](const Variant& v) {
        return v.transfer == kPartial && variant.transfer == kPartial &&
               v.contention_class == variant.contention_class;
      });
      if (!is_known) {
        stream.push_back(variant);
      }
    }
    best_[family.transfer] = best;
    if (family.transfer == kPartial) {
      partial_.push_back(best);
    }
  }
  // Dialects with one communicator for both never run a gather beside a reduction.
  AddRows(table.contention, streams, dialect != Dialect::kNative && dialect != Dialect::kFairscale,
          loads);
}

void Occupancy::AddRows(const ContentionModel& contention,
                        const std::array<std::vector<Variant>, kStreamCount>& streams,
                        bool shares_communicator, const std::array<bool, kLoadCount>& loads) {
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
    for (const Variant& gather : streams[0]) {
      for (const Variant& reduce : streams[1]) {
        if (shares_communicator && gather.best > 0 && reduce.best > 0) {
          continue;
        }
        for (const Variant& replicate : streams[2]) {
          for (const Variant& copy : streams[3]) {
            AddRow(model, load, kernel, {&gather, &reduce, &replicate, &copy});
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
    if (variant.best > 0) {
      row.progress[variant.transfer] =
          speeds[static_cast<std::size_t>(kStreams[s])] * variant.best / variant.seconds_per_byte;
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
