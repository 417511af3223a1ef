// `shardwright estimate`: the front door. One command, an answer in two lines.

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "analysis/estimate.h"
#include "cli/command.h"
#include "cli/flow.h"
#include "cli/plan_options.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr const char* kEstimateAbout =
    R"(Says whether a model can be trained on some GPUs, how fast, and what it takes.

Examples:
  shardwright estimate llama-3-8b 8xH100 --seq 8192
  shardwright estimate llama-3-70b "2x8 H100" --seq 4096 --tokens 1e10
  shardwright estimate llama-3-70b "4x A100-80" --lora-rank 16 --seq 2048
  shardwright estimate ./config.json "l40s x4, nic 2x100 Gbit/s, nodes 2" --json

A short search over micro-batches, recomputation, sharding and offloading with PyTorch's
fully_shard. The command in its last line searches on and writes the plan. Exits with 1 where
nothing fits.)";

constexpr std::array<PositionalRow, 2> kEstimatePositionals = {{
    {"MODEL", "zoo name, config.json, checkpoint folder or model.json",
     "estimate needs a model, such as llama-3-8b", false, FileRole::kRead},
    {"CLUSTER", "8xH100, \"2x8 H100\", a catalog name, a JSON file or a description",
     "estimate needs a cluster, such as 8xH100", false, FileRole::kRead},
}};

constexpr std::array<FlagRow, 12> kEstimateFlags = {{
    {"--nodes", "N", "nodes in use"},
    {"--seq", "N", "tokens per sample (default: the model's, at most 2048)"},
    {"--tokens", "N", "tokens (images) of the whole run (default 1e9)"},
    {"--global-batch", "N", "samples per step over all ranks (default: ranks x micro-batch)"},
    {"--precision", "NAME",
     "bf16-mixed, fp16-mixed, fp32, bf16, or master/param/reduce (default bf16-mixed; with LoRA "
     "bf16)"},
    {"--optimizer", "NAME[:IMPL]", "as of plan (default adamw:foreach)"},
    {"--lora-rank", "N", "rank of LoRA adapters; everything else is frozen"},
    {"--lora-targets", "GLOBS",
     "linear modules that get adapters (default: those that PEFT takes, such as q_proj,v_proj)"},
    {"--frozen", "GLOBS", "parameters without gradient, such as 'model.embed_tokens.*'"},
    {"--kernel-set", "NAME", "software stack (default torch-eager)"},
    {"--profile", "NAME|FILE", "measured efficiencies (default: by GPU and kernel set)",
     FileRole::kRead},
    {"--memory-margin,--mem-margin", "X",
     "fraction of device memory to leave free (default: the error of the prediction of memory)"},
}};

// What nobody said, and how to say otherwise.
using Assumed = std::vector<std::string>;

struct Question {
  PlanOptions options;
  std::int64_t tokens = 1'000'000'000;
  Assumed assumed;
};

// NICs of nodes of which a description says nothing: one per GPU as makers' boxes have them.
const char* UsualNic(const std::string& architecture) {
  if (architecture == "ampere") {
    return "200 Gbit/s";
  }
  return architecture == "hopper" || architecture == "blackwell" || architecture == "cdna3" ||
                 architecture == "cdna4"
             ? "400 Gbit/s"
             : "100 Gbit/s";
}

// "2x8 H100" says nothing of the network between its nodes.
void AssumeNetwork(Question& question) {
  PlanOptions& options = question.options;
  try {
    (void)LoadCluster(options.cluster, options.nodes);
  } catch (const InputError&) {
    std::optional<Cluster> node;
    std::string with_nics = options.cluster;
    try {
      node = LoadCluster(options.cluster, 1);
      with_nics +=
          ", nic " + std::to_string(node->gpus_per_node) + "x" + UsualNic(node->gpu.architecture);
      (void)LoadCluster(with_nics, options.nodes);
    } catch (const InputError&) {
      node.reset();  // something else is wrong, of which the first error tells
    }
    if (!node) {
      throw;
    }
    options.cluster = with_nics;
    question.assumed.push_back("network: " + std::string(UsualNic(node->gpu.architecture)) +
                               " per GPU; a cluster such as \"" + with_nics + "\" says it");
  }
}

