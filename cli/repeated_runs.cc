#include "cli/repeated_runs.h"

#include <cstddef>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "analysis/profile_numbers.h"
#include "core/error.h"
#include "core/json.h"
#include "core/parallel.h"
#include "schedule/lower.h"
#include "simulator/simulate.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

class RepeatedRuns {
 public:
  explicit RepeatedRuns(std::vector<MeasuredRun> runs) : runs_(std::move(runs)) {
    for (const MeasuredRun& run : runs_) {
      const PlanFile& plan = run.plan;
      bases_.try_emplace(plan.cluster.gpu.name, DefaultProfile(plan.cluster.gpu, ""));
      try {
        programs_.emplace_back(Lower({plan, plan.plan}));
      } catch (const InputError& error) {
        programs_.emplace_back(std::nullopt);
        errors_[programs_.size() - 1] = error.what();
      }
    }
  }

  // The runs, and the profile of each GPU type that points change.
  [[nodiscard]] Json About() {
    Json about = ReportHead("shardwright-repeated-runs");
    about["runs"] = Json::array();
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const PlanFile& plan = runs_[i].plan;
      Json run = {{"gpu", plan.cluster.gpu.name},
                  {"chip", ChipOf(plan.cluster.gpu)},
                  {"gpus", plan.cluster.RankCount()},
                  {"kernel_set", plan.kernels.name}};
      if (!programs_[i]) {
        run["error"] = errors_[i];
      }
      about["runs"].push_back(run);
    }
    for (auto& [gpu, profile] : bases_) {
      Json numbers = Json::object();
      for (const std::string& path : NumberPaths(profile)) {
        const NumberRef number = NumberAt(profile, path, gpu);
        numbers[path] = {{"value", *number.value}, {"is_time", number.is_time}};
      }
      about["profiles"][gpu] = {{"name", profile.name},
                                {"numbers", numbers},
                                {"gemm", Json::parse(ProfileJson(profile))["compute"]["gemm"]}};
    }
    return about;
  }

  // The step times, in seconds, of the runs in `question`: "rows" has pairs of a run and a point,
  // "points" has values by the path of a number.
  [[nodiscard]] Json TimesAt(const JsonValue& question) {
    question.AllowOnly({"points", "rows"});
    const JsonValue points = question.At("points");
    const JsonValue rows = question.At("rows");
    std::vector<std::pair<std::size_t, const Profile*>> tasks;
    std::map<std::pair<std::string, std::size_t>, Profile> profiles;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto run = static_cast<std::size_t>(rows[i][0].AsInt(0, std::ssize(runs_) - 1));
      const auto point = static_cast<std::size_t>(rows[i][1].AsInt(0, std::ssize(points) - 1));
      if (!programs_[run]) {
        throw rows[i][0].Error("a run that can be lowered");
      }
      const std::string& gpu = runs_[run].plan.cluster.gpu.name;
      const auto [found, is_new] = profiles.try_emplace({gpu, point}, bases_.find(gpu)->second);
      for (const std::string& path : is_new ? points[point].Keys() : std::vector<std::string>()) {
        *NumberAt(found->second, path, points.path().str()).value =
            points[point].At(path).AsDouble();
      }
      tasks.emplace_back(run, &found->second);
    }
    std::vector<double> times(tasks.size());
    ParallelFor(tasks.size(), simulators_.size(), [&](std::size_t i, std::size_t worker) {
      const auto& [run, profile] = tasks[i];
      std::optional<Simulator>& simulator = simulators_[worker];
      const Cluster& cluster = runs_[run].plan.cluster;
      simulator ? simulator->Use(cluster, *profile) : void(simulator.emplace(cluster, *profile));
      SimulateOptions options;
      options.reserved = false;
      times[i] = ToSeconds(simulator->Run(*programs_[run], options).step_time).value;
    });
    return times;
  }

 private:
  // Equal for GPU types with the same multiprocessors, however much memory they have and how fast
  // it is: A100 of 40 and 80 GB, H100 and H200.
  static std::string ChipOf(const GpuSpec& gpu) {
    std::string chip = gpu.architecture + ' ' + std::to_string(gpu.sm_count.value);
    for (std::size_t i = 0; i < kMathTypeCount; ++i) {
      const std::optional<FlopsPerSecond> peak = PeakFlops(gpu, static_cast<MathType>(i));
      chip += ' ' + (peak ? Format(*peak) : "-");
    }
    return chip;
  }

  std::vector<MeasuredRun> runs_;
  std::vector<std::optional<Program>> programs_;
  std::map<std::size_t, std::string> errors_;  // of runs without a program
  std::map<std::string, Profile> bases_;       // by GPU type: what microbenchmarks say of it
  std::vector<std::optional<Simulator>> simulators_{ThreadCount()};
};

}  // namespace

void RepeatRuns(const RunList& list, const Arguments& arguments) {
  RepeatedRuns runs(ReadRuns(list));
  arguments.Print(runs.About().dump() + '\n');
  for (std::string line; std::getline(std::cin, line);) {
    arguments.Print(runs.TimesAt(JsonValue::Parse(line, "standard input")).dump() + '\n');
  }
}

}  // namespace shardwright
