#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/first_weights.h"
#include "cli/flow.h"
#include "cli/forward_plan.h"
#include "cli/run_processes.h"
#include "core/error.h"
#include "core/text.h"
#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/run_checkpoints.h"
#include "executor/data/batch.h"
#include "executor/half.h"
#include "executor/host/session.h"
#include "executor/initialize.h"

namespace shardwright {
namespace {

struct Request {
  std::vector<std::int64_t> tokens;  // the prompt's, then those that follow
  bool is_text = false;              // tokens are bytes
  std::int64_t count = 64;
  double temperature = 0.0;  // 0: the largest score
  std::int64_t seed = 1;
};

std::vector<std::int64_t> ReadTokens(const Flag& flag) {
  std::vector<std::int64_t> tokens;
  for (const std::string& word : ReadList(flag)) {
    const std::int64_t token = IntegerIn(word).value_or(-1);
    if (token < 0) {
      throw UsageError("--prompt-tokens: got \"" + word + "\", expected numbers from 0");
    }
    tokens.push_back(token);
  }
  return tokens;
}

Request ReadRequest(const Arguments& arguments) {
  Request request;
  const Flag text = arguments.Get("--prompt"), ids = arguments.Get("--prompt-tokens");
  if (text.is_given() == ids.is_given()) {
    throw UsageError("generate needs one of --prompt and --prompt-tokens");
  }
  if (arguments.Get("--checkpoint").is_given() == arguments.Get("--init").is_given()) {
    throw UsageError("generate needs one of --checkpoint and --init");
  }
  request.is_text = text.is_given();
  for (const char letter : text.text) {
    request.tokens.push_back(static_cast<unsigned char>(letter));
  }
  if (!request.is_text) {
    request.tokens = ReadTokens(ids);
  }
  if (request.tokens.empty()) {
    throw UsageError("the prompt is empty; a model needs a token to go on from");
  }
  arguments.SetCount("--tokens", std::int64_t{1} << 24, request.count);
  arguments.SetCount("--seed", std::int64_t{1} << 60, request.seed);
  arguments.Set("--temperature", request.temperature,
                [](const Flag& flag) { return ReadPositive(flag, 1e6); });
  return request;
}

// The tokens so far as the sample that all ranks get; labels count for nothing.
class Window : public Dataset {
 public:
  explicit Window(const std::vector<std::int64_t>& tokens) : tokens_(tokens) {}

  [[nodiscard]] std::int64_t size() const override { return 1; }
  void Write(std::int64_t /*sample*/, InputKind kind, const View& out) const override {
    auto* ids = static_cast<std::int64_t*>(out.data);
    const std::int64_t first = std::max<std::int64_t>(std::ssize(tokens_) - out.elements, 0);
    for (std::int64_t i = 0; i < out.elements; ++i) {
      const auto at = static_cast<std::size_t>(first + i);
      if (kind == InputKind::kPositions) {
        ids[i] = i;
      } else {
        // Behind the last token stands anything: what comes later is not looked at.
        ids[i] = kind == InputKind::kTokens && at < tokens_.size() ? tokens_[at] : 0;
      }
    }
  }
  [[nodiscard]] std::uint32_t Checksum() const override { return 0; }

 private:
  const std::vector<std::int64_t>& tokens_;
};

// The scores behind one token of the first sample, picked up where the loss takes them.
class ScoreReader {
 public:
  explicit ScoreReader(std::int64_t classes) : scores_(static_cast<std::size_t>(classes)) {}

  // Of which row the scores are wanted. No rank may be running.
  void Want(std::int64_t row) { row_ = row; }
  [[nodiscard]] const std::vector<float>& scores() const { return scores_; }

  [[nodiscard]] ModelKernel Watch(ModelKernel kernel) {
    return [this, kernel = std::move(kernel)](const ModelOpCall& call, bool is_backward) {
      if (!is_backward && call.spec->kind == OpKind::kCrossEntropy &&
          call.dropout.first_sample == 0) {
        const std::lock_guard lock(mutex_);
        const ConstView& from = call.inputs[0];
        const std::int64_t classes = std::ssize(scores_);
        for (std::int64_t c = 0; c < classes; ++c) {
          scores_[static_cast<std::size_t>(c)] =
              LoadFloat(from.dtype, from.data, row_ * classes + c);
        }
      }
      kernel(call, is_backward);
    };
  }

