#include <cmath>

#include <nlohmann/json.hpp>

#include "analysis/sweep.h"
#include "cli/command.h"
#include "cli/flow.h"
#include "cli/plan_options.h"
#include "cli/sweep_axes.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "topologies/scale_links.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr std::size_t kMostPoints = 100'000;

struct SweepFlagValues {
  SweepAxes axes;
  std::string level;  // whose links `axes.bandwidth` scales
  std::string csv;    // empty: none
  std::int64_t threads = 0;
};

// "64,128,tp=1..8": numbers are ranks that share a copy, the other words the mesh beside them.
void ReadShards(const Arguments& arguments, SweepAxes& axes) {
  const Flag flag = arguments.Get("--shard");
  std::string counts;
  std::vector<std::string> words;
  for (const std::string& word : flag.is_given() ? ReadList(flag) : words) {
    if (word.find('=') != std::string::npos) {
      words.push_back(word);
    } else {
      counts += (counts.empty() ? "" : ",") + word;
    }
  }
  if (!counts.empty()) {
    axes.shard = ReadCounts({flag.name, counts}, kMaxRanks);
  }
  axes.mesh = ReadMeshes(flag.name, words, kMaxRanks);
}

SweepFlagValues ReadSweepFlags(const Arguments& arguments) {
  SweepFlagValues values;
  const auto counts = [&](const std::string& name, std::int64_t max,
                          std::vector<std::int64_t>& axis) {
    arguments.Set(name, axis, [max](const Flag& flag) { return ReadCounts(flag, max); });
  };
  counts("--nodes", kMaxRanks, values.axes.nodes);
  counts("--micro-batch", kMaxRanks, values.axes.micro_batch);
  counts("--seq", kMaxSequence, values.axes.sequence);
  ReadShards(arguments, values.axes);
  const Flag bandwidth = arguments.Get("--bandwidth");
  if (bandwidth.is_given()) {
    std::tie(values.level, values.axes.bandwidth) = ReadLevelFactors(bandwidth);
  }
  arguments.SetText("--csv", values.csv);
  arguments.SetCount("--threads", 1024, values.threads);
  if (arguments.IsJson() && values.csv == "-") {
    throw UsageError("--json and --csv - both want standard output");
  }
  double points = 1.0;
  for (const std::size_t size :
       {values.axes.nodes.size(), values.axes.micro_batch.size(), values.axes.sequence.size(),
        values.axes.shard.size(), values.axes.mesh.size(), values.axes.bandwidth.size()}) {
    points *= static_cast<double>(std::max(size, std::size_t{1}));
  }
  if (points > static_cast<double>(kMostPoints)) {
    throw UsageError("the lists have more than " + std::to_string(kMostPoints) + " combinations");
  }
  return values;
}

// The plan that `shardwright plan` makes with the values of this point.
PlanFile MakePoint(const Arguments& arguments, const std::string& level, const SweepPoint& point) {
  Arguments scalar = arguments;
  const auto set = [&](const char* name, std::int64_t value) {
    scalar.text[name] = value > 0 ? std::to_string(value) : "";
  };
  set("--nodes", point.nodes);
  set("--micro-batch", point.micro_batch);
  set("--seq", point.sequence);
  set("--shard", point.shard);
  scalar.text["--shard"] += (point.shard > 0 && !point.mesh.empty() ? "," : "") + point.mesh;
  PlanFile file = MakePlanFile(ReadPlanOptions(scalar));
  if (point.bandwidth > 0.0) {
    ScaleLinks(file.cluster, level, point.bandwidth, "--bandwidth");
  }
  return file;
}

std::string FactorText(double factor) {
  return Fixed(factor, "%g");
}

std::string FitText(const SweepResult& row) {
  if (!row.outcome) {
    return row.error;
  }
  const Outcome& outcome = *row.outcome;
  if (outcome.Fits()) {
    return row.FitsSurely() ? ""
                            : "fits by " + Format(row.room) + ", which may be off by " +
                                  Format(row.memory_error);
  }
  switch (outcome.misfits.front().kind) {
    case Misfit::Kind::kDevice:
      return "over by " + Format(outcome.Excess());
    case Misfit::Kind::kFragmentation:
      return "fragmented, over by " + Format(outcome.Excess());
    case Misfit::Kind::kHost:
      break;
  }
  return "host memory over by " + Format(outcome.Excess());
}

