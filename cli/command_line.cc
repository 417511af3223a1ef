// The only file that includes CLI11: it takes seconds to compile.

#include "cli/command_line.h"

#include <array>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/exit_codes.h"
#include "cli/flag_values.h"
#include "core/error.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMaxRanks = std::int64_t{1} << 24;
constexpr std::int64_t kMaxSequence = std::int64_t{1} << 30;
constexpr std::int64_t kMaxBatch = std::int64_t{1} << 40;
constexpr std::int64_t kMaxAccumulation = 65535;
constexpr std::int64_t kMaxMicroBatch = std::int64_t{1} << 24;

constexpr const char* kVersion = "shardwright 0.1.0";

constexpr const char* kAbout = R"(Plans and simulates Fully Sharded Data Parallel training.

Examples:
  shardwright list models
  shardwright plan --model llama-3-8b --cluster dgx-h100 --nodes 2 --seq 8192 -o plan.json
  shardwright simulate plan.json --trace trace.json.gz
  shardwright inspect plan.json

Exit codes: 0 ok, 1 the answer is no, 2 usage, 3 bad input, 4 environment, 5 run-time failure,
70 a bug of Shardwright, 130 interrupted.)";

constexpr const char* kListAbout = R"(Lists what ships with Shardwright.

Examples:
  shardwright list models
  shardwright list clusters --json)";

constexpr const char* kInspectAbout = R"(Shows what Shardwright understands of a file or a name.

Examples:
  shardwright inspect llama-3-8b
  shardwright inspect path/to/config.json
  shardwright inspect dgx-h100
  shardwright inspect plan.json --program
  shardwright inspect plan.json --trace trace.json.gz)";

constexpr const char* kPlanAbout = R"(Writes a plan: a model, a cluster and all choices in between.

Examples:
  shardwright plan --model llama-3-8b --cluster dgx-h100 --nodes 2 --seq 8192 -o plan.json
  shardwright plan --model llama-3-70b --cluster dgx-h100 --nodes 128 --seq 8192 \
    --micro-batch 1 --global-batch 1024 --dialect fsdp2 --recompute full --wrap block -o p.json
  shardwright plan --model llama-2-7b --cluster "a100-80 x8, nvlink 300 GB/s, nic 8x200 Gbit/s" \
    --wrap size:1e8 --dialect fsdp1 | shardwright simulate -)";

constexpr const char* kSimulateAbout = R"(Predicts time and memory of one training step of a plan.

Examples:
  shardwright simulate plan.json
  shardwright simulate plan.json --trace trace.json.gz --json

Exits with 1 when the plan does not fit in the memory of the device.)";

struct FlagRow {
  const char* name;
  const char* value;
  const char* help;
};

