#include "tests/executor/tiny_training.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "core/error.h"
#include "executor/half.h"
#include "tests/schedule/tiny_model.h"

namespace shardwright::testing {
namespace {

constexpr std::int64_t kIn = 6, kWidth = 5, kClasses = 7;

class NetworkBuilder {
 public:
  NetworkBuilder() {
    model.name = "tiny-network";
    model.type = "custom";
    model.block_classes = {"Block"};
    model.tokens_per_sample = 1;
    AddModule(model, {}, "", "Net");
  }

  TensorId AddTensor(TensorRole role, std::int64_t elements, ModelOpId producer) {
    model.tensors.push_back({role, elements, true, producer});
    return TensorId(model.tensors.size() - 1);
  }

  TensorId AddLinear(ModuleId parent, const std::string& name, TensorId from, std::int64_t in,
                     std::int64_t out) {
    const ModuleId module = AddModule(model, parent, name, "Linear");
    OpSpec spec;
    spec.kind = OpKind::kLinear;
    spec.rows = 1;
    spec.in = in;
    spec.out = out;
    spec.has_bias = true;
    ModelOp op;
    op.module = module;
    op.name = name;
    op.inputs = {from};
    op.params = {AddParam(model, module, "weight", {out, in}),
                 AddParam(model, module, "bias", {out})};
    return AddOp(spec, op, TensorRole::kActivation, out);
  }

  TensorId AddGelu(ModuleId parent, TensorId from, std::int64_t width) {
    OpSpec spec;
    spec.kind = OpKind::kActivation;
    spec.activation = Activation::kGeluTanh;
    spec.rows = 1;
    spec.in = width;
    ModelOp op;
    op.module = AddModule(model, parent, "act", "GELU");
    op.name = "act";
    op.inputs = {from};
    return AddOp(spec, op, TensorRole::kActivation, width);
  }

  TensorId AddNorm(ModuleId parent, const std::string& name, TensorId from, OpKind kind) {
    OpSpec spec;
    spec.kind = kind;
    spec.has_bias = kind == OpKind::kLayerNorm;
    spec.rows = 1;
    spec.in = kWidth;
    spec.epsilon = 1e-5;
    ModelOp op;
    op.module = AddModule(model, parent, name, "Norm");
    op.name = name;
    op.inputs = {from};
    op.params = {AddParam(model, op.module, "weight", {kWidth})};
    if (spec.has_bias) {
      op.params.push_back(AddParam(model, op.module, "bias", {kWidth}));
    }
    return AddOp(spec, op, TensorRole::kActivation, kWidth);
  }

  TensorId AddSum(ModuleId parent, TensorId a, TensorId b) {
    OpSpec spec;
    spec.kind = OpKind::kAdd;
    spec.rows = 1;
    spec.in = kWidth;
    ModelOp op;
    op.module = parent;
    op.name = "sum" + std::to_string(model.ops.size());
    op.inputs = {a, b};
    return AddOp(spec, op, TensorRole::kActivation, kWidth);
  }

  // As in a transformer, with one product for the attention.
  TensorId AddResidualBlock(ModuleId block, TensorId x) {
    const TensorId first = AddNorm(block, "norm1", x, OpKind::kLayerNorm);
    x = AddSum(block, x, AddLinear(block, "mix", first, kWidth, kWidth));
    const TensorId second = AddNorm(block, "norm2", x, OpKind::kRmsNorm);
    const TensorId up = AddLinear(block, "up", second, kWidth, kWidth + 4);
    const TensorId down =
        AddLinear(block, "down", AddGelu(block, up, kWidth + 4), kWidth + 4, kWidth);
    return AddSum(block, x, down);
  }

  TensorId AddOp(const OpSpec& spec, ModelOp op, TensorRole role, std::int64_t elements) {
    op.spec = static_cast<std::uint32_t>(model.specs.size());
    model.specs.push_back(spec);
    const TensorId result = AddTensor(role, elements, ModelOpId(model.ops.size()));
    op.outputs = {result};
    model.ops.push_back(op);
    return result;
  }

