#include "analysis/lengths.h"

#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <random>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/ordered_json.h"
#include "core/ranges.h"
#include "planner/evaluate.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using Random = std::mt19937_64;

// In [0, 1).
double Uniform(Random& random) {
  return static_cast<double>(random() >> 11) * 0x1p-53;
}

// A function of whole numbers that is dear to evaluate: straight between those that were.
class Curve {
 public:
  Curve(std::function<double(std::int64_t)> function, std::int64_t low, std::int64_t high)
      : function_(std::move(function)) {
    constexpr std::int64_t kParts = 4;
    for (std::int64_t i = 0; i <= kParts; ++i) {
      Known(low + (high - low) * i / kParts);
    }
    const std::map<std::int64_t, double> first = known_;
    for (auto it = first.begin(); std::next(it) != first.end(); ++it) {
      Refine(it->first, std::next(it)->first, 0);
    }
  }

  [[nodiscard]] double At(double x) const {
    const auto above = known_.lower_bound(static_cast<std::int64_t>(std::ceil(x)));
    if (above == known_.begin() || static_cast<double>(above->first) == x) {
      return above->second;
    }
    const auto below = std::prev(above);
    const auto width = static_cast<double>(above->first - below->first);
    const double part = (x - static_cast<double>(below->first)) / width;
    return below->second + part * (above->second - below->second);
  }
  [[nodiscard]] std::int64_t simulated() const { return std::ssize(known_); }

 private:
  double Known(std::int64_t x) {
    const auto [it, is_new] = known_.try_emplace(x);
    it->second = is_new ? function_(x) : it->second;
    return it->second;
  }
  void Refine(std::int64_t low, std::int64_t high, int depth) {
    constexpr double kTolerance = 0.005;
    constexpr int kMostHalvings = 5;
    if (high - low < 2 || depth == kMostHalvings) {
      return;
    }
    const std::int64_t middle = low + (high - low) / 2;
    const auto part = static_cast<double>(middle - low) / static_cast<double>(high - low);
    const double line = Known(low) + part * (Known(high) - Known(low));
    if (std::abs(Known(middle) - line) > kTolerance * line) {
      Refine(low, middle, depth + 1);
      Refine(middle, high, depth + 1);
    }
  }

  std::function<double(std::int64_t)> function_;
  std::map<std::int64_t, double> known_;
};

double StepTime(const PlanFile& file) {
  return Evaluate(file, file.plan, {.reserved = false}).step_time.value;
}

// The plan with samples of `length` tokens, read as from a file.
PlanFile AtLength(const PlanFile& file, std::int64_t length) {
  if (length == file.job.sequence_length) {
    return file;
  }
  nlohmann::ordered_json json = ParseOrdered(PlanFileJson(file), "plan");
  json["job"]["sequence_length"] = length;
  json["model"].erase("hash");  // of the other length
  return ParsePlanFile(json.dump(), "plan of " + std::to_string(length) + " tokens");
}

// Do ranks exchange anything before the last micro-batch?
bool MeetsInEach(const PlanFile& file) {
  PlanPrograms programs({file, file.plan});
  const std::int64_t count = std::min<std::int64_t>(2, programs.micro_batch_count());
  const Program& program = programs.With(count);
  return AnyOf(program.step.ops, [&](const Op& op) {
    const OpShape& shape = program.shapes[op.shape.value];
    return op.micro_batch == 0 && InfoOf(shape.code).is_collective &&
           program.groups[shape.group.value].size > 1;
  });
}

// The size of the slowest of so many ranks' micro-batches.
using Slowest = std::function<double(Random&, std::int64_t ranks)>;

StepsOfLengths Sample(const PlanFile& file, const Curve& curve, const Slowest& slowest,
                      std::int64_t draws_of_rank, std::uint64_t seed) {
  const std::int64_t ranks = MeshOf(file.plan).RankCount();
  const std::int64_t count = file.plan.accumulation;
  const bool meets = MeetsInEach(file);
  constexpr std::int64_t kMostDraws = 1 << 23, kLeast = 100, kMost = 1000;
  const std::int64_t draws = count * (meets ? draws_of_rank : ranks * draws_of_rank);
  Random random(seed);
  std::vector<double> times;
  const std::int64_t batches = std::clamp(kMostDraws / draws, kLeast, kMost);
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    double longest = 0;
    for (std::int64_t rank = 0; rank < (meets ? 1 : ranks); ++rank) {
      double sum = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        sum += curve.At(slowest(random, meets ? ranks : 1));
      }
      longest = std::max(longest, sum);
    }
    times.push_back(longest / static_cast<double>(count));
  }
  SortAll(times);
  const double sum = Summed<double>(times);
  const auto at = [&](std::int64_t percent) {
    return Seconds(times[static_cast<std::size_t>((batches * percent + 99) / 100 - 1)]);
  };
  StepsOfLengths steps;
  steps.mean = Seconds(sum / static_cast<double>(batches));
  steps.p50 = at(50);
  steps.p99 = at(99);
  steps.batches = batches;
  steps.simulated = curve.simulated();
  return steps;
}

