#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "analysis/recording_steps.h"
#include "cli/command.h"
#include "cli/recordings.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "traces/measured_file.h"
#include "traces/memory_snapshot.h"
#include "traces/nccl_tests.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

Json SitesJson(const std::vector<MemorySite>& sites) {
  return Mapped<Json>(sites, [&](const MemorySite& site) -> Json {
    return {{"name", site.name}, {"bytes", site.bytes.value}};
  });
}

Json SnapshotJson(const MemorySnapshot& snapshot) {
  Json json;
  json["devices"] = Json::array();
  for (const DeviceSnapshot& device : snapshot.devices) {
    Json samples = Mapped<Json>(device.samples, [&](const AllocatorSample& sample) -> Json {
      return {ToSeconds(sample.time).value, sample.allocated.value, sample.reserved.value};
    });
    json["devices"].push_back({{"device", device.device},
                               {"peak_allocated_bytes", device.peak_allocated.value},
                               {"peak_reserved_bytes", device.peak_reserved.value},
                               {"peak_time_s", ToSeconds(device.peak_time).value},
                               {"allocated_bytes", device.allocated.value},
                               {"reserved_bytes", device.reserved.value},
                               {"out_of_memory", device.out_of_memory},
                               {"categories_at_peak", SitesJson(device.categories)},
                               {"sites_at_peak", SitesJson(device.sites)},
                               {"samples", std::move(samples)}});
  }
  json["notes"] = snapshot.notes;
  return json;
}

std::string SnapshotText(const MemorySnapshot& snapshot) {
  std::string text;
  for (const DeviceSnapshot& device : snapshot.devices) {
    text += "device " + std::to_string(device.device) + ": peak " + Format(device.peak_allocated) +
            " allocated, " + Format(device.peak_reserved) + " reserved; at the end " +
            Format(device.allocated) + " and " + Format(device.reserved) + "\n";
    if (device.out_of_memory > 0) {
      text += "  ran out of memory " + WithCommas(device.out_of_memory) + " times\n";
    }
    for (const auto& [title, sites] : {std::pair{"allocated at the peak", &device.categories},
                                       std::pair{"largest call sites", &device.sites}}) {
      Table table({kLeft, kRight});
      table.Row({title, "bytes"});
      for (const MemorySite& site : *sites) {
        table.Row({site.name, Format(site.bytes)});
      }
      text += sites->empty() ? "" : table.Text(2);
    }
  }
  for (const std::string& note : snapshot.notes) {
    text += "note: " + note + "\n";
  }
  return text;
}

// Of one recording.
struct Summary {
  std::vector<RecordingStep> steps;
  std::int64_t collectives = 0, kernels = 0;
  Bytes peak;
};

Summary Summarize(const ProfilerRecording& recording) {
  Summary summary;
  summary.steps = FindSteps(recording);
  for (const Activity& activity : recording.activities) {
    summary.collectives += activity.kind == ActivityKind::kCollective ? 1 : 0;
    summary.kernels += activity.kind == ActivityKind::kKernel ? 1 : 0;
  }
  for (const AllocatorSample& sample : recording.memory) {
    summary.peak = std::max(summary.peak, sample.allocated);
  }
  return summary;
}

std::string RecordingText(const ProfilerRecording& recording) {
  const Summary summary = Summarize(recording);
  std::string text = recording.source + ", rank " + std::to_string(recording.rank) +
                     (recording.ranks > 0 ? " of " + std::to_string(recording.ranks) : "") + ", " +
                     WithCommas(recording.events) + " events\n" + WithCommas(summary.kernels) +
                     (recording.on_device ? " kernels, " : " ops, ") +
                     WithCommas(summary.collectives) + " collectives, " +
                     std::to_string(recording.units.size()) + " units";
  text += summary.peak == Bytes(0) ? "\n" : ", peak " + Format(summary.peak) + "\n";
  Table table({kLeft, kRight, kRight, kRight, kRight});
  table.Row({"step", "time", "all_gather", "reduce_scatter", "compute stream busy"});
  for (const RecordingStep& step : summary.steps) {
    const double busy = Summed<double>(step.parts.run);
    const auto pieces = [&](OpClass op_class) {
      return std::to_string(step.pieces[static_cast<std::size_t>(op_class)]);
    };
    table.Row({recording.steps[step.step].name, Format(Seconds(step.parts.period)),
               pieces(OpClass::kAllGather), pieces(OpClass::kReduceScatter),
               Format(Seconds(busy))});
  }
  text += table.Text();
  for (const std::string& note : recording.notes) {
    text += "note: " + note + "\n";
  }
  return text;
}

