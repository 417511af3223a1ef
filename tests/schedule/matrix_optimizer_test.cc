// Muon and SOAP: operations and bytes in closed form, shares of the ranks, and their ddp programs.

#include "schedule/lower/matrix_optimizer.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/plan.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

double FlopsOf(const std::vector<Kernel>& kernels, KernelClass kind) {
  double flops = 0;
  for (const Kernel& kernel : kernels) {
    flops += kernel.kind == kind ? kernel.flops.value : 0;
  }
  return flops;
}

TEST_CASE("Muon: five steps of X X^T, A A and B X, and passes by bytes") {
  // 2 m^2 n + 2 m^3 + 2 m^2 n per step with m = 6, n = 10.
  const std::array<UpdatedMatrix, 1> matrices = {{{6, 10, 1}}};
  const MatrixUpdate update = LowerMatrixUpdate(MatrixRule::kMuon, matrices, DType::kFp32, 8);
  CHECK(FlopsOf(update.after, KernelClass::kGemm) == 5 * (4.0 * 36 * 10 + 2.0 * 216));
  CHECK(update.before.empty());
  CHECK(update.exchanged == Bytes(0));
  CHECK(update.states == std::vector<Bytes>{Bytes(240)});
  // Momentum 2 + 3 + 3 passes, cast 4 + 2, norm 2, division 2 + 2, per step products (two inputs,
  // one output) and two sums of three; then bf16 update and fp32 parameter read, parameter written.
  const std::int64_t x = 60, a = 36,
                     per_step = 2 * ((x + x + a) + 3 * a + 3 * a + (a + 2 * x) + 3 * x);
  std::int64_t bytes = 0;
  for (const Kernel& kernel : update.after) {
    bytes += (kernel.read + kernel.written).value;
  }
  CHECK(bytes == 8 * 4 * x + 6 * x + 2 * x + 4 * x + 5 * per_step + 10 * x);
  // The gradient with momentum in fp32; X, its successor, A and B in bf16.
  CHECK(update.temporaries == Bytes(4 * 60 + 2 * (2 * 60 + 2 * 36)));
}

TEST_CASE("Muon, distributed: matrices go around the ranks, and all wait for the largest share") {
  // Rank 0 has 8 x 8 and 4 x 4, rank 1 has 4 x 8.
  const std::array<UpdatedMatrix, 3> matrices = {{{8, 8, 1}, {4, 8, 1}, {4, 4, 1}}};
  const MatrixUpdate update =
      LowerMatrixUpdate(MatrixRule::kMuonDistributed, matrices, DType::kFp32, 2);
  CHECK(FlopsOf(update.before, KernelClass::kGemm) == 5 * 6.0 * (512 + 64));
  CHECK(FlopsOf(update.after, KernelClass::kGemm) == 0);
  CHECK(update.after.size() == matrices.size());
  CHECK(update.exchanged == Bytes(2 * (64 + 32 + 16)));
  CHECK(update.states == std::vector<Bytes>{Bytes(4 * (64 + 16))});
}

TEST_CASE("SOAP: three rotations and two covariances per step, a tenth of the bases") {
  const double m = 20, n = 30;
  const std::array<UpdatedMatrix, 1> matrices = {{{20, 30, 1}}};
  const MatrixUpdate update = LowerMatrixUpdate(MatrixRule::kSoap, matrices, DType::kFp32, 8);
  const double cubes = m * m * m + n * n * n;
  CHECK(FlopsOf(update.after, KernelClass::kGemm) ==
        doctest::Approx(4 * 2 * m * n * (m + n) + 3 * 2 * cubes / 10));
  CHECK(FlopsOf(update.after, KernelClass::kQr) == doctest::Approx(8.0 / 3 * cubes / 10));
  CHECK(update.states == std::vector<Bytes>{Bytes(2400), Bytes(2400), Bytes(5200), Bytes(5200)});
}

TEST_CASE("Muon takes packed q, k, v for three matrices, SOAP for one") {
  Parameter packed;
  packed.shape = {2304, 768};
  const UpdatedMatrix muon = MatrixOf(packed, MatrixRule::kMuon);
  CHECK(muon.count == 3);
  CHECK(muon.rows == 768);
  CHECK(muon.columns == 768);
  const UpdatedMatrix soap = MatrixOf(packed, MatrixRule::kSoap);
  CHECK(soap.count == 1);
  CHECK(soap.columns == 2304);
}

TEST_CASE("ddp updates matrices of blocks by Muon and SOAP; other dialects refuse") {
  const Model model = LoadModel("gpt2");
  Job job;
  job.sequence_length = 128;
  Plan plan;
  plan.dialect = Dialect::kDdp;
  plan.replicate_size = 2;
  plan.units = Wrap(model, ParseWrap("root", "test"), {}, Dialect::kDdp, "test");
  for (const MatrixRule rule :
       {MatrixRule::kMuon, MatrixRule::kMuonDistributed, MatrixRule::kSoap}) {
    job.optimizer.matrices = rule;
    const Program program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
    CHECK(Verify(program).empty());
    std::int64_t states = 0, summed = 0;
    for (const Buffer& buffer : program.buffers) {
      states += buffer.category == Category::kOptimizerState ? buffer.size.value : 0;
    }
    for (const Op& op : program.step.ops) {
      const OpShape& shape = program.shapes[op.shape.value];
      summed += shape.code == OpCode::kAllReduce && op.phase == Phase::kOptimizer &&
                        shape.dtype == DType::kBf16
                    ? shape.bytes.value
                    : 0;
    }
    // 12 blocks of 12 h^2 in matrices; the rest has AdamW's two moments.
    const std::int64_t in_blocks = 12 * 12 * 768 * 768, rest = 124439808 - in_blocks;
    // Packed q, k, v 9 h^2 + h^2, projection 2 h^2, both of the MLP 16 h^2 + h^2.
    const std::int64_t squares = 12 * (10 + 2 + 2 * 17) * 768 * 768;
    // Of two ranks the first has q, k, v and one matrix of the MLP, 7 h^2.
    const std::int64_t of_matrices = rule == MatrixRule::kMuon ? in_blocks
                                     : rule == MatrixRule::kMuonDistributed
                                         ? in_blocks / 12 * 7
                                         : 2 * (in_blocks + squares);
    CHECK(states == 4 * (2 * rest + of_matrices));
    CHECK(summed == (rule == MatrixRule::kMuonDistributed ? 2 * in_blocks : 0));
  }
  plan.dialect = Dialect::kFsdp2;
  plan.shard_size = 2;
  plan.replicate_size = 1;
  try {
    ValidatePlan(model, job, plan, "plan");
    FAIL("not refused");
  } catch (const InputError& error) {
    CHECK(std::string(error.what()) ==
          "plan: got a job whose optimizer updates matrices by soap in a plan of dialect fsdp2, "
          "expected dialect ddp, or matrices none");
  }
}

}  // namespace
}  // namespace shardwright
