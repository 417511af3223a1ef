// An NCCL for emulated GPUs: ranks meet in files, so that they may be threads or processes.
//
// A collective is a step of the emulated stream. When the stream comes to it, it writes what this
// rank sends; it is over once the files of all ranks are there.
//
// Calls do as those of communicators that do not block: they return kInProgress, and what was
// called happens when ncclCommGetAsyncError has been asked twice. What nccl.h forbids is a mistake:
// a call on a communicator that is in progress, buffers that overlap, windows of other memory,
// communicators that run at once without NCCL_LAUNCH_ORDER_IMPLICIT. Mistakes are counted
// (TakeFakeNcclReport); in the library that programs load (SW_FAKE_NCCL_ENDS) one ends the process.
//
// The environment variable SHARDWRIGHT_FAKE_NCCL plants a fault: "stall RANK N" keeps that rank out
// of its N-th collective (from 1), "fail RANK N" makes its communicator report an error then.

#include "tests/executor/cuda/fake_nccl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "executor/cuda/nccl.h"
#include "executor/half.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"

namespace shardwright::testing {
namespace {

constexpr int kInvalidArgument = 4, kInvalidUsage = 5, kSystemError = 2;

struct Comm {
  std::string name;          // prefix of its files
  std::vector<int> members;  // ranks in the world, by member; empty: not known yet
  int rank = 0;              // in the world
  int me = -1;
  int color = 0;
  const Comm* parent = nullptr;  // null: the world
  int world = 0;
  int splits = 0;
  std::int64_t submitted = 0;
  std::atomic<std::int64_t> done{0};
  std::atomic<bool> aborted{false};
  std::atomic<int> error{0};
  bool has_copy_engines = false;
  // A communicator that is being split from this one, and where its handle goes once it is ready.
  Comm* splitting = nullptr;
  void** split = nullptr;
  std::string registering;  // prefix of the files by which members meet
  struct Window {
    const std::byte* begin;
    std::size_t bytes;
  };
  std::vector<std::unique_ptr<Window>> windows;
  int asks_left = 0;                           // until what is in progress is over
  std::vector<std::function<void()>> waiting;  // happens then
  bool finalizing = false;
  std::atomic<bool> is_running{false};
};

// What one rank of a world has called for, in the order of its host: with an order of launches a
// collective begins when all before it have.
struct Launches {
  std::int64_t issued = 0, begun = 0;
};
constexpr int kAsks = 2;

thread_local int group_depth = 0;
thread_local Comm* grouped = nullptr;  // the communicator that the open group is of

std::mutex all_mutex;
std::vector<std::unique_ptr<Comm>> all;  // live as long as the process: streams may still use them

// Guarded by all_mutex: what TakeFakeNcclReport tells, and memory by ncclMemAlloc.
FakeNcclReport report;
std::map<std::pair<std::string, int>, Launches> launches;  // by folder of the world and rank
std::map<const void*, std::size_t> allocated;

// Requires all_mutex.
void NoteMistake(const std::string& text) {
#ifdef SW_FAKE_NCCL_ENDS
  std::fputs(("fake NCCL: " + text + "\n").c_str(), stderr);
  std::abort();
#endif
  report.mistakes.push_back(text);
}
void AddMistake(const std::string& text) {
  const std::lock_guard lock(all_mutex);
  NoteMistake(text);
}

bool KeepsLaunchOrder() {
  const char* const text = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  return text != nullptr && std::strtoll(text, nullptr, 0) != 0;
}

Launches& LaunchesOf(const Comm& comm) {
  return launches[{std::filesystem::path(comm.name).parent_path().string(), comm.rank}];
}

// Whether a call on the communicator is allowed now.
bool IsFree(const Comm& comm, const char* call) {
  if (comm.asks_left > 0 && grouped != &comm) {
    AddMistake(std::string(call) + " on a communicator that is in progress");
    return false;
  }
  return true;
}

// In place, as nccl.h allows it, is where both begin together.
void CheckBuffers(const char* call, const void* send, std::size_t sent, const void* receive,
                  std::size_t received, const void* in_place) {
  const auto* const a = static_cast<const std::byte*>(send);
  const auto* const b = static_cast<const std::byte*>(receive);
  if (a < b + received && b < a + sent && send != in_place) {
    AddMistake(std::string(call) + ": buffers overlap");
  }
}

// The place in a window of the communicator, or -1: in none.
std::int64_t OffsetInWindow(const Comm& comm, const void* data, std::size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(data);
  for (const auto& window : comm.windows) {
    if (begin >= window->begin && begin + bytes <= window->begin + window->bytes) {
      return begin - window->begin;
    }
  }
  return -1;
}

Comm* NewComm() {
  const std::lock_guard lock(all_mutex);
  all.push_back(std::make_unique<Comm>());
  return all.back().get();
}

std::string FileOf(const std::string& stem, int rank) {
  return stem + "." + std::to_string(rank);
}
void WriteFile(const std::string& path, const void* data, std::size_t bytes) {
  const std::string unfinished = path + "~";
  std::ofstream(unfinished, std::ios::binary)
      .write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  std::error_code ignored;  // the folder is gone when all have given up
  std::filesystem::rename(unfinished, path, ignored);
}
std::vector<std::byte> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  std::vector<std::byte> data(static_cast<std::size_t>(in.tellg()));
  in.seekg(0);
  in.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
  return data;
}
bool AllThere(const std::string& stem, const std::vector<int>& ranks) {
  if (stem.empty()) {
    return true;
  }
  for (const int rank : ranks) {
    if (!std::filesystem::exists(FileOf(stem, rank))) {
      return false;
    }
  }
  return true;
}

// Whether all members have come to the communicator; then they are known.
bool IsReady(Comm& comm) {
  if (!comm.members.empty()) {
    return true;
  }
  std::vector<int> candidates;
  for (int r = 0; r < comm.world; ++r) {
    candidates.push_back(r);
  }
  if (comm.parent != nullptr) {
    candidates = comm.parent->members;
  }
  const std::string stem = comm.name + ".init";
  if (!AllThere(stem, candidates)) {
    return false;
  }
  std::vector<int> members;
  for (const int rank : candidates) {
    int color = 0;
    std::memcpy(&color, ReadFile(FileOf(stem, rank)).data(), sizeof color);
    if (color == comm.color) {
      comm.me = rank == comm.rank ? static_cast<int>(members.size()) : comm.me;
      members.push_back(rank);
    }
  }
  comm.name += ".c" + std::to_string(comm.color);
  comm.members = members;
  return true;
}

// The last one that leaves the world removes its files.
void Leave(const Comm& comm) {
  const std::string stem = comm.name + ".bye";
  if (comm.parent != nullptr) {
    return;
  }
  WriteFile(FileOf(stem, comm.rank), nullptr, 0);
  if (!comm.members.empty() && AllThere(stem, comm.members)) {
    std::error_code ignored;
    std::filesystem::remove_all(std::filesystem::path(comm.name).parent_path(), ignored);
  }
}

DType TypeOf(int type) {
  return type == NcclNumbers::kFp32   ? DType::kFp32
         : type == NcclNumbers::kBf16 ? DType::kBf16
         : type == NcclNumbers::kFp16 ? DType::kFp16
                                      : DType::kUint8;
}

// One collective, with what this rank sends and what it does with everybody's. `offset`: of the
// memory that is to be at the same place of all ranks' windows.
struct Collective {
  const void* send = nullptr;
  std::size_t bytes = 0;
  std::int64_t offset = -1;
  std::function<void(const std::vector<std::vector<std::byte>>& parts)> take;
};

bool IsPlanted(const char* what, const Comm& comm, std::int64_t number) {
  const char* const text = std::getenv("SHARDWRIGHT_FAKE_NCCL");
  std::istringstream in(text == nullptr ? "" : text);
  std::string kind;
  int rank = -1;
  std::int64_t from = 0;
  in >> kind >> rank >> from;
  return kind == what && rank == comm.rank && number >= from;
}

// Whether the stream may begin with a collective that its host issued as number `order`.
bool MayBegin(Comm& comm, std::int64_t order) {
  const std::lock_guard lock(all_mutex);
  Launches& own = LaunchesOf(comm);
  if (KeepsLaunchOrder() && own.begun + 1 < order) {
    return false;
  }
  for (const auto& other : all) {
    if (other->is_running && other.get() != &comm && &LaunchesOf(*other) == &own &&
        !KeepsLaunchOrder()) {
      NoteMistake("two communicators at once without an order of launches");
    }
  }
  own.begun = std::max(own.begun, order);
  comm.is_running = true;
  return true;
}

void Launch(Comm& comm, void* stream, const Collective& collective, std::int64_t number,
            std::int64_t order) {
  const std::string stem = comm.name + "." + std::to_string(number);
  bool is_written = false;
  static_cast<EmulatedStream*>(stream)->Push([&comm, stem, number, order, collective,
                                              is_written]() mutable {
    if (comm.aborted) {
      return true;
    }
    if (comm.done != number - 1 || IsPlanted("stall", comm, number) ||
        (!is_written && !MayBegin(comm, order))) {
      return false;
    }
    if (IsPlanted("fail", comm, number)) {
      comm.error = kSystemError;
      return false;
    }
    if (!is_written) {
      std::vector<std::byte> sent(sizeof collective.offset + collective.bytes);
      std::memcpy(sent.data(), &collective.offset, sizeof collective.offset);
      if (collective.bytes > 0) {
        std::memcpy(sent.data() + sizeof collective.offset, collective.send, collective.bytes);
      }
      WriteFile(FileOf(stem, comm.rank), sent.data(), sent.size());
      is_written = true;
    }
    if (!AllThere(stem, comm.members)) {
      return false;
    }
    std::vector<std::vector<std::byte>> parts;
    for (const int rank : comm.members) {
      std::vector<std::byte> part = ReadFile(FileOf(stem, rank));
      std::int64_t offset = 0;
      std::memcpy(&offset, part.data(), sizeof offset);
      if (offset != collective.offset) {
        AddMistake("a collective at offset " + std::to_string(collective.offset) +
                   " of a window, rank " + std::to_string(rank) + " at " + std::to_string(offset));
      }
      part.erase(part.begin(), part.begin() + sizeof offset);
      parts.push_back(std::move(part));
    }
    collective.take(parts);
    // All have come to this one, so all have read the one before.
    std::error_code ignored;
    std::filesystem::remove(FileOf(comm.name + "." + std::to_string(number - 1), comm.rank),
                            ignored);
    comm.is_running = false;
    comm.done = number;
    return true;
  });
}

int Submit(void* handle, void* stream, Collective collective) {
  auto& comm = *static_cast<Comm*>(handle);
  if (handle == nullptr || comm.members.empty() || !IsFree(comm, "a collective")) {
    return kInvalidArgument;
  }
  if (group_depth > 0) {
    if (grouped != nullptr && grouped != &comm) {
      AddMistake("a group of two communicators");
    }
    grouped = &comm;
  }
  std::int64_t order = 0;
  {
    const std::lock_guard lock(all_mutex);
    order = ++LaunchesOf(comm).issued;
  }
  comm.waiting.push_back([&comm, stream, collective, number = ++comm.submitted, order] {
    Launch(comm, stream, collective, number, order);
  });
  comm.asks_left = kAsks;
  return NcclNumbers::kInProgress;
}

// out[i] = sum over ranks of their element first + i, or their average.
void Sum(const std::vector<std::vector<std::byte>>& parts, DType type, std::size_t first,
         std::size_t count, int op, void* out) {
  // NCCL averages by a factor in the numbers' own type, rounded to it.
  std::array<std::byte, sizeof(float)> rounded{};
  StoreFloat(type, rounded.data(), 0,
             op == NcclNumbers::kAvg ? 1.0F / static_cast<float>(parts.size()) : 1.0F);
  const float factor = LoadFloat(type, rounded.data(), 0);
  for (std::size_t i = 0; i < count; ++i) {
    float sum = 0.0F;
    for (const std::vector<std::byte>& part : parts) {
      sum += factor * LoadFloat(type, part.data(), static_cast<std::int64_t>(first + i));
    }
    StoreFloat(type, out, static_cast<std::int64_t>(i), sum);
  }
}

// Reductions of memory that the library could show other GPUs, and cannot.
void CountReduction(const Comm& comm, const void* send, std::size_t bytes) {
  const std::lock_guard lock(all_mutex);
  const bool has_windows = !allocated.empty() && comm.members.size() > 1;
  report.outside_windows += has_windows && OffsetInWindow(comm, send, bytes) < 0 ? 1 : 0;
}

bool MayUseCopyEngines(const NcclConfig& config) {
  return config.size == sizeof config && config.version >= NcclNumbers::kCopyVersion &&
         config.block_policy == NcclNumbers::kCopyEngines;
}

}  // namespace

