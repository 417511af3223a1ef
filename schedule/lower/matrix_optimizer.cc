// Kernels and memory of Muon and SOAP, which update a matrix as a whole instead of element by
// element.
//
// Example of Muon: a matrix of m = 1,024 by n = 4,096. A Newton-Schulz step costs 4 m^2 n + 2 m^3 =
// 19.3 GFLOP, the five steps 96.6 GFLOP. The update has 32 kernels: 3 for the momentum, 3 for cast,
// norm and division, 25 for the five steps, and 1 that changes the parameter. AdamW would need no
// product at all, which is why the ranks may share out the matrices (muon_distributed).
//
// Example of sharing: 5 equal matrices over 2 ranks. Rank 0 takes matrices 0, 2 and 4, rank 1 takes
// 1 and 3. The program is that of rank 0, as rank 1 waits for it in the all-reduce of the updates.
//
// SOAP runs Adam in the eigenbases of the gradient's row and column covariances. A matrix has 27
// kernels: 6 products to rotate, 9 element-wise passes, and 6 per side for its covariance and
// basis.

#include "schedule/lower/matrix_optimizer.h"

#include <algorithm>

namespace shardwright {
namespace {

constexpr std::int64_t kNewtonSchulzSteps = 5;
constexpr std::int64_t kPreconditionFrequency = 10;  // steps between two bases, SOAP's default

Flops FlopsOf(std::int64_t m, std::int64_t n, std::int64_t k) {
  return Flops(2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k));
}

Kernel PassOf(DType dtype, std::int64_t read, std::int64_t written) {
  Kernel kernel;
  kernel.kind = KernelClass::kElementwise;
  kernel.dtype = dtype;
  kernel.read = Bytes(read);
  kernel.written = Bytes(written);
  return kernel;
}

// (m, k) x (k, n), or one of `every` steps' share of it.
Kernel Product(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k,
               std::int64_t every = 1) {
  Kernel kernel;
  kernel.kind = KernelClass::kGemm;
  kernel.dtype = dtype;
  kernel.m = m;
  kernel.n = n;
  kernel.k = k;
  kernel.flops = FlopsOf(m, n, k) * (1 / static_cast<double>(every));
  kernel.read = Bytes((m + n) * k * SizeOf(dtype) / every);
  kernel.written = Bytes(m * n * SizeOf(dtype) / every);
  return kernel;
}

// One matrix of Muon up to its update in bf16: momentum, norm, Newton-Schulz
//   A = X X^T,  B = b A + c A A,  X = a X + B X
// Writes bf16 from the norm on: X is m x n, A and B are m x m, with m <= n. Momentum is kept in
// `dtype`.
void AddOrthogonal(const UpdatedMatrix& matrix, DType dtype, std::vector<Kernel>& kernels) {
  const std::int64_t m = matrix.rows, n = matrix.columns;
  const std::int64_t all = matrix.Elements(), size = SizeOf(dtype);
  constexpr DType kX = DType::kBf16;
  const std::int64_t x = m * n * SizeOf(kX), a = m * m * SizeOf(kX);
  kernels.push_back(PassOf(dtype, all * size, all * size));      // buf *= momentum
  kernels.push_back(PassOf(dtype, 2 * all * size, all * size));  // buf += grad
  kernels.push_back(PassOf(dtype, 2 * all * size, all * size));  // grad + momentum * buf
  for (std::int64_t i = 0; i < matrix.count; ++i) {
    kernels.push_back(PassOf(dtype, m * n * size, x));  // to bf16
    kernels.push_back(PassOf(kX, x, 0));                // norm
    kernels.push_back(PassOf(kX, x, x));                // X /= norm
    for (std::int64_t step = 0; step < kNewtonSchulzSteps; ++step) {
      kernels.push_back(Product(kX, m, m, n));
      kernels.push_back(Product(kX, m, m, m));
      kernels.push_back(PassOf(kX, 2 * a, a));
      kernels.push_back(Product(kX, m, n, m));
      kernels.push_back(PassOf(kX, 2 * x, x));
    }
  }
}

// A rotation into the eigenbases of both sides, or back.
void AddProjection(const UpdatedMatrix& matrix, DType dtype, std::vector<Kernel>& kernels) {
  kernels.push_back(Product(dtype, matrix.rows, matrix.columns, matrix.rows));
  kernels.push_back(Product(dtype, matrix.rows, matrix.columns, matrix.columns));
}

// The covariance of one side, of size d, and every kPreconditionFrequency steps its new basis: one
// power iteration and a QR, and the eigenvalues that order it. arXiv 2409.11321, algorithms 3, 4.
// A new basis is due every tenth step only. All steps run one program, so each of its kernels has a
// tenth of the work instead.
void AddBasis(std::int64_t d, std::int64_t other, DType dtype, std::vector<Kernel>& kernels) {
  const std::int64_t bytes = d * d * SizeOf(dtype);
  kernels.push_back(Product(dtype, d, d, other));
  kernels.push_back(PassOf(dtype, 2 * bytes, bytes));  // running mean
  for (int product = 0; product < 3; ++product) {      // Q^T L Q for the order, L Q
    kernels.push_back(Product(dtype, d, d, d, kPreconditionFrequency));
  }
  Kernel qr;
  qr.kind = KernelClass::kQr;
  qr.dtype = dtype;
  qr.batch = kPreconditionFrequency;
  qr.m = d;
  // Reflectors 4/3 d^3, their product 4/3 d^3.
  constexpr double kShare = 4.0 / 3 / kPreconditionFrequency;
  qr.flops = FlopsOf(d, d, d) * kShare;
  kernels.push_back(qr);
}

void AddSoap(const UpdatedMatrix& matrix, DType dtype, std::vector<Kernel>& kernels) {
  const std::int64_t bytes = matrix.Elements() * SizeOf(dtype);
  AddProjection(matrix, dtype, kernels);                  // gradient
  kernels.push_back(PassOf(dtype, bytes, bytes));         // m *= beta1
  kernels.push_back(PassOf(dtype, 2 * bytes, bytes));     // m += (1 - beta1) gradient
  kernels.push_back(PassOf(dtype, bytes, bytes));         // v *= beta2
  kernels.push_back(PassOf(dtype, bytes, bytes));         // projected gradient squared
  kernels.push_back(PassOf(dtype, 2 * bytes, bytes));     // v +=
  kernels.push_back(PassOf(dtype, bytes, bytes));         // sqrt(v)
  kernels.push_back(PassOf(dtype, bytes, bytes));         // + eps
  AddProjection(matrix, dtype, kernels);                  // m
  kernels.push_back(PassOf(dtype, 2 * bytes, bytes));     // m / sqrt(v)
  AddProjection(matrix, dtype, kernels);                  // back
  kernels.push_back(PassOf(dtype, 2 * bytes, bytes));     // parameter -= step
  AddBasis(matrix.rows, matrix.columns, dtype, kernels);  // after the update
  AddBasis(matrix.columns, matrix.rows, dtype, kernels);
}

// The matrices that rank `rank` of `ranks` takes, which go around.
std::vector<UpdatedMatrix> PartOf(std::span<const UpdatedMatrix> matrices, std::size_t rank,
                                  std::size_t ranks) {
  std::vector<UpdatedMatrix> part;
  for (std::size_t i = rank; i < matrices.size(); i += ranks) {
    part.push_back(matrices[i]);
  }
  return part;
}

// All wait for the rank with the most operations.
std::vector<UpdatedMatrix> LargestPart(std::span<const UpdatedMatrix> matrices,
                                       std::int64_t ranks) {
  std::vector<UpdatedMatrix> largest;
  double most = -1;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks); ++rank) {
    const std::vector<UpdatedMatrix> part = PartOf(matrices, rank, static_cast<std::size_t>(ranks));
    double work = 0;
    for (const UpdatedMatrix& matrix : part) {
      const auto m = static_cast<double>(matrix.rows);
      work += m * static_cast<double>(matrix.Elements()) * 2 +
              m * m * m * static_cast<double>(matrix.count);
    }
    if (work > most) {
      most = work;
      largest = part;
    }
  }
  return largest;
}

