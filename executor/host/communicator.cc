#include "executor/host/communicator.h"

#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/verify.h"

namespace shardwright {
ThreadCommunicator::ThreadCommunicator(const GroupRanks& ranks, std::chrono::milliseconds timeout,
                                       const RunClock& clock, FaultBoard& faults)
    : ranks_(ranks),
      timeout_(timeout),
      clock_(clock),
      faults_(faults),
      posts_(static_cast<std::size_t>(ranks.size)) {
  faults_.Register(mutex_, met_);
}

std::vector<MessagePart> Communicator::PartsOf(const CollectiveCall& call, bool receives,
                                               std::int64_t own, std::int64_t size,
                                               const std::string& name) {
  std::vector<MessagePart> parts;
  std::int64_t offset = 0;
  for (std::int64_t k = 0; k < size; ++k) {
    std::int64_t bytes = call.elements / size * SizeOf(call.dtype);
    if (IsTransfer(call.code) || call.code == OpCode::kPermute) {
      const std::int64_t other = receives ? (own + size - 1) % size : (own + 1) % size;
      const bool moves = k == other && (receives ? call.receive : call.send) != nullptr;
      bytes = moves ? call.elements * SizeOf(call.dtype) : 0;
    } else if (call.rows) {
      const std::int64_t most = receives ? call.rows->receive_room : call.rows->send_room;
      const std::int64_t* const counts = receives ? call.rows->came : call.rows->sent;
      bytes = 0;
      for (std::int64_t e = k * call.rows->experts; e < (k + 1) * call.rows->experts; ++e) {
        if (counts[e] < 0 || counts[e] > (most - offset - bytes) / call.rows->row_bytes) {
          throw RunError("collective " + name + ": " + std::to_string(counts[e]) + " rows " +
                         (receives ? "from" : "for") + " member " + std::to_string(k) +
                         ", where there is room for " +
                         std::to_string((most - offset - bytes) / call.rows->row_bytes));
        }
        bytes += counts[e] * call.rows->row_bytes;
      }
    }
    parts.push_back({offset, bytes});
    offset += bytes;
  }
  return parts;
}

std::set<std::int64_t> ThreadCommunicator::Missing() const {
  std::set<std::int64_t> ranks;
  for (std::int64_t i = 0; i < size(); ++i) {
    if (!posts_[static_cast<std::size_t>(i)].is_here) {
      ranks.insert(ranks_.first + i * ranks_.stride);
    }
  }
  return ranks;
}

SimTime ThreadCommunicator::Meet(std::int64_t member, const std::string& name, SimTime time) {
  std::unique_lock lock(mutex_);
  if (has_left_) {
    // Who left reports why; nobody may read its memory any more.
    met_.wait(lock, [&] { return faults_.failed(); });
    lock.unlock();
    faults_.ThrowIfFailed();
  }
  posts_[static_cast<std::size_t>(member)].is_here = true;
  latest_ = std::max(latest_, time);
  if (++here_ == size()) {
    for (Post& post : posts_) {
      post.is_here = false;
    }
    here_ = 0;
    result_ = latest_;
    latest_ = SimTime(0);
    ++meeting_;
    met_.notify_all();
    return result_;
  }
  const std::uint64_t mine = meeting_;
  const bool in_time =
      met_.wait_for(lock, timeout_, [&] { return meeting_ != mine || faults_.failed(); });
  if (meeting_ != mine) {
    // Nobody changes result_ before all members, this one included, come to the next meeting.
    return result_;
  }
  has_left_ = true;
  const std::set<std::int64_t> missing = Missing();
  lock.unlock();
  if (!in_time) {
    faults_.Report(
        WaitedText(ranks_.first + member * ranks_.stride, "op " + name, timeout_, missing));
  }
  faults_.ThrowIfFailed();
  return time;
}

void ThreadCommunicator::CheckAlike(std::int64_t member) const {
  const std::int64_t other = member == 0 ? size() - 1 : 0;
  const Post& mine = posts_[static_cast<std::size_t>(member)];
  const Post& its = posts_[static_cast<std::size_t>(other)];
  if (its.call->code != CounterpartOf(mine.call->code) ||
      its.call->elements != mine.call->elements || its.call->dtype != mine.call->dtype) {
    throw RunError("collective " + *mine.name + " met " + *its.name + " of rank " +
                   std::to_string(ranks_.first + other * ranks_.stride));
  }
}

Communicator::Times ThreadCommunicator::Run(std::int64_t member, const CollectiveCall& call,
                                            const std::string& name, SimTime arrival,
                                            SimTime least_duration) {
  ZeroFill(call.zeros);
  Post& mine = posts_[static_cast<std::size_t>(member)];
  {
    const std::lock_guard lock(mutex_);
    mine.call = &call;
    mine.name = &name;
  }
  Times times;
  times.start = Meet(member, name, arrival);
  CheckAlike(member);
  switch (call.code) {
    case OpCode::kAllGather:
      Gather(member, call);
      break;
    case OpCode::kReduceScatter:
      ReducePart(member, call);
      break;
    case OpCode::kAllReduce:
      ReducePart(member, call);
      Meet(member, name, SimTime(0));
      CopyOtherParts(member, call);
      break;
    case OpCode::kAllToAll:
    case OpCode::kPermute:
    case OpCode::kSend:
    case OpCode::kReceive:
    case OpCode::kSendReceive:
      AllToAll(member, call, name);
      break;
    default:
      SW_CHECK(false, "op " + name + " is no collective of the host device");
  }
  if (least_duration > SimTime(0)) {
    std::this_thread::sleep_until(clock_.At(times.start + least_duration));
  }
  times.end = Meet(member, name, clock_.Now());
  return times;
}

void ThreadCommunicator::Gather(std::int64_t member, const CollectiveCall& call) const {
  const std::int64_t part = call.elements / size() * SizeOf(call.dtype);
  const std::int64_t stride = call.receive_stride > 0 ? call.receive_stride : part;
  for (std::int64_t k = 0; k < size(); ++k) {
    const std::int64_t i = (member + k) % size();  // not all read the same member at once
    const std::byte* from = posts_[static_cast<std::size_t>(i)].call->send;
    std::byte* to = call.receive + i * stride;
    if (from != to) {
      std::memcpy(to, from, static_cast<std::size_t>(part));
    }
  }
}

void ThreadCommunicator::AllToAll(std::int64_t member, const CollectiveCall& call,
                                  const std::string& name) const {
  const std::vector<MessagePart> mine = PartsOf(call, /*receives=*/true, member, size(), name);
  for (std::int64_t k = 0; k < size(); ++k) {
    const std::int64_t i = (member + k) % size();
    const CollectiveCall& from = *posts_[static_cast<std::size_t>(i)].call;
    const MessagePart its =
        PartsOf(from, /*receives=*/false, i, size(), name)[static_cast<std::size_t>(member)];
    const MessagePart& part = mine[static_cast<std::size_t>(i)];
    SW_CHECK(its.bytes == part.bytes, "op " + name + ": two sizes of one message");
    if (part.bytes > 0) {
      std::memcpy(call.receive + part.offset, from.send + its.offset,
                  static_cast<std::size_t>(part.bytes));
    }
  }
}

// Each member sums its part of everybody's array: of an all-reduce into its own array, from which
// the others read it.
void ThreadCommunicator::ReducePart(std::int64_t member, const CollectiveCall& call) const {
  const bool in_place = call.code == OpCode::kAllReduce;
  std::vector<const std::byte*> sources;
  for (const Post& post : posts_) {
    sources.push_back(in_place ? post.call->receive : post.call->send);
  }
  Fold fold;
  fold.dtype = call.dtype;
  fold.source_begin = PartBegin(call.elements, size(), member);
  fold.out_begin = in_place ? fold.source_begin : 0;
  fold.count = PartBegin(call.elements, size(), member + 1) - fold.source_begin;
  fold.divisor = call.divisor;
  FoldInOrder(fold, sources, call.receive);
}

void ThreadCommunicator::CopyOtherParts(std::int64_t member, const CollectiveCall& call) const {
  const std::int64_t width = SizeOf(call.dtype);
  for (std::int64_t i = 0; i < size(); ++i) {
    if (i == member) {
      continue;
    }
    const std::int64_t begin = PartBegin(call.elements, size(), i) * width;
    const std::int64_t end = PartBegin(call.elements, size(), i + 1) * width;
    std::memcpy(call.receive + begin, posts_[static_cast<std::size_t>(i)].call->receive + begin,
                static_cast<std::size_t>(end - begin));
  }
}

}  // namespace shardwright
