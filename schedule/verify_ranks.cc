// Rule 8 of docs/execution_model.md section 3: what the rank classes must agree on.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "schedule/happens_before.h"
#include "schedule/internal/locate.h"
#include "schedule/verify.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// init, first step, and two steady steps; the second shows what one step hands to the next.
std::vector<Pass> PassesOf(const Program& program) {
  std::vector<Pass> passes = ConcatenatedPasses(program);
  passes.pop_back();
  return passes;
}

// The passes that are compared op by op; a class without warm-up runs `step` first.
std::array<Pass, 3> ComparedPasses(const Program& program) {
  const std::vector<Pass> passes = ConcatenatedPasses(program);
  return {passes[0], passes[1], passes.back()};
}

bool IsCollective(const Program& program, const Op& op) {
  return InfoOf(program.ShapeOf(op).code).is_collective;
}

bool AreStages(std::span<const Program* const> classes) {
  return classes.size() > 1 && classes.front()->pipeline_size > 1;
}

// The collectives of one pass that `meets` says, in issue order.
template <class Meets>
std::vector<OpId> CollectivesOf(const Program& program, const Body& body, const Meets& meets) {
  std::vector<OpId> found;
  for (std::size_t i = 0; i < body.size(); ++i) {
    const OpShape& shape = program.ShapeOf(body.ops[i]);
    if (InfoOf(shape.code).is_collective && meets(program, shape)) {
      found.emplace_back(i);
    }
  }
  return found;
}

bool Match(const OpShape& a, const OpShape& b) {
  return CounterpartOf(a.code) == b.code && a.bytes == b.bytes && a.dtype == b.dtype;
}

std::string NameIn(const Program& program, const Pass& pass, OpId op) {
  return NameAt(program, std::span<const Pass>(&pass, 1), {0, op});
}

void Report(std::size_t c, std::size_t other, std::string first, std::string second,
            const std::string& text, std::vector<Finding>& findings) {
  if (findings.size() < kMaxFindings) {
    findings.push_back({8, std::move(first), std::move(second), "",
                        "rank class " + std::to_string(c) + " and rank class " +
                            std::to_string(other) + ": " + text});
  }
}

// The k-th op of one class that `meets_a` says, and the k-th of the other that `meets_b` says.
template <class MeetsA, class MeetsB>
void ComparePasses(std::span<const Program* const> classes, std::size_t other, std::size_t c,
                   const std::string& group, const MeetsA& meets_a, const MeetsB& meets_b,
                   std::vector<Finding>& findings) {
  const Program& a = *classes[other];
  const Program& b = *classes[c];
  for (std::size_t p = 0; p < 3; ++p) {
    const Pass pass_a = ComparedPasses(a)[p];
    const Pass pass_b = ComparedPasses(b)[p];
    const auto of_a = CollectivesOf(a, *pass_a.body, meets_a);
    const auto of_b = CollectivesOf(b, *pass_b.body, meets_b);
    std::size_t i = 0;
    while (i < of_a.size() && i < of_b.size() &&
           Match(a.ShapeOf(pass_a.body->ops[of_a[i].value]),
                 b.ShapeOf(pass_b.body->ops[of_b[i].value]))) {
      ++i;
    }
    if (i < of_a.size() || i < of_b.size()) {
      const std::string first = i < of_a.size() ? NameIn(a, pass_a, of_a[i]) : kNoOp;
      const std::string second = i < of_b.size() ? NameIn(b, pass_b, of_b[i]) : kNoOp;
      std::string text = "collective " + std::to_string(i) + " of group " + group;
      text += " is " + second;
      text += " here and " + first;
      text += " there, and the two do not match";
      Report(c, other, first, second, text, findings);
    }
  }
}