constexpr std::array<FlagRow, 35> kPlanFlags = {{
    {"--model", "NAME|FILE", "zoo name, config.json, checkpoint folder or model.json (required)"},
    {"--cluster", "NAME|FILE|TEXT",
     "catalog name, JSON file, or inline: 'h100-80 x8, nvlink 450 GB/s, nic 8x400 Gbit/s' "
     "(required)"},
    {"--nodes", "N", "nodes in use"},
    {"--gpus", "N", "GPUs in use of each node"},
    {"--kernel-set", "NAME", "software stack (default torch-eager)"},
    {"--profile", "NAME|FILE", "measured efficiencies (default: by GPU and kernel set)"},
    {"--mode", "train|forward", "what a step does (default train)"},
    {"--seq", "N", "tokens per sample (default: the model's, at most 2048)"},
    {"--micro-batch", "N", "samples per rank and pass (default 1)"},
    {"--accumulation", "N", "micro-batches per step (default: from --global-batch, or 1)"},
    {"--global-batch", "N", "samples per step over all ranks"},
    {"--sync", "every|last|replicate_last", "which micro-batches reduce gradients (default every)"},
    {"--dialect", "fsdp2|fsdp1|ddp|native", "whose rules to follow (default fsdp2)"},
    {"--wrap", "RULE",
     "units: block, torchtitan, accelerate, size:1e8, root or a .json file (default block)"},
    {"--shard", "N", "ranks that share one copy of the parameters (default: all)"},
    {"--replicate", "N", "copies of the parameters (default 1; ddp: all ranks)"},
    {"--reshard", "always|never|N",
     "what units do after forward: free, keep, or keep one copy per N ranks (default: free, but "
     "keep root and [norm, head])"},
    {"--recompute", "none|full|selective[:N]",
     "activation checkpointing of each block; selective keeps attention and every N-th linear "
     "(default none, N 2)"},
    {"--offload", "LIST", "none, or some of parameters,optimizer,activations (default none)"},
    {"--precision", "NAME",
     "bf16-mixed, fp16-mixed, fp32, bf16, or master/param/reduce (default bf16-mixed = "
     "fp32/bf16/fp32)"},
    {"--optimizer", "NAME[:IMPL]",
     "sgd, momentum, adam, adamw or adadelta; foreach, fused or for_loop (default adamw:foreach)"},
    {"--weight-decay", "on|off", "(default on)"},
    {"--clip", "on|off", "gradient clipping by global norm (default on)"},
    {"--frozen", "GLOBS", "parameters without gradient, such as 'model.embed_tokens.*'"},
    {"--lora-rank", "N", "rank of LoRA adapters; everything else is frozen"},
    {"--lora-targets", "GLOBS", "linear modules that get adapters"},
    {"--memory-margin", "X", "fraction of device memory to leave free (default 0)"},
    {"--backward-prefetch", "pre|post|none", "fsdp1 (default pre)"},
    {"--forward-prefetch", "on|off", "fsdp1 (default off)"},
    {"--limit-all-gathers", "on|off", "fsdp1 (default on)"},
    {"--use-orig-params", "on|off", "fsdp1 (default on)"},
    {"--in-flight", "N", "native: gathered units alive at once (default 2)"},
    {"--first-bucket", "SIZE", "ddp (default '1 MiB')"},
    {"--bucket", "SIZE", "ddp (default '25 MiB')"},
    {"--output,-o", "FILE", "where the plan goes (default -, standard output)"},
}};

constexpr std::array<FlagRow, 3> kSimulateFlags = {{
    {"--trace", "FILE", "write a trace for Perfetto; compressed when FILE ends in .gz"},
    {"--trace-profile", "perfetto|hta", "flavour of the trace (default perfetto)"},
    {"--contention", "on|off",
     "whether ops that run at the same time slow each other down (default on)"},
}};

constexpr std::array<std::string_view, 5> kListNames = {"models", "clusters", "gpus", "kernel-sets",
                                                        "profiles"};

// What CLI11 fills in. Texts are converted afterwards, so that all errors read alike.
struct Raw {
  std::map<std::string, std::string> text;
  bool json = false;
  bool program = false;
  bool exact = false;

  [[nodiscard]] Flag Get(const std::string& name) const { return {name, text.at(name)}; }
};

void AddFlags(CLI::App& app, std::span<const FlagRow> rows, Raw& raw) {
  for (const FlagRow& row : rows) {
    const std::string name(row.name);
    const std::string key = name.substr(0, name.find(','));
    app.add_option(name, raw.text[key], row.help)->type_name(row.value)->type_size(1);
  }
}

CLI::App* AddCommand(CLI::App& app, const char* name, const std::string& about, Raw& raw) {
  CLI::App* command = app.add_subcommand(name, about.substr(0, about.find('\n')));
  command->allow_extras();
  command->add_flag("--json", raw.json, "machine-readable output");
  return command;
}

// What it does and examples first, then the flags.
std::string HelpOf(CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  if (chosen.empty()) {
    app.description("");
    return std::string(kAbout) + "\n\n" + app.help();
  }
  CLI::App& command = *chosen[0];
  const std::string name = command.get_name();
  const char* about = name == "list"      ? kListAbout
                      : name == "inspect" ? kInspectAbout
                      : name == "plan"    ? kPlanAbout
                                          : kSimulateAbout;
  command.description("");
  return std::string(about) + "\n\n" + command.help("shardwright");
}

std::vector<std::string> FlagNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back("--" + name);
    }
  }
  return names;
}

std::string WithHint(const std::string& text, const std::string& hint) {
  return hint.empty() ? text : text + "; " + hint;
}

