// Plans and simulates inside another program: the fastest plan of GPT-2 on eight A100s.

#include <cstdio>

#include "planner/evaluate.h"
#include "planner/search.h"
#include "schedule/plan_file.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

int main() {
  using namespace shardwright;
  try {
    PlanFile file;
    file.job.sequence_length = 1024;
    file.job.global_batch = 64;
    file.cluster = LoadCluster("dgx-a100", 1, 8);
    file.kernels = FindKernelSet("torch-eager", "example");
    file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
    file.model = LoadModelForJob("gpt2", file.job, Path("example"));

    SearchOptions options;
    options.base.dialect = Dialect::kNative;
    const SearchResult found = Search(file, options);
    if (!found.is_feasible) {
      std::puts("nothing fits");
      return 1;
    }
    file.plan = found.best.plan;
    const Outcome outcome = Evaluate(file, file.plan);
    std::printf(
        "%s: step %.3f ms, at most %.1f %% above any other plan, device memory %.2f GiB, %lld "
        "plans simulated\n",
        file.model.name.c_str(), outcome.step_time.value * 1e3, found.proven_gap * 100,
        static_cast<double>(outcome.DeviceTotal().value) / static_cast<double>(kGiB.value),
        static_cast<long long>(found.simulated));
    return 0;
  } catch (const InputError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