FakeNcclReport TakeFakeNcclReport() {
  const std::lock_guard lock(all_mutex);
  return std::exchange(report, {});
}

}  // namespace shardwright::testing

// The functions of nccl.h.
using namespace shardwright;           // NOLINT
using namespace shardwright::testing;  // NOLINT

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22809;
  return NcclNumbers::kSuccess;
}

int ncclGetUniqueId(NcclUniqueId* id) {
  const std::string pattern =
      (std::filesystem::temp_directory_path() / "fake-nccl-XXXXXX").string();
  std::memset(id->internal, 0, sizeof id->internal);
  if (pattern.size() >= sizeof id->internal) {
    return kSystemError;
  }
  std::memcpy(id->internal, pattern.data(), pattern.size());
  return ::mkdtemp(id->internal) == nullptr ? kSystemError : NcclNumbers::kSuccess;
}

int ncclCommInitRankConfig(void** handle, int ranks, NcclUniqueId id, int rank,
                           NcclConfig* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || rank < 0 || rank >= ranks) {
    return kInvalidArgument;
  }
  Comm* const comm = NewComm();
  comm->name = std::string(id.internal) + "/world";
  comm->rank = rank;
  comm->world = ranks;
  comm->has_copy_engines = MayUseCopyEngines(*config);
  WriteFile(FileOf(comm->name + ".init", rank), &comm->color, sizeof comm->color);
  *handle = comm;
  return NcclNumbers::kInProgress;
}

