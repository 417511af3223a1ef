#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "analysis/confidence.h"
#include "analysis/host_start.h"
#include "cli/command.h"
#include "cli/flow.h"
#include "cli/prediction.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr std::size_t kLargestBuffers = 5;
constexpr std::size_t kLargestShares = 5;  // in the report for people
constexpr std::size_t kLargestInJson = 20;

std::string ShareOf(Seconds part, Seconds whole) {
  return whole.value > 0.0 ? " (" + Percent(part.value / whole.value) + " of the step)" : "";
}

Table TimeTable(const PlanFile& file, const SimulationResult& result, const Prediction& p) {
  Table table({kLeft, kLeft});
  table.Row(
      {"step time", Format(p.step_time) +
                        (result.timing.is_steady ? "" : ", mean of steps that did not settle")});
  table.Row({"first step", Format(p.first_step_time)});
  table.Row({p.counts_images ? "images/s per GPU" : "tokens/s per GPU",
             WithCommas(static_cast<std::int64_t>(std::llround(p.tokens_per_second_per_gpu)))});
  table.Row(
      {"MFU", Percent(p.mfu) + " of " + Format(p.peak) + (p.has_dtype ? " dense" : " dense fp32")});
  table.Row(
      {"exposed communication", Format(p.exposed_comm) + ShareOf(p.exposed_comm, p.step_time)});
  table.Row({"known", ConfidenceText(file)});
  if (p.device.communicating > SimTime(0)) {
    table.Row({"communication overlapped", Percent(p.device.Overlap())});
  }
  const StepTiming& steady = result.timing.steady;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    const Seconds busy = ToSeconds(steady.busy[s]);
    if (busy.value > 0.0) {
      table.Row({"busy " + std::string(NameOf(static_cast<Stream>(s))),
                 Format(busy) + ShareOf(busy, p.step_time)});
    }
  }
  table.Row({"host issuing ops", Format(ToSeconds(steady.host_issue))});
  return table;
}

Table MemoryTable(const Prediction& p) {
  Table table({kLeft, kRight});
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    if (p.device_peak.by_category[c] > Bytes(0)) {
      table.Row(
          {std::string(NameOf(static_cast<Category>(c))), Format(p.device_peak.by_category[c])});
    }
  }
  table.Row({"allocated", Format(p.device_peak.total)});
  table.Row({p.has_allocator ? "reserved" : "PyTorch would reserve", Format(p.reserved)});
  table.Row({"placed in one arena", Format(p.placed)});
  table.Row({"outside the allocator", Format(p.outside)});
  table.Row({p.has_allocator ? "reserved + outside" : "arena + outside", Format(p.Needed())});
  table.Row({"usable on the device", Format(p.usable)});
  if (p.host_peak >= kGiB) {  // less is the page-locked inputs that every job has
    table.Row({"host, all GPUs of a node", Format(p.host_peak)});
  }
  return table;
}

// "8.86 s (+1.2 %)".
std::string Against(SimTime time, SimTime nominal) {
  return Format(ToSeconds(time)) + " (" + SignedPercent(Ratio(time, nominal) - 1.0) + ")";
}

std::string DistributionText(const StepDistribution& steps) {
  Table table({kLeft, kLeft});
  table.Row({"all ranks alike", Format(ToSeconds(steps.nominal))});
  table.Row({"mean", Against(steps.mean, steps.nominal)});
  table.Row({"p50", Against(steps.Percentile(0.5), steps.nominal)});
  table.Row({"p90", Against(steps.Percentile(0.9), steps.nominal)});
  table.Row({"p99", Against(steps.Percentile(0.99), steps.nominal)});
  table.Row({"standard deviation", Format(ToSeconds(steps.deviation))});
  table.Row({"waiting for peers",
             Format(ToSeconds(steps.waiting)) + " per rank and step, over all streams"});
  return "\nStep times of " + WithCommas(static_cast<std::int64_t>(steps.sorted.size())) +
         " samples, " + WithCommas(steps.followed) + " ranks followed\n" + table.Text(2);
}

