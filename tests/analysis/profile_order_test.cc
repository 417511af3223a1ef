// Predictions of one GPU by several stacks do not contradict each other, and those of the rows that
// people compare first agree with what was published.

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "analysis/confidence.h"
#include "analysis/predict_run.h"
#include "models/loader.h"
#include "planner/evaluate.h"
#include "schedule/wrap.h"
#include "simulator/plan_programs.h"
#include "topologies/gpu_names.h"
#include "topologies/profile_fit.h"

namespace shardwright {
namespace {

// A plan of FSDP2 over two GPUs; the step does not depend on which.
PlanFile TwoGpus(const std::string& model, const std::string& kernel_set) {
  PlanFile file;
  file.job.sequence_length = 0;
  file.cluster = LoadCluster("h100-80 x2");
  file.kernels = FindKernelSet(kernel_set, "test");
  file.model = LoadModelForJob(model, file.job, Path("test"));
  file.job.global_batch = 2;
  file.plan.shard_size = 2;
  const WrapSpec wrap = ParseWrap("block", "test");
  try {
    file.plan.units = Wrap(file.model, wrap, {}, Dialect::kFsdp2, "test");
  } catch (const InputError&) {  // a model without blocks
    const WrapSpec root = ParseWrap("root", "test");
    file.plan.units = Wrap(file.model, root, {}, Dialect::kFsdp2, "test");
  }
  KeepFullPrecision(file.model, file.job.precision, file.plan);
  return file;
}

std::vector<GpuSpec> Gpus() {
  std::vector<GpuSpec> gpus = GpuCatalog();
  // Two of a node are simulated, and a GB10 is alone in its own.
  std::erase_if(
      gpus, [](const GpuSpec& gpu) { return gpu.architecture == "host" || MostOfANode(gpu) == 1; });
  return gpus;
}

// Step times by GPU.
std::map<std::string, double> StepTimes(PlanFile file) {
  PlanPrograms programs({file, file.plan});
  SimulateOptions options;
  options.reserved = false;
  std::map<std::string, double> times;
  for (const GpuSpec& gpu : Gpus()) {
    file.cluster = LoadCluster(gpu.name + " x2");
    file.profile = DefaultProfile(gpu, file.kernels.name);
    Simulator simulator(file.cluster, file.profile);
    const Seconds time = ToSeconds(SimulatePlan(simulator, programs, options).step_time);
    times[gpu.name] = time.value;
    CHECK_MESSAGE(RatesOf(file, file.plan, time).mfu < 1, gpu.name << ' ' << file.kernels.name);
  }
  return times;
}

// Contention can make a faster kernel delay a transfer.
constexpr double kAnomaly = 1.005;

// A stack that compiles, or is newer, has no more kernels than the other one, and the GPU is the
// same: it is not slower, on any GPU and for any model. (Stacks before flash attention are not
// comparable: scores in memory may be faster where sequences are short. Nor is Gemma 2, whose
// capped scores eager PyTorch writes out.)
TEST_CASE("Profiles: eager PyTorch is not faster than compiled, nor an older one than a newer") {
  const std::vector<std::pair<std::string, std::string>> kSlowerAndFaster = {
      {"torch-2024", "torch-eager"},
      {"torch-eager", "torch-compile-2024"},
      {"torch-compile-2024", "torch-compile"}};
  for (const std::string& model : ZooNames()) {
    std::map<std::string, std::map<std::string, double>> times;
    for (const auto& [slower, faster] : kSlowerAndFaster) {
      if (model.starts_with("gemma-2-") && slower == "torch-eager") {
        continue;
      }
      if (model.find("-debugmodel") != std::string::npos) {
        continue;  // so small that the host's own work decides
      }
      for (const std::string& kernel_set : {slower, faster}) {
        if (times.count(kernel_set) == 0) {
          times[kernel_set] = StepTimes(TwoGpus(model, kernel_set));
        }
      }
      for (const auto& [gpu, time] : times[faster]) {
        CHECK_MESSAGE(time <= kAnomaly * times[slower].at(gpu),
                      model << " on " << gpu << ": " << faster << " takes " << time << " s, "
                            << slower << ' ' << times[slower].at(gpu));
      }
    }
  }
}

TEST_CASE("Profiles: every fit names the GPU that its profile is for, or one with its numbers") {
  std::size_t fitted = 0;
  for (const std::string& name : ListProfiles()) {
    CAPTURE(name);
    const std::optional<ProfileFit> fit = FitOf(name);
    if (!fit) {
      continue;
    }
    ++fitted;
    CHECK(FindGpu(fit->gpu, "test").name == fit->gpu);
    CHECK(fit->RunCount() >= 3);
    CHECK(fit->left_out_error > 0);
    CHECK_FALSE(fit->sources.empty());
    const Profile profile = LoadProfile(name);
    for (const auto& [kernel_set, runs] : fit->runs) {
      CHECK(FindKernelSet(kernel_set, "test").name == kernel_set);
      if (profile.architecture == fit->gpu) {
        CHECK(DefaultProfile(FindGpu(fit->gpu, "test"), kernel_set).name == name);
        CHECK(fit->RunCount(kernel_set) == runs);
      }
    }
  }
  CHECK(fitted >= 12);
}

// A plan of GPT-2 without a network.
PlanFile OneGpu(const std::string& gpu, const std::string& kernel_set) {
  PlanFile file = TwoGpus("gpt2", kernel_set);
  file.cluster = LoadCluster(gpu + " x1");
  file.plan.shard_size = 1;
  file.job.global_batch = 1;
  file.profile = DefaultProfile(file.cluster.gpu, kernel_set);
  return file;
}

// The band without what the numbers' spreads make, where that is less.
double BandOn(const std::string& gpu, const std::string& kernel_set,
              const std::string& source = "") {
  const PlanFile file = OneGpu(gpu, kernel_set);
  const double band = ConfidenceOf(file, source).band;
  CHECK(band > StepTimeBand(file) * 0.999);
  return band;
}

// 90 % of a normal error lie within 1.6449 standard deviations; its mean size is sqrt(2 / pi) of
// one.
constexpr double kDeviations = 1.6449;

TEST_CASE("A band is that of what is known of a run, and of new models where a source is known") {
  const std::optional<ProfileFit> fit = FitOf("h100-80-torch");
  REQUIRE(fit);
  REQUIRE(fit->RunCount("torch-compile") > 0);
  REQUIRE(fit->Knows("torchtitan"));
  const double new_model = kDeviations * fit->left_out_error / std::sqrt(2 / 3.14159265358979);
  const auto near = [](double value) { return doctest::Approx(value).epsilon(1e-4); };
  CHECK(BandOn("h100-80", "torch-compile", "torchtitan") == near(new_model));
  const auto is_kind = [](const std::string& gpu, const std::string& kernel_set,
                          const std::string& kind) {
    const Confidence found = ConfidenceOf(OneGpu(gpu, kernel_set));
    CAPTURE(gpu + ' ' + kernel_set);
    CHECK(found.kind == kind);
    CHECK(found.band > 0.05);
  };
  is_kind("h100-80", "torch-compile", "known");       // the user is a new source
  is_kind("h200-141", "torch-compile", "known");      // Hopper, as H100
  is_kind("h100-80", "jax-xla", "stack");             // no run of XLA was fitted
  is_kind("l40s", "torch-compile", "chip");           // no run on Ada
  is_kind("rtx-3090", "torch-compile", "half rate");  // Ampere, but at half rate
  is_kind("l40s", "shardwright-cuda", "both");
  is_kind("mi250x", "torch-eager", "generic");
  const double known = BandOn("h100-80", "torch-compile");
  CHECK(BandOn("h200-141", "torch-compile") == near(known));
  CHECK(BandOn("h100-80", "jax-xla") > known);
  CHECK(BandOn("rtx-3090", "torch-compile") > known);
  CHECK(BandOn("mi250x", "torch-eager") > BandOn("l40s", "shardwright-cuda"));
  CHECK(BandOn("a100-80", "composer-2024", "llmfoundry") < 0.6 * known);
  PlanFile own = OneGpu("h100-80", "torch-eager");
  own.profile.compute.elementwise.value *= 0.9;
  CHECK(ConfidenceOf(own, "torchtitan").band == StepTimeBand(own));
  CHECK(ConfidenceOf(own, "torchtitan").kind == "own");
  PlanFile offloads = OneGpu("h100-80", "torch-compile");
  offloads.plan.offload.parameters = true;
  CHECK(ConfidenceOf(offloads).kind == "offload");
  PlanFile fp8 = OneGpu("h100-80", "torch-compile");
  fp8.kernels.fp8 = Fp8Products::kPerTensor;
  CHECK(ConfidenceOf(fp8).kind == "fp8");
}

TEST_CASE("Another network or other communicators do not make a profile one's own") {
  PlanFile file = OneGpu("h100-80", "torch-eager");
  file.profile.transports.front().protocols.front().base_latency.value += Seconds(1e-3);
  file.profile.memory.next_communicator.value = Bytes(0);
  CHECK(ConfidenceOf(file).kind == "known");
  CHECK(ConfidenceOf(file).text.find("is your own") == std::string::npos);
  file.profile.compute.elementwise.value *= 0.9;
  CHECK(ConfidenceOf(file).text.find("is your own") != std::string::npos);
}

}  // namespace
}  // namespace shardwright
