#include "cli/forward_plan.h"

#include <vector>

#include "core/error.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "topologies/mesh.h"

namespace shardwright {

ForwardPlan::ForwardPlan(const PlanFile& file) : job(file.job), plan(file.plan) {
  job.mode = JobMode::kForward;
  plan.accumulation = 1;
  plan.sync = SyncMode::kEvery;
  plan.recompute.clear();
  plan.offload.activations = false;
  plan.offload.optimizer = false;
  plan.offload.moments = false;
  job.global_batch = plan.micro_batch * MeshOf(plan).DataCount();
  program = Lower({file.model, file.kernels, job, plan});
  const std::vector<Finding> findings = Verify(program);
  SW_CHECK(findings.empty(), "an illegal program: " + findings[0].text);
}

}  // namespace shardwright
