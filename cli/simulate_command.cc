#include <algorithm>
#include <string>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/flow.h"
#include "cli/prediction.h"
#include "core/json.h"
#include "simulator/simulate.h"
#include "traces/chrome_write.h"

namespace shardwright {

int RunSimulate(const SimulateCommand& command) {
  const PlanFile file = ReadPlanFile(command.file);
  for (const std::string& warning : file.model.model.warnings) {
    Warn(warning);
  }
  const Program program = LowerAndVerify(file);
  SimulateOptions options;
  options.contention = command.contention;
  options.periodic = !command.exact;
  options.trace = true;  // also explains the step
  if (file.job.memory_margin > 0.0) {
    const Bytes outside = OutsideBytes(program, file.profile.memory);
    options.allocator.capacity = std::max(UsableMemory(file) - outside, Bytes(1));
  }
  const SimulationResult result = Simulate(
      {.program = program, .cluster = file.cluster, .profile = file.profile, .options = options});
  const Prediction prediction = Predict(file, program, result);
  if (!prediction.has_dtype) {
    Warn(file.cluster.gpu.name + " has no matrix units for the compute dtype; fp32 rates are used");
  }
  const Offload& offload = file.plan.offload;
  if (prediction.host_limit == Bytes(0) &&
      (offload.parameters || offload.optimizer || offload.activations)) {
    Warn("cluster " + file.cluster.name + " has no host memory given, so that of " +
         Format(prediction.host_peak) + " per node is not checked");
  }
  if (!command.trace.empty()) {
    ChromeOptions chrome;
    chrome.profile = command.trace_profile == TraceProfile::kHta ? ChromeProfile::kHta
                                                                 : ChromeProfile::kPerfetto;
    WriteChromeTrace(program, result.trace, chrome, command.trace);
  }
  if (command.trace != "-") {  // then standard output is the trace and nothing else
    WriteFileAtomically("-", command.json ? PredictionJson(file, program, result, prediction)
                                          : PredictionText(file, program, result, prediction));
  }
  return prediction.misfits.empty() ? kExitOk : kExitNo;
}

}  // namespace shardwright