// The rows of a sweep have one model.
bool CountsImages(const std::vector<SweepResult>& rows) {
  return AnyOf(rows, &SweepResult::counts_images);
}

struct SweepColumns {
  bool mesh = false;
  bool bandwidth = false;
  bool sequence = true;
};

std::vector<std::string> Cells(const SweepResult& row, SweepColumns columns) {
  std::vector<std::string> cells;
  const auto add_point = [&](std::int64_t micro_batch, std::int64_t sequence, std::int64_t shard) {
    const auto text = [](std::int64_t value) { return value > 0 ? WithCommas(value) : "-"; };
    cells = {text(row.outcome ? row.nodes : row.point.nodes), text(row.ranks), text(micro_batch)};
    if (columns.sequence) {
      cells.push_back(text(sequence));
    }
    cells.push_back(text(shard));
    if (columns.mesh) {
      cells.push_back(row.point.mesh);
    }
    if (columns.bandwidth) {
      cells.push_back(FactorText(row.point.bandwidth));
    }
  };
  if (!row.outcome) {
    add_point(row.point.micro_batch, row.point.sequence, row.point.shard);
    cells.insert(cells.end(), 6, "-");
    cells.push_back(row.error);
    return cells;
  }
  const Outcome& outcome = *row.outcome;
  const auto tokens =
      static_cast<std::int64_t>(std::llround(outcome.rates.tokens_per_second_per_gpu));
  add_point(row.micro_batch, row.sequence, row.shard_size);
  cells.insert(cells.end(),
               {Format(outcome.step_time), WithCommas(tokens), Percent(outcome.rates.mfu),
                Fixed(row.GpuHoursPerBillion(), "%.1f"), Format(outcome.exposed_comm),
                Format(outcome.DeviceTotal()), FitText(row)});
  return cells;
}

std::string TableText(const std::vector<SweepResult>& rows, const std::string& level) {
  const bool images = CountsImages(rows);
  const bool meshes = AnyOf(rows, [](const SweepResult& row) { return !row.point.mesh.empty(); });
  const SweepColumns columns{meshes, !level.empty(), !images};
  std::vector<std::string> header = {"nodes", "GPUs", "micro"};
  if (columns.sequence) {
    header.emplace_back("seq");
  }
  header.emplace_back("shard");
  if (columns.mesh) {
    header.emplace_back("mesh");
  }
  if (columns.bandwidth) {
    header.push_back(level);
  }
  header.insert(header.end(), {"step time", images ? "images/s/GPU" : "tokens/s/GPU", "MFU",
                               "GPUh/1e9", "exposed", "device", "misfit"});
  std::vector<Table::Align> align(header.size(), kRight);
  align.back() = kLeft;
  Table table(align);
  table.Row(header);
  for (const SweepResult& row : rows) {
    table.Row(Cells(row, columns));
  }
  return table.Text();
}

// The row that needs the fewest GPU-hours, and the one with the most tokens per second in all; of
// those that fit surely, if there are any.
std::string BestText(const std::vector<SweepResult>& rows) {
  const SweepResult* cheapest = nullptr;
  const SweepResult* fastest = nullptr;
  const auto rate = [](const SweepResult& row) {
    return row.outcome->rates.tokens_per_second_per_gpu * static_cast<double>(row.ranks);
  };
  const bool any_surely = AnyOf(rows, &SweepResult::FitsSurely);
  for (const SweepResult& row : rows) {
    if (any_surely ? !row.FitsSurely() : !row.Fits()) {
      continue;
    }
    if (cheapest == nullptr || row.GpuHoursPerBillion() < cheapest->GpuHoursPerBillion()) {
      cheapest = &row;
    }
    if (fastest == nullptr || rate(row) > rate(*fastest)) {
      fastest = &row;
    }
  }
  if (cheapest == nullptr) {
    return "\nNothing fits.\n";
  }
  const auto describe = [](const SweepResult& row) {
    return WithCommas(row.nodes) + (row.nodes == 1 ? " node" : " nodes") + ", micro-batch " +
           WithCommas(row.micro_batch) +
           (row.counts_images ? "" : ", sequence " + WithCommas(row.sequence)) + ", shard " +
           WithCommas(row.shard_size) + (row.point.mesh.empty() ? "" : ", " + row.point.mesh) +
           (row.point.bandwidth > 0.0 ? ", bandwidth x " + FactorText(row.point.bandwidth) : "");
  };
  return "\nfewest GPU-hours: " + describe(*cheapest) +
         (CountsImages(rows) ? "\nmost images/s:    " : "\nmost tokens/s:    ") +
         describe(*fastest) + "\n";
}

