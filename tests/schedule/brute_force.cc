#include "tests/schedule/brute_force.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>

namespace shardwright {
namespace {

std::vector<const Body*> AllBodies(const Program& program) {
  return {&program.init, &program.warmup, &program.step};
}

bool RuleOneHolds(const Program& program) {
  std::set<std::uint32_t> set_slots;
  for (const Body* body : AllBodies(program)) {
    for (std::uint32_t slot = 0; slot < body->carries.size(); ++slot) {
      const OpId op = body->carries[slot];
      if (op.valid()) {
        if (op.value >= body->ops.size()) {
          return false;
        }
        set_slots.insert(slot);
      }
    }
  }
  for (const Body* body : AllBodies(program)) {
    for (std::uint32_t i = 0; i < body->ops.size(); ++i) {
      const Op& op = body->ops[i];
      if (op.shape.value >= program.shapes.size()) {
        return false;
      }
      const OpShape& shape = program.shapes[op.shape.value];
      const OpCodeInfo& info = InfoOf(shape.code);
      if (info.runs_on_host != (shape.stream == Stream::kHost) || shape.bytes.value < 0 ||
          (info.is_collective && shape.group.value >= program.groups.size())) {
        return false;
      }
      for (const Edge edge : body->EdgesOf(OpId(i))) {
        if (edge.is_carried() ? set_slots.count(edge.slot()) == 0 : edge.value >= i) {
          return false;
        }
      }
    }
    for (const Access& access : body->accesses) {
      if (access.buffer.value >= program.buffers.size() || access.bytes.value < 0) {
        return false;
      }
    }
    for (const MemoryPoint& point : body->points) {
      if (point.buffer.value >= program.buffers.size()) {
        return false;
      }
    }
  }
  for (const Buffer& buffer : program.buffers) {
    if (buffer.size.value < 0) {
      return false;
    }
  }
  return true;
}

bool RuleSevenHolds(const Program& program) {
  for (const Body* body : AllBodies(program)) {
    for (std::uint32_t i = 0; i < body->ops.size(); ++i) {
      const OpShape& shape = program.shapes[body->ops[i].shape.value];
      std::int64_t read = 0;
      std::int64_t written = 0;
      for (const Access& access : body->AccessesOf(OpId(i))) {
        if (access.bytes.value > program.buffers[access.buffer.value].size.value) {
          return false;
        }
        read += access.mode == AccessMode::kWrite ? 0 : access.bytes.value;
        written += access.mode == AccessMode::kRead ? 0 : access.bytes.value;
      }
      const std::int64_t whole = shape.bytes.value;
      const std::int64_t ranks = shape.group.valid() ? program.groups[shape.group.value].size : 1;
      const std::int64_t part = whole / ranks + (whole % ranks != 0 ? 1 : 0);
      if (shape.code == OpCode::kAllGather && (read < part || written < whole)) {
        return false;
      }
      if (shape.code == OpCode::kReduceScatter && (read < whole || written < part)) {
        return false;
      }
      const bool exchanges = shape.code == OpCode::kAllReduce || shape.code == OpCode::kBroadcast ||
                             shape.code == OpCode::kAllToAll;
      if (exchanges && (read < whole || written < whole)) {
        return false;
      }
      const auto accesses = body->AccessesOf(OpId(i));
      const bool reads = std::any_of(accesses.begin(), accesses.end(), [](const Access& access) {
        return access.mode != AccessMode::kWrite;
      });
      const bool writes = std::any_of(accesses.begin(), accesses.end(), [](const Access& access) {
        return access.mode != AccessMode::kRead;
      });
      if (shape.code == OpCode::kCopyH2d && (written < whole || (reads && read < whole))) {
        return false;
      }
      if (shape.code == OpCode::kCopyD2h && (read < whole || (writes && written < whole))) {
        return false;
      }
    }
  }
  return true;
}

bool RuleNineHolds(const Program& program) {
  for (const Body* body : AllBodies(program)) {
    for (std::uint32_t i = 0; i < body->ops.size(); ++i) {
      const OpShape& shape = program.shapes[body->ops[i].shape.value];
      if (shape.code == OpCode::kInitialize) {
        continue;
      }
      for (const Access& access : body->AccessesOf(OpId(i))) {
        const bool reads = access.mode != AccessMode::kWrite;
        const bool writes = access.mode != AccessMode::kRead;
        bool host_side = shape.stream == Stream::kHost;
        if (shape.code == OpCode::kCopyH2d || shape.code == OpCode::kCopyD2h) {
          if (reads && writes) {
            return false;
          }
          host_side = reads == (shape.code == OpCode::kCopyH2d);
        }
        const Buffer& buffer = program.buffers[access.buffer.value];
        const bool is_paged_state = buffer.on_host && buffer.owner != Stream::kHost &&
                                    buffer.category == Category::kOptimizerState;
        if (is_paged_state && shape.code == OpCode::kOptimizerStep) {
          continue;
        }
        if (buffer.on_host != host_side) {
          return false;
        }
      }
    }
  }
  return true;
}

// One thing that happens in host order: an op (instance number) or a memory point.
struct Event {
  std::optional<std::size_t> instance;
  MemoryPoint point;
  std::size_t pass = 0;
};

std::vector<Event> EventsOf(const BruteForceOrder& order) {
  std::vector<Event> events;
  for (std::size_t pass = 0; pass < order.passes().size(); ++pass) {
    const Body& body = *order.passes()[pass];
    for (std::size_t i = 0; i < body.ops.size(); ++i) {
      for (const MemoryPoint& point : body.PointsBefore(OpId(i))) {
        events.push_back({std::nullopt, point, pass});
      }
      events.push_back({order.FirstOf(pass) + i, {}, pass});
    }
    for (const MemoryPoint& point : body.PointsAtEnd()) {
      events.push_back({std::nullopt, point, pass});
    }
  }
  return events;
}

// Rule 6 for the free at events[e] of a life with these accesses.
bool FreeIsOrdered(const Program& program, const BruteForceOrder& order,
                   const std::vector<Event>& events, std::size_t e, const Allocation& life) {
  const MemoryPoint& point = events[e].point;
  const Stream owner = program.buffers[point.buffer.value].owner;
  for (std::size_t later = e + 1; later < events.size(); ++later) {
    if (!events[later].instance) {
      continue;
    }
    const std::size_t next = *events[later].instance;
    if (order.instances()[next].stream != owner) {
      continue;
    }
    for (const auto& [access, mode] : life.accesses) {
      const auto stream = static_cast<unsigned>(order.instances()[access].stream);
      const bool is_recorded = ((point.recorded_streams >> stream) & 1U) != 0;
      if (!is_recorded && !order.Before(access, next)) {
        return false;
      }
    }
    return true;
  }
  return true;
}

// Rules 4 and 5 for one life.
void CheckLife(const Program& program, const BruteForceOrder& order, const Allocation& life,
               std::set<int>& broken) {
  for (const auto& [reader, mode] : life.accesses) {
    bool is_written = mode == AccessMode::kWrite || program.buffers[life.buffer.value].zero_filled;
    for (const auto& [writer, other_mode] : life.accesses) {
      is_written = is_written || (other_mode != AccessMode::kRead && order.Before(writer, reader));
    }
    if (!is_written) {
      broken.insert(4);
    }
    for (const auto& [other, other_mode] : life.accesses) {
      const bool conflict = mode != AccessMode::kRead || other_mode != AccessMode::kRead;
      if (conflict && other != reader && !order.Before(other, reader) &&
          !order.Before(reader, other)) {
        broken.insert(5);
      }
    }
  }
}

// Walks all events; reports each life as it ends and each broken rule 2, 3 or 6.
class LifeWalk {
 public:
  LifeWalk(const Program& program, const BruteForceOrder& order)
      : program_(program), order_(order), events_(EventsOf(order)) {}

