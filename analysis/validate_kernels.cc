#include "analysis/validate_kernels.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

#include "analysis/csv.h"
#include "analysis/csv_fields.h"
#include "core/error.h"
#include "core/json.h"
#include "models/model.h"
#include "simulator/costs/kernels.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

constexpr std::array<std::string_view, 20> kKernelColumns = {
    "gpu",      "stack",     "op",     "direction", "dtype",       "batch",  "m",
    "n",        "k",         "groups", "sequence",  "kv_sequence", "heads",  "kv_heads",
    "head_dim", "value_dim", "causal", "rows",      "features",    "time_us"};

// GPUs as sources write them; the first row whose part occurs counts.
struct GpuPart {
  std::string_view part, gpu;
};
constexpr std::array<GpuPart, 9> kGpuParts = {{{"A100-80GB-PCIe", "a100-pcie-80"},
                                               {"A100-40GB", "a100-40"},
                                               {"A100", "a100-80"},
                                               {"H100-80GB-PCIe", "h100-pcie-80"},
                                               {"H100", "h100-80"},
                                               {"H200", "h200-141"},
                                               {"B200", "b200-180"},
                                               {"MI300X", "mi300x"},
                                               {"MI355X", "mi355x"}}};

// What keeps a row from being priced; caught by ValidateKernels.
struct CannotPrice {
  std::string reason;
};

const GpuSpec& GpuOf(const KernelRow& row) {
  const std::vector<GpuSpec>& known = GpuCatalog();
  std::string_view name = row.gpu;
  for (const GpuPart& row_of_table : kGpuParts) {
    if (row.gpu.find(row_of_table.part) != std::string::npos) {
      name = row_of_table.gpu;
      break;
    }
  }
  const auto gpu =
      std::find_if(known.begin(), known.end(), [&](const GpuSpec& g) { return g.name == name; });
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
  set.shifted_logits = false;  // the loss itself, not what Transformers does around it
  set.attention = row.stack == "cudnn"               ? AttentionImpl::kCudnn
                  : row.stack == "flash-attention-3" ? AttentionImpl::kFlash3
                  : IsComposableKernel(row.stack)    ? AttentionImpl::kCk
                                                     : set.attention;
  return set;
}

void Require(std::initializer_list<std::int64_t> sizes) {
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size == 0; })) {
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
  // Liger's loss leaves the gradient where the logits were, which are the leaf's own gradient after
  // the first time: it is added to itself.
  const bool is_itself = row.op == "cross_entropy" && row.stack.starts_with("liger");
  kernels->push_back(Pass(dtype, leaf * (is_itself ? 1 : 2), leaf));
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

KernelPrediction PredictKernelRow(const KernelRow& row, const std::string& profile_name) {
  if (row.time.value <= 0) {
    throw CannotPrice{"no time"};
  }
  const GpuSpec& gpu = GpuOf(row);
  const Profile profile =
      profile_name.empty() ? DefaultProfile(gpu, KernelSetOf(row).name) : LoadProfile(profile_name);
  const KernelRates rates = FindKernelRates(gpu, profile.compute);
  KernelPrediction result{row.line, gpu.name, row.stack, row.op, profile.name, {}, row.time, 0};
  for (const Kernel& kernel : KernelsOf(row)) {
    result.predicted += KernelTime(kernel, rates);
    result.predicted += rates.gap;
  }
  result.predicted = result.predicted - rates.gap;  // between kernels only
  result.error = result.predicted.value / result.measured.value - 1;
  return result;
}

}  // namespace

std::vector<Kernel> KernelsOfRow(const KernelRow& row) {
  try {
    return KernelsOf(row);
  } catch (const CannotPrice&) {
    return {};
  }
}

std::vector<KernelRow> ParseKernelRows(std::string_view text, const std::string& file) {
  const CsvTable table = ParseCsv(text, file);
  table.Require(kKernelColumns, "a table of kernel times");
  std::vector<KernelRow> rows;
  for (const CsvRow& record : table.rows) {
    const CsvFields read{table, record};
    const std::string& causal = read.Text("causal");
    if (!causal.empty() && causal != "0" && causal != "1") {
      throw InputError(table.Where(record, "causal"), '"' + causal + '"', "0, 1 or nothing");
    }
    KernelRow& row = rows.emplace_back();
    row.line = record.line;
    row.gpu = read.Text("gpu");
    row.stack = read.Text("stack");
    row.op = read.Text("op");
    row.direction = read.Text("direction");
    row.dtype = read.Text("dtype");
    row.batch = read.Count("batch");
    row.m = read.Count("m");
    row.n = read.Count("n");
    row.k = read.Count("k");
    row.groups = read.Count("groups");
    row.sequence = read.Count("sequence");
    row.kv_sequence = read.Count("kv_sequence");
    row.heads = read.Count("heads");
    row.kv_heads = read.Count("kv_heads");
    row.head_dim = read.Count("head_dim");
    row.value_dim = read.Count("value_dim");
    row.causal = causal == "1";
    row.rows = read.Count("rows");
    row.features = read.Count("features");
    row.time = Seconds(1e-6 * read.Positive("time_us"));
  }
  return rows;
}

std::vector<KernelRow> ReadKernelRows(const std::string& file) {
  return ParseKernelRows(ReadTextFile(file), file);
}

KernelReport ValidateKernels(const std::vector<KernelRow>& rows, const std::string& profile) {
  KernelReport report;
  std::map<std::tuple<std::string, std::string, std::string>, std::vector<double>> errors;
  std::map<std::string, std::size_t> skipped;
  for (const KernelRow& row : rows) {
    try {
      KernelPrediction prediction = PredictKernelRow(row, profile);
      errors[{prediction.gpu, prediction.stack, prediction.op}].push_back(prediction.error);
      report.rows.push_back(std::move(prediction));
    } catch (const CannotPrice& why) {
      ++skipped[why.reason];
    }
  }
  for (const auto& [key, of_group] : errors) {
    const auto& [gpu, stack, op] = key;
    report.groups.push_back({gpu, stack, op, Summarise(of_group)});
  }
  for (const auto& [reason, count] : skipped) {
    report.skipped.push_back({reason, count});
  }
  return report;
}

}  // namespace shardwright
