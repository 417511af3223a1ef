#include "planner/emitters/fqn.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>

#include "core/error.h"

namespace shardwright {
namespace {

// A prefix of names and what stands there in the dialect. '*' is one component, kept as it is. The
// first row that fits a name counts; longer prefixes stand before shorter ones. A target of "?" has
// no module of that name.
struct Rename {
  FqnDialect dialect;
  std::string_view types;  // model types, separated by spaces; "*" for all
  std::string_view from;
  std::string_view to;
};

constexpr FqnDialect kV5 = FqnDialect::kHfV5;
constexpr FqnDialect kTitan = FqnDialect::kTorchtitan;
constexpr std::string_view kVit = "vit";
constexpr std::string_view kTitanTypes = "llama qwen3 qwen3_moe";

// Sources: transformers 5.23 (the modules themselves, compared by a test) and torchtitan 0.3
// (models/llama3/state_dict_adapter.py, models/qwen3/state_dict_adapter.py).
constexpr std::array<Rename, 43> kRenames = {{
    {kV5, "gpt_neox", "embed_out", "lm_head"},
    {kV5, "mixtral", "model.layers.*.block_sparse_moe", "model.layers.*.mlp"},
    {kV5, kVit, "vit.encoder.layer.*.attention.attention.query", "vit.layers.*.attention.q_proj"},
    {kV5, kVit, "vit.encoder.layer.*.attention.attention.key", "vit.layers.*.attention.k_proj"},
    {kV5, kVit, "vit.encoder.layer.*.attention.attention.value", "vit.layers.*.attention.v_proj"},
    {kV5, kVit, "vit.encoder.layer.*.attention.attention", "?"},
    {kV5, kVit, "vit.encoder.layer.*.attention.output.dense", "vit.layers.*.attention.o_proj"},
    {kV5, kVit, "vit.encoder.layer.*.attention.output", "?"},
    {kV5, kVit, "vit.encoder.layer.*.intermediate.dense", "vit.layers.*.mlp.fc1"},
    {kV5, kVit, "vit.encoder.layer.*.intermediate", "?"},
    {kV5, kVit, "vit.encoder.layer.*.output.dense", "vit.layers.*.mlp.fc2"},
    {kV5, kVit, "vit.encoder.layer.*.output", "?"},
    {kV5, kVit, "vit.encoder.layer", "vit.layers"},
    {kV5, kVit, "vit.encoder", "?"},
    {kV5, kVit, "encoder.layer.*.attention.attention.query", "layers.*.attention.q_proj"},
    {kV5, kVit, "encoder.layer.*.attention.attention.key", "layers.*.attention.k_proj"},
    {kV5, kVit, "encoder.layer.*.attention.attention.value", "layers.*.attention.v_proj"},
    {kV5, kVit, "encoder.layer.*.attention.attention", "?"},
    {kV5, kVit, "encoder.layer.*.attention.output.dense", "layers.*.attention.o_proj"},
    {kV5, kVit, "encoder.layer.*.attention.output", "?"},
    {kV5, kVit, "encoder.layer.*.intermediate.dense", "layers.*.mlp.fc1"},
    {kV5, kVit, "encoder.layer.*.intermediate", "?"},
    {kV5, kVit, "encoder.layer.*.output.dense", "layers.*.mlp.fc2"},
    {kV5, kVit, "encoder.layer.*.output", "?"},
    {kV5, kVit, "encoder.layer", "layers"},
    {kV5, kVit, "encoder", "?"},
    {kTitan, kTitanTypes, "model.embed_tokens", "tok_embeddings"},
    {kTitan, kTitanTypes, "model.layers.*.self_attn.q_proj", "layers.*.attention.qkv_linear.wq"},
    {kTitan, kTitanTypes, "model.layers.*.self_attn.k_proj", "layers.*.attention.qkv_linear.wk"},
    {kTitan, kTitanTypes, "model.layers.*.self_attn.v_proj", "layers.*.attention.qkv_linear.wv"},
    {kTitan, kTitanTypes, "model.layers.*.self_attn.o_proj", "layers.*.attention.wo"},
    {kTitan, kTitanTypes, "model.layers.*.self_attn", "layers.*.attention"},
    {kTitan, kTitanTypes, "model.layers.*.mlp.gate_proj", "layers.*.feed_forward.w1"},
    {kTitan, kTitanTypes, "model.layers.*.mlp.up_proj", "layers.*.feed_forward.w3"},
    {kTitan, kTitanTypes, "model.layers.*.mlp.down_proj", "layers.*.feed_forward.w2"},
    {kTitan, "qwen3_moe", "model.layers.*.mlp.experts",
     "layers.*.moe.routed_experts.inner_experts"},
    {kTitan, "qwen3_moe", "model.layers.*.mlp.gate", "layers.*.moe.router.gate"},
    {kTitan, "qwen3_moe", "model.layers.*.mlp", "layers.*.moe"},
    {kTitan, kTitanTypes, "model.layers.*.mlp", "layers.*.feed_forward"},
    {kTitan, kTitanTypes, "model.layers.*.input_layernorm", "layers.*.attention_norm"},
    {kTitan, kTitanTypes, "model.layers.*.post_attention_layernorm", "layers.*.ffn_norm"},
    {kTitan, kTitanTypes, "model", ""},
    {FqnDialect::kCheckpoint, "gpt2", "transformer", ""},
}};

// Experts in one tensor: [experts, sum of the rows of the parts, columns].
struct Fusion {
  FqnDialect dialect;
  std::string_view types;
  std::string_view name;
  std::array<std::string_view, 2> parts;  // an empty one: there is no second
};

constexpr std::string_view kMoe = "qwen3_moe deepseek_v3";
constexpr std::array<Fusion, 7> kFusions = {{
    {kV5, "mixtral", "gate_up_proj", {"w1.weight", "w3.weight"}},
    {kV5, "mixtral", "down_proj", {"w2.weight", ""}},
    {kV5, kMoe, "gate_up_proj", {"gate_proj.weight", "up_proj.weight"}},
    {kV5, kMoe, "down_proj", {"down_proj.weight", ""}},
    {kTitan, "qwen3_moe", "w1_EFD", {"gate_proj.weight", ""}},
    {kTitan, "qwen3_moe", "w3_EFD", {"up_proj.weight", ""}},
    {kTitan, "qwen3_moe", "w2_EDF", {"down_proj.weight", ""}},
}};

bool HasType(std::string_view types, std::string_view type) {
  while (!types.empty()) {
    const std::size_t space = types.find(' ');
    if (types.substr(0, space) == type) {
      return true;
    }
    types.remove_prefix(space == std::string_view::npos ? types.size() : space + 1);
  }
  return false;
}

std::vector<std::string> Components(std::string_view fqn) {
  std::vector<std::string> parts;
  while (!fqn.empty()) {
    const std::size_t dot = fqn.find('.');
    parts.emplace_back(fqn.substr(0, dot));
    fqn.remove_prefix(dot == std::string_view::npos ? fqn.size() : dot + 1);
  }
  return parts;
}

// `fqn` with its beginning replaced, if the row fits it.
std::optional<std::string> Renamed(const Rename& row, const std::vector<std::string>& fqn) {
  const std::vector<std::string> from = Components(row.from);
  if (fqn.size() < from.size()) {
    return std::nullopt;
  }
  std::vector<std::string> kept;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] == "*") {
      kept.push_back(fqn[i]);
    } else if (from[i] != fqn[i]) {
      return std::nullopt;
    }
  }
  std::vector<std::string> to = Components(row.to);
  std::size_t next = 0;
  for (std::string& part : to) {
    part = part == "*" ? kept[next++] : part;
  }
  to.insert(to.end(), fqn.begin() + static_cast<std::ptrdiff_t>(from.size()), fqn.end());
  std::string text;
  for (const std::string& part : to) {
    text += (text.empty() ? "" : ".") + part;
  }
  return text;
}