Json RowJson(const SweepResult& row) {
  Json json;
  json["nodes"] = row.outcome ? row.nodes : row.point.nodes;
  json["ranks"] = row.ranks;
  json["micro_batch"] = row.outcome ? row.micro_batch : row.point.micro_batch;
  json["accumulation"] = row.accumulation;
  json["global_batch"] = row.global_batch;
  json["sequence"] = row.outcome ? row.sequence : row.point.sequence;
  json["shard_size"] = row.outcome ? row.shard_size : row.point.shard;
  json["replicate_size"] = row.replicate_size;
  json["mesh"] = row.point.mesh;
  json["bandwidth_factor"] = row.point.bandwidth > 0.0 ? row.point.bandwidth : 1.0;
  if (!row.outcome) {
    json["error"] = row.error;
    return json;
  }
  const Outcome& outcome = *row.outcome;
  json["step_time_s"] = outcome.step_time.value;
  json["tokens_per_s_per_gpu"] = outcome.rates.tokens_per_second_per_gpu;
  json["mfu"] = outcome.rates.mfu;
  json["exposed_comm_s"] = outcome.exposed_comm.value;
  json["gpu_hours_per_1e9_tokens"] = row.GpuHoursPerBillion();
  json["device_bytes"] = outcome.DeviceTotal().value;
  json["fits"] = outcome.Fits();
  json["memory_error_bytes"] = row.memory_error.value;
  json["excess_bytes"] = outcome.Excess().value;
  Json misfits = Mapped<Json>(outcome.misfits, [&](const Misfit& misfit) { return misfit.text; });
  json["misfits"] = misfits;
  return json;
}

std::string SweepJson(const std::vector<SweepResult>& rows, const std::string& level) {
  Json json = ReportHead("shardwright-sweep");
  json["counts"] = CountsImages(rows) ? "images" : "tokens";
  json["bandwidth_level"] = level.empty() ? Json() : Json(level);
  Json array = Mapped<Json>(rows, [&](const SweepResult& row) { return RowJson(row); });
  json["rows"] = array;
  return json.dump(2) + "\n";
}

// What is wrong whatever the sizes is an error of the command line, not of every point.
void CheckFixedFlags(const Arguments& arguments, const std::string& level) {
  Arguments scalar = arguments;
  for (const char* axis : {"--nodes", "--micro-batch", "--seq", "--shard"}) {
    scalar.text[axis].clear();
  }
  PlanOptions options = ReadPlanOptions(scalar);
  Cluster cluster = LoadCluster(options.cluster, 0, options.gpus);
  if (!level.empty()) {
    ScaleLinks(cluster, level, 1.0, "--bandwidth");
  }
  (void)LoadModelForJob(options.model, options.job, Path("sweep"));
}

}  // namespace

int SweepCommand(const Arguments& arguments) {
  const SweepFlagValues flags = ReadSweepFlags(arguments);
  CheckFixedFlags(arguments, flags.level);
  const std::vector<SweepPoint> points = PointsOf(flags.axes);
  SweepOptions options;
  options.threads = static_cast<int>(flags.threads);
  options.progress = [](std::size_t done, std::size_t count) {
    // Ten lines at most.
    if (count >= 20 && done * 10 / count != (done - 1) * 10 / count) {
      Say("sweep: " + std::to_string(done) + " of " + std::to_string(count) + " points");
    }
  };
  const std::vector<SweepResult> rows = RunSweep(
      points, [&](const SweepPoint& point) { return MakePoint(arguments, flags.level, point); },
      options);
  const bool all_refused = NoneOf(rows, &SweepResult::outcome);
  if (all_refused &&
      AllOf(rows, [&](const SweepResult& row) { return row.error == rows.front().error; })) {
    throw InputError(rows.front().error);
  }
  if (!flags.csv.empty()) {
    WriteFileAtomically(flags.csv, SweepCsv(rows));
  }
  if (flags.csv != "-") {
    arguments.Print(arguments.IsJson() ? SweepJson(rows, flags.level)
                                       : TableText(rows, flags.level) + BestText(rows));
  }
  const bool any_fits = AnyOf(rows, &SweepResult::Fits);
  return any_fits ? kExitOk : kExitNo;
}

}  // namespace shardwright
