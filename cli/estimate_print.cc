#include "cli/estimate_print.h"

#include <cmath>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/flow.h"
#include "cli/plan_search.h"
#include "cli/rollout_print.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/text.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

std::string Rounded(double value) {
  return WithCommas(std::llround(value));
}

// No more digits than an estimate has: 0.043, 7.4, 812, 29,200,000.
std::string Few(double value) {
  if (value < 10) {
    return Fixed(value, value < 1 ? "%.2g" : "%.1f");
  }
  const double unit = std::pow(10, std::max(0.0, std::floor(std::log10(value)) - 2));
  return Rounded(std::round(value / unit) * unit);
}

std::string Samples(const PlanFile& file) {
  return file.model.sequence_length > 0 ? "tokens" : "images";
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
  const Command estimate = LoadCommand("estimate");
  for (const FlagRow& row : estimate.flags) {
    const std::string name = LongName(row);
    const Flag flag = arguments.Get(name);
    const bool is_set_below = name == "--global-batch" || name == "--tokens" ||
                              name == "--deadline" || name == "--precision" || name == "--price" ||
                              name == "--lora-targets" || name == "--solve";
    if (flag.is_given() && !is_set_below) {
      command += " " + name + " " + ShellWord(flag.text);
    }
  }
  if (const Flag gpus = arguments.Get("--gpus"); gpus.is_given()) {  // of --solve
    command += " --gpus " + gpus.text;
  }
  const bool is_lora = e.file.job.lora_rank > 0;
  const Flag precision = arguments.Get("--precision");
  if (precision.is_given() || is_lora) {
    command += " --precision " +
               (precision.is_given()
                    ? ShellWord(precision.text)
                    : std::string(NameIn(kTrainingDTypeNames, e.file.job.precision.param)));
  }
  if (is_lora) {
    std::string targets;
    for (const std::string& target : e.file.job.lora_targets) {
      targets += (targets.empty() ? "" : ",") + target;
    }
    command += " --lora-targets " + ShellWord(targets);
  }
  const FixedChoices& fixed = question.given.fixed;
  command += fixed.micro_batch || fixed.offload ? " --search" : "";
  return command + " --global-batch " + std::to_string(e.file.job.global_batch) + " -o plan.json";
}

std::string Title(const Estimate& e) {
  const PlanFile& file = e.file;
  const Cluster& cluster = file.cluster;
  const std::string what =
      file.job.lora_rank > 0 ? " with LoRA of rank " + std::to_string(file.job.lora_rank) : "";
  const std::string where =
      cluster.name == "inline"
          ? DescribedCluster(cluster)
          : WithCommas(cluster.node_count) + " x " + PrintableLine(cluster.name) + " (" +
                std::to_string(cluster.RankCount()) + " x " + PrintableLine(cluster.gpu.name) + ")";
  return PrintableLine(file.model.name) + what + " on " + where;
}

}  // namespace

std::string OffloadWords(const Offload& offload) {
  std::string words;
  const auto add = [&](bool is_on, const char* what) {
    words += is_on ? (words.empty() ? "" : " and ") + std::string(what) : "";
  };
  add(offload.parameters, "parameters");
  add(offload.optimizer || offload.moments, "optimizer states");
  add(offload.activations, "activations");
  return words.empty() ? "" : "; " + words + " on the host";
}

namespace {

std::string ShardWords(const Plan& plan) {
  if (plan.shard_size == 1) {
    return "a whole copy per GPU";
  }
  return plan.replicate_size == 1
             ? "one copy over all " + WithCommas(plan.shard_size) + " GPUs"
             : "a copy per " + WithCommas(plan.shard_size) + " GPUs (hybrid sharding)";
}

std::string Nodes(std::int64_t count) {
  return WithCommas(count) + (count == 1 ? " node" : " nodes");
}

// "30 days; 11 nodes take 31.2 days".
std::string DeadlineWords(const MetDeadline& met) {
  const std::string limit =
      Duration(met.limit.value) + ", by the slow end of the band and without failures (goodput)";
  if (met.fewer_nodes == 0) {
    return limit;
  }
  return limit + "; " + Nodes(met.fewer_nodes) +
         (met.fewer_time
              ? (met.fewer_nodes == 1 ? " takes " : " take ") + Duration(met.fewer_time->value)
              : " cannot hold it");
}

void AddAssumed(const Question& question, Table& table) {
  for (const auto& [name, text] :
       {std::pair("AdamW", question.optimizer), std::pair("experts", question.experts)}) {
    if (!text.empty()) {
      table.Row({name, text});
    }
  }
  for (std::size_t i = 0; i < question.assumed.size(); ++i) {
    table.Row({i == 0 ? "assumed" : "", question.assumed[i]});
  }
}

// "sliding window of 4,096 tokens in 24 of 48 layers"; empty: none is shorter than a sample.
std::string WindowWords(const Model& model) {
  std::int64_t layers = 0, narrow = 0, window = 0;
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    const bool is_attention = spec.kind == OpKind::kAttention;
    const bool is_narrow = is_attention && spec.window > 0 && spec.window < spec.seq_k;
    layers += is_attention ? 1 : 0;
    narrow += is_narrow ? 1 : 0;
    window = is_narrow ? spec.window : window;
  }
  return narrow == 0 ? ""
                     : "sliding window of " + WithCommas(window) + " tokens in " +
                           WithCommas(narrow) + " of " + WithCommas(layers) + " layers";
}

