// Groups of ranks as NCCL communicators, one process and one GPU each.
//
// Start, example of 4 ranks as 2 x 2: rank 0 makes an id and shares it; all ranks make one
// communicator of 4. Split makes the groups of it: for `shard`, ranks 0 and 1 have colour 0, ranks
// 2 and 3 colour 2, the first rank of each group. Every rank calls each split, in the same order.
//
// Communicators are non-blocking: a call may return "in progress", and Settle asks until it is
// done. So a call that waits for a missing rank ends with the time-out or when the run fails; a
// blocking one would never return. The lock is released between two looks, for the watch has to
// abort meanwhile.
//
// A reduce-scatter of 8 bf16 elements by 4 ranks with divisor 4: NCCL sums, rank 1 gets elements 2
// and 3, and one MapKernel divides them by 4 on the same stream. In fp16 NCCL averages itself if
// the divisor is the number of ranks, as sums may overflow above 65,504.

#include "executor/cuda/nccl_world.h"

#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "executor/cuda/kernels/elementwise.h"
#include "executor/cuda/ops/launch.h"
#include "executor/host/together.h"

namespace shardwright {
namespace {

using Clock = std::chrono::steady_clock;

// The result of a call that NCCL's threads continue after it has returned. ncclCommSplit says
// success when it has only begun, and leaves the new handle null meanwhile. Only the communicator's
// own state tells.
int Begun(int result) {
  return result == NcclNumbers::kSuccess ? NcclNumbers::kInProgress : result;
}

// Divides `count` elements in place.
void Divide(const CollectivePlace& place, const gpu::Array& sum, std::int64_t count,
            double divisor) {
  if (divisor == 1.0) {
    return;
  }
  gpu::MapArgs args;
  args.op = gpu::MapOp::kDivide;
  args.factor = static_cast<float>(divisor);
  args.n = count;
  args.a = sum;
  args.z = sum;
  ops::Map({place.gpu, place.stream, nullptr}, args);
}

}  // namespace

// One group's collectives. Each is: zeros, event, NCCL's call, event, then divisions behind it.
class NcclWorld::NcclGroup : public GpuGroup {
 public:
  NcclGroup(NcclWorld& world, std::size_t index) : world_(world), index_(index) {}

  void Submit(std::int64_t /*member*/, const CollectiveCall& call, const std::string& name,
              const CollectivePlace& place) override {
    for (const ByteRange& zeros : call.zeros) {
      place.gpu.Fill(zeros.data, 0, zeros.bytes, place.stream);
    }
    const CollectiveWatch::Events events = world_.watch_->Next(index_);
    place.gpu.Record(events.begin, place.stream);
    {
      std::unique_lock lock(world_.mutex_);
      world_.faults_.ThrowIfFailed();
      place.gpu.MakeCurrent();
      Enqueue(call, place, lock);
      world_.communicators_[index_].is_connected = true;
    }
    place.gpu.Record(events.end, place.stream);
    world_.watch_->Submitted(index_, name, events);
    Finish(call, place);
  }

 private:
  [[nodiscard]] std::int64_t Size() const { return world_.communicators_[index_].ranks.size; }
  // NCCL divides by the number of ranks itself: numbers of fp16, whose sums may be too large for
  // it. Averages of bf16 would be sums times a rounded 1 / ranks, and up to version 2.30 neither
  // NVLink SHARP nor symmetric memory makes them.
  [[nodiscard]] bool Averages(const CollectiveCall& call) const {
    return call.dtype == DType::kFp16 && call.divisor == static_cast<double>(Size()) && Size() > 1;
  }

  // All-gathers move bytes, whatever their dtype. Sums need a dtype that NCCL knows.
  void Enqueue(const CollectiveCall& call, const CollectivePlace& place,
               std::unique_lock<std::mutex>& lock) {
    const NcclTable& nccl = world_.table_;
    void* const handle = world_.communicators_[index_].handle;
    void* const stream = place.stream.value;
    const std::int64_t part = call.elements / Size();
    const int op = Averages(call) ? NcclNumbers::kAvg : NcclNumbers::kSum;
    const int type = NcclTypeOf(call.dtype);
    if (call.code == OpCode::kAllGather) {
      Gather(call, part * SizeOf(call.dtype), handle, stream, lock);
      return;
    }
    SW_CHECK(type >= 0, "a sum of numbers that NCCL does not sum");
    if (call.code == OpCode::kReduceScatter) {
      world_.Settle(nccl.reduce_scatter(call.send, call.receive, static_cast<std::size_t>(part),
                                        type, op, handle, stream),
                    handle, "ncclReduceScatter", lock);
      return;
    }
    SW_CHECK(call.code == OpCode::kAllReduce, "a collective that the CUDA device does not know");
    world_.Settle(
        nccl.all_reduce(call.receive, call.receive, static_cast<std::size_t>(call.elements), type,
                        op, handle, stream),
        handle, "ncclAllReduce", lock);
  }

