// Llama-like decoders: pre-norm (or sandwich-norm) layers of attention with rotary positions and a
// gated MLP or a mixture of experts. What differs between model types is in their table rows.

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "models/internal/builder.h"
#include "models/internal/decoder_row.h"
#include "models/internal/decoder_sizes.h"
#include "models/internal/hf_config.h"

namespace shardwright {
namespace {

// DeepSeek's norms inside the attention take their class default, whatever rms_norm_eps says.
constexpr double kLatentEpsilon = 1e-6;

class DecoderBuilder {
 public:
  DecoderBuilder(const BuildInput& input, const DecoderRow& row, const DecoderSizes& sizes)
      : row_(row),
        sizes_(sizes),
        builder_(input.config.file(), input.name, input.type, row.class_prefix + "ForCausalLM"),
        is_tied_(input.config.Flag("tie_word_embeddings")),
        soft_cap_(sizes.soft_cap) {}

  Model Build() {
    const std::int64_t hidden = sizes_.common.hidden;
    const std::int64_t vocabulary = sizes_.common.vocabulary;
    builder_.SetNormConstants(sizes_.epsilon, row_.norm_weight_offset);
    const ModuleId root = ModelBuilder::Root();
    const ModuleId body = builder_.AddModule(root, "model", Class("Model"));
    Layer embedding = builder_.AddEmbedding(body, "embed_tokens", vocabulary, hidden);
    embedding.padding_row = sizes_.padding_row;
    const TensorId ids = AddTokenInput(builder_, sizes_.tokens);
    TensorId x = builder_.Embedding(embedding, sizes_.tokens, ids);
    if (row_.scaled_embedding) {
      x = builder_.Scale(body, "embedding_scale", {sizes_.tokens, hidden},
                         std::sqrt(static_cast<double>(hidden)), x);
    }
    const ModuleId layers = builder_.AddModule(body, "layers", "ModuleList");
    for (std::int64_t i = 0; i < sizes_.common.layers; ++i) {
      x = AddLayer(layers, static_cast<std::size_t>(i), x);
    }
    const Layer norm = builder_.AddNorm(body, "norm", hidden, false, Class("RMSNorm"));
    x = builder_.RmsNorm(norm, sizes_.tokens, x);
    const Layer head =
        is_tied_ ? builder_.AddTiedLinear(root, "lm_head", hidden, vocabulary, embedding.weight)
                 : builder_.AddLinear(root, "lm_head", hidden, vocabulary, false);
    TensorId logits = builder_.Linear(head, sizes_.tokens, x);
    if (soft_cap_) {
      // logits = cap * tanh(logits / cap), as three passes over the logits.
      const ScaleSize size{sizes_.tokens, vocabulary};
      logits = builder_.Scale(root, "soft_cap_divide", size, 1.0 / *soft_cap_, logits);
      logits = builder_.Activate(root, "soft_cap_tanh", sizes_.tokens, vocabulary,
                                 {Activation::kTanh}, logits);
      logits = builder_.Scale(root, "soft_cap_multiply", size, *soft_cap_, logits);
    }
    AddCrossEntropy(builder_, sizes_.tokens, vocabulary, logits);
    Model model = builder_.Finish();
    model.block_classes = {Class("DecoderLayer")};
    model.sequence_length = sizes_.tokens;
    model.tokens_per_sample = sizes_.tokens;
    return model;
  }

 private:
  struct GroupedAttention {
    ModuleId module;
    Layer q, k, v, o, q_norm, k_norm;
    Layer qkv;  // of packed projections, instead of q, k and v
  };
  struct LatentAttention {
    ModuleId module;
    Layer q, q_down, q_norm, q_up, kv_down, kv_norm, kv_up, o;
  };
  struct Mlp {
    ModuleId module;
    Layer gate, up, down;
    Layer gate_up;  // of packed projections, instead of gate and up
    std::int64_t intermediate = 0;
  };
  struct SparseMlp {
    ModuleId module;
    ModuleId router;
    ParamId router_weight;
    ModuleId experts;
    std::vector<ParamId> expert_weights;
    std::optional<Mlp> shared;
  };

