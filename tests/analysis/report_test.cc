// The data behind the page, with times worked out by hand from TinyTrace, and that no name gets out
// of its place.

#include "analysis/report/report.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "analysis/report/html_text.h"
#include "analysis/report/recording.h"
#include "analysis/report/unit_picture.h"
#include "schedule/lower.h"
#include "simulator/simulate.h"
#include "tests/traces/tiny_program.h"

namespace shardwright {
namespace {

using Json = nlohmann::json;
using testing::TinyProgram;
using testing::TinyTrace;

constexpr const char* kHostile =
    "</script><script>alert(1)</script>&\"'<img src=x onerror=alert(2)>";

std::size_t CountOf(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

PlanFile Gpt2Plan(const std::string& units) {
  const std::string text = R"({"format": "shardwright-plan", "version": 1,
    "model": {"name": "gpt2"}, "kernel_set": {"name": "torch-eager"},
    "cluster": {"name": "dgx-a100", "nodes": 1, "gpus_per_node": 4},
    "profile": {"name": "a100-torch-eager"},
    "job": {"mode": "train", "sequence_length": 128, "global_batch": 4},
    "plan": {"dialect": "fsdp2", "shard_size": 4, "replicate_size": 1, "micro_batch": 1,
             "accumulation": 1, "units": [)" +
                           units + R"({"name": "root", "modules": [""], "reshard": "never"}]}})";
  return ParsePlanFile(text, "p.json");
}

// A plan with its simulation.
struct Simulated {
  explicit Simulated(PlanFile plan) : file(std::move(plan)), program(Lower({file, file.plan})) {
    SimulateOptions options;
    options.trace = true;
    result = Simulate(program, file.cluster, file.profile, options);
    prediction = Predict(file, program, result);
    plan_json = PlanFileJson(file);
  }
  [[nodiscard]] ReportInput Input() const {
    return {.title = title,
            .file = file,
            .plan_json = plan_json,
            .prediction_json = prediction_json,
            .program = program,
            .simulation = result,
            .prediction = prediction};
  }

  std::string title = "a title";
  PlanFile file;
  Program program;
  SimulationResult result;
  Prediction prediction;
  std::string plan_json;
  std::string prediction_json = "{}";  // the command line's own
};

constexpr const char* kTwoUnits =
    R"({"name": "a", "modules": ["transformer.h.0"], "reshard": "always", "forward_prefetch": ["b"]},
       {"name": "b", "modules": ["transformer.h.1"], "reshard": "always"},)";

TEST_CASE("Text is escaped for where it stands") {
  CHECK(EscapeHtml("a<b>&\"'\n") == "a&lt;b&gt;&amp;&quot;&#39;\n");
  CHECK(EscapeHtml(std::string("a\0b\x07", 4)) ==
        "a\xEF\xBF\xBD"
        "b\xEF\xBF\xBD");
  const Json value = {{"k</script>", "<!-- \xE2\x80\xA8 & \xE2\x80\xA9 \xE2\x82\xAC -->"}};
  const std::string escaped = EscapeJson(value.dump());
  CHECK(escaped.find_first_of("<>&") == std::string::npos);
  CHECK(escaped.find("\xE2\x80\xA8") == std::string::npos);
  CHECK(Json::parse(escaped) == value);
}

// Step 1 begins at 30 us; the compute stream was last busy at 27 us and then at 47 us.
TEST_CASE("A measured step is cut out and begins where the step before ended") {
  const Program program = TinyProgram("layers.0", "layers.0.linear");
  const std::optional<Recording> step = MeasuredRecording(program, TinyTrace());
  REQUIRE(step.has_value());
  constexpr std::int64_t kMicrosecond = 1'000'000;
  CHECK(step->step == 1);
  CHECK(step->period == SimTime(20 * kMicrosecond));
  REQUIRE(step->spans.size() == program.step.size());
  CHECK(step->spans[1].start == SimTime(8 * kMicrosecond));
  CHECK(step->spans[4].end == SimTime(20 * kMicrosecond));
  REQUIRE(step->waits.size() == 3);
  const auto check = [&](std::size_t i, WaitKind kind, std::int64_t begin, std::int64_t end) {
    CHECK(step->waits[i].kind == kind);
    CHECK(step->waits[i].begin == SimTime(begin * kMicrosecond));
    CHECK(step->waits[i].end == SimTime(end * kMicrosecond));
  };
  check(0, WaitKind::kHostIssue, 0, 5);
  check(1, WaitKind::kEdge, 5, 8);
  check(2, WaitKind::kEdge, 15, 18);
  CHECK(step->waits[1].cause == OpId(0));
  CHECK(step->waits[1].stream == Stream::kGather);
  CHECK(step->waits[2].cause == OpId(3));
  CHECK(step->awaited[1] == OpId(0));
  CHECK(!step->awaited[0].valid());  // its edge leads to the step before
  CHECK(!MeasuredRecording(program, Trace()).has_value());
}

TEST_CASE("Thinning out keeps the largest sample of each stretch") {
  std::vector<MemorySample> samples(1000);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].time = SimTime(static_cast<std::int64_t>(i));
    samples[i].device[0] = Bytes(i == 337 ? 5000 : static_cast<std::int64_t>(i % 7));
  }
  const std::vector<MemorySample> kept = ThinOut(samples, 10);
  CHECK(kept.size() <= 10);
  CHECK(std::count_if(kept.begin(), kept.end(), [](const MemorySample& sample) {
          return sample.device[0] == Bytes(5000) && sample.time == SimTime(337);
        }) == 1);
  CHECK(std::is_sorted(kept.begin(), kept.end(),
                       [](const auto& a, const auto& b) { return a.time < b.time; }));
  CHECK(ThinOut({}, 10).empty());
}

TEST_CASE("The picture shows units in forward order and what is gathered ahead") {
  const Simulated plan(Gpt2Plan(kTwoUnits));
  const UnitPicture picture = DrawUnits(plan.file, plan.program);
  REQUIRE(picture.units.size() == 3);
  CHECK(picture.units[0].reshard == "always");
  CHECK(picture.units[2].reshard == "never");
  // Published: a GPT-2 block of width 768 has 12 * 768^2 + 13 * 768 parameters.
  CHECK(picture.units[0].parameters == 7'087'872);
  CHECK(picture.units[0].gathered == Bytes(2 * 7'087'872));
  std::vector<std::string> order;
  for (const UnitRun& run : picture.runs) {
    order.push_back(picture.units[run.unit].name);
  }
  CHECK(order == std::vector<std::string>{"root", "a", "b", "root"});
  const PrefetchArrow asked_for{0, 1, Phase::kForward};
  CHECK(std::count(picture.arrows.begin(), picture.arrows.end(), asked_for) == 1);
  CHECK(std::count_if(picture.arrows.begin(), picture.arrows.end(),
                      [](const auto& arrow) { return arrow.phase == Phase::kForward; }) == 1);
}

TEST_CASE("The data says what the simulation says") {
  const Simulated plan(Gpt2Plan(kTwoUnits));
  const Json json = Json::parse(ReportJson(plan.Input()));
  CHECK(json["format"] == "shardwright-report");
  const std::size_t ops = plan.program.step.size();
  for (const char* column : {"lane", "micro_batch", "subject", "rest", "colour"}) {
    CHECK(json["ops"][column].size() == ops);
  }
  const Json& recording = json["recordings"][0];
  CHECK(recording["period"] == (plan.result.step_time.value + 500) / 1000);
  // The names are those of ids everywhere else.
  for (std::size_t i = 0; i < ops; ++i) {
    const Json& table = json["ops"];
    std::string name;
    if (table["micro_batch"][i] >= 0) {
      name = "mb" + std::to_string(table["micro_batch"][i].get<int>()) + ".";
    }
    const std::string subject = table["subjects"][table["subject"][i].get<std::size_t>()];
    name += subject.empty() ? "" : subject + ".";
    name += table["rests"][table["rest"][i].get<std::size_t>()].get<std::string>();
    CHECK(name == OpName(plan.program, plan.program.step.ops[i]));
  }
  // The critical path has no gaps and is as long as the step, but for rounding to nanoseconds.
  std::int64_t last = recording["critical"][0][0];
  for (const Json& segment : recording["critical"]) {
    CHECK(segment[0] == last);
    last = segment[1];
  }
  const std::int64_t first = recording["critical"][0][0];
  CHECK(std::abs(last - first - recording["period"].get<std::int64_t>()) <= 1);
}

TEST_CASE("A recording of another profiler stands below the simulation") {
  const auto us = [](std::int64_t n) { return SimTime(n * 1'000'000); };
  ProfilerRecording recorded;
  recorded.file = "kineto.json";
  recorded.on_device = true;
  recorded.names = {"gemm <b>", "ncclDevKernel"};
  recorded.units = {"", "h.0"};
  recorded.steps = {{"ProfilerStep#0", us(0), us(100)}, {"ProfilerStep#1", us(100), us(200)}};
  recorded.memory = {{us(150), Bytes(1000), Bytes(2000)}};
  // Compute of two steps, and between them a gather of the second: 90 us from end to end.
  std::vector<Activity>& work = recorded.activities;
  work.resize(3);
  const std::array<std::pair<SimTime, SimTime>, 3> times = {
      {{us(10), us(90)}, {us(95), us(120)}, {us(120), us(180)}}};
  for (std::size_t i = 0; i < work.size(); ++i) {
    work[i].start = times[i].first;
    work[i].end = times[i].second;
    work[i].queue = i == 1 ? 9 : 7;
    work[i].step = i == 0 ? 0 : 1;
  }
  work[1].kind = ActivityKind::kCollective;
  work[1].name = 1;
  work[1].unit = 1;
  work[1].issue_begin = us(92);
  work[1].issue_end = us(93);
  work[1].has_issue = true;
  work[2].unit = 0;
  work[2].phase = Phase::kBackward;
  const Recording step = ForeignRecording(recorded);
  CHECK(step.period == us(90));
  REQUIRE(step.spans.size() == 2);
  CHECK(step.spans[0].stream == Stream::kGather);
  CHECK(step.spans[0].issue_begin == us(2));
  CHECK(step.spans[0].start == us(5));
  CHECK(step.spans[1].stream == Stream::kCompute);
  CHECK(step.spans[1].end == us(90));
  CHECK(step.bars[0].colour == OpColour::kAllGather);
  CHECK(step.bars[0].unit == "h.0");
  CHECK(step.bars[1].colour == OpColour::kBackward);
  CHECK(step.bars[1].unit == "root");
  REQUIRE(step.memory.size() == 1);
  CHECK(step.memory[0].time == us(60));

  const Simulated plan(Gpt2Plan(kTwoUnits));
  ReportInput input = plan.Input();
  input.recorded = &recorded;
  const Json json = Json::parse(ReportJson(input));
  const Json& bars = json["recordings"][1]["bars"];
  CHECK(json["recordings"][1]["start"] == Json({5000, 30000}));
  CHECK(bars["rests"] == Json({"fwd.ncclDevKernel", "bwd.gemm <b>"}));
  CHECK(ReportHtml(input).find("gemm <b>") == std::string::npos);
}

TEST_CASE("Plans that were considered are read and handed on") {
  const JsonValue search = JsonValue::Parse(
      R"({"schema": "shardwright-plan-summary", "family": "full", "label": "b", "step_time_s": 2,
          "memory": {"allocated": 1048570, "outside": 6}, "rejected": [
            {"family": "ddp", "reason": "no room <b>", "count": 7, "best_time_s": 0.5, "least_deficit_bytes": 2048},
            {"family": "full", "reason": "bound", "count": 1, "best_time_s": 0, "least_deficit_bytes": 0}],
          "pareto": [{"family": "full", "label": "a", "step_time_s": 1, "memory_bytes": 1073741824},
                     {"family": "full", "label": "b", "step_time_s": 2, "memory_bytes": 1048576}]})",
      "search.json");
  Choices choices;
  ReadSearch(search, choices);
  REQUIRE(choices.pareto.size() == 2);
  CHECK(!choices.pareto[0].is_chosen);
  CHECK(choices.pareto[1].is_chosen);
  ReadSweep(
      JsonValue::Parse(
          R"({"schema": "shardwright-sweep", "rows": [{"error": "x"}, {"nodes": 2, "micro_batch": 1,
                    "sequence": 64, "shard_size": 4, "mesh": "tp=2", "bandwidth_factor": 0.5, "fits": false,
                    "step_time_s": 0.25, "device_bytes": 1024}]})",
          "sweep.json"),
      choices);
  // A chosen plan that is not on the front stands where its time belongs.
  const JsonValue tie = JsonValue::Parse(
      R"({"schema": "shardwright-plan-summary", "family": "full", "label": "c", "step_time_s": 1.5,
          "memory": {"allocated": 2097152, "outside": 1}, "rejected": [],
          "pareto": [{"family": "full + offload", "label": "c", "step_time_s": 1, "memory_bytes": 1024},
                     {"family": "full", "label": "b", "step_time_s": 2, "memory_bytes": 512}]})",
      "search.json");
  Choices with_tie;
  ReadSearch(tie, with_tie);
  REQUIRE(with_tie.pareto.size() == 3);
  CHECK(with_tie.pareto[1].is_chosen);
  CHECK(with_tie.pareto[1].label == "full: c");
  CHECK(with_tie.pareto[1].memory == Bytes(2097153));
  REQUIRE(choices.what_if.size() == 1);
  CHECK(choices.what_if[0].label ==
        "nodes 2, micro-batch 1, sequence 64, shard 4, tp=2, bandwidth x 0.5 (does not fit)");
  const Simulated plan(Gpt2Plan(kTwoUnits));
  ReportInput input = plan.Input();
  input.choices = &choices;
  const Json json = Json::parse(ReportJson(input));
  CHECK(json["rejected"] == Json::parse(R"([
      {"family": "ddp", "reason": "no room <b>", "count": 7, "best_time_s": 0.5, "least_deficit_bytes": 2048},
      {"family": "full", "reason": "bound", "count": 1, "best_time_s": 0.0, "least_deficit_bytes": 0}])"));
  CHECK(json["pareto"][1]["chosen"] == true);
  CHECK(json["what_if"][0]["memory_bytes"] == 1024);
  CHECK(ReportHtml(input).find("no room <b>") == std::string::npos);
  CHECK_THROWS_WITH_AS(ReadSweep(search, choices),
                       doctest::Contains("expected what shardwright sweep --json prints"),
                       InputError);
}

