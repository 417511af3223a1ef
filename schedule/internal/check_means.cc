#include "schedule/internal/check_means.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "core/ranges.h"
#include "core/text.h"
#include "core/threads.h"
#include "schedule/happens_before.h"
#include "schedule/internal/locate.h"
#include "schedule/print.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// times / divided times the sum, over some ranks and micro-batches, of the gradients that backward
// computes there. The ranks are `high / low` of the data-parallel order, `low` apart.
struct Term {
  std::int64_t first = 0, end = 0;  // micro-batches, `end` not included
  std::int64_t low = 1, high = 1;
  double times = 1.0, divided = 1.0;
  bool is_partial = false;  // of Program::partial_ops

  [[nodiscard]] bool IsLike(const Term& other) const {
    return low == other.low && high == other.high && is_partial == other.is_partial &&
           times * other.divided == other.times * divided;
  }
};
using Sum = std::vector<Term>;

// A micro-batch that is there already counts once: ops that share a weight each bring a part of it.
void Add(const Sum& more, Sum& sum) {
  for (const Term& term : more) {
    const auto same = FindIf(sum, [&](const Term& t) {
      return t.IsLike(term) && term.first <= t.end && t.first <= term.end;
    });
    if (same == sum.end()) {
      sum.push_back(term);
    } else {
      same->first = std::min(same->first, term.first);
      same->end = std::max(same->end, term.end);
    }
  }
}

void Divide(Sum& sum, double divisor) {
  for (Term& term : sum) {
    term.divided *= divisor;
    if (std::fmod(term.divided, term.times) == 0) {  // small numbers stay exact
      term.divided /= term.times;
      term.times = 1.0;
    }
  }
}

std::string InText(double number) {
  return Fixed(number, "%.6g");
}

using ByteRange = std::pair<Bytes, Bytes>;  // from a byte to the one before another

std::string InText(const ByteRange& range) {
  return "bytes " + std::to_string(range.first.value) + " to " + std::to_string(range.second.value);
}

// Of what one rank has computed of its tokens alone.
bool IsOfSomeTokens(const Term& term) {
  return term.is_partial && term.low == term.high;
}

bool MovesGradients(OpCode code) {
  switch (code) {
    case OpCode::kCast:
    case OpCode::kConcatGrad:
    case OpCode::kReduceCopyIn:
    case OpCode::kBucketCopy:
    case OpCode::kGradStore:
    case OpCode::kAccumulateGrad:
    case OpCode::kCopyD2h:
    case OpCode::kCopyH2d:
    case OpCode::kReduceScatter:
      return true;
    default:
      return false;
  }
}

class MeanChecker {
 public:
  MeanChecker(const Program& program, std::vector<Finding>& findings)
      : program_(program),
        findings_(findings),
        passes_(ConcatenatedPasses(program)),
        sums_(program.buffers.size()),
        is_read_(program.buffers.size(), false),
        reduced_(program.buffers.size()) {}

  void Run() {
    for (pass_ = 0; pass_ < passes_.size(); ++pass_) {
      const Body& body = *passes_[pass_].body;
      for (std::size_t i = 0; i < body.size(); ++i) {
        ThrowIfStopped();
        op_ = OpId(i);
        for (const MemoryPoint& point : body.PointsBefore(op_)) {
          if (point.kind == PointKind::kAlloc) {
            sums_[point.buffer.value].clear();
            reduced_[point.buffer.value] = {};
            is_read_[point.buffer.value] = false;
          }
        }
        Follow(body.ops[i], body.AccessesOf(op_));
      }
    }
  }

 private:
  void Follow(const Op& op, std::span<const Access> accesses) {
    const OpShape& shape = program_.ShapeOf(op);
    if (shape.code == OpCode::kCompute && op.phase == Phase::kBackward) {
      Write(op, accesses);
    } else if (MovesGradients(shape.code)) {
      Move(shape, accesses);
    } else if (shape.code == OpCode::kAllReduce || shape.code == OpCode::kGradScale) {
      for (const Access& access : accesses) {
        if (access.role == Role::kInput && IsFirstPart(shape, access)) {
          SumRange(shape, access);
          Apply(shape, access.buffer, sums_[access.buffer.value]);
        }
      }
    } else if (shape.code == OpCode::kGradNorm || shape.code == OpCode::kGradClip ||
               shape.code == OpCode::kOptimizerStep || shape.code == OpCode::kHostOptimizerStep) {
      Use(shape, accesses);
    }
  }

  void Write(const Op& op, std::span<const Access> accesses) {
    const bool is_of_experts =
        std::binary_search(program_.expert_ops.begin(), program_.expert_ops.end(), op.subject);
    // Ranks that cut a layer have the same loss: what each has of its part is the sum over them.
    const bool is_partial =
        std::binary_search(program_.partial_ops.begin(), program_.partial_ops.end(), op.subject);
    const Sum fresh = {{.first = op.micro_batch,
                        .end = op.micro_batch + std::int64_t{1},
                        .high = is_partial      ? 1
                                : is_of_experts ? program_.expert_size
                                                : program_.tensor_size,
                        .is_partial = is_partial}};
    for (const Access& access : accesses) {
      if (access.role != Role::kParamGrad) {
        continue;
      }
      Put(fresh, access);
    }
  }