Json DistributionJson(const StepDistribution& steps) {
  Json json;
  json["samples"] = steps.sorted.size();
  json["followed_ranks"] = steps.followed;
  json["nominal_s"] = ToSeconds(steps.nominal).value;
  json["mean_s"] = ToSeconds(steps.mean).value;
  json["deviation_s"] = ToSeconds(steps.deviation).value;
  json["p50_s"] = ToSeconds(steps.Percentile(0.5)).value;
  json["p90_s"] = ToSeconds(steps.Percentile(0.9)).value;
  json["p99_s"] = ToSeconds(steps.Percentile(0.99)).value;
  json["min_s"] = ToSeconds(steps.sorted.front()).value;
  json["max_s"] = ToSeconds(steps.sorted.back()).value;
  json["waiting_s"] = ToSeconds(steps.waiting).value;
  return json;
}

std::string PeakPlace(const Program& program, const Prediction& p) {
  const MemoryPeak& peak = p.device_peak;
  const Body& body = BodyOf(program, peak.body);
  const std::string step = p.peak_is_first ? "first step" : "steady step";
  if (!peak.before_op.valid()) {
    return step + ", at its end";
  }
  return step + ", before " + OpName(program, body.ops[peak.before_op.value]);
}

std::vector<PeakBuffer> LargestAtPeak(const Program& program, const Prediction& p) {
  std::vector<PeakBuffer> buffers = ExplainPeak(program, p.device_peak, p.peak_is_first);
  buffers.resize(std::min(buffers.size(), kLargestBuffers));
  return buffers;
}

std::string UnitOf(const Program& program, const TimeShare& share) {
  return share.unit == kNoSubject ? "" : program.units[share.unit].name;
}

// "all_gather of model.layers.3 in forward, 2 times".
std::string ShareText(const Program& program, const TimeShare& share) {
  std::string text(InfoOf(share.code).name);
  const std::string unit = UnitOf(program, share);
  text += unit.empty() ? "" : " of " + unit;
  text += " in " + std::string(NameOf(share.phase));
  if (share.use != TimeUse::kRun) {
    text += ", " + std::string(NameOf(share.use));
  }
  return text;
}

std::string SharesText(const Program& program, const char* title,
                       const std::vector<TimeShare>& shares, SimTime step) {
  std::string text = std::string("\n") + title + "\n";
  Table table({kRight, kRight, kLeft});
  for (std::size_t i = 0; i < std::min(shares.size(), kLargestShares); ++i) {
    table.Row({Format(ToSeconds(shares[i].time)), Percent(Ratio(shares[i].time, step)),
               ShareText(program, shares[i])});
  }
  return shares.empty() ? "" : text + table.Text(2);
}

Json SharesJson(const Program& program, const std::vector<TimeShare>& shares) {
  Json json = Json::array();
  for (std::size_t i = 0; i < std::min(shares.size(), kLargestInJson); ++i) {
    const TimeShare& share = shares[i];
    json.push_back({{"time_s", ToSeconds(share.time).value},
                    {"op", InfoOf(share.code).name},
                    {"phase", NameOf(share.phase)},
                    {"stream", NameOf(share.stream)},
                    {"unit", UnitOf(program, share)},
                    {"use", NameOf(share.use)},
                    {"count", share.count}});
  }
  return json;
}

// From the peak down to the MFU: what is below a thousandth of the step is left out.
std::string WaterfallText(const Prediction& p) {
  constexpr double kLeast = 1e-3;
  const MfuWaterfall& waterfall = p.waterfall;
  Table table({kRight, kRight, kLeft});
  const auto add = [&](SimTime time, const std::string& what) {
    table.Row({Format(ToSeconds(time)), Percent(Ratio(time, waterfall.step_time)), what});
  };
  add(waterfall.at_peak, "the model's FLOPs at " + Format(p.peak) + ": the MFU");
  for (std::size_t i = 0; i < kMfuLossCount; ++i) {
    if (std::abs(Ratio(waterfall.lost[i], waterfall.step_time)) >= kLeast) {
      add(waterfall.lost[i], std::string(NameOf(static_cast<MfuLoss>(i))));
    }
  }
  return "\nWhere the step's time goes, from the peak on\n" + table.Text(2);
}

