#pragma once

// What of a model is trained: frozen parameters and low-rank adapters (LoRA).

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "models/model.h"

namespace shardwright {

// What a step trains by. Each answer of a pair is a sample.
enum class TrainsBy : std::uint8_t {
  kOwn,             // the model's own loss
  kDpo,             // pairs, against a frozen reference that runs in every step
  kDpoPrecomputed,  // pairs, against log-probabilities of a reference that ran before
  kOrpo,            // pairs, without a reference (CPO and SimPO are the same here)
  kReward,          // pairs, by a score of each answer in the place of the head
  kKto,             // single answers, as kDpo; and mismatched ones, which have no gradients
  kGrpo,            // groups of completions that an engine generates (Rollout)
};

inline constexpr double kMaxGeneration = 1e6;  // seconds

// Completions of GRPO: how they are made, and what runs on them before the updates.
struct Rollout {
  std::int64_t completion = 0;   // generated tokens, the last of a sample; 0: half of it
  std::int64_t generations = 8;  // completions of a prompt
  std::int64_t updates = 1;      // steps that learn from a generation
  std::int64_t batches = 0;      // micro-batches of a generation; 0: those of a step
  bool has_old = false;          // a forward tells the log-probabilities before the updates
  bool has_reference = false;    // another one those of a frozen reference
  double engine = 0.0;           // part of each GPU's memory that an engine there reserves; 0: none
  bool sleeps = false;           // that engine holds nothing while the model learns
  bool by_trainer = false;       // no engine: the model that learns generates
  double seconds = 0.0;          // that a generation was measured to take; 0: not measured

  bool operator==(const Rollout&) const = default;
};

// Samples that a micro-batch cannot tear apart: 2 for pairs.
[[nodiscard]] std::int64_t SamplesPerExample(TrainsBy trains_by);

// Does a reference run in every step?
[[nodiscard]] bool HasReference(TrainsBy trains_by, const Rollout& rollout);

struct TrainableSpec {
  // Globs over parameter FQNs; a match gets no gradient and no optimizer state.
  std::vector<std::string> frozen = {};
  // Rank of the adapters; 0: none. With adapters everything else is frozen.
  std::int64_t lora_rank = 0;
  // What the adapters' outputs are multiplied by is alpha / rank; 0: alpha is the rank.
  double lora_alpha = 0.0;
  // Globs over the names of linear modules: over the last component ("q_proj") when the glob has no
  // dot, over the whole FQN ("model.layers.*.q_proj") otherwise.
  std::vector<std::string> lora_targets = {};
  // The adapters read their input through dropout with this probability; 0: they read it as it is.
  double lora_dropout = 0.0;
  // Globs over the names of modules, as lora_targets: PEFT's modules_to_save. A copy of each learns
  // whole, and the frozen one stays.
  std::vector<std::string> lora_saved = {};
  // DoRA: each adapted module learns the length of its weight's rows, too.
  bool lora_magnitudes = false;
  TrainsBy trains_by = TrainsBy::kOwn;
  Rollout rollout = {};  // of kGrpo
};

// Does `text` match `glob`? '*' stands for any characters, dots included, '?' for one character.
// O(|glob| |text|).
[[nodiscard]] bool MatchesGlob(std::string_view glob, std::string_view text);

// The parameters that libraries of quantized weights convert: weights of linear modules other than
// those right before a cross-entropy (the head). One flag per parameter. O(ops + params).
[[nodiscard]] std::vector<bool> ConvertibleWeights(const Model& model);

// The globs that match a linear module, in order; "all-linear" stands for the names of all linear
// modules but the head, as in PEFT. Throws InputError at `where` if none matches.
// O(globs * modules).
[[nodiscard]] std::vector<std::string> MatchedTargets(const Model& model,
                                                      const std::vector<std::string>& globs,
                                                      const std::string& where);

// Marks the frozen parameters. Adapters follow PEFT (arXiv 2106.09685): each targeted linear module
// gets lora_A.weight [rank, in] and lora_B.weight [out, rank], and behind its op the ops lora_A,
// lora_B, scale and add, whose sum replaces the output for all readers. The matrices are modules of
// their own below it, as is the copy of a saved module. `where` names the source of `spec` in
// errors. Throws InputError for a glob that matches nothing, for a rank without targets or targets
// without a rank, and for a saved module with modules below it. O(globs * parameters + ops).
void ApplyTrainable(Model& model, const TrainableSpec& spec, const Path& where);

}  // namespace shardwright
