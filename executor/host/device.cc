#include "executor/host/device.h"

#include <algorithm>
#include <cstdlib>
#include <exception>

#include "core/error.h"
#include "core/threads.h"
#include "executor/host/arithmetic.h"
#include "executor/host/process_communicator.h"
#include "executor/host/together.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

void TellEnd(const Work& work, const Span& span) {
  if (work.end != nullptr) {
    *work.end = span.end;
  }
}

}  // namespace

HostWorld::HostWorld(const ExecuteContext& run_context, const HostOptions& run_options)
    : context(run_context),
      options(run_options),
      clock(options.processes == nullptr ? RunClock()
                                         : RunClock(AgreeOnStart(*options.processes))) {
  if (options.processes != nullptr) {
    options.processes->OnFailure(this, [this](const std::string& cause) { faults.Report(cause); });
  }
  const Program& program = context.input.program;
  const std::int64_t ranks = MeshOf(program).RankCount();
  const std::int64_t first = options.processes == nullptr ? 0 : options.processes->rank();
  const std::int64_t last = options.processes == nullptr ? ranks : first + 1;
  for (std::size_t g = 0; g < program.groups.size(); ++g) {
    const Group& group = program.groups[g];
    for (std::int64_t r = first; r < last; ++r) {
      const std::int64_t base = PlaceInGroup(group, Rank(static_cast<std::size_t>(r))).base;
      for (const bool of_host_threads : {false, true}) {
        std::unique_ptr<Communicator>& slot = communicators_[{GroupId(g), base, of_host_threads}];
        if (!slot) {
          slot = NewCommunicator(options.processes, {group.size, base, group.stride},
                                 options.timeout, clock, faults);
        }
      }
    }
  }
}

HostWorld::~HostWorld() {
  if (options.processes != nullptr) {
    options.processes->OnFailure(this, {});
  }
}

Communicator& HostWorld::CommunicatorOf(GroupId group, Rank rank, bool of_host_threads) {
  const Group& g = context.input.program.groups[group.value];
  return *communicators_.at({group, PlaceInGroup(g, rank).base, of_host_threads});
}

HostDevice::HostDevice(HostWorld& world, Rank rank)
    : world_(world), rank_(rank), team_(static_cast<std::size_t>(world.options.threads)) {
  world_.faults.Register(mutex_, changed_);
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    queues_[s].random.seed(world_.options.delay_seed * 1000003 + rank.value * kStreamCount + s);
  }
  try {  // what this machine has no threads for does not begin
    team_.For(team_.threads(), [](std::size_t, std::size_t) {});
    for (const OpShape& shape : world_.context.input.program.shapes) {
      Queue& queue = queues_[static_cast<std::size_t>(shape.stream)];
      if (shape.stream != Stream::kHost && !queue.worker.joinable()) {
        queue.worker = StartThread([this, stream = shape.stream] { ServeStream(stream); });
      }
    }
  } catch (...) {
    Stop();
    world_.faults.Withdraw(mutex_);
    throw;
  }
}

HostDevice::~HostDevice() {
  Stop();
  world_.faults.Withdraw(mutex_);  // a worker of another rank may still be waking all
}

void HostDevice::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (Queue& queue : queues_) {
    if (queue.worker.joinable()) {
      queue.worker.join();
    }
  }
}

std::byte* HostDevice::Allocate(Bytes size, bool on_host) {
  const Bytes limit = world_.options.memory_limit;
  if (!on_host && limit > Bytes(0) && size > limit) {
    throw RunError("rank " + std::to_string(rank_.value) + ": out of memory: the plan needs " +
                   std::to_string(size.value) + " bytes of device memory, the limit is " +
                   std::to_string(limit.value));
  }
  constexpr std::uintptr_t kAlignment = 256;  // as placed buffers expect
  // calloc maps large areas that cost nothing until they are touched, as much of a bucket never is.
  const auto bytes = static_cast<std::size_t>(size.value) + kAlignment;
  auto* data = static_cast<std::byte*>(std::calloc(bytes, 1));
  if (data == nullptr) {
    throw RunError("rank " + std::to_string(rank_.value) + ": this machine has no " +
                   std::to_string(bytes) + " bytes left");
  }
  memory_.emplace_back(data, std::free);
  return data + (kAlignment - reinterpret_cast<std::uintptr_t>(data) % kAlignment) % kAlignment;
}

