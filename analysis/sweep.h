#pragma once

// What-if: one prediction per point of a grid of job and cluster sizes.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/evaluate.h"
#include "schedule/plan_file.h"

namespace shardwright {

// Values to try; an empty axis stays as the job has it.
struct SweepAxes {
  std::vector<std::int64_t> nodes;
  std::vector<std::int64_t> micro_batch;  // samples
  std::vector<std::int64_t> sequence;     // tokens
  std::vector<std::int64_t> shard;        // ranks that share one copy
  std::vector<std::string> mesh;          // "tp=2,pp=4", as --shard has it
  std::vector<double> bandwidth;          // factors on the links of one level
};

// One combination; 0: not swept.
struct SweepPoint {
  std::int64_t nodes = 0;
  std::int64_t micro_batch = 0;
  std::int64_t sequence = 0;
  std::int64_t shard = 0;
  std::string mesh;
  double bandwidth = 0.0;

  bool operator==(const SweepPoint&) const = default;
};

// The cross product; the last axis runs fastest.
[[nodiscard]] std::vector<SweepPoint> PointsOf(const SweepAxes& axes);

struct SweepResult {
  SweepPoint point;
  // Of the plan that was predicted; 0 where there is none.
  std::int64_t nodes = 0;
  std::int64_t ranks = 0;
  std::int64_t micro_batch = 0;
  std::int64_t accumulation = 0;
  std::int64_t global_batch = 0;
  std::int64_t sequence = 0;
  std::int64_t shard_size = 0;
  std::int64_t replicate_size = 0;
  bool counts_images = false;  // of an image model, tokens are images and there is no sequence
  std::optional<Outcome> outcome;
  Bytes room;          // what the outcome leaves of the device's memory
  Bytes memory_error;  // by how much that may be off: DefaultMargin of it
  std::string error;   // why there is no such plan; empty where there is an outcome

  [[nodiscard]] bool Fits() const { return outcome && outcome->Fits(); }
  // It fits also where the prediction is off by its error.
  [[nodiscard]] bool FitsSurely() const { return Fits() && room >= memory_error; }
  // GPU-hours per 10^9 tokens (images); 0 without outcome.
  [[nodiscard]] double GpuHoursPerBillion() const;
};

struct SweepOptions {
  int threads = 0;                                         // 0: what the machine has
  std::function<void(std::size_t, std::size_t)> progress;  // (points done, points), serialised
};

// Makes and predicts the plan of every point. `make` throws InputError for a point that has no
// plan, and must be safe to call from several threads. Rows in the order of `points`, equal for
// any number of threads.
[[nodiscard]] std::vector<SweepResult> RunSweep(
    std::span<const SweepPoint> points, const std::function<PlanFile(const SweepPoint&)>& make,
    const SweepOptions& options = {});

// One line per row under a header (docs/cli.md names the columns); texts quoted as RFC 4180 has it.
[[nodiscard]] std::string SweepCsv(std::span<const SweepResult> rows);

}  // namespace shardwright