  [[nodiscard]] std::string Class(const char* suffix) const { return row_.class_prefix + suffix; }

  // Modules first, in registration order, then ops in execution order.
  TensorId AddLayer(ModuleId layers, std::size_t i, TensorId x) {
    const std::int64_t hidden = sizes_.common.hidden;
    const std::string norm_class = Class("RMSNorm");
    const ModuleId layer = builder_.AddModule(layers, std::to_string(i), Class("DecoderLayer"));
    std::optional<GroupedAttention> grouped;
    std::optional<LatentAttention> latent;
    if (sizes_.latent) {
      latent = AddLatentAttention(layer);
    } else {
      grouped = AddGroupedAttention(layer);
    }
    std::optional<Mlp> mlp;
    std::optional<SparseMlp> sparse;
    if (sizes_.moe && sizes_.moe->is_sparse[i]) {
      sparse = AddSparseMlp(layer);
    } else {
      mlp = AddMlp(layer, "mlp", sizes_.intermediate);
    }
    const auto norm = [&](const char* name) {
      return builder_.AddNorm(layer, name, hidden, false, norm_class);
    };
    const Layer input_norm = norm("input_layernorm");
    const Layer attention_norm = norm("post_attention_layernorm");
    Layer before_mlp = attention_norm;
    Layer after_mlp;
    if (row_.sandwich_norms) {
      before_mlp = norm("pre_feedforward_layernorm");
      after_mlp = norm("post_feedforward_layernorm");
    }

    TensorId y = builder_.RmsNorm(input_norm, sizes_.tokens, x);
    y = grouped ? Run(*grouped, sizes_.windows[i], y) : Run(*latent, y);
    if (row_.sandwich_norms) {
      y = builder_.RmsNorm(attention_norm, sizes_.tokens, y);
    }
    const auto drop = [&](const char* name, TensorId from) {
      return builder_.Dropout(layer, name, sizes_.tokens, hidden, sizes_.residual_dropout, from);
    };
    x = builder_.Add(layer, "add_1", sizes_.tokens, hidden, x, drop("resid_attn_dropout", y));
    y = builder_.RmsNorm(before_mlp, sizes_.tokens, x);
    y = mlp ? Run(*mlp, y) : Run(*sparse, y);
    if (row_.sandwich_norms) {
      y = builder_.RmsNorm(after_mlp, sizes_.tokens, y);
    }
    return builder_.Add(layer, "add_2", sizes_.tokens, hidden, x, drop("resid_mlp_dropout", y));
  }

  GroupedAttention AddGroupedAttention(ModuleId layer) {
    const std::int64_t hidden = sizes_.common.hidden;
    const std::int64_t query = sizes_.common.heads * sizes_.head_dim;
    const std::int64_t key = sizes_.kv_heads * sizes_.head_dim;
    GroupedAttention a;
    a.module = builder_.AddModule(layer, "self_attn", Class("Attention"));
    if (row_.packed_projections) {
      a.o = builder_.AddLinear(a.module, "o_proj", query, hidden, row_.output_bias);
      a.qkv = builder_.AddLinear(a.module, "qkv_proj", hidden, query + 2 * key, row_.qkv_bias);
      return a;
    }
    a.q = builder_.AddLinear(a.module, "q_proj", hidden, query, row_.qkv_bias);
    a.k = builder_.AddLinear(a.module, "k_proj", hidden, key, row_.qkv_bias);
    a.v = builder_.AddLinear(a.module, "v_proj", hidden, key, row_.qkv_bias);
    a.o = builder_.AddLinear(a.module, "o_proj", query, hidden, row_.output_bias);
    if (row_.qk_norm) {
      a.q_norm = builder_.AddNorm(a.module, "q_norm", sizes_.head_dim, false, Class("RMSNorm"));
      a.k_norm = builder_.AddNorm(a.module, "k_norm", sizes_.head_dim, false, Class("RMSNorm"));
    }
    return a;
  }

