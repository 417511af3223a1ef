#include "executor/runtime.h"

#include <algorithm>
#include <exception>
#include <future>
#include <mutex>
#include <new>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "core/threads.h"
#include "executor/internal/loss_book.h"
#include "executor/internal/rank_runner.h"

namespace shardwright {
namespace {

// The place, among a pipeline's ranks, of the one whose last stage sends nothing on.
std::int64_t PlaceOfLoss(std::span<const ExecutorInput> inputs) {
  const auto has_loss = [](const ExecutorInput& input) {
    return input.model.stages.empty() || !input.model.stages.back().sent.valid();
  };
  return FindIf(inputs, has_loss) - inputs.begin();
}

}  // namespace

Runtime::Runtime(std::vector<ExecutorInput> inputs, const DeviceFactory& devices,
                 RunOptions options)
    : inputs_(std::move(inputs)),
      options_(std::move(options)),
      losses_(std::make_unique<LossBook>(mesh(), options_, PlaceOfLoss(inputs_))) {
  for (const Rank rank : LocalRanks()) {
    ranks_.push_back(
        std::make_unique<RankRunner>(InputOf(rank), options_, rank, devices(rank), *losses_));
  }
}

Runtime::~Runtime() {
  // After a failure, streams of one rank may still read the memory of another.
  for (const std::unique_ptr<RankRunner>& rank : ranks_) {
    rank->Stop();
  }
}

std::vector<Rank> Runtime::LocalRanks() const {
  if (options_.only_rank.has_value()) {
    return {*options_.only_rank};
  }
  std::vector<Rank> ranks;
  for (std::int64_t r = 0; r < rank_count(); ++r) {
    ranks.emplace_back(static_cast<std::size_t>(r));
  }
  return ranks;
}

Runtime::RankRunner& Runtime::RunnerOf(Rank rank) const {
  SW_CHECK(!options_.only_rank.has_value() || rank == *options_.only_rank,
           "a rank of another process");
  return *ranks_[options_.only_rank.has_value() ? 0 : rank.value];
}

const Binding& Runtime::BindingOf(Rank rank) const {
  return RunnerOf(rank).binding();
}

const ExecutorInput& Runtime::LargestInput() const {
  return *std::max_element(inputs_.begin(), inputs_.end(), [](const auto& a, const auto& b) {
    return a.placement.device_size < b.placement.device_size;
  });
}

void Runtime::CopyMemory(Rank rank, void* to, const void* from, std::int64_t bytes) const {
  RunnerOf(rank).CopyMemory(to, from, bytes);
}

void Runtime::set_next_step(std::int64_t step) {
  next_step_ = step;
  for (const std::unique_ptr<RankRunner>& rank : ranks_) {
    rank->ExpectFirstStep();
  }
}

LossScaler Runtime::loss_scaler() const {
  return ranks_.front()->scaling().scaler;
}

std::int64_t Runtime::skipped_steps() const {
  return ranks_.front()->scaling().skipped;
}

void Runtime::set_loss_scaler(const LossScaler& scaler, std::int64_t skipped_steps) {
  for (const std::unique_ptr<RankRunner>& rank : ranks_) {
    rank->scaling().scaler = scaler;
    rank->scaling().skipped = skipped_steps;
  }
}

void Runtime::OnAllRanks(const std::function<void(RankRunner& rank)>& work) {
  std::mutex mutex;
  std::string cause;            // of the first failure; guarded by mutex
  bool is_environment = false;  // likewise: the machine's, not the run's
  const auto fail = [&](std::size_t r, const std::string& text, bool is_of_environment) {
    {
      const std::lock_guard lock(mutex);
      is_environment = cause.empty() ? is_of_environment : is_environment;
      cause = cause.empty() ? text : cause;
    }
    ranks_[r]->Fail(text);
  };
  const auto run = [&](std::size_t r) {
    try {
      work(*ranks_[r]);
    } catch (const RunError& error) {  // says already which rank and op failed
      fail(r, error.what(), false);
    } catch (const Interrupted&) {
      fail(r, "interrupted", false);
    } catch (const EnvironmentError& error) {
      fail(r, error.what(), true);
    } catch (const std::exception& error) {
      fail(r, "rank " + std::to_string(LocalRanks()[r].value) + ": " + error.what(),
           dynamic_cast<const std::bad_alloc*>(&error) != nullptr);
    }
  };
  {
    // Ranks wait for each other: none begins before all have their threads.
    std::promise<bool> all_there;
    const std::shared_future<bool> begins = all_there.get_future().share();
    std::vector<std::jthread> threads;
    try {
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        threads.push_back(StartThread<std::jthread>([&run, r, begins] {
          if (begins.get()) {
            run(r);
          }
        }));
      }
    } catch (...) {
      all_there.set_value(false);
      throw;
    }
    all_there.set_value(true);
  }
  if (is_environment) {
    throw EnvironmentError(cause);
  }
  if (!cause.empty()) {
    throw RunError(cause);
  }
}

void Runtime::Initialize() {
  OnAllRanks([](RankRunner& rank) { rank.RunInit(); });
  initialized_ = true;
}

bool Runtime::RunSteps(std::int64_t count) {
  SW_CHECK(initialized_, "steps before Initialize");
  losses_->Open(next_step_);
  OnAllRanks([&](RankRunner& rank) { rank.RunSteps(next_step_, count); });
  next_step_ = losses_->NextStep();
  return losses_->Ends();
}

std::vector<StepReport> Runtime::TakeReports() {
  return losses_->Take();
}

Trace Runtime::TakeTrace() {
  Trace trace;
  for (const std::unique_ptr<RankRunner>& rank : ranks_) {
    rank->MoveTraceTo(trace);
  }
  return trace;
}

}  // namespace shardwright
