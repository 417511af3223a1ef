// How much of the blocks to checkpoint, as one number: the steps of a ladder.
//
// Example: 4 blocks. Pattern "mlp" saves 1 GiB of a block for 10 ms, "full" saves 3 GiB for 40 ms.
// Pattern "attention" saves 1 GiB for 30 ms and is left out, as "mlp" saves as much in less time.
// The ladder is none, mlp, full: 2 x 4 steps.
//
//   step   blocks                      saves
//   0      none in all                 0 GiB
//   3      mlp in 3, none in 1         3 GiB
//   4      mlp in all                  4 GiB
//   5      full in 1, mlp in 3         6 GiB
//   8      full in all                 12 GiB
//
// Each corner is the pattern with the least seconds per byte saved from the last corner on: the
// convex hull of the points (saved, seconds). O(patterns^2). StepSaving finds a step by bisection.

#include <cmath>

#include "core/ranges.h"
#include "planner/local.h"

namespace shardwright {

MixLadder::MixLadder(const Space& space, const Measured& measured, bool offloads)
    : blocks_(space.blocks.size()), spreads_(offloads) {
  struct Point {
    std::size_t pattern = 0;
    double seconds = 0;
    double saved = 0;     // bytes that leave the ladder's own resource: copies, or device memory
    double resident = 0;  // device bytes
    double copied = 0;
  };
  std::vector<Point> points;
  const std::size_t measured_blocks =
      Summed<std::size_t>(measured.classes, [&](const BlockClass& c) { return c.blocks.size(); });
  is_whole_ = measured_blocks == blocks_;
  const double per_block = 1 / static_cast<double>(std::max<std::size_t>(blocks_, 1));
  for (std::size_t p = 0; p < measured.pattern_is_allowed.size(); ++p) {
    Point point = {p, 0, 0, 0, 0};
    for (const BlockClass& c : measured.classes) {
      const double count = static_cast<double>(c.blocks.size()) * per_block;
      const BlockCost& none = c.costs[0];
      // Where the host is the slower side, its time is what counts.
      point.seconds += count * std::max(c.costs[p].work.Total(), c.costs[p].work.issue);
      point.copied += count * c.costs[p].copied_bytes;
      point.resident += count * (offloads ? none.staying_bytes - c.costs[p].staying_bytes
                                          : none.kept_bytes - c.costs[p].kept_bytes);
      point.saved += count * (none.kept_bytes - c.costs[p].kept_bytes);
    }
    if (measured.pattern_is_allowed[p]) {
      points.push_back(point);
    }
  }
  StableSortBy(points, &Point::saved);
  Point last;
  const auto add = [&](const Point& point) {
    last = point;
    patterns_.push_back(point.pattern);
    saved_.push_back(point.resident);
    copied_.push_back(point.copied);
    seconds_.push_back(point.seconds);
  };
  add(*FindIn(points, std::size_t{0}, &Point::pattern));
  while (true) {  // the least seconds per byte from the last corner on
    const Point* next = nullptr;
    const auto slope = [&](const Point& p) {
      return std::max(0.0, p.seconds - last.seconds) / (p.saved - last.saved);
    };
    for (const Point& p : points) {
      if (p.saved > last.saved * (1 + 1e-9) + 1 && (next == nullptr || slope(p) < slope(*next))) {
        next = &p;
      }
    }
    if (next == nullptr) {
      break;
    }
    add(*next);
  }
}

double MixLadder::At(const std::vector<double>& by_pattern, std::size_t step) const {
  if (blocks_ == 0) {
    return 0;
  }
  const std::size_t level = step / blocks_;
  const std::size_t extra = step % blocks_;
  const double first = static_cast<double>(blocks_ - extra) * by_pattern[level];
  return extra > 0 ? first + static_cast<double>(extra) * by_pattern[level + 1] : first;
}

double MixLadder::Saved(std::size_t step) const {
  return At(saved_, step);
}

double MixLadder::MostSavedFrom(std::size_t step) const {
  // The tensors recomputed for one block's backward, and the block before it, may be larger at this
  // step.
  constexpr double kPassing = 2;
  const double all = Saved(steps());
  return is_whole_ && !spreads_ ? all - Saved(step) + kPassing * all / static_cast<double>(blocks_)
                                : INFINITY;
}

// With offloaded activations memory is not the question: more recomputation means fewer bytes to
// copy. Forward and backward each take as long as the slower of kernels and copies, and the fastest
// step is taken.
std::size_t MixLadder::BestStep(const Phases& phases) const {
  std::size_t best = 0;
  double least = 0;
  for (std::size_t step = 0; step <= steps(); ++step) {
    const double copied = At(copied_, step);
    const double time =
        std::max(phases.forward, copied * phases.to_host_per_byte) +
        std::max(phases.backward + At(seconds_, step), copied * phases.to_device_per_byte);
    if (step == 0 || time < least) {
      least = time;
      best = step;
    }
  }
  return best;
}

std::size_t MixLadder::StepSaving(double bytes) const {
  std::size_t low = 0, high = steps();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (Saved(middle) >= bytes) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

std::size_t MixLadder::StepCopyingLess(std::size_t step, double bytes) const {
  const double most = At(copied_, step) - bytes;
  while (step < steps() && At(copied_, step) > most) {
    ++step;
  }
  return step;
}

bool MixLadder::IsExtra(std::size_t block, std::size_t extra) const {
  return spreads_ ? (block + 1) * extra / blocks_ > block * extra / blocks_ : block < extra;
}

std::vector<RecomputeRegion> MixLadder::Regions(const Space& space, std::size_t step) const {
  std::vector<RecomputeRegion> regions;
  for (std::size_t b = 0; b < blocks_; ++b) {
    const std::size_t level = step / blocks_ + (IsExtra(b, step % blocks_) ? 1 : 0);
    AppendRegions(space.patterns[patterns_[level]], space.blocks[b], regions);
  }
  return regions;
}

std::string MixLadder::Label(const Space& space, std::size_t step) const {
  if (steps() == 0) {
    return "";
  }
  const std::size_t extra = step % blocks_;
  const std::string& name = space.patterns[patterns_[step / blocks_]].name;
  if (extra == 0) {
    return name;
  }
  const std::string& more = space.patterns[patterns_[step / blocks_ + 1]].name;
  return spreads_ ? more + " in " + std::to_string(extra) + " blocks between, else " + name
                  : more + " in the first " + std::to_string(extra) + " blocks, then " + name;
}

}  // namespace shardwright