  TensorId Run(const GroupedAttention& a, std::int64_t window, TensorId x) {
    const std::int64_t tokens = sizes_.tokens;
    if (row_.packed_projections) {
      // Rotation writes new queries and keys; values stay a view of the packed projection.
      const TensorId packed = builder_.Linear(a.qkv, tokens, x);
      const auto [rotated_q, rotated_k] = builder_.AddRope(a.module, RopeSpec(window), {packed});
      const TensorId y =
          builder_.AddOp(a.module, "attn", AttentionSpec(window), {rotated_q, rotated_k, packed});
      return builder_.Linear(a.o, tokens, y);
    }
    TensorId q = builder_.Linear(a.q, tokens, x);
    if (row_.qk_norm) {
      q = builder_.RmsNorm(a.q_norm, tokens * sizes_.common.heads, q);
    }
    TensorId k = builder_.Linear(a.k, tokens, x);
    if (row_.qk_norm) {
      k = builder_.RmsNorm(a.k_norm, tokens * sizes_.kv_heads, k);
    }
    const TensorId v = builder_.Linear(a.v, tokens, x);
    std::tie(q, k) = builder_.AddRope(a.module, RopeSpec(window), {q, k});
    const TensorId y = builder_.AddOp(a.module, "attn", AttentionSpec(window), {q, k, v});
    return builder_.Linear(a.o, tokens, y);
  }

  LatentAttention AddLatentAttention(ModuleId layer) {
    const LatentSizes& l = *sizes_.latent;
    const std::int64_t hidden = sizes_.common.hidden;
    const std::int64_t heads = sizes_.common.heads;
    LatentAttention a;
    a.module = builder_.AddModule(layer, "self_attn", Class("Attention"));
    if (l.query_rank == 0) {
      a.q = builder_.AddLinear(a.module, "q_proj", hidden, heads * sizes_.head_dim, false);
    } else {
      a.q_down = builder_.AddLinear(a.module, "q_a_proj", hidden, l.query_rank, l.bias);
      a.q_norm = builder_.AddNorm(a.module, "q_a_layernorm", l.query_rank, false, Class("RMSNorm"));
      a.q_up =
          builder_.AddLinear(a.module, "q_b_proj", l.query_rank, heads * sizes_.head_dim, false);
    }
    a.kv_down = builder_.AddLinear(a.module, "kv_a_proj_with_mqa", hidden,
                                   l.key_value_rank + l.rope_dim, l.bias);
    a.kv_norm =
        builder_.AddNorm(a.module, "kv_a_layernorm", l.key_value_rank, false, Class("RMSNorm"));
    a.kv_up = builder_.AddLinear(a.module, "kv_b_proj", l.key_value_rank,
                                 heads * (l.plain_dim + sizes_.value_dim), false);
    a.o = builder_.AddLinear(a.module, "o_proj", heads * sizes_.value_dim, hidden, l.bias);
    return a;
  }

  TensorId Run(const LatentAttention& a, TensorId x) {
    const std::int64_t tokens = sizes_.tokens;
    builder_.SetNormConstants(kLatentEpsilon);
    TensorId q;
    if (sizes_.latent->query_rank == 0) {
      q = builder_.Linear(a.q, tokens, x);
    } else {
      q = builder_.Linear(a.q_down, tokens, x);
      q = builder_.RmsNorm(a.q_norm, tokens, q);
      q = builder_.Linear(a.q_up, tokens, q);
    }
    const TensorId low = builder_.Linear(a.kv_down, tokens, x);
    // The norm covers the first features of `low`; the rest is the positional key.
    const TensorId kv = builder_.Linear(a.kv_up, tokens, builder_.RmsNorm(a.kv_norm, tokens, low));
    builder_.SetNormConstants(sizes_.epsilon, row_.norm_weight_offset);
    // Rotation and concatenation write whole new queries and keys; the keys join the plain part in
    // kv with the shared positional part in low. Values stay a view of kv.
    const auto [rotated_q, rotated_k] = builder_.AddRope(a.module, RopeSpec(0), {q, kv, low});
    const TensorId y =
        builder_.AddOp(a.module, "attn", AttentionSpec(0), {rotated_q, rotated_k, kv});
    return builder_.Linear(a.o, tokens, y);
  }