void CountTokens(const PlanFile& file, double tokens_of_sample, double computed,
                 StepsOfLengths& steps) {
  const auto samples = static_cast<double>(file.plan.micro_batch * file.plan.accumulation);
  steps.tokens_per_second_per_gpu = tokens_of_sample * samples / steps.mean.value;
  steps.padding = 1.0 - tokens_of_sample / computed;
}

// Lengths as a distribution; longer ones are cut.
class Distribution {
 public:
  Distribution(const Lengths& lengths, std::int64_t most) {
    double total = 0;
    for (const LengthCount& one : lengths) {
      total += static_cast<double>(one.count);
      const std::int64_t length = std::min(one.length, most);
      if (!lengths_.empty() && lengths_.back() == length) {
        ends_.back() = total;
      } else {
        lengths_.push_back(length);
        ends_.push_back(total);
      }
    }
    for (double& end : ends_) {
      end /= total;
    }
  }

  [[nodiscard]] std::int64_t At(double quantile) const {
    const auto it = std::upper_bound(ends_.begin(), ends_.end(), quantile);
    return lengths_[std::min<std::size_t>(it - ends_.begin(), lengths_.size() - 1)];
  }
  // Of the longest of `count` samples.
  [[nodiscard]] double MeanOfLongest(std::int64_t count) const {
    double mean = 0, before = 0;
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      const double until = std::pow(ends_[i], static_cast<double>(count));
      mean += static_cast<double>(lengths_[i]) * (until - before);
      before = until;
    }
    return mean;
  }
  [[nodiscard]] std::int64_t shortest() const { return lengths_.front(); }
  [[nodiscard]] std::int64_t longest() const { return lengths_.back(); }

 private:
  std::vector<std::int64_t> lengths_;
  std::vector<double> ends_;  // part of the samples that are no longer
};

StepsOfLengths Padded(const PlanFile& file, const Distribution& lengths, std::uint64_t seed) {
  const Curve curve([&](std::int64_t length) { return StepTime(AtLength(file, length)); },
                    lengths.shortest(), lengths.longest());
  const std::int64_t samples = file.plan.micro_batch;
  const auto slowest = [&](Random& random, std::int64_t ranks) {
    const double power = 1.0 / static_cast<double>(ranks * samples);
    return static_cast<double>(lengths.At(std::pow(Uniform(random), power)));
  };
  StepsOfLengths steps = Sample(file, curve, slowest, 1, seed);
  CountTokens(file, lengths.MeanOfLongest(1), lengths.MeanOfLongest(samples), steps);
  return steps;
}

// --- Packed

// FLOPs that fused attention does for one sample, or document, of `length` tokens.
class AttentionWork {
 public:
  explicit AttentionWork(const PlanFile& file) : file_(file) {
    std::vector<std::int64_t> uses(file.model.specs.size(), 0);
    for (const ModelOp& op : file.model.ops) {
      ++uses[op.spec];
    }
    for (std::size_t i = 0; i < uses.size(); ++i) {
      const OpSpec& spec = file.model.specs[i];
      if (spec.kind == OpKind::kAttention && uses[i] > 0) {
        specs_.emplace_back(spec, uses[i]);
      }
    }
  }

  // `window` 0: as each layer has it.
  [[nodiscard]] double Of(std::int64_t length, std::int64_t window = 0) const {
    double flops = 0;
    for (auto [spec, count] : specs_) {
      spec.rows = spec.seq_q = spec.seq_k = length;
      spec.window = Narrowed(spec, window);
      for (const Kernel& kernel :
           LowerOp(spec, 1, file_.job.precision.param, file_.kernels).forward) {
        flops += IsAttention(kernel.kind) ? kernel.flops.value * static_cast<double>(count) : 0;
      }
    }
    return flops;
  }
  static std::int64_t Narrowed(const OpSpec& spec, std::int64_t window) {
    return spec.window == 0 || window == 0 ? std::max(spec.window, window)
                                           : std::min(spec.window, window);
  }

 private:
  const PlanFile& file_;
  std::vector<std::pair<OpSpec, std::int64_t>> specs_;
};

struct Row {
  std::int64_t tokens = 0;
  double work = 0;  // of attention
};

