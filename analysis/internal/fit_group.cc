#include "analysis/internal/fit_group.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>

#include "analysis/profile_numbers.h"
#include "core/error.h"
#include "core/json.h"
#include "schedule/lower.h"
#include "schedule/plan_file.h"

namespace shardwright {
namespace {

// What a number may become, and what is expected of one that profiles leave at 0.
struct Bounds {
  std::string_view path;
  double lower = 0;
  double upper = 0;
  double expected = 0;  // 0: what the base profile says
};
constexpr std::array<Bounds, 10> kBounds = {{
    {"compute.gemm.", 0.3, 0.95, 0},
    {"compute.attention_", 0.08, 0.9, 0},
    {"compute.triton_attention_", 0.08, 0.9, 0},
    {"compute.fp8_rowwise", 0.5, 1, 0.9},
    {"compute.elementwise", 0.2, 0.95, 0},
    {"compute.reduction", 0.2, 0.95, 0},
    {"compute.optimizer", 0.05, 0.95, 0},
    {"compute.rank_spread", 0.0005, 0.03, 0.01},
    {"host.step", 1e-4, 0.1, 5e-3},
    // Where a large product takes 1.4 times as long beside a gather on H100: the greatest slowdown
    // that was published (arXiv 2507.03114).
    {"overlap.compute_sensitivity", 0.1, 2.2, 0},
}};
// Any other number may be up to this factor away from what the base profile says.
constexpr double kOtherFactor = 10;

Bounds BoundsOf(const std::string& path, double base) {
  for (const Bounds& row : kBounds) {
    if (path.starts_with(row.path)) {
      Bounds bounds = row;
      bounds.expected = row.expected > 0 ? row.expected : base;
      return bounds;
    }
  }
  return {path, base / kOtherFactor, base * kOtherFactor, base};
}

std::string FamilyOf(const std::string& kernel_set) {
  return kernel_set.substr(0, kernel_set.find('-'));
}

// GPU types with the same multiprocessors, however much memory they have and how fast it is: A100
// of 40 and 80 GB, H100 and H200.
std::string ChipOf(const GpuSpec& gpu) {
  std::string chip = gpu.architecture + ' ' + std::to_string(gpu.sm_count.value);
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    const std::optional<FlopsPerSecond> peak = PeakFlops(gpu, static_cast<MathType>(i));
    chip += ' ' + (peak ? Format(*peak) : "-");
  }
  return chip;
}

// The profile that fits start from and extend: what microbenchmarks say of the GPU's architecture,
// which serves software that no profile is for.
Profile BaseProfile(const GpuSpec& gpu) {
  return DefaultProfile(gpu, "");
}

// The stack of `gpu` and `kernel_set` in `group`, added if it is new.
std::size_t StackOf(const GpuSpec& gpu, const std::string& kernel_set, FitGroup& group) {
  for (std::size_t i = 0; i < group.stacks.size(); ++i) {
    if (group.stacks[i].gpu == gpu.name && group.stacks[i].kernel_set == kernel_set) {
      return i;
    }
  }
  const bool is_new_gpu =
      std::none_of(group.stacks.begin(), group.stacks.end(),
                   [&](const StackBase& stack) { return stack.gpu == gpu.name; });
  if (is_new_gpu) {
    group.gpus += (group.gpus.empty() ? "" : ", ") + gpu.name;
  }
  group.stacks.push_back({gpu.name, kernel_set, BaseProfile(gpu)});
  return group.stacks.size() - 1;
}

// "compute.gemm.fp8", a dtype that exists but that some GPUs lack.
bool IsGemm(const std::string& path) {
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    if (path == "compute.gemm." + std::string(MathTypeName(static_cast<MathType>(i)))) {
      return true;
    }
  }
  return false;
}

bool HasNumber(const Profile& profile, const std::string& path) {
  const std::vector<std::string> paths = NumberPaths(profile);
  return std::find(paths.begin(), paths.end(), path) != paths.end();
}

std::vector<std::size_t> VariablesAt(const FitGroup& group, std::string_view path) {
  std::vector<std::size_t> found;
  for (std::size_t k = 0; k < group.variables.size(); ++k) {
    if (group.variables[k].path == path) {
      found.push_back(k);
    }
  }
  return found;
}

