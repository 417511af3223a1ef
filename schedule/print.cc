#include "schedule/print.h"

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "core/printable.h"
#include "core/text.h"
#include "schedule/happens_before.h"
#include "schedule/plan_names.h"
#include "schedule/repetition.h"

namespace shardwright {
namespace {

std::span<const MemoryPoint> PointsAt(const Body& body, std::size_t op) {
  return op < body.size() ? body.PointsBefore(OpId(op)) : body.PointsAtEnd();
}

std::string TensorText(const Program& program) {
  return program.tensor_size == 1 ? "" : ", tensor " + std::to_string(program.tensor_size);
}

// Each in the order of its enumerators.
constexpr std::array<std::string_view, 9> kDTypeNames = {"fp32",  "bf16",  "fp16",  "fp8", "fp64",
                                                         "int64", "int32", "uint8", "bool"};
constexpr std::array<std::string_view, 12> kKernelClassNames = {"gemm",
                                                                "grouped_gemm",
                                                                "conv",
                                                                "attention_forward",
                                                                "attention_backward",
                                                                "elementwise",
                                                                "norm",
                                                                "softmax",
                                                                "gather_scatter",
                                                                "optimizer",
                                                                "copy",
                                                                "qr"};
constexpr std::array<std::string_view, 12> kRoleNames = {
    "input",      "output", "saved",     "parameter", "output_grad", "input_grad",
    "param_grad", "state",  "workspace", "exchange",  "labels",      "loss"};
constexpr std::array<std::string_view, 3> kAccessNames = {"read", "write", "update"};
constexpr std::array<std::string_view, 9> kHoldsNames = {
    "other", "tensors", "whole", "shards", "shard", "slice", "mixed", "rows", "uses"};
constexpr std::array<std::string_view, 3> kPointNames = {"alloc", "free", "alloc_once"};

static_assert(kDTypeNames.size() == static_cast<std::size_t>(DType::kBool) + 1);
static_assert(kRoleNames.size() == static_cast<std::size_t>(Role::kLoss) + 1);
static_assert(kHoldsNames.size() == static_cast<std::size_t>(Holds::kUses) + 1);

std::string InBytes(Bytes bytes) {
  return std::to_string(bytes.value) + " B";
}

// Shortest text that reads back as the same number up to 17 digits; the same on all machines.
std::string InDigits(double number) {
  return Fixed(number, "%.17g");
}

// Appends lines to one text.
class Printer {
 public:
  explicit Printer(const Program& program)
      : program_(program), buffer_names_(BufferNames(program)) {}

  std::string Run() {
    PrintHeader();
    for (const NamedBody& named : BodiesOf(program_)) {
      PrintBody(named);
    }
    return std::move(text_);
  }

 private:
  void Line(int indent, std::string_view line) {
    text_.append(static_cast<std::size_t>(indent), ' ');
    text_ += PrintableLine(line) + '\n';
  }

  void PrintHeader() {
    Line(0, "program " + program_.dialect + ": shard " + std::to_string(program_.shard_size) +
                ", replicate " + std::to_string(program_.replicate_size) + TensorText(program_) +
                ", micro_batch " + std::to_string(program_.micro_batch) + " x " +
                std::to_string(program_.micro_batch_count));
    for (const Group& group : program_.groups) {
      Line(0, "group " + group.name + ": size " + std::to_string(group.size) + ", stride " +
                  std::to_string(group.stride));
    }
    for (const UnitInfo& unit : program_.units) {
      Line(0, "unit " + unit.name + ": elements " + std::to_string(unit.elements) + ", padded " +
                  std::to_string(unit.padded_elements) + ", shard " +
                  std::to_string(unit.shard_elements));
      for (const ParamSlot& slot : unit.params) {
        Line(2, "param " + std::to_string(slot.param.value) + ": shard offset " +
                    std::to_string(slot.shard_offset) + ", unsharded offset " +
                    std::to_string(slot.unsharded_offset) + ", padded " +
                    std::to_string(slot.padded_elements));
      }
    }
    for (std::size_t i = 0; i < program_.buffers.size(); ++i) {
      const Buffer& buffer = program_.buffers[i];
      Line(0, "buffer " + buffer_names_[i] + ": " + InBytes(buffer.size) + ", owner " +
                  std::string(NameOf(buffer.owner)) + (buffer.on_host ? ", on host" : "") +
                  (buffer.zero_filled ? ", zeros" : "") + Held(buffer) +
                  (buffer.flat > 0 ? ", in flat tensor " + std::to_string(buffer.flat) : ""));
    }
  }