std::string FitText(const Arguments& arguments, const Question& question, const Estimate& e) {
  const Totals totals = TotalsOf(question, e);
  const PlanFile& file = e.file;
  const std::string unit = Samples(file);
  // How to shard is a question of several nodes.
  const std::string sharding = file.cluster.node_count > 1 ? "; " + ShardWords(file.plan) : "";
  const std::int64_t retries = e.outcome.retries_per_step;
  constexpr std::int64_t kEdge = 99;  // percent of the memory: no prediction is closer
  const bool is_edge = retries > 0 || e.outcome.DeviceTotal().value / kEdge > e.limit.value / 100;
  std::string text = Title(e) + (is_edge ? ": fits at the edge" : ": fits") + " with micro-batch " +
                     WithCommas(file.plan.micro_batch) + "; " + RecomputeWords(file) +
                     OffloadWords(file.plan.offload) + sharding + "\n";
  text += Rounded(e.outcome.rates.tokens_per_second_per_gpu) + " " + unit + "/s per GPU +- " +
          Percent(e.confidence.band) +
          (e.phases && !e.phases->generation       ? ", without its generation; "
           : arguments.Get("--lengths").is_given() ? ", all samples as long as --seq; "
                                                   : "; ") +
          Tokens(static_cast<double>(question.tokens)) + " " + unit + " take " +
          Duration(totals.seconds) + ", " + Few(totals.gpu_hours) + " GPU-hours" +
          (question.price > 0 ? ", " + Few(totals.gpu_hours * question.price) + " at " +
                                    Fixed(question.price, "%.6g") + " per GPU-hour"
                              : "") +
          "\n\n";
  Table table({kLeft, kLeft});
  table.Row({"memory", Format(e.outcome.DeviceTotal()) + " of " + Format(e.limit) + " per GPU" +
                           (retries > 0 ? "; the allocator runs out and retries, " +
                                              WithCommas(retries) + " a step"
                                        : "")});
  table.Row({"step",
             Format(e.phases ? e.phases->step : e.outcome.step_time) + " for " +
                 WithCommas(file.job.global_batch) +
                 (file.job.global_batch == 1 ? " sample of " : " samples of ") +
                 WithCommas(file.model.tokens_per_sample) + " " + unit +
                 (file.plan.accumulation > 1
                      ? ", in " + WithCommas(file.plan.accumulation) + " micro-batches"
                      : "") +
                 (question.options.global_batch == 0 ? "; --global-batch N says otherwise" : "")});
  if (e.phases) {
    AddPhases(file, *e.phases, table);
  }
  if (const std::string window = WindowWords(file.model); !window.empty()) {
    table.Row({"attention", window});
  }
  table.Row({"MFU", Percent(e.outcome.rates.mfu)});
  table.Row({"sharding", ShardWords(file.plan)});
  if (e.offloading > 0) {
    table.Row(
        {"offloading", Rounded(e.offloading) + " " + unit + "/s per GPU, " +
                           Percent(e.offloading / e.outcome.rates.tokens_per_second_per_gpu - 1) +
                           " more, which is within the error of that prediction"});
  }
  if (file.cluster.node_count > 1) {
    table.Row({"network", Fixed(8e-9 * NodeNetworkRate(file.cluster).value /
                                    static_cast<double>(file.cluster.gpus_per_node),
                                "%.4g") +
                              " Gbit/s per GPU, each way"});
  }
  table.Row({"how sure", HowSure(e.confidence)});
  if (question.deadline) {
    table.Row({"deadline", DeadlineWords(*question.deadline)});
  }
  AddAssumed(question, table);
  table.Row({"next", NextCommand(arguments, question, e)});
  return text + table.Text(2);
}

// "239 GiB too much of 76.9 GiB".
std::string MissingWords(const MemoryFloor& floor, Bytes limit) {
  const Candidate& least = floor.candidate;
  const Bytes host = floor.host_deficit;
  const std::string of_host = Format(host) + " too much of the nodes' host memory";
  if (least.status == CandidateStatus::kOverHost) {
    return of_host;
  }
  return least.deficit > Bytes(0) ? Format(least.deficit) + " too much of " + Format(limit) +
                                        (host > Bytes(0) ? " or, offloading, " + of_host : "")
                                  : "the allocator finds no room for " + Format(least.memory) +
                                        " in pieces within " + Format(limit);
}