  // Parts of a buffer are reduced in any order, each once; all count with the first, whose group
  // and divisor they must have. An all-reduce of fewer bytes than it touches is of the last of
  // those.
  bool IsFirstPart(const OpShape& shape, const Access& access) {
    if (shape.code != OpCode::kAllReduce || IsMixed(access.buffer)) {
      return true;
    }
    Reduced& reduced = reduced_[access.buffer.value];
    const ByteRange part = {access.bytes - shape.bytes, access.bytes};
    const auto next = reduced.ends.lower_bound(part.first);
    if ((next != reduced.ends.end() && next->first < part.second) ||
        (next != reduced.ends.begin() && std::prev(next)->second > part.first)) {
      const Bytes fewest = std::min(reduced.bytes, reduced.fewest);
      reduced = {};  // the next sum of the whole
      reduced.fewest = fewest;
    }
    const bool is_first = reduced.ends.empty();
    if (!is_first && (shape.group != reduced.group || shape.divisor != reduced.divisor)) {
      Report(access.buffer,
             "sums a part over another group, or divides it by another number, than "
             "the part before");
    }
    reduced.ends.insert(part);
    reduced.bytes += shape.bytes;
    reduced.group = shape.group;
    reduced.divisor = shape.divisor;
    return is_first;
  }

  // If some of the bytes are reduced, all are.
  void CheckParts(const Access& access) {
    const Reduced& reduced = reduced_[access.buffer.value];
    const Bytes summed = std::min(reduced.bytes, reduced.fewest);
    if (!reduced.ends.empty() && summed < access.bytes) {
      Report(access.buffer, "is read where " + std::to_string(summed.value) + " of " +
                                std::to_string(access.bytes.value) + " bytes are summed");
    }
  }

  // Several ops fill a buffer until one reads it; after that a write begins anew.
  void Put(const Sum& more, const Access& access) {
    Sum& sum = sums_[access.buffer.value];
    if (access.mode == AccessMode::kWrite && is_read_[access.buffer.value]) {
      sum.clear();
      reduced_[access.buffer.value] = {};
    }
    is_read_[access.buffer.value] = false;
    Add(more, sum);
  }

  // An all-reduce of a kMixed buffer, or of one parameter in it: an op may have several.
  void SumRange(const OpShape& shape, const Access& access) {
    const auto found = partial_ranges_.find(access.buffer);
    if (found == partial_ranges_.end()) {
      return;
    }
    const ByteRange summed = {access.bytes - shape.bytes, access.bytes};
    std::vector<ByteRange>& ranges = found->second;
    const auto around = FindIf(ranges, [&](const ByteRange& range) {
      return range.first <= summed.first && summed.second <= range.second;
    });
    if (around != ranges.end()) {
      const ByteRange behind = {summed.second, around->second};
      around->second = summed.first;
      ranges.push_back(behind);
      std::erase_if(ranges, [](const ByteRange& range) { return range.first == range.second; });
    } else if (shape.bytes < BufferAt(access).size) {
      Report(access.buffer, "sums " + InText(summed) + ", which are no gradient of some tokens");
    }
  }

  // Where in a new kMixed buffer the inputs lie of which other ranks have a part: bf16 gradients of
  // 64 and 2,048 bytes, the first of some tokens, begin an fp32 buffer with such a range of 128
  // bytes.
  void PlaceRanges(std::span<const Access> accesses) {
    const auto to = FindIf(accesses, [&](const Access& access) {
      return access.role == Role::kOutput && access.mode == AccessMode::kWrite &&
             IsMixed(access.buffer);
    });
    if (to == accesses.end()) {
      return;
    }
    std::vector<ByteRange>& ranges = partial_ranges_[to->buffer];
    ranges.clear();
    Bytes end;
    for (const Access& access : accesses) {
      if (access.role == Role::kInput) {
        const Bytes begin = end;
        const std::int64_t elements = access.bytes.value / SizeOf(BufferAt(access).dtype);
        end += Bytes(elements * SizeOf(BufferAt(*to).dtype));
        const Sum& sum = sums_[access.buffer.value];
        if (AnyOf(sum, IsOfSomeTokens)) {
          ranges.emplace_back(begin, end);
        }
      }
    }
  }

  // What all inputs hold, reduced where the op does that, goes to each output.
  void Move(const OpShape& shape, std::span<const Access> accesses) {
    PlaceRanges(accesses);
    Sum moved;
    BufferId from;
    for (const Access& access : accesses) {
      if (access.role == Role::kInput) {
        const auto ranges = partial_ranges_.find(access.buffer);
        if (ranges != partial_ranges_.end() && !ranges->second.empty()) {
          Report(access.buffer, "is read before the ranks that cut layers have summed " +
                                    InText(ranges->second.front()));
        }
        CheckParts(access);
        Add(sums_[access.buffer.value], moved);
        is_read_[access.buffer.value] = true;
        from = access.buffer;
      }
    }
    Apply(shape, from, moved);
    for (const Access& access : accesses) {
      if (access.role == Role::kOutput) {
        Put(moved, access);
      }
    }
  }

