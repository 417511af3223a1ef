// How much running ops slow each other down. Links are shared first, then multiprocessors, then
// memory bandwidth, then cores.
//
//   links    two collectives of 100 and 300 GB/s on one link of 300 GB/s: their rates grow together
//            to 100, where the first has all it wants; the second goes on to 200, so it runs at 2/3
//   SMs      a collective takes 10 % of the multiprocessors. A kernel that uses half of the memory
//            bandwidth is compute-bound for the other half: speed 1 / (1 + 0.5 x 0.11) = 0.95
//   memory   a kernel wants 0.75 of the bandwidth, a collective 0.5. An equal share is 0.5, so the
//            collective runs at full speed and the kernel at 0.5 / 0.75 = 0.67
//
// All speeds follow from the set of running ops, so the event loop solves each set once.

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

// The collectives that share links, while their rates are being found.
class LinkSharing {
 public:
  LinkSharing(const ContentionModel& model, Running& running) : model_(model), running_(running) {
    left_.fill(1);
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      is_open_[s] = IsCollective(running, s) && running.classes[s]->bus_rate > 0;
      open_count_ += is_open_[s] ? 1 : 0;
    }
  }

  // All rates grow together until a link is full or a collective runs at its rate alone; the others
  // go on growing.
  void Run() {
    if (open_count_ < 2) {
      return;
    }
    while (open_count_ > 0) {
      Grow();
      Close();
    }
  }

 private:
  void Grow() {
    double step = std::numeric_limits<double>::infinity();
    std::array<double, kMaxLinkResources> growth{};  // share of each link per unit of the level
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if (is_open_[s]) {
        const ContentionClass& c = *running_.classes[s];
        step = std::min(step, c.bus_rate - level_);
        for (std::size_t u = 0; u < c.link_count; ++u) {
          growth[c.links[u].resource] += c.links[u].per_rate;
        }
      }
    }
    for (std::size_t r = 0; r < model_.resource_count; ++r) {
      step = growth[r] > 0 ? std::min(step, left_[r] / growth[r]) : step;
    }
    level_ += step;
    for (std::size_t r = 0; r < model_.resource_count; ++r) {
      left_[r] -= growth[r] * step;
    }
  }

  [[nodiscard]] bool IsAtLimit(const ContentionClass& c) const {
    constexpr double kFull = 1e-12;  // shares below this count as none left
    bool is_full = level_ >= c.bus_rate;
    for (std::size_t u = 0; u < c.link_count; ++u) {
      is_full = is_full || left_[c.links[u].resource] <= kFull;
    }
    return is_full;
  }

  void Close() {
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if (is_open_[s] && IsAtLimit(*running_.classes[s])) {
        is_open_[s] = false;
        --open_count_;
        running_.speeds[s] = std::min(1.0, level_ / running_.classes[s]->bus_rate);
      }
    }
  }

  const ContentionModel& model_;
  Running& running_;
  std::array<double, kMaxLinkResources> left_;  // share of each link
  std::array<bool, kStreamCount> is_open_{};    // its rate still grows
  std::size_t open_count_ = 0;
  double level_ = 0;  // the common rate of those that still grow
};

// Shares `all` max-min: whoever wants less than an equal share gets it. Slows down the others; says
// how much is used.
double ShareMaxMin(double all, const std::array<double, kStreamCount>& want, Speeds& speeds) {
  std::array<bool, kStreamCount> is_open{};
  std::size_t open = 0;
  double total = 0;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    total += want[s];
    is_open[s] = want[s] > 0;
    open += is_open[s] ? 1 : 0;
  }
  if (total <= all) {
    return total;
  }
  double left = all;
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
      speeds[s] *= left / static_cast<double>(open) / want[s];
    }
  }
  return all;
}

// Memory bandwidth is shared so; a slower op wants less.
void ShareMemory(Running& running) {
  std::array<double, kStreamCount> want{};
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    want[s] = running.has_load[s] ? running.classes[s]->hbm_share * running.speeds[s] : 0;
  }
  ShareMaxMin(1, want, running.speeds);
}

// Shares cores. A rank has its part of them, and its threads share that. A thread that waits for
// memory or for a link still holds its core. Every other busy core slows the op down besides, and
// so does every other rank on the same core.
void ShareCores(const ContentionModel& model, Running& running) {
  std::array<double, kStreamCount> want{};
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    want[s] = running.has_load[s] ? running.classes[s]->cores : 0;
  }
  const double own = model.cores / model.ranks_on_cores;
  const double used = ShareMaxMin(own, want, running.speeds) * model.ranks_on_cores;
  const double turns = model.ranks_on_cores > model.cores ? model.core_turns : 0;
  const double slower = (1 + model.busy_cores * std::max(0.0, used - 1)) * (1 + turns);
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    running.speeds[s] /= want[s] > 0 ? slower : 1;
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
  LinkSharing(model, running).Run();
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
  if (model.cores > 0) {
    ShareCores(model, running);
  }
  return running.speeds;
}

SharedTime ShareAmongThreads(Seconds alone, const Cluster& cluster, const Profile& profile) {
  const auto threads = static_cast<double>(cluster.ThreadsPerRank());
  const double shared = profile.overlap.shared_work.value;
  const Seconds time = alone * (1 - shared + shared / threads) + profile.overlap.loop_start.value;
  if (threads <= 1 || time.value >= alone.value) {
    return {alone, 1};
  }
  return {time, alone.value / time.value};
}

}  // namespace shardwright