Json WaterfallJson(const MfuWaterfall& waterfall) {
  Json json = Json::array();
  json.push_back({{"what", "at peak"}, {"time_s", ToSeconds(waterfall.at_peak).value}});
  for (std::size_t i = 0; i < kMfuLossCount; ++i) {
    json.push_back({{"what", NameOf(static_cast<MfuLoss>(i))},
                    {"time_s", ToSeconds(waterfall.lost[i]).value}});
  }
  return json;
}

Json MemoryJson(const PlanFile& file, const Program& program, const SimulationResult& result,
                const Prediction& p) {
  const AllocatedMemory& allocated = result.memory.allocated;
  const ReservedMemory& reserved = *result.memory.reserved;
  Json json;
  json["peak_allocated_bytes"] = p.device_peak.total.value;
  json["peak_reserved_bytes"] = p.reserved.value;
  json["placed_arena_bytes"] = p.placed.value;
  json["outside_allocator_bytes"] = p.outside.value;
  json["usable_device_bytes"] = p.usable.value;
  json["error_bytes"] = p.memory_error.value;
  json["at_peak"] = BytesByCategory(p.device_peak);
  json["peak_place"] = PeakPlace(program, p);
  json["largest_at_peak"] =
      Mapped<Json>(LargestAtPeak(program, p), [&](const PeakBuffer& buffer) -> Json {
        return {{"bytes", buffer.size.value},
                {"category", NameOf(buffer.category)},
                {"allocated_by", buffer.allocated_by}};
      });
  const auto of = [&](const MemoryPeak& device, const MemoryPeak& host, Bytes held) {
    return Json{{"peak_allocated_bytes", device.total.value},
                {"peak_reserved_bytes", held.value},
                {"host_peak_bytes_per_node", host.total.value * file.cluster.gpus_per_node}};
  };
  json["initialisation"] = of(allocated.device_init, allocated.host_init, reserved.peak_init);
  json["first_step"] = of(allocated.device_first, allocated.host_first, reserved.peak_first);
  json["first_step"]["allocator_retries"] = reserved.retries_first;
  json["steady_step"] = of(allocated.device_steady, allocated.host_steady, reserved.peak_steady);
  json["steady_step"]["allocator_retries"] = reserved.retries_steady;
  json["host_peak_bytes_per_node"] = p.host_peak.value;
  json["to_load_and_save"] = Mapped<Json>(HostMoves(file), [&](const HostMove& move) -> Json {
    return {{"what", move.what},
            {"host_peak_bytes_per_node", move.peak.value},
            {"time_s", move.time.value}};
  });
  return json;
}

// With the names that Holistic Trace Analysis has for these.
Json KernelsJson(const DeviceTime& device) {
  return {{"kernel_time_s", ToSeconds(device.total).value},
          {"compute_time_s", ToSeconds(device.computing).value},
          {"non_compute_time_s", ToSeconds(device.uncovered).value},
          {"idle_time_s", ToSeconds(device.idle).value},
          {"communication_time_s", ToSeconds(device.communicating).value},
          {"comp_comm_overlap", device.Overlap()}};
}

Json TimeJson(const Program& program, const SimulationResult& result, const Prediction& p) {
  const StepTiming& steady = result.timing.steady;
  Json busy;
  Json idle;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    const std::string stream(NameOf(static_cast<Stream>(s)));
    busy[stream] = ToSeconds(steady.busy[s]).value;
    idle[stream] = ToSeconds(steady.compute_idle[s]).value;
  }
  return {{"busy_s", busy},
          {"compute_waits_for_s", idle},
          {"collectives_on_compute_s", ToSeconds(steady.collectives_on_compute).value},
          {"host_blocked_s", ToSeconds(steady.host_blocked).value},
          {"host_issue_s", ToSeconds(steady.host_issue).value},
          {"kernels", KernelsJson(p.device)},
          {"compute_waits_for", SharesJson(program, p.attribution.idle)},
          {"critical_path", SharesJson(program, p.attribution.critical)}};
}

