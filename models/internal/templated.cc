// Model types whose rows name a template: models/templates/*.json with the row's words and the
// config's values.

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/embedded.h"
#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/internal/hf_config.h"
#include "models/internal/model_file.h"
#include "models/internal/template.h"
#include "models/model_templates.h"

namespace shardwright {
namespace {

using Value = nlohmann::json;

// A file of models/templates, parsed once.
const Value& Embedded(const std::string& name) {
  thread_local std::map<std::string, Value> parsed;
  if (const auto found = parsed.find(name); found != parsed.end()) {
    return found->second;
  }
  for (const EmbeddedFile& file : EmbeddedModelTemplates()) {
    if (file.name == name) {
      return parsed.emplace(name, Value::parse(file.text)).first->second;
    }
  }
  throw InputError("template", Quoted(name), "a file of models/templates");
}

// The piece of a template: its own, or one that all share.
const Value* FindPiece(const Value& source, const std::string& name) {
  const auto in = [&](const Value& pieces) {
    const auto found = pieces.find(name);
    return found == pieces.end() ? nullptr : &*found;
  };
  const auto own = source.find("pieces");
  const Value* piece = own == source.end() ? nullptr : in(*own);
  piece = piece == nullptr ? in(Embedded("basics")) : piece;
  return piece == nullptr ? in(Embedded("pieces")) : piece;
}

// A value of a config or a row for expressions. Numbers that no config has are refused.
Value ToValue(const JsonValue& json) {
  constexpr double kLargest = 1e15;
  if (json.IsString()) {
    return json.AsString();
  }
  if (json.IsBool()) {
    return json.AsBool();
  }
  if (json.IsNumber()) {
    const double number = json.AsDouble();
    if (!(std::abs(number) < kLargest)) {
      throw json.Error("a number below 1e15");
    }
    const std::string shown = json.Shown();
    const bool is_integer = shown.find_first_of(".eE") == std::string::npos;
    return is_integer ? Value(static_cast<std::int64_t>(number)) : Value(number);
  }
  if (json.IsArray()) {
    Value list = Value::array();
    for (std::size_t i = 0; i < json.size(); ++i) {
      list.push_back(ToValue(json[i]));
    }
    return list;
  }
  if (!json.IsObject()) {
    return nullptr;
  }
  Value object = Value::object();
  for (const std::string& key : json.Keys()) {
    object[key] = ToValue(json.At(key));
  }
  return object;
}

// A value must be what its default is: an integer is no text.
void CheckKind(const HfConfig& config, std::string_view key, const JsonValue& value,
               const std::optional<JsonValue>& preset) {
  if (!preset || value.IsNull()) {
    return;
  }
  if (preset->IsString()) {
    (void)value.AsString();
  } else if (preset->IsBool()) {
    (void)value.AsBool();
  } else if (preset->IsNumber()) {
    const bool is_integer = preset->Shown().find_first_of(".eE") == std::string::npos;
    if (is_integer) {
      constexpr std::int64_t kMost = ModelLimits::kVocabulary;
      const std::int64_t least = std::min<std::int64_t>(0, preset->AsInt(-kMost, kMost));
      (void)config.OptionalInt(key, least, kMost);
    } else {
      (void)value.AsDouble();
    }
  } else if (preset->IsArray() && !value.IsArray()) {
    throw value.Error("a list");
  }
}

// A list of texts "among" some, or of "integers_below" the value of a key.
Value ReadKnownList(const HfConfig& config, const std::string& key, const Value& rule) {
  const std::optional<JsonValue> list = config.Find(key);
  if (!list) {
    return nullptr;
  }
  const auto choices = rule.value("among", std::vector<std::string>());
  const std::vector<std::string_view> among(choices.begin(), choices.end());
  for (std::size_t i = 0; i < list->size(); ++i) {
    if (among.empty()) {
      const std::string bound = rule.value("integers_below", "");
      (void)(*list)[i].AsInt(0, config.Int(bound, 1, ModelLimits::kVocabulary) - 1);
    } else {
      (void)(*list)[i].AsChoice(among);
    }
  }
  return ToValue(*list);
}

// The value of a key that templates/keys.json knows: "probability", "positive", a list, or the
// smallest and the largest integer (perhaps that of another key), which may be left out if it is
// "optional" or has no default.
Value ReadKnown(const HfConfig& config, const std::string& key, const Value& rule,
                bool has_default) {
  if (rule == "probability") {
    return config.Probability(key);
  }
  if (rule == "positive") {
    return config.Find(key) ? Value(config.Positive(key, 1.0)) : Value();
  }
  if (rule.is_object()) {
    return ReadKnownList(config, key, rule);
  }
  const auto bound = [&](std::size_t i) -> std::int64_t {
    if (!rule[i].is_string()) {
      return rule[i].get<std::int64_t>();
    }
    const std::string other = rule[i].get<std::string>();
    const Value most = ReadKnown(config, other, Embedded("keys").at(other), /*has_default=*/false);
    return most.is_null() ? ModelLimits::kVocabulary : most.get<std::int64_t>();
  };
  if ((rule.size() > 2 || !has_default) && !config.Find(key)) {
    return nullptr;
  }
  return config.Int(key, bound(0), bound(1));
}

class ConfigNames {
 public:
  ConfigNames(const BuildInput& input, std::string architecture)
      : input_(input), architecture_(std::move(architecture)) {}

