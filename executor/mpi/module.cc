// MessagePassing by MPI: the shared object shardwright_mpi.so, loaded by JoinProcesses.

#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include <mpi.h>

#include "core/printable.h"
#include "core/text.h"
#include "core/threads.h"
#include "executor/host/message_passing.h"

namespace shardwright {
namespace {

int Count(std::int64_t bytes, std::int64_t unit) {
  const std::int64_t count = bytes / unit;
  if (count > INT_MAX) {
    Say("error: a message of " + std::to_string(bytes) + " bytes is too large for MPI");
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  }
  return static_cast<int>(count);
}

// `unit` bytes, which match any other number of bytes: sender and receiver may count differently.
class Unit {
 public:
  explicit Unit(std::int64_t unit) {
    MPI_Type_contiguous(static_cast<int>(unit), MPI_BYTE, &type_);
    MPI_Type_commit(&type_);
  }
  // What is on its way keeps the type.
  ~Unit() { MPI_Type_free(&type_); }
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  [[nodiscard]] MPI_Datatype type() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

// Ends the process when its scope lasts longer than `limit`, since MPI lets nobody give up what
// blocks. mpirun then ends the others.
class Alarm {
 public:
  Alarm(MessagePassing& all, const char* what)
      : thread_(StartThread<std::jthread>([&all, what,
                                           limit = all.timeout()](const std::stop_token& stop) {
          std::mutex mutex;
          std::condition_variable_any never;
          std::unique_lock lock(mutex);
          if (never.wait_for(lock, stop, limit, [] { return false; }) || stop.stop_requested()) {
            return;
          }
          constexpr int kExitRun = 5;  // as of a RunError
          const std::set<std::int64_t> silent = all.Silent();
          Say("error: rank " + std::to_string(all.rank()) + ", " + what + ": waited " +
              std::to_string(limit.count()) + " ms for " +
              (silent.empty() ? "the others" : "rank " + Listed(silent)));
          std::_Exit(kExitRun);
        })) {}

 private:
  std::jthread thread_;
};

class MpiPending : public MessagePassing::Pending {
 public:
  [[nodiscard]] bool IsOver() override {
    int over = 0;
    MPI_Test(&request_, &over, MPI_STATUS_IGNORE);
    return over != 0;
  }
  MPI_Request* request() { return &request_; }

  // MPI reads these until the request is over.
  std::vector<int> counts, offsets, other_counts, other_offsets;

 private:
  MPI_Request request_ = MPI_REQUEST_NULL;
};

// Counts and offsets of the parts in `unit` bytes.
void Fill(std::span<const MessagePart> parts, std::int64_t unit, std::vector<int>& counts,
          std::vector<int>& offsets) {
  for (const MessagePart& part : parts) {
    counts.push_back(Count(part.bytes, unit));
    offsets.push_back(Count(part.offset, unit));
  }
}

class Mpi : public MessagePassing {
 public:
  explicit Mpi(std::chrono::milliseconds timeout) : MessagePassing(timeout) {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    if (provided < MPI_THREAD_MULTIPLE) {
      Say("error: this MPI does not let several threads communicate");
      MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    channels_.push_back(MPI_COMM_WORLD);
    MPI_Comm_dup(MPI_COMM_WORLD, &questions_);
    answerer_ = StartThread<std::jthread>([this](const std::stop_token& stop) { Answer(stop); });
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }

  [[nodiscard]] Channel Split(int color) override {
    const Alarm alarm(*this, "groups of ranks");
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, color, rank_, &part);
    const std::lock_guard lock(mutex_);
    channels_.push_back(part);
    return static_cast<Channel>(channels_.size()) - 1;
  }

  [[nodiscard]] std::unique_ptr<Pending> Send(Channel channel, int to, const void* data,
                                              std::int64_t bytes) override {
    auto pending = std::make_unique<MpiPending>();
    MPI_Isend(data, Count(bytes, 1), MPI_BYTE, to, 0, Of(channel), pending->request());
    return pending;
  }