int ncclCommSplit(void* handle, int color, int /*key*/, void** part, NcclConfig* config) {
  auto& parent = *static_cast<Comm*>(handle);
  if (parent.members.empty() || parent.splitting != nullptr || !IsFree(parent, "a split")) {
    return kInvalidUsage;
  }
  Comm* const comm = NewComm();
  comm->name = parent.name + "-" + std::to_string(++parent.splits);
  comm->rank = parent.rank;
  comm->color = color;
  comm->parent = &parent;
  comm->has_copy_engines = MayUseCopyEngines(*config);
  WriteFile(FileOf(comm->name + ".init", comm->rank), &color, sizeof color);
  // As NCCL does it: success, while the parent is in progress and the handle null.
  *part = nullptr;
  parent.splitting = comm;
  parent.split = part;
  return NcclNumbers::kSuccess;
}

int ncclCommGetAsyncError(void* handle, int* error) {
  auto& comm = *static_cast<Comm*>(handle);
  if (comm.splitting != nullptr && IsReady(*comm.splitting)) {
    // The handle is there; its communicator is in progress for a while yet.
    comm.splitting->asks_left = kAsks;
    *comm.split = std::exchange(comm.splitting, nullptr);
  }
  if (comm.asks_left > 0 && group_depth == 0 && --comm.asks_left == 0) {
    for (const auto& what : std::exchange(comm.waiting, {})) {
      what();
    }
  }
  const bool is_ready = IsReady(comm) && comm.splitting == nullptr && comm.asks_left == 0 &&
                        AllThere(comm.registering, comm.members);
  *error = comm.error != 0 ? comm.error.load()
                           : (is_ready ? NcclNumbers::kSuccess : NcclNumbers::kInProgress);
  return NcclNumbers::kSuccess;
}

