#include "tests/schedule/mutate.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace shardwright {
namespace {

// A body with each op's parts in vectors of its own, which are easy to change.
struct LooseOp {
  Op op;
  std::vector<Edge> edges;
  std::vector<Access> accesses;
  std::vector<MemoryPoint> points;
};
struct LooseBody {
  std::vector<LooseOp> ops;
  std::vector<MemoryPoint> end_points;
  std::vector<OpId> carries;
};

template <class T>
std::vector<T> ToVector(std::span<const T> span) {
  return {span.begin(), span.end()};
}

LooseBody Loosen(const Body& body) {
  LooseBody loose;
  for (std::uint32_t i = 0; i < body.size(); ++i) {
    const OpId op(i);
    loose.ops.push_back({body.ops[i], ToVector(body.EdgesOf(op)), ToVector(body.AccessesOf(op)),
                         ToVector(body.PointsBefore(op))});
  }
  loose.end_points = ToVector(body.PointsAtEnd());
  loose.carries = body.carries;
  return loose;
}

Body Tighten(const LooseBody& loose) {
  Body body;
  for (const LooseOp& entry : loose.ops) {
    Op op = entry.op;
    op.edge_begin = static_cast<std::uint32_t>(body.edges.size());
    op.access_begin = static_cast<std::uint32_t>(body.accesses.size());
    op.point_begin = static_cast<std::uint32_t>(body.points.size());
    body.ops.push_back(op);
    body.edges.insert(body.edges.end(), entry.edges.begin(), entry.edges.end());
    body.accesses.insert(body.accesses.end(), entry.accesses.begin(), entry.accesses.end());
    body.points.insert(body.points.end(), entry.points.begin(), entry.points.end());
  }
  body.end_point_begin = static_cast<std::uint32_t>(body.points.size());
  body.points.insert(body.points.end(), loose.end_points.begin(), loose.end_points.end());
  body.carries = loose.carries;
  return body;
}

struct NamedBody {
  Body Program::*body;
  const char* name;
};
constexpr std::array<NamedBody, 3> kBodies = {
    {{&Program::init, "init"}, {&Program::warmup, "warmup"}, {&Program::step, "step"}}};

void DeleteOp(LooseBody& body, std::uint32_t gone) {
  // Its memory points happen at the same moment as before: ahead of the op that followed.
  std::vector<MemoryPoint>& heirs =
      gone + 1 < body.ops.size() ? body.ops[gone + 1].points : body.end_points;
  heirs.insert(heirs.begin(), body.ops[gone].points.begin(), body.ops[gone].points.end());
  body.ops.erase(body.ops.begin() + gone);
  for (LooseOp& entry : body.ops) {
    std::erase(entry.edges, Edge::FromOp(OpId(gone)));
    for (Edge& edge : entry.edges) {
      if (!edge.is_carried() && edge.value > gone) {
        --edge.value;
      }
    }
  }
  for (OpId& carry : body.carries) {
    if (carry == OpId(gone)) {
      carry = OpId();
    } else if (carry.valid() && carry.value > gone) {
      --carry.value;
    }
  }
}

// Makes all mutants of one body.
class BodyMutator {
 public:
  BodyMutator(const Program& program, const NamedBody& named,
              const std::function<void(const Mutant&)>& visit)
      : named_(named), visit_(visit), loose_(Loosen(program.*named.body)) {
    mutant_.program = program;
  }

  void Run() {
    for (std::uint32_t i = 0; i < loose_.ops.size(); ++i) {
      MutateEdges(i);
      MutatePoints(i);
    }
    MutatePoints(static_cast<std::uint32_t>(loose_.ops.size()));
    for (std::size_t slot = 0; slot < loose_.carries.size(); ++slot) {
      if (loose_.carries[slot].valid()) {
        LooseBody body = loose_;
        body.carries[slot] = OpId();
        Visit(body, Mutation::kDeleteEvent, "carry " + std::to_string(slot) + " deleted");
      }
    }
  }

 private:
  void Visit(const LooseBody& body, Mutation mutation, const std::string& what) {
    mutant_.program.*named_.body = Tighten(body);
    mutant_.mutation = mutation;
    mutant_.what = std::string(named_.name) + ": " + what;
    visit_(mutant_);
  }
  [[nodiscard]] std::string Name(std::uint32_t i) const {
    return i < loose_.ops.size() ? OpName(mutant_.program, loose_.ops[i].op) : "end";
  }