// The choices behind the numbers that a user may not have made.
std::string TakenText(const PlanFile& file) {
  const Plan& plan = file.plan;
  std::string text = "kernel set " + PrintableLine(file.kernels.name);
  if (file.kernels.fp8 != Fp8Products::kNone) {
    text += file.kernels.fp8 == Fp8Products::kPerRow ? ", products in fp8 scaled by row"
            : GathersFp8(file.kernels.fp8)           ? ", products and gathers in fp8"
                                                     : ", products in fp8";
  }
  if (file.model.sequence_length > 0) {
    text += ", sequence " + WithCommas(file.job.sequence_length);
  }
  return text + ", batch " + WithCommas(file.job.global_batch) + " = " +
         WithCommas(MeshOf(plan).DataCount()) +
         (MeshOf(plan).DataCount() < MeshOf(plan).RankCount() ? " groups" : " ranks") +
         " x micro-batch " + WithCommas(plan.micro_batch) + " x accumulation " +
         WithCommas(plan.accumulation) +
         (file.cluster.SharedCores() > 0
              ? ", " + CoresText(file.cluster.SharedCores()) + " for " +
                    WithCommas(file.cluster.RanksOnCores()) +
                    (file.cluster.RanksOnCores() == 1 ? " rank" : " ranks")
              : std::string()) +
         "\n";
}

std::string HostMovesText(const PlanFile& file) {
  Table table({kLeft, kRight, kRight});
  for (const HostMove& move : HostMoves(file)) {
    table.Row({move.what, Format(move.peak), Format(move.time)});
  }
  return file.job.mode == JobMode::kTrain
             ? "\nHost memory and time to load and save, of one node whose storage passes " +
                   Format(kUsualStorage) + "\n" + table.Text(2)
             : "";
}

// The memory that the plan leaves free is there for that error: it counts once.
std::string FitsText(const PlanFile& file, const Prediction& p) {
  const Bytes left_free = file.cluster.gpu.usable_memory.value - p.usable;
  const Bytes spare = p.usable - p.Needed();
  const std::string error = Format(p.memory_error);
  if (spare + left_free < p.memory_error) {
    return "close, may not fit: " + Format(spare + left_free) + " to spare, less than the " +
           error + " that this may be off by: it may run out of memory\n";
  }
  return "fits: " + Format(spare) + " to spare" +
         (left_free > Bytes(0) ? " below the limit of " + Format(p.usable) : "") +
         ", and this may be off by " + error + "\n";
}

// "; the largest part is activation, 149 GiB".
std::string LargestPart(const MemoryPeak& peak) {
  const auto most = std::max_element(peak.by_category.begin(), peak.by_category.end());
  const auto category = static_cast<Category>(most - peak.by_category.begin());
  return "; the largest part is " + std::string(NameOf(category)) + ", " + Format(*most);
}

}  // namespace

Json BytesByCategory(const MemoryPeak& peak) {
  Json json = Json::object();
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    json[std::string(NameOf(static_cast<Category>(c)))] = peak.by_category[c].value;
  }
  return json;
}

