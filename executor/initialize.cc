#include "executor/initialize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numbers>
#include <string_view>

#include "core/error.h"
#include "core/threads.h"
#include "executor/half.h"
#include "models/cut_experts.h"
#include "schedule/plan_file.h"

namespace shardwright {
namespace {

InitRule Constant(double value) {
  return {InitRule::Kind::kConstant, value, 0.0};
}
InitRule Normal(double deviation) {
  return {InitRule::Kind::kNormal, 0.0, deviation};
}
InitRule Uniform(double bound) {
  return {InitRule::Kind::kUniform, -bound, bound};
}

// Inputs that one output of a matrix or convolution sums over.
double FanIn(const Parameter& weight, const OpSpec& spec) {
  if (weight.shape.size() < 2) {
    return static_cast<double>(std::max<std::int64_t>(weight.Elements(), 1));
  }
  const std::int64_t outputs = weight.WholeShape()[spec.transposed ? 1 : 0];
  const std::int64_t inputs =
      weight.Elements() * weight.tensor_parts / std::max<std::int64_t>(outputs, 1);
  return static_cast<double>(inputs);
}

bool IsNorm(OpKind kind) {
  return kind == OpKind::kLayerNorm || kind == OpKind::kRmsNorm || kind == OpKind::kBatchNorm;
}

// What the rules of one model look up.
struct Context {
  const Model& model;
  double init_std = 0.0;
  double layer_count = 0.0;
  double head_dim = 1.0;  // of T5's attention
  double hidden = 1.0;    // T5: features of the shared embedding
};

Context MakeContext(const Model& model, std::optional<double> init_std) {
  Context context{.model = model, .init_std = init_std.value_or(model.initializer)};
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    context.layer_count += IsBlock(model, ModuleId(m)) ? 1.0 : 0.0;
  }
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    if (spec.kind == OpKind::kAttention) {
      context.head_dim = static_cast<double>(spec.head_dim);
    }
    if (spec.kind == OpKind::kEmbedding) {
      context.hidden = static_cast<double>(spec.out);
    }
  }
  return context;
}

// One parameter and the first op that uses it: as its `index`-th one.
struct Use {
  const Parameter& param;
  const ModelOp* op = nullptr;
  std::size_t index = 0;
};

// The reset_parameters methods of torch.nn: kaiming_uniform(a = sqrt 5) is U(+-1 / sqrt(fan in)).
InitRule TorchRule(const Context& c, const Use& use) {
  const OpSpec& spec = c.model.SpecOf(*use.op);
  switch (spec.kind) {
    case OpKind::kLinear:
    case OpKind::kConv2d:
    case OpKind::kRouter:
    case OpKind::kExperts: {
      // A bias has the bound of its weight, which stands before it.
      const bool is_bias = use.index > 0 && use.param.shape.size() == 1;
      const ParamId weight = use.op->params[is_bias ? use.index - 1 : use.index];
      return Uniform(1.0 / std::sqrt(FanIn(c.model.params[weight.value], spec)));
    }
    case OpKind::kEmbedding:
      return Normal(1.0);
    default:
      return Normal(
          c.init_std);  // position tables and class tokens, which torch.nn has no class for
  }
}

// T5PreTrainedModel._init_weights.
InitRule T5Rule(const Context& c, const Use& use) {
  const OpSpec& spec = c.model.SpecOf(*use.op);
  const Module& module = c.model.modules[use.param.module.value];
  const double factor = c.model.initializer;
  if (spec.kind == OpKind::kPositionBias) {
    return Normal(factor / std::sqrt(c.hidden));
  }
  if (spec.kind == OpKind::kEmbedding || module.name == "lm_head") {
    return Normal(factor);
  }
  const double fan_in = FanIn(use.param, spec);
  return Normal(factor / std::sqrt(module.name == "q" ? fan_in * c.head_dim : fan_in));
}