void CompareSequences(std::span<const Program* const> classes, std::size_t c,
                      std::vector<Finding>& findings) {
  const std::vector<Group>& a = classes[0]->groups;
  const std::vector<Group>& b = classes[c]->groups;
  if (a.size() != b.size()) {
    return Report(c, 0, kNoOp, kNoOp, "they have different groups", findings);
  }
  for (std::size_t g = 0; g < a.size(); ++g) {
    if (a[g].size != b[g].size || a[g].stride != b[g].stride) {
      Report(c, 0, kNoOp, kNoOp, "group " + a[g].name + " has another size or stride", findings);
      continue;
    }
    const auto meets = [&](const Program&, const OpShape& shape) {
      return shape.group == GroupId(g);
    };
    ComparePasses(classes, 0, c, a[g].name, meets, meets, findings);
  }
}

// A rank and the one before it: transfers between them, and what all ranks do together.
void CompareStages(std::span<const Program* const> classes, std::size_t before, std::size_t c,
                   std::vector<Finding>& findings) {
  const auto transfers = [](Stream stream) {
    return [stream](const Program&, const OpShape& shape) {
      return IsTransfer(shape.code) && shape.stream == stream;
    };
  };
  const auto together = [](const Program& program, const OpShape& shape) {
    return !IsTransfer(shape.code) && SpansStages(program, shape);
  };
  ComparePasses(classes, before, c, "of neighbours", transfers(Stream::kNext),
                transfers(Stream::kPrevious), findings);
  ComparePasses(classes, before, c, "of all stages", together, together, findings);
}

// The union of all classes' orders, with the k-th collective of a group made one node.
class WaitGraph {
 public:
  explicit WaitGraph(std::span<const Program* const> classes) : classes_(classes) {
    for (std::size_t c = 0; c < classes.size(); ++c) {
      AddClass(c);
    }
  }

