#pragma once

// Shared by the files that cut a model for ranks (cut_context, cut_experts, cut_tensor): each takes
// the ops one by one and adds what a rank runs in their place.

#include <string>
#include <string_view>

#include "models/model.h"

namespace shardwright {

class Cutter {
 public:
  // `where` names the source of `ranks` in errors.
  Cutter(Model& model, std::int64_t ranks, const std::string& where)
      : model_(model), ranks_(ranks), where_(where) {}

 protected:
  [[noreturn]] void Refuse(std::string_view expected) const;
  // Only one rank can have `op`, because of `what`.
  [[noreturn]] void Refuse(const ModelOp& op, std::string_view what) const;
  // `size`, which counts `what` of the op, divided by the ranks. Throws InputError for a remainder.
  void Divide(std::int64_t& size, const ModelOp& op, std::string_view what) const;
  TensorId NewTensor(TensorId like);
  [[nodiscard]] std::uint32_t SpecIndex(const OpSpec& spec);
  // Adds the op, and says how many elements its outputs have. Counts of rows by expert stay.
  void Keep(ModelOp op, const OpSpec& spec);
  // When all ops are there.
  void SetProducers();

  Model& model_;
  const std::int64_t ranks_;
  const std::string& where_;
};

}  // namespace shardwright
