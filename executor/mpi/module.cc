// MessagePassing by MPI: the shared object shardwright_mpi.so, loaded by JoinProcesses.

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <mpi.h>

#include "executor/host/message_passing.h"

namespace shardwright {
namespace {

// MPI counts in int. Parts of more bytes than that are counted in units of eight.
struct Units {
  MPI_Datatype type = MPI_BYTE;
  std::int64_t bytes = 1;
};

Units UnitsOf(std::span<const MessagePart> parts) {
  bool large = false, whole = true;
  for (const MessagePart& part : parts) {
    large = large || part.offset + part.bytes > INT_MAX;
    whole = whole && part.offset % 8 == 0 && part.bytes % 8 == 0;
  }
  return large && whole ? Units{MPI_UINT64_T, 8} : Units{};
}

int Count(std::int64_t bytes, const Units& units) {
  const std::int64_t count = bytes / units.bytes;
  if (count > INT_MAX) {
    std::fprintf(stderr, "error: a message of %lld bytes is too large for MPI\n",
                 static_cast<long long>(bytes));
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  }
  return static_cast<int>(count);
}

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

void Fill(std::span<const MessagePart> parts, const Units& units, std::vector<int>& counts,
          std::vector<int>& offsets) {
  for (const MessagePart& part : parts) {
    counts.push_back(Count(part.bytes, units));
    offsets.push_back(Count(part.offset, units));
  }
}

class Mpi : public MessagePassing {
 public:
  Mpi() {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    if (provided < MPI_THREAD_MULTIPLE) {
      std::fprintf(stderr, "error: this MPI does not let several threads communicate\n");
      MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    channels_.push_back(MPI_COMM_WORLD);
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }

  [[nodiscard]] Channel Split(int color) override {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, color, rank_, &part);
    const std::lock_guard lock(mutex_);
    channels_.push_back(part);
    return static_cast<Channel>(channels_.size()) - 1;
  }

  [[nodiscard]] std::unique_ptr<Pending> Send(Channel channel, int to, const void* data,
                                              std::int64_t bytes) override {
    auto pending = std::make_unique<MpiPending>();
    MPI_Isend(data, Count(bytes, {}), MPI_BYTE, to, 0, Of(channel), pending->request());
    return pending;
  }

  [[nodiscard]] std::unique_ptr<Pending> Receive(Channel channel, int from, void* data,
                                                 std::int64_t bytes) override {
    auto pending = std::make_unique<MpiPending>();
    MPI_Irecv(data, Count(bytes, {}), MPI_BYTE, from, 0, Of(channel), pending->request());
    return pending;
  }

  [[nodiscard]] std::unique_ptr<Pending> AllGather(Channel channel, void* data,
                                                   std::span<const MessagePart> parts) override {
    auto pending = std::make_unique<MpiPending>();
    const Units units = UnitsOf(parts);
    Fill(parts, units, pending->counts, pending->offsets);
    MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, pending->counts.data(),
                    pending->offsets.data(), units.type, Of(channel), pending->request());
    return pending;
  }

  [[nodiscard]] std::unique_ptr<Pending> AllToAll(Channel channel, const void* from,
                                                  std::span<const MessagePart> from_parts, void* to,
                                                  std::span<const MessagePart> to_parts) override {
    auto pending = std::make_unique<MpiPending>();
    const Units send = UnitsOf(from_parts), receive = UnitsOf(to_parts);
    Fill(from_parts, send, pending->counts, pending->offsets);
    Fill(to_parts, receive, pending->other_counts, pending->other_offsets);
    MPI_Ialltoallv(from, pending->counts.data(), pending->offsets.data(), send.type, to,
                   pending->other_counts.data(), pending->other_offsets.data(), receive.type,
                   Of(channel), pending->request());
    return pending;
  }

  void Finish() override { MPI_Finalize(); }

 private:
  [[nodiscard]] MPI_Comm Of(Channel channel) const {
    const std::lock_guard lock(mutex_);
    return channels_[static_cast<std::size_t>(channel)];
  }

  int rank_ = 0, size_ = 1;
  mutable std::mutex mutex_;
  std::vector<MPI_Comm> channels_;  // guarded by mutex_
};

}  // namespace
}  // namespace shardwright

extern "C" shardwright::MessagePassing* ShardwrightJoinProcesses() {
  static shardwright::Mpi mpi;
  return &mpi;
}