// Words that no flag and no argument took.
void CheckExtras(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const std::vector<std::string> extras = app.remaining(true);
  if (chosen.empty()) {
    std::vector<std::string> names;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(command->get_name());
    }
    if (extras.empty()) {
      throw UsageError("no command given, expected list, inspect, plan or simulate");
    }
    const bool is_flag = extras[0].starts_with("-");
    throw UsageError(WithHint((is_flag ? "unknown flag \"" : "unknown command \"") + extras[0] +
                                  (is_flag ? "\"" : "\", expected list, inspect, plan or simulate"),
                              DidYouMean(extras[0], is_flag ? FlagNames(app) : names)));
  }
  for (const std::string& extra : extras) {
    if (extra.starts_with("-") && extra != "-") {
      const std::string name = extra.substr(0, extra.find('='));
      throw UsageError(
          WithHint("unknown flag \"" + name + "\" of shardwright " + chosen[0]->get_name(),
                   DidYouMean(name, FlagNames(*chosen[0]))));
    }
  }
  if (!extras.empty()) {
    throw UsageError("unexpected argument \"" + extras[0] + "\" of shardwright " +
                     chosen[0]->get_name());
  }
}

void Require(const Flag& flag, const std::string& command) {
  if (!flag.is_given()) {
    throw UsageError(flag.name + " is required; see shardwright " + command + " --help");
  }
}

// Assigns the value of a flag that was given.
template <class T, class Read>
void Set(const Raw& raw, const std::string& name, T& target, Read read) {
  const Flag flag = raw.Get(name);
  if (flag.is_given()) {
    target = read(flag);
  }
}

void SetCount(const Raw& raw, const std::string& name, std::int64_t max, std::int64_t& target) {
  Set(raw, name, target, [max](const Flag& flag) { return ReadCount(flag, 1, max); });
}

template <class E>
void SetChoice(const Raw& raw, const std::string& name, NameList names, E& target) {
  Set(raw, name, target,
      [names](const Flag& flag) { return static_cast<E>(ReadChoice(flag, names)); });
}

void ReadJobFlags(const Raw& raw, Job& job) {
  job.sequence_length = 0;
  SetChoice(raw, "--mode", kJobModeNames, job.mode);
  SetCount(raw, "--seq", kMaxSequence, job.sequence_length);
  Set(raw, "--precision", job.precision, ReadPrecision);
  Set(raw, "--optimizer", job.optimizer, ReadOptimizer);
  Set(raw, "--weight-decay", job.optimizer.weight_decay, ReadSwitch);
  Set(raw, "--clip", job.clip_gradients, ReadSwitch);
  Set(raw, "--frozen", job.frozen, ReadList);
  SetCount(raw, "--lora-rank", std::int64_t{1} << 20, job.lora_rank);
  Set(raw, "--lora-targets", job.lora_targets, ReadList);
  Set(raw, "--memory-margin", job.memory_margin, ReadFraction);
}

void ReadPlanFlags(const Raw& raw, Plan& plan) {
  SetChoice(raw, "--dialect", kDialectNames, plan.dialect);
  SetCount(raw, "--micro-batch", kMaxMicroBatch, plan.micro_batch);
  SetChoice(raw, "--sync", kSyncNames, plan.sync);
  Set(raw, "--offload", plan.offload, ReadOffload);
  SetChoice(raw, "--backward-prefetch", kBackwardPrefetchNames, plan.backward_prefetch);
  Set(raw, "--forward-prefetch", plan.forward_prefetch, ReadSwitch);
  Set(raw, "--limit-all-gathers", plan.limit_all_gathers, ReadSwitch);
  Set(raw, "--use-orig-params", plan.use_orig_params, ReadSwitch);
  SetCount(raw, "--in-flight", kMaxAccumulation, plan.in_flight);
  Set(raw, "--first-bucket", plan.first_bucket, ReadBytes);
  Set(raw, "--bucket", plan.bucket, ReadBytes);
}