int ncclCommFinalize(void* handle) {
  auto& comm = *static_cast<Comm*>(handle);
  if (!comm.windows.empty()) {
    AddMistake("ncclCommFinalize with open windows");
  }
  (void)IsFree(comm, "ncclCommFinalize");
  comm.finalizing = true;
  comm.asks_left = kAsks;
  return NcclNumbers::kInProgress;
}

int ncclCommDestroy(void* handle) {
  auto& comm = *static_cast<Comm*>(handle);
  if (!comm.finalizing || comm.asks_left > 0) {
    AddMistake("ncclCommDestroy before ncclCommFinalize is over");
  }
  Leave(comm);
  return NcclNumbers::kSuccess;
}

int ncclCommAbort(void* handle) {
  auto& comm = *static_cast<Comm*>(handle);
  comm.aborted = true;
  Leave(comm);
  return NcclNumbers::kSuccess;
}

const char* ncclGetErrorString(int result) {
  return result == kSystemError ? "unhandled system error" : "invalid usage";
}

const char* ncclGetLastError(void* /*handle*/) {
  return "planted by a test";
}

int ncclAllGather(const void* send, void* receive, std::size_t part, int type, void* comm,
                  void* stream) {
  const std::size_t bytes = part * static_cast<std::size_t>(SizeOf(TypeOf(type)));
  const auto& members = *static_cast<const Comm*>(comm);
  const std::int64_t offset = OffsetInWindow(members, receive, bytes * members.members.size());
  if ((offset < 0) != (OffsetInWindow(members, send, bytes) < 0)) {
    AddMistake("an all-gather with one of its buffers in a window");
  }
  CheckBuffers("ncclAllGather", send, bytes, receive, bytes * members.members.size(),
               static_cast<std::byte*>(receive) + bytes * static_cast<std::size_t>(members.me));
  {
    const std::lock_guard lock(all_mutex);
    ++(offset >= 0 && members.has_copy_engines ? report.by_copy_engines : report.by_kernels);
  }
  return Submit(comm, stream, {send, bytes, offset, [receive](const auto& parts) {
                                 auto* out = static_cast<std::byte*>(receive);
                                 for (const auto& one : parts) {
                                   out = std::copy(one.begin(), one.end(), out);
                                 }
                               }});
}

