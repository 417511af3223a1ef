// Collectives among threads that share one GPU.
//
// A collective has stages. Host threads meet between them, since an event has to be recorded before
// another stream can wait for it. Example, an all-reduce of 10 elements by 4 ranks:
//
//   1  each records `ready` behind what made its numbers; all meet; each stream waits for all ready
//   2  rank 0 sums elements 0 to 2 of all four arrays into its own, rank 1 3 to 5, rank 2 6 and 7,
//      rank 3 8 and 9; each records `summed`; all meet; each stream waits for all summed
//   3  each copies the other parts from their owners
//   4  each records `done`; all meet; each stream waits for all done, so that nobody overwrites
//      numbers which another still reads
//   5  all meet once more, as the posts are used again by the next collective
//
// Sums are made in rank order by FoldKernel, rounded once, so a run repeats bit for bit. NCCL's
// rings add in another order: results differ from NCCL's in the last bits.

#include "executor/cuda/loopback.h"

#include "core/error.h"
#include "executor/cuda/kernels/sums.h"

namespace shardwright {
namespace {

void LaunchFold(const CollectivePlace& place, const gpu::FoldArgs& args) {
  LaunchKernel<gpu::FoldKernel>(place.gpu, place.stream,
                                CeilDiv(args.n, gpu::FoldKernel::kPerBlock), 0, args);
}

}  // namespace

LoopbackGroup::LoopbackGroup(std::int64_t size, std::int64_t first_rank, std::int64_t stride,
                             std::chrono::milliseconds timeout, FaultBoard& faults)
    : first_rank_(first_rank),
      stride_(stride),
      timeout_(timeout),
      faults_(faults),
      posts_(static_cast<std::size_t>(size)) {
  if (size > gpu::kMostSources) {
    throw EnvironmentError("--loopback: got a group of " + std::to_string(size) +
                           " ranks, expected at most " + std::to_string(gpu::kMostSources));
  }
  faults_.Register(mutex_, met_);
}

// Waits until all members are here. Throws when one does not come within the time-out, and names
// it, or when the run fails elsewhere. O(size) at the last arrival.
void LoopbackGroup::Meet(std::int64_t member, const std::string& name) {
  std::unique_lock lock(mutex_);
  if (has_left_) {
    // The member that left reports why; its memory and its events may be gone.
    met_.wait(lock, [&] { return faults_.failed(); });
    lock.unlock();
    faults_.ThrowIfFailed();
  }
  posts_[static_cast<std::size_t>(member)].is_here = true;
  if (++here_ == size()) {
    for (Post& post : posts_) {
      post.is_here = false;
    }
    here_ = 0;
    ++meeting_;
    met_.notify_all();
    return;
  }
  const std::uint64_t mine = meeting_;
  const bool in_time =
      met_.wait_for(lock, timeout_, [&] { return meeting_ != mine || faults_.failed(); });
  if (meeting_ != mine) {
    return;
  }
  has_left_ = true;
  std::string missing;
  for (std::int64_t i = 0; i < size(); ++i) {
    if (!posts_[static_cast<std::size_t>(i)].is_here) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(first_rank_ + i * stride_);
    }
  }
  lock.unlock();
  if (!in_time) {
    faults_.Report("rank " + std::to_string(first_rank_ + member * stride_) + ", op " + name +
                   ": waited " + std::to_string(timeout_.count()) + " ms for rank " + missing);
  }
  faults_.ThrowIfFailed();
}

// Ranks that issue different collectives would read memory of other sizes. With NCCL they would
// hang.
void LoopbackGroup::CheckAlike(const Post& mine) const {
  const Post& first = posts_.front();
  if (first.call->code != mine.call->code || first.call->elements != mine.call->elements ||
      first.call->dtype != mine.call->dtype) {
    throw RunError("collective " + *mine.name + " met " + *first.name + " of rank " +
                   std::to_string(first_rank_));
  }
}

