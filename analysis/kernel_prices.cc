#include "analysis/kernel_prices.h"

#include "core/error.h"
#include "core/ranges.h"
#include "models/model.h"
#include "simulator/costs/kernels.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

// What keeps a row from being priced; caught by PriceKernel.
struct CannotPrice {
  std::string reason;
};

const GpuSpec& GpuOf(const KernelRow& row) {
  const std::vector<GpuSpec>& known = GpuCatalog();
  const auto gpu = FindIn(known, row.gpu, &GpuSpec::name);
  if (gpu == known.end()) {
    throw CannotPrice{"GPU not in the catalog: " + row.gpu};
  }
  return *gpu;
}

DType DTypeOf(const KernelRow& row) {
  if (row.dtype == "bf16") {
    return DType::kBf16;
  }
  if (row.dtype == "fp16") {
    return DType::kFp16;
  }
  if (row.dtype == "fp32") {
    return DType::kFp32;
  }
  if (row.dtype == "fp8" && row.op == "gemm") {
    return DType::kFp8;
  }
  throw CannotPrice{"dtype " + row.dtype};
}

bool IsComposableKernel(const std::string& stack) {
  return stack == "ck" || stack == "composable-kernel" || stack.starts_with("aiter");
}

// The kernels of a library: PyTorch's with RMS norms written out, as models have them, those of
// Liger, or PyTorch's.
KernelSetOptions KernelSetOf(const KernelRow& row) {
  KernelSetOptions set =
      FindKernelSet(row.stack.starts_with("liger") ? "hf-liger" : "torch-eager", "stack");
  if (row.stack == "torch-eager") {
    set.fused_norm = false;
  }
  if (row.stack.starts_with("liger")) {
    set.fused_loss = true;
  }
  // Scores are scaled by the product that makes them (baddbmm's alpha in flash-attention's
  // benchmark).
  set.fused_softmax = row.stack == "torch-unfused";
  set.shifted_logits = false;  // the loss itself, not what Transformers does around it
  set.attention = row.stack == "cudnn"               ? AttentionImpl::kCudnn
                  : row.stack == "flash-attention-3" ? AttentionImpl::kFlash3
                  : IsComposableKernel(row.stack)    ? AttentionImpl::kCk
                                                     : set.attention;
  return set;
}

void Require(std::initializer_list<std::int64_t> sizes) {
  if (AnyOf(sizes, [](std::int64_t size) { return size == 0; })) {
    throw CannotPrice{"a size is missing"};
  }
}

// Products of sizes in a table may be anything; bytes and operations must stay exact.
constexpr double kMostElements = 1e15;

std::vector<Kernel> Product(const KernelRow& row, KernelClass kind, std::int64_t batch) {
  Require({batch, row.m, row.n, row.k});
  const auto size = [](std::int64_t a, std::int64_t b, std::int64_t c) {
    const double elements =
        static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
    if (elements > kMostElements) {
      throw CannotPrice{"more than 1e15 elements"};
    }
    return a * b * c;
  };
  Kernel kernel;
  kernel.kind = kind;
  kernel.dtype = DTypeOf(row);
  kernel.batch = batch;
  kernel.m = row.m;
  kernel.n = row.n;
  kernel.k = row.k;
  kernel.flops =
      Flops(2 * static_cast<double>(size(batch, row.m, row.n)) * static_cast<double>(row.k));
  const std::int64_t bytes = SizeOf(kernel.dtype);
  kernel.read = Bytes(bytes * (size(batch, row.m, row.k) + size(batch, row.k, row.n)));
  kernel.written = Bytes(bytes * size(batch, row.m, row.n));
  return {kernel};
}

OpSpec SpecOf(const KernelRow& row) {
  OpSpec spec;
  spec.rows = row.rows;
  spec.in = row.features;
  if (row.op == "attention") {
    Require({row.sequence, row.heads, row.head_dim});
    spec.kind = OpKind::kAttention;
    spec.rows = spec.seq_q = row.sequence;
    spec.seq_k = row.kv_sequence > 0 ? row.kv_sequence : row.sequence;
    spec.heads = row.heads;
    spec.kv_heads = row.kv_heads > 0 ? row.kv_heads : row.heads;
    spec.head_dim = row.head_dim;
    spec.value_dim = row.value_dim > 0 ? row.value_dim : row.head_dim;
    spec.causal = row.causal;
    spec.materialized = row.stack == "torch-unfused";
    return spec;
  }
  Require({row.rows, row.features});
  if (row.op == "layer_norm" || row.op == "rms_norm") {
    spec.kind = row.op == "layer_norm" ? OpKind::kLayerNorm : OpKind::kRmsNorm;
    spec.has_bias = row.op == "layer_norm";
  } else if (row.op == "cross_entropy") {
    spec.kind = OpKind::kCrossEntropy;
  } else if (row.op == "embedding") {
    Require({row.n});
    spec.kind = OpKind::kEmbedding;
    spec.vocab = row.n;
    spec.out = row.features;
  } else {
    throw CannotPrice{"no such op: " + row.op};
  }
  return spec;
}

// The gradient of each group's (n, k) weight from its m rows; it is added to what is there.
std::vector<Kernel> GroupedWeightGradient(const KernelRow& row) {
  KernelRow turned = row;
  turned.m = row.n;
  turned.n = row.k;
  turned.k = row.m;
  std::vector<Kernel> kernels = Product(turned, KernelClass::kGroupedGemm, row.groups);
  kernels[0].read += kernels[0].written;
  return kernels;
}

