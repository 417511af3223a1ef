#include "models/totals.h"

#include <cstddef>

#include "core/ranges.h"

namespace shardwright {
namespace {

double FlopsOf(const std::vector<Kernel>& kernels) {
  double flops = 0.0;
  for (const Kernel& kernel : kernels) {
    flops += kernel.flops.value;
  }
  return flops;
}

// Scores and products with the values, all of them, masked or not, as torch.utils.flop_counter
// counts attention: two products forward, backward four, and the scores once more where they are
// not kept.
void CountWholeAttention(const OpSpec& spec, std::int64_t batch, bool is_kept, double* forward,
                         double* backward) {
  const double scores = 2.0 * static_cast<double>(batch * spec.heads) *
                        static_cast<double>(spec.seq_q) * static_cast<double>(spec.seq_k);
  *forward = scores * static_cast<double>(spec.head_dim + spec.value_dim);
  *backward = 2.0 * *forward + (is_kept ? 0.0 : scores * static_cast<double>(spec.head_dim));
}

// Which tensors need gradients, which share storage and which storages are kept, op after op.
class Counter {
 public:
  Counter(const Model& model, std::int64_t batch, DType compute, const KernelSetOptions& options)
      : model_(model),
        batch_(batch),
        compute_(compute),
        options_(options),
        base_(model.tensors.size()),
        needs_grad_(model.tensors.size(), false),
        kept_(model.tensors.size(), false) {
    for (std::size_t i = 0; i < base_.size(); ++i) {
      base_[i] = i;
    }
    for (const Parameter& param : model.params) {
      learns_.push_back(param.trainable);
    }
  }

  // `reaches`: does a loss depend on the op?
  void Add(const ModelOp& op, bool reaches) {
    OpSpec spec = model_.SpecOf(op);
    spec.bias_only = TrainsBiasOnly(model_, op, learns_);
    const OpKernels k = LowerOp(spec, RunsOnce(model_, op) ? 1 : batch_, compute_, options_);
    const bool stops = spec.other.stops_gradient;
    const bool weights = !stops && AnyOf(op.params, [&](ParamId p) { return learns_[p.value]; });
    const bool data = !stops && AnyOf(op.inputs, [&](TensorId t) { return needs_grad_[t.value]; });
    double forward = FlopsOf(k.forward);
    double backward_data = FlopsOf(k.backward_data);
    if (k.ring.steps > 0) {
      const auto more = static_cast<double>(k.ring.steps - 1);
      forward += FlopsOf(k.ring.first) + more * FlopsOf(k.ring.later);
      backward_data += FlopsOf(k.ring.back_first) + more * FlopsOf(k.ring.back_later);
    }
    if (spec.kind == OpKind::kAttention) {
      const bool is_kept =
          NoneOf(k.forward, [](const Kernel& kernel) { return IsAttention(kernel.kind); });
      CountWholeAttention(spec, batch_, is_kept, &forward, &backward_data);
    }
    totals_.forward += Flops(forward);
    for (std::size_t i = 0; i < op.outputs.size(); ++i) {
      const std::size_t output = op.outputs[i].value;
      const TensorRole role = model_.tensors[output].role;
      needs_grad_[output] =
          (weights || data) && role != TensorRole::kIndex && role != TensorRole::kBool;
      const int alias = i < k.output_aliases.size() ? k.output_aliases[i] : -1;
      if (alias >= 0 && static_cast<std::size_t>(alias) < op.inputs.size()) {
        base_[output] = base_[op.inputs[static_cast<std::size_t>(alias)].value];
      }
    }
    if (weights || data) {
      totals_.backward += Flops(!reaches ? 0.0
                                         : (data ? backward_data : 0.0) +
                                               (weights ? FlopsOf(k.backward_weight) : 0.0));
      AddSaved(op, k, weights);
    }
  }

  [[nodiscard]] ModelTotals Totals() const {
    ModelTotals totals = totals_;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      if (kept_[i]) {
        totals.saved += TensorBytes(model_.tensors[i], batch_, compute_);
      }
    }
    return totals;
  }

 private:
  void AddSaved(const ModelOp& op, const OpKernels& k, bool weights) {
    const std::uint32_t saved = weights ? k.saves_input : k.saves_input & ~k.saves_input_for_weight;
    for (std::size_t i = 0; i < op.inputs.size() && i < 32; ++i) {
      if (((saved >> i) & 1U) != 0) {
        kept_[base_[op.inputs[i].value]] = true;
      }
    }
    for (std::size_t i = 0; i < op.outputs.size() && i < 32; ++i) {
      if (((k.saves_output >> i) & 1U) != 0) {
        kept_[base_[op.outputs[i].value]] = true;
      }
    }
    totals_.saved += k.extra_saved;
  }

  const Model& model_;
  std::int64_t batch_;
  DType compute_;
  const KernelSetOptions& options_;
  std::vector<std::size_t> base_;  // per tensor: the one whose storage it has
  std::vector<bool> needs_grad_, kept_, learns_;
  ModelTotals totals_;
};

}  // namespace

std::vector<bool> OpsBehindResult(const Model& model) {
  std::vector<bool> is_read(model.tensors.size(), false);
  std::vector<bool> has_loss_in_it(model.tensors.size(), false);  // a loss, or a sum with one
  bool has_loss = false;
  for (const ModelOp& op : model.ops) {
    bool reads_loss = false;
    for (const TensorId t : op.inputs) {
      is_read[t.value] = true;
      reads_loss = reads_loss || has_loss_in_it[t.value];
    }
    for (const TensorId t : op.outputs) {
      const bool is_loss = model.tensors[t.value].role == TensorRole::kLoss;
      has_loss = has_loss || is_loss;
      has_loss_in_it[t.value] = is_loss || (reads_loss && !model.SpecOf(op).other.stops_gradient);
    }
  }
  const bool has_end = model.stages.empty() || !model.stages.back().sent.valid();
  const auto is_sent = [&](TensorId t) { return IsIn(model.stages, t, &Model::Stage::sent); };
  std::vector<bool> wanted(model.tensors.size(), false);
  std::vector<bool> reaches(model.ops.size(), false);
  for (std::size_t i = model.ops.size(); i-- > 0;) {
    const ModelOp& op = model.ops[i];
    for (const TensorId t : op.outputs) {
      const bool is_result =
          model.tensors[t.value].role == TensorRole::kLoss || is_sent(t) ||
          (has_end && !is_read[t.value] && (!has_loss || has_loss_in_it[t.value]));
      reaches[i] = reaches[i] || is_result || wanted[t.value];
    }
    reaches[i] = reaches[i] && !model.SpecOf(op).other.stops_gradient;
    for (std::size_t k = 0; reaches[i] && k < op.inputs.size(); ++k) {
      wanted[op.inputs[k].value] = true;
    }
  }
  return reaches;
}

ModelTotals TotalsOf(const Model& model, std::int64_t batch, DType compute,
                     const KernelSetOptions& options) {
  Counter counter(model, batch, compute, options);
  const std::vector<bool> reaches = OpsBehindResult(model);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    counter.Add(model.ops[i], reaches[i]);
  }
  return counter.Totals();
}

}  // namespace shardwright