int ncclReduceScatter(const void* send, void* receive, std::size_t part, int type, int op,
                      void* handle, void* stream) {
  const auto& comm = *static_cast<const Comm*>(handle);
  const DType dtype = TypeOf(type);
  const std::size_t bytes = part * comm.members.size() * static_cast<std::size_t>(SizeOf(dtype));
  const std::size_t first = part * static_cast<std::size_t>(comm.me);
  CheckBuffers("ncclReduceScatter", send, bytes, receive, bytes / comm.members.size(),
               static_cast<std::byte*>(receive) - first * static_cast<std::size_t>(SizeOf(dtype)));
  CountReduction(comm, send, bytes);
  return Submit(handle, stream,
                {send, bytes, OffsetInWindow(comm, send, bytes),
                 [=](const auto& parts) { Sum(parts, dtype, first, part, op, receive); }});
}

int ncclAllReduce(const void* send, void* receive, std::size_t count, int type, int op,
                  void* handle, void* stream) {
  const DType dtype = TypeOf(type);
  const std::size_t bytes = count * static_cast<std::size_t>(SizeOf(dtype));
  CheckBuffers("ncclAllReduce", send, bytes, receive, bytes, receive);
  CountReduction(*static_cast<const Comm*>(handle), send, bytes);
  return Submit(handle, stream,
                {send, bytes, OffsetInWindow(*static_cast<const Comm*>(handle), send, bytes),
                 [=](const auto& parts) { Sum(parts, dtype, 0, count, op, receive); }});
}