TEST_CASE("A run that is far from the simulation is no green answer") {
  const Simulated plan(Gpt2Plan(kTwoUnits));
  ReportInput input = plan.Input();
  CHECK(CountOf(ReportHtml(input), "<p id=\"verdict\" class=\"yes\">Fits, with ") == 1);
  Comparison comparison;
  comparison.simulated_step = plan.prediction.step_time;
  comparison.measured_step = Seconds(5 * plan.prediction.step_time.value);
  input.comparison = &comparison;
  input.comparison_json = R"({"parts": []})";
  const std::string page = ReportHtml(input);
  CHECK(CountOf(page, "<p id=\"verdict\" class=\"doubt\">Fits, with ") == 1);
  CHECK(CountOf(VerdictOf(input),
                " to spare. But the run took 5.0 times the simulated step: the times here do "
                "not describe it. A step takes ") == 1);
  const Json json = Json::parse(ReportJson(input));
  CHECK(json["comparison"]["gap"] == doctest::Approx(4));
  CHECK(json["comparison"]["parts"].empty());
  comparison.measured_step = Seconds(1.2 * plan.prediction.step_time.value);
  CHECK(CountOf(ReportHtml(input), "<p id=\"verdict\" class=\"yes\">Fits, with ") == 1);
}

TEST_CASE("Hostile names do not leave their places") {
  std::string units(kTwoUnits);
  const std::string hostile = Json(kHostile).dump();
  units.replace(units.find("\"b\""), 3, hostile);
  units.replace(units.find("\"b\""), 3, hostile);
  Simulated plan(Gpt2Plan(units));
  plan.title = kHostile;
  const std::string page = ReportHtml(plan.Input());
  const std::string harmless = ReportHtml(Simulated(Gpt2Plan(kTwoUnits)).Input());
  for (const char* tag : {"<script", "</script", "<img"}) {
    CHECK(CountOf(page, tag) == CountOf(harmless, tag));
  }
  CHECK(CountOf(page, "<img") == 0);
  const std::size_t begin = page.find("id=\"data\">") + 10;
  const Json data = Json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  CHECK(data["title"] == kHostile);
  CHECK(data["plan_picture"]["units"][1]["name"] == kHostile);
  CHECK(ReportHtml(plan.Input()) == page);
}

}  // namespace
}  // namespace shardwright