 private:
  std::mutex mutex_;
  std::int64_t row_ = 0;
  std::vector<float> scores_;  // guarded by mutex_ while ranks run
};

// `allowed`: only the first so many tokens.
std::int64_t Choose(const std::vector<float>& scores, std::size_t allowed, const Request& request) {
  const auto end = scores.begin() + static_cast<std::ptrdiff_t>(allowed);
  const auto largest = std::max_element(scores.begin(), end);
  if (request.temperature == 0.0) {
    return largest - scores.begin();
  }
  std::vector<double> sums;  // of the probabilities up to each token, not normalised
  for (auto score = scores.begin(); score != end; ++score) {
    sums.push_back((sums.empty() ? 0.0 : sums.back()) +
                   std::exp((static_cast<double>(*score) - *largest) / request.temperature));
  }
  const std::uint64_t key = InitKey(static_cast<std::uint64_t>(request.seed), "generate");
  const RandomWords words = Philox(key, request.tokens.size(), 0);
  const double drawn = (words.word[0] + 0.5) * 0x1p-32 * sums.back();
  return std::min<std::int64_t>(std::upper_bound(sums.begin(), sums.end(), drawn) - sums.begin(),
                                std::ssize(sums) - 1);
}

void CheckModel(const Model& model, const DataShape& shape, const Request& request) {
  const bool is_decoder = shape.tokens > 0 && shape.labels == shape.tokens && !shape.has_decoder &&
                          !shape.is_masked && shape.classes > 0;
  if (!is_decoder) {
    throw InputError("plan: model", model.name, "a decoder, which predicts the next token");
  }
  for (const std::int64_t token : request.tokens) {
    if (token >= shape.vocabulary) {
      throw InputError(
          "the prompt", "token " + std::to_string(token),
          "tokens below the model's vocabulary of " + std::to_string(shape.vocabulary));
    }
  }
}

// The weights that the flags name.
void Load(const Arguments& arguments, const Model& model, const Job& job, Runtime& runtime) {
  if (const Flag init = arguments.Get("--init"); init.is_given()) {
    const HubWeights weights(init.text, model);
    WarnOfUnused(init.text, weights);
    StartFrom(weights, model, job, runtime);
    return;
  }
  const std::string given = arguments.Get("--checkpoint").text;
  const std::string folder = FindLatestCheckpoint(given);
  if (folder.empty()) {
    throw InputError(given, "no finished checkpoint", "a checkpoint or a folder of checkpoints");
  }
  std::optional<Checkpoint> checkpoint;
  OpenOrOfferOlder(folder, "", [&] { checkpoint.emplace(folder).Verify(); });
  CheckFits(*checkpoint, model, std::nullopt);
  Resume(*checkpoint, model, job, runtime, false);
}

std::string Shown(const std::vector<std::int64_t>& tokens, std::size_t first, bool is_text) {
  std::string text;
  for (std::size_t i = first; i < tokens.size(); ++i) {
    if (is_text) {
      text += static_cast<char>(tokens[i]);
    } else {
      text += (i == first ? "" : ",") + std::to_string(tokens[i]);
    }
  }
  return text;
}

}  // namespace

int GenerateCommand(const Arguments& arguments) {
  Request request = ReadRequest(arguments);
  HostOptions host;
  arguments.Set("--timeout", host.timeout, ReadTimeout);
  const PlanFile file = ReadPlanFile(arguments.Get("PLAN").text, arguments.streams);
  const Model& model = file.model;
  const DataShape shape = DataShapeOf(model);
  CheckModel(model, shape, request);
  host.threads = HostThreads(Launch(), file.cluster.RankCount());
  const TrainingOptions training = DefaultTrainingOptions(file.job);
  const ForwardPlan forward(file);
  const Window window(request.tokens);
  const Sampler sampler{1, forward.job.global_batch, 1, false, EpochTail::kCarry};
  RunOptions run;
  run.inputs = [&](const BatchKey& key, std::span<const View> views) {
    WriteBatch(model, window, sampler, {key.step, key.first_sample, key.count}, views);
  };
  ScoreReader reader(shape.classes);
  HostSession session({model, file.kernels, forward.job, forward.program, training}, host, run,
                      [&](ModelKernel kernel) { return reader.Watch(std::move(kernel)); });
  session.runtime().Initialize();
  Load(arguments, model, forward.job, session.runtime());
  session.runtime().set_next_step(0);
  const std::size_t prompt = request.tokens.size();
  const auto allowed = static_cast<std::size_t>(
      request.is_text ? std::min<std::int64_t>(256, shape.classes) : shape.classes);
  for (std::int64_t i = 0; i < request.count; ++i) {
    reader.Want(std::min<std::int64_t>(std::ssize(request.tokens), shape.tokens) - 1);
    session.runtime().RunSteps(1);
    request.tokens.push_back(Choose(reader.scores(), allowed, request));
  }
  if (!arguments.IsJson()) {
    arguments.Print(Shown(request.tokens, request.is_text ? 0 : prompt, request.is_text) + '\n');
    return kExitOk;
  }
  nlohmann::ordered_json json = ReportHead("shardwright-generation");
  json["tokens"] = std::vector(request.tokens.begin() + static_cast<std::ptrdiff_t>(prompt),
                               request.tokens.end());
  if (request.is_text) {
    json["text"] = Shown(request.tokens, prompt, true);
  }
  using Json = nlohmann::ordered_json;
  arguments.Print(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  return kExitOk;
}

}  // namespace shardwright
