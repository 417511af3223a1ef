// Attention: the softmax written out as the operations that cuDNN's matcher expects. Order and kind
// of the nodes are those of its documented pattern (docs.nvidia.com/deeplearning/cudnn, "Fused
// Flash Attention"), since other graphs of the same formula are refused.
//
// Shapes: pairs are (batch, heads, seq_q, seq_k). Example: 2 samples, 8 heads, 1,024 tokens: 2^24
// pairs. Tensors of pairs are `inside`: the fused kernel never writes them to memory.
//
// Forward as nodes: product, factor, mask, maximum by row, subtract, exp, sum by row, log + maximum
// (kept as log-sums), divide, product with v. Backward begins with exp(score - log-sum), so that
// either our own kernel or cuDNN's may follow the forward of the other.
//
// Backward adds the gradients of queries over blocks of keys. To do so without atomics cuDNN keeps
// the gradients of all scores: 2 bytes x 2^24 = 32 MiB in the example.

#include <cstdint>
#include <limits>

#include "executor/cuda/cudnn_problems.h"

namespace shardwright {
namespace {

using N = CudnnNumbers;
using Uid = CudnnGraph::Uid;
using Kind = CudnnTensor::Kind;

constexpr std::int64_t kBytes = 2;  // of a 16-bit number

// Tensors that have an address.
enum : Uid {
  kQ = 1,
  kK,
  kV,
  kY,
  kLogSums,
  kDy,
  kDq,
  kDk,
  kDv,
  kProducts,  // sum of y dy over a row
  kFactor,
  kMinusInfinity,
  kOne,
};

class AttentionGraph {
 public:
  AttentionGraph(const CudnnTable& table, const CudnnAttention& problem)
      : graph_(table), p_(problem), type_(CudnnTypeOf(problem.dtype)) {}

  [[nodiscard]] CudnnPlan Plan(const CudnnDescriptor& device, std::int64_t workspace_limit) {
    if (p_.is_backward) {
      Backward();
    } else {
      Forward();
    }
    // Gradients of queries are sums over keys in a fixed order where those of all scores lie in
    // memory.
    const std::int64_t scores = kBytes * p_.batch * p_.heads * p_.seq_q * p_.seq_k;
    return graph_.Plan(device, workspace_limit, p_.is_backward ? scores : 0);
  }

 private:
  // (batch, heads, rows, features) where rows and heads lie apart.
  Uid Rows(Uid uid, const CudnnAttention::Heads& place, std::int64_t heads, std::int64_t rows,
           std::int64_t features) {
    return graph_.Add({.type = type_,
                       .dims = {p_.batch, heads, rows, features},
                       .strides = {rows * place.row, place.head, place.row, 1}},
                      uid);
  }
  // The same memory as (batch, heads, features, rows).
  Uid Columns(Uid uid, const CudnnAttention::Heads& place, std::int64_t rows,
              std::int64_t features) {
    return graph_.Add({.type = type_,
                       .dims = {p_.batch, p_.kv_heads, features, rows},
                       .strides = {rows * place.row, place.head, 1, place.row}},
                      uid);
  }
  Uid PerQuery(Uid uid, Kind kind) {
    const CudnnShape dims = {p_.batch, p_.heads, p_.seq_q, 1};
    return graph_.Add({.dims = dims, .strides = CudnnPacked(dims), .kind = kind}, uid);
  }
  Uid PerPair(int type = N::kFp32) {
    const CudnnShape dims = {p_.batch, p_.heads, p_.seq_q, p_.seq_k};
    return graph_.Add({.type = type, .dims = dims, .strides = CudnnPacked(dims), .kind = kInside});
  }
  Uid Number(Uid uid) { return graph_.Add({.kind = Kind::kNumber}, uid); }

  // x combined with b (0: alone), pair by pair.
  Uid OfPairs(int mode, Uid x, Uid b = 0, int type = N::kFp32) {
    const Uid y = PerPair(type);
    graph_.Pointwise({.mode = mode, .x = x, .b = b}, y);
    return y;
  }
  Uid OfQueries(int mode, Uid x, Uid b = 0) {
    const Uid y = PerQuery(0, kInside);
    graph_.Pointwise({.mode = mode, .x = x, .b = b}, y);
    return y;
  }
  Uid Reduce(int operation, Uid x) {
    const Uid y = PerQuery(0, kInside);
    graph_.Reduce(operation, x, y);
    return y;
  }

  // factor * q k
  Uid Scores(Uid q, Uid k, Uid factor) {
    const Uid raw = PerPair();
    graph_.Multiply(q, k, raw);
    return OfPairs(N::kMultiply, raw, factor);
  }
  // Minus infinity where the key is behind the query.
  // Two index tensors, of rows and of columns, are compared: query 3 sees keys 0 to 3.
  Uid Masked(Uid scores) {
    if (!p_.causal) {
      return scores;
    }
    const Uid row = PerPair(N::kInt32), column = PerPair(N::kInt32), sees = PerPair(N::kBoolean);
    graph_.Pointwise({.mode = N::kIndex, .x = scores, .axis = 2}, row);
    graph_.Pointwise({.mode = N::kIndex, .x = scores, .axis = 3}, column);
    graph_.Pointwise({.mode = N::kGreaterEqual, .x = row, .b = column, .math = N::kBoolean}, sees);
    const Uid masked = PerPair();
    graph_.Pointwise({.mode = N::kSelect, .x = scores, .b = Number(kMinusInfinity), .select = sees},
                     masked);
    return masked;
  }

