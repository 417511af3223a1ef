#pragma once

// The command line as values. Only what can be told from the words alone is checked here; whether a
// model or a file exists is found out by the commands.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "schedule/plan.h"
#include "schedule/wrap.h"

namespace shardwright {

// --help and --version: text for standard output.
struct ShowText {
  std::string text;
};

enum class ListKind : std::uint8_t { kModels, kClusters, kGpus, kKernelSets, kProfiles };

struct ListCommand {
  ListKind kind = ListKind::kModels;
  bool json = false;
};

struct InspectCommand {
  std::string target;  // a file, a folder, "-" or a name
  bool json = false;
  bool program = false;              // print the whole program of a plan
  std::string trace;                 // of the plan that `target` is; empty: none
  std::int64_t sequence_length = 0;  // of a model; 0: its default
};

struct PlanCommand {
  std::string model;
  std::string cluster;
  std::int64_t nodes = 0;  // 0: what the cluster says
  std::int64_t gpus = 0;   // per node; 0: what the cluster says
  std::string kernel_set = "torch-eager";
  std::string profile;              // empty: the default of GPU and kernel set
  std::int64_t global_batch = 0;    // 0: ranks x micro-batch x accumulation
  std::int64_t shard_size = 0;      // 0: follows from ranks and replicate_size
  std::int64_t replicate_size = 0;  // 0: follows from ranks and shard_size
  std::int64_t accumulation = 0;    // 0: follows from global_batch, or 1
  std::string wrap;                 // empty: "block", for ddp "root"
  ReshardChoice reshard;
  bool recompute = false;
  RecomputeKind recompute_kind = RecomputeKind::kFull;
  std::int64_t keep_every = 1;
  // Everything that is copied into the plan as it is. job.sequence_length 0: the model's default.
  Job job;
  Plan plan;
  std::string output = "-";
  bool json = false;
};

enum class TraceProfile : std::uint8_t { kPerfetto, kHta };

struct SimulateCommand {
  std::string file;   // a plan, or "-"
  std::string trace;  // empty: none
  TraceProfile trace_profile = TraceProfile::kPerfetto;
  bool contention = true;
  bool exact = false;
  bool json = false;
};

using CommandLine =
    std::variant<ShowText, ListCommand, InspectCommand, PlanCommand, SimulateCommand>;

// Throws UsageError with one line (flags and subcommands that are nearly right are named).
[[nodiscard]] CommandLine ParseCommandLine(int argc, const char* const* argv);

}  // namespace shardwright