void AssumeLora(const Arguments& arguments, Question& question) {
  PlanOptions& options = question.options;
  if (options.job.lora_rank == 0) {
    return;
  }
  if (!arguments.Get("--precision").is_given()) {
    options.job.precision = {DType::kBf16, DType::kBf16, DType::kBf16};
    question.assumed.emplace_back("precision: bf16, weights and adapters; --precision");
  }
  if (!options.job.lora_targets.empty()) {
    return;
  }
  PlanOptions whole = options;
  whole.job.lora_rank = 0;
  options.job.lora_targets = DefaultLoraTargets(MakeJobFile(whole).model.model);
  if (options.job.lora_targets.empty()) {
    throw UsageError(
        "--lora-rank: needs --lora-targets for this model, whose modules have none of "
        "the names that PEFT adapts by default");
  }
  std::string names;
  for (const std::string& name : options.job.lora_targets) {
    names += (names.empty() ? "" : ",") + name;
  }
  question.assumed.push_back("adapters: on " + names + "; --lora-targets");
}

Question ReadQuestion(const Arguments& arguments) {
  Arguments as_plan = arguments;  // under the names that `plan` has for them
  as_plan.text["--model"] = arguments.Get("MODEL").text;
  as_plan.text["--cluster"] = arguments.Get("CLUSTER").text;
  Question question;
  question.options = ReadPlanOptions(as_plan);
  question.options.search = true;
  question.options.has_margin = arguments.Get("--memory-margin").is_given();
  arguments.Set("--tokens", question.tokens,
                [](const Flag& flag) { return ReadWholeNumber(flag, 1); });
  AssumeNetwork(question);
  AssumeLora(arguments, question);
  return question;
}

// "45 s", "3.2 h", "12.5 days".
std::string Duration(double seconds) {
  constexpr double kHour = 3600;
  std::array<char, 64> text{};
  if (seconds < 2 * kHour) {
    return Format(Seconds(seconds));
  }
  const bool is_days = seconds >= 48 * kHour;
  std::snprintf(text.data(), text.size(), is_days ? "%.3g days" : "%.3g h",
                seconds / (is_days ? 24 * kHour : kHour));
  return text.data();
}

std::string Rounded(double value) {
  return WithCommas(std::llround(value));
}

std::string Tokens(double count) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.3g", count);
  std::string short_form = text.data();
  const std::size_t exponent = short_form.find("e+");
  if (exponent != std::string::npos) {  // 1e+09 -> 1e9, as people write it
    const std::size_t digits = short_form.find_first_not_of('0', exponent + 2);
    short_form.erase(exponent + 1, digits - exponent - 1);
  }
  return short_form;
}

struct Totals {
  double tokens_per_s = 0;  // of all GPUs
  double seconds = 0;
  double gpu_hours = 0;
};

Totals TotalsOf(const Question& question, const Estimate& e) {
  const auto ranks = static_cast<double>(e.file.cluster.RankCount());
  Totals totals;
  totals.tokens_per_s = e.outcome.rates.tokens_per_second_per_gpu * ranks;
  totals.seconds = static_cast<double>(question.tokens) / totals.tokens_per_s;
  totals.gpu_hours = totals.seconds * ranks / 3600;
  return totals;
}

std::string Samples(const PlanFile& file) {
  return file.model.model.sequence_length > 0 ? "tokens" : "images";
}

// A word for the shell, quoted where it would not stay one.
std::string ShellWord(const std::string& word) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./,:=+-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
    return word;
  }
  std::string quoted = "'";
  for (const char c : word) {
    quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return quoted + "'";
}

// The command that searches on: the flags that were given, and what was chosen here.
std::string NextCommand(const Arguments& arguments, const Question& question, const Estimate& e) {
  std::string command = "shardwright plan --model " + ShellWord(question.options.model) +
                        " --cluster " + ShellWord(question.options.cluster);
  for (const FlagRow& row : kEstimateFlags) {
    const std::string name = LongName(row);
    const Flag flag = arguments.Get(name);
    const bool is_set_below = name == "--global-batch" || name == "--tokens" ||
                              name == "--precision" || name == "--lora-targets";
    if (flag.is_given() && !is_set_below) {
      command += " " + name + " " + ShellWord(flag.text);
    }
  }
  const bool is_lora = e.file.job.lora_rank > 0;
  const Flag precision = arguments.Get("--precision");
  if (precision.is_given() || is_lora) {
    command += " --precision " + (precision.is_given() ? ShellWord(precision.text) : "bf16");
  }
  if (is_lora) {
    std::string targets;
    for (const std::string& target : e.file.job.lora_targets) {
      targets += (targets.empty() ? "" : ",") + target;
    }
    command += " --lora-targets " + ShellWord(targets);
  }
  return command + " --global-batch " + std::to_string(e.file.job.global_batch) + " -o plan.json";
}