  void Forward() {
    const Uid q = Rows(kQ, p_.q, p_.heads, p_.seq_q, p_.head_dim);
    const Uid k = Columns(kK, p_.k, p_.seq_k, p_.head_dim);
    const Uid scores = Masked(Scores(q, k, Number(kFactor)));
    const Uid largest = Reduce(N::kLargest, scores);
    const Uid exps = OfPairs(N::kExp, OfPairs(N::kSubtract, scores, largest));
    const Uid sum = Reduce(N::kSum, exps);
    const Uid log_sum = OfQueries(N::kLog, sum);
    graph_.Pointwise({.mode = N::kAdd, .x = largest, .b = log_sum},
                     PerQuery(kLogSums, Kind::kMemory));
    const Uid weights = OfPairs(N::kDivide, exps, sum, type_);
    const Uid v = Rows(kV, p_.v, p_.kv_heads, p_.seq_k, p_.value_dim);
    graph_.Multiply(weights, v, Rows(kY, OutputPlace(), p_.heads, p_.seq_q, p_.value_dim));
  }

  [[nodiscard]] CudnnAttention::Heads OutputPlace() const {
    return {p_.heads * p_.value_dim, p_.value_dim};
  }

  // The pairs the other way round, to be multiplied: (batch, heads, seq_k, seq_q).
  Uid Turned(Uid pairs) {
    const Uid turned =
        graph_.Add({.type = type_,
                    .dims = {p_.batch, p_.heads, p_.seq_k, p_.seq_q},
                    .strides = {p_.heads * p_.seq_q * p_.seq_k, p_.seq_q * p_.seq_k, 1, p_.seq_k},
                    .kind = kInside});
    graph_.Reshape(pairs, turned);
    return turned;
  }

  // to = pairs x rows, summed over the query heads that share a key's.
  void KeySideGradient(Uid pairs, Uid rows, Uid to, std::int64_t features) {
    if (p_.heads == p_.kv_heads) {
      graph_.Multiply(pairs, rows, to);
      return;
    }
    const CudnnShape dims = {p_.batch, p_.heads, p_.seq_k, features};
    const Uid of_heads =
        graph_.Add({.type = type_, .dims = dims, .strides = CudnnPacked(dims), .kind = kInside});
    graph_.Multiply(pairs, rows, of_heads);
    graph_.Reduce(N::kSum, of_heads, to);
  }

  // p = exp(s - log sum), dv = p^T dy, ds = p (dy v^T - sum(y dy)) factor, dk = ds^T q, dq = ds k.
  void Backward() {
    const Uid y = Rows(kY, OutputPlace(), p_.heads, p_.seq_q, p_.value_dim);
    const Uid dy = Rows(kDy, OutputPlace(), p_.heads, p_.seq_q, p_.value_dim);
    const Uid product =
        graph_.Add({.dims = {p_.batch, p_.heads, p_.seq_q, p_.value_dim},
                    .strides = CudnnPacked({p_.batch, p_.heads, p_.seq_q, p_.value_dim}),
                    .kind = kInside});
    graph_.Pointwise({.mode = N::kMultiply, .x = dy, .b = y}, product);
    const Uid products = PerQuery(kProducts, Kind::kMemory);
    graph_.Pointwise({.mode = N::kMultiply, .x = Reduce(N::kSum, product), .b = Number(kOne)},
                     products);

    const Uid q = Rows(kQ, p_.q, p_.heads, p_.seq_q, p_.head_dim);
    const Uid k = Columns(kK, p_.k, p_.seq_k, p_.head_dim);
    const Uid factor = Number(kFactor);
    const Uid log_sums = PerQuery(kLogSums, Kind::kMemory);
    const Uid shifted = OfPairs(N::kSubtract, Scores(q, k, factor), log_sums);
    const Uid weights = OfPairs(N::kExp, Masked(shifted));
    KeySideGradient(Turned(weights), dy, Rows(kDv, p_.dv, p_.kv_heads, p_.seq_k, p_.value_dim),
                    p_.value_dim);

    const Uid raw = PerPair();
    graph_.Multiply(dy, Columns(kV, p_.v, p_.seq_k, p_.value_dim), raw);
    const Uid inner = OfPairs(N::kMultiply, OfPairs(N::kSubtract, raw, products), weights);
    const Uid dscores = OfPairs(N::kMultiply, inner, factor);
    KeySideGradient(Turned(dscores), q, Rows(kDk, p_.dk, p_.kv_heads, p_.seq_k, p_.head_dim),
                    p_.head_dim);

    const Uid keys = graph_.Add({.type = type_,
                                 .dims = {p_.batch, p_.kv_heads, p_.seq_k, p_.head_dim},
                                 .strides = {p_.seq_k * p_.k.row, p_.k.head, p_.k.row, 1},
                                 .kind = kInside});
    graph_.Reshape(k, keys);
    graph_.Multiply(dscores, keys, Rows(kDq, p_.dq, p_.heads, p_.seq_q, p_.head_dim));
  }