  // The first op of each class that can never start; empty when all can.
  [[nodiscard]] std::vector<std::string> Blocked() {
    std::vector<std::uint32_t> begin(pending_.size() + 1, 0), after(edges_.size());
    for (const auto& [before, _] : edges_) {
      ++begin[before + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    std::vector<std::uint32_t> end = begin;
    for (const auto& [before, next] : edges_) {
      after[end[before]++] = next;
    }
    std::vector<std::uint32_t> ready;
    for (std::uint32_t n = 0; n < pending_.size(); ++n) {
      if (pending_[n] == 0) {
        ready.push_back(n);
      }
    }
    std::size_t done = 0;
    while (!ready.empty()) {
      const std::uint32_t node = ready.back();
      ready.pop_back();
      ++done;
      for (std::uint32_t e = begin[node]; e < end[node]; ++e) {
        if (--pending_[after[e]] == 0) {
          ready.push_back(after[e]);
        }
      }
    }
    return done == pending_.size() ? std::vector<std::string>() : NameBlocked();
  }

 private:
  static constexpr std::uint32_t kNone = 0xffffffffu;

  std::uint32_t NewNode() {
    pending_.push_back(0);
    return static_cast<std::uint32_t>(pending_.size() - 1);
  }
  void Order(std::uint32_t before, std::uint32_t after) {
    if (before != kNone && before != after) {
      edges_.emplace_back(before, after);
      ++pending_[after];
    }
  }

  // Where members of several classes meet: in the group; of stages a pair of neighbours, or all.
  [[nodiscard]] std::uint32_t PlaceOf(std::size_t c, const OpShape& shape) const {
    if (!AreStages(classes_)) {
      return shape.group.value;
    }
    const std::size_t count = classes_.size();
    return static_cast<std::uint32_t>(!IsTransfer(shape.code)         ? count
                                      : shape.stream == Stream::kNext ? c
                                                                      : (c + count - 1) % count);
  }

  void AddClass(std::size_t c) {
    const Program& program = *classes_[c];
    std::array<std::uint32_t, kStreamCount> last;
    last.fill(kNone);
    std::vector<std::uint32_t> last_of_group(program.groups.size(), kNone);
    std::vector<std::uint32_t> issued_to_group(program.groups.size(), 0);
    std::vector<std::uint32_t> slots(program.carry_slot_count, kNone);
    for (const Pass& pass : PassesOf(program)) {
      std::vector<std::uint32_t>& nodes = nodes_.emplace_back();
      for (std::size_t i = 0; i < pass.body->size(); ++i) {
        const OpShape& shape = program.ShapeOf(pass.body->ops[i]);
        std::uint32_t node = kNone;
        if (InfoOf(shape.code).is_collective) {
          const std::uint32_t g = shape.group.value;
          if (!AreStages(classes_) || SpansStages(program, shape)) {
            std::uint32_t& shared =
                shared_.try_emplace({PlaceOf(c, shape), issued_to_group[g]++}, kNone).first->second;
            shared = shared == kNone ? NewNode() : shared;
            node = shared;
          } else {
            node = NewNode();
          }
          Order(last_of_group[g], node);
          last_of_group[g] = node;
        } else {
          node = NewNode();
        }
        nodes.push_back(node);
        Order(last[static_cast<std::size_t>(Stream::kHost)], node);
        Order(last[static_cast<std::size_t>(shape.stream)], node);
        for (const Edge edge : pass.body->EdgesOf(OpId(i))) {
          Order(edge.is_carried() ? slots[edge.slot()] : nodes[edge.value], node);
        }
        last[static_cast<std::size_t>(shape.stream)] = node;
      }
      for (std::size_t slot = 0; slot < pass.body->carries.size(); ++slot) {
        if (pass.body->carries[slot].valid()) {
          slots[slot] = nodes[pass.body->carries[slot].value];
        }
      }
    }
  }

  [[nodiscard]] std::vector<std::string> NameBlocked() const {
    std::vector<std::string> names;
    std::size_t n = 0;
    for (const Program* program : classes_) {
      bool is_found = false;
      for (const Pass& pass : PassesOf(*program)) {
        const std::vector<std::uint32_t>& nodes = nodes_[n++];
        for (std::size_t i = 0; i < nodes.size() && !is_found; ++i) {
          if (pending_[nodes[i]] != 0 && IsCollective(*program, pass.body->ops[i])) {
            names.push_back(NameIn(*program, pass, OpId(i)));
            is_found = true;
          }
        }
      }
    }
    return names;
  }

  std::span<const Program* const> classes_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> edges_;  // before, after
  std::vector<std::uint32_t> pending_;                          // predecessors not yet done
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> shared_;  // (place, number)
  std::vector<std::vector<std::uint32_t>> nodes_;  // per class and pass, the node of each op
};

}  // namespace

bool SpansStages(const Program& program, const OpShape& shape) {
  return IsTransfer(shape.code) ||
         (InfoOf(shape.code).is_collective && program.pipeline_size > 1 &&
          program.groups[shape.group.value].size == program.pipeline_size &&
          program.groups[shape.group.value].stride == MeshOf(program).StageRanks());
}

OpCode CounterpartOf(OpCode code) {
  return code == OpCode::kSend ? OpCode::kReceive : code == OpCode::kReceive ? OpCode::kSend : code;
}

std::vector<Finding> VerifyRanks(std::span<const Program* const> classes) {
  std::vector<Finding> findings;
  for (const Program* program : classes) {
    for (Finding& finding : Verify(*program)) {
      if (findings.size() < kMaxFindings) {
        findings.push_back(std::move(finding));
      }
    }
  }
  if (!findings.empty()) {
    return findings;
  }
  for (std::size_t c = 1; c < classes.size(); ++c) {
    AreStages(classes) ? CompareStages(classes, c - 1, c, findings)
                       : CompareSequences(classes, c, findings);
  }
  if (AreStages(classes) && classes.size() > 2) {  // of two the stages share one stream
    CompareStages(classes, classes.size() - 1, 0, findings);
  }
  if (findings.empty()) {
    const std::vector<std::string> blocked = WaitGraph(classes).Blocked();
    if (!blocked.empty()) {
      findings.push_back({8, blocked.front(), blocked.back(), "",
                          "the ranks wait for each other: rank class 0 is stuck at " +
                              blocked.front() + ", the last class at " + blocked.back()});
    }
  }
  return findings;
}

}  // namespace shardwright
