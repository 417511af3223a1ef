#include "analysis/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>

#include "analysis/confidence.h"
#include "analysis/run_mapping.h"
#include "core/error.h"
#include "core/parallel.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;

double ToGibi(Bytes bytes) {
  return static_cast<double>(bytes.value) / kGibi;
}

// Seconds per optimizer step: published, or from the throughput.
double MeasuredStepTime(const MeasuredRun& run, const PlanFile& plan) {
  if (run.step_time_s > 0 || run.tokens_per_s_per_gpu <= 0) {
    return run.step_time_s;
  }
  const double tokens = static_cast<double>(plan.plan.micro_batch) *
                        static_cast<double>(plan.plan.accumulation) *
                        static_cast<double>(plan.job.sequence_length);
  return tokens / run.tokens_per_s_per_gpu;
}

Bytes PredictedMemory(const RunPrediction& prediction, MeasuredMemory kind) {
  switch (kind) {
    case MeasuredMemory::kNone:
      return Bytes(0);
    case MeasuredMemory::kAllocated:
      return prediction.allocated;
    case MeasuredMemory::kReserved:
      return prediction.reserved;
    case MeasuredMemory::kDevice:
      return prediction.reserved + prediction.outside;
  }
  SW_CHECK(false, "kind of memory");
  return Bytes(0);
}

ValidatedRow PredictRow(const MeasuredRun& run, const ValidateOptions& options) {
  ValidatedRow row;
  row.run = run;
  const bool has_tier = run.tier.empty() || std::find(options.tiers.begin(), options.tiers.end(),
                                                      run.tier) != options.tiers.end();
  if (!has_tier) {
    row.skipped = "tier " + run.tier;
    return row;
  }
  MappedRun mapped = MapRun(run, options.profile);
  row.skipped = mapped.skipped;
  row.notes = std::move(mapped.notes);
  if (!row.skipped.empty()) {
    return row;
  }
  row.profile = mapped.plan.profile.name;
  try {
    row.prediction = PredictRun(mapped.plan);
  } catch (const InputError& error) {
    row.skipped = error.what();
    return row;
  }
  row.measured_step_time_s = MeasuredStepTime(run, mapped.plan);
  row.has_step_time = row.measured_step_time_s > 0;
  if (row.has_step_time) {
    row.step_time_error = row.prediction.step_time.value / row.measured_step_time_s - 1;
    row.band = options.bands ? ConfidenceOf(mapped.plan, run.Source()).band : 0;
  }
  row.has_memory = run.memory_kind != MeasuredMemory::kNone;
  row.predicted_memory_gib = ToGibi(PredictedMemory(row.prediction, run.memory_kind));
  return row;
}

// Tables of outcomes have no columns for the dtype of products and the global batch.
std::string JobKey(MeasuredRun run) {
  run.compute_dtype.clear();
  run.global_batch = 0;
  return ConfigurationKey(run);
}

double TokensPerStep(const MeasuredRun& run) {
  return run.step_time_s * run.tokens_per_s_per_gpu;
}

// See ValidateOutcomes.
std::vector<MeasuredRun> WithThroughput(std::vector<MeasuredRun> outcomes,
                                        const std::vector<MeasuredRun>& measured) {
  std::map<std::string, const MeasuredRun*> by_job;  // of runs that do not say the length
  for (const MeasuredRun& run : measured) {
    if (run.sequence_length == 0 && TokensPerStep(run) > 0) {
      const MeasuredRun*& most = by_job[JobKey(run)];
      most = most == nullptr || TokensPerStep(run) > TokensPerStep(*most) ? &run : most;
    }
  }
  for (MeasuredRun& run : outcomes) {
    const auto found = run.sequence_length == 0 ? by_job.find(JobKey(run)) : by_job.end();
    if (found != by_job.end()) {
      run.step_time_s = found->second->step_time_s;
      run.tokens_per_s_per_gpu = found->second->tokens_per_s_per_gpu;
    }
  }
  return outcomes;
}

std::vector<ValidatedRow> PredictRows(const std::vector<MeasuredRun>& runs,
                                      const ValidateOptions& options) {
  std::vector<ValidatedRow> rows(runs.size());
  std::mutex mutex;  // guards `done` and the calls of options.progress
  std::size_t done = 0;
  ParallelFor(runs.size(), ThreadCount(), [&](std::size_t i, std::size_t) {
    rows[i] = PredictRow(runs[i], options);
    if (options.progress) {
      const std::lock_guard lock(mutex);
      options.progress(++done);
    }
  });
  return rows;
}

double Spread(const std::vector<double>& values) {
  if (values.size() < 2) {
    return 0;
  }
  double sum = 0;
  for (const double value : values) {
    sum += value;
  }
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return (*high - *low) * static_cast<double>(values.size()) / sum;
}

// Finds twins among the predicted rows and scores memory against their mean.
std::vector<TwinGroup> ScoreTwins(std::vector<ValidatedRow>& rows) {
  std::map<std::string, std::vector<std::size_t>> by_key;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].skipped.empty()) {
      by_key[ConfigurationKey(rows[i].run)].push_back(i);
    }
  }
  std::vector<std::pair<std::size_t, TwinGroup>> found;
  for (const auto& [key, members] : by_key) {
    std::vector<double> times;
    std::vector<double> memory;
    TwinGroup group;
    for (const std::size_t i : members) {
      group.ids.push_back(rows[i].run.id);
      if (rows[i].has_step_time) {
        times.push_back(rows[i].measured_step_time_s);
      }
      if (rows[i].has_memory) {
        memory.push_back(rows[i].run.peak_memory_gib);
      }
    }
    double sum = 0;
    for (const double value : memory) {
      sum += value;
    }
    for (const std::size_t i : members) {
      ValidatedRow& row = rows[i];
      row.twins = members.size();
      if (row.has_memory) {
        row.measured_memory_gib = sum / static_cast<double>(memory.size());
        row.memory_error = row.predicted_memory_gib / row.measured_memory_gib - 1;
      }
    }
    if (members.size() > 1) {
      group.step_time_spread = Spread(times);
      group.memory_spread = Spread(memory);
      found.emplace_back(members[0], group);
    }
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<TwinGroup> groups;
  groups.reserve(found.size());
  for (auto& [first, group] : found) {
    groups.push_back(std::move(group));
  }
  return groups;
}

