#include "executor/host/together.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <set>
#include <span>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "executor/host/fault.h"

namespace shardwright {
namespace {

constexpr char kInputProblem = 'i';
constexpr char kOtherProblem = 'e';

// Messages that are on their way to or from other processes.
class Correspondence {
 public:
  Correspondence(MessagePassing& processes, MessagePassing::Channel channel, const Wait& wait)
      : processes_(processes), channel_(channel), wait_(wait) {}

  void Send(int to, const void* data, std::int64_t bytes) {
    open_.push_back({to, processes_.Send(channel_, to, data, bytes)});
  }
  void Receive(int from, void* data, std::int64_t bytes) {
    open_.push_back({from, processes_.Receive(channel_, from, data, bytes)});
  }

  // Returns when all have arrived.
  void Finish() {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now(), deadline = begin + Limit();
    Clock::time_point next_question = begin + processes_.timeout();
    int times_silent = 0;
    // Clocks are compared over such messages: sleep only after long.
    constexpr int kBusyRounds = 10000;
    for (int round = 0;; ++round) {
      std::erase_if(open_, [](const Open& open) { return open.pending->IsOver(); });
      if (open_.empty()) {
        return;
      }
      const Clock::time_point now = Clock::now();
      if (now > deadline) {
        GiveUp(Limit());
      }
      // Only ranks that answer have the longer time. A busy machine may miss one question.
      if (now > next_question) {
        times_silent = processes_.Silent().empty() ? 0 : times_silent + 1;
        if (times_silent > 1) {
          GiveUp(std::chrono::duration_cast<std::chrono::milliseconds>(now - begin));
        }
        next_question = now + processes_.timeout();
      }
      if (round < kBusyRounds) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

 private:
  struct Open {
    int other = 0;
    std::unique_ptr<MessagePassing::Pending> pending;
  };
  [[nodiscard]] std::chrono::milliseconds Limit() const {
    return processes_.timeout() + wait_.more;
  }
  [[noreturn]] void GiveUp(std::chrono::milliseconds waited) {
    std::set<std::int64_t> missing;
    for (const Open& open : open_) {
      missing.insert(open.other);
    }
    missing = processes_.AtFault(missing);
    for (const Open& open : open_) {
      (void)open.pending->IsOver();  // throws what another one has found meanwhile
    }
    const std::string cause = WaitedText(processes_.rank(), wait_.what, waited, missing);
    processes_.Fail(cause);
    throw RunError(cause);
  }

  MessagePassing& processes_;
  const MessagePassing::Channel channel_;
  const Wait& wait_;
  std::vector<Open> open_;
};

std::int64_t NowNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// all[r] is what process r has, and gets from this one; their sizes are known.
template <class T>
void ShareEach(MessagePassing& processes, MessagePassing::Channel channel, const Wait& wait,
               std::vector<std::vector<T>>& all) {
  Correspondence letters(processes, channel, wait);
  const std::vector<T>& mine = all[static_cast<std::size_t>(processes.rank())];
  const auto bytes = [](const std::vector<T>& data) {
    return static_cast<std::int64_t>(data.size() * sizeof(T));
  };
  for (int k = 1; k < processes.size(); ++k) {  // not all tell the same one at once
    const int other = (processes.rank() + k) % processes.size();
    std::vector<T>& its = all[static_cast<std::size_t>(other)];
    letters.Receive(other, its.data(), bytes(its));
    letters.Send(other, mine.data(), bytes(mine));
  }
  letters.Finish();
}

// Long letters go in pieces, so that memory is taken as they come, whatever size was announced.
constexpr std::int64_t kPiece = std::int64_t{1} << 20;

void CheckSizes(const MessagePassing& processes, const Wait& wait,
                std::span<const std::int64_t> sizes) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    if (sizes[r] < 0 || sizes[r] > kMost) {
      throw RunError("rank " + std::to_string(processes.rank()) + ", " + wait.what + ": rank " +
                     std::to_string(r) + " announces " + std::to_string(sizes[r]) + " bytes");
    }
  }
}

// The next piece of `its`, of which `left` bytes are to come.
void ReceivePiece(Correspondence& letters, int from, std::vector<std::byte>& its,
                  std::int64_t left) {
  const std::size_t before = its.size();
  const std::int64_t bytes = std::min(kPiece, left);
  its.resize(before + static_cast<std::size_t>(bytes));
  letters.Receive(from, its.data() + before, bytes);
}

// A time that another process tells: nanoseconds of a machine that has run for less than 146 years.
std::int64_t Checked(std::int64_t time, const MessagePassing& processes, const Wait& wait,
                     int from) {
  if (time < 0 || time > INT64_MAX / 2) {
    throw RunError("rank " + std::to_string(processes.rank()) + ", " + wait.what + ": rank " +
                   std::to_string(from) + " says that it is " + std::to_string(time) + " ns");
  }
  return time;
}

}  // namespace

std::chrono::steady_clock::time_point AgreeOnStart(MessagePassing& processes) {
  constexpr int kTrips = 10;
  const Wait wait{"comparison of clocks"};
  Correspondence letters(processes, MessagePassing::kAll, wait);
  std::int64_t start = NowNanoseconds();
  if (processes.rank() == 0) {
    for (int other = 1; other < processes.size(); ++other) {
      for (int trip = 0; trip < kTrips; ++trip) {
        std::int64_t unused = 0;
        letters.Receive(other, &unused, sizeof unused);
        letters.Finish();
        const std::array<std::int64_t, 2> answer = {NowNanoseconds(), start};
        letters.Send(other, answer.data(), sizeof answer);
        letters.Finish();
      }
    }
  } else {
    std::int64_t shortest = INT64_MAX, offset = 0;  // of process 0's clock over this one's
    for (int trip = 0; trip < kTrips; ++trip) {
      const std::int64_t asked = NowNanoseconds();
      letters.Send(0, &asked, sizeof asked);
      letters.Finish();
      std::array<std::int64_t, 2> answer{};
      letters.Receive(0, answer.data(), sizeof answer);
      letters.Finish();
      const std::int64_t took = NowNanoseconds() - asked;
      start = Checked(answer[1], processes, wait, 0);
      if (took < shortest) {
        shortest = took;
        offset = Checked(answer[0], processes, wait, 0) - (asked + took / 2);
      }
    }
    // The answer was given between question and return, so processes that share a clock measure no
    // more than half the trip, however busy the machine.
    start -= std::abs(offset) <= shortest / 2 + 1 ? 0 : offset;
  }
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(start));
}

