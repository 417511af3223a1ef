#include "models/internal/hf_config.h"

#include <array>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"

namespace shardwright {
namespace {

// Other spellings of a key, tried in this order after the key itself. Source: `attribute_map` of
// the configuration classes in Transformers, and the two spellings of mixture-of-experts files.
struct Alias {
  std::string_view key;
  std::array<std::string_view, 3> others;
};
constexpr std::array<Alias, 9> kAliases = {{
    {"hidden_size", {"n_embd", "d_model", "n_embed"}},
    {"num_hidden_layers", {"n_layer", "n_layers", "num_layers"}},
    {"num_attention_heads", {"n_head", "n_heads", "num_heads"}},
    {"intermediate_size", {"n_inner", "ffn_dim", "d_ff"}},
    {"max_position_embeddings", {"n_positions", "n_ctx", "max_seq_len"}},
    {"num_local_experts", {"num_experts", "n_routed_experts", ""}},
    {"hidden_act", {"hidden_activation", "activation_function", ""}},
    {"head_dim", {"d_kv", "", ""}},
    {"sliding_window_pattern", {"_sliding_window_pattern", "", ""}},
}};

struct NamedActivation {
  std::string_view name;
  WrittenActivation activation;
};
// Names of transformers.activations.ACT2FN.
constexpr std::array<NamedActivation, 11> kActivations = {{
    {"silu", {Activation::kSilu}},
    {"swish", {Activation::kSilu}},
    {"gelu", {Activation::kGelu}},
    {"gelu_python", {Activation::kGelu}},
    {"gelu_new", {Activation::kGeluTanh, GeluCode::kNew}},
    {"gelu_fast", {Activation::kGeluTanh, GeluCode::kFast}},
    {"gelu_accurate", {Activation::kGeluTanh, GeluCode::kNew}},
    {"gelu_pytorch_tanh", {Activation::kGeluTanh}},
    {"relu", {Activation::kRelu}},
    {"tanh", {Activation::kTanh}},
    {"sigmoid", {Activation::kSigmoid}},
}};

bool HasKey(const JsonValue& object, std::string_view key) {
  // Find does not tell null from absent; At does, but throws. Configs are small.
  const std::vector<std::string> keys = object.Keys();
  return IsIn(keys, key);
}

// The node under `key` or an alias, and whether one is present at all (perhaps null).
std::pair<std::optional<JsonValue>, bool> Lookup(const JsonValue& object, std::string_view key) {
  const auto look = [&](std::string_view name) -> std::pair<std::optional<JsonValue>, bool> {
    std::optional<JsonValue> value = object.Find(name);
    const bool present = value.has_value() || HasKey(object, name);
    return {std::move(value), present};
  };
  auto found = look(key);
  const auto alias = FindIn(kAliases, key, &Alias::key);
  if (found.first || alias == kAliases.end()) {
    return found;
  }
  for (const std::string_view other : alias->others) {
    if (other.empty()) {
      break;
    }
    auto next = look(other);
    found.second = found.second || next.second;
    if (next.first) {
      return next;
    }
  }
  return found;
}

// One letter added, dropped or changed, or two neighbours swapped. Files hold many keys that nobody
// here reads, so that no looser likeness would do.
bool IsTypo(std::string_view a, std::string_view b) {
  while (!a.empty() && !b.empty() && a.front() == b.front()) {
    a.remove_prefix(1);
    b.remove_prefix(1);
  }
  while (!a.empty() && !b.empty() && a.back() == b.back()) {
    a.remove_suffix(1);
    b.remove_suffix(1);
  }
  const bool is_swap = a.size() == 2 && b.size() == 2 && a[0] == b[1] && a[1] == b[0];
  return is_swap || (a.size() <= 1 && b.size() <= 1);
}

}  // namespace

std::vector<std::string> HfConfig::Misspelt() const {
  std::vector<std::string> missing;
  std::set<std::string, std::less<>> known = asked_;
  for (const std::string& key : asked_) {
    const auto alias = FindIn(kAliases, key, &Alias::key);
    if (alias != kAliases.end()) {
      known.insert(alias->others.begin(), alias->others.end());
    }
    if (!Lookup(config_, key).second) {
      missing.push_back(key);
    }
  }
  std::vector<std::string> warnings;
  for (const std::string& key : config_.Keys()) {
    const auto meant =
        FindIf(missing, [&](const std::string& other) { return IsTypo(key, other); });
    if (!known.contains(key) && meant != missing.end()) {
      warnings.push_back(config_.path().Field(key).str() + " is not read; did you mean \"" +
                         *meant + "\"?");
    }
  }
  return warnings;
}

std::optional<JsonValue> HfConfig::Find(std::string_view key) const {
  asked_.emplace(key);
  const auto [value, present] = Lookup(config_, key);
  return present ? value : Lookup(defaults_, key).first;
}

std::string HfConfig::Where(std::string_view key) const {
  const std::optional<JsonValue> value = Lookup(config_, key).first;
  return value ? value->path().str() : config_.path().Field(key).str();
}

std::optional<std::int64_t> HfConfig::OptionalInt(std::string_view key, std::int64_t min,
                                                  std::int64_t max) const {
  const std::optional<JsonValue> value = Find(key);
  if (!value) {
    return std::nullopt;
  }
  if (Lookup(config_, key).second) {
    return value->AsInt(min, max);
  }
  // A default that does not go with what the file says: name the file, not the table of defaults.
  const std::int64_t number = value->AsInt(std::numeric_limits<std::int64_t>::min(),
                                           std::numeric_limits<std::int64_t>::max());
  if (number < min || number > max) {
    throw InputError(config_.path().Field(key).str(), "its default " + std::to_string(number),
                     "an integer from " + std::to_string(min) + " to " + std::to_string(max));
  }
  return number;
}

std::int64_t HfConfig::Int(std::string_view key, std::int64_t min, std::int64_t max) const {
  const std::optional<std::int64_t> value = OptionalInt(key, min, max);
  if (!value) {
    throw InputError(config_.path().Field(key).str(), "no value",
                     "an integer from " + std::to_string(min) + " to " + std::to_string(max));
  }
  return *value;
}

double HfConfig::Probability(std::string_view key) const {
  const std::optional<JsonValue> value = Find(key);
  return value ? value->AsProbability() : 0.0;
}

double HfConfig::Positive(std::string_view key, double fallback) const {
  const std::optional<JsonValue> value = Find(key);
  if (!value) {
    return fallback;
  }
  const double number = value->AsDouble();
  if (!(number > 0.0 && number < 1e18)) {
    throw value->Error("a positive number below 1e18");
  }
  return number;
}

WrittenActivation HfConfig::ActivationOf(std::string_view key) const {
  std::optional<JsonValue> value = Find(key);
  if (!value) {
    // Gemma's published files say null and mean the class default.
    value = Lookup(defaults_, key).first;
  }
  if (!value) {
    throw InputError(config_.path().Field(key).str(), "no value", "the name of an activation");
  }
  const std::string name = value->AsString();
  std::vector<std::string> names;
  for (const NamedActivation& known : kActivations) {
    if (known.name == name) {
      return known.activation;
    }
    names.emplace_back(known.name);
  }
  throw value->Error("one of " + Listed(names, Quoted), DidYouMean(name, names));
}

std::string HfConfig::Text(std::string_view key) const {
  const std::optional<JsonValue> value = Find(key);
  return value ? value->AsString() : std::string();
}

std::int64_t ChooseSequenceLength(const BuildInput& input, std::int64_t longest,
                                  Positions positions) {
  constexpr std::int64_t kDefaultLongest = 2048;
  const std::int64_t wanted = input.options.sequence_length;
  if (wanted == 0) {
    return std::min(longest, kDefaultLongest);
  }
  if (wanted < 0 || wanted > ModelLimits::kTokens) {
    throw InputError("sequence length", std::to_string(wanted),
                     "1 to " + std::to_string(ModelLimits::kTokens));
  }
  if (positions == Positions::kLearned && wanted > longest) {
    throw InputError(input.config.Where("max_position_embeddings"),
                     std::to_string(longest) + " learned positions",
                     "at least the sequence length " + std::to_string(wanted));
  }
  return wanted;
}

std::int64_t ReadPaddingRow(const HfConfig& config, std::int64_t vocabulary) {
  const auto id = config.OptionalInt("pad_token_id", -vocabulary, vocabulary - 1);
  if (!id) {
    return -1;
  }
  return *id < 0 ? *id + vocabulary : *id;
}

double ReadInitializer(const HfConfig& config) {
  for (const char* key : {"initializer_factor", "initializer_range", "init_std"}) {
    if (config.Find(key)) {
      return config.Positive(key, 0.0);
    }
  }
  return Model().initializer;
}

std::string ReadArchitecture(const HfConfig& config) {
  const std::optional<JsonValue> names = config.Find("architectures");
  return names && names->size() > 0 ? (*names)[0].AsString() : std::string();
}

std::int64_t CountLabels(const HfConfig& config) {
  if (const auto labels = config.OptionalInt("num_labels", 1, ModelLimits::kFeatures)) {
    return *labels;
  }
  const std::optional<JsonValue> names = config.Find("id2label");
  constexpr std::int64_t kDefault = 2;
  return names ? std::max<std::int64_t>(1, static_cast<std::int64_t>(names->Keys().size()))
               : kDefault;
}

RopeAngles ReadRopeAngles(const HfConfig& config, std::string_view theta_key, std::int64_t dim) {
  constexpr double kTheta = 10'000.0;  // the default of every configuration class
  RopeAngles angles{.dim = dim, .theta = config.Positive(theta_key, kTheta)};
  std::optional<JsonValue> scaling = config.Find("rope_scaling");
  if (!scaling) {
    scaling = config.Find("rope_parameters");
  }
  if (!scaling) {
    return angles;
  }
  const HfConfig rope(*scaling, *scaling);
  angles.theta = rope.Positive("rope_theta", angles.theta);
  const std::string name = rope.Find("rope_type") ? rope.Text("rope_type") : rope.Text("type");
  if (name.empty() || name == "default") {
    return angles;
  }
  angles.factor = rope.Positive("factor", 1.0);
  if (name == "linear") {
    angles.scaling = RopeScaling::kLinear;
  } else if (name == "llama3") {
    angles.scaling = RopeScaling::kLlama3;
    angles.low_frequency_factor = rope.Positive("low_freq_factor", 1.0);
    angles.high_frequency_factor = rope.Positive("high_freq_factor", 4.0);
    angles.original_length = rope.Positive("original_max_position_embeddings", 8192.0);
    if (angles.high_frequency_factor <= angles.low_frequency_factor) {
      throw scaling->Error("a high_freq_factor above the low_freq_factor");
    }
  } else {
    angles.scaling = RopeScaling::kOther;
  }
  return angles;
}

}  // namespace shardwright