Kernel Pass(DType dtype, Bytes read, Bytes written) {
  Kernel kernel;
  kernel.dtype = dtype;
  kernel.read = read;
  kernel.written = written;
  return kernel;
}

// Losses and lookups forward and backward are timed again and again on one leaf, whose gradient is
// added to that of the time before (Liger-Kernel's benchmarks, mode "full"); a lookup's output
// gradient is drawn each time.
void AppendLeafGradient(const KernelRow& row, std::vector<Kernel>* kernels) {
  const DType dtype = DTypeOf(row);
  const auto bytes = [&](std::int64_t rows) { return Bytes(rows * row.features * SizeOf(dtype)); };
  if (row.op == "embedding") {
    kernels->push_back(Pass(dtype, Bytes(0), bytes(row.rows)));
  }
  const Bytes leaf = bytes(row.op == "embedding" ? row.n : row.rows);
  kernels->push_back(Pass(dtype, leaf * 2, leaf));
}

// Liger's loss reads each row of logits twice and leaves the gradient in it; backward scales it.
std::vector<Kernel> LigerLoss(const KernelRow& row, bool forward, bool backward) {
  Require({row.rows, row.features});
  if (static_cast<double>(row.rows) * static_cast<double>(row.features) > kMostElements) {
    throw CannotPrice{"more than 1e15 elements"};
  }
  const Bytes logits(row.rows * row.features * SizeOf(DTypeOf(row)));
  std::vector<Kernel> kernels;
  if (forward) {
    kernels.push_back(Pass(DTypeOf(row), logits, logits));
    kernels.back().kind = KernelClass::kSoftmax;
    kernels.back().row = Bytes(row.features * SizeOf(DTypeOf(row)));
    kernels.back().reread = logits;
  }
  if (backward) {
    kernels.push_back(Pass(DTypeOf(row), logits, logits));
  }
  return kernels;
}

std::vector<Kernel> KernelsOf(const KernelRow& row) {
  if (row.op == "gemm") {
    return Product(row, KernelClass::kGemm, std::max<std::int64_t>(row.batch, 1));
  }
  if (row.op == "grouped_gemm") {
    std::vector<Kernel> kernels = row.direction == "bwd_grad_w"
                                      ? GroupedWeightGradient(row)
                                      : Product(row, KernelClass::kGroupedGemm, row.groups);
    // multi_stream_cublas_gemm: one product of cuBLAS after the other, on four streams.
    kernels[0].calls = row.stack == "transformer-engine" ? row.groups : 0;
    return kernels;
  }
  const bool forward = row.direction == "forward" || row.direction == "both";
  const bool backward = row.direction == "backward" || row.direction == "both";
  if (!forward && !backward) {
    throw CannotPrice{"direction \"" + row.direction + '"'};
  }
  const bool is_liger = row.stack.starts_with("liger");
  if (is_liger && row.op == "cross_entropy") {
    return LigerLoss(row, forward, backward);
  }
  const OpSpec spec = SpecOf(row);
  OpKernels lowered;
  try {
    lowered = LowerOp(spec, std::max<std::int64_t>(row.batch, 1), DTypeOf(row), KernelSetOf(row));
  } catch (const InputError&) {
    throw CannotPrice{"sizes of more than 2^56 together"};
  }
  std::vector<Kernel> kernels;
  const auto append = [&](const std::vector<Kernel>& more) {
    kernels.insert(kernels.end(), more.begin(), more.end());
  };
  if (forward) {
    append(lowered.forward);
    for (Kernel& kernel : kernels) {
      kernel.kind = is_liger ? KernelClass::kElementwise : kernel.kind;  // they stream
    }
    if (row.stack == "torch-unfused" && row.causal) {  // the mask is added
      const std::int64_t rows = std::max<std::int64_t>(row.batch, 1) * row.heads * row.sequence;
      const Bytes scores(rows * spec.seq_k * SizeOf(DTypeOf(row)));
      kernels.push_back(Pass(DTypeOf(row), scores, scores));
    }
  }
  if (backward) {
    append(lowered.backward_data);
    append(lowered.backward_weight);
  }
  if (kernels.empty()) {
    throw CannotPrice{"no kernel of its own: " + row.op};
  }
  if (row.direction == "both" && (row.op == "cross_entropy" || row.op == "embedding")) {
    AppendLeafGradient(row, &kernels);
  }
  return kernels;
}

}  // namespace

std::vector<Kernel> KernelsOfRow(const KernelRow& row) {
  try {
    return KernelsOf(row);
  } catch (const CannotPrice&) {
    return {};
  }
}

KernelPrice PriceKernel(const KernelRow& row, const std::string& profile_name) {
  KernelPrice price;
  try {
    const GpuSpec& gpu = GpuOf(row);
    const Profile profile = profile_name.empty() ? DefaultProfile(gpu, KernelSetOf(row).name)
                                                 : LoadProfile(profile_name);
    const KernelRates rates = FindKernelRates(gpu, profile.compute);
    price.profile = profile.name;
    for (const Kernel& kernel : KernelsOf(row)) {
      price.time += KernelTime(kernel, rates);
      price.time += rates.gap;
    }
    price.time = price.time - rates.gap;  // between kernels only
  } catch (const CannotPrice& why) {
    price.error = why.reason;
  }
  return price;
}

}  // namespace shardwright