// Collects the errors of some rows.
struct GroupErrors {
  std::size_t rows = 0;
  std::size_t skipped = 0;
  std::vector<double> step_time;
  std::vector<double> bands;
  std::size_t in_band = 0;
  std::array<std::vector<double>, 4> memory;  // by MeasuredMemory

  void Add(const ValidatedRow& row) {
    if (!row.skipped.empty()) {
      ++skipped;
      return;
    }
    ++rows;
    if (row.has_step_time) {
      step_time.push_back(row.step_time_error);
      if (row.band > 0) {
        bands.push_back(row.band);
        const double predicted = row.prediction.step_time.value;
        in_band += std::abs(row.measured_step_time_s / predicted - 1) <= row.band ? 1 : 0;
      }
    }
    if (row.has_memory) {
      memory[static_cast<std::size_t>(row.run.memory_kind)].push_back(row.memory_error);
    }
  }

  [[nodiscard]] ValidatedGroup Group(const std::string& source, const std::string& gpu) const {
    const auto of = [this](MeasuredMemory kind) {
      return Summarise(memory[static_cast<std::size_t>(kind)]);
    };
    return {.source = source,
            .gpu_class = gpu,
            .rows = rows,
            .skipped = skipped,
            .step_time = Summarise(step_time),
            .band_coverage = bands.empty()
                                 ? 0
                                 : static_cast<double>(in_band) / static_cast<double>(bands.size()),
            .band_median = bands.empty() ? 0 : Quantile(bands, 0.5),
            .allocated = of(MeasuredMemory::kAllocated),
            .reserved = of(MeasuredMemory::kReserved),
            .device = of(MeasuredMemory::kDevice)};
  }
};

}  // namespace

double OutOfMemoryScore::Recall() const {
  return oom == 0 ? 0 : static_cast<double>(oom_found) / static_cast<double>(oom);
}

double OutOfMemoryScore::FalseAlarmRate() const {
  return fits == 0 ? 0 : static_cast<double>(false_alarms) / static_cast<double>(fits);
}

std::string ConfigurationKey(const MeasuredRun& run) {
  std::string key;
  for (const std::string* text :
       {&run.model_name, &run.ffn_kind, &run.tied_embedding, &run.gpu_class, &run.network,
        &run.parallelism, &run.sharding, &run.param_dtype, &run.compute_dtype, &run.optimizer,
        &run.checkpointing, &run.offload, &run.compiled, &run.attention_kernel, &run.framework,
        &run.date}) {
    key += *text + '\n';
  }
  for (const std::int64_t number :
       {run.parameters, run.layers, run.hidden, run.heads, run.kv_heads, run.ffn_hidden,
        run.vocabulary, run.sequence_length, run.gpus, run.gpus_per_node, run.micro_batch,
        run.accumulation, run.global_batch}) {
    key += std::to_string(number) + ' ';
  }
  return key;
}

ValidationReport Validate(const std::vector<MeasuredRun>& runs, const ValidateOptions& options) {
  ValidationReport report;
  report.rows = PredictRows(runs, options);
  report.twins = ScoreTwins(report.rows);
  std::map<std::pair<std::string, std::string>, GroupErrors> groups;
  std::map<std::string, GroupErrors> sources;
  GroupErrors pooled;
  for (const ValidatedRow& row : report.rows) {
    groups[{row.run.Source(), row.run.gpu_class}].Add(row);
    sources[row.run.Source()].Add(row);
    pooled.Add(row);
  }
  for (const auto& [name, errors] : groups) {
    report.groups.push_back(errors.Group(name.first, name.second));
  }
  for (const auto& [source, errors] : sources) {
    report.sources.push_back(errors.Group(source, ""));
  }
  report.pooled = pooled.Group("", "");
  return report;
}

OutOfMemoryReport ValidateOutcomes(const std::vector<MeasuredRun>& outcomes,
                                   const std::vector<MeasuredRun>& measured,
                                   const ValidateOptions& options) {
  OutOfMemoryReport report;
  report.rows = PredictRows(WithThroughput(outcomes, measured), options);
  OutOfMemoryScore& score = report.score;
  for (const ValidatedRow& row : report.rows) {
    if (row.run.id.starts_with("oom-ref") || row.run.outcome == RunOutcome::kUnknown) {
      continue;
    }
    if (!row.skipped.empty()) {
      ++score.skipped;
      continue;
    }
    ++score.rows;
    const std::size_t found = row.prediction.out_of_memory ? 1 : 0;
    if (row.run.outcome == RunOutcome::kOom) {
      ++score.oom;
      score.oom_found += found;
    } else if (row.run.outcome == RunOutcome::kPresumedOom) {
      ++score.presumed;
      score.presumed_found += found;
    } else {
      ++score.fits;
      score.false_alarms += found;
    }
  }
  return report;
}

}  // namespace shardwright