std::string Title(const Estimate& e) {
  const PlanFile& file = e.file;
  const std::int64_t nodes = file.cluster.node_count;
  const std::string what =
      file.job.lora_rank > 0 ? " with LoRA of rank " + std::to_string(file.job.lora_rank) : "";
  const bool is_inline = file.cluster.name == "inline";
  const std::string gpus =
      std::to_string(file.cluster.RankCount()) + " x " + PrintableLine(file.cluster.gpu.name);
  const std::string where =
      is_inline ? gpus + (nodes > 1 ? ", " + WithCommas(nodes) + " nodes" : "")
                : WithCommas(nodes) + " x " + PrintableLine(file.cluster.name) + " (" + gpus + ")";
  return PrintableLine(file.model.model.name) + what + " on " + where;
}

std::string OffloadWords(const Offload& offload) {
  std::string words;
  const auto add = [&](bool is_on, const char* what) {
    words += is_on ? (words.empty() ? "" : " and ") + std::string(what) : "";
  };
  add(offload.parameters, "parameters");
  add(offload.optimizer || offload.moments, "optimizer states");
  add(offload.activations, "activations");
  return words.empty() ? "" : ", " + words + " on the host";
}

std::string ShardWords(const Plan& plan) {
  if (plan.shard_size == 1) {
    return "a whole copy per GPU";
  }
  return plan.replicate_size == 1
             ? "one copy over all " + WithCommas(plan.shard_size) + " GPUs"
             : "a copy per " + WithCommas(plan.shard_size) + " GPUs (hybrid sharding)";
}

// What a plan that offloads needs of nodes whose description says nothing of their memory.
void AssumeHostMemory(const Estimate& e, Assumed& assumed) {
  if (e.fits && e.file.plan.offload != Offload() && e.file.cluster.node.host_memory == Bytes(0)) {
    assumed.push_back("host memory: the " + Format(e.outcome.host_peak) +
                      " per node that this takes; a cluster such as \"..., host 1 TiB\" says it");
  }
}

void AddAssumed(const Question& question, Table& table) {
  for (std::size_t i = 0; i < question.assumed.size(); ++i) {
    table.Row({i == 0 ? "assumed" : "", question.assumed[i]});
  }
}

std::string FitText(const Arguments& arguments, const Question& question, const Estimate& e) {
  const Totals totals = TotalsOf(question, e);
  const PlanFile& file = e.file;
  const std::string unit = Samples(file);
  // How to shard is a question of several nodes.
  const std::string sharding = file.cluster.node_count > 1 ? ", " + ShardWords(file.plan) : "";
  std::string text = Title(e) + ": fits, with micro-batch " + WithCommas(file.plan.micro_batch) +
                     " " + RecomputeWords(file) + OffloadWords(file.plan.offload) + sharding + "\n";
  text += Rounded(e.outcome.rates.tokens_per_second_per_gpu) + " " + unit + "/s per GPU +- " +
          Percent(e.confidence.band) + "; " + Tokens(static_cast<double>(question.tokens)) + " " +
          unit + " take " + Duration(totals.seconds) + ", " + Rounded(totals.gpu_hours) +
          " GPU-hours\n\n";
  Table table({kLeft, kLeft});
  table.Row({"memory", Format(e.outcome.DeviceTotal()) + " of " + Format(e.limit) + " per GPU"});
  table.Row({"step", Format(ToSeconds(e.outcome.step_time)) + " for " +
                         WithCommas(file.job.global_batch) + " samples of " +
                         WithCommas(file.model.model.tokens_per_sample) + " " + unit +
                         (file.plan.accumulation > 1
                              ? ", in " + WithCommas(file.plan.accumulation) + " micro-batches"
                              : "")});
  table.Row({"MFU", Percent(e.outcome.rates.mfu)});
  table.Row({"sharding", ShardWords(file.plan)});
  table.Row({"profile", e.confidence.text});
  AddAssumed(question, table);
  table.Row({"next", NextCommand(arguments, question, e)});
  return text + table.Text(2);
}

// "239 GiB too much of 76.9 GiB".
std::string MissingWords(const Candidate& least, Bytes limit) {
  if (least.status == CandidateStatus::kOverHost) {
    return Format(least.deficit) + " too much of the nodes' host memory";
  }
  return least.deficit > Bytes(0) ? Format(least.deficit) + " too much of " + Format(limit)
                                  : "the allocator finds no room for " + Format(least.memory) +
                                        " in pieces within " + Format(limit);
}

std::string MisfitText(const Question& question, const Estimate& e) {
  const Candidate& least = e.floor.candidate;
  std::string text = Title(e) + ": does not fit, " + MissingWords(least, e.limit) +
                     " even with the least memory found\n";
  std::string changes;
  for (const Fix& fix : e.fixes) {
    changes += (changes.empty() ? "" : ", or ") + fix.change;
  }
  text += changes.empty() ? "No single change that was tried makes it fit.\n"
                          : "It fits with " + changes + "\n";
  text += "\n";
  Table table({kLeft, kLeft});
  table.Row({"least", Format(least.Needs()) + " per GPU: " + least.family + ", " + least.label});
  for (const Fix& fix : e.fixes) {
    table.Row({fix.change, Format(fix.step_time) + " per step, " + Format(fix.memory) +
                               " per GPU: " + fix.label});
  }
  AddAssumed(question, table);
  return text + table.WrappedText(2);
}

