// `shardwright estimate`: the front door. One command, an answer in two lines.

#include <array>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "analysis/estimate.h"
#include "analysis/fewest_nodes.h"
#include "cli/command.h"
#include "cli/estimate_print.h"
#include "cli/estimate_question.h"
#include "cli/flow.h"
#include "cli/lengths_flag.h"
#include "cli/plan_options.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "schedule/lower/optimizer.h"

namespace shardwright {
namespace {

// Less is not worth a line.
constexpr double kFormGain = 1.02;

// A model that is frozen but for adapters is the change that helps most often.
void TryLora(const Question& question, Estimate& estimate) {
  Question with = question;
  with.options.job.lora_rank = 16;
  with.options.job.precision = {DType::kBf16, DType::kBf16, DType::kBf16};
  with.options.job.lora_targets = DefaultLoraTargets(estimate.file.model);
  if (question.options.job.lora_rank > 0 || with.options.job.lora_targets.empty()) {
    return;
  }
  const Estimate lora =
      EstimateJob(MakeJobFile(with.options),
                  estimate.file.cluster.RankCount() * with.given.base.micro_batch, with.given);
  if (lora.fits) {
    estimate.fixes.push_back({"--lora-rank 16", lora.outcome.step_time, lora.outcome.DeviceTotal(),
                              RecomputeWords(lora.file)});
  }
}

// Of the nodes' memory where the answer hangs on it and nobody said it.
void TellHostMemory(const Estimate& e, Question& question) {
  const bool matters = e.fits ? e.file.plan.offload != Offload() : e.floor.host_deficit > Bytes(0);
  question.options.cluster = question.cluster_as_asked;
  const Bytes memory = e.file.cluster.node.host_memory;
  if (!matters || (memory > Bytes(0) && question.usual_host.empty())) {
    return;
  }
  question.options.cluster += question.usual_host;
  const std::string said = memory == Bytes(0)
                               ? "the " + Format(e.outcome.host_peak) + " that this takes"
                               : Format(memory) + " (twice its GPUs', at least 64 GiB each)";
  question.assumed.push_back("host memory per node: " + said +
                             "; a cluster such as \"..., host 1 TiB\" says it");
}

// Tokens per second and GPU; 0: it does not fit.
double RateOf(const Estimate& e) {
  return e.fits ? e.outcome.rates.tokens_per_second_per_gpu : 0;
}

// Of AdamW's form where nobody said it, with what the fused one gains where memory is short.
void TellOptimizer(const Arguments& arguments, const Estimate& e, Question& question) {
  Problem fused = e.file;
  fused.job.optimizer = FusedFormOf(fused.job.optimizer);
  if (arguments.Get("--optimizer").is_given() || e.file.job.mode != JobMode::kTrain ||
      fused.job.optimizer == e.file.job.optimizer) {
    return;
  }
  std::string& words = question.optimizer = "foreach, as torch.optim has it (--optimizer)";
  const Plan& plan = e.file.plan;
  if (e.fits && plan.offload != Offload()) {  // the costly case; a second search
    const Estimate with = EstimateJob(fused, e.file.job.global_batch, question.given, false);
    if (const double rate = RateOf(with); rate > kFormGain * RateOf(e)) {
      words += "; adamw:fused takes less memory: " + WithCommas(std::llround(rate)) +
               " tokens/s, " + RecomputeWords(with.file) +
               (with.file.plan.offload == Offload() ? "; nothing on the host"
                                                    : OffloadWords(with.file.plan.offload));
    }
  }
}

// Of a mixture: what it would do where ranks of a node share out its experts, if that pays.
void TellExperts(Question& question, const Estimate& e) {
  const Cluster& cluster = e.file.cluster;
  const Model& model = e.file.model;
  if (NoneOf(model.ops,
             [&](const ModelOp& op) { return model.SpecOf(op).kind == OpKind::kExperts; })) {
    return;
  }
  PlanOptions options = question.options;
  SearchOptions given = question.given;
  std::optional<PlanFile> job;
  for (std::int64_t ranks = 2; cluster.gpus_per_node % ranks == 0; ranks *= 2) {
    options.plan.expert_size = ranks;
    try {
      job = MakeJobFile(options);
    } catch (const InputError&) {  // more ranks than experts, or none that can be shared out
      break;
    }
    given.base.expert_size = ranks;
  }
  const double least = (1 + e.confidence.band) * RateOf(e);
  const double rate = job ? RateOf(EstimateJob(*job, e.file.job.global_batch, given, false)) : 0;
  if (rate > least) {
    question.experts = WithCommas(std::llround(rate)) + " tokens/s per GPU where " +
                       std::to_string(given.base.expert_size) +
                       " ranks share them out; plan --search --shard " +
                       std::to_string(cluster.RankCount()) + ",ep=any finds how many";
  }
}

// The plan whose warnings are told; where none fits, one that shards over all GPUs, and over those
// of twice the nodes if more of them would not help.
PlanFile ForWarnings(const Estimate& estimate) {
  PlanFile file = estimate.file;
  if (!estimate.fits) {
    const bool nodes_help =
        AnyOf(estimate.fixes, [](const Fix& fix) { return fix.change.starts_with("--nodes"); });
    file.plan.dialect = Dialect::kFsdp2;
    file.plan.shard_size = file.cluster.RankCount() * (nodes_help ? 1 : 2);
  }
  return file;
}

int AnswerFor(const Arguments& arguments, Question& question, const Estimate& estimate) {
  TellHostMemory(estimate, question);
  TellOptimizer(arguments, estimate, question);
  TellExperts(question, estimate);
  WarnOf(ForWarnings(estimate));
  if (estimate.fits && !estimate.outcome.rates.has_dtype) {
    Warn(NoMatrixUnits(estimate.file.cluster.gpu));
  }
  std::string text = arguments.IsJson() ? EstimateJson(arguments, question, estimate)
                                        : EstimateText(arguments, question, estimate);
  arguments.Print(estimate.fits ? WithLengths(arguments, estimate.file, std::move(text)) : text);
  return estimate.fits ? kExitOk : kExitNo;
}

// No cluster that anybody has told of is larger.
constexpr std::int64_t kMostRanks = 131'072;

// What the job takes on `nodes` nodes.
struct OnNodes {
  Question question;
  Estimate estimate;