  static constexpr Kind kInside = Kind::kInside;
  CudnnGraph graph_;
  const CudnnAttention& p_;
  const int type_;
};

constexpr std::int64_t kAlignment = 16;  // of what the library's kernels load at once

void* AddressOf(const gpu::HeadArray& heads) {
  return static_cast<char*>(heads.array.data) + heads.first * kBytes;
}

bool IsAligned(const gpu::HeadArray& heads, DType dtype) {
  return heads.array.data != nullptr && heads.array.dtype == dtype &&
         reinterpret_cast<std::uintptr_t>(AddressOf(heads)) % kAlignment == 0 &&
         heads.row * kBytes % kAlignment == 0 && heads.head * kBytes % kAlignment == 0;
}
bool IsAligned(const gpu::Array& array, DType dtype) {
  return array.data != nullptr && array.dtype == dtype &&
         reinterpret_cast<std::uintptr_t>(array.data) % kAlignment == 0;
}

}  // namespace

// Our own kernels compute the rest: dropout, biases, windows, ALiBi, soft caps, fp32, one query
// alone. Example: heads of 80 features are taken (80 is a multiple of 8), heads of 100 are not.
bool IsForCudnn(const gpu::AttentionArgs& a, bool is_backward) {
  const DType dtype = a.q.array.dtype;
  const bool is_plain = a.bias.data == nullptr && !a.drops && a.soft_cap == 0.0F &&
                        a.alibi_max == 0.0 && a.window == 0 && (!a.causal || a.seq_q == a.seq_k) &&
                        a.seq_q > 1 && a.heads % a.kv_heads == 0;
  // Other dimensions have no plan; 256 is Hopper's limit, the library knows the others'.
  const bool fits = a.head_dim % 8 == 0 && a.value_dim % 8 == 0 && a.head_dim <= 256 &&
                    a.value_dim <= 256 && CudnnTypeOf(dtype) >= 0;
  const bool is_aligned = IsAligned(a.q, dtype) && IsAligned(a.k, dtype) && IsAligned(a.v, dtype) &&
                          IsAligned(a.y, dtype);
  return is_plain && fits && is_aligned &&
         (!is_backward || (IsAligned(a.dq, dtype) && IsAligned(a.dk, dtype) &&
                           IsAligned(a.dv, dtype) && IsAligned(a.dy, dtype)));
}

CudnnAttention CudnnProblemOf(const gpu::AttentionArgs& a, bool is_backward) {
  CudnnAttention p;
  p.dtype = a.q.array.dtype;
  p.is_backward = is_backward;
  p.causal = a.causal;
  p.batch = a.batch;
  p.heads = a.heads;
  p.kv_heads = a.kv_heads;
  p.head_dim = a.head_dim;
  p.value_dim = a.value_dim;
  p.seq_q = a.seq_q;
  p.seq_k = a.seq_k;
  p.q = {a.q.row, a.q.head};
  p.k = {a.k.row, a.k.head};
  p.v = {a.v.row, a.v.head};
  if (is_backward) {
    p.dq = {a.dq.row, a.dq.head};
    p.dk = {a.dk.row, a.dk.head};
    p.dv = {a.dv.row, a.dv.head};
  }
  return p;
}

CudnnPlan MakeCudnnPlan(const CudnnTable& table, const CudnnDescriptor& device,
                        const CudnnAttention& problem, std::int64_t workspace_limit) {
  return AttentionGraph(table, problem).Plan(device, workspace_limit);
}

// Addresses of a call by the numbers that the graph gave to its tensors. Numbers such as the factor
// are read from host memory when the plan is submitted.
CudnnPointers CudnnPointersOf(const gpu::AttentionArgs& a, bool is_backward) {
  static float minus_infinity = -std::numeric_limits<float>::infinity();
  static float one = 1.0F;
  CudnnPointers all = {{kQ, AddressOf(a.q)},   {kK, AddressOf(a.k)},
                       {kV, AddressOf(a.v)},   {kY, a.y.data},
                       {kLogSums, a.log_sums}, {kFactor, const_cast<float*>(&a.factor)}};
  if (a.causal) {
    all.emplace_back(kMinusInfinity, &minus_infinity);
  }
  if (is_backward) {
    all.insert(all.end(), {{kDy, a.dy.data},
                           {kDq, AddressOf(a.dq)},
                           {kDk, AddressOf(a.dk)},
                           {kDv, AddressOf(a.dv)},
                           {kProducts, a.products},
                           {kOne, &one}});
  }
  return all;
}

}  // namespace shardwright
