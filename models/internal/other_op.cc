#include "models/internal/other_op.h"

#include <array>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

// Bits of an op's inputs and outputs have places for so many.
constexpr std::size_t kMostTensors = 32;
// Launches of a pass, tensors kept. A table that every layer reads, as relative positions, gets
// gradients from each.
constexpr std::size_t kMostEntries = 4096;

Amount AmountOr(OpReader& r, const JsonValue& json, std::string_view key, Amount fallback) {
  const std::optional<JsonValue> value = json.Find(key);
  return value ? EvaluateAmount(*value, r.sizes()) : fallback;
}

AmountOfData ReadData(OpReader& r, const JsonValue& json, std::string_view elements,
                      std::string_view bytes) {
  return {AmountOr(r, json, elements, {}), AmountOr(r, json, bytes, {})};
}

bool IsProduct(OtherKernel::Class kind) {
  return kind == OtherKernel::Class::kGemm || kind == OtherKernel::Class::kConv ||
         kind == OtherKernel::Class::kAttention || kind == OtherKernel::Class::kAttentionBackward;
}

OtherKernel ReadKernel(OpReader& r, const JsonValue& json, OtherKernel::Pass pass) {
  constexpr std::array<std::string_view, 9> kNames = {
      "elementwise", "copy", "norm",      "softmax",           "gather",
      "gemm",        "conv", "attention", "attention_backward"};
  constexpr std::array<OtherKernel::Class, 9> kClasses = {OtherKernel::Class::kElementwise,
                                                          OtherKernel::Class::kCopy,
                                                          OtherKernel::Class::kNorm,
                                                          OtherKernel::Class::kSoftmax,
                                                          OtherKernel::Class::kGatherScatter,
                                                          OtherKernel::Class::kGemm,
                                                          OtherKernel::Class::kConv,
                                                          OtherKernel::Class::kAttention,
                                                          OtherKernel::Class::kAttentionBackward};
  json.AllowOnly(
      {"class", "batch", "m", "n", "k", "flops", "read", "read_bytes", "written", "written_bytes"});
  OtherKernel kernel;
  kernel.pass = pass;
  kernel.kind = kClasses[json.At("class").AsChoice(kNames)];
  if (IsProduct(kernel.kind)) {
    kernel.batch = AmountOr(r, json, "batch", {1, 0});
    kernel.m = EvaluateAmount(json.At("m"), r.sizes());
    kernel.n = EvaluateAmount(json.At("n"), r.sizes());
    kernel.k = EvaluateAmount(json.At("k"), r.sizes());
  }
  kernel.flops = AmountOr(r, json, "flops", {});
  kernel.read = ReadData(r, json, "read", "read_bytes");
  kernel.written = ReadData(r, json, "written", "written_bytes");
  return kernel;
}

std::optional<JsonValue> EntriesOf(const OpReader& r, std::string_view key) {
  std::optional<JsonValue> list = r.op().json.Find(key);
  if (list && list->size() > kMostEntries) {
    throw InputError(list->path().str(), std::to_string(list->size()) + " entries",
                     "at most " + std::to_string(kMostEntries));
  }
  return list;
}

void ReadKernels(OpReader& r, std::string_view key, OtherKernel::Pass pass, OtherCost& cost) {
  const std::optional<JsonValue> list = EntriesOf(r, key);
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    cost.kernels.push_back(ReadKernel(r, (*list)[i], pass));
  }
}

std::uint32_t ReadBits(const OpReader& r, std::string_view key, std::size_t count) {
  std::uint32_t bits = 0;
  const std::optional<JsonValue> list = r.op().json.Find(key);
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    if (count == 0) {
      throw(*list)[i].Error("nothing, since there is no such tensor");
    }
    bits |=
        1U << static_cast<std::uint32_t>((*list)[i].AsInt(0, static_cast<std::int64_t>(count) - 1));
  }
  return bits;
}

OtherOutput ReadOutput(OpReader& r, const JsonValue& json, std::vector<std::int64_t>& dims) {
  json.AllowOnly({"shape", "dtype", "shared", "view_of"});
  OtherOutput output;
  if (const std::optional<JsonValue> dtype = json.Find("dtype")) {
    output.type =
        static_cast<OtherOutput::Type>(dtype->AsChoice({"compute", "fp32", "int64", "bool"}));
  }
  const std::optional<JsonValue> shared = json.Find("shared");
  output.is_shared = shared && shared->AsBool();
  dims = r.Shape(json.At("shape"));
  output.elements = ElementsOf(dims);
  if (const std::optional<JsonValue> view = json.Find("view_of")) {
    if (r.op().inputs.empty()) {
      throw view->Error("no such key in an op without inputs");
    }
    output.view_of = static_cast<std::int32_t>(
        view->AsInt(0, static_cast<std::int64_t>(r.op().inputs.size()) - 1));
  }
  return output;
}

}  // namespace

std::vector<FileTensor> AddOther(OpReader& r) {
  const JsonValue& json = r.op().json;
  OtherCost cost;
  cost.function = json.At("function").AsString();
  const JsonValue results = json.At("results");
  if (results.size() != r.op().output_count || results.size() > kMostTensors) {
    throw InputError(results.path().str(), std::to_string(results.size()) + " entries",
                     std::to_string(r.op().output_count) + ", one per output, and at most " +
                         std::to_string(kMostTensors));
  }
  std::vector<std::vector<std::int64_t>> dims(results.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    cost.outputs.push_back(ReadOutput(r, results[i], dims[i]));
  }
  ReadKernels(r, "forward", OtherKernel::Pass::kForward, cost);
  const bool makes_any = AnyOf(cost.outputs, [](const OtherOutput& o) { return o.view_of < 0; });
  if (makes_any && cost.kernels.empty()) {
    throw InputError(results.path().str(), "a tensor of its own and no launch in \"forward\"",
                     "a launch that writes it, or \"view_of\" an input");
  }
  cost.saves_input = ReadBits(r, "saves_inputs", r.op().inputs.size());
  cost.saves_output = ReadBits(r, "saves_outputs", results.size());
  cost.saves_input_for_weight =
      ReadBits(r, "saves_inputs_for_weights", r.op().inputs.size()) & cost.saves_input;
  ReadKernels(r, "backward_data", OtherKernel::Pass::kBackwardData, cost);
  ReadKernels(r, "backward_weight", OtherKernel::Pass::kBackwardWeight, cost);
  if (const std::optional<JsonValue> workspace = json.Find("backward_workspace")) {
    workspace->AllowOnly({"elements", "bytes"});
    cost.backward_workspace = ReadData(r, *workspace, "elements", "bytes");
  }
  cost.is_cast = r.Flag("cast");
  if (const std::optional<JsonValue> saved = EntriesOf(r, "saved")) {
    for (std::size_t i = 0; i < saved->size(); ++i) {
      (*saved)[i].AllowOnly({"elements", "bytes"});
      cost.saved.push_back(ReadData(r, (*saved)[i], "elements", "bytes"));
    }
  }
  if (cost.is_cast && (r.op().inputs.size() != 1 || results.size() != 1)) {
    throw InputError(json.Find("cast")->path().str(), "several inputs or outputs", "one of each");
  }
  const OpSpec spec{.kind = OpKind::kOther, .other = cost};
  std::vector<FileTensor> outputs = r.Emit(spec, {});
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].dims = dims[i];
    outputs[i].is_index = cost.outputs[i].type == OtherOutput::Type::kInt64;
  }
  return outputs;
}

}  // namespace shardwright