std::string Translated(const Model& model, const std::string& fqn, FqnDialect dialect) {
  const std::vector<std::string> parts = Components(fqn);
  for (const Rename& row : kRenames) {
    if (row.dialect == dialect && HasType(row.types, model.type)) {
      if (std::optional<std::string> name = Renamed(row, parts)) {
        return *name;
      }
    }
  }
  return fqn;
}

void CheckDialect(const Model& model, FqnDialect dialect) {
  if (dialect != FqnDialect::kTorchtitan || HasType(kTitanTypes, model.type)) {
    return;
  }
  throw InputError("--fqns", "torchtitan with a model of type " + model.type,
                   "hf-v4, hf-v5 or checkpoint, or a model of type " + std::string(kTitanTypes));
}

// Where an expert's parameter goes: "model.layers.0.mlp.experts.5.up_proj.weight" is part 1 of
// gate_up_proj in the module.
struct FusedPart {
  const Fusion* fusion = nullptr;
  std::string fqn;
};

std::optional<FusedPart> FusedPartOf(const Model& model, const Parameter& param,
                                     FqnDialect dialect) {
  const std::string& module = model.modules[param.module.value].fqn;
  if (!module.ends_with(".experts")) {
    return std::nullopt;
  }
  const std::string rest = param.fqn.substr(module.size() + 1);  // "5.up_proj.weight"
  const std::string part = rest.substr(rest.find('.') + 1);
  for (const Fusion& fusion : kFusions) {
    if (fusion.dialect == dialect && HasType(fusion.types, model.type) &&
        std::count(fusion.parts.begin(), fusion.parts.end(), part) > 0) {
      return FusedPart{&fusion,
                       Translated(model, module, dialect) + "." + std::string(fusion.name)};
    }
  }
  return std::nullopt;
}

