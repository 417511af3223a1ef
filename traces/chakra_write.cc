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
#include "schedule/group_place.h"
#include "traces/internal/chakra_words.h"
#include "traces/internal/protobuf.h"

namespace shardwright {
namespace {

using internal::ChakraType;
using internal::Wire;

// Protocol buffers as bytes: a field is its number and wire type, then its value.

void PutVarint(std::uint64_t value, std::string& out) {
  constexpr std::uint64_t kSeven = 0x7f;
  for (; value > kSeven; value >>= 7) {
    out += static_cast<char>((value & kSeven) | 0x80);
  }
  out += static_cast<char>(value);
}

void PutTag(int field, Wire wire, std::string& out) {
  PutVarint(static_cast<std::uint64_t>(field) << 3 | static_cast<std::uint64_t>(wire), out);
}

void PutNumber(int field, std::uint64_t value, std::string& out) {
  PutTag(field, Wire::kVarint, out);
  PutVarint(value, out);
}

void PutText(int field, std::string_view text, std::string& out) {
  PutTag(field, Wire::kBytes, out);
  PutVarint(text.size(), out);
  out += text;
}

void PutList(int field, const std::vector<std::uint64_t>& values, std::string& out) {
  if (values.empty()) {
    return;
  }
  std::string packed;
  for (const std::uint64_t value : values) {
    PutVarint(value, packed);
  }
  PutText(field, packed, out);
}

// A message of the file: its size, then itself.
void PutMessage(const std::string& message, std::string& out) {
  PutVarint(message.size(), out);
  out += message;
}

std::optional<std::uint64_t> CommTypeOf(OpCode code) {
  for (const internal::ChakraCollective& row : internal::kChakraCollectives) {
    if (row.code == code) {
      return row.comm_type;
    }
  }
  return std::nullopt;
}

void PutAttribute(int field, std::string_view name, int member, std::uint64_t value,
                  std::string& out) {
  std::string attribute;
  PutText(internal::kAttributeName, name, attribute);
  PutNumber(member, value, attribute);
  PutText(field, attribute, out);
}

void PutAttribute(int field, std::string_view name, std::string_view value, std::string& out) {
  std::string attribute;
  PutText(internal::kAttributeName, name, attribute);
  PutText(internal::kString, value, attribute);
  PutText(field, attribute, out);
}

// A node, of which attributes are collected.
class Node {
 public:
  Node(std::uint64_t id, std::string_view name, ChakraType type) {
    PutNumber(internal::kNodeId, id, text_);
    PutText(internal::kNodeName, name, text_);
    PutNumber(internal::kNodeType, static_cast<std::uint64_t>(type), text_);
  }

  void Number(int field, std::uint64_t value) { PutNumber(field, value, text_); }
  void List(int field, const std::vector<std::uint64_t>& values) { PutList(field, values, text_); }