  // Example: 4 parts of 100 bytes that begin 128 bytes apart are four broadcasts in one NCCL group,
  // which is one launch.
  void Gather(const CollectiveCall& call, std::int64_t part, void* handle, void* stream,
              std::unique_lock<std::mutex>& lock) {
    const NcclTable& nccl = world_.table_;
    const auto bytes = static_cast<std::size_t>(part);
    if (call.receive_stride == 0 || call.receive_stride == part) {
      world_.Settle(
          nccl.all_gather(call.send, call.receive, bytes, NcclNumbers::kUint8, handle, stream),
          handle, "ncclAllGather", lock);
      return;
    }
    // Parts that lie apart: everybody sends its own, in one launch.
    int result = nccl.group_start();
    for (std::int64_t m = 0; m < Size() && result == NcclNumbers::kSuccess; ++m) {
      result = nccl.broadcast(call.send, call.receive + m * call.receive_stride, bytes,
                              NcclNumbers::kUint8, static_cast<int>(m), handle, stream);
      result = result == NcclNumbers::kInProgress ? NcclNumbers::kSuccess : result;
    }
    const int end = nccl.group_end();
    world_.Settle(result != NcclNumbers::kSuccess ? result : end, handle, "ncclBroadcast", lock);
  }

  // The division that NCCL leaves behind a sum.
  void Finish(const CollectiveCall& call, const CollectivePlace& place) const {
    if (call.code == OpCode::kAllGather) {
      return;
    }
    const bool scatters = call.code == OpCode::kReduceScatter;
    const std::int64_t count = scatters ? call.elements / Size() : call.elements;
    const double divisor = Averages(call) ? 1.0 : call.divisor;
    Divide(place, {call.receive, call.dtype}, count, divisor);
  }

