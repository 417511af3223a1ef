#include "executor/host/together.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <thread>

#include "core/error.h"

namespace shardwright {
namespace {

constexpr char kInputProblem = 'i';
constexpr char kOtherProblem = 'e';

// Clocks are compared over such messages: sleep only after long.
void Finish(MessagePassing::Pending& pending) {
  constexpr int kBusyRounds = 10000;
  for (int round = 0; !pending.IsOver(); ++round) {
    if (round < kBusyRounds) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

std::int64_t NowNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Parts of these sizes, one behind the other.
std::vector<MessagePart> PartsOf(const std::vector<std::int64_t>& sizes) {
  std::vector<MessagePart> parts;
  std::int64_t offset = 0;
  for (const std::int64_t size : sizes) {
    parts.push_back({offset, size});
    offset += size;
  }
  return parts;
}

void GatherParts(MessagePassing& processes, MessagePassing::Channel channel, void* data,
                 const std::vector<MessagePart>& parts) {
  Finish(*processes.AllGather(channel, data, parts));
}

}  // namespace

std::chrono::steady_clock::time_point AgreeOnStart(MessagePassing& processes) {
  constexpr int kTrips = 10;
  std::int64_t start = NowNanoseconds();
  if (processes.rank() == 0) {
    for (int other = 1; other < processes.size(); ++other) {
      for (int trip = 0; trip < kTrips; ++trip) {
        std::int64_t unused = 0;
        Finish(*processes.Receive(MessagePassing::kAll, other, &unused, sizeof unused));
        const std::array<std::int64_t, 2> answer = {NowNanoseconds(), start};
        Finish(*processes.Send(MessagePassing::kAll, other, answer.data(), sizeof answer));
      }
    }
  } else {
    std::int64_t shortest = INT64_MAX, offset = 0;  // of process 0's clock over this one's
    for (int trip = 0; trip < kTrips; ++trip) {
      const std::int64_t asked = NowNanoseconds();
      Finish(*processes.Send(MessagePassing::kAll, 0, &asked, sizeof asked));
      std::array<std::int64_t, 2> answer{};
      Finish(*processes.Receive(MessagePassing::kAll, 0, answer.data(), sizeof answer));
      const std::int64_t took = NowNanoseconds() - asked;
      start = answer[1];
      if (took < shortest) {
        shortest = took;
        offset = answer[0] - (asked + took / 2);
      }
    }
    // The answer was given between question and return, so processes that share a clock measure no
    // more than half the trip, however busy the machine.
    start -= std::abs(offset) <= shortest / 2 + 1 ? 0 : offset;
  }
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(start));
}

void ShareFromFirst(MessagePassing& processes, MessagePassing::Channel channel, void* data,
                    std::int64_t bytes) {
  if (processes.rank() != 0) {
    Finish(*processes.Receive(channel, 0, data, bytes));
    return;
  }
  for (int other = 1; other < processes.size(); ++other) {
    Finish(*processes.Send(channel, other, data, bytes));
  }
}

std::vector<std::vector<std::byte>> CollectBytes(MessagePassing& processes,
                                                 MessagePassing::Channel channel,
                                                 std::vector<std::byte> mine) {
  std::vector<std::vector<std::byte>> all;
  if (processes.rank() != 0) {
    const auto size = static_cast<std::int64_t>(mine.size());
    Finish(*processes.Send(channel, 0, &size, sizeof size));
    Finish(*processes.Send(channel, 0, mine.data(), size));
    return all;
  }
  all.push_back(std::move(mine));
  for (int other = 1; other < processes.size(); ++other) {
    std::int64_t size = 0;
    Finish(*processes.Receive(channel, other, &size, sizeof size));
    all.emplace_back(static_cast<std::size_t>(size));
    Finish(*processes.Receive(channel, other, all.back().data(), size));
  }
  return all;
}

std::vector<std::vector<std::byte>> ShareBytes(MessagePassing& processes,
                                               MessagePassing::Channel channel,
                                               const std::vector<std::byte>& mine) {
  const auto size = static_cast<std::size_t>(processes.size());
  const auto me = static_cast<std::size_t>(processes.rank());
  std::vector<std::int64_t> sizes(size);
  sizes[me] = std::ssize(mine);
  GatherParts(processes, channel, sizes.data(),
              PartsOf(std::vector<std::int64_t>(size, sizeof(std::int64_t))));
  const std::vector<MessagePart> parts = PartsOf(sizes);
  std::vector<std::byte> flat(static_cast<std::size_t>(parts.back().offset + parts.back().bytes));
  std::copy(mine.begin(), mine.end(), flat.begin() + parts[me].offset);
  GatherParts(processes, channel, flat.data(), parts);
  std::vector<std::vector<std::byte>> all;
  for (const MessagePart& part : parts) {
    const auto begin = flat.begin() + part.offset;
    all.emplace_back(begin, begin + part.bytes);
  }
  return all;
}

std::vector<std::vector<float>> ShareFloats(MessagePassing& processes,
                                            MessagePassing::Channel channel,
                                            const std::vector<float>& mine) {
  const auto size = static_cast<std::size_t>(processes.size());
  std::vector<float> flat(size * mine.size());
  const std::size_t own = static_cast<std::size_t>(processes.rank()) * mine.size();
  std::copy(mine.begin(), mine.end(), flat.begin() + static_cast<std::ptrdiff_t>(own));
  const auto bytes = static_cast<std::int64_t>(mine.size() * sizeof(float));
  GatherParts(processes, channel, flat.data(), PartsOf(std::vector<std::int64_t>(size, bytes)));
  std::vector<std::vector<float>> all;
  for (std::size_t r = 0; r < size; ++r) {
    const auto begin = flat.begin() + static_cast<std::ptrdiff_t>(r * mine.size());
    all.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(mine.size()));
  }
  return all;
}

void JoinRun(MessagePassing& processes, RunOptions& run) {
  const MessagePassing::Channel channel = processes.Split(0);
  run.only_rank = Rank(static_cast<std::size_t>(processes.rank()));
  run.share_losses = [&processes, channel](const std::vector<float>& mine) {
    return ShareFloats(processes, channel, mine);
  };
}

void AllOrNone(MessagePassing* processes, MessagePassing::Channel channel,
               const std::function<void()>& work) {
  if (processes == nullptr) {
    work();
    return;
  }
  std::string problem;  // its kind, then its text
  try {
    work();
  } catch (const InputError& error) {
    problem = kInputProblem + std::string(error.what());
  } catch (const EnvironmentError& error) {
    problem = kOtherProblem + std::string(error.what());
  }
  const auto* const begin = reinterpret_cast<const std::byte*>(problem.data());
  for (const std::vector<std::byte>& its :
       ShareBytes(*processes, channel, {begin, begin + problem.size()})) {
    if (!its.empty()) {
      const std::string text(reinterpret_cast<const char*>(its.data()) + 1, its.size() - 1);
      if (static_cast<char>(its.front()) == kInputProblem) {
        throw InputError(text);
      }
      throw EnvironmentError(text);
    }
  }
}

}  // namespace shardwright