int ncclBroadcast(const void* send, void* receive, std::size_t count, int type, int root,
                  void* handle, void* stream) {
  const auto& comm = *static_cast<const Comm*>(handle);
  const std::size_t bytes =
      comm.me == root ? count * static_cast<std::size_t>(SizeOf(TypeOf(type))) : 0;
  CheckBuffers("ncclBroadcast", send, bytes, receive, bytes, receive);
  return Submit(handle, stream, {send, bytes, -1, [=](const auto& parts) {
                                   const auto& from = parts[static_cast<std::size_t>(root)];
                                   std::copy(from.begin(), from.end(),
                                             static_cast<std::byte*>(receive));
                                 }});
}

int ncclGroupStart() {
  ++group_depth;
  return NcclNumbers::kSuccess;
}
int ncclGroupEnd() {
  if (group_depth == 0) {
    AddMistake("ncclGroupEnd without a group");
    return kInvalidUsage;
  }
  const Comm* const comm = --group_depth == 0 ? std::exchange(grouped, nullptr) : grouped;
  return comm == nullptr ? NcclNumbers::kSuccess : NcclNumbers::kInProgress;
}

int ncclMemAlloc(void** memory, std::size_t bytes) {
  constexpr std::size_t kAlignment = NcclNumbers::kWindowAlignment;
  *memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  const std::lock_guard lock(all_mutex);
  allocated[*memory] = bytes;
  return NcclNumbers::kSuccess;
}

int ncclMemFree(void* memory) {
  {
    const std::lock_guard lock(all_mutex);
    for (const auto& comm : all) {
      for (const auto& window : comm->windows) {
        if (window->begin == memory) {
          NoteMistake("ncclMemFree of memory in a window");
        }
      }
    }
    if (allocated.erase(memory) == 0) {
      NoteMistake("ncclMemFree of other memory");
      return kInvalidArgument;
    }
  }
  std::free(memory);
  return NcclNumbers::kSuccess;
}

// Collective: over once all members have registered as many bytes.
int ncclCommWindowRegister(void* handle, void* memory, std::size_t bytes, void** window,
                           int flags) {
  auto& comm = *static_cast<Comm*>(handle);
  (void)IsFree(comm, "ncclCommWindowRegister");
  {
    const std::lock_guard lock(all_mutex);
    const auto at = allocated.find(memory);
    if (at == allocated.end() || at->second < bytes || comm.members.empty() || comm.submitted > 0 ||
        flags != NcclNumbers::kSymmetricWindow) {
      NoteMistake("ncclCommWindowRegister");
      return kInvalidUsage;
    }
    comm.windows.push_back(
        std::make_unique<Comm::Window>(Comm::Window{static_cast<const std::byte*>(memory), bytes}));
    *window = comm.windows.back().get();
  }
  const std::string stem = comm.name + ".window" + std::to_string(comm.windows.size());
  WriteFile(FileOf(stem, comm.rank), &bytes, sizeof bytes);
  comm.registering = stem;
  return NcclNumbers::kSuccess;  // it has begun
}

int ncclCommWindowDeregister(void* handle, void* window) {
  auto& comm = *static_cast<Comm*>(handle);
  const std::lock_guard lock(all_mutex);
  const auto is_meant = [&](const auto& open) { return open.get() == window; };
  if (std::erase_if(comm.windows, is_meant) != 1) {
    NoteMistake("ncclCommWindowDeregister of another window");
  }
  return NcclNumbers::kSuccess;
}

}  // extern "C"
