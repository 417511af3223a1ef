#include "analysis/measured_run.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <set>
#include <string_view>

#include "analysis/csv.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"

namespace shardwright {
namespace {

// Columns that every table must have. The others (gpu_class, tier, measured values, ...) are
// optional.
constexpr std::array<std::string_view, 27> kRequired = {"id",
                                                        "model_name",
                                                        "n_params",
                                                        "n_layers",
                                                        "hidden",
                                                        "n_heads",
                                                        "n_kv_heads",
                                                        "ffn_hidden",
                                                        "vocab",
                                                        "ffn_kind",
                                                        "seq_len",
                                                        "gpu",
                                                        "gpus",
                                                        "gpus_per_node",
                                                        "internode_network",
                                                        "parallelism",
                                                        "sharding_strategy",
                                                        "param_dtype",
                                                        "optimizer",
                                                        "activation_checkpointing",
                                                        "cpu_offload",
                                                        "microbatch_per_gpu",
                                                        "grad_accum",
                                                        "compiled",
                                                        "attention_kernel",
                                                        "framework",
                                                        "date"};

void CheckColumns(const CsvTable& table) {
  std::string missing;
  for (const std::string_view name : kRequired) {
    if (table.Find(name) == CsvTable::kNoColumn) {
      missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
  }
  if (!missing.empty()) {
    throw InputError(table.file + ": line 1", "no column " + missing, "a table of measured runs");
  }
}

// Reads the fields of one row by column name.
class RowReader {
 public:
  RowReader(const CsvTable& table, const CsvRow& row) : table_(table), row_(row) {}

  // Empty when the table has no such column.
  [[nodiscard]] std::string Text(std::string_view column) const {
    const std::size_t i = table_.Find(column);
    return i == CsvTable::kNoColumn ? std::string() : row_.fields[i];
  }

  // 0 when the field is empty.
  [[nodiscard]] std::int64_t Count(std::string_view column) const {
    const std::string text = Text(column);
    const std::int64_t value = text.empty() ? 0 : IntegerIn(text).value_or(-1);
    if (value < 0 || value > JsonValue::kMaxCount) {
      throw InputError(table_.Where(row_, column), Quoted(text), "a count or nothing");
    }
    return value;
  }

  [[nodiscard]] double Number(std::string_view column) const {
    const std::string text = Text(column);
    const double value = text.empty() ? 0 : NumberIn(text).value_or(-1);
    if (!std::isfinite(value) || value < 0) {
      throw InputError(table_.Where(row_, column), Quoted(text), "a number or nothing");
    }
    return value;
  }

  [[nodiscard]] RunOutcome Outcome() const {
    constexpr std::array<std::string_view, 5> kNames = {"", "fits", "fits_max", "oom",
                                                        "failed_presumed_oom"};
    const std::string text = Text("outcome");
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      if (kNames[i] == text) {
        return static_cast<RunOutcome>(i);
      }
    }
    throw InputError(table_.Where(row_, "outcome"), '"' + text + '"',
                     "fits, fits_max, oom, failed_presumed_oom or nothing");
  }

 private:
  const CsvTable& table_;
  const CsvRow& row_;
};

// Kinds are sentences in the tables; their first words tell them apart. "active" counts blocks in
// use like "allocated" does; "32 - gb_free" is fairseq's name for 32 GB less max_memory_allocated.
MeasuredMemory MemoryKindOf(std::string_view text) {
  const auto has = [text](std::string_view part) { return Contains(text, part); };
  if (text.empty()) {
    return MeasuredMemory::kNone;
  }
  if (has("reserved")) {
    return MeasuredMemory::kReserved;
  }
  if (has("allocated") || has("active") || has("gb_free")) {
    return MeasuredMemory::kAllocated;
  }
  return has("nvidia-smi") ? MeasuredMemory::kDevice : MeasuredMemory::kAllocated;
}

void ReadTexts(const RowReader& read, MeasuredRun& run) {
  run.id = read.Text("id");
  run.tier = read.Text("tier");
  run.model_name = read.Text("model_name");
  run.ffn_kind = read.Text("ffn_kind");
  run.tied_embedding = read.Text("tied_embeddings");
  run.gpu = read.Text("gpu");
  run.gpu_class = read.Text("gpu_class");
  if (run.gpu_class.empty()) {
    run.gpu_class = run.gpu;
  }
  run.network = read.Text("internode_network");
  run.parallelism = read.Text("parallelism");
  run.data_parallel_only = read.Text("dp_only") != "n";
  run.sharding = read.Text("sharding_strategy");
  run.param_dtype = read.Text("param_dtype");
  run.compute_dtype = read.Text("compute_dtype");
  run.optimizer = read.Text("optimizer");
  run.checkpointing = read.Text("activation_checkpointing");
  run.offload = read.Text("cpu_offload");
  run.compiled = read.Text("compiled");
  run.attention_kernel = read.Text("attention_kernel");
  run.framework = read.Text("framework");
  run.date = read.Text("date");
}

void ReadNumbers(const RowReader& read, MeasuredRun& run) {
  run.parameters = read.Count("n_params");
  run.layers = read.Count("n_layers");
  run.hidden = read.Count("hidden");
  run.heads = read.Count("n_heads");
  run.kv_heads = read.Count("n_kv_heads");
  run.ffn_hidden = read.Count("ffn_hidden");
  run.vocabulary = read.Count("vocab");
  run.sequence_length = read.Count("seq_len");
  run.gpus = read.Count("gpus");
  run.gpus_per_node = read.Count("gpus_per_node");
  run.micro_batch = read.Count("microbatch_per_gpu");
  run.accumulation = read.Count("grad_accum");
  run.global_batch = read.Count("global_batch_sequences");
  run.step_time_s = read.Number("step_time_s");
  run.tokens_per_s_per_gpu = read.Number("tokens_per_s_per_gpu");
  run.mfu_percent = read.Number("mfu_pct");
  run.hfu_percent = read.Number("hfu_pct");
  run.peak_memory_gib = read.Number("peak_mem_GiB");
  run.memory_kind =
      run.peak_memory_gib > 0 ? MemoryKindOf(read.Text("peak_mem_kind")) : MeasuredMemory::kNone;
  run.outcome = read.Outcome();
}

MeasuredRun ReadRun(const CsvTable& table, const CsvRow& row) {
  const RowReader read(table, row);
  MeasuredRun run;
  run.line = row.line;
  ReadTexts(read, run);
  if (run.id.empty()) {
    throw InputError(table.Where(row, "id"), "nothing", "a name for the row");
  }
  try {
    ReadNumbers(read, run);
  } catch (const InputError& error) {
    run.problem = error.what();
  }
  return run;
}

}  // namespace

std::string MeasuredRun::Source() const {
  const std::size_t skipped = id.starts_with("oom-") ? 4 : 0;
  const std::size_t end = id.find('-', skipped);
  return id.substr(skipped, end == std::string::npos ? end : end - skipped);
}

std::vector<MeasuredRun> ParseMeasuredRuns(std::string_view text, const std::string& file) {
  const CsvTable table = ParseCsv(text, file);
  CheckColumns(table);
  std::vector<MeasuredRun> runs;
  std::set<std::string> ids;
  for (const CsvRow& row : table.rows) {
    runs.push_back(ReadRun(table, row));
    if (!ids.insert(runs.back().id).second) {
      throw InputError(table.Where(row, "id"), "a second \"" + runs.back().id + '"',
                       "a different name for each row");
    }
  }
  return runs;
}

std::vector<MeasuredRun> ReadMeasuredRuns(const std::string& file) {
  return ParseMeasuredRuns(ReadTextFile(file), file);
}

}  // namespace shardwright
