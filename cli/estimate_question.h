#pragma once

// What `shardwright estimate` was asked, with what nobody said filled in.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/plan_options.h"
#include "core/units.h"
#include "planner/search.h"

namespace shardwright {

// What nobody said, and how to say otherwise.
using Assumed = std::vector<std::string>;

// With --deadline: how the next smaller number of nodes misses it.
struct MetDeadline {
  Seconds limit;
  std::int64_t fewer_nodes = 0;       // 0: there is no smaller number
  std::optional<Seconds> fewer_time;  // nothing: the job does not fit there
};

struct Question {
  PlanOptions options;
  std::int64_t tokens = 1'000'000'000;
  double price = 0;     // of one GPU-hour; 0: not asked
  SearchOptions given;  // the choices that flags fix
  std::optional<MetDeadline> deadline;
  std::string solved;     // of --solve: the value that was found, and what was tried
  std::string optimizer;  // its form where nobody said it, and what another one would gain
  std::string experts;    // what sharing out the experts of a mixture would gain; empty: nothing
  Assumed assumed;
  // options.cluster also says what usual nodes have and the question does not: without that, and
  // the part about host memory, which is told only where the answer depends on it.
  std::string cluster_as_asked;
  std::string usual_host;
};

// Throws UsageError and InputError.
[[nodiscard]] Question ReadQuestion(const Arguments& arguments);

}  // namespace shardwright
