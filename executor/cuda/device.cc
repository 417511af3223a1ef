// One rank's view of the GPU: streams, tickets and waiting.
//
// Submit gives the work of one op to its stream and returns a ticket, the number of the work on
// that stream. The host does not wait here, but in Wait, for a ticket that it names. Example: op 7
// is an all-gather, op 8 a linear layer that reads its result.
//
//   Submit(op 7)         gather stream: launch, record event g3           ticket {gather, 3}
//   Submit(op 8)         compute stream: wait for g3, launch, record c5   ticket {compute, 5}
//   Wait({compute, 5})   the host polls c5; then works 1 to 5 of compute are over
//
// A stream runs in order, so one number says how far it is. Events go back to a pool when their
// work is over: a rank has as many events as it has works under way at most.
//
// Times of the GPU become times of the host's clock by an anchor, an event whose time is known.
// CUDA gives the distance of two events in milliseconds as fp32. One second apart it is exact to 61
// ns, 100 seconds apart to 8 us, so the anchor moves on with the work.

#include "executor/cuda/device.h"

#include <thread>

#include "core/error.h"
#include "executor/cuda/loopback.h"
#include "executor/host/process_communicator.h"
#include "executor/host/together.h"
#include "topologies/mesh.h"

namespace shardwright {

// Makes the groups of all ranks of this process. Example: 4 ranks as a mesh of 2 x 2, groups
// `shard` with stride 1 and `replicate` with stride 2. Loopback makes four groups: shard of ranks 0
// and 1, of 2 and 3, replicate of 0 and 2, of 1 and 3. With processes, rank 3 makes the two that it
// is in. A group has two implementations side by side: one for the GPU, one for updates in host
// memory.
CudaWorld::CudaWorld(const ExecuteContext& run_context, const CudaOptions& run_options,
                     Gpu& run_gpu)
    : context(run_context),
      options(run_options),
      gpu(run_gpu),
      patience(options.timeout + (options.processes == nullptr ? std::chrono::milliseconds(0)
                                                               : options.processes->timeout())),
      clock(options.processes == nullptr ? RunClock()
                                         : RunClock(AgreeOnStart(*options.processes))) {
  anchor = gpu.NewEvent(true);
  gpu.Record(anchor, gpu.NewStream(false));
  gpu.Synchronize(anchor);
  anchor_time = clock.Now();
  const Program& program = context.input.program;
  const std::int64_t ranks = MeshOf(program).RankCount();
  const std::int64_t first = options.processes == nullptr ? 0 : options.processes->rank();
  const std::int64_t last = options.processes == nullptr ? ranks : first + 1;
  for (std::int64_t r = first; r < last; ++r) {
    rings_[Rank(static_cast<std::size_t>(r))];
  }
  if (options.processes != nullptr) {
    options.processes->OnFailure(this, [this](const std::string& cause) { faults.Report(cause); });
    nccl_ = std::make_unique<NcclWorld>(*options.nccl, *options.processes, gpu, options.timeout,
                                        faults);
  }
  for (std::size_t g = 0; g < program.groups.size(); ++g) {
    const Group& group = program.groups[g];
    for (std::int64_t r = first; r < last; ++r) {
      const Key key = KeyOf(GroupId(g), Rank(static_cast<std::size_t>(r)));
      if (!groups_.contains(key)) {
        const GroupRanks members{group.size, key.second, group.stride};
        if (nccl_) {
          groups_[key] = nccl_->MakeGroup(members, "group " + group.name);
        } else {
          groups_[key] = std::make_unique<LoopbackGroup>(group.size, key.second, group.stride,
                                                         options.timeout, faults);
        }
        host_groups_[key] =
            NewCommunicator(options.processes, members, options.timeout, clock, faults);
      }
    }
  }
  if (nccl_) {
    nccl_->StartWatch();
  }
}

std::string CudaWorld::DescribeRanks() const {
  std::string text;
  for (const auto& [rank, ring] : rings_) {
    text += "rank " + std::to_string(rank.value) + ": " + ring.Describe() + '\n';
  }
  return text;
}

CudaWorld::~CudaWorld() {
  if (options.processes != nullptr) {
    options.processes->OnFailure(this, {});
  }
}

// Example as above: rank 3 is in the shard group that begins with rank 2, so the key is {shard, 2}.
CudaWorld::Key CudaWorld::KeyOf(GroupId group, Rank rank) const {
  return {group, PlaceInGroup(context.input.program.groups[group.value], rank).base};
}

GpuGroup& CudaWorld::GroupOf(GroupId group, Rank rank) {
  return *groups_.at(KeyOf(group, rank));
}

Communicator& CudaWorld::HostGroupOf(GroupId group, Rank rank) {
  return *host_groups_.at(KeyOf(group, rank));
}

std::int64_t CudaWorld::MemberOf(GroupId group, Rank rank) const {
  return PlaceInGroup(context.input.program.groups[group.value], rank).index;
}

CudaDevice::CudaDevice(CudaWorld& world, Rank rank)
    : world_(world),
      gpu_(world.gpu),
      rank_(rank),
      ring_(world.RingOf(rank)),
      anchor_(world.anchor),
      anchor_time_(world.anchor_time) {
  fault_ = reinterpret_cast<gpu::Fault*>(NewMemory(Bytes(sizeof(gpu::Fault))));
}

CudaDevice::~CudaDevice() {
  CudaDevice::Stop();
}

// Streams may still use calls and contexts: nothing of them may run on.
void CudaDevice::Stop() {
  try {
    for (Queue& queue : queues_) {
      if (queue.stream.value != nullptr && !queue.pending.empty()) {
        gpu_.Synchronize(queue.pending.back().event);
      }
    }
  } catch (const std::exception&) {  // the GPU is lost, and with it its work
  }
}

std::byte* CudaWorld::NewArena(Bytes size) {
  return nccl_ ? nccl_->Allocate(size) : gpu.Allocate(size, /*on_host=*/false);
}

// All memory of a rank is taken by two calls before the first step, one for the device and one for
// the host. A plan that does not fit ends here, with both numbers in the message, and not in the
// middle of a step.
std::byte* CudaDevice::Allocate(Bytes size, bool on_host) {
  if (on_host) {
    return ZeroFill(gpu_.Allocate(size, true), size);
  }
  CheckFree(size, world_.options.memory_limit);
  return ZeroFill(world_.NewArena(size), size);
}

std::byte* CudaDevice::NewMemory(Bytes size) {
  CheckFree(size);
  return ZeroFill(gpu_.Allocate(size, false), size);
}

void CudaDevice::CheckFree(Bytes size, Bytes limit) {
  const bool is_limited = limit > Bytes(0) && size > limit;
  if (is_limited || size > gpu_.FreeMemory()) {
    throw RunError("rank " + std::to_string(rank_.value) + ": out of memory: the plan needs " +
                   std::to_string(size.value) + " bytes of device memory, " +
                   (is_limited ? "the limit is " + std::to_string(limit.value)
                               : std::to_string(gpu_.FreeMemory().value) + " are free"));
  }
}

// The host waits, so that any stream may use the memory from now on.
std::byte* CudaDevice::ZeroFill(std::byte* data, Bytes size) {
  Queue& queue = QueueOf(Stream::kCompute);
  const GpuEvent event = TakeEvent(false);
  gpu_.Fill(data, 0, size.value, queue.stream);
  gpu_.Record(event, queue.stream);
  gpu_.Synchronize(event);
  free_events_.push_back(event);
  return data;
}

CudaDevice::Queue& CudaDevice::QueueOf(Stream stream) {
  Queue& queue = queues_[static_cast<std::size_t>(stream)];
  if (queue.stream.value == nullptr) {
    // Communication first: what it waits for is what others wait for.
    queue.stream = gpu_.NewStream(stream == Stream::kGather || stream == Stream::kReduce ||
                                  stream == Stream::kReplicate);
  }
  return queue;
}

GpuEvent CudaDevice::TakeEvent(bool timed) {
  std::vector<GpuEvent>& pool = timed ? free_timed_ : free_events_;
  if (pool.empty()) {
    return gpu_.NewEvent(timed);
  }
  const GpuEvent event = pool.back();
  pool.pop_back();
  return event;
}

// Pinned memory comes in pages, so 64 readbacks are made at once.
CudaDevice::Readback* CudaDevice::TakeReadback() {
  if (free_readbacks_.empty()) {
    constexpr std::int64_t kCount = 64;
    auto* const all = reinterpret_cast<Readback*>(
        gpu_.Allocate(Bytes(kCount * static_cast<std::int64_t>(sizeof(Readback))), true));
    for (std::int64_t i = 0; i < kCount; ++i) {
      free_readbacks_.push_back(all + i);
    }
  }
  Readback* const readback = free_readbacks_.back();
  free_readbacks_.pop_back();
  return readback;
}

const CudaDevice::Pending& CudaDevice::PendingOf(const Queue& queue, std::uint64_t sequence) {
  const std::uint64_t first = queue.pending.front().sequence;
  return queue.pending[static_cast<std::size_t>(sequence - first)];
}

// Example: the compute stream follows {gather, 3}. If `completed` of the gather stream is 3 or more
// there is nothing to wait for, else the stream waits for the event of work 3. Work of the own
// stream is in order anyway.
void CudaDevice::Follow(Queue& queue, const Ticket& ticket) {
  const Queue& other = queues_[static_cast<std::size_t>(ticket.stream)];
  if (&other != &queue && ticket.sequence > other.completed) {
    gpu_.WaitFor(queue.stream, PendingOf(other, ticket.sequence).event);
  }
}

SimTime CudaDevice::TimeOf(GpuEvent event) {
  return anchor_time_ + gpu_.Between(anchor_, event);
}

// Example: anchor at 0 s, an op ends at 1.2 s: its event is the next anchor, and the old one goes
// back to the pool. The first anchor stays, since other ranks of the process still count from it.
void CudaDevice::MoveAnchor(GpuEvent event, SimTime time) {
  constexpr SimTime kReach(1'000'000'000'000);  // a second: rounded to 61 ns
  if (time - anchor_time_ > kReach) {
    std::swap(anchor_, event);
    anchor_time_ = time;
  }
  if (event.value != world_.anchor.value) {  // others count from it
    free_timed_.push_back(event);
  }
}

// Reads what the finished work has left: loss, faults of the data, counts of labels, times. Its
// events and its readback go back to the pools.
void CudaDevice::Complete(const Pending& pending) {
  if (pending.readback != nullptr) {
    *pending.loss_to = pending.readback->number;
    found_ = pending.readback->fault;
    if (pending.loss != nullptr) {
      const gpu::LabelCounts& labels = pending.readback->labels;
      world_.options.counter->Add(pending.key,
                                  {.correct = labels.correct, .counted = labels.counted},
                                  pending.readback->number, pending.loss->reduction);
    }
    free_readbacks_.push_back(pending.readback);
  }
  if (pending.end.value != nullptr) {
    const SimTime end = TimeOf(pending.end);
    if (pending.span != nullptr) {
      pending.span->start = TimeOf(pending.start);
      pending.span->end = end;
      free_timed_.push_back(pending.start);
    }
    if (pending.end_to != nullptr) {
      *pending.end_to = end;
    }
    seen_ = std::max(seen_, end);
    MoveAnchor(pending.end, end);
  }
  if (pending.owns_event) {
    free_events_.push_back(pending.event);
  }
}

// Finished works leave the queue at its front; the first that is not over ends the search. O(works
// that are over), and one query of an event beyond them.
void CudaDevice::Collect(Queue& queue) {
  GpuEvent over;  // ops of a graph have one event
  while (!queue.pending.empty() && (queue.pending.front().event.value == over.value ||
                                    gpu_.IsOver(queue.pending.front().event))) {
    over = queue.pending.front().event;
    Complete(queue.pending.front());
    queue.completed = queue.pending.front().sequence;
    queue.pending.pop_front();
  }
  NoteOpen(queue);
}

void CudaDevice::NoteOpen(const Queue& queue) {
  ring_.SetOpen(static_cast<Stream>(&queue - queues_.data()),
                queue.pending.empty() ? nullptr : queue.pending.front().name, queue.pending.size());
}

void CudaDevice::CheckFault() {
  const std::string text = DescribeFault(found_);
  if (!text.empty()) {
    world_.faults.Report("rank " + std::to_string(rank_.value) + ": " + text);
    world_.faults.ThrowIfFailed();
  }
}

// Polls, first without sleeping, then every 50 us, and looks each time whether another rank has
// failed. A wait inside CUDA would not end when a rank is missing, and the run would hang without a
// message.
void CudaDevice::Await(GpuEvent event, const std::string& what) {
  constexpr int kSpins = 1 << 14;  // before the thread sleeps between two looks
  // The watch over NCCL's collectives knows better who is missing, so it speaks first.
  const auto patience = world_.patience;
  const auto limit = std::chrono::steady_clock::now() + patience;
  for (int spin = 0; !gpu_.IsOver(event); ++spin) {
    world_.faults.ThrowIfFailed();
    if (spin < kSpins) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (std::chrono::steady_clock::now() > limit) {
      world_.faults.Report("rank " + std::to_string(rank_.value) + ": waited " +
                           std::to_string(patience.count()) + " ms for " + what + "; " +
                           ring_.DescribeOpen());
      world_.faults.ThrowIfFailed();
    }
  }
}

void CudaDevice::AwaitQueue(Queue& queue, std::uint64_t sequence) {
  Collect(queue);
  if (queue.completed >= sequence) {
    return;
  }
  const Pending& pending = PendingOf(queue, sequence);
  Await(pending.event, "op " + *pending.name);
  Collect(queue);
}

void CudaDevice::Wait(Ticket ticket) {
  if (ticket.sequence > 0) {
    AwaitQueue(queues_[static_cast<std::size_t>(ticket.stream)], ticket.sequence);
  }
  CheckFault();
}

// End of a run. Faults come back with losses, so a last look is needed for ranks and works without
// one.
void CudaDevice::Finish() {
  for (Queue& queue : queues_) {
    AwaitQueue(queue, queue.submitted);
  }
  Queue& compute = QueueOf(Stream::kCompute);
  const GpuEvent event = TakeEvent(false);
  Readback* const readback = TakeReadback();
  gpu_.Copy(&readback->fault, fault_, sizeof(gpu::Fault), compute.stream);
  gpu_.Record(event, compute.stream);
  Await(event, "the last step");
  found_ = readback->fault;
  free_readbacks_.push_back(readback);
  free_events_.push_back(event);
  CheckFault();
}

void CudaDevice::Copy(void* to, const void* from, std::int64_t bytes) {
  const GpuStream stream = QueueOf(Stream::kCompute).stream;
  const GpuEvent event = TakeEvent(false);
  gpu_.Copy(to, from, bytes, stream);
  gpu_.Record(event, stream);
  gpu_.Synchronize(event);
  free_events_.push_back(event);
}

// Bytes of 0xff are NaN in every dtype. An op that reads memory before anything was written there
// gives NaN instead of the numbers of a previous step, which would look right. For tests of
// placements.
void CudaDevice::FillPoison(const Work& work, GpuStream stream) {
  for (const ByteRange& range : work.poison) {
    gpu_.Fill(range.data, 0xff, range.bytes, stream);
  }
}

// Order on the op's stream: waits for the tickets of its inputs and for the last collective that
// takes turns with it, then the start time and poison. Kernels or the collective follow, the end
// time, and the event of the ticket. Spans have the host's times of the same call: issued and
// issue_end.
Ticket CudaDevice::Submit(const Work& work) {
  world_.faults.ThrowIfFailed();
  if (work.span == nullptr && !stretches_.empty()) {
    if (const std::optional<Ticket> ticket = SubmitInStretch(work); ticket.has_value()) {
      return *ticket;
    }
  }
  Queue& queue = QueueOf(work.stream);
  Collect(queue);
  ring_.Issue(*work.name);
  Pending pending;
  pending.sequence = ++queue.submitted;
  pending.name = work.name;
  for (const Ticket& ticket : work.waits) {
    Follow(queue, ticket);
  }
  const auto* const collective =
      work.call == nullptr ? nullptr : std::get_if<CollectiveCall>(work.call);
  if (collective != nullptr) {
    Ticket& last = group_states_[world_.TurnsOf(collective->group)].last;
    Follow(queue, last);
    last = {work.stream, pending.sequence};
  }
  // NCCL launches from a thread of its own, whose work CUPTI gives to no span: events time that.
  const bool is_launched_here = collective == nullptr || world_.options.processes == nullptr;
  ActivityLog* const activities =
      work.span == nullptr || !is_launched_here ? nullptr : world_.options.activities;
  pending.end_to = work.end;
  if (work.end != nullptr || (work.span != nullptr && activities == nullptr)) {
    pending.end = TakeEvent(true);
  }
  if (work.span != nullptr) {
    work.span->issued = Now();
  }
  if (activities != nullptr) {
    activities->Begin(*work.span);
  } else if (work.span != nullptr) {
    pending.span = work.span;
    pending.start = TakeEvent(true);
    gpu_.Record(pending.start, queue.stream);
  }
  FillPoison(work, queue.stream);
  if (work.call != nullptr) {
    gpu_.BeginRange(work.name->c_str());
    try {
      SubmitCall(work, queue, pending);
    } catch (const std::exception& error) {
      world_.faults.Report("rank " + std::to_string(rank_.value) + ", op " + *work.name + ": ",
                           error);
      world_.faults.ThrowIfFailed();
    }
    gpu_.EndRange();
  }
  if (activities != nullptr) {
    activities->End();
  }
  if (work.span != nullptr) {
    // Before the event: a GPU that has nothing else to do is there before this thread is back.
    work.span->issue_end = Now();
  }
  if (pending.end.value != nullptr) {
    gpu_.Record(pending.end, queue.stream);
  }
  pending.event = TakeEvent(false);
  gpu_.Record(pending.event, queue.stream);
  queue.pending.push_back(pending);
  NoteOpen(queue);
  return {work.stream, pending.sequence};
}

}  // namespace shardwright
