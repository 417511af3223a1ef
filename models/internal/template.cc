#include "models/internal/template.h"

#include <cstdint>
#include <map>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/budget.h"
#include "core/error.h"
#include "models/internal/builder.h"

namespace shardwright {
namespace {

using Value = nlohmann::json;

// Names that a template, a piece or a loop binds; the innermost wins.
struct Scope {
  std::map<std::string, Value> values;
  const Scope* outer = nullptr;
};

// A layer of a mixture has some 50. Each takes 14 us, and twenty times that under sanitizers.
constexpr std::int64_t kMostEntries = 20'000;
constexpr int kDeepestPiece = 16;

class Expander {
 public:
  Expander(const TemplateParts& parts, const ExpressionContext& at)
      : pieces_(parts.pieces), words_(parts.source.value("words", Value::object())), at_(at) {
    for (const auto& [name, value] : parts.words.items()) {
      if (!words_.contains(name)) {
        throw InputError(at.where, "a word \"" + name + "\" in the row of the model type",
                         "a word of its template");
      }
      words_[name] = value;
    }
  }

  Value Document(const Value& source) {
    Scope scope;
    for (const Value& entry : source.value("let", Value::array())) {
      for (const auto& [name, value] : entry.items()) {
        scope.values[name] = Expand(value, scope);
      }
    }
    Refuse(source, scope);
    Value document = {{"format", "shardwright-model"}, {"version", 1}};
    for (const auto& [key, value] : source.items()) {
      if (key == "let" || key == "words" || key == "refuse") {
        continue;
      }
      Value expanded = Expand(value, scope);
      if (!expanded.is_null()) {
        document[key] = std::move(expanded);
      }
    }
    NumberTensors(document);
    return document;
  }

 private:
  // What the config asks for and the template does not build.
  void Refuse(const Value& source, const Scope& scope) {
    for (const Value& entry : source.value("refuse", Value::array())) {
      if (IsTrue(Evaluate(entry.at("if").get<std::string>(), scope))) {
        throw InputError(at_.where, Expand(entry.at("what"), scope).get<std::string>(),
                         "a configuration without it",
                         "shardwright export " + at_.where + " --seq 2048 -o model.json writes it");
      }
    }
  }

  Value Evaluate(const std::string& text, const Scope& scope) {
    const NameLookup lookup = Names(scope);
    return EvaluateExpression(text, {.lookup = lookup, .where = at_.where});
  }

  NameLookup Names(const Scope& scope) {
    return [this, &scope](const std::string& name) -> Value {
      for (const Scope* s = &scope; s != nullptr; s = s->outer) {
        if (const auto found = s->values.find(name); found != s->values.end()) {
          return found->second;
        }
      }
      const auto word = words_.find(name);
      if (word == words_.end()) {
        return at_.lookup(name);
      }
      if (depth_ > kDeepestPiece) {
        throw InputError(at_.where, '"' + name + '"', "a word that does not name itself");
      }
      ++depth_;
      Value value = Expand(*word, scope);
      --depth_;
      return value;
    };
  }

  Value Expand(const Value& node, const Scope& scope) {
    if (node.is_string()) {
      const NameLookup lookup = Names(scope);
      return Interpolate(node.get<std::string>(), {.lookup = lookup, .where = at_.where});
    }
    if (node.is_array()) {
      Value list = Value::array();
      for (const Value& entry : node) {
        ExpandInto(list, entry, scope);
      }
      return list;
    }
    if (!node.is_object()) {
      return node;
    }
    Value object = Value::object();
    for (const auto& [key, value] : node.items()) {
      const bool is_word = key == "if" || key == "each" || key == "use";
      if (is_word || !IsWanted(value, scope)) {
        continue;
      }
      Value expanded = Expand(value, scope);
      if (key == "name" && expanded.is_number()) {  // of a layer in a list
        expanded = expanded.dump();
      }
      if (!expanded.is_null()) {
        object[key] = std::move(expanded);
      }
    }
    return object;
  }