void ShareFromFirst(MessagePassing& processes, MessagePassing::Channel channel, const Wait& wait,
                    void* data, std::int64_t bytes) {
  Correspondence letters(processes, channel, wait);
  if (processes.rank() != 0) {
    letters.Receive(0, data, bytes);
  }
  for (int other = 1; processes.rank() == 0 && other < processes.size(); ++other) {
    letters.Send(other, data, bytes);
  }
  letters.Finish();
}

std::vector<std::vector<std::byte>> CollectBytes(MessagePassing& processes,
                                                 MessagePassing::Channel channel, const Wait& wait,
                                                 std::vector<std::byte> mine) {
  Correspondence letters(processes, channel, wait);
  std::byte next{1};  // "send the next piece": nobody sends more than is read
  std::vector<std::vector<std::byte>> all;
  if (processes.rank() != 0) {
    const std::int64_t size = std::ssize(mine);
    letters.Send(0, &size, sizeof size);
    for (std::int64_t at = 0; at < size; at += kPiece) {
      letters.Receive(0, &next, sizeof next);
      letters.Finish();
      letters.Send(0, mine.data() + at, std::min(kPiece, size - at));
    }
    letters.Finish();
    return all;
  }
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(processes.size()));
  for (int other = 1; other < processes.size(); ++other) {
    letters.Receive(other, &sizes[static_cast<std::size_t>(other)], sizeof(std::int64_t));
  }
  letters.Finish();
  CheckSizes(processes, wait, sizes);
  all.resize(sizes.size());
  all.front() = std::move(mine);
  for (std::int64_t at = 0, most = *std::max_element(sizes.begin(), sizes.end()); at < most;
       at += kPiece) {
    for (int other = 1; other < processes.size(); ++other) {
      const std::int64_t bytes = sizes[static_cast<std::size_t>(other)] - at;
      if (bytes > 0) {
        letters.Send(other, &next, sizeof next);
        ReceivePiece(letters, other, all[static_cast<std::size_t>(other)], bytes);
      }
    }
    letters.Finish();
  }
  return all;
}

std::vector<std::vector<std::byte>> ShareBytes(MessagePassing& processes,
                                               MessagePassing::Channel channel, const Wait& wait,
                                               const std::vector<std::byte>& mine) {
  const auto me = static_cast<std::size_t>(processes.rank());
  std::vector<std::vector<std::int64_t>> announced(static_cast<std::size_t>(processes.size()),
                                                   {std::ssize(mine)});
  ShareEach(processes, channel, wait, announced);
  std::vector<std::int64_t> sizes;
  for (const std::vector<std::int64_t>& size : announced) {
    sizes.push_back(size.front());
  }
  CheckSizes(processes, wait, sizes);
  std::vector<std::vector<std::byte>> all(sizes.size());
  Correspondence letters(processes, channel, wait);
  for (std::int64_t at = 0, most = *std::max_element(sizes.begin(), sizes.end()); at < most;
       at += kPiece) {
    for (int k = 1; k < processes.size(); ++k) {  // not all tell the same one at once
      const int other = (processes.rank() + k) % processes.size();
      const std::int64_t bytes = sizes[static_cast<std::size_t>(other)] - at;
      if (bytes > 0) {
        ReceivePiece(letters, other, all[static_cast<std::size_t>(other)], bytes);
      }
      if (at < std::ssize(mine)) {
        letters.Send(other, mine.data() + at, std::min(kPiece, std::ssize(mine) - at));
      }
    }
    letters.Finish();
  }
  all[me] = mine;
  return all;
}