  Model model;
};

std::vector<float> Load(const void* data, DType dtype, std::int64_t n) {
  std::vector<float> out;
  for (std::int64_t i = 0; i < n; ++i) {
    out.push_back(LoadFloat(dtype, data, i));
  }
  return out;
}

void Put(const View& view, const std::vector<float>& values, bool accumulate) {
  for (std::int64_t i = 0; i < view.elements; ++i) {
    const float before = accumulate ? LoadFloat(view.dtype, view.data, i) : 0.0F;
    const float value = values[static_cast<std::size_t>(i)];
    StoreFloat(view.dtype, view.data, i, accumulate ? before + value : value);
  }
}

std::vector<float> LoadView(const ConstView& v) {
  return Load(v.data, v.dtype, v.elements);
}

void Linear(const ModelOpCall& c, bool is_backward) {
  const std::int64_t in = c.spec->in, out = c.spec->out, rows = c.spec->rows * c.batch;
  const auto at = [](const std::vector<float>& m, std::int64_t row, std::int64_t columns,
                     std::int64_t column) {
    return m[static_cast<std::size_t>(row * columns + column)];
  };
  if (!is_backward) {
    const std::vector<float> x = LoadView(c.inputs[0]), w = LoadView(c.params[0]),
                             bias = LoadView(c.params[1]);
    std::vector<float> y;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t o = 0; o < out; ++o) {
        float sum = bias[static_cast<std::size_t>(o)];
        for (std::int64_t i = 0; i < in; ++i) {
          sum += at(x, r, in, i) * at(w, o, in, i);
        }
        y.push_back(sum);
      }
    }
    Put(c.outputs[0], y, false);
    return;
  }
  const std::vector<float> dy = LoadView(c.output_grads[0]);
  if (c.input_grads[0].data != nullptr) {
    const std::vector<float> w = LoadView(c.params[0]);
    std::vector<float> dx;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < in; ++i) {
        float sum = 0;
        for (std::int64_t o = 0; o < out; ++o) {
          sum += at(dy, r, out, o) * at(w, o, in, i);
        }
        dx.push_back(sum);
      }
    }
    Put(c.input_grads[0], dx, false);
  }
  if (c.param_grads[0].view.data != nullptr) {
    const std::vector<float> x = LoadView(c.inputs[0]);
    std::vector<float> dw;
    for (std::int64_t o = 0; o < out; ++o) {
      for (std::int64_t i = 0; i < in; ++i) {
        float sum = 0;
        for (std::int64_t r = 0; r < rows; ++r) {
          sum += at(dy, r, out, o) * at(x, r, in, i);
        }
        dw.push_back(sum);
      }
    }
    Put(c.param_grads[0].view, dw, c.param_grads[0].accumulate);
  }
  if (c.param_grads[1].view.data != nullptr) {
    std::vector<float> db(static_cast<std::size_t>(out), 0.0F);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t o = 0; o < out; ++o) {
        db[static_cast<std::size_t>(o)] += at(dy, r, out, o);
      }
    }
    Put(c.param_grads[1].view, db, c.param_grads[1].accumulate);
  }
}

// Inputs are logits and labels; the statistics kept from forward are not used, all is computed
// again.
void CrossEntropy(const ModelOpCall& c, bool is_backward) {
  const std::int64_t classes = c.spec->in, rows = c.spec->rows * c.batch;
  const std::vector<float> logits = LoadView(c.inputs[0]);
  const auto* labels = static_cast<const std::int64_t*>(c.inputs[1].data);
  float loss = 0;
  std::vector<float> grad;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = logits.data() + r * classes;
    float sum = 0;
    for (std::int64_t k = 0; k < classes; ++k) {
      sum += std::exp(row[k]);
    }
    // A race that a test has planted may leave a label poisoned: not a class, and never right.
    const std::int64_t label = labels[r];
    const bool is_class = label >= 0 && label < classes;
    loss += std::log(sum) - (is_class ? row[label] : std::numeric_limits<float>::quiet_NaN());
    for (std::int64_t k = 0; k < classes; ++k) {
      const float p = std::exp(row[k]) / sum - (label == k ? 1.0F : 0.0F);
      grad.push_back(static_cast<float>(c.loss_scale) * p / static_cast<float>(rows));
    }
  }
  if (is_backward) {
    Put(c.input_grads[0], grad, false);
  } else {
    Put(c.outputs[0], {loss / static_cast<float>(rows)}, false);
  }
}

