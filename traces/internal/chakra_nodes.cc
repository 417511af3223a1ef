#include "traces/internal/chakra_nodes.h"

#include <algorithm>
#include <string_view>

#include "core/budget.h"
#include "core/error.h"
#include "core/json.h"
#include "traces/internal/protobuf.h"

namespace shardwright::internal {
namespace {

constexpr std::int64_t kMostNodes = 2'000'000;
constexpr std::int64_t kMostDeps = 16'000'000;
// Far from overflow in picoseconds: 50 days.
constexpr std::uint64_t kLatest = std::uint64_t{50} * 24 * 3600 * 1'000'000;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 50;

// An attribute whose value is of a type that anybody here asks for.
struct Attribute {
  std::string_view name;
  std::string_view text;
  std::uint64_t number = 0;
  bool is_number = false, is_text = false;
};

class NodeReader {
 public:
  explicit NodeReader(const std::string& file)
      : file_(file),
        result_(file),
        node_budget_(file, "nodes", kMostNodes),
        dep_budget_(file, "dependencies", kMostDeps) {}

  ChakraFile Run() {
    ProtoMessages messages(file_);
    const std::optional<ProtoBytes> first = messages.Next();
    if (!first) {
      throw InputError(file_, "an empty file", "a Chakra execution trace");
    }
    ReadMetadata(*first);
    while (const std::optional<ProtoBytes> message = messages.Next()) {
      ReadNode(*message);
    }
    return std::move(result_);
  }

 private:
  Attribute ReadAttribute(ProtoBytes bytes) const {
    Attribute attribute;
    ProtoFields fields(file_, "an attribute", bytes);
    while (fields.Next()) {
      switch (fields.number()) {
        case kAttributeName:
          attribute.name = fields.Text();
          break;
        case kInt32:
        case kInt64:
        case kUint32:
        case kUint64:
        case kBool:
          attribute.number = fields.Number();
          attribute.is_number = true;
          break;
        case kString:
          attribute.text = fields.Text();
          attribute.is_text = true;
          break;
        default:
          break;
      }
    }
    return attribute;
  }

  void CheckVersion(const ProtoFields& fields, std::string_view version) const {
    if (version != kChakraVersion) {
      fields.Refuse("schema \"" + std::string(version.substr(0, 40)) + "\"",
                    "schema " + std::string(kChakraVersion));
    }
  }

  void ReadMetadata(ProtoBytes bytes) {
    ProtoFields fields(file_, "the metadata", bytes);
    while (fields.Next()) {
      if (fields.number() == 1) {
        CheckVersion(fields, fields.Text());
      } else if (fields.number() == 2) {
        const Attribute attribute = ReadAttribute(fields.Bytes());
        // PyTorch's own version comes first: "1.0.2-chakra.0.0.4".
        constexpr std::string_view kBefore = "chakra.";
        const std::size_t before = attribute.text.find(kBefore);
        if (attribute.name == "schema" && before != std::string_view::npos) {
          CheckVersion(fields, attribute.text.substr(before + kBefore.size()));
        } else if (attribute.name == "source" && attribute.text == "simulated") {
          throw InputError(file_, "a step that simulate --chakra wrote", "what was measured",
                           "simulate --trace writes a trace that is read back");
        }
      }
    }
  }

  std::int64_t Bounded(const ProtoFields& fields, std::uint64_t value, std::uint64_t most,
                       const char* expected) const {
    if (value > most) {
      fields.Refuse(std::to_string(value), expected);
    }
    return static_cast<std::int64_t>(value);
  }

  void AddDeps(const ProtoFields& fields, std::vector<std::uint64_t>& list) {
    fields.ForEachNumber([&](std::uint64_t id) {
      dep_budget_.Take();
      list.push_back(id);
    });
  }

