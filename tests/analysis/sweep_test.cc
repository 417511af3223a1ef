#include "analysis/sweep.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/wrap.h"
#include "topologies/scale_links.h"

namespace shardwright {
namespace {

PlanFile MakeSmall(const SweepPoint& point) {
  PlanFile file;
  file.job.sequence_length = point.sequence > 0 ? point.sequence : 64;
  file.cluster = LoadCluster("dgx-a100", point.nodes > 0 ? point.nodes : 1);
  if (point.bandwidth > 0.0) {
    ScaleLinks(file.cluster, "network", point.bandwidth, "test");
  }
  file.kernels = FindKernelSet("torch-eager", "test");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.model = LoadModelForJob("pythia-70m", file.job, Path("test"));
  file.plan.micro_batch = point.micro_batch > 0 ? point.micro_batch : 1;
  file.plan.shard_size = file.cluster.RankCount();
  file.job.global_batch = file.plan.shard_size * file.plan.micro_batch;
  file.plan.units = Wrap(file.model, ParseWrap("block", "test"), {}, file.plan.dialect, "test");
  if (point.shard == 3) {
    throw InputError("shard", "3", "a divisor, \"8\" say");
  }
  return file;
}

TEST_CASE("PointsOf: the cross product, last axis fastest") {
  CHECK(PointsOf({}) == std::vector<SweepPoint>{SweepPoint()});
  const std::vector<SweepPoint> points = PointsOf({.nodes = {1, 2},
                                                   .micro_batch = {},
                                                   .sequence = {64},
                                                   .shard = {},
                                                   .mesh = {},
                                                   .bandwidth = {0.5, 1}});
  const std::vector<SweepPoint> expected = {
      {1, 0, 64, 0, "", 0.5}, {1, 0, 64, 0, "", 1}, {2, 0, 64, 0, "", 0.5}, {2, 0, 64, 0, "", 1}};
  CHECK(points == expected);
}

TEST_CASE("RunSweep: each point is what its plan predicts, for any number of threads") {
  const std::vector<SweepPoint> points = PointsOf({.nodes = {1, 2},
                                                   .micro_batch = {1, 2},
                                                   .sequence = {},
                                                   .shard = {8, 3},
                                                   .mesh = {},
                                                   .bandwidth = {}});
  std::size_t calls = 0;
  const std::vector<SweepResult> one = RunSweep(
      points, MakeSmall, {.threads = 1, .progress = [&](std::size_t done, std::size_t all) {
                            CHECK(done == ++calls);
                            CHECK(all == points.size());
                          }});
  CHECK(calls == 8);
  REQUIRE(one.size() == 8);
  for (std::size_t i = 0; i < points.size(); ++i) {
    CHECK(one[i].point == points[i]);
    CHECK(one[i].outcome.has_value() == (points[i].shard == 8));
    if (one[i].outcome) {
      const Outcome alone = Evaluate(MakeSmall(points[i]), MakeSmall(points[i]).plan);
      CHECK(one[i].outcome->step_time == alone.step_time);
      CHECK(one[i].outcome->reserved == alone.reserved);
      CHECK(one[i].ranks == 8 * points[i].nodes);
      CHECK(one[i].global_batch == one[i].ranks * points[i].micro_batch);
      // 3600 s x GPUs x 1e9 tokens / (tokens per second of all GPUs).
      const double seconds = alone.step_time.value;
      const double tokens = 64.0 * static_cast<double>(one[i].global_batch);
      const double hours = static_cast<double>(one[i].ranks) * seconds * 1e9 / tokens / 3600.0;
      CHECK(one[i].GpuHoursPerBillion() == doctest::Approx(hours));
    }
  }
  CHECK(SweepCsv(RunSweep(points, MakeSmall, {.threads = 4, .progress = {}})) == SweepCsv(one));
}

TEST_CASE("RunSweep: other exceptions end it") {
  const std::vector<SweepPoint> points(20);
  const auto make = [](const SweepPoint&) -> PlanFile { throw EnvironmentError("disk"); };
  CHECK_THROWS_WITH_AS((void)RunSweep(points, make, {.threads = 3, .progress = {}}), "disk",
                       EnvironmentError);
}

TEST_CASE("SweepCsv: one line per point, reasons quoted") {
  const std::vector<SweepPoint> points = PointsOf({.nodes = {},
                                                   .micro_batch = {},
                                                   .sequence = {},
                                                   .shard = {8, 3},
                                                   .mesh = {},
                                                   .bandwidth = {}});
  const std::string csv = SweepCsv(RunSweep(points, MakeSmall));
  std::vector<std::string> lines(1);
  for (const char c : csv) {
    if (c == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += c;
    }
  }
  REQUIRE(lines.size() == 4);  // the last one is empty
  CHECK(lines[0].starts_with("nodes,ranks,micro_batch,accumulation,"));
  CHECK(lines[1].starts_with("1,8,1,1,8,64,8,1,,1,"));
  CHECK(lines[1].ends_with(",true,0,"));
  CHECK(lines[2] ==
        "0,0,0,0,0,0,0,0,,1,,,,,,,,,\"shard: got 3, expected a divisor, \"\"8\"\" say\"");
}

// Of two nodes the NICs are the narrowest links of a ring over all ranks: a collective's transfer
// takes twice as long with half of their rate. NVLink at half its 300 GB/s is still faster than
// eight NICs of 25 GB/s.
TEST_CASE("ScaleLinks: rates of the level and of nothing else") {
  const Cluster whole = LoadCluster("dgx-a100", 2);
  CHECK(LinkLevels(whole)[0] == "nvlink");
  for (const std::string& level : LinkLevels(whole)) {
    Cluster same = whole;
    ScaleLinks(same, level, 1.0, "test");
    CHECK(same == whole);
    Cluster back = whole;
    ScaleLinks(back, level, 0.5, "test");
    CHECK_FALSE(back == whole);
    ScaleLinks(back, level, 2.0, "test");
    CHECK(back == whole);
  }
  Cluster slow = whole;
  ScaleLinks(slow, "network", 0.5, "test");
  for (std::size_t i = 0; i < whole.node.components.size(); ++i) {
    CHECK(slow.node.components[i].bandwidth.value ==
          0.5 * whole.node.components[i].bandwidth.value);
  }
  CHECK_THROWS_WITH_AS(ScaleLinks(slow, "nvlnk", 2, "--bandwidth"),
                       "--bandwidth: got \"nvlnk\", expected a level of cluster dgx-a100: nvlink, "
                       "pcie, network, unit; did you mean \"nvlink\"?",
                       InputError);
}

}  // namespace
}  // namespace shardwright