  // Expressions ask for few names, thousands of times.
  const Value& operator()(const std::string& name) {
    const auto found = known_.find(name);
    return found != known_.end() ? found->second : known_.emplace(name, Read(name)).first->second;
  }

  // Reads every key of the row, so that a bad value or a misspelling of any of them is told.
  void ReadAll() {
    for (const std::string& key : input_.row.At("defaults").Keys()) {
      if (const auto preset = input_.row.At("defaults").Find(key); preset && preset->IsObject()) {
        (void)input_.config.Find(key);
      } else {
        (void)(*this)(key);
      }
    }
  }

  // The place of a key in the file.
  std::string Place(const std::string& name) {
    if (const std::size_t dot = name.find('.'); dot != std::string::npos) {
      return Nested(name.substr(0, dot)).Where(name.substr(dot + 1));
    }
    const std::optional<JsonValue> rope = input_.config.Find("rope_parameters");
    return rope && rope->IsObject() && rope->Find(name) ? HfConfig(*rope, *rope).Where(name)
                                                        : input_.config.Where(name);
  }

  // Of a rope over `dim` features of a head.
  RopeAngles Angles(std::int64_t dim) {
    const auto [known, is_new] = angles_.try_emplace(dim);
    if (is_new) {
      known->second = ReadAngles(dim);
    }
    return known->second;
  }

  // Misspelt keys of nested configs.
  [[nodiscard]] std::vector<std::string> Warnings() const {
    std::vector<std::string> warnings;
    for (const auto& [name, config] : nested_) {
      const std::vector<std::string> more = config->Misspelt();
      warnings.insert(warnings.end(), more.begin(), more.end());
    }
    return warnings;
  }

 private:
  RopeAngles ReadAngles(std::int64_t dim) {
    const std::optional<JsonValue> key = input_.row.Find("theta_key");
    const std::string name = key ? key->AsString() : "rope_theta";
    const std::size_t dot = name.find('.');
    return dot == std::string::npos
               ? ReadRopeAngles(input_.config, name, dim)
               : ReadRopeAngles(Nested(name.substr(0, dot)), name.substr(dot + 1), dim);
  }

  Value Read(const std::string& name) {
    if (name == "sequence_length") {
      return SequenceLength();
    }
    if (name == "architecture") {
      return architecture_;
    }
    if (name == "rope_theta") {
      return Angles(2).theta;
    }
    if (name == "num_labels") {
      return CountLabels(input_.config);
    }
    if (name == "asked_sequence_length") {
      return input_.options.sequence_length;
    }
    if (name == "asked_image_size") {
      return input_.options.image_size;
    }
    const std::size_t dot = name.find('.');
    return dot == std::string::npos ? FromConfig(input_.config, input_.row.At("defaults"), name)
                                    : FromConfig(Nested(name.substr(0, dot)),
                                                 input_.row.At("defaults").At(name.substr(0, dot)),
                                                 name.substr(dot + 1));
  }

  std::int64_t SequenceLength() {
    const std::optional<JsonValue> key = input_.row.Find("length_key");
    if (!key) {
      throw InputError(input_.type, "a template that reads a length", "a row with length_key");
    }
    const std::optional<JsonValue> learned = input_.row.Find("learned_positions");
    const NameLookup lookup = [this](const std::string& inner) { return (*this)(inner); };
    const std::string where = input_.config.file();
    const Value longest = EvaluateExpression(key->AsString(), {.lookup = lookup, .where = where});
    if (!longest.is_number_integer() || longest.get<std::int64_t>() < 1 ||
        longest.get<std::int64_t>() > ModelLimits::kTokens) {
      throw InputError(where, longest.dump() + " = " + key->AsString(),
                       "1 to " + std::to_string(ModelLimits::kTokens));
    }
    return ChooseSequenceLength(
        input_, longest.get<std::int64_t>(),
        learned && learned->AsBool() ? Positions::kLearned : Positions::kRelative);
  }