// Numbers with one cause move together. Stacks of one framework run the same kernels. What keeps
// matrix products below the peak (clocks under the power limit, heat) does so for all dtypes: the
// fractions of further dtypes follow those of the first one. Where the first one is each stack's
// own and the further one shared, what is shared is their ratio: a GPU with a lower power limit has
// slower products in both. Attention's two passes are one library.
void LinkVariables(FitGroup& group) {
  std::string first_gemm;
  for (Variable& variable : group.variables) {
    const bool is_gemm = IsGemm(variable.path);
    if (is_gemm && first_gemm.empty()) {
      first_gemm = variable.path;
    }
    if (is_gemm && variable.path != first_gemm) {
      const std::vector<std::size_t> first = VariablesAt(group, first_gemm);
      if (variable.is_shared && !group.variables[first[0]].is_shared) {
        variable.moves_with = first_gemm;
      } else {
        variable.follows = first;
      }
    } else if (variable.path.ends_with("attention_backward")) {
      const std::string library = variable.path.substr(0, variable.path.rfind("backward"));
      variable.follows = VariablesAt(group, library + "forward");
    } else if (!variable.is_shared) {
      variable.follows = VariablesAt(group, variable.path);
    }
  }
}

}  // namespace

FitGroups MakeGroups(const std::vector<MeasuredRun>& runs, const FitOptions& options,
                     std::size_t& skipped) {
  FitGroups groups;
  for (const MeasuredRun& run : runs) {
    if (run.step_time_s <= 0) {
      ++skipped;
      continue;
    }
    const PlanFile& plan = run.plan;
    const std::string family = FamilyOf(plan.kernels.name);
    FitGroup& group = groups[{ChipOf(plan.cluster.gpu), family}];
    group.family = family;
    const std::size_t stack =
        StackOf(plan.cluster.gpu, options.one_per_gpu ? family : plan.kernels.name, group);
    try {
      Program program = Lower(
          {.model = plan.model.model, .kernels = plan.kernels, .job = plan.job, .plan = plan.plan});
      group.rows.push_back({&run, stack, std::move(program)});
    } catch (const InputError&) {
      ++skipped;
    }
  }
  return groups;
}

void AddVariables(const FitOptions& options, FitGroup& group) {
  const auto add = [&](const std::string& path, std::size_t stack, bool is_shared) {
    Profile profile = group.stacks[stack].profile;
    const std::string product = path == "compute.fp8_rowwise" ? "compute.gemm.fp8" : path;
    if (IsGemm(product) && !HasNumber(profile, product)) {
      return;  // a dtype that these GPUs do not multiply
    }
    const NumberRef number = NumberAt(profile, path, "--numbers");
    const Bounds bounds = BoundsOf(path, *number.value);
    if (bounds.expected <= 0) {
      throw InputError("--numbers", '"' + path + '"', "a number that the base profile has");
    }
    const double expected = std::clamp(bounds.expected, bounds.lower, bounds.upper);
    group.variables.push_back({path, stack, is_shared, std::log(bounds.lower),
                               std::log(bounds.upper), std::log(expected), number.is_time});
  };
  for (const std::string& path : options.numbers) {
    const bool is_own =
        std::find(options.own.begin(), options.own.end(), path) != options.own.end();
    for (std::size_t s = 0; s < (is_own ? group.stacks.size() : 1); ++s) {
      add(path, s, !is_own);
    }
  }
  LinkVariables(group);
}

double LogValueAt(const FitGroup& group, std::size_t stack, std::span<const double> point,
                  std::size_t k) {
  double value = point[k];
  for (std::size_t other = 0; other < group.variables.size(); ++other) {
    const Variable& first = group.variables[other];
    if (first.path == group.variables[k].moves_with && first.stack == stack) {
      value += point[other] - first.start;
    }
  }
  return value;
}

Profile ProfileAt(const FitGroup& group, std::size_t stack, std::span<const double> point) {
  Profile profile = group.stacks[stack].profile;
  for (std::size_t k = 0; k < group.variables.size(); ++k) {
    const Variable& variable = group.variables[k];
    if (variable.is_shared || variable.stack == stack) {
      *NumberAt(profile, variable.path, "--numbers").value =
          std::exp(LogValueAt(group, stack, point, k));
    }
  }
  return profile;
}

}  // namespace shardwright