  // A reduction and the division behind it. What is summed over the group already is the same on
  // all of its ranks.
  void Apply(const OpShape& shape, BufferId buffer, Sum& sum) {
    const Sum before = std::exchange(sum, {});
    // One all-reduce for each parameter whose gradient lacks other ranks' tokens.
    const bool sums_part = shape.code == OpCode::kAllReduce && IsMixed(buffer) &&
                           shape.bytes < program_.buffers[buffer.value].size &&
                           AnyOf(before, &Term::is_partial);
    for (Term term : before) {
      if (sums_part && term.low == 1 && term.high == program_.tensor_size) {
        Add({term}, sum);  // the ranks sum another part of the buffer
        continue;
      }
      if (InfoOf(shape.code).is_collective) {
        const Group& group = program_.groups[shape.group.value];
        if (!SumOver(group, term)) {
          Report(buffer, "sums over group " + group.name +
                             " gradients that are summed over a part of it already");
          return;
        }
      }
      Sum one = {term};
      Divide(one, shape.divisor);
      Add(one, sum);
    }
  }

  [[nodiscard]] const Buffer& BufferAt(const Access& access) const {
    return program_.buffers[access.buffer.value];
  }
  [[nodiscard]] bool IsMixed(BufferId buffer) const {
    return program_.tensor_size > 1 && program_.buffers[buffer.value].holds == Holds::kMixed;
  }

  [[nodiscard]] static bool SumOver(const Group& group, Term& term) {
    const std::int64_t low = group.stride, high = BlockOf(group);
    if (group.size == 1) {
      return true;
    }
    if (term.low == term.high) {
      term.low = low;
      term.high = high;
    } else if (term.low <= low && high <= term.high) {
      term.times *= static_cast<double>(group.size);
    } else if (low == term.high) {
      term.high = high;
    } else if (high == term.low) {
      term.low = low;
    } else {
      return false;
    }
    return true;
  }

  // A norm or clip that changes gradients divides them; others are of the divided ones.
  void Use(const OpShape& shape, std::span<const Access> accesses) {
    for (const Access& access : accesses) {
      if (access.role != Role::kParamGrad) {
        continue;
      }
      CheckParts(access);
      Sum& sum = sums_[access.buffer.value];
      Sum divided = sum;
      Divide(divided, shape.divisor);
      is_read_[access.buffer.value] = true;
      if (access.mode == AccessMode::kReadWrite) {
        sum = divided;
      }
      CheckMean(access.buffer, divided);
    }
  }

  void CheckMean(BufferId buffer, Sum& sum) {
    const std::int64_t ranks = MeshOf(program_).StageRanks();
    const auto total =
        static_cast<double>(MeshOf(program_).CopyCount() * program_.micro_batch_count);
    SortBy(sum, &Term::first);
    std::int64_t end = 0;
    for (const Term& term : sum) {
      const bool is_whole = ranks == 1 || (term.low == 1 && term.high == ranks);
      if (!is_whole) {
        return Report(buffer, "uses gradients that are summed over " +
                                  std::to_string(term.high / term.low) + " of " +
                                  std::to_string(ranks) + " ranks");
      }
      if (term.times * total != term.divided) {
        return Report(buffer, "uses gradients that are " +
                                  InText(term.times * total / term.divided) + " times their mean");
      }
      if (term.first > end) {
        break;
      }
      end = std::max(end, term.end);
    }
    if (!sum.empty() && end < program_.micro_batch_count) {
      Report(buffer, "uses gradients that lack those of micro-batch " + std::to_string(end));
    }
  }

  void Report(BufferId buffer, const std::string& text) {
    if (findings_.size() >= kMaxFindings) {
      return;
    }
    const std::string name = NameAt(program_, passes_, {pass_, op_});
    const std::string in = BufferName(program_, buffer);
    findings_.push_back({10, kNoOp, name, in, name + ", " + in + ": " + text});
  }

  const Program& program_;
  std::vector<Finding>& findings_;
  std::vector<Pass> passes_;
  std::vector<Sum> sums_;      // by buffer; empty: no gradients
  std::vector<bool> is_read_;  // by buffer: since it was written
  struct Reduced {
    std::map<Bytes, Bytes> ends;                             // of parts, by their first byte
    Bytes bytes;                                             // of all parts
    Bytes fewest{std::numeric_limits<std::int64_t>::max()};  // of the sums before, over other ranks
    GroupId group;
    double divisor = 1;
  };
  std::map<BufferId, std::vector<ByteRange>> partial_ranges_;  // of kMixed buffers: not summed yet
  std::vector<Reduced> reduced_;                               // by buffer: its last sum
  std::size_t pass_ = 0;
  OpId op_;
};

}  // namespace

void CheckMeans(const Program& program, std::vector<Finding>& findings) {
  MeanChecker(program, findings).Run();
}

}  // namespace shardwright
