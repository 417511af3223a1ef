#include "executor/host/device.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <set>

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

// Of the ranks beside `rank` in all stages, those of `stage` and the one behind it, which the first
// is behind the last; a rank of another stage alone.
GroupRanks NeighboursOf(const Mesh& mesh, std::int64_t stage, Rank rank) {
  const auto [low, high] = std::minmax({stage, (stage + 1) % mesh.pipeline});
  const GroupPlace place = PlaceInGroup(mesh.Pipeline(), rank);
  if (place.index != low && place.index != high) {
    return {1, static_cast<std::int64_t>(rank.value), 0};  // no neighbours have this stride
  }
  const std::int64_t stride = mesh.Pipeline().stride;
  return {2, place.base + low * stride, (high - low) * stride};
}

}  // namespace

HostWorld::HostWorld(std::span<const ExecuteContext> contexts, const HostOptions& run_options)
    : options(run_options),
      clock(options.processes == nullptr ? RunClock() : RunClock(AgreeOnStart(*options.processes))),
      contexts_(contexts) {
  if (options.processes != nullptr) {
    options.processes->OnFailure(this, [this](const std::string& cause) { faults.Report(cause); });
  }
  // All processes make all kinds of groups, in one order: a rank without such a group is alone.
  std::set<std::string> names;
  for (const ExecuteContext& context : contexts_) {
    for (const Group& group : context.input.program.groups) {
      names.insert(group.name);
    }
  }
  const Mesh mesh = MeshOf(contexts_.front().input.program);
  const std::int64_t first = options.processes == nullptr ? 0 : options.processes->rank();
  const std::int64_t last = options.processes == nullptr ? mesh.RankCount() : first + 1;
  for (const std::string& name : names) {
    for (std::int64_t r = first; r < last; ++r) {
      const Rank rank(static_cast<std::size_t>(r));
      Group group = {name};
      for (const Group& its : ContextOf(rank).input.program.groups) {
        group = its.name == name ? its : group;
      }
      Join(name, {group.size, PlaceInGroup(group, rank).base, group.stride});
    }
  }
  for (std::int64_t stage = 0; stage < mesh.pipeline && mesh.pipeline > 1; ++stage) {
    for (std::int64_t r = first; r < last; ++r) {
      Join("", NeighboursOf(mesh, stage, Rank(static_cast<std::size_t>(r))));
    }
  }
}

void HostWorld::Join(const std::string& name, const GroupRanks& ranks) {
  for (const bool of_host_threads : {false, true}) {
    std::unique_ptr<Communicator>& slot =
        communicators_[{name, ranks.first, ranks.stride, of_host_threads}];
    if (!slot || options.processes != nullptr) {
      slot = NewCommunicator(options.processes, ranks, options.timeout, clock, faults);
    }
  }
}

HostWorld::~HostWorld() {
  if (options.processes != nullptr) {
    options.processes->OnFailure(this, {});
  }
}

const ExecuteContext& HostWorld::ContextOf(Rank rank) const {
  return contexts_[StageOf(contexts_.front().input.program, rank)];
}

HostWorld::Membership HostWorld::MembershipOf(GroupId group, Rank rank, bool of_host_threads) {
  const Program& program = ContextOf(rank).input.program;
  const auto transfers = std::find_if(
      program.shapes.begin(), program.shapes.end(),
      [&](const OpShape& shape) { return shape.group == group && IsTransfer(shape.code); });
  if (transfers == program.shapes.end()) {
    const Group& g = program.groups[group.value];
    const GroupPlace place = PlaceInGroup(g, rank);
    return {*communicators_.at({g.name, place.base, g.stride, of_host_threads}), place.index};
  }
  const std::int64_t before = transfers->stream == Stream::kNext ? 0 : program.pipeline_size - 1;
  const GroupRanks pair =
      NeighboursOf(MeshOf(program), (program.pipeline_rank + before) % program.pipeline_size, rank);
  return {*communicators_.at({"", pair.first, pair.stride, of_host_threads}),
          pair.first == static_cast<std::int64_t>(rank.value) ? 0 : 1};
}

HostDevice::HostDevice(HostWorld& world, Rank rank)
    : world_(world),
      rank_(rank),
      context_(world.ContextOf(rank)),
      team_(static_cast<std::size_t>(world.options.threads)) {
  world_.faults.Register(mutex_, changed_);
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    queues_[s].random.seed(world_.options.delay_seed * 1000003 + rank.value * kStreamCount + s);
  }
  try {  // what this machine has no threads for does not begin
    team_.For(team_.threads(), [](std::size_t, std::size_t) {});
    for (const OpShape& shape : context_.input.program.shapes) {
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
  Execute(squares, *item.work.step, context_, &team_);
  if (update.clip_group.valid()) {
    norm_sum_.code = OpCode::kAllReduce;
    norm_sum_.group = update.clip_group;
    norm_sum_.elements = 1;
    norm_sum_.send = norm_sum_.receive = memory;
    const auto [communicator, member] = world_.MembershipOf(update.clip_group, rank_, true);
    (void)communicator.Run(member, norm_sum_, *item.work.name, Now(), SimTime(0));
  }
  Call clip = ClipCall{update.gradients, memory};
  Execute(clip, *item.work.step, context_, &team_);
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
    const auto [communicator, member] =
        world_.MembershipOf(collective->group, rank_, work.stream == Stream::kHost);
    const Communicator::Times times =
        communicator.Run(member, *collective, *work.name, arrival, work.least_duration);
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
    Execute(*work.call, *work.step, context_, &team_);
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
