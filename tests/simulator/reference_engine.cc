#include "tests/simulator/reference_engine.h"

#include <algorithm>

namespace shardwright {
namespace {

// One op in the unrolled list of all bodies, with the positions of what it waits for.
struct Node {
  OpShape shape;
  Price price;
  std::int64_t before_on_stream = -1;
  std::int64_t before_in_group = -1;
  std::vector<std::int64_t> waits;
  ReferenceTime time;
  std::int64_t host_after = 0;  // host clock once it is issued
};

std::vector<Node> Unroll(const Program& program, const PriceTable& prices, int steps) {
  std::vector<Node> nodes;
  std::vector<std::int64_t> slots(program.carry_slot_count, -1);
  for (int b = 0; b <= steps; ++b) {
    const Body& body = b == 0                                  ? program.init
                       : b == 1 && !program.warmup.ops.empty() ? program.warmup
                                                               : program.step;
    const auto base = static_cast<std::int64_t>(nodes.size());
    for (std::size_t i = 0; i < body.size(); ++i) {
      Node node;
      node.shape = program.ShapeOf(body.ops[i]);
      node.price = prices.prices[body.ops[i].shape.value];
      for (std::int64_t j = static_cast<std::int64_t>(nodes.size()) - 1; j >= 0; --j) {
        const OpShape& other = nodes[static_cast<std::size_t>(j)].shape;
        if (node.before_on_stream < 0 && other.stream == node.shape.stream) {
          node.before_on_stream = j;
        }
        if (node.before_in_group < 0 && node.shape.group.valid() &&
            other.group == node.shape.group) {
          node.before_in_group = j;
        }
      }
      for (const Edge edge : body.EdgesOf(OpId(i))) {
        const std::int64_t target = edge.is_carried() ? slots[edge.slot()] : base + edge.op().value;
        if (target >= 0) {
          node.waits.push_back(target);
        }
      }
      nodes.push_back(node);
    }
    for (std::size_t s = 0; s < body.carries.size(); ++s) {
      if (body.carries[s].valid()) {
        slots[s] = base + body.carries[s].value;
      }
    }
  }
  return nodes;
}

// The times of node i that follow from the present times of all others.
void Update(std::vector<Node>& nodes, std::size_t i, std::int64_t wake_up) {
  Node& node = nodes[i];
  const std::int64_t host = i == 0 ? 0 : nodes[i - 1].host_after;
  const auto end_of = [&](std::int64_t j) {
    return j < 0 ? 0 : nodes[static_cast<std::size_t>(j)].time.end;
  };
  if (node.shape.code == OpCode::kHostWait) {
    node.time.issued = host;
    std::int64_t end = host;
    for (const std::int64_t w : node.waits) {
      end = std::max(end, end_of(w) + wake_up);
    }
    node.time.start = node.time.end = node.host_after = end;
    return;
  }
  node.time.issued = host + node.price.first_launch.value;
  node.host_after = host + node.price.issue.value;
  std::int64_t start = std::max(node.time.issued, end_of(node.before_on_stream));
  start = std::max(start, end_of(node.before_in_group));
  for (const std::int64_t w : node.waits) {
    start = std::max(start, end_of(w));
  }
  node.time.start = start;
  node.time.end =
      std::max(start + node.price.duration.value, node.host_after + node.price.tail.value);
}

}  // namespace

ReferenceResult RunReference(const Program& program, const PriceTable& prices, int steps) {
  std::vector<Node> nodes = Unroll(program, prices, steps);
  // Backwards through the list, so that nothing here relies on issue order being a valid order.
  bool changed = true;
  while (changed) {
    changed = false;
    for (std::size_t i = nodes.size(); i-- > 0;) {
      const Node before = nodes[i];
      Update(nodes, i, prices.wake_up.value);
      changed = changed || before.time.start != nodes[i].time.start ||
                before.time.end != nodes[i].time.end || before.host_after != nodes[i].host_after ||
                before.time.issued != nodes[i].time.issued;
    }
  }
  ReferenceResult result;
  std::size_t next = 0;
  std::int64_t front = 0;
  for (int b = 0; b <= steps; ++b) {
    const Body& body = b == 0                                  ? program.init
                       : b == 1 && !program.warmup.ops.empty() ? program.warmup
                                                               : program.step;
    std::vector<ReferenceTime> times;
    for (std::size_t i = 0; i < body.size(); ++i, ++next) {
      times.push_back(nodes[next].time);
      front = std::max({front, nodes[next].time.end, nodes[next].host_after});
    }
    result.bodies.push_back(times);
    result.fronts.push_back(front);
  }
  return result;
}

}  // namespace shardwright