  [[nodiscard]] std::unique_ptr<Pending> Receive(Channel channel, int from, void* data,
                                                 std::int64_t bytes) override {
    auto pending = std::make_unique<MpiPending>();
    MPI_Irecv(data, Count(bytes, 1), MPI_BYTE, from, 0, Of(channel), pending->request());
    return pending;
  }

  [[nodiscard]] std::unique_ptr<Pending> AllGather(Channel channel, void* data,
                                                   std::span<const MessagePart> parts) override {
    auto pending = std::make_unique<MpiPending>();
    const std::int64_t unit = CountingUnit(parts);
    const Unit type(unit);
    Fill(parts, unit, pending->counts, pending->offsets);
    MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, pending->counts.data(),
                    pending->offsets.data(), type.type(), Of(channel), pending->request());
    return pending;
  }

  [[nodiscard]] std::unique_ptr<Pending> AllToAll(Channel channel, const void* from,
                                                  std::span<const MessagePart> from_parts, void* to,
                                                  std::span<const MessagePart> to_parts) override {
    auto pending = std::make_unique<MpiPending>();
    const std::int64_t send = CountingUnit(from_parts), receive = CountingUnit(to_parts);
    const Unit send_type(send), receive_type(receive);
    Fill(from_parts, send, pending->counts, pending->offsets);
    Fill(to_parts, receive, pending->other_counts, pending->other_offsets);
    MPI_Ialltoallv(from, pending->counts.data(), pending->offsets.data(), send_type.type(), to,
                   pending->other_counts.data(), pending->other_offsets.data(), receive_type.type(),
                   Of(channel), pending->request());
    return pending;
  }

  void Finish() override {
    const Alarm alarm(*this, "end of the run");
    MPI_Barrier(questions_);  // until then others may ask
    answerer_ = {};
    MPI_Finalize();
  }

  [[nodiscard]] std::set<std::int64_t> Silent() override {
    {
      const std::lock_guard lock(mutex_);
      for (int r = 0; r < size_; ++r) {
        if (r != rank_) {
          silent_.insert(r);
          Tell(r, kQuestion);
        }
      }
    }
    constexpr int kTries = 40;
    std::set<std::int64_t> silent;
    for (int i = 0; i < kTries && (i == 0 || !silent.empty()); ++i) {
      std::this_thread::sleep_for(kPause);
      const std::lock_guard lock(mutex_);
      silent = silent_;
    }
    return silent;
  }

 private:
  static constexpr int kQuestion = 0, kAnswer = 1;  // tags
  static constexpr std::chrono::milliseconds kPause{50};

  void Tell(int rank, int tag) {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Isend(nullptr, 0, MPI_BYTE, rank, tag, questions_, &request);
    MPI_Request_free(&request);
  }
  // Answers questions, and notes answers, until it is stopped.
  void Answer(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      int is_there = 0;
      MPI_Status status;
      MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, questions_, &is_there, &status);
      if (is_there == 0) {
        std::this_thread::sleep_for(kPause);
        continue;
      }
      MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, questions_,
               MPI_STATUS_IGNORE);
      if (status.MPI_TAG == kQuestion) {
        Tell(status.MPI_SOURCE, kAnswer);
      } else {
        const std::lock_guard lock(mutex_);
        silent_.erase(status.MPI_SOURCE);
      }
    }
  }

  [[nodiscard]] MPI_Comm Of(Channel channel) const {
    const std::lock_guard lock(mutex_);
    return channels_[static_cast<std::size_t>(channel)];
  }

  int rank_ = 0, size_ = 1;
  mutable std::mutex mutex_;
  std::vector<MPI_Comm> channels_;  // guarded by mutex_
  std::set<std::int64_t> silent_;   // have not answered yet; guarded by mutex_
  MPI_Comm questions_ = MPI_COMM_NULL;
  std::jthread answerer_;
};

}  // namespace
}  // namespace shardwright

extern "C" shardwright::MessagePassing* ShardwrightJoinProcesses(
    std::chrono::milliseconds timeout) {
  static shardwright::Mpi mpi(timeout);
  return &mpi;
}
