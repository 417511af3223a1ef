// The data of the page. Times are whole nanoseconds from the recording's time 0.

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "analysis/report/recording.h"
#include "analysis/report/report.h"
#include "analysis/report/unit_picture.h"
#include "core/ordered_json.h"
#include "core/ranges.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// Nearest nanosecond, halves up, as in traces.
std::int64_t Nanoseconds(SimTime time) {
  const std::int64_t shifted = time.value + 500;
  return shifted >= 0 ? shifted / 1000 : -((999 - shifted) / 1000);
}

// Texts that repeat, by number.
class Dictionary {
 public:
  std::size_t IndexOf(const std::string& text) {
    const auto [it, is_new] = index_.try_emplace(text, texts_.size());
    if (is_new) {
      texts_.push_back(text);
    }
    return it->second;
  }
  [[nodiscard]] const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::map<std::string, std::size_t> index_;
  std::vector<std::string> texts_;
};

// What bars are called and where they belong, a column each. Names are in three pieces: "mb<N>."
// (-1: none), subject and rest.
class BarColumns {
 public:
  void Add(Stream lane, int micro_batch, const std::string& subject, const std::string& rest,
           OpColour colour) {
    lanes_.push_back(static_cast<int>(lane));
    micro_batches_.push_back(micro_batch);
    subject_.push_back(subjects_.IndexOf(subject));
    rest_.push_back(rests_.IndexOf(rest));
    colours_.push_back(static_cast<int>(colour));
  }
  // The columns move out of this.
  [[nodiscard]] Json ToJson() && {
    return {{"subjects", subjects_.texts()},  {"rests", rests_.texts()},
            {"lane", std::move(lanes_)},      {"micro_batch", std::move(micro_batches_)},
            {"subject", std::move(subject_)}, {"rest", std::move(rest_)},
            {"colour", std::move(colours_)}};
  }

 private:
  Dictionary subjects_, rests_;
  Json lanes_ = Json::array(), micro_batches_ = Json::array(), subject_ = Json::array(),
       rest_ = Json::array(), colours_ = Json::array();
};

Json OpsJson(const Program& program) {
  BarColumns columns;
  for (const Op& op : program.step.ops) {
    const OpShape& shape = program.ShapeOf(op);
    std::string name = OpName(program, op);
    const std::string prefix = "mb" + std::to_string(op.micro_batch) + ".";
    const bool has_prefix = op.phase != Phase::kInit && op.phase != Phase::kOptimizer;
    if (has_prefix) {
      name = name.substr(prefix.size());
    }
    std::string of;
    if (op.subject != kNoSubject) {
      const bool of_model = shape.code == OpCode::kCompute || shape.code == OpCode::kAccumulateGrad;
      of = of_model ? program.model_op_names[op.subject] : program.units[op.subject].name;
      name = name.substr(of.size() + 1);
    }
    columns.Add(shape.stream, has_prefix ? static_cast<int>(op.micro_batch) : -1, of, name,
                ColourOf(program, op));
  }
  return std::move(columns).ToJson();
}

Json BarsJson(const Recording& recording) {
  BarColumns columns;
  for (std::size_t i = 0; i < recording.bars.size(); ++i) {
    const Recording::Bar& bar = recording.bars[i];
    columns.Add(recording.spans[i].stream, static_cast<int>(bar.micro_batch), bar.unit, bar.name,
                bar.colour);
  }
  return std::move(columns).ToJson();
}

std::string_view NameOfWait(WaitKind kind) {
  // In the order of WaitKind.
  constexpr std::array<std::string_view, 5> kNames = {"host issue", "stream", "communicator",
                                                      "peers", "other"};
  return NameIn(kNames, kind);
}

int IndexOf(OpId op) {
  return op.valid() ? static_cast<int>(op.value) : -1;
}

Json MemoryJson(const std::vector<MemorySample>& samples) {
  Json time = Json::array(), reserved = Json::array(), categories = Json::object();
  bool has_reserved = false;
  for (const MemorySample& sample : samples) {
    time.push_back(Nanoseconds(sample.time));
    reserved.push_back(sample.reserved.value);
    has_reserved = has_reserved || sample.reserved > Bytes(0);
  }
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    Json bytes = Json::array();
    bool is_used = false;
    for (const MemorySample& sample : samples) {
      bytes.push_back(sample.device[c].value);
      is_used = is_used || sample.device[c] > Bytes(0);
    }
    if (is_used) {
      categories[std::string(NameOf(static_cast<Category>(c)))] = std::move(bytes);
    }
  }
  Json json = {{"time", std::move(time)}, {"categories", std::move(categories)}};
  if (has_reserved) {
    json["reserved"] = std::move(reserved);
  }
  return json;
}

Json RecordingJson(const char* name, const Recording& recording) {
  Json start = Json::array(), length = Json::array(), issue = Json::array(),
       issue_length = Json::array(), awaited = Json::array();
  for (const Span& span : recording.spans) {
    start.push_back(Nanoseconds(span.start));
    length.push_back(Nanoseconds(span.end) - Nanoseconds(span.start));
    issue.push_back(Nanoseconds(span.issue_begin));
    issue_length.push_back(Nanoseconds(span.issue_end) - Nanoseconds(span.issue_begin));
  }
  for (const OpId op : recording.awaited) {
    awaited.push_back(IndexOf(op));
  }
  Json waits = Json::array();
  for (const ComputeWait& wait : recording.waits) {
    const bool on_stream = wait.kind == WaitKind::kEdge;
    waits.push_back({Nanoseconds(wait.begin), Nanoseconds(wait.end),
                     on_stream ? NameOf(wait.stream) : NameOfWait(wait.kind),
                     IndexOf(on_stream ? wait.cause : wait.op)});
  }
  Json critical = Mapped<Json>(recording.critical, [&](const PathSegment& segment) -> Json {
    return {Nanoseconds(segment.begin), Nanoseconds(segment.end), NameOf(segment.use),
            IndexOf(segment.op)};
  });
  Json json = {{"name", name},
               {"rank", recording.rank.value},
               {"step", recording.step},
               {"period", Nanoseconds(recording.period)},
               {"start", std::move(start)},
               {"length", std::move(length)},
               {"issue", std::move(issue)},
               {"issue_length", std::move(issue_length)},
               {"awaited", std::move(awaited)},
               {"waits", std::move(waits)},
               {"critical", std::move(critical)},
               {"memory", MemoryJson(recording.memory)}};
  if (recording.is_foreign()) {
    json["bars"] = BarsJson(recording);
  }
  return json;
}