PlanCommand ToPlanCommand(const Raw& raw) {
  Require(raw.Get("--model"), "plan");
  Require(raw.Get("--cluster"), "plan");
  PlanCommand options;
  options.model = raw.text.at("--model");
  options.cluster = raw.text.at("--cluster");
  const auto copy = [](const Flag& flag) { return flag.text; };
  Set(raw, "--kernel-set", options.kernel_set, copy);
  Set(raw, "--profile", options.profile, copy);
  Set(raw, "--wrap", options.wrap, copy);
  Set(raw, "--output", options.output, copy);
  SetCount(raw, "--nodes", kMaxRanks, options.nodes);
  SetCount(raw, "--gpus", kMaxRanks, options.gpus);
  SetCount(raw, "--global-batch", kMaxBatch, options.global_batch);
  SetCount(raw, "--shard", kMaxRanks, options.shard_size);
  SetCount(raw, "--replicate", kMaxRanks, options.replicate_size);
  SetCount(raw, "--accumulation", kMaxAccumulation, options.accumulation);
  Set(raw, "--reshard", options.reshard, ReadReshard);
  RecomputeChoice recompute;
  Set(raw, "--recompute", recompute, ReadRecompute);
  options.recompute = recompute.is_on;
  options.recompute_kind = recompute.kind;
  options.keep_every = recompute.keep_every;
  ReadJobFlags(raw, options.job);
  ReadPlanFlags(raw, options.plan);
  options.json = raw.json;
  if (options.json && options.output == "-") {
    throw UsageError("--json prints a summary of the plan, so the plan itself needs -o FILE");
  }
  return options;
}

SimulateCommand ToSimulateCommand(const Raw& raw) {
  SimulateCommand options;
  options.file = raw.text.at("PLAN");
  if (options.file.empty()) {
    throw UsageError("simulate needs a plan file, or - for standard input");
  }
  options.trace = raw.text.at("--trace");
  static constexpr std::array<std::string_view, 2> kTraceProfiles = {"perfetto", "hta"};
  SetChoice(raw, "--trace-profile", kTraceProfiles, options.trace_profile);
  Set(raw, "--contention", options.contention, ReadSwitch);
  options.exact = raw.exact;
  options.json = raw.json;
  if (options.json && options.trace == "-") {
    throw UsageError("--json and --trace - both want standard output");
  }
  return options;
}

CommandLine Convert(const CLI::App& command, const Raw& raw) {
  const std::string& name = command.get_name();
  if (name == "list") {
    const Flag what = {"list", raw.text.at("WHAT")};
    if (!what.is_given()) {
      throw UsageError("list needs one of models, clusters, gpus, kernel-sets, profiles");
    }
    return ListCommand{static_cast<ListKind>(ReadChoice(what, kListNames)), raw.json};
  }
  if (name == "inspect") {
    InspectCommand options;
    options.target = raw.text.at("TARGET");
    if (options.target.empty()) {
      throw UsageError("inspect needs a file, a folder, a name, or - for standard input");
    }
    options.json = raw.json;
    options.program = raw.program;
    options.trace = raw.text.at("--trace");
    SetCount(raw, "--seq", kMaxSequence, options.sequence_length);
    return options;
  }
  if (name == "plan") {
    return ToPlanCommand(raw);
  }
  return ToSimulateCommand(raw);
}

}  // namespace

CommandLine ParseCommandLine(int argc, const char* const* argv) {
  Raw raw;
  CLI::App app(kAbout, "shardwright");
  app.allow_extras();
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", kVersion);
  CLI::App* list = AddCommand(app, "list", kListAbout, raw);
  list->add_option("WHAT", raw.text["WHAT"], "models, clusters, gpus, kernel-sets or profiles");
  CLI::App* inspect = AddCommand(app, "inspect", kInspectAbout, raw);
  inspect->add_option("TARGET", raw.text["TARGET"], "file, folder, name or - (standard input)");
  inspect->add_flag("--program", raw.program, "print the whole program of a plan");
  inspect
      ->add_option("--trace", raw.text["--trace"],
                   "check a trace of the plan against its program; exits with 1 if they differ")
      ->type_name("FILE");
  CLI::App* plan = AddCommand(app, "plan", kPlanAbout, raw);
  CLI::App* simulate = AddCommand(app, "simulate", kSimulateAbout, raw);
  simulate->add_option("PLAN", raw.text["PLAN"], "plan file or - (standard input)");
  simulate->add_flag("--exact", raw.exact,
                     "simulate every op instead of skipping repeated stretches");
  AddFlags(*plan, kPlanFlags, raw);
  AddFlags(*simulate, kSimulateFlags, raw);
  inspect->add_option("--seq", raw.text["--seq"], "tokens per sample of a model")->type_name("N");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return ShowText{HelpOf(app)};
  } catch (const CLI::CallForVersion&) {
    return ShowText{std::string(kVersion) + "\n"};
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  CheckExtras(app);
  return Convert(*app.get_subcommands()[0], raw);
}

}  // namespace shardwright