// `momentum` and the temporaries are those of the busiest rank; the passes that change parameters
// cover all matrices on every rank. With more than one rank the updates meet in one bf16 buffer:
// `exchanged` has 2 bytes per element of all matrices.
MatrixUpdate LowerMuon(std::span<const UpdatedMatrix> matrices, DType dtype, std::int64_t ranks) {
  MatrixUpdate update;
  std::int64_t momentum = 0;
  std::vector<Kernel>& orthogonal = ranks > 1 ? update.before : update.after;
  for (const UpdatedMatrix& matrix : LargestPart(matrices, ranks)) {
    AddOrthogonal(matrix, dtype, orthogonal);
    momentum += matrix.Elements();
    // The gradient with momentum; X and its successor, A and B.
    const std::int64_t x = matrix.rows * matrix.columns, a = matrix.rows * matrix.rows;
    update.temporaries =
        std::max(update.temporaries,
                 Bytes(matrix.Elements() * SizeOf(dtype) + (2 * x + 2 * a) * SizeOf(DType::kBf16)));
  }
  for (const UpdatedMatrix& matrix : matrices) {
    const std::int64_t bytes = matrix.Elements() * SizeOf(dtype);
    const std::int64_t low = matrix.Elements() * SizeOf(DType::kBf16);
    update.after.push_back(PassOf(dtype, low + bytes, bytes));  // parameter -= step * update
    update.exchanged += ranks > 1 ? Bytes(low) : Bytes(0);
  }
  update.states = {Bytes(momentum * SizeOf(dtype))};
  return update;
}