  bool IsWanted(const Value& node, const Scope& scope) {
    const auto condition = node.is_object() ? node.find("if") : node.end();
    return condition == node.end() || IsTrue(Evaluate(condition->get<std::string>(), scope));
  }

  // An entry of a list: none, one or, for "each" and "use", many.
  void ExpandInto(Value& list, const Value& entry, const Scope& scope) {
    if (!entry.is_object()) {
      Value expanded = Expand(entry, scope);
      if (!expanded.is_null()) {
        list.push_back(std::move(expanded));
      }
      return;
    }
    const auto each = entry.find("each");
    if (each == entry.end()) {
      ExpandOne(list, entry, scope);
      return;
    }
    const std::string variable = each->begin().key();
    const Value count = Evaluate(each->begin().value().get<std::string>(), scope);
    if (!count.is_number_integer() || count.get<std::int64_t>() < 0 ||
        count.get<std::int64_t>() > ModelLimits::kLayers) {
      throw InputError(at_.where, count.dump() + " for " + each->begin().value().dump(),
                       "a count from 0 to " + std::to_string(ModelLimits::kLayers));
    }
    Scope inner{.values = {}, .outer = &scope};
    for (std::int64_t i = 0; i < count.get<std::int64_t>(); ++i) {
      inner.values[variable] = i;
      ExpandOne(list, entry, inner);
    }
  }

  void ExpandOne(Value& list, const Value& entry, const Scope& scope) {
    if (!IsWanted(entry, scope)) {
      return;
    }
    entries_.Take();
    const auto use = entry.find("use");
    if (use == entry.end()) {
      list.push_back(Expand(entry, scope));
      return;
    }
    const auto piece = pieces_.find(use->get<std::string>());
    if (piece == pieces_.end() || depth_ > kDeepestPiece) {
      throw InputError(at_.where, use->dump(), "a piece of the templates");
    }
    Scope inner{.values = {}, .outer = &scope};
    const Value defaults = piece->value("defaults", Value::object());
    for (const auto& [name, value] : defaults.items()) {
      inner.values[name] = Expand(value, scope);
    }
    for (const auto& [name, value] : entry.items()) {
      if (name != "use" && name != "if" && name != "each") {
        inner.values[name] = Expand(value, scope);
      }
    }
    for (const Value& binding : piece->value("let", Value::array())) {
      for (const auto& [name, value] : binding.items()) {
        Value bound = Expand(value, inner);
        inner.values[name] = std::move(bound);
      }
    }
    ++depth_;
    for (const Value& part : piece->at("list")) {
      ExpandInto(list, part, inner);
    }
    --depth_;
  }

  // Templates write a tensor again under the same name; a model.json has one producer per tensor.
  static void NumberTensors(Value& document) {
    std::map<std::string, int> versions;
    const auto current = [&](const std::string& name) {
      const auto found = versions.find(name);
      return found == versions.end() || found->second == 0
                 ? name
                 : name + '#' + std::to_string(found->second);
    };
    for (const auto& input : document["inputs"].items()) {
      versions[input.key()] = 0;
    }
    const auto write = [&](Value& output) {
      const std::string name = output.get<std::string>();
      const auto [found, is_new] = versions.emplace(name, 0);
      found->second += is_new ? 0 : 1;
      output = current(name);
    };
    for (Value& op : document["ops"]) {
      if (const auto inputs = op.find("inputs"); inputs != op.end()) {
        for (Value& input : *inputs) {
          input = current(input.get<std::string>());
        }
      }
      if (const auto outputs = op.find("outputs"); outputs != op.end()) {
        for (Value& output : *outputs) {
          write(output);
        }
      } else {
        write(op["output"]);
      }
    }
  }

  const Value& pieces_;
  Value words_;
  const ExpressionContext& at_;
  Budget entries_{at_.where, "modules and ops", kMostEntries};
  int depth_ = 0;
};

}  // namespace

nlohmann::json ExpandTemplate(const TemplateParts& parts, const ExpressionContext& at) {
  return Expander(parts, at).Document(parts.source);
}

}  // namespace shardwright