  // By the slow end of the band. Nothing: it does not fit.
  [[nodiscard]] std::optional<Seconds> Time() const {
    return estimate.fits ? std::optional(Seconds(TotalsOf(question, estimate).seconds *
                                                 (1 + estimate.confidence.band)))
                         : std::nullopt;
  }
};

OnNodes EstimateOnNodes(Arguments arguments, std::int64_t nodes) {
  arguments.text["--nodes"] = std::to_string(nodes);
  OnNodes answer{ReadQuestion(arguments), {}};
  const PlanOptions& options = answer.question.options;
  answer.estimate =
      EstimateJob(MakeJobFile(options), options.global_batch, answer.question.given, false);
  return answer;
}

// Numbers of nodes that the job can be split over.
std::vector<std::int64_t> NodeCounts(const Question& question, std::int64_t gpus_per_node) {
  std::vector<std::int64_t> counts;
  const std::int64_t batch = question.options.global_batch;
  const std::int64_t most = (batch > 0 ? std::min(batch, kMostRanks) : kMostRanks) / gpus_per_node;
  for (std::int64_t nodes = 1; nodes <= most; ++nodes) {
    if (batch % (nodes * gpus_per_node * question.given.base.micro_batch) == 0) {
      counts.push_back(nodes);
    }
  }
  return counts;
}

using Tried = std::map<std::int64_t, OnNodes>;

int AnswerLate(const Arguments& arguments, const Question& question, Seconds deadline,
               const Tried& tried) {
  const OnNodes* fastest = nullptr;
  for (const auto& [nodes, answer] : tried) {
    if (answer.Time() && (fastest == nullptr || *answer.Time() < *fastest->Time())) {
      fastest = &answer;
    }
  }
  const std::int64_t nodes = fastest == nullptr ? 0 : fastest->estimate.file.cluster.node_count;
  if (arguments.IsJson()) {
    nlohmann::ordered_json json = ReportHead("shardwright-estimate");
    json["fits"] = fastest != nullptr;
    json["deadline_s"] = deadline.value;
    json["nodes"] = nodes;
    json["total_s"] = fastest == nullptr ? nlohmann::ordered_json()
                                         : nlohmann::ordered_json(fastest->Time()->value);
    arguments.Print(json.dump(2) + "\n");
  } else {
    const std::string what = Tokens(static_cast<double>(question.tokens)) + " tokens";
    arguments.Print("No number of nodes up to " + WithCommas(tried.rbegin()->first) +
                    (fastest == nullptr ? " holds the job\n"
                                        : " ends " + what + " in " + Duration(deadline.value) +
                                              ": the fastest, " + WithCommas(nodes) + ", takes " +
                                              Duration(fastest->Time()->value) + "\n"));
  }
  return kExitNo;
}

// The fewest nodes that end the run in time.
int RunDeadline(Arguments arguments) {
  if (arguments.Get("--nodes").is_given()) {
    throw UsageError("--deadline asks how many nodes are needed, and --nodes says how many");
  }
  const Seconds deadline = ReadTime(arguments.Get("--deadline"), false);
  arguments.text["--nodes"] = "1";
  const Question one = ReadQuestion(arguments);
  arguments.command.clear();  // what was noted once is not noted for each number of nodes
  const Cluster node = LoadCluster(one.options.cluster, 1);
  const std::vector<std::int64_t> counts = NodeCounts(one, node.gpus_per_node);
  Tried tried;
  constexpr std::chrono::seconds kPatience{10};  // nobody asks whether it goes on before
  const auto begin = std::chrono::steady_clock::now();
  const std::optional<std::size_t> found = FirstInTime(counts, deadline, [&](std::int64_t nodes) {
    if (std::chrono::steady_clock::now() - begin > kPatience) {
      Say("estimate: " + std::to_string(nodes) + (nodes == 1 ? " node" : " nodes"));
    }
    return tried.insert_or_assign(nodes, EstimateOnNodes(arguments, nodes)).first->second.Time();
  });
  if (!found) {
    return AnswerLate(arguments, one, deadline, tried);
  }
  const std::int64_t nodes = counts[*found];
  OnNodes& answer = tried.at(nodes);
  MetDeadline met{deadline, 0, {}};
  if (*found > 0) {
    met.fewer_nodes = counts[*found - 1];
    met.fewer_time = tried.at(met.fewer_nodes).Time();
  }
  answer.question.deadline = met;
  arguments.text["--nodes"] = std::to_string(nodes);
  return AnswerFor(arguments, answer.question, answer.estimate);
}

// What --solve asks for.
struct Asked {
  const char* name;   // "seq"
  const char* flag;   // that says it
  const char* words;  // "longest sequence that fits"
  std::int64_t least;
  std::int64_t most;
};

constexpr std::array<Asked, 4> kAsked = {{
    {"seq", "--seq", "longest sequence that fits", 256, kMaxSequence},
    {"micro-batch", "--micro-batch", "largest micro-batch that fits", 1, 1 << 16},
    {"gpus", "--gpus", "fewest GPUs that hold the job", 1, kMostRanks},
    {"lora-rank", "--lora-rank", "highest rank of adapters that fits", 1, 1 << 13},
}};

// Powers of two and eighths between them; GPUs: powers of two within a node, then whole nodes.
std::vector<std::int64_t> GridOf(const Asked& asked, std::int64_t gpus_per_node) {
  std::vector<std::int64_t> grid;
  const bool are_gpus = std::string_view(asked.name) == "gpus";
  for (std::int64_t power = asked.least; power <= asked.most; power *= 2) {
    for (std::int64_t eighth = 0; !are_gpus && eighth < 8; ++eighth) {
      const std::int64_t value = power + power * eighth / 8;
      if ((grid.empty() || value > grid.back()) && value <= asked.most) {
        grid.push_back(value);
      }
    }
    if (are_gpus && power < gpus_per_node) {
      grid.push_back(power);
    }
  }
  for (std::int64_t gpus = gpus_per_node; are_gpus && gpus <= asked.most; gpus += gpus_per_node) {
    grid.push_back(gpus);
  }
  return grid;
}

void SetAsked(const Asked& asked, std::int64_t value, std::int64_t gpus_per_node,
              Arguments& arguments) {
  if (std::string_view(asked.name) == "gpus") {
    arguments.text["--nodes"] = std::to_string(std::max<std::int64_t>(1, value / gpus_per_node));
    value = std::min(value, gpus_per_node);
  }
  arguments.text[asked.flag] = std::to_string(value);
}

// The offload of the plan that fits without retries of the allocator, with the least batch where
// none is given; nothing: none fits.
std::optional<Offload> FitsWith(const Arguments& arguments) {
  try {
    Question question = ReadQuestion(arguments);
    question.given.takes_retries = false;
    const PlanFile problem = MakeJobFile(question.options);
    const std::int64_t pass =
        problem.cluster.RankCount() * std::max<std::int64_t>(1, question.given.base.micro_batch);
    const std::int64_t batch =
        question.options.global_batch > 0 ? question.options.global_batch : pass;
    if (batch % pass != 0) {
      return {};
    }
    Estimate estimate = EstimateJob(problem, batch, question.given, false);
    if (estimate.fits && estimate.outcome.retries_per_step > 0 &&
        question.options.global_batch == 0) {
      estimate = EstimateJob(problem, 0, question.given, false);  // any micro-batch will do
    }
    const bool fits = estimate.fits && estimate.outcome.retries_per_step == 0;
    return fits ? std::optional(estimate.file.plan.offload) : std::nullopt;
  } catch (const InputError&) {
    return {};  // a model has no such length, a node no such number
  }
}

// The first index where `holds`, which then holds for all behind it; `count`: for none. Asks of
// indices up to twice the answer, since large jobs take longer to estimate.
template <class Holds>
std::size_t FirstIndex(std::size_t count, Holds holds) {
  std::size_t end = 1;
  while (end < count && !holds(end - 1)) {
    end *= 2;
  }
  std::size_t low = end / 2, high = std::min(end, count);
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    (holds(middle) ? high : low) = holds(middle) ? middle : middle + 1;
  }
  return low;
}

int AnswerQuestion(const Arguments& arguments, const std::string& solved) {
  Question question = ReadQuestion(arguments);
  question.solved = solved;
  question.given.takes_retries = solved.empty();
  const PlanFile problem = MakeJobFile(question.options);
  const std::int64_t ranks = problem.cluster.RankCount();
  const std::int64_t micro = question.given.base.micro_batch;
  if (question.options.global_batch % (ranks * micro) != 0) {
    throw InputError("--global-batch: got " + std::to_string(question.options.global_batch) +
                     ", expected a multiple of " + std::to_string(ranks) + " ranks x micro-batch " +
                     std::to_string(micro));
  }
  Estimate estimate = EstimateJob(problem, question.options.global_batch, question.given);
  if (!solved.empty() && estimate.outcome.retries_per_step > 0 &&
      question.options.global_batch == 0) {
    estimate = EstimateJob(problem, ranks * std::max<std::int64_t>(1, micro), question.given);
  }
  if (!estimate.fits) {
    TryLora(question, estimate);
  }
  return AnswerFor(arguments, question, estimate);
}

// One search by doubling and bisection.
int RunSolve(Arguments arguments) {
  constexpr std::array<std::string_view, 4> kNames = {"seq", "micro-batch", "gpus", "lora-rank"};
  const Asked& asked = kAsked[ReadChoice(arguments.Get("--solve"), kNames)];
  const std::string mode = arguments.Get("--mode").text;
  if (!mode.empty() && mode != "train" && asked.name == std::string_view("micro-batch")) {
    throw UsageError("--solve micro-batch: not for pairs of answers; --micro-batch 2 asks for one");
  }
  const bool are_gpus = std::string_view(asked.name) == "gpus";
  for (const char* flag : {asked.flag, "--deadline", are_gpus ? "--nodes" : asked.flag}) {
    if (arguments.Get(flag).is_given()) {
      throw UsageError(std::string("--solve ") + asked.name + " and " + flag +
                       " cannot both be given");
    }
  }
  const std::string command = std::exchange(arguments.command, "");  // notes come with the answer
  const std::int64_t per_node = LoadCluster(arguments.Get("CLUSTER").text, 1).gpus_per_node;
  const std::vector<std::int64_t> grid = GridOf(asked, per_node);
  std::map<std::size_t, std::optional<Offload>> known;
  const auto fits = [&](std::size_t i) {
    const auto [it, is_new] = known.try_emplace(i);
    if (is_new) {
      SetAsked(asked, grid[i], per_node, arguments);
      it->second = FitsWith(arguments);
    }
    return it->second.has_value();
  };
  const auto find = [&] {
    const std::size_t edge =
        FirstIndex(grid.size(), [&](std::size_t i) { return fits(i) == are_gpus; });
    return are_gpus ? std::min(edge, grid.size() - 1) : edge > 0 ? edge - 1 : 0;
  };
  const std::size_t found = find();
  SetAsked(asked, grid[found], per_node, arguments);
  if (!fits(found)) {
    arguments.command = command;
    return AnswerQuestion(arguments, "");
  }
  const std::size_t next = are_gpus ? found - 1 : found + 1;  // found 0: no index
  std::string solved = std::string(asked.words) + ": " + WithCommas(grid[found]);
  if (next < grid.size()) {
    solved += "; " + WithCommas(grid[next]) +
              (are_gpus ? " do not, or only with retries of the allocator" : " does not");
  }
  solved += are_gpus ? " (tried: powers of two in a node, then whole nodes)"
                     : " (tried: powers of two and eighths between them)";
  // The value with one choice more.
  const auto with = [&](const char* flag, const char* value) {
    const Arguments given = arguments;
    arguments.text[flag] = value;
    known.clear();
    const std::size_t other = find();
    std::string count = fits(other) ? WithCommas(grid[other]) : "none";
    arguments = given;
    return count;
  };
  if (known[found] != Offload() && !arguments.Get("--offload").is_given()) {
    solved += "; with nothing on the host: " + with("--offload", "none") + " (--offload none)";
  }
  if (asked.name == std::string_view("seq") && !arguments.Get("--loss-chunks").is_given()) {
    const std::string count = with("--loss-chunks", "16");
    solved += count == WithCommas(grid[found]) ? "" : "; with --loss-chunks 16: " + count;
  }
  SetAsked(asked, grid[found], per_node, arguments);
  arguments.command = command;
  return AnswerQuestion(arguments, solved);
}

}  // namespace

int EstimateCommand(const Arguments& arguments) {
  if (arguments.Get("--solve").is_given()) {
    return RunSolve(arguments);
  }
  if (arguments.Get("--deadline").is_given()) {
    return RunDeadline(arguments);
  }
  return AnswerQuestion(arguments, "");
}

}  // namespace shardwright