// States in elements, for a matrix of 100 x 300: two moments of 30,000 each, covariances of 10,000
// + 90,000, and bases of the same size.
MatrixUpdate LowerSoap(std::span<const UpdatedMatrix> matrices, DType dtype) {
  MatrixUpdate update;
  std::int64_t elements = 0, squares = 0;
  for (const UpdatedMatrix& matrix : matrices) {
    AddSoap(matrix, dtype, update.after);
    const std::int64_t m = matrix.rows, n = matrix.columns;
    elements += m * n;
    squares += m * m + n * n;
    // Projected gradient, projected moment, their update; of a new basis three more.
    update.temporaries =
        std::max(update.temporaries, Bytes(std::max(3 * m * n, 3 * n * n) * SizeOf(dtype)));
  }
  // Both moments, covariances and bases.
  for (const std::int64_t state : {elements, elements, squares, squares}) {
    update.states.emplace_back(state * SizeOf(dtype));
  }
  return update;
}

}  // namespace

bool IsBlockMatrix(const Model& model, const Parameter& parameter) {
  constexpr std::size_t kMatrix = 2;
  if (!parameter.trainable || parameter.shape.size() != kMatrix) {
    return false;
  }
  for (ModuleId at = parameter.module; at.valid(); at = model.modules[at.value].parent) {
    if (IsBlock(model, at)) {
      return true;
    }
  }
  return false;
}

UpdatedMatrix MatrixOf(const Parameter& parameter, MatrixRule rule) {
  const auto [low, high] = std::minmax(parameter.shape[0], parameter.shape[1]);
  constexpr std::int64_t kPacked = 3;
  if (rule != MatrixRule::kSoap && high == kPacked * low) {
    return {low, low, kPacked};
  }
  return {low, high, 1};
}

MatrixUpdate LowerMatrixUpdate(MatrixRule rule, std::span<const UpdatedMatrix> matrices,
                               DType dtype, std::int64_t ranks) {
  switch (rule) {
    case MatrixRule::kNone:
      break;
    case MatrixRule::kMuon:
      return LowerMuon(matrices, dtype, 1);
    case MatrixRule::kMuonDistributed:
      return LowerMuon(matrices, dtype, ranks);
    case MatrixRule::kSoap:
      return LowerSoap(matrices, dtype);
  }
  return {};
}

}  // namespace shardwright
