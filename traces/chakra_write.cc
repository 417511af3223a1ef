#include "traces/chakra_write.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "core/threads.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// Numbers of Chakra's execution traces (et_def.proto of schema 0.0.4). Fields of Node:
constexpr int kNodeId = 1, kNodeName = 2, kNodeType = 3, kNodeCtrlDeps = 4, kNodeDataDeps = 5,
              kNodeStart = 6, kNodeDuration = 7, kNode = 10;
// Members of AttributeProto:
constexpr int kAttributeName = 1, kInt64 = 9, kUint64 = 13, kBool = 27, kString = 29;

enum class ChakraType : std::uint8_t { kLoad = 2, kStore = 3, kCompute = 4, kCollective = 7 };

void PutVarint(std::uint64_t value, std::string& out) {
  constexpr std::uint64_t kSeven = 0x7f;
  for (; value > kSeven; value >>= 7) {
    out += static_cast<char>((value & kSeven) | 0x80);
  }
  out += static_cast<char>(value);
}

// A message of protocol buffers as bytes: each field is its number and wire type, then its value.
class Message {
 public:
  void Number(int field, std::uint64_t value) {
    PutVarint(static_cast<std::uint64_t>(field) << 3, text_);
    PutVarint(value, text_);
  }
  void Text(int field, std::string_view text) {
    PutVarint(static_cast<std::uint64_t>(field) << 3 | 2, text_);
    PutVarint(text.size(), text_);
    text_ += text;
  }
  void List(int field, const std::vector<std::uint64_t>& values) {
    std::string packed;
    for (const std::uint64_t value : values) {
      PutVarint(value, packed);
    }
    if (!packed.empty()) {
      Text(field, packed);
    }
  }
  void Attribute(int field, std::string_view name, int member, std::uint64_t value) {
    Message attribute;
    attribute.Text(kAttributeName, name);
    attribute.Number(member, value);
    Text(field, attribute.text_);
  }
  void Attribute(int field, std::string_view name, std::string_view value) {
    Message attribute;
    attribute.Text(kAttributeName, name);
    attribute.Text(kString, value);
    Text(field, attribute.text_);
  }
  // Behind its size, as messages of a file stand.
  void WriteTo(std::string& out) const {
    PutVarint(text_.size(), out);
    out += text_;
  }

 private:
  std::string text_;
};

// CollectiveCommType.
std::optional<std::uint64_t> CommTypeOf(OpCode code) {
  static const std::map<OpCode, std::uint64_t> kTypes = {
      {OpCode::kAllReduce, 0}, {OpCode::kAllGather, 2}, {OpCode::kBroadcast, 5},
      {OpCode::kAllToAll, 6},  {OpCode::kPermute, 6},   {OpCode::kReduceScatter, 7},
      {OpCode::kBarrier, 9}};
  const auto found = kTypes.find(code);
  return found == kTypes.end() ? std::nullopt : std::optional(found->second);
}

// Numbers from 1 for every group and the ranks that it holds somewhere: two groups of the same
// ranks are two communicators.
using GroupNumbers = std::map<std::pair<std::size_t, std::vector<std::int64_t>>, std::size_t>;
GroupNumbers NumberGroups(const Program& program) {
  GroupNumbers numbers;
  for (std::size_t i = 0; i < program.groups.size(); ++i) {
    for (std::int64_t rank = 0; rank < MeshOf(program).RankCount(); ++rank) {
      if (program.groups[i].size > 1) {
        numbers.try_emplace({i, MembersOf(program.groups[i], rank)}, numbers.size() + 1);
      }
    }
  }
  return numbers;
}

std::uint64_t Microseconds(SimTime time) {
  return static_cast<std::uint64_t>(std::llround(ToSeconds(time).value * 1e6));
}

void AddSizes(const Program& program, const OpShape& shape, Message& node) {
  double flops = 0.0;
  std::int64_t bytes = shape.bytes.value;
  for (const Kernel& kernel : program.KernelsOf(shape)) {
    flops += kernel.flops.value;
    bytes += kernel.read.value + kernel.written.value;
  }
  node.Attribute(kNode, "num_ops", kInt64, static_cast<std::uint64_t>(std::llround(flops)));
  node.Attribute(kNode, "tensor_size", kUint64, static_cast<std::uint64_t>(bytes));
}

void AddCollective(const Program& program, const OpShape& shape, const GroupNumbers& numbers,
                   std::int64_t rank, Message& node) {
  const Group& group = program.groups[shape.group.value];
  node.Attribute(kNode, "comm_type", kInt64, *CommTypeOf(shape.code));
  // Of what this rank puts in.
  const std::int64_t parts = shape.code == OpCode::kAllGather ? group.size : 1;
  node.Attribute(kNode, "comm_size", kInt64, static_cast<std::uint64_t>(shape.bytes.value / parts));
  const auto number = numbers.find({shape.group.value, MembersOf(group, rank)});
  if (number != numbers.end()) {
    node.Attribute(kNode, "pg_name", std::to_string(number->second));
  }
}

