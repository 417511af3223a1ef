#pragma once

// The numbers of a group with which its rows are predicted best.

#include <cstddef>
#include <optional>
#include <vector>

#include "analysis/internal/fit_group.h"
#include "simulator/simulate.h"

namespace shardwright {

using RowMask = std::vector<bool>;  // rows to use

// A point and the errors there: log(predicted / measured) by row, and their slopes.
struct Linear {
  std::vector<double> at;
  std::vector<double> errors;
  std::vector<std::vector<double>> slopes;  // [variable][row]
};

// What the fits of one thread hand on to each other.
struct FitWork {
  std::optional<Simulator> simulator;  // for its memory
  std::size_t evaluations = 0;         // simulations of all rows of a group
};

// log(predicted / measured) of the rows in `mask`; 0 elsewhere.
[[nodiscard]] std::vector<double> RowErrors(const FitGroup& group, const std::vector<double>& point,
                                            const RowMask& mask, FitWork& work);

// Starts from the base profiles and sees no row outside `mask`. The sum that becomes small is that
// of the rows' errors, counted linearly beyond about 1 %, and of how far numbers are from where
// they started and from those that they follow.
[[nodiscard]] Linear FitRows(const FitGroup& group, const RowMask& mask, FitWork& work);

}  // namespace shardwright