// The number of experts follows from the parts, which come expert by expert.
void SetFusedShape(const Model& model, const Fusion& fusion, NamedParameter& param) {
  const std::int64_t parts = fusion.parts[1].empty() ? 1 : 2;
  const auto count = static_cast<std::int64_t>(param.sources.size());
  const Parameter& first = model.params[param.sources[0].value];
  param.shape = {count / parts, parts * first.shape[0], first.shape[1]};
  param.trainable = first.trainable;
}

}  // namespace

std::vector<NamedParameter> NamedParameters(const Model& model, FqnDialect dialect) {
  CheckDialect(model, dialect);
  std::vector<NamedParameter> named;
  std::map<std::string, std::size_t> fused;  // index into `named`
  std::vector<const Fusion*> fusion_of;
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    const Parameter& param = model.params[p];
    if (dialect == FqnDialect::kCheckpoint && param.tied_to.valid()) {
      continue;  // files hold a storage once
    }
    if (const std::optional<FusedPart> part = FusedPartOf(model, param, dialect)) {
      const auto [it, is_new] = fused.emplace(part->fqn, named.size());
      if (is_new) {
        named.push_back({part->fqn, {}, true, "", {}});
        fusion_of.push_back(part->fusion);
      }
      named[it->second].sources.emplace_back(p);
      continue;
    }
    NamedParameter other;
    other.fqn = Translated(model, param.fqn, dialect);
    other.shape = param.shape;
    other.trainable = param.trainable;
    if (param.tied_to.valid()) {
      other.tied_to = Translated(model, model.params[param.tied_to.value].fqn, dialect);
    }
    other.sources = {ParamId(p)};
    named.push_back(std::move(other));
    fusion_of.push_back(nullptr);
  }
  for (std::size_t i = 0; i < named.size(); ++i) {
    if (fusion_of[i] != nullptr) {
      SetFusedShape(model, *fusion_of[i], named[i]);
    }
  }
  return named;
}

std::string ModuleName(const Model& model, const std::string& fqn, FqnDialect dialect) {
  CheckDialect(model, dialect);
  std::string name = Translated(model, fqn, dialect);
  if (name.starts_with('?') || (name.empty() && !fqn.empty())) {
    throw InputError("module \"" + fqn + "\"",
                     "no module of its own under " +
                         std::string(kFqnDialectNames[static_cast<std::size_t>(dialect)]),
                     "a plan that does not name it, or --fqns hf-v4");
  }
  return name;
}

}  // namespace shardwright