  void Run() {
    for (std::size_t e = 0; e < events_.size(); ++e) {
      if (!events_[e].instance) {
        VisitPoint(e);
        continue;
      }
      const auto& instance = order_.instances()[*events_[e].instance];
      for (const Access& access : instance.body->AccessesOf(OpId(instance.op))) {
        const auto life = alive_.find(access.buffer);
        if (life == alive_.end()) {
          broken.insert(3);
        } else {
          life->second.life.accesses.emplace_back(*events_[e].instance, access.mode);
        }
      }
    }
    for (auto& [buffer, entry] : alive_) {
      lives.push_back(entry.life);
    }
  }

  std::vector<Allocation> lives;
  std::set<int> broken;

 private:
  struct Alive {
    Allocation life;
    bool is_once = false;
  };

  void VisitPoint(std::size_t e) {
    const MemoryPoint& point = events_[e].point;
    const auto found = alive_.find(point.buffer);
    if (point.kind == PointKind::kFree) {
      if (found == alive_.end()) {
        broken.insert(2);
        return;
      }
      if (found->second.is_once) {
        broken.insert(2);
      }
      if (!FreeIsOrdered(program_, order_, events_, e, found->second.life)) {
        broken.insert(6);
      }
      lives.push_back(found->second.life);
      alive_.erase(found);
      return;
    }
    const bool is_once = point.kind == PointKind::kAllocOnce;
    if (found != alive_.end()) {
      if (!(is_once && found->second.is_once)) {
        broken.insert(2);
      }
      return;
    }
    alive_[point.buffer] = {{point.buffer, events_[e].pass, {}}, is_once};
  }

