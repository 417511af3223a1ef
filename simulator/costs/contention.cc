#include "simulator/costs/contention.h"

#include <algorithm>
#include <limits>

namespace shardwright {
namespace {

// The running ops of one rank.
struct Running {
  std::array<const ContentionClass*, kStreamCount> classes{};
  std::array<bool, kStreamCount> has_load{};
  Speeds speeds;
};

bool IsCollective(const Running& running, std::size_t s) {
  return running.has_load[s] && running.classes[s]->kind == LoadKind::kCollective;
}

// Collectives share links max-min: all rates grow together until a link is full or a collective
// runs at its rate alone; the others go on growing.
void ShareLinks(const ContentionModel& model, Running& running) {
  std::array<double, kMaxLinkResources> left;
  left.fill(1);
  std::array<bool, kStreamCount> is_fixed;
  std::array<double, kStreamCount> rate{};
  std::size_t open = 0;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    is_fixed[s] = !IsCollective(running, s) || running.classes[s]->bus_rate <= 0;
    open += is_fixed[s] ? 0 : 1;
  }
  if (open < 2) {
    return;
  }
  constexpr double kFull = 1e-12;  // shares below this count as none left
  double level = 0;                // the common rate of those that still grow
  while (open > 0) {
    double step = std::numeric_limits<double>::infinity();
    std::array<double, kMaxLinkResources> growth{};  // share of each link per unit of the level
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if (is_fixed[s]) {
        continue;
      }
      const ContentionClass& c = *running.classes[s];
      step = std::min(step, c.bus_rate - level);
      for (std::size_t u = 0; u < c.link_count; ++u) {
        growth[c.links[u].resource] += c.links[u].per_rate;
      }
    }
    for (std::size_t r = 0; r < model.resource_count; ++r) {
      if (growth[r] > 0) {
        step = std::min(step, left[r] / growth[r]);
      }
    }
    level += step;
    for (std::size_t r = 0; r < model.resource_count; ++r) {
      left[r] -= growth[r] * step;
    }
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if (is_fixed[s]) {
        continue;
      }
      const ContentionClass& c = *running.classes[s];
      bool is_full = level >= c.bus_rate;
      for (std::size_t u = 0; u < c.link_count; ++u) {
        is_full = is_full || left[c.links[u].resource] <= kFull;
      }
      if (is_full) {
        rate[s] = level;
        is_fixed[s] = true;
        --open;
        running.speeds[s] = std::min(1.0, rate[s] / c.bus_rate);
      }
    }
  }
}

// Memory bandwidth is shared max-min as well: whoever wants less than an equal share gets it.
void ShareMemory(Running& running) {
  std::array<double, kStreamCount> want{};
  std::array<bool, kStreamCount> is_open{};
  std::size_t open = 0;
  double total = 0;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    if (running.has_load[s]) {
      want[s] = running.classes[s]->hbm_share * running.speeds[s];
      total += want[s];
      is_open[s] = want[s] > 0;
      open += is_open[s] ? 1 : 0;
    }
  }
  if (total <= 1) {
    return;
  }
  double left = 1;
  bool changed = true;
  while (changed && open > 0) {
    changed = false;
    const double share = left / static_cast<double>(open);
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if (is_open[s] && want[s] <= share) {
        left -= want[s];
        is_open[s] = false;
        --open;
        changed = true;
      }
    }
  }
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    if (is_open[s]) {
      running.speeds[s] *= left / static_cast<double>(open) / want[s];
    }
  }
}

}  // namespace

Speeds SolveSpeeds(const ContentionModel& model, const RunningClasses& running_classes) {
  Running running;
  running.speeds.fill(1);
  double sm_taken = 0;
  bool any_kernel = false;
  bool to_device = false;
  bool to_host = false;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    const ContentionClass& c = model.classes[running_classes[s]];
    running.classes[s] = &c;
    running.has_load[s] = c.kind != LoadKind::kNone;
    sm_taken += c.sm_share;
    any_kernel = any_kernel || c.kind == LoadKind::kKernel;
    to_device = to_device || c.kind == LoadKind::kCopyToDevice;
    to_host = to_host || c.kind == LoadKind::kCopyToHost;
  }
  ShareLinks(model, running);
  constexpr double kMostTaken = 0.9;  // kernels keep a tenth of the device whatever runs beside
  const double slow_down = 1 / (1 - std::min(sm_taken, kMostTaken)) - 1;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    const ContentionClass& c = *running.classes[s];
    switch (c.kind) {
      case LoadKind::kNone:
        break;
      case LoadKind::kKernel:
        // The compute-bound part of the kernel runs on the multiprocessors that are left.
        running.speeds[s] /= 1 + model.compute_sensitivity * (1 - c.hbm_share) * slow_down;
        break;
      case LoadKind::kCollective:
        running.speeds[s] *= any_kernel ? model.collective_rate : 1;
        break;
      case LoadKind::kCopyToDevice:
      case LoadKind::kCopyToHost:
        running.speeds[s] *= to_device && to_host ? model.copies_both_ways : 1;
        break;
    }
  }
  ShareMemory(running);
  return running.speeds;
}

}  // namespace shardwright