std::string PredictionText(const PlanFile& file, const Program& program,
                           const SimulationResult& result, const Prediction& prediction) {
  std::string text = TitleOf(file) + "\n\nTime of one step\n";
  text += TimeTable(file, result, prediction).Text(2);
  text += prediction.distribution ? DistributionText(*prediction.distribution) : "";
  text += WaterfallText(prediction);
  text += SharesText(program, "What the compute stream waits for", prediction.attribution.idle,
                     result.step_time);
  text += SharesText(program, "What bounds the step", prediction.attribution.critical,
                     result.step_time);
  text += "\nPeak memory of one GPU (" + PrintableLine(PeakPlace(program, prediction)) + ")\n";
  text += MemoryTable(prediction).Text(2);
  text += "\nLargest buffers at the peak\n";
  Table largest({kRight, kLeft, kLeft});
  for (const PeakBuffer& buffer : LargestAtPeak(program, prediction)) {
    largest.Row(
        {Format(buffer.size), std::string(NameOf(buffer.category)), "from " + buffer.allocated_by});
  }
  text += largest.Text(2);
  text += HostMovesText(file);
  if (prediction.misfits.empty() && prediction.retries_per_step > 0) {
    text += "\nThe allocator runs out and retries " + WithCommas(prediction.retries_per_step) +
            (prediction.retries_per_step == 1 ? " time" : " times") + " per step.\n";
  }
  if (result.unsettled) {
    text += "No step finds the allocator's cache as the one before it: steps take " +
            Format(ToSeconds(result.unsettled->least)) + " to " +
            Format(ToSeconds(result.unsettled->most)) + ", the median is shown.\n";
  }
  if (prediction.misfits.empty()) {
    text += "\n" + FitsText(file, prediction);
  }
  // What does not fit, and what takes the memory, is said before how fast it would be.
  const bool host_misfits =
      prediction.host_limit > Bytes(0) && prediction.host_peak > prediction.host_limit;
  const bool device_misfits = prediction.misfits.size() > (host_misfits ? 1 : 0);  // it is first
  std::string head;
  for (const std::string& misfit : prediction.misfits) {
    const bool is_of_device = device_misfits && head.empty();
    head += misfit + (is_of_device ? LargestPart(prediction.device_peak) : "") + "\n";
  }
  text.insert(text.find('\n') + 1, head + TakenText(file));
  return text;
}

std::string PredictionJson(const PlanFile& file, const Program& program,
                           const SimulationResult& result, const Prediction& prediction) {
  Json json = ReportHead("shardwright-simulation");
  json["model"] = file.model.name;
  json["cluster"] = file.cluster.name;
  json["nodes"] = file.cluster.node_count;
  json["ranks"] = file.cluster.RankCount();
  if (file.cluster.SharedCores() > 0) {
    json["cores"] = file.cluster.SharedCores();
  }
  json["dialect"] = NameOf(file.plan.dialect);
  json["kernel_set"] = file.kernels.name;
  json["sequence_length"] = file.job.sequence_length;
  json["micro_batch"] = file.plan.micro_batch;
  json["accumulation"] = file.plan.accumulation;
  json["global_batch"] = file.job.global_batch;
  json["profile"] = file.profile.name;
  json["confidence"] = ConfidenceText(file);
  json["step_time_s"] = prediction.step_time.value;
  if (result.unsettled) {
    json["step_time_range_s"] = {ToSeconds(result.unsettled->least).value,
                                 ToSeconds(result.unsettled->most).value};
  }
  json["first_step_time_s"] = prediction.first_step_time.value;
  json["is_steady"] = result.timing.is_steady;
  json["tokens_per_s_per_gpu"] = prediction.tokens_per_second_per_gpu;
  json["mfu"] = prediction.mfu;
  json["mfu_peak_flops_per_s"] = prediction.peak.value;
  json["exposed_comm_s"] = prediction.exposed_comm.value;
  json["mfu_waterfall"] = WaterfallJson(prediction.waterfall);
  json["time"] = TimeJson(program, result, prediction);
  if (prediction.distribution) {
    json["step_distribution"] = DistributionJson(*prediction.distribution);
  }
  json["memory"] = MemoryJson(file, program, result, prediction);
  json["fits"] = prediction.misfits.empty();
  json["misfits"] = prediction.misfits;
  return json.dump(2) + "\n";
}

}  // namespace shardwright