ChakraType TypeOf(OpCode code) {
  if (CommTypeOf(code).has_value()) {
    return ChakraType::kCollective;
  }
  return code == OpCode::kCopyH2d   ? ChakraType::kLoad
         : code == OpCode::kCopyD2h ? ChakraType::kStore
                                    : ChakraType::kCompute;
}

// Spans of the last step, by op.
std::map<std::uint32_t, const Span*> LastStep(const Trace& trace) {
  std::map<std::uint32_t, const Span*> spans;
  std::uint32_t last = 0;
  for (const Span& span : trace.spans) {
    last = span.body == BodyKind::kStep ? std::max(last, span.step) : last;
  }
  for (const Span& span : trace.spans) {
    if (span.body == BodyKind::kStep && span.step == last) {
      spans.try_emplace(span.op.value, &span);
    }
  }
  return spans;
}

std::string MetadataOf(const Program& program, std::int64_t rank) {
  constexpr int kVersion = 1, kAttribute = 2;
  Message metadata;
  metadata.Text(kVersion, "0.0.4");
  metadata.Attribute(kAttribute, "source", "simulated");
  metadata.Attribute(kAttribute, "rank", kUint64, static_cast<std::uint64_t>(rank));
  metadata.Attribute(kAttribute, "ranks", kUint64,
                     static_cast<std::uint64_t>(MeshOf(program).RankCount()));
  std::string out;
  metadata.WriteTo(out);
  return out;
}

std::string TraceOf(const Program& program, const std::map<std::uint32_t, const Span*>& spans,
                    const GroupNumbers& numbers, std::int64_t rank) {
  SimTime begin = spans.empty() ? SimTime() : spans.begin()->second->start;
  for (const auto& [op, span] : spans) {
    begin = std::min(begin, span->start);
  }
  std::string out = MetadataOf(program, rank);
  std::array<std::optional<std::uint32_t>, kStreamCount> before{};  // of each stream
  for (std::uint32_t i = 0; i < program.step.ops.size(); ++i) {
    ThrowIfStopped();
    const Op& op = program.step.ops[i];
    const OpShape& shape = program.ShapeOf(op);
    Message node;
    node.Number(kNodeId, i);
    node.Text(kNodeName, OpName(program, op));
    node.Number(kNodeType, static_cast<std::uint64_t>(TypeOf(shape.code)));
    std::vector<std::uint64_t> needed;
    for (const Edge& edge : program.step.EdgesOf(OpId(i))) {
      if (!edge.is_carried()) {
        needed.push_back(edge.op().value);
      }
    }
    std::optional<std::uint32_t>& last = before[static_cast<std::size_t>(shape.stream)];
    if (last.has_value()) {
      node.List(kNodeCtrlDeps, {*last});
    }
    last = i;
    node.List(kNodeDataDeps, needed);
    if (const auto span = spans.find(i); span != spans.end()) {
      node.Number(kNodeStart, Microseconds(span->second->start - begin));
      node.Number(kNodeDuration, Microseconds(span->second->end - span->second->start));
    }
    node.Attribute(kNode, "is_cpu_op", kBool, InfoOf(shape.code).runs_on_host ? 1 : 0);
    if (CommTypeOf(shape.code).has_value()) {
      AddCollective(program, shape, numbers, rank, node);
    } else {
      AddSizes(program, shape, node);
    }
    node.Attribute(kNode, "stream", NameOf(shape.stream));
    node.Attribute(kNode, "phase", NameOf(op.phase));
    node.WriteTo(out);
  }
  return out;
}

// ASTRA-sim's --comm-group-configuration: the ranks of every process group that a pg_name names.
std::string ChakraGroups(const Program& program) {
  std::map<std::size_t, std::string> rows;
  for (const auto& [group, number] : NumberGroups(program)) {
    rows[number] = "  \"" + std::to_string(number) + "\": [" + Listed(group.second) + "]";
  }
  std::string text = "{\n";
  for (const auto& [number, row] : rows) {
    text += row + (number == rows.size() ? "\n" : ",\n");
  }
  return text + "}\n";
}

}  // namespace

std::vector<OutputFile> ChakraFiles(const Program& program, const Trace& trace,
                                    const std::string& folder) {
  if (MeshOf(program).RankCount() > kMostChakraRanks) {
    throw InputError("--chakra", std::to_string(MeshOf(program).RankCount()) + " ranks",
                     "at most " + std::to_string(kMostChakraRanks) + ", a file each");
  }
  const auto spans = LastStep(trace);
  const GroupNumbers numbers = NumberGroups(program);
  std::vector<OutputFile> files;
  for (std::int64_t rank = 0; rank < MeshOf(program).RankCount(); ++rank) {
    files.push_back({.path = folder + "/step." + std::to_string(rank) + ".et",
                     .content = TraceOf(program, spans, numbers, rank),
                     .is_in_folder = true});
  }
  files.push_back({.path = folder + "/comm_groups.json",
                   .content = ChakraGroups(program),
                   .is_in_folder = true});
  return files;
}

}  // namespace shardwright