// Drawn documents, longest first, each into the fullest row that has room.
std::vector<Row> PackRows(const Distribution& lengths, const AttentionWork& work,
                          std::int64_t row_length, std::uint64_t seed) {
  constexpr double kRows = 2000;
  constexpr std::int64_t kLeast = 2000, kMost = 200'000;
  const double mean = lengths.MeanOfLongest(1);
  const auto wanted = static_cast<std::int64_t>(kRows * static_cast<double>(row_length) / mean);
  Random random(seed);
  std::vector<std::int64_t> documents(static_cast<std::size_t>(std::clamp(wanted, kLeast, kMost)));
  for (std::int64_t& document : documents) {
    document = lengths.At(Uniform(random));
  }
  SortAll(documents, std::greater<>());
  std::vector<Row> rows;
  std::multimap<std::int64_t, std::size_t> room;  // tokens, of the row
  std::map<std::int64_t, double> works;
  for (const std::int64_t document : documents) {
    auto fit = room.lower_bound(document);
    std::int64_t left = row_length;
    std::size_t row = rows.size();
    if (fit == room.end()) {
      rows.emplace_back();
    } else {
      left = fit->first;
      row = fit->second;
      room.erase(fit);
    }
    const auto [known, is_new] = works.try_emplace(document);
    known->second = is_new ? work.Of(document) : known->second;
    rows[row].tokens += document;
    rows[row].work += known->second;
    room.emplace(left - document, row);
  }
  return rows;
}

constexpr std::int64_t kTile = 128;  // windows of these steps differ in work (FlashPairs)

double TimeWithWindow(PlanFile file, std::int64_t tiles) {
  for (OpSpec& spec : file.model.specs) {
    if (spec.kind == OpKind::kAttention) {
      spec.window = AttentionWork::Narrowed(spec, 1 + tiles * kTile);
    }
  }
  return StepTime(file);
}

StepsOfLengths Packed(const PlanFile& file, const Distribution& lengths, std::uint64_t seed) {
  const std::int64_t row_length = file.job.sequence_length;
  const AttentionWork work(file);
  const std::vector<Row> rows = PackRows(lengths, work, row_length, seed);
  const std::int64_t most = row_length / kTile;
  std::vector<double> works;  // of a row, by the tiles of its window
  for (std::int64_t tiles = 0; tiles <= most; ++tiles) {
    works.push_back(work.Of(row_length, 1 + tiles * kTile));
  }
  const auto tiles_of = [&](double wanted) {
    const auto above = std::lower_bound(works.begin(), works.end(), wanted);
    if (above == works.begin() || above == works.end()) {
      return above == works.begin() ? 0.0 : static_cast<double>(most);
    }
    return static_cast<double>(above - works.begin()) -
           (*above - wanted) / (*above - *std::prev(above));
  };
  const Curve curve([&](std::int64_t tiles) { return TimeWithWindow(file, tiles); }, 0, most);
  const std::int64_t samples = file.plan.micro_batch;
  const auto slowest = [&](Random& random, std::int64_t ranks) {
    double largest = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      double sum = 0;
      for (std::int64_t i = 0; i < samples; ++i) {
        sum += rows[random() % rows.size()].work;
      }
      largest = std::max(largest, sum);
    }
    return tiles_of(largest / static_cast<double>(samples));
  };
  const std::int64_t ranks = MeshOf(file.plan).RankCount();
  StepsOfLengths steps =
      Sample(file, curve, slowest, samples * (MeetsInEach(file) ? ranks : 1), seed);
  double tokens = 0;
  for (const Row& row : rows) {
    tokens += static_cast<double>(row.tokens);
  }
  CountTokens(file, tokens / static_cast<double>(rows.size()), static_cast<double>(row_length),
              steps);
  return steps;
}

}  // namespace

StepsByLength SampleStepsByLength(const PlanFile& file, const Lengths& lengths,
                                  std::uint64_t seed) {
  if (file.plan.tensor_size > 1) {
    throw InputError("--lengths", "layers cut among " + std::to_string(file.plan.tensor_size),
                     "ranks with whole layers, which take samples of any length");
  }
  if (file.plan.context_size > 1) {
    throw InputError("--lengths", "tokens cut among " + std::to_string(file.plan.context_size),
                     "ranks with whole samples");
  }
  const Model& model = file.model;
  const bool reads_two = IsIn(model.tensors, InputKind::kDecoderTokens, &Tensor::input);
  if (model.sequence_length == 0 || reads_two) {
    throw InputError("--lengths", "model " + model.name,
                     reads_two ? "one that reads one sequence" : "one that reads sequences");
  }
  const Distribution distribution(lengths, file.job.sequence_length);
  StepsByLength steps{Padded(file, distribution, seed), {}};
  if (file.job.trains_by == TrainsBy::kOwn) {
    steps.packed = Packed(file, distribution, seed);
  }
  return steps;
}

}  // namespace shardwright
