#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "core/portable.h"
#include "schedule/plan_file.h"

namespace shardwright {
namespace {

// Serialises values into one byte stream. Every string and list is preceded by its length, so that
// different models cannot give equal streams.
class HashStream {
 public:
  void Add(std::int64_t value) {
    const auto bits = static_cast<std::uint64_t>(value);
    for (int shift = 0; shift < 64; shift += 8) {
      bytes_.push_back(static_cast<char>((bits >> shift) & 0xffU));
    }
  }
  void Add(std::string_view text) {
    Add(static_cast<std::int64_t>(text.size()));
    bytes_ += text;
  }
  template <class Tag>
  void Add(Id<Tag> id) {
    Add(static_cast<std::int64_t>(id.value));
  }
  template <class T>
  void AddList(const std::vector<T>& list) {
    Add(static_cast<std::int64_t>(list.size()));
    for (const T& value : list) {
      Add(value);
    }
  }
  // Probabilities: exact for the six digits anybody writes.
  void AddProbability(double value) { Add(std::llround(value * 1e9)); }

  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

void AddSpec(const OpSpec& spec, HashStream& stream) {
  for (const std::int64_t value : {static_cast<std::int64_t>(spec.kind),
                                   spec.rows,
                                   spec.in,
                                   spec.out,
                                   spec.vocab,
                                   spec.heads,
                                   spec.kv_heads,
                                   spec.head_dim,
                                   spec.value_dim,
                                   spec.seq_q,
                                   spec.seq_k,
                                   spec.window,
                                   static_cast<std::int64_t>(spec.causal),
                                   static_cast<std::int64_t>(spec.has_bias),
                                   static_cast<std::int64_t>(spec.gated),
                                   static_cast<std::int64_t>(spec.activation),
                                   spec.height,
                                   spec.width,
                                   spec.height_out,
                                   spec.width_out,
                                   spec.kernel,
                                   spec.stride,
                                   spec.padding,
                                   spec.groups,
                                   spec.experts,
                                   spec.experts_per_token,
                                   spec.rope.dim,
                                   static_cast<std::int64_t>(spec.rope.interleaved),
                                   static_cast<std::int64_t>(spec.rope.scaling),
                                   static_cast<std::int64_t>(spec.packed_by_head),
                                   static_cast<std::int64_t>(spec.transposed),
                                   static_cast<std::int64_t>(spec.tokens_out),
                                   static_cast<std::int64_t>(spec.up_last),
                                   static_cast<std::int64_t>(spec.normalizes_top_k),
                                   static_cast<std::int64_t>(spec.scores_by_sigmoid),
                                   spec.groups_per_token,
                                   spec.max_distance,
                                   spec.index_offset}) {
    stream.Add(value);
  }
  if (spec.synchronized) {  // plans of models without keep their hashes
    stream.Add("synchronized");
  }
  if (spec.packed_gate) {
    stream.Add("packed_gate");
  }
  if (spec.scales_input) {
    stream.Add("scales_input");
  }
  if (spec.heads_first && !spec.packed_by_head) {  // GPT-NeoX says it by the other
    stream.Add("heads_first");
  }
  if (spec.padding_row >= 0) {
    stream.Add("padding_row");
    stream.Add(spec.padding_row);
  }
  stream.AddProbability(spec.dropout_p);
  for (const double value :
       {spec.epsilon, spec.weight_offset, spec.factor, spec.soft_cap, spec.alibi_max,
        spec.rope.theta, spec.rope.factor, spec.rope.low_frequency_factor,
        spec.rope.high_frequency_factor, spec.rope.original_length}) {
    stream.Add(BitCast<std::int64_t>(value));
  }
}

void AddOp(const ModelOp& op, HashStream& stream) {
  stream.Add(static_cast<std::int64_t>(op.spec));
  stream.Add(op.module);
  stream.Add(op.name);
  stream.AddList(op.inputs);
  stream.AddList(op.outputs);
  stream.AddList(op.params);
  if (op.called_again.valid()) {
    stream.Add("called_again");
    stream.Add(op.called_again);
  }
  if (!op.returns_input.empty()) {
    stream.Add("returns_input");
    stream.AddList(op.returns_input);
  }
}

}  // namespace

std::uint64_t Fnv1a64(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3U;
  }
  return hash;
}

std::uint64_t HashModel(const Model& model) {
  HashStream stream;
  stream.Add(model.type);
  stream.Add(model.block_classes.empty() ? "" : model.block_classes[0]);
  for (std::size_t i = 1; i < model.block_classes.size(); ++i) {
    stream.Add("block_class");
    stream.Add(model.block_classes[i]);
  }
  stream.Add(model.sequence_length);
  stream.Add(model.tokens_per_sample);
  for (const Module& module : model.modules) {
    stream.Add(module.fqn);
    stream.Add(module.class_name);
    stream.Add(module.parent);
    stream.Add(module.buffer_elements);
    if (module.same_as.valid()) {  // plans of models without keep their hashes
      stream.Add("same_as");
      stream.Add(module.same_as);
    }
  }
  for (const Parameter& param : model.params) {
    stream.Add(param.fqn);
    stream.AddList(param.shape);
    stream.Add(param.module);
    stream.Add(static_cast<std::int64_t>(param.trainable));
    stream.Add(param.tied_to);
    stream.Add(static_cast<std::int64_t>(param.full_precision));
  }
  for (const Tensor& tensor : model.tensors) {
    stream.Add(static_cast<std::int64_t>(tensor.role));
    stream.Add(tensor.elements);
    stream.Add(static_cast<std::int64_t>(tensor.per_sample));
    stream.Add(tensor.producer);
    stream.Add(static_cast<std::int64_t>(tensor.input));
  }
  for (const ModelOp& op : model.ops) {
    AddOp(op, stream);
  }
  for (const OpSpec& spec : model.specs) {
    AddSpec(spec, stream);
  }
  return Fnv1a64(stream.bytes());
}

std::string HashText(std::uint64_t hash) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "fnv1a64:%016llx", static_cast<unsigned long long>(hash));
  return text.data();
}

}  // namespace shardwright