Model AddHead(NetworkBuilder& b, TensorId x, TensorId labels) {
  x = b.AddLinear(ModuleId(0), "head", x, kWidth, kClasses);
  OpSpec loss;
  loss.kind = OpKind::kCrossEntropy;
  loss.rows = 1;
  loss.in = kClasses;
  ModelOp op;
  op.module = ModuleId(0);
  op.name = "loss";
  op.inputs = {x, labels};
  b.AddOp(loss, op, TensorRole::kLoss, 1);
  b.model.tensors.back().per_sample = false;
  return b.model;
}

}  // namespace

Model TinyNetwork(int blocks, bool tied, bool gelu) {
  NetworkBuilder b;
  const TensorId input = b.AddTensor(TensorRole::kActivation, kIn, ModelOpId());
  const TensorId labels = b.AddTensor(TensorRole::kIndex, 1, ModelOpId());
  TensorId x = b.AddLinear(ModuleId(0), "stem", input, kIn, kWidth);
  for (int i = 0; i < blocks; ++i) {
    const ModuleId block = AddModule(b.model, ModuleId(0), "block" + std::to_string(i), "Block");
    x = b.AddLinear(block, "up", x, kWidth, kWidth + 4);
    if (gelu) {
      x = b.AddGelu(block, x, kWidth + 4);
    }
    x = b.AddLinear(block, "down", x, kWidth + 4, kWidth);
  }
  if (tied) {
    const Module& first = b.model.modules[FindModule(b.model, "block0.up").value];
    for (int i = 1; i < blocks; ++i) {
      const ModuleId other = FindModule(b.model, "block" + std::to_string(i) + ".up");
      for (std::size_t k = 0; k < first.params.size(); ++k) {
        b.model.params[b.model.modules[other.value].params[k].value].tied_to = first.params[k];
      }
    }
  }
  return AddHead(b, x, labels);
}

Model TinyTransformer(int blocks) {
  NetworkBuilder b;
  const TensorId input = b.AddTensor(TensorRole::kActivation, kIn, ModelOpId());
  const TensorId labels = b.AddTensor(TensorRole::kIndex, 1, ModelOpId());
  TensorId x = b.AddLinear(ModuleId(0), "stem", input, kIn, kWidth);
  for (int i = 0; i < blocks; ++i) {
    x = b.AddResidualBlock(AddModule(b.model, ModuleId(0), "block" + std::to_string(i), "Block"),
                           x);
  }
  return AddHead(b, b.AddNorm(ModuleId(0), "norm", x, OpKind::kLayerNorm), labels);
}

void ReferenceKernel(const ModelOpCall& call, bool is_backward) {
  switch (call.spec->kind) {
    case OpKind::kLinear:
      Linear(call, is_backward);
      return;
    case OpKind::kCrossEntropy:
      CrossEntropy(call, is_backward);
      return;
    default:
      throw InputError("the tiny network has no such op");
  }
}

void FillTinyBatch(const BatchKey& key, std::span<const View> tensors) {
  for (std::int64_t s = 0; s < key.count; ++s) {
    std::mt19937_64 random(static_cast<std::uint64_t>(key.step * 1000 + key.first_sample + s + 1));
    std::normal_distribution<float> normal;
    std::int64_t label = 0;
    float largest = -1e9F;
    for (std::int64_t i = 0; i < kIn; ++i) {
      const float x = normal(random);
      StoreFloat(tensors[0].dtype, tensors[0].data, s * kIn + i, x);
      if (x > largest) {
        largest = x;
        label = i;
      }
    }
    static_cast<std::int64_t*>(tensors[1].data)[s] = label;
  }
}

}  // namespace shardwright::testing
