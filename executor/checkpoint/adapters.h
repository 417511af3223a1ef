#pragma once

// Tensors of a checkpoint with what their adapters (LoRA) add to them.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "executor/checkpoint/checkpoint.h"

namespace shardwright {

// Of the settings in a manifest: what the adapters' products are multiplied by.
inline constexpr const char* kAdapterScaleSetting = "lora_scale";

// "model.layers.0.self_attn.q_proj.lora_A.weight".
[[nodiscard]] bool IsAdapter(const std::string& tensor);

class MergedWeights {
 public:
  // Reads the adapters of a checkpoint, all of them. Refers to it. Throws InputError when it does
  // not say their scale, or a matrix is missing.
  explicit MergedWeights(const Checkpoint& checkpoint);

  // As Checkpoint::Read, of W + scale B A where the tensor has adapters.
  void Read(const SavedTensor& tensor, std::int64_t begin, std::int64_t count, DType dtype,
            void* out) const;

 private:
  struct Adapter {
    std::int64_t rank = 0, in = 0, out = 0;
    std::vector<float> a = {}, b = {};  // [rank, in], [out, rank]
    bool is_transposed = false;         // the weight is [in, out], as GPT-2's
  };
  [[nodiscard]] Adapter ReadAdapter(const std::string& module) const;

  const Checkpoint& checkpoint_;
  double scale_ = 1.0;
  std::map<std::string, Adapter> adapters_;  // by the name of the weight
};

}  // namespace shardwright
