#include "planner/emitters/fqn.h"

#include <cstddef>
#include <map>
#include <optional>

#include "core/error.h"
#include "core/json.h"
#include "planner/fqns.h"

namespace shardwright {
namespace {

constexpr std::string_view kTitanTypes = "llama qwen3 qwen3_moe";

// A row of fqns.json: what names of models of some types become in a dialect.
struct FqnRow {
  std::size_t dialect = 0;
  std::string types;  // model types, separated by spaces
  // "renames": a beginning of names, and what stands there in the dialect. '*' is one component,
  // kept as it is. The first row that fits a name counts; longer beginnings stand before shorter
  // ones. A target of "?" has no module of that name.
  // "fusions": experts in one tensor [experts, sum of the rows of the parts, columns]: its name and
  // its one or two parts; no second part is an empty one.
  std::array<std::string, 3> words;
};

std::vector<FqnRow> ReadRows(std::string_view table) {
  const EmbeddedFile& file = EmbeddedFqns().front();
  const JsonValue rows = JsonValue::Parse(file.text, std::string(file.path)).At(table);
  std::vector<FqnRow> read(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    read[i].dialect = rows[i][0].AsChoice(kFqnDialectNames);
    read[i].types = rows[i][1].AsString();
    for (std::size_t w = 0; w + 2 < rows[i].size(); ++w) {
      read[i].words[w] = rows[i][w + 2].AsString();
    }
  }
  return read;
}

const std::vector<FqnRow>& RowsOf(std::string_view table) {
  static const std::vector<FqnRow> renames = ReadRows("renames"), fusions = ReadRows("fusions");
  return table == "renames" ? renames : fusions;
}

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
std::optional<std::string> Renamed(const FqnRow& row, const std::vector<std::string>& fqn) {
  const std::vector<std::string> from = Components(row.words[0]);
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
  std::vector<std::string> to = Components(row.words[1]);
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
  for (const FqnRow& row : RowsOf("renames")) {
    if (row.dialect == static_cast<std::size_t>(dialect) && HasType(row.types, model.type)) {
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
  const FqnRow* fusion = nullptr;
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
  for (const FqnRow& fusion : RowsOf("fusions")) {
    if (fusion.dialect == static_cast<std::size_t>(dialect) && HasType(fusion.types, model.type) &&
        (fusion.words[1] == part || fusion.words[2] == part)) {
      return FusedPart{&fusion, Translated(model, module, dialect) + "." + fusion.words[0]};
    }
  }
  return std::nullopt;
}

// The number of experts follows from the parts, which come expert by expert.
void SetFusedShape(const Model& model, const FqnRow& fusion, NamedParameter& param) {
  const std::int64_t parts = fusion.words[2].empty() ? 1 : 2;
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
  std::vector<const FqnRow*> fusion_of;
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