Json FixesJson(const std::vector<Fix>& fixes) {
  Json json = Json::array();
  for (const Fix& fix : fixes) {
    json.push_back({{"change", fix.change},
                    {"step_time_s", fix.step_time.value},
                    {"memory_bytes", fix.memory.value},
                    {"label", fix.label}});
  }
  return json;
}

std::string EstimateJson(const Arguments& arguments, const Question& question, const Estimate& e) {
  const PlanFile& file = e.file;
  Json json;
  json["schema"] = "shardwright-estimate";
  json["schema_version"] = 1;
  json["model"] = file.model.model.name;
  json["cluster"] = file.cluster.name;
  json["gpu"] = file.cluster.gpu.name;
  json["nodes"] = file.cluster.node_count;
  json["ranks"] = file.cluster.RankCount();
  json["fits"] = e.fits;
  json["memory_limit_bytes"] = e.limit.value;
  if (e.fits) {
    const Totals totals = TotalsOf(question, e);
    json["micro_batch"] = file.plan.micro_batch;
    json["accumulation"] = file.plan.accumulation;
    json["global_batch"] = file.job.global_batch;
    json["sequence_length"] = file.job.sequence_length;
    json["recompute"] = RecomputeWords(file);
    json["shard_size"] = file.plan.shard_size;
    json["replicate_size"] = file.plan.replicate_size;
    json["step_time_s"] = ToSeconds(e.outcome.step_time).value;
    json["tokens_per_s_per_gpu"] = e.outcome.rates.tokens_per_second_per_gpu;
    json["band"] = e.confidence.band;
    json["mfu"] = e.outcome.rates.mfu;
    json["memory_bytes"] = e.outcome.DeviceTotal().value;
    json["tokens"] = question.tokens;
    json["total_s"] = totals.seconds;
    json["gpu_hours"] = totals.gpu_hours;
    json["profile"] = file.profile.name;
    json["confidence"] = e.confidence.text;
    json["next"] = NextCommand(arguments, question, e);
  } else {
    json["deficit_bytes"] = e.floor.candidate.deficit.value;
    json["least_memory_bytes"] = e.floor.candidate.Needs().value;
    json["fixes"] = FixesJson(e.fixes);
  }
  json["assumed"] = question.assumed;
  return json.dump(2) + "\n";
}

// A model that is frozen but for adapters is the change that helps most often.
void TryLora(const Question& question, Estimate& estimate) {
  Question with = question;
  with.options.job.lora_rank = 16;
  with.options.job.precision = {DType::kBf16, DType::kBf16, DType::kBf16};
  with.options.job.lora_targets = DefaultLoraTargets(estimate.file.model.model);
  if (question.options.job.lora_rank > 0 || with.options.job.lora_targets.empty()) {
    return;
  }
  const Estimate lora = EstimateJob(MakeJobFile(with.options), estimate.file.cluster.RankCount());
  if (lora.fits) {
    estimate.fixes.push_back({"--lora-rank 16", ToSeconds(lora.outcome.step_time),
                              lora.outcome.DeviceTotal(), RecomputeWords(lora.file)});
  }
}

int RunEstimateCommand(const Arguments& arguments) {
  Question question = ReadQuestion(arguments);
  const PlanFile problem = MakeJobFile(question.options);
  const std::int64_t ranks = problem.cluster.RankCount();
  if (question.options.global_batch % ranks != 0) {
    throw InputError("--global-batch: got " + std::to_string(question.options.global_batch) +
                     ", expected a multiple of " + std::to_string(ranks) +
                     " ranks x micro-batch 1");
  }
  Estimate estimate = EstimateJob(problem, question.options.global_batch);
  if (!estimate.fits) {
    TryLora(question, estimate);
  }
  AssumeHostMemory(estimate, question.assumed);
  if (arguments.IsJson()) {
    arguments.Print(EstimateJson(arguments, question, estimate));
  } else {
    arguments.Print(estimate.fits ? FitText(arguments, question, estimate)
                                  : MisfitText(question, estimate));
  }
  return estimate.fits ? kExitOk : kExitNo;
}

}  // namespace

extern const Command kEstimateCommand;
const Command kEstimateCommand = {
    "estimate", kEstimateAbout, kEstimatePositionals, kEstimateFlags, {}, RunEstimateCommand};

}  // namespace shardwright