  static Value Activated(const HfConfig& config, const std::string& key) {
    const std::string name = config.Text(key);
    if (name == "relu2" || name == "quick_gelu") {
      return name;
    }
    const WrittenActivation activation = config.ActivationOf(key);
    switch (activation.function) {
      case Activation::kRelu:
        return "relu";
      case Activation::kGelu:
        return "gelu";
      case Activation::kGeluTanh:
        return activation.gelu_code == GeluCode::kNew    ? "gelu_new"
               : activation.gelu_code == GeluCode::kFast ? "gelu_fast"
                                                         : "gelu_tanh";
      case Activation::kTanh:
        return "tanh";
      case Activation::kSigmoid:
        return "sigmoid";
      default:
        return "silu";
    }
  }

  Value FromConfig(const HfConfig& config, const JsonValue& defaults, const std::string& name) {
    if (name == "padding_row") {
      const std::int64_t row =
          ReadPaddingRow(config, config.Int("vocab_size", 1, ModelLimits::kVocabulary));
      return row < 0 ? Value() : Value(row);
    }
    if (name == "rope_theta") {
      return ReadRopeAngles(config, name, 2).theta;
    }
    if (name.starts_with("activation_of_")) {
      return Activated(config, name.substr(std::string_view("activation_of_").size()));
    }
    const std::vector<std::string> known = defaults.Keys();
    if (!IsIn(known, name)) {
      throw InputError(input_.type, "a template that reads \"" + name + '"',
                       "a key of the row's defaults");
    }
    const Value& rules = Embedded("keys");
    if (const auto rule = rules.find(name); rule != rules.end()) {
      return ReadKnown(config, name, *rule, defaults.Find(name).has_value());
    }
    std::optional<JsonValue> value = config.Find(name);
    if (const std::optional<JsonValue> rope = config.Find("rope_parameters");
        rope && rope->Find(name)) {
      value = rope->Find(name);
    }
    if (!value) {
      return nullptr;
    }
    CheckKind(config, name, *value, defaults.Find(name));
    return ToValue(*value);
  }

  const HfConfig& Nested(const std::string& part) {
    auto found = nested_.find(part);
    if (found == nested_.end()) {
      const JsonValue defaults = input_.row.At("defaults").At(part);
      const JsonValue& file = input_.config.json();
      const std::optional<JsonValue> value = file.Find(part);
      const bool is_there = value && !value->IsNull();
      // Older files have the keys of the language model at their root.
      const JsonValue& absent = part == "text_config" ? file : defaults;
      found =
          nested_.emplace(part, std::make_unique<HfConfig>(is_there ? *value : absent, defaults))
              .first;
      (void)input_.config.Find(part);
    }
    return *found->second;
  }

  const BuildInput& input_;
  std::string architecture_;
  std::map<std::string, std::unique_ptr<HfConfig>> nested_;
  std::map<std::string, Value> known_;
  std::map<std::int64_t, RopeAngles> angles_;
};

// Which of the row's classes the file asks for; the first where it names none of them. Empty where
// the row builds one class whatever the file says.
std::string ChooseArchitecture(const BuildInput& input, std::vector<std::string>& warnings) {
  if (!input.row.Find("architectures")) {
    return "";
  }
  const JsonValue classes = input.row.At("architectures");
  const std::string asked = ReadArchitecture(input.config);
  for (std::size_t i = 0; i < classes.size(); ++i) {
    if (classes[i].AsString() == asked) {
      return asked;
    }
  }
  const std::string first = classes[0].AsString();
  if (!asked.empty()) {
    warnings.push_back(input.config.file() + ": " + asked + " is built as " + first +
                       "; shardwright export writes the class itself");
  }
  return first;
}

}  // namespace

Model BuildTemplate(const BuildInput& input) {
  input.row.AllowOnly({"template", "architectures", "defaults", "with", "length_key",
                       "learned_positions", "theta_key"});
  std::vector<std::string> warnings;
  ConfigNames names(input, ChooseArchitecture(input, warnings));
  names.ReadAll();
  const NameLookup lookup = [&names](const std::string& name) { return names(name); };
  const std::string where = input.config.file();
  const Value& source = Embedded(input.row.At("template").AsString());
  const std::optional<JsonValue> words = input.row.Find("with");
  const Value document = ExpandTemplate(
      {.source = source,
       .words = words ? ToValue(*words) : Value::object(),
       .piece = [&source](const std::string& name) { return FindPiece(source, name); },
       .place = [&names](const std::string& name) { return names.Place(name); }},
      {.lookup = lookup, .where = where});
  const JsonValue file =
      JsonValue::Parse(document.dump(), where + ", written out as " + input.type);
  LoadOptions options;
  options.sequence_length = document.value("sequence_length", std::int64_t{0});
  const TemplateSource written{.config = where,
                               .angles = [&names](std::int64_t dim) { return names.Angles(dim); }};
  Model model = ReadModelFile(file, input.name, options, &written);
  model.type = input.type;
  model.warnings = std::move(warnings);
  for (std::string& warning : names.Warnings()) {
    model.warnings.push_back(std::move(warning));
  }
  return model;
}

}  // namespace shardwright