  // ", bf16 shard of layers.3".
  [[nodiscard]] std::string Held(const Buffer& buffer) const {
    if (buffer.holds == Holds::kOther) {
      return "";
    }
    const std::string what = ", " + std::string(NameIn(kDTypeNames, buffer.dtype)) + ' ' +
                             std::string(NameIn(kHoldsNames, buffer.holds));
    if (buffer.subject == kNoSubject) {
      return what;
    }
    return what + " of " +
           (buffer.holds == Holds::kTensors ? program_.model_op_names[buffer.subject]
                                            : program_.units[buffer.subject].name);
  }

  void PrintBody(const NamedBody& named) {
    const Body& body = *named.body;
    Line(0, "body " + std::string(named.name) + ": " + std::to_string(body.size()) + " ops");
    for (std::size_t i = 0; i < body.size(); ++i) {
      PrintPoints(PointsAt(body, i));
      PrintOp(body, OpId(i));
    }
    PrintPoints(body.PointsAtEnd());
    for (std::size_t slot = 0; slot < body.carries.size(); ++slot) {
      if (body.carries[slot].valid()) {
        Line(2, "carry " + std::to_string(slot) + " = " + NameOfOp(body, body.carries[slot]));
      }
    }
    for (const Repeat& repeat : FindRepeats(program_, body)) {
      Line(2, "repeat from " + NameOfOp(body, OpId(repeat.first)) + ": " +
                  std::to_string(repeat.count) + " x " + std::to_string(repeat.period) + " ops");
    }
  }

  [[nodiscard]] std::string NameOfOp(const Body& body, OpId op) const {
    return OpName(program_, body.ops[op.value]);
  }

  void PrintPoints(std::span<const MemoryPoint> points) {
    for (const MemoryPoint& point : points) {
      std::string line =
          std::string(NameIn(kPointNames, point.kind)) + ' ' + buffer_names_[point.buffer.value];
      for (std::size_t s = 0; s < kStreamCount; ++s) {
        if (((point.recorded_streams >> s) & 1U) != 0) {
          line += ", recorded " + std::string(NameOf(static_cast<Stream>(s)));
        }
      }
      Line(2, line);
    }
  }

  void PrintOp(const Body& body, OpId op) {
    const OpShape& shape = program_.ShapeOf(body.ops[op.value]);
    std::string line = NameOfOp(body, op) + " [" + std::string(NameOf(shape.stream));
    if (shape.group.valid()) {
      line += ", group " + program_.groups[shape.group.value].name;
    }
    if (shape.bytes.value != 0) {
      line += ", " + InBytes(shape.bytes);
    }
    line += ", " + std::string(NameIn(kDTypeNames, shape.dtype));
    Line(2, line + (shape.divisor != 1.0 ? ", / " + InDigits(shape.divisor) : "") + "]");
    for (const Edge edge : body.EdgesOf(op)) {
      Line(4, "after " + (edge.is_carried() ? "carry " + std::to_string(edge.slot())
                                            : NameOfOp(body, edge.op())));
    }
    for (const Access& access : body.AccessesOf(op)) {
      Line(4, std::string(NameIn(kAccessNames, access.mode)) + ' ' +
                  std::string(NameIn(kRoleNames, access.role)) + ' ' +
                  std::to_string(access.index) + ": " + buffer_names_[access.buffer.value] + ", " +
                  InBytes(access.bytes));
    }
    for (const Kernel& kernel : program_.KernelsOf(shape)) {
      PrintKernel(kernel);
    }
  }

  void PrintKernel(const Kernel& kernel) {
    std::string line = "kernel " + std::string(NameIn(kKernelClassNames, kernel.kind)) + ' ' +
                       std::string(NameIn(kDTypeNames, kernel.dtype));
    if (kernel.m != 0 || kernel.n != 0 || kernel.k != 0) {
      line += ' ' + std::to_string(kernel.batch) + " x (" + std::to_string(kernel.m) + ", " +
              std::to_string(kernel.n) + ", " + std::to_string(kernel.k) + ')';
    }
    Line(4, line + ": " + InDigits(kernel.flops.value) + " flop" + ", reads " +
                InBytes(kernel.read) + ", writes " + InBytes(kernel.written));
  }