InitRule RuleOf(const Context& c, const Use& use) {
  const std::string_view fqn = use.param.fqn;
  if (fqn.ends_with(".lora_A.weight")) {
    return Uniform(1.0 / std::sqrt(static_cast<double>(use.param.WholeShape().back())));
  }
  if (fqn.ends_with(".lora_B.weight")) {
    return Constant(0.0);
  }
  if (use.op == nullptr) {
    return Normal(c.init_std);
  }
  const OpSpec& spec = c.model.SpecOf(*use.op);
  if (IsNorm(spec.kind)) {
    const double one = c.model.type == "t5" ? c.model.initializer : 1.0;
    return Constant(use.index == 0 ? one - spec.weight_offset : 0.0);
  }
  if (c.model.type == "custom") {
    return TorchRule(c, use);
  }
  if (use.param.shape.size() < 2) {
    return Constant(0.0);
  }
  if (c.model.type == "t5") {
    return T5Rule(c, use);
  }
  // GPT2PreTrainedModel._init_weights: what ends on the residual stream is scaled by its depth.
  if (c.model.type == "gpt2" && fqn.ends_with("c_proj.weight")) {
    return Normal(c.init_std / std::sqrt(2.0 * c.layer_count));
  }
  return Normal(c.init_std);
}

// Four neighbouring elements of a parameter, of which the first has an index that 4 divides.
struct Four {
  float value[4];
};

// A 32-bit word as a number in (0, 1].
double UnitInterval(std::uint32_t word) {
  return (static_cast<double>(word) + 1.0) * 0x1p-32;
}

Four FourValues(const InitRule& rule, std::uint64_t key, std::uint64_t block) {
  Four four{};
  if (rule.kind == InitRule::Kind::kConstant) {
    for (float& value : four.value) {
      value = static_cast<float>(rule.a);
    }
    return four;
  }
  const RandomWords words = Philox(key, block, 0);
  if (rule.kind == InitRule::Kind::kUniform) {
    for (std::size_t i = 0; i < 4; ++i) {
      four.value[i] = static_cast<float>(rule.a + (rule.b - rule.a) * UnitInterval(words.word[i]));
    }
    return four;
  }
  // Box and Muller: two uniform numbers make two normal ones.
  for (std::size_t i = 0; i < 4; i += 2) {
    const double radius = rule.b * std::sqrt(-2.0 * std::log(UnitInterval(words.word[i])));
    const double angle = 2.0 * std::numbers::pi * UnitInterval(words.word[i + 1]);
    four.value[i] = static_cast<float>(rule.a + radius * std::cos(angle));
    four.value[i + 1] = static_cast<float>(rule.a + radius * std::sin(angle));
  }
  return four;
}

}  // namespace

std::int64_t BatchNormChannels(const Model& model, ModuleId module) {
  for (const ModelOp& op : model.ops) {
    if (op.module == module && model.SpecOf(op).kind == OpKind::kBatchNorm) {
      return model.SpecOf(op).in;
    }
  }
  return 0;
}