  // Layers with a window may have angles of their own (Gemma 3).
  [[nodiscard]] OpSpec RopeSpec(std::int64_t window) const {
    return {.kind = OpKind::kRope,
            .rows = sizes_.tokens,
            .heads = sizes_.common.heads,
            .kv_heads = sizes_.kv_heads,
            .head_dim = sizes_.head_dim,
            .rope = window > 0 ? sizes_.window_angles : sizes_.angles};
  }

  [[nodiscard]] OpSpec AttentionSpec(std::int64_t window) const {
    return {.kind = OpKind::kAttention,
            .rows = sizes_.tokens,
            .heads = sizes_.common.heads,
            .kv_heads = sizes_.kv_heads,
            .head_dim = sizes_.head_dim,
            .value_dim = sizes_.value_dim,
            .seq_q = sizes_.tokens,
            .seq_k = sizes_.tokens,
            // A window that covers the sequence is none; equal specs are then stored once.
            .window = window < sizes_.tokens ? window : 0,
            .causal = true,
            .dropout_p = sizes_.attention_dropout,
            .factor = sizes_.attention_factor,
            .soft_cap = sizes_.attention_soft_cap,
            .heads_first = row_.concatenated_rotation};
  }

  Mlp AddMlp(ModuleId parent, const char* name, std::int64_t intermediate) {
    const std::int64_t hidden = sizes_.common.hidden;
    Mlp m;
    m.intermediate = intermediate;
    m.module = builder_.AddModule(parent, name, Class("MLP"));
    if (row_.packed_projections) {
      m.gate_up =
          builder_.AddLinear(m.module, "gate_up_proj", hidden, 2 * intermediate, row_.mlp_bias);
    } else {
      m.gate = builder_.AddLinear(m.module, "gate_proj", hidden, intermediate, row_.mlp_bias);
      m.up = builder_.AddLinear(m.module, "up_proj", hidden, intermediate, row_.mlp_bias);
    }
    m.down = builder_.AddLinear(m.module, "down_proj", intermediate, hidden, row_.mlp_bias);
    return m;
  }

  TensorId Run(const Mlp& m, TensorId x) {
    OpSpec spec{.kind = OpKind::kGatedActivation,
                .rows = sizes_.tokens,
                .in = m.intermediate,
                .activation = sizes_.activation.function,
                .gelu_code = sizes_.activation.gelu_code,
                .packed_gate = row_.packed_projections};
    TensorId y;
    if (spec.packed_gate) {
      y = builder_.AddOp(m.module, "gated_act", spec,
                         {builder_.Linear(m.gate_up, sizes_.tokens, x)});
    } else {
      const TensorId gate = builder_.Linear(m.gate, sizes_.tokens, x);
      const TensorId up = builder_.Linear(m.up, sizes_.tokens, x);
      y = builder_.AddOp(m.module, "gated_act", spec, {gate, up});
    }
    return builder_.Linear(m.down, sizes_.tokens, y);
  }