bool HostDevice::IsOver(const Ticket& ticket) const {
  return queues_[static_cast<std::size_t>(ticket.stream)].completed >= ticket.sequence;
}

template <class Predicate>
void HostDevice::Await(std::unique_lock<std::mutex>& lock, Predicate predicate) {
  changed_.wait(lock, [&] { return predicate() || world_.faults.failed(); });
  if (!predicate()) {
    world_.faults.ThrowIfFailed();
  }
}

// Who waits for this rank in a collective gives up after one time-out and names it. An op that
// nobody waits for has twice as long, so that the two do not race.
template <class Predicate>
void HostDevice::AwaitStreams(std::unique_lock<std::mutex>& lock, Predicate predicate) {
  const auto limit = 2 * world_.options.timeout;
  const auto begin = std::chrono::steady_clock::now();
  const auto is_over = [&] { return predicate() || world_.faults.failed(); };
  auto deadline = begin + limit;
  while (!changed_.wait_until(lock, deadline, is_over)) {
    deadline = std::max(begin, last_end_) + limit;
    if (std::chrono::steady_clock::now() >= deadline) {
      const std::string cause = "rank " + std::to_string(rank_.value) + ", op " + StuckOp() +
                                ": not over after " + std::to_string(limit.count()) +
                                " ms, twice the time-out";
      lock.unlock();
      world_.faults.Report(cause);
      world_.faults.ThrowIfFailed();
    }
  }
  if (!predicate()) {
    world_.faults.ThrowIfFailed();
  }
}

std::string HostDevice::StuckOp() const {
  const std::string* name = nullptr;
  for (const Queue& queue : queues_) {
    if (queue.is_running) {
      const Work& work = queue.items.front().work;
      const bool waits = work.call != nullptr && std::holds_alternative<CollectiveCall>(*work.call);
      name = name == nullptr || !waits ? work.name : name;
    }
  }
  return name == nullptr ? "(none)" : *name;
}

Ticket HostDevice::Submit(const Work& work) {
  const std::lock_guard lock(mutex_);
  Queue& queue = queues_[static_cast<std::size_t>(work.stream)];
  Item item;
  item.work = work;
  item.waits.assign(work.waits.begin(), work.waits.end());
  if (work.call != nullptr) {
    if (const auto* collective = std::get_if<CollectiveCall>(work.call)) {
      item.turn = turns_[collective->group].submitted++;
    }
  }
  if (work.span != nullptr) {
    work.span->issued = work.span->issue_end = Now();  // before the worker can see the item
  }
  queue.items.push_back(std::move(item));
  if (!queue.worker.joinable()) {
    queue.worker = StartThread([this, stream = work.stream] { ServeStream(stream); });
  }
  changed_.notify_all();
  return {work.stream, ++queue.submitted};
}

void HostDevice::Wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  AwaitStreams(lock, [&] { return IsOver(ticket); });
}

void HostDevice::Finish() {
  std::unique_lock lock(mutex_);
  for (const Queue& queue : queues_) {
    AwaitStreams(lock, [&] { return queue.completed == queue.submitted; });
  }
}

void HostDevice::RunOnHost(const Work& work) {
  Span unused;
  Span& span = work.span != nullptr ? *work.span : unused;
  span.issued = span.issue_end = Now();
  for (const Ticket& ticket : work.waits) {
    Wait(ticket);
  }
  Item item;
  item.work = work;
  span.ready = Now();
  try {
    RunItem(item, span.ready, span);
    TellEnd(work, span);
  } catch (const std::exception& error) {
    world_.faults.Report("rank " + std::to_string(rank_.value) + ", op " + *work.name + ": ",
                         error);
    world_.faults.ThrowIfFailed();
  }
}

void HostDevice::ServeStream(Stream stream) {
  std::unique_lock lock(mutex_);
  Queue& queue = queues_[static_cast<std::size_t>(stream)];
  try {
    while (true) {
      Await(lock, [&] { return !queue.items.empty() || stopping_; });
      if (queue.items.empty()) {
        return;
      }
      RunFront(queue, lock);
    }
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) {
      lock.lock();
    }
    const std::string* name = queue.items.empty() ? nullptr : queue.items.front().work.name;
    const std::string where =
        name == nullptr ? "" : "rank " + std::to_string(rank_.value) + ", op " + *name + ": ";
    lock.unlock();
    world_.faults.Report(where, error);
  }
}