RandomWords Philox(std::uint64_t key, std::uint64_t counter_low, std::uint64_t counter_high) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53U;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57U;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9U;
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85U;
  auto key0 = static_cast<std::uint32_t>(key);
  auto key1 = static_cast<std::uint32_t>(key >> 32);
  std::uint32_t c0 = static_cast<std::uint32_t>(counter_low);
  std::uint32_t c1 = static_cast<std::uint32_t>(counter_low >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(counter_high);
  std::uint32_t c3 = static_cast<std::uint32_t>(counter_high >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = kMultiplier0 * c0;
    const std::uint64_t product1 = kMultiplier1 * c2;
    c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<std::uint32_t>(product1);
    c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<std::uint32_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

std::vector<InitRule> InitRules(const Model& model, std::optional<double> init_std) {
  const Context context = MakeContext(model, init_std);
  std::vector<Use> uses;
  uses.reserve(model.params.size());
  for (const Parameter& param : model.params) {
    uses.push_back({param, nullptr, 0});
  }
  for (const ModelOp& op : model.ops) {
    for (std::size_t i = 0; i < op.params.size(); ++i) {
      const ParamId tied = model.params[op.params[i].value].tied_to;
      Use& use = uses[(tied.valid() ? tied : op.params[i]).value];
      if (use.op == nullptr) {
        use.op = &op;
        use.index = i;
      }
    }
  }
  std::vector<InitRule> rules(model.params.size());
  for (std::size_t p = 0; p < rules.size(); ++p) {
    const ParamId tied = model.params[p].tied_to;
    rules[p] = tied.valid() ? rules[tied.value] : RuleOf(context, uses[p]);
    if (const ModelOp* const op = uses[p].op; op != nullptr && model.SpecOf(*op).padding_row >= 0) {
      rules[p].zeros_begin = model.SpecOf(*op).padding_row * model.SpecOf(*op).out;
      rules[p].zeros_end = rules[p].zeros_begin + model.SpecOf(*op).out;
    }
  }
  return rules;
}

std::uint64_t InitKey(std::uint64_t seed, const std::string& fqn) {
  // The name's hash is spread by a multiplication, so that seeds 1, 2, 3 give unrelated keys.
  return Fnv1a64(fqn) ^ (seed * 0x9E3779B97F4A7C15U);
}

void FillParameter(const InitRule& rule, std::uint64_t key, std::int64_t begin, std::int64_t count,
                   DType dtype, void* out) {
  const std::int64_t end = begin + count;
  for (std::int64_t block = begin / 4; block * 4 < end; ++block) {
    const Four four = FourValues(rule, key, static_cast<std::uint64_t>(block));
    const std::int64_t first = std::max(block * 4, begin);
    const std::int64_t last = std::min(block * 4 + 4, end);
    for (std::int64_t e = first; e < last; ++e) {
      const bool is_zero = e >= rule.zeros_begin && e < rule.zeros_end;
      StoreFloat(dtype, out, e - begin, is_zero ? 0.0F : four.value[e - block * 4]);
    }
  }
}

void InitializeShard(const Model& model, std::span<const InitRule> rules, std::uint64_t seed,
                     std::span<const ShardPiece> pieces, const View& shard, int threads,
                     std::int64_t part) {
  const std::int64_t element_size = SizeOf(shard.dtype);
  std::memset(shard.data, 0, static_cast<std::size_t>(shard.elements * element_size));
  constexpr std::int64_t kChunk = std::int64_t{1} << 20;
  std::vector<ShardPiece> chunks;
  for (const ShardPiece& piece : pieces) {
    SW_CHECK(piece.shard_offset + piece.count <= shard.elements, "piece outside its shard");
    for (std::int64_t begin = 0; begin < piece.count; begin += kChunk) {
      ShardPiece& chunk = chunks.emplace_back(piece);
      chunk.param_begin += begin;
      chunk.shard_offset += begin;
      chunk.count = std::min(kChunk, piece.count - begin);
    }
  }
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t c = next++; c < chunks.size(); c = next++) {
      const ShardPiece& chunk = chunks[c];
      FillParameter(rules[chunk.param.value], InitKey(seed, FqnOfPart(model, chunk.param, part)),
                    chunk.param_begin, chunk.count, shard.dtype,
                    static_cast<std::byte*>(shard.data) + chunk.shard_offset * element_size);
    }
  };
  std::vector<std::jthread> helpers;
  for (int t = 1; t < threads && t < std::ssize(chunks); ++t) {
    helpers.push_back(StartThread<std::jthread>(work));
  }
  work();
}

void InitializeModelBuffers(const Model& model, std::span<float> buffers) {
  std::fill(buffers.begin(), buffers.end(), 0.0F);
  std::size_t offset = 0;
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const auto elements = static_cast<std::size_t>(model.modules[m].buffer_elements);
    SW_CHECK(offset + elements <= buffers.size(), model.modules[m].fqn);
    const std::size_t channels =
        elements > 0 ? static_cast<std::size_t>(BatchNormChannels(model, ModuleId(m))) : 0;
    SW_CHECK(2 * channels <= elements || elements == 0, model.modules[m].fqn);
    const std::span<float> variances = buffers.subspan(offset + channels, channels);
    std::fill(variances.begin(), variances.end(), 1.0F);
    offset += elements;
  }
}

}  // namespace shardwright