Json RecordingJson(const ProfilerRecording& recording) {
  const Summary summary = Summarize(recording);
  Json json = {{"rank", recording.rank},
               {"ranks", recording.ranks},
               {"events", recording.events},
               {"on_device", recording.on_device},
               {"units", recording.units},
               {"kernels", summary.kernels},
               {"collectives", summary.collectives},
               {"peak_allocated_bytes", summary.peak.value},
               {"notes", recording.notes}};
  json["steps"] = Json::array();
  for (const RecordingStep& step : summary.steps) {
    Json busy = Json::object();
    for (std::size_t i = 0; i < kOpClassCount; ++i) {
      if (step.pieces[i] > 0) {
        busy[std::string(NameOf(static_cast<OpClass>(i)))] = {{"pieces", step.pieces[i]},
                                                              {"busy_s", step.busy[i]}};
      }
    }
    json["steps"].push_back({{"name", recording.steps[step.step].name},
                             {"time_s", step.parts.period},
                             {"classes", std::move(busy)}});
  }
  return json;
}

Json TestJson(const CollectiveTest& test) {
  Json json = {{"op", InfoOf(test.op).name}, {"ranks", test.ranks}};
  json["rows"] = Mapped<Json>(test.rows, [&](const CollectiveTiming& row) -> Json {
    return {{"bytes", row.size.value}, {"time_s", row.time.value}};
  });
  return json;
}

std::string TestText(const CollectiveTest& test) {
  Table table({kRight, kRight, kRight});
  table.Row({"size", "time", "algorithm bandwidth"});
  for (const CollectiveTiming& row : test.rows) {
    table.Row({Format(row.size), Format(row.time),
               Format(BytesPerSecond(static_cast<double>(row.size.value) / row.time.value))});
  }
  return std::string(InfoOf(test.op).name) +
         (test.ranks > 0 ? " of " + std::to_string(test.ranks) + " ranks" : "") + "\n" +
         table.Text();
}

}  // namespace

int InspectTraceCommand(const Arguments& arguments) {
  const std::string file = arguments.Get("FILE").text;
  const MeasuredKind kind = DetectMeasured(file);
  const bool as_json = arguments.IsJson();
  Json json;
  std::string text;
  switch (kind) {
    case MeasuredKind::kTrace:
      throw InputError(file, "a trace of Shardwright", "what another program measured",
                       "shardwright inspect PLAN --trace " + file + " checks it");
    case MeasuredKind::kKineto:
    case MeasuredKind::kNsight: {
      const ProfilerRecording recording = ReadRecording(file);
      (as_json ? void(json = RecordingJson(recording)) : void(text = RecordingText(recording)));
      break;
    }
    case MeasuredKind::kSnapshot: {
      const MemorySnapshot snapshot = ReadMemorySnapshot(file);
      (as_json ? void(json = SnapshotJson(snapshot)) : void(text = SnapshotText(snapshot)));
      break;
    }
    case MeasuredKind::kNcclText:
    case MeasuredKind::kNcclJson: {
      std::optional<std::string> op;
      arguments.Set("--op", op, [](const Flag& flag) { return flag.text; });
      const CollectiveTest test = ReadCollectiveTest(file, op);
      (as_json ? void(json = TestJson(test)) : void(text = TestText(test)));
      break;
    }
  }
  if (as_json) {
    Json whole = {
        {"schema", "shardwright-measurement"}, {"schema_version", 1}, {"kind", NameOf(kind)}};
    whole.update(json);
    text = whole.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  arguments.Print(text);
  return kExitOk;
}

}  // namespace shardwright