  NcclWorld& world_;
  const std::size_t index_;
};

// Hooks give the watch events, NCCL's errors and the posts of other ranks; then the communicator of
// all ranks is made, of which the groups are split.
NcclWorld::NcclWorld(const NcclTable& table, MessagePassing& processes, Gpu& gpu,
                     std::chrono::milliseconds timeout, FaultBoard& faults)
    : table_(table),
      processes_(processes),
      gpu_(gpu),
      set_up_(processes.timeout()),
      faults_(faults) {
  CollectiveWatch::Hooks hooks;
  hooks.new_event = [this] { return gpu_.NewEvent(false); };
  hooks.is_over = [this](GpuEvent event) { return gpu_.IsOver(event); };
  hooks.problem_of = [this](std::size_t index) {
    if (faults_.failed()) {
      // For another reason. Collectives under way may never end, and their waiters have to.
      return std::string("the run has failed");
    }
    const std::lock_guard lock(mutex_);
    void* const handle = communicators_[index].handle;
    int error = NcclNumbers::kSuccess;
    if (handle == nullptr ||
        (table_.comm_async_error(handle, &error) == NcclNumbers::kSuccess &&
         (error == NcclNumbers::kSuccess || error == NcclNumbers::kInProgress))) {
      return std::string();
    }
    return ProblemOf(error, handle, "NCCL");
  };
  hooks.tell = [this](const std::vector<CollectiveProgress>& mine) {
    processes_.Post(std::as_bytes(std::span(mine)));
  };
  hooks.told_by = [this](std::int64_t rank) {
    const std::vector<std::byte> bytes = processes_.PostOf(static_cast<int>(rank));
    std::vector<CollectiveProgress> told(bytes.size() / sizeof(CollectiveProgress));
    std::memcpy(told.data(), bytes.data(), told.size() * sizeof(CollectiveProgress));
    return told;
  };
  hooks.at_fault = [this](const std::set<std::int64_t>& missing) {
    return processes_.AtFault(missing);
  };
  hooks.fail = [this](const std::string& cause) {
    faults_.Report(cause);
    AbortAll();
  };
  watch_ = std::make_unique<CollectiveWatch>(processes_.rank(), timeout, set_up_, std::move(hooks));
  NcclUniqueId id{};
  if (processes_.rank() == 0) {
    const int result = table_.get_unique_id(&id);
    if (result != NcclNumbers::kSuccess) {
      throw RunError(ProblemOf(result, nullptr, "ncclGetUniqueId"));
    }
  }
  ShareFromFirst(processes_, MessagePassing::kAll, {"the id of NCCL's communicators"}, &id,
                 sizeof id);
  (void)table_.get_version(&version_);
  gpu_.MakeCurrent();
  NcclConfig config = NcclConfigFor(version_);
  std::unique_lock lock(mutex_);
  const int result = table_.comm_init(&all_, processes_.size(), id, processes_.rank(), &config);
  Settle(result, all_, "ncclCommInitRankConfig", lock);
}

// Finalize waits for all ranks. After a failure some never come, so communicators are aborted
// instead.
NcclWorld::~NcclWorld() {
  watch_.reset();
  if (faults_.failed()) {
    AbortAll();
    return;
  }
  try {
    std::unique_lock lock(mutex_);
    gpu_.MakeCurrent();
    CloseWindows(lock);
    std::vector<void*> handles = Mapped<void*>(communicators_, &Communicator::handle);
    handles.push_back(all_);
    for (void* const handle : handles) {
      Settle(table_.comm_finalize(handle), handle, "ncclCommFinalize", lock);
      (void)table_.comm_destroy(handle);
    }
    for (void* const memory : memory_) {
      (void)table_.mem_free(memory);
    }
  } catch (const RunError&) {  // all work is over, so nothing is lost
  }
}

// Ends NCCL's kernels that wait for other ranks. Called by the watch while the host thread may be
// waiting.
void NcclWorld::AbortAll() {
  const std::lock_guard lock(mutex_);
  try {
    gpu_.MakeCurrent();
  } catch (const RunError&) {  // the GPU is lost
  }
  for (Communicator& communicator : communicators_) {
    if (void* const handle = std::exchange(communicator.handle, nullptr); handle != nullptr) {
      (void)table_.comm_abort(handle);
    }
  }
  if (void* const handle = std::exchange(all_, nullptr); handle != nullptr) {
    (void)table_.comm_abort(handle);
  }
}

std::string NcclWorld::ProblemOf(int result, void* communicator, const char* call) const {
  const char* const last = table_.last_error(communicator);
  std::string text =
      std::string(call) + ": " + table_.error_string(result) + " (" + std::to_string(result) + ')';
  if (last != nullptr && *last != '\0') {
    text += std::string(": ") + last;
  }
  if (last != nullptr && std::strstr(last, "Duplicate GPU") != nullptr) {
    text += "; ranks in processes need a GPU each: --loopback " +
            std::to_string(processes_.size()) + " runs all of them on one";
  }
  return text;
}

// Waits while `result` is "in progress": without sleep for 1 ms, then with pauses of 100 us.
// Enqueuing takes microseconds; meeting other ranks for the first time takes seconds.
void NcclWorld::Settle(int result, void* communicator, const char* call,
                       std::unique_lock<std::mutex>& lock) {
  const Clock::time_point begin = Clock::now();
  const bool is_connected =
      communicator == all_ || AnyOf(communicators_, [&](const Communicator& its) {
        return its.handle == communicator && its.is_connected;
      });
  const std::chrono::milliseconds limit = is_connected ? processes_.timeout() : set_up_;
  while (result == NcclNumbers::kInProgress) {
    const Clock::duration waited = Clock::now() - begin;
    lock.unlock();
    faults_.ThrowIfFailed();
    if (const Clock::duration pause = PauseAfter(waited); pause > Clock::duration::zero()) {
      std::this_thread::sleep_for(pause);
    }
    lock.lock();
    if (waited > limit) {
      throw RunError(std::string(call) + ": waited " + std::to_string(limit.count()) +
                     " ms for the other ranks");
    }
    faults_.ThrowIfFailed();
    if (const int asked = table_.comm_async_error(communicator, &result);
        asked != NcclNumbers::kSuccess) {
      throw RunError(ProblemOf(asked, communicator, call));
    }
  }
  if (result != NcclNumbers::kSuccess) {
    throw RunError(ProblemOf(result, communicator, call));
  }
}

std::chrono::microseconds NcclWorld::PauseAfter(std::chrono::nanoseconds waited) {
  constexpr std::chrono::milliseconds kSpin{1};
  return std::chrono::microseconds(waited < kSpin ? 0 : 100);
}

// The group of `ranks` out of the communicator of all.
std::size_t NcclWorld::Split(const GroupRanks& ranks, const std::string& name) {
  std::unique_lock lock(mutex_);
  gpu_.MakeCurrent();
  NcclConfig config = NcclConfigFor(version_);
  // NCCL may fill it in later, when this call has given up.
  void*& handle =
      communicators_.emplace_back(Communicator{.handle = nullptr, .ranks = ranks}).handle;
  const int result =
      table_.comm_split(all_, static_cast<int>(ranks.first), processes_.rank(), &handle, &config);
  Settle(Begun(result), all_, "ncclCommSplit", lock);
  SW_CHECK(handle != nullptr, "a split without a communicator");
  Settle(NcclNumbers::kInProgress, handle, "ncclCommSplit", lock);
  const std::size_t count = communicators_.size();
  lock.unlock();  // the watch asks for errors, which takes this lock, while it holds its own
  const std::size_t index = watch_->AddCommunicator(ranks, name);
  SW_CHECK(index + 1 == count, "communicators out of order");
  return index;
}

// Memory of all collectives, in symmetric windows if every rank can. `paths_` says in words which
// it is, so a person can see why all-gathers take multiprocessors.
std::byte* NcclWorld::Allocate(Bytes size) {
  const bool has_peers =
      AnyOf(communicators_, [](const Communicator& c) { return c.ranks.size > 1; });
  std::string problem = has_peers ? DescribeNoWindows(table_) : "every group has one rank";
  if (problem.empty()) {
    if (std::byte* const memory = AllocateForWindows(size); memory != nullptr) {
      Register(memory, size);
      paths_ = version_ >= NcclNumbers::kCopyVersion
                   ? "memory in symmetric windows; all-gathers by copy engines where all GPUs of a "
                     "group are joined by NVLink"
                   : "memory in symmetric windows; all-gathers by kernels, NCCL 2.28 is the first "
                     "with copy engines";
      return memory;
    }
    problem = "ncclMemAlloc refused on a rank";
  }
  paths_ = "no symmetric windows (" + problem + "); all-gathers by kernels";
  return gpu_.Allocate(size, /*on_host=*/false);
}

std::string NcclWorld::paths() const {
  const std::string order = DescribeNoLaunchOrder(version_);
  constexpr int kLaunchEvents = 12030;  // by which NCCL lets kernels overlap that have an order
  const int driver = gpu_.Info().driver_version;
  return paths_ + (order.empty() ? "" : "; warning: ") + order +
         (order.empty() && communicators_.size() > 1 && driver > 0 && driver < kLaunchEvents
              ? "; warning: the driver is older than CUDA 12.3, so NCCL runs collectives of "
                "several "
                "groups one at a time, which simulate does not know"
              : "");
}

std::byte* NcclWorld::AllocateForWindows(Bytes size) {
  gpu_.MakeCurrent();
  void* memory = nullptr;
  const bool has_memory =
      table_.mem_alloc(&memory, static_cast<std::size_t>(size.value)) == NcclNumbers::kSuccess &&
      reinterpret_cast<std::uintptr_t>(memory) % NcclNumbers::kWindowAlignment == 0;
  // Collectives take registered memory on all ranks or on none.
  const auto answers = ShareBytes(processes_, MessagePassing::kAll, {"memory for NCCL's windows"},
                                  {has_memory ? std::byte{1} : std::byte{0}});
  if (AllOf(answers, [](const auto& answer) { return answer.front() == std::byte{1}; })) {
    return static_cast<std::byte*>(memory);
  }
  if (memory != nullptr) {
    (void)table_.mem_free(memory);
  }
  return nullptr;
}

// The whole arena becomes one window of each group with two or more ranks. Registration is
// collective.
void NcclWorld::Register(std::byte* memory, Bytes size) {
  memory_.push_back(memory);
  std::unique_lock lock(mutex_);
  for (Communicator& communicator : communicators_) {
    if (communicator.ranks.size < 2) {
      continue;
    }
    try {
      Settle(Begun(table_.window_register(
                 communicator.handle, memory, static_cast<std::size_t>(size.value),
                 &communicator.windows.emplace_back(nullptr), NcclNumbers::kSymmetricWindow)),
             communicator.handle, "ncclCommWindowRegister", lock);
    } catch (const RunError& error) {
      throw RunError(std::string(error.what()) + "; NCCL_WIN_ENABLE=0 does without windows");
    }
  }
}

void NcclWorld::CloseWindows(std::unique_lock<std::mutex>& lock) {
  for (Communicator& communicator : communicators_) {
    for (void* const window : communicator.windows) {
      if (window != nullptr) {  // null where the GPUs cannot show each other their memory
        Settle(Begun(table_.window_deregister(communicator.handle, window)), communicator.handle,
               "ncclCommWindowDeregister", lock);
      }
    }
    communicator.windows.clear();
  }
}

// Example of a name in messages: "group shard of ranks 0, 1"; of more than nine ranks the first
// eight and the last are named.
std::unique_ptr<GpuGroup> NcclWorld::MakeGroup(const GroupRanks& ranks, const std::string& name) {
  std::string members;
  constexpr std::int64_t kMostNamed = 8;
  for (std::int64_t m = 0; m < ranks.size; ++m) {
    if (m < kMostNamed || m + 1 == ranks.size) {
      members += (m == 0 ? "" : ", ") + std::to_string(ranks.first + m * ranks.stride);
    } else if (m == kMostNamed) {
      members += ", ...";
    }
  }
  return std::make_unique<NcclGroup>(*this, Split(ranks, name + " of ranks " + members));
}

}  // namespace shardwright