std::string MisfitText(const Question& question, const Estimate& e) {
  const Candidate& least = e.floor.candidate;
  std::string text = Title(e) + ": does not fit, " + MissingWords(e.floor, e.limit) +
                     " even with the least memory found\n";
  std::string changes;
  for (const Fix& fix : e.fixes) {
    changes += (changes.empty() ? "" : ", or ") + fix.change;
  }
  text += changes.empty()
              ? "No single change that was tried makes it fit.\n"
              : "It fits " + std::string(changes.starts_with("without") ? "" : "with ") + changes +
                    "\n";
  text += "\n";
  Table table({kLeft, kLeft});
  table.Row({"least", Format(least.Needs()) + " per GPU: " + least.family + ", " + least.label});
  if (const Rollout& rollout = e.file.job.rollout; rollout.engine > 0 && !rollout.sleeps) {
    table.Row(
        {"engine", Format(EngineMemory(e.file)) + " of each GPU; --mode grpo,sleep frees it"});
  }
  for (const Fix& fix : e.fixes) {
    table.Row({fix.change, Format(fix.step_time) + " per step, " + Format(fix.memory) +
                               " per GPU: " + fix.label});
  }
  AddAssumed(question, table);
  return text + table.WrappedText(2);
}

}  // namespace

std::string Duration(double seconds) {
  constexpr double kHour = 3600;
  if (seconds < 2 * kHour) {
    return Format(Seconds(seconds));
  }
  constexpr double kDay = 24 * kHour, kYear = 365.25 * kDay;
  const std::pair<double, const char*> unit = seconds >= 2 * kYear  ? std::pair(kYear, "years")
                                              : seconds >= 2 * kDay ? std::pair(kDay, "days")
                                                                    : std::pair(kHour, "h");
  return Fixed(seconds / unit.first, "%.3g ") + unit.second;
}

std::string Tokens(double count) {
  std::string short_form = Fixed(count, "%.3g");
  const std::size_t exponent = short_form.find("e+");
  if (exponent != std::string::npos) {  // 1e+09 -> 1e9, as people write it
    const std::size_t digits = short_form.find_first_not_of('0', exponent + 2);
    short_form.erase(exponent + 1, digits - exponent - 1);
  }
  return short_form;
}

Totals TotalsOf(const Question& question, const Estimate& e) {
  const auto ranks = static_cast<double>(e.file.cluster.RankCount());
  Totals totals;
  totals.tokens_per_s = e.outcome.rates.tokens_per_second_per_gpu * ranks;
  totals.seconds = static_cast<double>(question.tokens) / totals.tokens_per_s;
  totals.gpu_hours = totals.seconds * ranks / 3600;
  return totals;
}

std::string EstimateText(const Arguments& arguments, const Question& question, const Estimate& e) {
  const std::string solved = question.solved.empty() ? "" : question.solved + "\n";
  return solved + (e.fits ? FitText(arguments, question, e) : MisfitText(question, e));
}

std::string EstimateJson(const Arguments& arguments, const Question& question, const Estimate& e) {
  const PlanFile& file = e.file;
  Json json = ReportHead("shardwright-estimate");
  json["model"] = file.model.name;
  json["cluster"] = file.cluster.name;
  json["gpu"] = file.cluster.gpu.name;
  json["nodes"] = file.cluster.node_count;
  json["ranks"] = file.cluster.RankCount();
  json["fits"] = e.fits;
  if (!question.solved.empty()) {
    json["solved"] = question.solved;
  }
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
    json["step_time_s"] = (e.phases ? e.phases->step : e.outcome.step_time).value;
    if (e.phases) {
      json["phases"] = PhasesJson(*e.phases);
    }
    json["tokens_per_s_per_gpu"] = e.outcome.rates.tokens_per_second_per_gpu;
    json["band"] = e.confidence.band;
    json["mfu"] = e.outcome.rates.mfu;
    json["memory_bytes"] = e.outcome.DeviceTotal().value;
    json["allocator_retries_per_step"] = e.outcome.retries_per_step;
    json["tokens"] = question.tokens;
    json["total_s"] = totals.seconds;
    json["gpu_hours"] = totals.gpu_hours;
    if (question.price > 0) {
      json["cost"] = totals.gpu_hours * question.price;
    }
    if (question.deadline) {
      const MetDeadline& met = *question.deadline;
      json["deadline_s"] = met.limit.value;
      json["fewer_nodes"] = met.fewer_nodes;
      json["fewer_total_s"] = met.fewer_time ? Json(met.fewer_time->value) : Json();
    }
    json["offload_tokens_per_s_per_gpu"] = e.offloading;
    json["profile"] = file.profile.name;
    json["confidence"] = e.confidence.text;
    json["next"] = NextCommand(arguments, question, e);
  } else {
    json["deficit_bytes"] = e.floor.candidate.deficit.value;
    json["least_memory_bytes"] = e.floor.candidate.Needs().value;
    json["fixes"] = FixesJson(e.fixes);
  }
  json["optimizer"] = question.optimizer;
  json["experts"] = question.experts;
  json["assumed"] = question.assumed;
  return json.dump(2) + "\n";
}

}  // namespace shardwright