std::vector<RankReport> ShareReports(MessagePassing& processes, MessagePassing::Channel channel,
                                     const Wait& wait, const RankReport& mine) {
  // One letter: what is not a loss, then the losses.
  struct Head {
    std::int64_t end = 0;
    float squared_norm = 0.0F;
    bool has_norm = false, asks_to_stop = false;
  };
  const Head head{mine.end.value, mine.squared_norm.value_or(0.0F), mine.squared_norm.has_value(),
                  mine.asks_to_stop};
  const auto begin = std::as_bytes(std::span(&head, 1));
  const auto losses = std::as_bytes(std::span(mine.losses));
  std::vector<std::byte> letter(begin.begin(), begin.end());
  letter.insert(letter.end(), losses.begin(), losses.end());
  std::vector<std::vector<std::byte>> letters(static_cast<std::size_t>(processes.size()), letter);
  ShareEach(processes, channel, wait, letters);
  std::vector<RankReport> all;
  for (const std::vector<std::byte>& its : letters) {
    RankReport& report = all.emplace_back(mine);
    Head of_other;
    std::memcpy(&of_other, its.data(), sizeof of_other);
    report.end = SimTime(of_other.end);
    report.squared_norm = of_other.has_norm ? std::optional(of_other.squared_norm) : std::nullopt;
    report.asks_to_stop = of_other.asks_to_stop;
    std::copy(its.begin() + sizeof of_other, its.end(),
              std::as_writable_bytes(std::span(report.losses)).begin());
  }
  return all;
}

void JoinRun(MessagePassing& processes, RunOptions& run) {
  const MessagePassing::Channel channel = processes.Split(0);
  run.only_rank = Rank(static_cast<std::size_t>(processes.rank()));
  run.share_reports = [&processes, channel](std::int64_t step, const RankReport& mine) {
    return ShareReports(processes, channel, {"losses of step " + std::to_string(step)}, mine);
  };
}

void AllOrNone(MessagePassing* processes, MessagePassing::Channel channel, const Wait& wait,
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
       ShareBytes(*processes, channel, wait, {begin, begin + problem.size()})) {
    if (!its.empty()) {
      const std::string text(reinterpret_cast<const char*>(its.data()) + 1, its.size() - 1);
      if (static_cast<char>(its.front()) == kInputProblem) {
        throw InputError(text);
      }
      throw EnvironmentError(text);
    }
  }
}

namespace {

// What `its` says otherwise than `first`, which process 0 has; empty: nothing.
std::string DifferenceOf(const RankFacts& first, const RankFacts& its) {
  const auto value_in = [](const RankFacts& facts, const std::string& name) {
    const auto found = FindIf(facts, [&](const auto& fact) { return fact.first == name; });
    return found == facts.end() ? "none" : found->second;
  };
  const auto [one, other] = std::mismatch(first.begin(), first.end(), its.begin(), its.end());
  if (one == first.end() && other == its.end()) {
    return {};
  }
  std::string name = one == first.end() ? other->first : one->first;
  if (other != its.end() && value_in(its, name) == value_in(first, name)) {
    name = other->first;  // one that process 0 lacks
  }
  return name + ' ' + value_in(its, name) + ", rank 0 has " + value_in(first, name);
}

// Names and values by turns, each with a NUL behind it, which no argument holds.
std::vector<std::byte> BytesOf(const RankFacts& facts) {
  std::vector<std::byte> bytes;
  for (const auto& [name, value] : facts) {
    for (const std::string& text : {name, value}) {
      const auto* const begin = reinterpret_cast<const std::byte*>(text.c_str());
      bytes.insert(bytes.end(), begin, begin + text.size() + 1);
    }
  }
  return bytes;
}

RankFacts FactsIn(const std::vector<std::byte>& bytes) {
  RankFacts facts;
  std::istringstream texts(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  for (std::string name, value; std::getline(texts, name, '\0');) {
    std::getline(texts, value, '\0');
    facts.emplace_back(name, value);
  }
  return facts;
}

}  // namespace

void CheckAlike(MessagePassing* processes, const RankFacts& mine) {
  if (processes == nullptr) {
    return;
  }
  const Wait wait{"comparison of what the ranks were given"};
  AllOrNone(processes, MessagePassing::kAll, wait, [&] {
    const auto all = CollectBytes(*processes, MessagePassing::kAll, wait, BytesOf(mine));
    std::set<std::size_t> ranks;
    std::string difference;
    for (std::size_t r = 1; r < all.size(); ++r) {
      const std::string its = DifferenceOf(mine, FactsIn(all[r]));
      difference = difference.empty() ? its : difference;
      if (!its.empty() && its == difference) {
        ranks.insert(r);
      }
    }
    if (!ranks.empty()) {
      throw InputError((ranks.size() > 1 ? "ranks " : "rank ") + Listed(ranks) + ": " + difference +
                       "; give all ranks the same");
    }
  });
}

void FinishTogether(MessagePassing* processes) {
  if (processes != nullptr) {
    (void)ShareBytes(*processes, MessagePassing::kAll, {"end of the run"}, {});
    processes->Finish();
  }
}

}  // namespace shardwright
