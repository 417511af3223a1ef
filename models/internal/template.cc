#include "models/internal/template.h"

#include <cstdint>
#include <map>
#include <set>
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
constexpr std::int64_t kMostTemplateEntries = 20'000;
constexpr int kDeepestPiece = 16;

class Expander {
 public:
  Expander(const TemplateParts& parts, const ExpressionContext& at)
      : parts_(parts), words_(parts.source.value("words", Value::object())), at_(at) {
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
    Check(source, scope);
    for (const Value& entry : source.value("let", Value::array())) {
      for (const auto& [name, value] : entry.items()) {
        Bind(scope, name, Expand(value, scope));
      }
    }
    Refuse(source, scope);
    Value document = {{"format", "shardwright-model"}, {"version", 1}};
    for (const auto& [key, value] : source.items()) {
      if (key == "let" || key == "words" || key == "check" || key == "refuse" || key == "pieces") {
        continue;
      }
      Value expanded = Expand(value, scope);
      if (!expanded.is_null()) {
        document[key] = std::move(expanded);
      }
    }
    return document;
  }

 private:
  // What the values of keys must satisfy together.
  void Check(const Value& source, const Scope& scope) {
    for (const Value& entry : source.value("check", Value::array())) {
      if (!IsTrue(Evaluate(entry.at("unless").get<std::string>(), scope))) {
        const auto text = [&](const char* key) {
          return TextOf(Expand(entry.value(key, Value("")), scope));
        };
        throw InputError(parts_.place(text("key")), text("found"), text("expected"), text("hint"));
      }
    }
  }

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

  // Words that read none of the names bound so far are the same everywhere.
  void Bind(Scope& scope, const std::string& name, Value value) {
    scope.values[name] = std::move(value);
    if (bound_.insert(name).second) {
      known_.clear();
    }
  }

  NameLookup Names(const Scope& scope) {
    return [this, &scope](const std::string& name) -> Value {
      reads_bound_ = reads_bound_ || bound_.contains(name);
      for (const Scope* s = &scope; s != nullptr; s = s->outer) {
        if (const auto found = s->values.find(name); found != s->values.end()) {
          reads_numbered_ = reads_numbered_ || s == numbered_;
          return found->second;
        }
      }
      const auto word = words_.find(name);
      if (word == words_.end()) {
        return at_.lookup(name);
      }
      if (const auto known = known_.find(name); known != known_.end()) {
        return known->second;
      }
      if (depth_ > kDeepestPiece) {
        throw InputError(at_.where, '"' + name + '"', "a word that does not name itself");
      }
      ++depth_;
      const bool read_before = std::exchange(reads_bound_, false);
      Value value = Expand(*word, scope);
      --depth_;
      if (!reads_bound_) {
        known_.emplace(name, value);
      }
      reads_bound_ = reads_bound_ || read_before;
      return value;
    };
  }

