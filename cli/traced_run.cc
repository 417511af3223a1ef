#include "cli/traced_run.h"

#include "core/error.h"
#include "core/printable.h"
#include "planner/evaluate.h"
#include "traces/check.h"
#include "traces/chrome_read.h"

namespace shardwright {

TracedRun ReadOwnTrace(const std::string& file) {
  const TraceHeader header = ReadTraceHeader(file);
  if (header.plan.empty()) {
    throw InputError(file, "a trace without its plan", "a trace that carries one");
  }
  TracedRun run{file, ParsePlanFile(header.plan, file + ": plan"), {}, {}};
  run.program = LowerAndVerify(run.file);
  run.trace = ReadChromeTrace(file, run.program);
  return run;
}

CalibrationRun CalibrationRunOf(const TracedRun& run) {
  return {run.name,
          run.program,
          run.file.cluster,
          run.trace,
          run.recordings.empty() ? nullptr : &run.recordings,
          run.shapes.empty() ? nullptr : &run.shapes};
}

RunMatch MatchOf(const TracedRun& run) {
  return run.recordings.empty() ? RunMatch() : MatchRecordings(run.program, run.recordings);
}

std::string ContradictionsOf(const TracedRun& run) {
  std::string text;
  if (!run.trace.spans.empty()) {
    for (const std::string& finding : CheckTrace(run.program, run.trace)) {
      text += PrintableLine(run.name + ": " + finding) + "\n";
    }
  }
  return text;
}

}  // namespace shardwright
