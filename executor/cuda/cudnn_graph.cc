// cuDNN's backend interface: everything is a descriptor, which is created, given attributes, and
// finalized.
//
// Example, c = a b + d with four tensors: a, b, d and c have memory and numbers 1 to 4; t is inside
// and gets number 1004, behind those of callers.
//
//   Add(a, 1), Add(b, 2), Add(d, 3), Add(c, 4), t = Add(inside)
//   Multiply(1, 2, t)                      one node: a product
//   Pointwise({kAdd, x = t, b = 3}, 4)     one node: an addition
//   Plan(device, workspace_limit)          the graph, its engine, the plan
//   RunCudnnPlan(..., {1: a, 2: b, 3: d, 4: c})   a variant pack of addresses, then execute
//
// Errors are kept, not thrown: the first refusal becomes the plan's `problem`, and the caller takes
// our own kernel.

#include "executor/cuda/cudnn_graph.h"

#include "core/ranges.h"

namespace shardwright {

using N = CudnnNumbers;

CudnnDescriptor::CudnnDescriptor(const CudnnTable& table, int kind) : table_(&table) {
  if (table.desc_create(kind, &desc_) != N::kSuccess) {
    desc_ = nullptr;
  }
}

CudnnDescriptor::CudnnDescriptor(CudnnDescriptor&& other) noexcept
    : table_(other.table_), desc_(std::exchange(other.desc_, nullptr)) {}

CudnnDescriptor& CudnnDescriptor::operator=(CudnnDescriptor&& other) noexcept {
  std::swap(table_, other.table_);
  std::swap(desc_, other.desc_);
  return *this;
}

CudnnDescriptor::~CudnnDescriptor() {
  if (desc_ != nullptr) {
    (void)table_->desc_destroy(desc_);
  }
}

CudnnDescriptor CudnnDevice(const CudnnTable& table, void* handle) {
  CudnnDescriptor device(table, N::kDevice);
  const bool is_set = device.Set(N::kDeviceHandle, N::kTypeHandle, handle) == N::kSuccess &&
                      device.Finalize() == N::kSuccess;
  return is_set ? std::move(device) : CudnnDescriptor();
}

CudnnDescriptor CudnnDevice(const CudnnTable& table, const std::string& json) {
  CudnnDescriptor device(table, N::kDevice);
  const bool is_set = device.Set(N::kDeviceJson, N::kTypeChar,
                                 std::span<const char>(json.data(), json.size())) == N::kSuccess &&
                      device.Finalize() == N::kSuccess;
  return is_set ? std::move(device) : CudnnDescriptor();
}

CudnnShape CudnnPacked(const CudnnShape& dims) {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}

// Keeps the first problem only; those that follow are its consequences.
bool CudnnGraph::Check(int status, const char* what) {
  if (status != N::kSuccess && problem_.empty()) {
    char text[512] = {};
    table_.last_error(text, sizeof text);
    problem_ = std::string(what) + ": " + table_.error_string(status) + ' ' + text;
  }
  return status == N::kSuccess;
}

void* CudnnGraph::At(Uid uid) const {
  return tensors_.at(uid);
}

void CudnnGraph::SetTensor(CudnnDescriptor& op, int attribute, Uid uid) {
  if (uid != 0) {
    Check(op.Set(attribute, N::kTypeDescriptor, At(uid)), "an operation's tensor");
  }
}

// A node refers to descriptors by address, so they live as long as the plan.
void CudnnGraph::Keep(CudnnDescriptor op, const char* what, bool is_operation) {
  Check(op.Finalize(), what);
  if (is_operation) {
    operations_.push_back(op.get());
  }
  kept_.push_back(std::move(op));
}

// Every tensor promises an alignment of 16 bytes, which callers check (IsForCudnn).
CudnnGraph::Uid CudnnGraph::Add(const CudnnTensor& tensor, Uid uid) {
  constexpr Uid kFirst = 1000;  // below it are the callers'
  if (uid == 0) {
    uid = kFirst + static_cast<Uid>(tensors_.size());
  }
  constexpr std::int64_t kAlignment = 16;
  CudnnDescriptor desc(table_, N::kTensor);
  Check(desc.Set(N::kTensorType, N::kTypeDType, tensor.type), "a tensor's type");
  Check(desc.Set(N::kTensorDims, N::kTypeInt64, std::span<const std::int64_t>(tensor.dims)),
        "a tensor's dimensions");
  Check(desc.Set(N::kTensorStrides, N::kTypeInt64, std::span<const std::int64_t>(tensor.strides)),
        "a tensor's strides");
  Check(desc.Set(N::kTensorUid, N::kTypeInt64, uid), "a tensor's number");
  Check(desc.Set(N::kTensorAlignment, N::kTypeInt64, kAlignment), "a tensor's alignment");
  Check(desc.Set(N::kTensorIsVirtual, N::kTypeBool, tensor.kind == CudnnTensor::Kind::kInside),
        "a tensor's kind");
  Check(desc.Set(N::kTensorIsNumber, N::kTypeBool, tensor.kind == CudnnTensor::Kind::kNumber),
        "a tensor's kind");
  Check(desc.Finalize(), "a tensor");
  if (!tensors_.emplace(uid, desc.get()).second) {
    problem_ = "tensor " + std::to_string(uid) + " was added twice";
  }
  kept_.push_back(std::move(desc));
  return uid;
}

// y = mode(x, b), one number for each place of y; `select` picks x or b. Dimensions of size 1 are
// repeated.
void CudnnGraph::Pointwise(const PointwiseOp& op, Uid y) {
  CudnnDescriptor desc(table_, N::kPointwise);
  Check(desc.Set(N::kPointwiseMode, N::kTypePointwise, op.mode), "a pointwise mode");
  Check(desc.Set(N::kPointwiseMath, N::kTypeDType, op.math), "a pointwise type");
  if (op.mode == N::kIndex) {
    Check(desc.Set(N::kPointwiseAxis, N::kTypeInt64, op.axis), "a pointwise axis");
  }
  CudnnDescriptor node(table_, N::kPointwiseOp);
  void* const mode = desc.get();
  Keep(std::move(desc), "a pointwise mode", false);
  Check(node.Set(N::kPointwiseOpDesc, N::kTypeDescriptor, mode), "a pointwise operation");
  SetTensor(node, N::kPointwiseOpX, op.x);
  SetTensor(node, N::kPointwiseOpB, op.b);
  SetTensor(node, N::kPointwiseOpT, op.select);
  SetTensor(node, N::kPointwiseOpY, y);
  Keep(std::move(node), "a pointwise operation", true);
}

// Products over the last two dimensions, for each sample and head, summed in fp32.
void CudnnGraph::Multiply(Uid a, Uid b, Uid c) {
  CudnnDescriptor desc(table_, N::kMatmul);
  Check(desc.Set(N::kMatmulMath, N::kTypeDType, N::kFp32), "a product's type");
  CudnnDescriptor node(table_, N::kMatmulOp);
  void* const product = desc.get();
  Keep(std::move(desc), "a product's type", false);
  SetTensor(node, N::kMatmulA, a);
  SetTensor(node, N::kMatmulB, b);
  SetTensor(node, N::kMatmulC, c);
  Check(node.Set(N::kMatmulDesc, N::kTypeDescriptor, product), "a product");
  Keep(std::move(node), "a product", true);
}

// Reduces x to the smaller dimensions of y: a row of scores to one number, or 8 heads to 2 of the
// keys.
void CudnnGraph::Reduce(int operation, Uid x, Uid y) {
  CudnnDescriptor desc(table_, N::kReduction);
  Check(desc.Set(N::kReductionMath, N::kTypeDType, N::kFp32), "a reduction's type");
  Check(desc.Set(N::kReductionOperator, N::kTypeReduction, operation), "a reduction's operator");
  CudnnDescriptor node(table_, N::kReductionOp);
  void* const reduction = desc.get();
  Keep(std::move(desc), "a reduction's operator", false);
  Check(node.Set(N::kReductionDesc, N::kTypeDescriptor, reduction), "a reduction");
  SetTensor(node, N::kReductionX, x);
  SetTensor(node, N::kReductionY, y);
  Keep(std::move(node), "a reduction", true);
}

void CudnnGraph::Reshape(Uid x, Uid y) {
  CudnnDescriptor node(table_, N::kReshapeOp);
  SetTensor(node, N::kReshapeX, x);
  SetTensor(node, N::kReshapeY, y);
  Keep(std::move(node), "a reshape", true);
}

// The same three tensors in all passes; the pass says which one is written. Cross-correlation is
// what PyTorch calls a convolution.
void CudnnGraph::Convolve(const ConvolutionOp& op) {
  const std::array<std::int64_t, 2> ones = {1, 1}, strides = {op.stride, op.stride},
                                    padding = {op.padding, op.padding};
  using Span = std::span<const std::int64_t>;
  CudnnDescriptor desc(table_, N::kConvolution);
  Check(desc.Set(N::kConvMath, N::kTypeDType, N::kFp32), "a convolution's type");
  Check(desc.Set(N::kConvMode, N::kTypeConvolution, N::kCrossCorrelation), "a convolution's mode");
  Check(desc.Set(N::kConvDims, N::kTypeInt64, std::int64_t{2}), "a convolution's dimensions");
  Check(desc.Set(N::kConvPaddingBefore, N::kTypeInt64, Span(padding)), "a convolution's padding");
  Check(desc.Set(N::kConvPaddingAfter, N::kTypeInt64, Span(padding)), "a convolution's padding");
  Check(desc.Set(N::kConvDilations, N::kTypeInt64, Span(ones)), "a convolution's dilations");
  Check(desc.Set(N::kConvStrides, N::kTypeInt64, Span(strides)), "a convolution's strides");
  CudnnDescriptor node(table_, op.kind);
  void* const convolution = desc.get();
  Keep(std::move(desc), "a convolution's sizes", false);
  const int first = op.kind == N::kConvForward    ? N::kConvForwardFirst
                    : op.kind == N::kConvDataGrad ? N::kConvDataGradFirst
                                                  : N::kConvWeightGradFirst;
  Check(node.Set(first, N::kTypeFloat, 1.0F), "a convolution's factor");
  Check(node.Set(first + 1, N::kTypeFloat, op.adds ? 1.0F : 0.0F), "a convolution's factor");
  Check(node.Set(first + 2, N::kTypeDescriptor, convolution), "a convolution");
  SetTensor(node, first + 3, op.weight);
  SetTensor(node, first + 4, op.input);
  SetTensor(node, first + 5, op.output);
  Keep(std::move(node), "a convolution", true);
}

// Engines with settings, best guess first. The count is an upper bound: descriptors are made for
// all, and the library fills some.
std::vector<CudnnDescriptor> CudnnGraph::Configs(const CudnnDescriptor& graph,
                                                 const CudnnDescriptor& device, int mode) {
  CudnnDescriptor heuristics(table_, N::kHeuristics);
  const bool is_made =
      Check(heuristics.Set(N::kHeuristicsMode, N::kTypeHeuristic, mode), "heuristics") &&
      Check(heuristics.Set(N::kHeuristicsGraph, N::kTypeDescriptor, graph.get()), "heuristics") &&
      Check(heuristics.Set(N::kHeuristicsDevice, N::kTypeDescriptor, device.get()), "heuristics") &&
      Check(heuristics.Finalize(), "heuristics");
  std::int64_t count = 0;
  std::vector<CudnnDescriptor> configs;
  if (!is_made || !Check(table_.desc_get(heuristics.get(), N::kHeuristicsResults,
                                         N::kTypeDescriptor, 0, &count, nullptr),
                         "heuristics")) {
    return configs;
  }
  std::vector<void*> raw;
  for (std::int64_t i = 0; i < count; ++i) {
    raw.push_back(configs.emplace_back(table_, N::kEngineConfig).get());
  }
  // Of these the library fills as many as there are engines for, on this GPU with this driver.
  if (count > 0 && !Check(table_.desc_get(heuristics.get(), N::kHeuristicsResults,
                                          N::kTypeDescriptor, count, &count, raw.data()),
                          "heuristics")) {
    count = 0;
  }
  configs.resize(static_cast<std::size_t>(count));
  return configs;
}

// Notes of an engine tell how it computes. An engine with an unknown note is not taken.
bool CudnnGraph::IsExact(const CudnnDescriptor& config) const {
  const CudnnDescriptor engine(table_, N::kEngine);
  void* raw = engine.get();
  std::int64_t count = 0;
  const bool is_known =
      table_.desc_get(config.get(), N::kConfigEngine, N::kTypeDescriptor, 1, &count, &raw) ==
          N::kSuccess &&
      table_.desc_get(raw, N::kEngineNotes, N::kTypeNote, 0, &count, nullptr) == N::kSuccess;
  std::vector<int> notes(static_cast<std::size_t>(count));
  if (!is_known || (count > 0 && table_.desc_get(raw, N::kEngineNotes, N::kTypeNote, count, &count,
                                                 notes.data()) != N::kSuccess)) {
    return false;
  }
  return AllOf(notes, [](int note) {
    // Others are atomics, sums in 16 bits, Winograd's and Fourier's transforms.
    return note == N::kNoteTensorCore || note == N::kNoteStrictNan;
  });
}

// Making a plan may compile a kernel: up to seconds.
CudnnPlan CudnnGraph::TryConfig(const CudnnDescriptor& config, const CudnnDescriptor& device) {
  CudnnPlan plan;
  plan.plan = CudnnDescriptor(table_, N::kPlan);
  std::int64_t count = 0;
  const bool is_made =
      Check(plan.plan.Set(N::kPlanConfig, N::kTypeDescriptor, config.get()), "a plan") &&
      Check(plan.plan.Set(N::kPlanDevice, N::kTypeDescriptor, device.get()), "a plan") &&
      Check(plan.plan.Finalize(), "a plan") &&
      Check(table_.desc_get(plan.plan.get(), N::kPlanWorkspace, N::kTypeInt64, 1, &count,
                            &plan.workspace_bytes),
            "a plan");
  plan.problem = std::exchange(problem_, {});  // the next one may do
  if (!is_made) {
    plan.plan = {};
  }
  return plan;
}

// Example: three configs. The first sums by atomics, the second wants 2 GiB where 1 GiB is allowed,
// the third fits: it is taken. If none of the best guesses fits, the fallback list follows. The
// problem that is told is the last one found.
CudnnPlan CudnnGraph::Plan(const CudnnDescriptor& device, std::int64_t workspace_limit,
                           std::int64_t exact_workspace) {
  CudnnDescriptor graph(table_, N::kGraph);
  Check(graph.Set(N::kGraphOps, N::kTypeDescriptor, std::span<void* const>(operations_)),
        "the graph");
  Check(graph.Finalize(), "the graph");
  if (!problem_.empty()) {
    CudnnPlan none;
    none.problem = problem_;
    return none;
  }
  CudnnPlan none;
  for (const int mode : {N::kHeuristicA, N::kHeuristicFallback}) {
    for (CudnnDescriptor& config : Configs(graph, device, mode)) {
      if (!IsExact(config)) {
        none.problem = "plans that do not repeat bit by bit";
        continue;
      }
      CudnnPlan plan = TryConfig(config, device);
      if (plan.plan.get() != nullptr && plan.workspace_bytes < exact_workspace) {
        none.problem = "plans that do not repeat bit by bit";
        continue;
      }
      if (plan.plan.get() != nullptr && plan.workspace_bytes <= workspace_limit) {
        plan.parts = std::move(kept_);
        plan.parts.push_back(std::move(graph));
        plan.parts.push_back(std::move(config));
        plan.is_fallback = mode == N::kHeuristicFallback;
        return plan;
      }
      none.problem = plan.plan.get() == nullptr
                         ? plan.problem
                         : "a workspace of " + std::to_string(plan.workspace_bytes) + " bytes";
    }
    if (none.problem.empty()) {
      none.problem = std::exchange(problem_, {});
    }
  }
  if (none.problem.empty()) {
    none.problem = "none of its engines (CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr says why)";
  }
  return none;
}

// A variant pack is made for each call, some microseconds on the host.
int RunCudnnPlan(const CudnnTable& table, void* handle, const CudnnPlan& plan,
                 std::span<const std::pair<CudnnGraph::Uid, void*>> pointers, void* workspace) {
  std::vector<std::int64_t> uids;
  std::vector<void*> addresses;
  for (const auto& [uid, address] : pointers) {
    uids.push_back(uid);
    addresses.push_back(address);
  }
  CudnnDescriptor pack(table, N::kPack);
  for (const int status :
       {pack.Set(N::kPackUids, N::kTypeInt64, std::span<const std::int64_t>(uids)),
        pack.Set(N::kPackPointers, N::kTypePointer, std::span<void* const>(addresses)),
        pack.Set(N::kPackWorkspace, N::kTypePointer, workspace), pack.Finalize()}) {
    if (status != N::kSuccess) {
      return status;
    }
  }
  return table.execute(handle, plan.plan.get(), pack.get());
}

}  // namespace shardwright