  SparseMlp AddSparseMlp(ModuleId layer) {
    const MoeRow& row = *row_.moe;
    const MoeSizes& moe = *sizes_.moe;
    SparseMlp m;
    m.module = builder_.AddModule(layer, row.module, row_.class_prefix + row.block_class);
    const auto add_router = [&] {
      m.router = builder_.AddModule(m.module, "gate",
                                    row.correction_bias ? Class("TopkRouter") : "Linear");
      m.router_weight = builder_.AddParam(m.router, "weight", {moe.experts, sizes_.common.hidden});
      if (row.correction_bias) {
        builder_.AddBuffer(m.router, moe.experts);
      }
    };
    if (row.router_first) {
      add_router();
    }
    AddExperts(m);
    if (!row.router_first) {
      add_router();
    }
    if (moe.shared > 0) {
      m.shared = AddMlp(m.module, "shared_experts", moe.shared * moe.intermediate);
    }
    return m;
  }

  // All experts are one module, so that a layer stays a handful of ops; each matrix is a parameter
  // of its own with its name in a checkpoint.
  void AddExperts(SparseMlp& m) {
    const MoeRow& row = *row_.moe;
    const MoeSizes& moe = *sizes_.moe;
    const std::int64_t hidden = sizes_.common.hidden;
    m.experts = builder_.AddModule(m.module, "experts", "ModuleList");
    m.expert_weights.reserve(static_cast<std::size_t>(moe.experts) * 3);
    using Matrix = std::pair<const std::string*, bool>;  // name, maps back to hidden
    const Matrix gate{&row.gate_name, false};
    const Matrix up{&row.up_name, false};
    const Matrix down{&row.down_name, true};
    const std::array<Matrix, 3> order =
        row.up_last ? std::array<Matrix, 3>{gate, down, up} : std::array<Matrix, 3>{gate, up, down};
    for (std::int64_t e = 0; e < moe.experts; ++e) {
      for (const auto& [name, is_down] : order) {
        std::vector<std::int64_t> shape = {moe.intermediate, hidden};
        if (is_down) {
          std::swap(shape[0], shape[1]);
        }
        m.expert_weights.push_back(builder_.AddParam(
            m.experts, std::to_string(e) + "." + *name + ".weight", std::move(shape)));
      }
    }
  }

  TensorId Run(const SparseMlp& m, TensorId x) {
    const MoeSizes& moe = *sizes_.moe;
    const std::int64_t hidden = sizes_.common.hidden;
    const ParamId router_params[] = {m.router_weight};
    const TensorId routing = builder_.AddOp(m.router, "gate",
                                            {.kind = OpKind::kRouter,
                                             .rows = sizes_.tokens,
                                             .in = hidden,
                                             .groups = moe.groups,
                                             .experts = moe.experts,
                                             .experts_per_token = moe.experts_per_token,
                                             .factor = moe.factor,
                                             .normalizes_top_k = moe.normalizes,
                                             .scores_by_sigmoid = row_.moe->sigmoid,
                                             .groups_per_token = moe.groups_per_token},
                                            {x}, router_params);
    const TensorId y = builder_.AddOp(m.experts, "experts",
                                      {.kind = OpKind::kExperts,
                                       .rows = sizes_.tokens,
                                       .in = hidden,
                                       .out = moe.intermediate,
                                       .gated = true,
                                       .activation = sizes_.activation.function,
                                       .gelu_code = sizes_.activation.gelu_code,
                                       .experts = moe.experts,
                                       .experts_per_token = moe.experts_per_token,
                                       .up_last = row_.moe->up_last},
                                      {x, routing}, m.expert_weights);
    if (!m.shared) {
      return y;
    }
    return builder_.Add(m.module, "add_shared", sizes_.tokens, hidden, y, Run(*m.shared, x));
  }

  const DecoderRow& row_;
  const DecoderSizes& sizes_;
  ModelBuilder builder_;
  bool is_tied_;
  std::optional<double> soft_cap_;
};

}  // namespace

Model BuildDecoder(const BuildInput& input) {
  const DecoderRow row = ReadDecoderRow(input.row, input.config);
  const DecoderSizes sizes = ReadDecoderSizes(input, row);
  return DecoderBuilder(input, row, sizes).Build();
}

}  // namespace shardwright
