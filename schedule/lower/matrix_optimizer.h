#pragma once

// Optimizers that update matrices as matrices: Muon and SOAP. docs/lowering.md, section "Muon and
// SOAP".

#include <cstdint>
#include <span>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright {

// A parameter that such an optimizer updates: `count` matrices of (rows, columns), rows <= columns.
struct UpdatedMatrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t count = 1;

  [[nodiscard]] std::int64_t Elements() const { return count * rows * columns; }
};

// Is the parameter one of the matrices of the model's repeated blocks? All others (embeddings, the
// output projection, norms, biases) are updated as the job's optimizer kind says.
[[nodiscard]] bool IsBlockMatrix(const Model& model, const Parameter& parameter);

// The matrices that `rule` sees in the parameter. Muon splits packed q, k, v (one side three times
// the other) into three, SOAP does not.
[[nodiscard]] UpdatedMatrix MatrixOf(const Parameter& parameter, MatrixRule rule);

struct MatrixUpdate {
  std::vector<Kernel> before;  // up to the sum of the updates over the ranks, where there is one
  std::vector<Kernel> after;   // all the rest
  Bytes exchanged{0};    // all-reduced in between: each rank computes some updates, all apply them
  Bytes temporaries{0};  // of the orthogonalisation, or of the bases
  std::vector<Bytes> states;  // kept from step to step, one buffer each
};

// The update of `matrices` with states of `dtype` on one of `ranks` ranks that hold all of them.
[[nodiscard]] MatrixUpdate LowerMatrixUpdate(MatrixRule rule,
                                             std::span<const UpdatedMatrix> matrices, DType dtype,
                                             std::int64_t ranks);

}  // namespace shardwright