Json FiguresJson(const ReportInput& input) {
  const Prediction& p = input.prediction;
  return {{"step_time_s", p.step_time.value},
          {"first_step_time_s", p.first_step_time.value},
          {"tokens_per_s_per_gpu", p.tokens_per_second_per_gpu},
          {"mfu", p.mfu},
          {"exposed_comm_s", p.exposed_comm.value},
          {"peak_allocated_bytes", p.device_peak.total.value},
          {"peak_reserved_bytes", p.reserved.value},
          {"outside_allocator_bytes", p.outside.value},
          {"usable_device_bytes", p.usable.value},
          {"fits", p.misfits.empty()},
          {"misfits", p.misfits}};
}

Json UnitsJson(const UnitPicture& picture) {
  Json units = Json::array(), runs = Json::array(), arrows = Json::array();
  for (const UnitRow& row : picture.units) {
    units.push_back({{"name", row.name},
                     {"parameters", row.parameters},
                     {"gathered_bytes", row.gathered.value},
                     {"reshard", row.reshard},
                     {"recompute", row.recompute}});
  }
  for (const UnitRun& run : picture.runs) {
    runs.push_back(run.unit);
  }
  for (const PrefetchArrow& arrow : picture.arrows) {
    arrows.push_back(
        {{"during", arrow.during}, {"gathered", arrow.gathered}, {"phase", NameOf(arrow.phase)}});
  }
  return {{"units", units}, {"forward_order", runs}, {"prefetch", arrows}};
}

Json PlansJson(const std::vector<ConsideredPlan>& plans) {
  return Mapped<Json>(plans, [&](const ConsideredPlan& plan) -> Json {
    return {{"label", plan.label},
            {"step_time_s", plan.step_time.value},
            {"memory_bytes", plan.memory.value},
            {"chosen", plan.is_chosen}};
  });
}

Json RejectedJson(const std::vector<RejectedPlans>& plans) {
  return Mapped<Json>(plans, [&](const RejectedPlans& row) -> Json {
    return {{"family", row.family},
            {"reason", row.reason},
            {"count", row.count},
            {"best_time_s", row.best_time.value},
            {"least_deficit_bytes", row.least_deficit.value}};
  });
}

Json NamesOf(std::size_t count, const std::function<std::string_view(std::size_t)>& name) {
  Json names = Json::array();
  for (std::size_t i = 0; i < count; ++i) {
    names.push_back(name(i));
  }
  return names;
}

}  // namespace

std::string ReportJson(const ReportInput& input) {
  Json json;
  json["format"] = "shardwright-report";
  json["version"] = 1;
  json["title"] = input.title;
  json["verdict"] = VerdictOf(input);
  json["figures"] = FiguresJson(input);
  json["lanes"] =
      NamesOf(kStreamCount, [](std::size_t i) { return NameOf(static_cast<Stream>(i)); });
  json["colours"] =
      NamesOf(kOpColourCount, [](std::size_t i) { return NameOf(static_cast<OpColour>(i)); });
  json["category_names"] =
      NamesOf(kCategoryCount, [](std::size_t i) { return NameOf(static_cast<Category>(i)); });
  json["ops"] = OpsJson(input.program);
  json["recordings"] = Json::array();
  json["recordings"].push_back(RecordingJson(
      "simulated", SimulatedRecording(input.program, input.simulation.trace,
                                      input.simulation.step_time, input.prediction.attribution)));
  if (input.measured != nullptr) {
    const std::optional<Recording> measured = MeasuredRecording(input.program, *input.measured);
    if (measured) {
      json["recordings"].push_back(RecordingJson("measured", *measured));
    }
  } else if (input.recorded != nullptr) {
    json["recordings"].push_back(RecordingJson("measured", ForeignRecording(*input.recorded)));
  }
  json["plan_picture"] = UnitsJson(DrawUnits(input.file, input.program));
  if (input.comparison != nullptr) {
    json["comparison"] = ParseOrdered(input.comparison_json, "comparison");
    json["comparison"]["simulated_step_s"] = input.comparison->simulated_step.value;
    json["comparison"]["measured_step_s"] = input.comparison->measured_step.value;
    json["comparison"]["gap"] = input.comparison->gap();
  }
  if (input.choices != nullptr) {
    json["pareto"] = PlansJson(input.choices->pareto);
    json["what_if"] = PlansJson(input.choices->what_if);
    json["rejected"] = RejectedJson(input.choices->rejected);
  }
  if (!input.page.empty()) {
    json["page"] = input.page;
  }
  json["inputs"] = {{"model_hash", HashText(input.file.model.hash)},
                    {"gpu", input.file.cluster.gpu.name},
                    {"plan_hash", HashText(Fnv1a64(input.plan_json))}};
  json["prediction"] = ParseOrdered(input.prediction_json, "plan");
  json["plan"] = ParseOrdered(input.plan_json, "plan");
  // Names may hold any bytes of a user's file.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace shardwright