  void Attribute(std::string_view name, int member, std::uint64_t value) {
    PutAttribute(internal::kNodeAttribute, name, member, value, text_);
  }
  void Attribute(std::string_view name, std::string_view value) {
    PutAttribute(internal::kNodeAttribute, name, value, text_);
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::int64_t RankCount(const Program& program) {
  return program.shard_size * program.replicate_size;
}

// Numbers from 1 for every group and the ranks that it holds somewhere: two groups of the same
// ranks are two communicators.
using GroupNumbers = std::map<std::pair<std::size_t, std::vector<std::int64_t>>, std::size_t>;
GroupNumbers NumberGroups(const Program& program) {
  GroupNumbers numbers;
  for (std::size_t i = 0; i < program.groups.size(); ++i) {
    for (std::int64_t rank = 0; rank < RankCount(program); ++rank) {
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

void AddSizes(const Program& program, const OpShape& shape, Node& node) {
  double flops = 0.0;
  std::int64_t bytes = shape.bytes.value;
  for (const Kernel& kernel : program.KernelsOf(shape)) {
    flops += kernel.flops.value;
    bytes += kernel.read.value + kernel.written.value;
  }
  node.Attribute("num_ops", internal::kInt64, static_cast<std::uint64_t>(std::llround(flops)));
  node.Attribute("tensor_size", internal::kUint64, static_cast<std::uint64_t>(bytes));
}

void AddCollective(const Program& program, const OpShape& shape, const GroupNumbers& numbers,
                   std::int64_t rank, Node& node) {
  const Group& group = program.groups[shape.group.value];
  node.Attribute("comm_type", internal::kInt64, *CommTypeOf(shape.code));
  // Of what this rank puts in.
  const std::int64_t parts = shape.code == OpCode::kAllGather ? group.size : 1;
  node.Attribute("comm_size", internal::kInt64,
                 static_cast<std::uint64_t>(shape.bytes.value / parts));
  node.Attribute("group_size", internal::kInt64, static_cast<std::uint64_t>(group.size));
  const auto number = numbers.find({shape.group.value, MembersOf(group, rank)});
  if (number != numbers.end()) {
    node.Attribute("pg_name", std::to_string(number->second));
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
  std::string out, metadata;
  PutText(kVersion, internal::kChakraVersion, metadata);
  PutAttribute(kAttribute, "source", "simulated", metadata);
  PutAttribute(kAttribute, "rank", internal::kUint64, static_cast<std::uint64_t>(rank), metadata);
  PutAttribute(kAttribute, "ranks", internal::kUint64,
               static_cast<std::uint64_t>(RankCount(program)), metadata);
  PutMessage(metadata, out);
  return out;
}

// The innermost unit around each model op, by the names of modules; "root" where none is.
std::vector<std::uint32_t> UnitsOfModelOps(const Program& program) {
  std::map<std::string_view, std::uint32_t> numbers;
  for (std::size_t i = 0; i < program.units.size(); ++i) {
    numbers.emplace(program.units[i].name, static_cast<std::uint32_t>(i));
  }
  const auto root = numbers.find("root");
  std::vector<std::uint32_t> units;
  for (std::string_view name : program.model_op_names) {
    auto found = numbers.find(name);
    while (found == numbers.end() && name.find('.') != name.npos) {
      name = name.substr(0, name.rfind('.'));
      found = numbers.find(name);
    }
    found = found == numbers.end() ? root : found;
    units.push_back(found == numbers.end() ? kNoSubject : found->second);
  }
  return units;
}

// What an op's kernels do most: the one with most arithmetic, else with most bytes.
KernelClass KernelOf(const Program& program, const OpShape& shape) {
  switch (shape.code) {
    case OpCode::kGradNorm:
    case OpCode::kGradClip:
    case OpCode::kOptimizerStep:
    case OpCode::kHostOptimizerStep:
      return KernelClass::kOptimizer;
    case OpCode::kCompute:
      break;
    default:
      return KernelClass::kCopy;
  }
  const auto less = [](const Kernel& a, const Kernel& b) {
    return std::pair(a.flops.value, a.read.value + a.written.value) <
           std::pair(b.flops.value, b.read.value + b.written.value);
  };
  const auto kernels = program.KernelsOf(shape);
  const auto most = std::max_element(kernels.begin(), kernels.end(), less);
  return most == kernels.end() ? KernelClass::kElementwise : most->kind;
}

// Where in training an op stands, by which `compare` finds it again.
void AddPlace(const Program& program, const Op& op, const std::vector<std::uint32_t>& units,
              Node& node) {
  const OpShape& shape = program.ShapeOf(op);
  const bool is_of_model = shape.code == OpCode::kCompute || shape.code == OpCode::kAccumulateGrad;
  const std::uint32_t unit = op.subject == kNoSubject ? kNoSubject
                             : is_of_model            ? units[op.subject]
                                                      : op.subject;
  node.Attribute("micro_batch", internal::kUint64, op.micro_batch);
  if (unit != kNoSubject) {
    node.Attribute("unit", program.units[unit].name);
  }
  node.Attribute("kernel",
                 internal::kChakraKernels[static_cast<std::size_t>(KernelOf(program, shape))]);
}

std::string TraceOf(const Program& program, const std::map<std::uint32_t, const Span*>& spans,
                    const GroupNumbers& numbers, std::int64_t rank) {
  SimTime begin = spans.empty() ? SimTime() : spans.begin()->second->start;
  for (const auto& [op, span] : spans) {
    begin = std::min(begin, span->start);
  }
  std::string out = MetadataOf(program, rank);
  const std::vector<std::uint32_t> units = UnitsOfModelOps(program);
  std::array<std::optional<std::uint32_t>, kStreamCount> before{};  // of each stream
  for (std::uint32_t i = 0; i < program.step.ops.size(); ++i) {
    ThrowIfStopped();
    const Op& op = program.step.ops[i];
    const OpShape& shape = program.ShapeOf(op);
    Node node(i, OpName(program, op), TypeOf(shape.code));
    std::vector<std::uint64_t> needed;
    for (const Edge& edge : program.step.EdgesOf(OpId(i))) {
      if (!edge.is_carried()) {
        needed.push_back(edge.op().value);
      }
    }
    std::optional<std::uint32_t>& last = before[static_cast<std::size_t>(shape.stream)];
    if (last.has_value()) {
      node.List(internal::kNodeCtrlDeps, {*last});
    }
    last = i;
    node.List(internal::kNodeDataDeps, needed);
    if (const auto span = spans.find(i); span != spans.end()) {
      node.Number(internal::kNodeStart, Microseconds(span->second->start - begin));
      node.Number(internal::kNodeDuration, Microseconds(span->second->end - span->second->start));
    }
    node.Attribute("is_cpu_op", internal::kBool, InfoOf(shape.code).runs_on_host ? 1 : 0);
    if (CommTypeOf(shape.code).has_value()) {
      AddCollective(program, shape, numbers, rank, node);
    } else {
      AddSizes(program, shape, node);
    }
    node.Attribute("stream", NameOf(shape.stream));
    node.Attribute("phase", NameOf(op.phase));
    AddPlace(program, op, units, node);
    PutMessage(node.text(), out);
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
  if (RankCount(program) > kMostChakraRanks) {
    throw InputError("--chakra", std::to_string(RankCount(program)) + " ranks",
                     "at most " + std::to_string(kMostChakraRanks) + ", a file each");
  }
  const auto spans = LastStep(trace);
  const GroupNumbers numbers = NumberGroups(program);
  std::vector<OutputFile> files;
  for (std::int64_t rank = 0; rank < RankCount(program); ++rank) {
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
