#pragma once

// Training runs that others measured and published: rows of tables such as
// bench/published/measured_runs.csv (columns: bench/published/README.md).

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright {

// What the published number of bytes counts.
enum class MeasuredMemory : std::uint8_t {
  kNone,
  kAllocated,  // tensors that exist: torch.cuda.max_memory_allocated
  kReserved,   // segments of the caching allocator: torch.cuda.max_memory_reserved
  kDevice,     // all of the device, context and communicators included: nvidia-smi
};

// How a run ended, in tables of runs that fit or did not.
enum class RunOutcome : std::uint8_t { kUnknown, kFits, kFitsMax, kOom, kPresumedOom };

// One row. Numbers that are not published are 0, texts empty.
struct MeasuredRun {
  std::int64_t line = 0;  // in the file
  std::string id;
  std::string tier;  // "A" usable, "B" weak, "C" other parallelism, "X" wrong; empty: not given

  // Model.
  std::string model_name;
  std::int64_t parameters = 0;
  std::int64_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t ffn_hidden = 0;
  std::int64_t vocabulary = 0;
  std::string ffn_kind;        // "gelu", "swiglu", ...
  std::string tied_embedding;  // "y", "n"
  std::int64_t sequence_length = 0;

  // Cluster.
  std::string gpu;        // as the source calls it
  std::string gpu_class;  // column gpu_class, or gpu where a table has no classes
  std::int64_t gpus = 0;
  std::int64_t gpus_per_node = 0;
  std::string network;  // column internode_network

  // Job and plan.
  std::string parallelism;
  bool data_parallel_only = true;
  std::string sharding;  // column sharding_strategy
  std::string param_dtype;
  std::string compute_dtype;  // "bf16", "fp8", ...; empty where a table has no such column
  std::string optimizer;
  std::string checkpointing;  // column activation_checkpointing
  std::string offload;        // column cpu_offload
  std::int64_t micro_batch = 0;
  std::int64_t accumulation = 0;
  std::int64_t global_batch = 0;
  std::string compiled;  // "y", "n", ...
  std::string attention_kernel;
  std::string framework;
  std::string date;

  // Measured.
  double step_time_s = 0;
  double tokens_per_s_per_gpu = 0;
  double mfu_percent = 0;
  double hfu_percent = 0;
  double peak_memory_gib = 0;
  MeasuredMemory memory_kind = MeasuredMemory::kNone;
  RunOutcome outcome = RunOutcome::kUnknown;

  // A field that is no number where one is needed, as one error line; empty: none. Such rows cannot
  // be used, but the others of their table can.
  std::string problem;

  // The id up to its first '-' (of "oom-<source>-7": the part behind "oom-").
  [[nodiscard]] std::string Source() const;
};

// Reads a table from text; `file` names it in errors. Needs the column "id" and those of the model,
// cluster, job and plan; columns it does not know are ignored, so that tables may say more. Throws
// InputError: not a table, missing columns (all of them at once), rows without an id or with the
// same one.
[[nodiscard]] std::vector<MeasuredRun> ParseMeasuredRuns(std::string_view text,
                                                         const std::string& file);

// The same from a file.
[[nodiscard]] std::vector<MeasuredRun> ReadMeasuredRuns(const std::string& file);

}  // namespace shardwright