void HostDevice::RunFront(Queue& queue, std::unique_lock<std::mutex>& lock) {
  Item& item = queue.items.front();  // the deque moves no elements while others are appended
  Span unused;
  Span& span = item.work.span != nullptr ? *item.work.span : unused;
  for (const Ticket& ticket : item.waits) {
    Await(lock, [&] { return IsOver(ticket); });
  }
  span.ready = Now();
  Turns* turns = nullptr;
  if (item.work.call != nullptr) {
    if (const auto* collective = std::get_if<CollectiveCall>(item.work.call)) {
      turns = &turns_[collective->group];
      Await(lock, [&] { return turns->completed == item.turn; });
    }
  }
  queue.is_running = true;
  lock.unlock();
  const HostOptions& options = world_.options;
  if (options.delay_percent > 0 && static_cast<int>(queue.random() % 100) < options.delay_percent) {
    const auto most = static_cast<std::uint64_t>(options.max_delay.count());
    std::this_thread::sleep_for(std::chrono::microseconds(queue.random() % (most + 1)));
  }
  RunItem(item, Now(), span);
  TellEnd(item.work, span);
  lock.lock();
  if (turns != nullptr) {
    ++turns->completed;
  }
  ++queue.completed;
  queue.is_running = false;
  last_end_ = std::chrono::steady_clock::now();
  queue.items.pop_front();
  changed_.notify_all();
}

void HostDevice::ClipOnHost(UpdateCall& update, const Item& item) {
  auto* memory = reinterpret_cast<std::byte*>(&norm_);
  Call squares = NormCall{update.gradients, update.divisor, memory};
  Execute(squares, *item.work.step, world_.context, &team_);
  if (update.clip_group.valid()) {
    norm_sum_.code = OpCode::kAllReduce;
    norm_sum_.group = update.clip_group;
    norm_sum_.elements = 1;
    norm_sum_.send = norm_sum_.receive = memory;
    const Group& group = world_.context.input.program.groups[update.clip_group.value];
    (void)world_.CommunicatorOf(update.clip_group, rank_, true)
        .Run(PlaceInGroup(group, rank_).index, norm_sum_, *item.work.name, Now(), SimTime(0));
  }
  Call clip = ClipCall{update.gradients, memory};
  Execute(clip, *item.work.step, world_.context, &team_);
}

void HostDevice::RunItem(const Item& item, SimTime arrival, Span& span) try {
  ThrowIfStopped();
  const Work& work = item.work;
  span.arrival = span.start = arrival;
  const bool is_traced = work.span != nullptr;
  const SimTime cpu = is_traced ? ThreadCpuTime() : SimTime(0);
  PoisonFill(work.poison);
  const auto* collective = work.call != nullptr ? std::get_if<CollectiveCall>(work.call) : nullptr;
  if (collective != nullptr) {
    const Group& group = world_.context.input.program.groups[collective->group.value];
    Communicator& communicator =
        world_.CommunicatorOf(collective->group, rank_, work.stream == Stream::kHost);
    const Communicator::Times times = communicator.Run(
        PlaceInGroup(group, rank_).index, *collective, *work.name, arrival, work.least_duration);
    span.start = times.start;
    span.end = times.end;
    span.cpu = is_traced ? std::min(ThreadCpuTime() - cpu, span.end - span.start) : SimTime(0);
    return;
  }
  if (auto* update = work.call == nullptr ? nullptr : std::get_if<UpdateCall>(work.call);
      update != nullptr && update->clips) {
    ClipOnHost(*update, item);
  }
  if (work.call != nullptr) {
    Execute(*work.call, *work.step, world_.context, &team_);
  }
  if (is_traced) {
    constexpr std::int64_t kPicosecondsPerNanosecond = 1000;
    const SimTime others(team_.TakeNanoseconds() * kPicosecondsPerNanosecond);
    span.cpu = ThreadCpuTime() - cpu + others;
  }
  if (work.least_duration > SimTime(0)) {
    std::this_thread::sleep_until(world_.clock.At(arrival + work.least_duration));
  }
  span.end = Now();
} catch (const Interrupted&) {  // would end the program here: it is no std::exception
  throw RunError("interrupted");
}

}  // namespace shardwright
