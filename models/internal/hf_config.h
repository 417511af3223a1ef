#pragma once

// One Hugging Face config.json with the defaults of its configuration class, and what the template
// of a model type receives.

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "models/internal/builder.h"
#include "models/loader.h"
#include "models/model.h"

namespace shardwright {

// Reads keys under their canonical name or an alias ("n_embd" for "hidden_size"). A key that is
// absent takes the class default; a key that is null has no value, as in Python. Unknown keys are
// normal in these files and ignored; wrong types and ranges throw InputError with the field path.
class HfConfig {
 public:
  HfConfig(JsonValue config, JsonValue defaults)
      : config_(std::move(config)), defaults_(std::move(defaults)) {}

  [[nodiscard]] std::optional<JsonValue> Find(std::string_view key) const;
  // A required integer in [min, max].
  [[nodiscard]] std::int64_t Int(std::string_view key, std::int64_t min, std::int64_t max) const;
  [[nodiscard]] std::optional<std::int64_t> OptionalInt(std::string_view key, std::int64_t min,
                                                        std::int64_t max) const;
  // A probability in [0, 1); 0 when there is no value.
  [[nodiscard]] double Probability(std::string_view key) const;
  // A positive number; `fallback` when there is no value.
  [[nodiscard]] double Positive(std::string_view key, double fallback) const;
  // An activation function by its name in Transformers.
  [[nodiscard]] WrittenActivation ActivationOf(std::string_view key) const;
  // Empty when there is no value.
  [[nodiscard]] std::string Text(std::string_view key) const;
  // "config.json: hidden_size", for errors about the value that Find returns.
  [[nodiscard]] std::string Where(std::string_view key) const;

  // Keys of the file that nobody asked for and that look like one that was asked for and is not
  // there, one warning each.
  [[nodiscard]] std::vector<std::string> Misspelt() const;

  [[nodiscard]] const JsonValue& json() const { return config_; }
  [[nodiscard]] std::string file() const { return config_.path().str(); }

 private:
  JsonValue config_;
  JsonValue defaults_;
  mutable std::set<std::string, std::less<>> asked_;
};

// What a template is filled in for: the config, the row of its model type, the caller's options.
struct BuildInput {
  const HfConfig& config;
  const JsonValue& row;
  const LoadOptions& options;
  std::string name;
  std::string type;
};

enum class Positions { kRelative, kLearned };

// The sequence length to build for: options.sequence_length, or else the smaller of `longest` and
// 2048. Learned positions refuse more than `longest`.
[[nodiscard]] std::int64_t ChooseSequenceLength(const BuildInput& input, std::int64_t longest,
                                                Positions positions);

// The row of an embedding of `vocabulary` rows that pad_token_id names, from the end when it is
// negative, as torch.nn.Embedding reads its padding_idx; -1 when there is none.
[[nodiscard]] std::int64_t ReadPaddingRow(const HfConfig& config, std::int64_t vocabulary);
// Model::initializer: initializer_range, init_std or initializer_factor (T5).
[[nodiscard]] double ReadInitializer(const HfConfig& config);

// The first entry of `architectures`; empty when there is none.
[[nodiscard]] std::string ReadArchitecture(const HfConfig& config);
// num_labels, or the size of id2label, or 2 as in Transformers.
[[nodiscard]] std::int64_t CountLabels(const HfConfig& config);

// The angles of a rotary embedding over `dim` features of a head: theta from `theta_key` (or inside
// rope_parameters, where newer files have it), scaling from rope_scaling or rope_parameters.
[[nodiscard]] RopeAngles ReadRopeAngles(const HfConfig& config, std::string_view theta_key,
                                        std::int64_t dim);

// The model of a row: its template (models/templates), filled in for the config. Throws InputError
// for configs it cannot build.
[[nodiscard]] Model BuildTemplate(const BuildInput& input);

}  // namespace shardwright