  Value Expand(const Value& node, const Scope& scope) {
    if (node.is_string()) {
      if (node.get_ref<const std::string&>().find('{') == std::string::npos) {
        return node;
      }
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
      if (IsKeyword(key) || !IsWanted(value, scope)) {
        continue;
      }
      Value expanded = Expand(value, scope);
      if (key == "name" && !expanded.is_null()) {  // a number is that of a layer in a list
        expanded = TextOf(expanded);
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
    if (const auto each = entry.find("each"); each != entry.end()) {
      const std::int64_t count = CountOf(*each, scope);
      Scope inner{.values = {}, .outer = &scope};
      for (std::int64_t i = 0; i < count; ++i) {
        Bind(inner, each->begin().key(), i);
        ExpandOne(list, entry, inner);
      }
    } else if (entry.contains("repeat")) {
      ExpandRepeat(list, entry, scope);
    } else {
      ExpandOne(list, entry, scope);
    }
  }

  std::int64_t CountOf(const Value& loop, const Scope& scope) {
    const Value count = Evaluate(loop.begin().value().get<std::string>(), scope);
    if (!count.is_number_integer() || count.get<std::int64_t>() < 0 ||
        count.get<std::int64_t>() > ModelLimits::kLayers) {
      throw InputError(at_.where, count.dump() + " for " + loop.begin().value().dump(),
                       "a count from 0 to " + std::to_string(ModelLimits::kLayers));
    }
    return count.get<std::int64_t>();
  }

  // Leaves the repeat to the reader of the model.json, so that 100 layers cost what one does. The
  // number of the layer stands in names only, as "{i}"; values that depend on it are in "alike".
  // {"repeat": {"i": "6"}, "alike": {"wide": "{i >= 4}"}} gives a repeat of 4 and one of 2.
  // A body that stands in several repeats is written once, and named by its number ("body").
  void ExpandRepeat(Value& list, const Value& entry, const Scope& scope) {
    const Value& loop = entry.at("repeat");
    const std::string& variable = loop.begin().key();
    const std::int64_t count = CountOf(loop, scope);
    const Value differing = entry.value("alike", Value::object());
    Scope numbered{.values = {}, .outer = &scope};
    std::map<Value, std::int64_t> bodies;  // the number of each, by values of "alike"
    Value before;
    std::int64_t like = 1;
    for (std::int64_t i = 0; i < count && IsWanted(entry, scope); i += like) {
      Bind(numbered, variable, i);
      numbered_ = &numbered;
      reads_numbered_ = false;
      Value values = Expand(differing, numbered);
      numbered_ = nullptr;
      like = reads_numbered_ ? 1 : count - i;
      if (values == before) {
        Value& times = list.back()["repeat"];
        times = times.get<std::int64_t>() + like;
        continue;
      }
      const auto [body, is_new] = bodies.try_emplace(values, bodies_);
      entries_.Take();
      list.push_back(Value::object());
      if (is_new) {
        Scope named{.values = {}, .outer = &scope};
        for (const auto& [name, value] : values.items()) {
          Bind(named, name, value);
        }
        Bind(named, variable, NameOnly(variable));
        list.back() = BodyOf(entry, named);
        ++bodies_;
      }
      list.back().update(
          {{"repeat", like}, {"from", i}, {"index", variable}, {"body", body->second}});
      before = std::move(values);
    }
  }

  // A module itself; ops and parameters as a group.
  Value BodyOf(const Value& entry, const Scope& scope) {
    Value body = Value::array();
    ExpandOne(body, entry, scope);
    if (body.size() == 1 && body[0].contains("class")) {
      return body[0];
    }
    return {{body.empty() || body[0].contains("op") ? "ops" : "params", std::move(body)}};
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
    const Value* piece = parts_.piece(use->get<std::string>());
    if (piece == nullptr || depth_ > kDeepestPiece) {
      throw InputError(at_.where, use->dump(), "a piece of the templates");
    }
    Scope inner{.values = {}, .outer = &scope};
    const Value defaults = piece->value("defaults", Value::object());
    for (const auto& [name, value] : defaults.items()) {
      Bind(inner, name, Expand(value, scope));
    }
    for (const auto& [name, value] : entry.items()) {
      if (!IsKeyword(name)) {
        Bind(inner, name, Expand(value, scope));
      }
    }
    for (const Value& binding : piece->value("let", Value::array())) {
      for (const auto& [name, value] : binding.items()) {
        Bind(inner, name, Expand(value, inner));
      }
    }
    ++depth_;
    for (const Value& part : piece->at("list")) {
      ExpandInto(list, part, inner);
    }
    --depth_;
  }

  static bool IsKeyword(const std::string& key) {
    return key == "if" || key == "each" || key == "use" || key == "repeat" || key == "alike";
  }

  const TemplateParts& parts_;
  Value words_;
  const ExpressionContext& at_;
  std::int64_t bodies_ = 0;
  std::set<std::string, std::less<>> bound_;  // names that a scope has bound
  std::map<std::string, Value> known_;        // words that read none of them
  bool reads_bound_ = false;
  const Scope* numbered_ = nullptr;  // the scope of a layer's number, while values are asked for it
  bool reads_numbered_ = false;
  Budget entries_{at_.where, "modules and ops", kMostTemplateEntries};
  int depth_ = 0;
};

}  // namespace

nlohmann::json ExpandTemplate(const TemplateParts& parts, const ExpressionContext& at) {
  return Expander(parts, at).Document(parts.source);
}

}  // namespace shardwright
