#include "analysis/sweep.h"

#include <array>
#include <cmath>
#include <mutex>

#include "core/error.h"
#include "core/parallel.h"
#include "core/portable.h"
#include "planner/search.h"

namespace shardwright {
namespace {

// One field as it must stand in a file: quoted if it has to be.
std::string CsvField(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) {
    return std::string(text);
  }
  std::string quoted = "\"";
  for (const char c : text) {
    quoted += c;
    if (c == '"') {
      quoted += c;
    }
  }
  return quoted + '"';
}

// An axis without values has one: as it is.
template <class T>
std::vector<T> OrUnset(const std::vector<T>& values) {
  return values.empty() ? std::vector<T>{T{}} : values;
}

SweepResult Predict(const SweepPoint& point,
                    const std::function<PlanFile(const SweepPoint&)>& make) {
  SweepResult row;
  row.point = point;
  try {
    const PlanFile file = make(point);
    row.nodes = file.cluster.node_count;
    row.ranks = file.cluster.RankCount();
    row.micro_batch = file.plan.micro_batch;
    row.accumulation = file.plan.accumulation;
    row.global_batch = file.job.global_batch;
    row.sequence = file.job.sequence_length;
    row.shard_size = file.plan.shard_size;
    row.counts_images = file.model.sequence_length == 0;
    row.replicate_size = file.plan.replicate_size;
    row.outcome = Evaluate(file, file.plan);
    const Bytes whole = file.cluster.gpu.usable_memory.value;
    row.room = whole - row.outcome->DeviceTotal();
    row.memory_error = Bytes(
        std::llround(static_cast<double>(whole.value) * DefaultMargin(file.cluster, file.profile)));
  } catch (const InputError& error) {
    row.error = error.what();
  }
  return row;
}

// The shortest text that reads back to the same number.
std::string Shortest(double value) {
  std::array<char, 32> text{};
  const auto [end, error] = ToChars(text.data(), text.data() + text.size(), value);
  SW_CHECK(error == std::errc(), "32 characters hold every double");
  return {text.data(), end};
}

std::string CsvLine(const SweepResult& row) {
  std::string line;
  for (const std::int64_t value :
       {row.nodes, row.ranks, row.micro_batch, row.accumulation, row.global_batch, row.sequence,
        row.shard_size, row.replicate_size}) {
    line += std::to_string(value) + ",";
  }
  line += CsvField(row.point.mesh) + ",";
  line += Shortest(row.point.bandwidth > 0.0 ? row.point.bandwidth : 1.0) + ",";
  if (!row.outcome) {
    return line + ",,,,,,,," + CsvField(row.error) + "\n";
  }
  const Outcome& o = *row.outcome;
  line += Shortest(o.step_time.value) + ",";
  line += Shortest(o.rates.tokens_per_second_per_gpu) + ",";
  line += Shortest(o.rates.mfu) + ",";
  line += Shortest(o.exposed_comm.value) + ",";
  line += std::to_string(o.DeviceTotal().value) + ",";
  line += Shortest(row.GpuHoursPerBillion()) + ",";
  line += std::string(o.Fits() ? "true" : "false") + ",";
  line += std::to_string(o.Excess().value) + ",";
  return line + (o.Fits() ? "" : CsvField(o.misfits.front().text)) + "\n";
}

}  // namespace

std::vector<SweepPoint> PointsOf(const SweepAxes& axes) {
  std::vector<SweepPoint> points;
  for (const std::int64_t nodes : OrUnset(axes.nodes)) {
    for (const std::int64_t micro_batch : OrUnset(axes.micro_batch)) {
      for (const std::int64_t sequence : OrUnset(axes.sequence)) {
        for (const std::int64_t shard : OrUnset(axes.shard)) {
          for (const std::string& mesh : OrUnset(axes.mesh)) {
            for (const double bandwidth : OrUnset(axes.bandwidth)) {
              points.push_back({nodes, micro_batch, sequence, shard, mesh, bandwidth});
            }
          }
        }
      }
    }
  }
  return points;
}

double SweepResult::GpuHoursPerBillion() const {
  if (!outcome || !(outcome->rates.tokens_per_second_per_gpu > 0.0)) {
    return 0.0;
  }
  return 1e9 / outcome->rates.tokens_per_second_per_gpu / 3600.0;
}

std::vector<SweepResult> RunSweep(std::span<const SweepPoint> points,
                                  const std::function<PlanFile(const SweepPoint&)>& make,
                                  const SweepOptions& options) {
  std::vector<SweepResult> rows(points.size());
  std::mutex mutex;  // guards `done` and the calls of options.progress
  std::size_t done = 0;
  ParallelFor(points.size(), ThreadCount(options.threads), [&](std::size_t i, std::size_t) {
    rows[i] = Predict(points[i], make);
    if (options.progress) {
      const std::lock_guard lock(mutex);
      options.progress(++done, points.size());
    }
  });
  return rows;
}

std::string SweepCsv(std::span<const SweepResult> rows) {
  std::string csv =
      "nodes,ranks,micro_batch,accumulation,global_batch,sequence,shard_size,replicate_size,"
      "mesh,bandwidth_factor,step_time_s,tokens_per_s_per_gpu,mfu,exposed_comm_s,device_bytes,"
      "gpu_hours_per_1e9_tokens,fits,excess_bytes,reason\n";
  for (const SweepResult& row : rows) {
    csv += CsvLine(row);
  }
  return csv;
}

}  // namespace shardwright