  const Program& program_;
  const BruteForceOrder& order_;
  std::vector<Event> events_;
  std::map<BufferId, Alive> alive_;
};

using CollectiveKey = std::tuple<OpCode, std::int64_t, DType>;

// Per group, the collectives of a body in issue order.
std::map<std::uint32_t, std::vector<CollectiveKey>> CollectivesOf(const Program& program,
                                                                  const Body& body) {
  std::map<std::uint32_t, std::vector<CollectiveKey>> result;
  for (const Op& op : body.ops) {
    const OpShape& shape = program.shapes[op.shape.value];
    if (InfoOf(shape.code).is_collective) {
      result[shape.group.value].emplace_back(shape.code, shape.bytes.value, shape.dtype);
    }
  }
  return result;
}

// Depth-first search for a cycle. Colour 1 = on the path, 2 = done.
bool HasCycle(const std::map<std::string, std::set<std::string>>& after, const std::string& node,
              std::map<std::string, int>& colour) {
  colour[node] = 1;
  const auto found = after.find(node);
  if (found != after.end()) {
    for (const std::string& next : found->second) {
      const int seen = colour[next];
      if (seen == 1 || (seen == 0 && HasCycle(after, next, colour))) {
        return true;
      }
    }
  }
  colour[node] = 2;
  return false;
}

bool CanAllRun(std::span<const Program* const> classes) {
  std::map<std::string, std::set<std::string>> after;
  for (std::size_t c = 0; c < classes.size(); ++c) {
    const Program& program = *classes[c];
    const BruteForceOrder order(program);
    // Names of the nodes: "class.instance", or "group:number" for collectives.
    std::vector<std::string> names;
    std::map<std::uint32_t, int> issued;
    for (std::size_t i = 0; i < order.instances().size(); ++i) {
      const auto& instance = order.instances()[i];
      const OpShape& shape = program.shapes[instance.body->ops[instance.op].shape.value];
      if (!InfoOf(shape.code).is_collective) {
        names.push_back(std::to_string(c) + "." + std::to_string(i));
        continue;
      }
      const int number = issued[shape.group.value]++;
      const std::string prefix = std::to_string(shape.group.value) + ":";
      names.push_back(prefix + std::to_string(number));
      if (number > 0) {
        after[prefix + std::to_string(number - 1)].insert(names.back());
      }
    }
    for (std::size_t y = 0; y < names.size(); ++y) {
      for (std::size_t x = 0; x < y; ++x) {
        if (order.Before(x, y)) {
          after[names[x]].insert(names[y]);
        }
      }
    }
  }
  std::map<std::string, int> colour;
  for (const auto& [node, next] : after) {
    if (colour[node] == 0 && HasCycle(after, node, colour)) {
      return false;
    }
  }
  return true;
}

}  // namespace

BruteForceOrder::BruteForceOrder(const Program& program)
    : passes_({&program.init, &program.warmup, &program.step, &program.step, &program.step}) {
  for (std::size_t pass = 0; pass < passes_.size(); ++pass) {
    first_of_pass_.push_back(instances_.size());
    for (std::uint32_t i = 0; i < passes_[pass]->ops.size(); ++i) {
      const OpShape& shape = program.shapes[passes_[pass]->ops[i].shape.value];
      instances_.push_back({passes_[pass], pass, i, shape.stream});
    }
  }
  words_ = instances_.size() / 64 + 1;
  before_.assign(instances_.size() * words_, 0);
  std::map<std::uint32_t, std::size_t> slots;  // what each slot holds
  for (std::size_t y = 0; y < instances_.size(); ++y) {
    const Instance& mine = instances_[y];
    if (y == first_of_pass_[mine.pass]) {
      // Slots set by all passes before this one, the latest last.
      slots.clear();
      for (std::size_t pass = 0; pass < mine.pass; ++pass) {
        const std::vector<OpId>& carries = passes_[pass]->carries;
        for (std::uint32_t slot = 0; slot < carries.size(); ++slot) {
          if (carries[slot].valid()) {
            slots[slot] = first_of_pass_[pass] + carries[slot].value;
          }
        }
      }
    }
    for (std::size_t x = y; x-- > 0;) {  // (a): the nearest op of the stream brings the others
      if (instances_[x].stream == mine.stream) {
        AddBefore(x, y);
        break;
      }
    }
    for (const Edge edge : mine.body->EdgesOf(OpId(mine.op))) {  // (b)
      if (!edge.is_carried()) {
        AddBefore(first_of_pass_[mine.pass] + edge.value, y);
      } else if (slots.count(edge.slot()) != 0) {
        AddBefore(slots[edge.slot()], y);
      }
    }
    for (std::size_t x = y; x-- > 0;) {  // (c)
      if (instances_[x].stream == Stream::kHost) {
        AddBefore(x, y);
        break;
      }
    }
  }
}

void BruteForceOrder::AddBefore(std::size_t x, std::size_t y) {
  for (std::size_t w = 0; w < words_; ++w) {
    before_[y * words_ + w] |= before_[x * words_ + w];
  }
  before_[y * words_ + x / 64] |= std::uint64_t{1} << (x % 64);
}

std::vector<Allocation> AllocationsOf(const Program& program, const BruteForceOrder& order) {
  LifeWalk walk(program, order);
  walk.Run();
  return walk.lives;
}

bool AreOrdered(const BruteForceOrder& order, const Allocation& a, const Allocation& b) {
  bool a_first = true;
  bool b_first = true;
  for (const auto& [x, x_mode] : a.accesses) {
    for (const auto& [y, y_mode] : b.accesses) {
      a_first = a_first && order.Before(x, y);
      b_first = b_first && order.Before(y, x);
    }
  }
  return a_first || b_first;
}

std::set<int> BruteForceBrokenRules(const Program& program) {
  if (!RuleOneHolds(program)) {
    return {1};
  }
  const BruteForceOrder order(program);
  LifeWalk walk(program, order);
  walk.Run();
  std::set<int> broken = walk.broken;
  for (const Allocation& life : walk.lives) {
    CheckLife(program, order, life, broken);
    for (const Allocation& other : walk.lives) {
      if (&other != &life && other.buffer == life.buffer && !AreOrdered(order, life, other)) {
        broken.insert(5);
      }
    }
  }
  if (!RuleSevenHolds(program)) {
    broken.insert(7);
  }
  if (!RuleNineHolds(program)) {
    broken.insert(9);
  }
  return broken;
}

bool BruteForceRanksAgree(std::span<const Program* const> classes) {
  const Program& a = *classes[0];
  for (const Program* b : classes) {
    if (a.groups.size() != b->groups.size()) {
      return false;
    }
    for (std::size_t g = 0; g < a.groups.size(); ++g) {
      if (a.groups[g].size != b->groups[g].size || a.groups[g].stride != b->groups[g].stride) {
        return false;
      }
    }
    const auto first = [](const Program& p) {
      return p.warmup.ops.empty() && p.warmup.points.empty() ? &p.step : &p.warmup;
    };
    if (CollectivesOf(a, a.init) != CollectivesOf(*b, b->init) ||
        CollectivesOf(a, *first(a)) != CollectivesOf(*b, *first(*b)) ||
        CollectivesOf(a, a.step) != CollectivesOf(*b, b->step)) {
      return false;
    }
  }
  return CanAllRun(classes);
}

}  // namespace shardwright