void LoopbackGroup::Submit(std::int64_t member, const CollectiveCall& call, const std::string& name,
                           const CollectivePlace& place) {
  for (const ByteRange& zeros : call.zeros) {
    place.gpu.Fill(zeros.data, 0, zeros.bytes, place.stream);
  }
  Post& mine = posts_[static_cast<std::size_t>(member)];
  {
    const std::lock_guard lock(mutex_);
    mine.call = &call;
    mine.name = &name;
    mine.ready = place.ready;
    mine.summed = place.summed;
    mine.done = place.done;
  }
  place.gpu.Record(place.ready, place.stream);
  Meet(member, name);
  CheckAlike(mine);
  const auto wait_for_all = [&](GpuEvent Post::*event) {
    for (const Post& post : posts_) {
      if (&post != &mine) {
        place.gpu.WaitFor(place.stream, post.*event);
      }
    }
  };
  wait_for_all(&Post::ready);
  if (place.start.value != nullptr) {
    place.gpu.Record(place.start, place.stream);
  }
  switch (call.code) {
    case OpCode::kAllGather:
      Gather(member, call, place);
      break;
    case OpCode::kReduceScatter:
      ReducePart(member, call, place);
      break;
    case OpCode::kAllReduce:
      ReducePart(member, call, place);
      place.gpu.Record(place.summed, place.stream);
      Meet(member, name);
      wait_for_all(&Post::summed);
      CopyOtherParts(member, call, place);
      break;
    default:
      SW_CHECK(false, "op " + name + " is no collective of the CUDA device");
  }
  // Nobody goes on before all have read what it may now overwrite.
  place.gpu.Record(place.done, place.stream);
  Meet(member, name);
  wait_for_all(&Post::done);
  // The others read this post, which the next collective overwrites.
  Meet(member, name);
}

// Example: rank 1 of 4 copies parts 1, 2, 3, 0 in this order, so that ranks read different sources
// at a time. A part that already lies in its place is not copied.
void LoopbackGroup::Gather(std::int64_t member, const CollectiveCall& call,
                           const CollectivePlace& place) const {
  const std::int64_t part = call.elements / size() * SizeOf(call.dtype);
  const std::int64_t stride = call.receive_stride > 0 ? call.receive_stride : part;
  for (std::int64_t k = 0; k < size(); ++k) {
    const std::int64_t i = (member + k) % size();
    const std::byte* const from = posts_[static_cast<std::size_t>(i)].call->send;
    std::byte* const to = call.receive + i * stride;
    if (from != to) {
      place.gpu.Copy(to, from, part, place.stream);
    }
  }
}

// Each member sums its part of everybody's array: of an all-reduce into its own array, from which
// the others read it. Example: 2 ranks, 8 elements. Rank 1 adds elements 4 to 7 of both arrays and
// divides by the divisor.
void LoopbackGroup::ReducePart(std::int64_t member, const CollectiveCall& call,
                               const CollectivePlace& place) const {
  const bool in_place = call.code == OpCode::kAllReduce;
  gpu::FoldArgs args;
  for (const Post& post : posts_) {
    args.sources[args.source_count++] = in_place ? post.call->receive : post.call->send;
  }
  args.dtype = call.dtype;
  args.source_begin = PartBegin(call.elements, size(), member);
  args.out_begin = in_place ? args.source_begin : 0;
  args.n = PartBegin(call.elements, size(), member + 1) - args.source_begin;
  args.divisor = static_cast<float>(call.divisor);
  args.out = call.receive;
  LaunchFold(place, args);
}

void LoopbackGroup::CopyOtherParts(std::int64_t member, const CollectiveCall& call,
                                   const CollectivePlace& place) const {
  const std::int64_t width = SizeOf(call.dtype);
  for (std::int64_t i = 0; i < size(); ++i) {
    const std::int64_t begin = PartBegin(call.elements, size(), i) * width;
    const std::int64_t end = PartBegin(call.elements, size(), i + 1) * width;
    if (i != member && end > begin) {
      place.gpu.Copy(call.receive + begin,
                     posts_[static_cast<std::size_t>(i)].call->receive + begin, end - begin,
                     place.stream);
    }
  }
}

}  // namespace shardwright
