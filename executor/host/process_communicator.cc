#include "executor/host/process_communicator.h"

#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/ranges.h"
#include "executor/host/arithmetic.h"
#include "schedule/verify.h"

namespace shardwright {
namespace {

// Others that share this core bring what is missing.
void BackOff(int round) {
  if (round < 100) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

void ProcessCommunicator::Await(std::vector<Pending>& pending,
                                const std::vector<std::vector<std::int64_t>>& ranks,
                                std::int64_t member, const std::string& name) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  std::vector<bool> over(pending.size(), false);
  std::size_t left = pending.size();
  for (int round = 0; left > 0; ++round) {
    for (std::size_t i = 0; i < pending.size(); ++i) {
      if (!over[i] && pending[i]->IsOver()) {
        over[i] = true;
        --left;
      }
    }
    if (left == 0) {
      return;
    }
    faults_.ThrowIfFailed();
    if (std::chrono::steady_clock::now() > deadline) {
      std::set<std::int64_t> missing;
      for (std::size_t i = 0; i < pending.size(); ++i) {
        if (!over[i]) {
          missing.merge(pending[i]->Missing());
          if (pending[i]->Missing().empty()) {
            missing.insert(ranks[i].begin(), ranks[i].end());
          }
        }
      }
      GiveUp(member, name, missing, ranks.front().size() > 1 && pending.front()->Missing().empty());
    }
    BackOff(round);
  }
}

void ProcessCommunicator::GiveUp(std::int64_t member, const std::string& name,
                                 const std::set<std::int64_t>& missing, bool is_one_of) {
  const std::set<std::int64_t> named = processes_.AtFault(missing);
  faults_.Report(WaitedText(RankOf(member), "op " + name, timeout_, named,
                            is_one_of && named.size() > 1 && named == missing));
  faults_.ThrowIfFailed();
}

void ProcessCommunicator::AwaitAll(Pending pending, std::int64_t member, const std::string& name) {
  std::vector<Pending> one;
  one.push_back(std::move(pending));
  std::vector<std::int64_t> others;
  for (std::int64_t m = 0; m < ranks_.size; ++m) {
    if (m != member) {
      others.push_back(RankOf(m));
    }
  }
  Await(one, {others}, member, name);
}

SimTime ProcessCommunicator::Meet(std::int64_t member, const CollectiveCall& call,
                                  const std::string& name, SimTime arrival) {
  mine_ = {arrival.value, call.elements, static_cast<std::int32_t>(call.code),
           static_cast<std::int32_t>(call.dtype)};
  headers_.assign(static_cast<std::size_t>(ranks_.size), mine_);
  std::vector<Pending> pending;
  std::vector<std::vector<std::int64_t>> ranks;
  for (std::int64_t m = 0; m < ranks_.size; ++m) {
    if (m != member) {
      const int other = static_cast<int>(m);
      Header& header = headers_[static_cast<std::size_t>(m)];
      pending.push_back(processes_.Receive(channel_, other, &header, sizeof header));
      pending.push_back(processes_.Send(channel_, other, &mine_, sizeof mine_));
      ranks.insert(ranks.end(), 2, {RankOf(m)});
    }
  }
  Await(pending, ranks, member, name);
  SimTime last = arrival;
  for (std::int64_t m = 0; m < ranks_.size; ++m) {
    const Header& header = headers_[static_cast<std::size_t>(m)];
    last = std::max(last, SimTime(header.arrival));
    // Nobody can have come later than now; clocks of machines agree to less than a time-out.
    if (SimTime(header.arrival) > clock_.TimeOf(std::chrono::steady_clock::now() + timeout_)) {
      throw RunError("collective " + name + ": rank " + std::to_string(RankOf(m)) +
                     " says that it comes in the future");
    }
    const OpCode expected = m == member ? call.code : CounterpartOf(call.code);
    if (header.code != static_cast<std::int32_t>(expected) || header.elements != mine_.elements ||
        header.dtype != mine_.dtype) {
      throw RunError("collective " + name + " met another one of rank " +
                     std::to_string(RankOf(m)));
    }
  }
  return last;
}

Communicator::Times ProcessCommunicator::Run(std::int64_t member, const CollectiveCall& call,
                                             const std::string& name, SimTime arrival,
                                             SimTime least_duration) {
  ZeroFill(call.zeros);
  Times times;
  times.start = Meet(member, call, name, arrival);
  if (call.code == OpCode::kAllGather) {
    const std::int64_t part = call.elements / ranks_.size * SizeOf(call.dtype);
    const std::int64_t stride = call.receive_stride > 0 ? call.receive_stride : part;
    std::byte* mine = call.receive + member * stride;
    if (call.send != mine) {
      std::memcpy(mine, call.send, static_cast<std::size_t>(part));
    }
    std::vector<MessagePart> parts;
    for (std::int64_t m = 0; m < ranks_.size; ++m) {
      parts.push_back({m * stride, part});
    }
    Gather(call.receive, parts, 1, member, name);
  } else if (call.code == OpCode::kAllToAll || call.code == OpCode::kPermute ||
             IsTransfer(call.code)) {
    AllToAll(member, call, name);
  } else {
    Reduce(member, call, name);
  }
  if (least_duration > SimTime(0)) {
    std::this_thread::sleep_until(clock_.At(times.start + least_duration));
  }
  times.end = clock_.Now();
  return times;
}

std::int64_t ProcessCommunicator::PieceBytes(std::span<const MessagePart> parts,
                                             std::int64_t width) {
  constexpr std::int64_t kLeast = 32 << 10, kPieces = 128;
  const std::int64_t total = Summed<std::int64_t>(parts, &MessagePart::bytes);
  const std::int64_t piece = std::max(kLeast, total / kPieces) / std::ssize(parts);
  return std::max(piece / width, std::int64_t{1}) * width;
}

std::vector<MessagePart> ProcessCommunicator::PieceOf(std::span<const MessagePart> parts,
                                                      std::int64_t begin, std::int64_t bytes) {
  std::vector<MessagePart> pieces;
  for (const MessagePart& part : parts) {
    const std::int64_t first = std::min(begin, part.bytes);
    pieces.push_back({part.offset + first, std::min(bytes, part.bytes - first)});
  }
  return pieces;
}

void ProcessCommunicator::Gather(std::byte* data, std::span<const MessagePart> parts,
                                 std::int64_t width, std::int64_t member, const std::string& name) {
  const std::int64_t piece = PieceBytes(parts, width);
  // The first part is as long as any.
  for (std::int64_t begin = 0; begin < parts.front().bytes; begin += piece) {
    AwaitAll(processes_.AllGather(channel_, data, PieceOf(parts, begin, piece)), member, name);
  }
}

void ProcessCommunicator::AllToAll(std::int64_t member, const CollectiveCall& call,
                                   const std::string& name) {
  constexpr std::int64_t kPiece = 64 << 10;  // of each message, at both its ends
  const std::vector<MessagePart> to = PartsOf(call, /*receives=*/false, member, ranks_.size, name);
  const std::vector<MessagePart> from = PartsOf(call, /*receives=*/true, member, ranks_.size, name);
  const auto own = static_cast<std::size_t>(member);
  std::int64_t longest = 0;
  for (std::size_t m = 0; m < to.size(); ++m) {
    longest = m == own ? longest : std::max({longest, to[m].bytes, from[m].bytes});
  }
  if (const std::int64_t bytes = std::min(to[own].bytes, from[own].bytes); bytes > 0) {
    std::memcpy(call.receive + from[own].offset, call.send + to[own].offset,
                static_cast<std::size_t>(bytes));
  }
  for (std::int64_t begin = 0; begin < longest; begin += kPiece) {
    std::vector<Pending> pending;
    std::vector<std::vector<std::int64_t>> ranks;
    for (std::size_t m = 0; m < to.size(); ++m) {
      const MessagePart in = PieceOf(std::span(&from[m], 1), begin, kPiece).front();
      const MessagePart out = PieceOf(std::span(&to[m], 1), begin, kPiece).front();
      if (m != own && in.bytes > 0) {
        pending.push_back(
            processes_.Receive(channel_, static_cast<int>(m), call.receive + in.offset, in.bytes));
        ranks.push_back({RankOf(static_cast<std::int64_t>(m))});
      }
      if (m != own && out.bytes > 0) {
        pending.push_back(
            processes_.Send(channel_, static_cast<int>(m), call.send + out.offset, out.bytes));
        ranks.push_back({RankOf(static_cast<std::int64_t>(m))});
      }
    }
    Await(pending, ranks, member, name);
  }
}

void ProcessCommunicator::Reduce(std::int64_t member, const CollectiveCall& call,
                                 const std::string& name) {
  const std::int64_t width = SizeOf(call.dtype), size = ranks_.size;
  std::vector<MessagePart> parts;
  for (std::int64_t m = 0; m < size; ++m) {
    const std::int64_t begin = PartBegin(call.elements, size, m) * width;
    parts.push_back({begin, PartBegin(call.elements, size, m + 1) * width - begin});
  }
  const MessagePart& own = parts[static_cast<std::size_t>(member)];
  const std::int64_t piece = PieceBytes(parts, width);
  scratch_.resize(std::max(scratch_.size(), static_cast<std::size_t>(size * piece)));
  std::vector<const std::byte*> sources;
  for (std::int64_t m = 0; m < size; ++m) {
    sources.push_back(scratch_.data() + m * piece);
  }
  for (std::int64_t begin = 0; begin < parts.front().bytes; begin += piece) {
    const std::int64_t bytes = std::clamp(own.bytes - begin, std::int64_t{0}, piece);
    std::vector<MessagePart> to;
    for (std::int64_t m = 0; m < size; ++m) {
      to.push_back({m * piece, bytes});
    }
    AwaitAll(
        processes_.AllToAll(channel_, call.send, PieceOf(parts, begin, piece), scratch_.data(), to),
        member, name);
    Fold fold;
    fold.dtype = call.dtype;
    fold.count = bytes / width;
    fold.divisor = call.divisor;
    fold.out_begin = (begin + (call.code == OpCode::kAllReduce ? own.offset : 0)) / width;
    FoldInOrder(fold, sources, call.receive);
  }
  if (call.code == OpCode::kAllReduce) {
    Gather(call.receive, parts, width, member, name);
  }
}

std::unique_ptr<Communicator> NewCommunicator(MessagePassing* processes, const GroupRanks& ranks,
                                              std::chrono::milliseconds timeout,
                                              const RunClock& clock, FaultBoard& faults) {
  if (processes == nullptr) {
    return std::make_unique<ThreadCommunicator>(ranks, timeout, clock, faults);
  }
  // Groups of one kind are told apart by their first rank.
  const MessagePassing::Channel channel = processes->Split(static_cast<int>(ranks.first));
  return std::make_unique<ProcessCommunicator>(*processes, channel, ranks, timeout, clock, faults);
}

}  // namespace shardwright
