// Model types whose rows name a template: models/templates/*.json with the row's words and the
// config's values.

#include <algorithm>
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
#include "models/internal/hf_config.h"
#include "models/internal/model_file.h"
#include "models/internal/template.h"
#include "models/model_templates.h"

namespace shardwright {
namespace {

using Value = nlohmann::json;

Value ParseEmbedded(std::string_view name) {
  for (const EmbeddedFile& file : EmbeddedModelTemplates()) {
    if (file.name == name) {
      return Value::parse(file.text);
    }
  }
  throw InputError("template", '"' + std::string(name) + '"', "a file of models/templates");
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
    if (is_integer && key != "pad_token_id") {
      (void)config.OptionalInt(key, 0, ModelLimits::kVocabulary);
    } else {
      (void)value.AsDouble();
    }
  } else if (preset->IsArray() && !value.IsArray()) {
    throw value.Error("a list");
  }
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
  Value Read(const std::string& name) {
    if (name == "sequence_length") {
      return SequenceLength();
    }
    if (name == "architecture") {
      return architecture_;
    }
    if (name == "num_labels") {
      return CountLabels(input_.config);
    }
    if (name == "asked_image_size") {
      return input_.options.image_size;
    }
    const std::size_t dot = name.find('.');
    return dot == std::string::npos ? FromConfig(input_.config, input_.row.At("defaults"), name)
                                    : FromNested(name.substr(0, dot), name.substr(dot + 1));
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
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw InputError(input_.type, "a template that reads \"" + name + '"',
                       "a key of the row's defaults");
    }
    std::optional<JsonValue> value = config.Find(name);
    if (const std::optional<JsonValue> rope = config.Find("rope_parameters");
        rope && rope->IsObject() && rope->Find(name)) {
      value = rope->Find(name);
    }
    if (!value) {
      return nullptr;
    }
    CheckKind(config, name, *value, defaults.Find(name));
    return ToValue(*value);
  }

  Value FromNested(const std::string& part, const std::string& name) {
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
    return FromConfig(*found->second, input_.row.At("defaults").At(part), name);
  }

  const BuildInput& input_;
  std::string architecture_;
  std::map<std::string, std::unique_ptr<HfConfig>> nested_;
  std::map<std::string, Value> known_;
};

// Which of the row's classes the file asks for; the first where it names none of them.
std::string ChooseArchitecture(const BuildInput& input, std::vector<std::string>& warnings) {
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

// Angles that the config stretches; a template's rope ops have theta and size only.
void ScaleRopes(const HfConfig& config, Model& model) {
  for (OpSpec& spec : model.specs) {
    if (spec.kind == OpKind::kRope) {
      const RopeAngles read = ReadRopeAngles(config, "rope_theta", spec.rope.dim);
      const RopeAngles own = spec.rope;
      spec.rope = read;
      spec.rope.theta = own.theta;
      spec.rope.interleaved = own.interleaved;
    }
  }
}

}  // namespace

Model BuildTemplate(const BuildInput& input) {
  input.row.AllowOnly({"builder", "template", "architectures", "defaults", "with", "length_key",
                       "learned_positions"});
  std::vector<std::string> warnings;
  ConfigNames names(input, ChooseArchitecture(input, warnings));
  const NameLookup lookup = [&names](const std::string& name) { return names(name); };
  const std::string where = input.config.file();
  const std::optional<JsonValue> words = input.row.Find("with");
  const Value document =
      ExpandTemplate({.source = ParseEmbedded(input.row.At("template").AsString()),
                      .pieces = ParseEmbedded("pieces"),
                      .words = words ? ToValue(*words) : Value::object()},
                     {.lookup = lookup, .where = where});
  const JsonValue file =
      JsonValue::Parse(document.dump(), where + ", written out as " + input.type);
  LoadOptions options;
  options.sequence_length = document.value("sequence_length", std::int64_t{0});
  Model model = ReadModelFile(file, input.name, options);
  model.type = input.type;
  ScaleRopes(input.config, model);
  for (const std::string& key : input.row.At("defaults").Keys()) {
    (void)input.config.Find(key);  // so that a misspelling of any of them is told
  }
  model.warnings = std::move(warnings);
  for (std::string& warning : names.Warnings()) {
    model.warnings.push_back(std::move(warning));
  }
  return model;
}

}  // namespace shardwright
