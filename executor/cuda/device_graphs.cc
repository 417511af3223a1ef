// How a CudaDevice launches stretches of a step's ops as graphs.
//
// Example: a stretch of 12 ops, about 20 kernels.
//   step 1   op by op: libraries choose algorithms and take memory, which a capture forbids
//   step 2   captured, then launched: one call for 20 kernels
//   step 3   launched, as in all later steps
// If the capture fails, step 2 and all later ones run op by op, and a warning names the ops.
//
// Tickets stay as without graphs. Example: the stream has 20 works, so the 12 ops get tickets 21 to
// 32, all with the event behind the graph. A wait for ticket 25 is a wait for all, which is the
// same to other streams. Only the last op of a stretch has waiters there (graphs.h).

#include <exception>
#include <string>

#include "core/printable.h"
#include "executor/cuda/device.h"
#include "executor/cuda/graphs.h"

namespace shardwright {

void CudaDevice::Prepare(const Body& step, std::span<const Work> works) {
  if (!world_.options.graphs) {
    return;
  }
  const bool scales_loss = world_.context.input.job.precision.param == DType::kFp16;
  for (const std::vector<std::uint32_t>& ops : FindStretches(step, works, scales_loss)) {
    Stretch& stretch = stretches_.emplace_back();
    for (const std::uint32_t op : ops) {
      in_stretch_[works[op].call] = {stretches_.size() - 1, stretch.works.size()};
      stretch.works.push_back(works[op]);
    }
  }
}

// The first op of a stretch launches all of it; the others only look up their ticket.
std::optional<Ticket> CudaDevice::SubmitInStretch(const Work& work) {
  const auto found = in_stretch_.find(work.call);
  if (found == in_stretch_.end()) {
    return std::nullopt;
  }
  const auto [number, place] = found->second;
  Stretch& stretch = stretches_[number];
  if (place == 0) {
    stretch.first = 0;
    Queue& queue = QueueOf(work.stream);
    if (stretch.state == Stretch::State::kNew) {
      // By themselves: libraries choose their algorithms, kernels are loaded, memory is taken.
      stretch.state = Stretch::State::kRan;
      return std::nullopt;
    }
    if (stretch.state == Stretch::State::kRan) {
      const bool is_captured = Capture(stretch, queue, *work.step);
      stretch.state = is_captured ? Stretch::State::kCaptured : Stretch::State::kRefused;
    }
    if (stretch.state == Stretch::State::kRefused) {
      return std::nullopt;
    }
    LaunchStretch(stretch, queue, work);
  }
  if (stretch.first == 0) {
    return std::nullopt;
  }
  if (work.end != nullptr) {  // a graph has no times of its ops, what is behind it has
    Work behind;
    behind.name = work.name;
    behind.stream = work.stream;
    behind.end = work.end;
    return Submit(behind);
  }
  return Ticket{work.stream, stretch.first + place};
}

// Nothing of it runs, so that what is refused can still be submitted op by op.
bool CudaDevice::Capture(Stretch& stretch, Queue& queue, StepContext& step) {
  try {
    gpu_.BeginCapture(queue.stream);
    for (Work& work : stretch.works) {
      work.step = &step;
      Pending pending;
      FillPoison(work, queue.stream);
      SubmitCall(work, queue, pending);
    }
    stretch.graph = gpu_.EndCapture(queue.stream);
  } catch (const std::exception& error) {
    gpu_.DropCapture(queue.stream);
    ++world_.graph_counts.refused;
    Say("warning: rank " + std::to_string(rank_.value) + ": no graph of the " +
        std::to_string(stretch.works.size()) + " ops from " + *stretch.works.front().name + " to " +
        *stretch.works.back().name + ": " + error.what());
    return false;
  }
  ++world_.graph_counts.graphs;
  world_.graph_counts.ops += std::ssize(stretch.works);
  return true;
}

// All ops are under way at once; the last one's event is that of all.
void CudaDevice::LaunchStretch(Stretch& stretch, Queue& queue, const Work& first) {
  Collect(queue);
  for (const Ticket& ticket : first.waits) {
    Follow(queue, ticket);
  }
  gpu_.BeginRange(first.name->c_str());
  try {
    gpu_.LaunchGraph(stretch.graph, queue.stream);
  } catch (const std::exception& error) {
    world_.faults.Report("rank " + std::to_string(rank_.value) + ", op " + *first.name +
                             " and what is launched with it: ",
                         error);
    world_.faults.ThrowIfFailed();
  }
  gpu_.EndRange();
  const GpuEvent event = TakeEvent(false);
  gpu_.Record(event, queue.stream);
  stretch.first = queue.submitted + 1;
  for (const Work& work : stretch.works) {
    ring_.Issue(*work.name);
    Pending pending;
    pending.sequence = ++queue.submitted;
    pending.name = work.name;
    pending.event = event;
    pending.owns_event = &work == &stretch.works.back();
    queue.pending.push_back(pending);
  }
  NoteOpen(queue);
}

}  // namespace shardwright