  void MutateEdges(std::uint32_t i) {
    for (std::uint32_t e = 0; e < loose_.ops[i].edges.size(); ++e) {
      LooseBody body = loose_;
      body.ops[i].edges.erase(body.ops[i].edges.begin() + e);
      Visit(body, Mutation::kDeleteEdge,
            "edge " + std::to_string(e) + " of " + Name(i) + " deleted");
    }
    std::size_t deleted = 0;
    LooseBody body = loose_;
    for (LooseOp& entry : body.ops) {
      deleted += std::erase(entry.edges, Edge::FromOp(OpId(i)));
    }
    if (deleted > 1) {  // one edge: done above
      Visit(body, Mutation::kDeleteEvent, "event of " + Name(i) + " deleted");
    }
    const OpCode code = mutant_.program.ShapeOf(loose_.ops[i].op).code;
    if (code == OpCode::kHostWait || code == OpCode::kStreamWait) {
      LooseBody shorter = loose_;
      DeleteOp(shorter, i);
      Visit(shorter, Mutation::kDeleteWait, Name(i) + " deleted");
    }
  }

  // Points before op i, or at the end.
  void MutatePoints(std::uint32_t i) {
    const auto at = [&](LooseBody& body, std::uint32_t op) -> std::vector<MemoryPoint>& {
      return op < body.ops.size() ? body.ops[op].points : body.end_points;
    };
    const std::size_t count = at(loose_, i).size();
    for (std::uint32_t p = 0; p < count; ++p) {
      const MemoryPoint point = at(loose_, i)[p];
      const std::string name = "point " + std::to_string(p) + " before " + Name(i);
      LooseBody dropped = loose_;
      at(dropped, i).erase(at(dropped, i).begin() + p);
      Visit(dropped, Mutation::kDropPoint, name + " dropped");
      LooseBody doubled = loose_;
      at(doubled, i).insert(at(doubled, i).begin() + p, point);
      Visit(doubled, Mutation::kDuplicatePoint, name + " duplicated");
      if (point.kind == PointKind::kFree && i > 0) {
        at(dropped, i - 1).push_back(point);
        Visit(dropped, Mutation::kMoveFreeEarlier, name + " moved one op earlier");
      }
    }
  }

  const NamedBody& named_;
  const std::function<void(const Mutant&)>& visit_;
  LooseBody loose_;
  Mutant mutant_;
};

}  // namespace

void ForEachMutant(const Program& program, const std::function<void(const Mutant&)>& visit) {
  for (const NamedBody& named : kBodies) {
    BodyMutator(program, named, visit).Run();
  }
  Mutant mutant{program, Mutation::kShrinkBuffer, ""};
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    Buffer& buffer = mutant.program.buffers[b];
    const Buffer whole = buffer;
    if (buffer.size.value > 0) {
      buffer.size -= Bytes(1);
      buffer.pieces = {};  // they would no longer add up, which is another rule
      mutant.what = "buffer " + std::to_string(b) + " shrunk";
      mutant.mutation = Mutation::kShrinkBuffer;
      visit(mutant);
      buffer = whole;
    }
    if (buffer.flat == 0) {  // slices of a flat tensor are on the device: rule 1
      buffer.on_host = !buffer.on_host;
      mutant.what = "buffer " + std::to_string(b) + " on the other side";
      mutant.mutation = Mutation::kSwitchSide;
      visit(mutant);
      buffer = whole;
    }
  }
}

void ForEachSwappedPair(const Program& program,
                        const std::function<void(const Program&, const std::string&)>& visit) {
  for (const NamedBody& named : kBodies) {
    const LooseBody loose = Loosen(program.*named.body);
    std::vector<std::uint32_t> collectives;
    for (std::uint32_t i = 0; i < loose.ops.size(); ++i) {
      if (InfoOf(program.ShapeOf(loose.ops[i].op).code).is_collective) {
        collectives.push_back(i);
      }
    }
    for (std::size_t c = 0; c + 1 < collectives.size(); ++c) {
      const OpId a(collectives[c]);
      const OpId b(collectives[c + 1]);
      LooseBody swapped = loose;
      std::swap(swapped.ops[a.value], swapped.ops[b.value]);
      const auto rename = [&](OpId op) { return op == a ? b : op == b ? a : op; };
      for (LooseOp& entry : swapped.ops) {
        for (Edge& edge : entry.edges) {
          edge = edge.is_carried() ? edge : Edge::FromOp(rename(edge.op()));
        }
      }
      for (OpId& carry : swapped.carries) {
        carry = rename(carry);
      }
      Program mutant = program;
      mutant.*named.body = Tighten(swapped);
      visit(mutant, std::string(named.name) + ": " + OpName(program, loose.ops[a.value].op) +
                        " and " + OpName(program, loose.ops[b.value].op) + " swapped");
    }
  }
}

}  // namespace shardwright