  void ReadNode(ProtoBytes bytes) {
    node_budget_.Take();
    const std::string what = "node " + std::to_string(result_.nodes.size());
    ChakraNode node;
    std::vector<std::uint64_t> ctrl_deps, data_deps;
    std::string_view inputs;
    ProtoFields fields(file_, what, bytes);
    while (fields.Next()) {
      switch (fields.number()) {
        case kNodeId:
          node.id = fields.Number();
          break;
        case kNodeName:
          node.name = result_.names.Find(fields.Text());
          break;
        case kNodeType:
          node.type = static_cast<ChakraType>(
              Bounded(fields, fields.Number(), UINT8_MAX, "a type of node: 1 to 10"));
          break;
        case kNodeCtrlDeps:
          AddDeps(fields, ctrl_deps);
          break;
        case kNodeDataDeps:
          AddDeps(fields, data_deps);
          break;
        case kNodeStart:
          node.start = Bounded(fields, fields.Number(), INT64_MAX / 4000, "microseconds");
          break;
        case kNodeDuration:
          node.duration = Bounded(fields, fields.Number(), kLatest, "at most 50 days");
          break;
        case kNodeInputs:
          inputs = ValuesOf(fields.Bytes());
          break;
        case kNodeAttribute:
          Use(fields, ReadAttribute(fields.Bytes()), node);
          break;
        default:
          break;
      }
    }
    node.deps_begin = result_.deps.size();
    node.ctrl_deps = static_cast<std::uint32_t>(ctrl_deps.size());
    node.data_deps = static_cast<std::uint32_t>(data_deps.size());
    result_.deps.insert(result_.deps.end(), ctrl_deps.begin(), ctrl_deps.end());
    result_.deps.insert(result_.deps.end(), data_deps.begin(), data_deps.end());
    result_.nodes.push_back(node);
    if (node.type == ChakraType::kMetadata) {
      ReadGroups(inputs);
    }
  }

  void Use(const ProtoFields& fields, const Attribute& attribute, ChakraNode& node) {
    const auto text_of = [&] {  // streams are numbers with PyTorch
      return result_.names.Find(attribute.is_text ? std::string(attribute.text)
                                                  : std::to_string(attribute.number));
    };
    const std::string_view name = attribute.name;
    if (name == "is_cpu_op") {
      node.on_host = attribute.number != 0;
    } else if (name == "comm_type") {
      node.comm_type = attribute.number;
    } else if (name == "comm_size") {
      node.comm_size = Bounded(fields, attribute.number, kMostBytes, "bytes of a collective");
    } else if (name == "pg_name") {
      node.group = text_of();
    } else if (name == "stream") {
      node.stream = text_of();
    } else if (name == "tid") {
      node.thread = static_cast<std::int32_t>(attribute.number & INT32_MAX);
    }
  }

  std::string_view ValuesOf(ProtoBytes bytes) const {
    ProtoFields fields(file_, "inputs", bytes);
    std::string_view values;
    while (fields.Next()) {
      if (fields.number() == 1) {
        values = fields.Text();
      }
    }
    return values;
  }

  // Python's repr of a list of one text, which is JSON: ['[{"pg_name": "0", "group_size": 8}]'].
  void ReadGroups(std::string_view values) {
    const std::size_t begin = values.find("[{"), end = values.rfind("}]");
    constexpr std::size_t kLongest = std::size_t{1} << 20;
    if (begin == std::string_view::npos || end == std::string_view::npos || end < begin ||
        end - begin > kLongest) {
      return;
    }
    try {
      const JsonValue list = JsonValue::Parse(values.substr(begin, end + 2 - begin), file_);
      for (std::size_t i = 0; i < list.size(); ++i) {
        const auto name = list[i].Find("pg_name"), size = list[i].Find("group_size");
        if (name && name->IsString() && size) {
          result_.group_sizes[name->AsString()] = size->AsInt(0, INT32_MAX);
        }
      }
    } catch (const InputError&) {  // the sizes help; the trace can be read without them
    }
  }

  const std::string& file_;
  ChakraFile result_;
  Budget node_budget_;
  Budget dep_budget_;
};

}  // namespace

ChakraFile ReadChakraNodes(const std::string& file) {
  return NodeReader(file).Run();
}

}  // namespace shardwright::internal