  const Program& program_;
  std::vector<std::string> buffer_names_;
  std::string text_;
};

void SummarizeBody(const Program& program, const NamedBody& named, std::string& text) {
  const Body& body = *named.body;
  std::array<std::size_t, kStreamCount> per_stream{};
  struct Traffic {
    std::size_t count = 0;
    Bytes bytes{0};
  };
  // By group, then op code: the order of the tables, not of the ops.
  std::map<std::pair<std::uint32_t, OpCode>, Traffic> traffic;
  for (const Op& op : body.ops) {
    const OpShape& shape = program.ShapeOf(op);
    ++per_stream[static_cast<std::size_t>(shape.stream)];
    if (InfoOf(shape.code).is_collective) {
      Traffic& entry = traffic[{shape.group.value, shape.code}];
      ++entry.count;
      entry.bytes += shape.bytes;
    }
  }
  text += std::string(named.name) + ": " + std::to_string(body.size()) + " ops, " +
          std::to_string(body.edges.size()) + " edges, " + std::to_string(body.accesses.size()) +
          " accesses, " + std::to_string(body.points.size()) + " memory points\n";
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    if (per_stream[s] != 0) {
      text += "  stream " + std::string(NameOf(static_cast<Stream>(s))) + ": " +
              std::to_string(per_stream[s]) + " ops\n";
    }
  }
  for (const auto& [key, entry] : traffic) {
    text += "  group " + PrintableLine(program.groups[key.first].name) + ": " +
            std::to_string(entry.count) + ' ' + std::string(InfoOf(key.second).name) + ", " +
            InBytes(entry.bytes) + '\n';
  }
  for (const Repeat& repeat : FindRepeats(program, body)) {
    text += "  repeat: " + std::to_string(repeat.count) + " x " + std::to_string(repeat.period) +
            " ops from op " + std::to_string(repeat.first) + '\n';
  }
}

// Names the buffers that are first allocated before op i, or at the end of the body.
void NameBuffersAt(const Program& program, const NamedBody& named, std::size_t i,
                   std::vector<std::string>& names) {
  const Body& body = *named.body;
  std::array<int, kCategoryCount> seen{};  // of each category so far
  for (const MemoryPoint& point : PointsAt(body, i)) {
    std::string& name = names[point.buffer.value];
    if (point.kind == PointKind::kFree || !name.empty()) {
      continue;
    }
    const Category category = program.buffers[point.buffer.value].category;
    const int further = seen[static_cast<std::size_t>(category)]++;
    name = std::string(NameOf(category)) + '@' +
           (named.body == &program.step ? "" : std::string(named.name) + '/') +
           (i < body.size() ? OpName(program, body.ops[i]) : "end") +
           (further == 0 ? "" : '#' + std::to_string(further));
  }
}

}  // namespace

std::vector<std::string> BufferNames(const Program& program) {
  std::vector<std::string> names(program.buffers.size());
  for (const NamedBody& named : BodiesOf(program)) {
    for (std::size_t i = 0; i <= named.body->size(); ++i) {
      NameBuffersAt(program, named, i, names);
    }
  }
  for (std::size_t b = 0; b < names.size(); ++b) {
    if (names[b].empty()) {
      names[b] = std::string(NameOf(program.buffers[b].category)) + "@never#" + std::to_string(b);
    }
  }
  return names;
}

std::string BufferName(const Program& program, BufferId buffer) {
  return BufferNames(program)[buffer.value];
}

std::string Print(const Program& program) {
  return Printer(program).Run();
}

std::string PrintSummary(const Program& program) {
  std::string text = "program " + program.dialect + ": shard " +
                     std::to_string(program.shard_size) + ", replicate " +
                     std::to_string(program.replicate_size) + TensorText(program) +
                     ", micro_batch " + std::to_string(program.micro_batch) + " x " +
                     std::to_string(program.micro_batch_count) + '\n';
  std::array<std::size_t, kCategoryCount> counts{};
  std::array<Bytes, kCategoryCount> sizes{};
  for (const Buffer& buffer : program.buffers) {
    const auto c = static_cast<std::size_t>(buffer.category);
    ++counts[c];
    sizes[c] += buffer.size;
  }
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    if (counts[c] != 0) {
      text += "buffers " + std::string(NameOf(static_cast<Category>(c))) + ": " +
              std::to_string(counts[c]) + ", " + InBytes(sizes[c]) + " in all\n";
    }
  }
  for (const NamedBody& named : BodiesOf(program)) {
    SummarizeBody(program, named, text);
  }
  return text;
}

}  // namespace shardwright
