#include "executor/host/tcp_processes.h"

#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "core/threads.h"
#include "executor/host/fault.h"
#include "executor/host/tcp_frames.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_mailbox.h"
#include "executor/host/tcp_relay.h"
#include "executor/host/tcp_socket.h"
#include "executor/host/together.h"

namespace shardwright {
namespace {

using tcp::Frame;
using tcp::Kind;

class TcpProcesses : public MessagePassing {
 public:
  TcpProcesses(const Launch& launch, std::chrono::milliseconds timeout)
      : MessagePassing(timeout), rank_(launch.rank), size_(launch.size), mailbox_(rank_, size_) {
    if (rank_ == 0) {
      relay_ = std::make_unique<tcp::Relay>(launch, timeout);
      socket_ = relay_->TakeOwn();
      tcp::AwaitWelcome(socket_, "rank 0: its own relay", timeout);
    } else {
      socket_ = tcp::Join(launch, launch.port, timeout);
    }
    first_ = rank_ == 0 ? "rank 0" : "rank 0 (" + socket_.PeerName() + ')';
    reader_ = StartThread([this] { Read(); });
  }

  ~TcpProcesses() override {
    socket_.Shutdown();  // wakes the reader
    reader_.join();
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  void set_timeout(std::chrono::milliseconds timeout) override {
    MessagePassing::set_timeout(timeout);
    socket_.LimitWrites(timeout);
    if (relay_ != nullptr) {
      relay_->set_timeout(timeout);
    }
  }

  [[nodiscard]] Channel Split(int color) override {
    const auto* const mine = reinterpret_cast<const std::byte*>(&color);
    const std::vector<std::byte> bytes(mine, mine + sizeof color);
    const auto colors = ShareBytes(*this, kAll, {"groups of ranks"}, bytes);
    std::vector<int> members;
    for (int r = 0; r < size_; ++r) {
      if (colors[static_cast<std::size_t>(r)] == bytes) {
        members.push_back(r);
      }
    }
    const std::lock_guard lock(mutex_);
    return mailbox_.AddChannel(std::move(members));
  }

  [[nodiscard]] std::unique_ptr<Pending> Send(Channel channel, int to, const void* data,
                                              std::int64_t bytes) override {
    SendTo(channel, to, data, bytes);
    return std::make_unique<Group>(*this);
  }
  [[nodiscard]] std::unique_ptr<Pending> Receive(Channel channel, int from, void* data,
                                                 std::int64_t bytes) override {
    auto group = std::make_unique<Group>(*this);
    group->Expect(channel, from, data, bytes);
    return group;
  }
  [[nodiscard]] std::unique_ptr<Pending> AllGather(Channel channel, void* data,
                                                   std::span<const MessagePart> parts) override {
    auto* const bytes = static_cast<std::byte*>(data);
    const int me = MemberOf(channel);
    std::vector<MessagePart> same(parts.size(), parts[static_cast<std::size_t>(me)]);
    return Exchange(channel, bytes, same, bytes, parts);
  }
  [[nodiscard]] std::unique_ptr<Pending> AllToAll(Channel channel, const void* from,
                                                  std::span<const MessagePart> from_parts, void* to,
                                                  std::span<const MessagePart> to_parts) override {
    const auto me = static_cast<std::size_t>(MemberOf(channel));
    std::copy_n(static_cast<const std::byte*>(from) + from_parts[me].offset, to_parts[me].bytes,
                static_cast<std::byte*>(to) + to_parts[me].offset);
    return Exchange(channel, from, from_parts, to, to_parts);
  }

  // When it returns, everybody has called it.
  void Finish() override {
    Write({.kind = Kind::kBye, .from = rank_, .to = tcp::kEverybody}, nullptr);
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout(),
                           [&] { return mailbox_.finished() || !cause_.empty(); })) {
      std::set<std::int64_t> others;
      for (int r = 0; r < size_; ++r) {
        others.insert(r);
      }
      others.erase(rank_);
      lock.unlock();
      const std::set<std::int64_t> named = AtFault(others);
      throw RunError(WaitedText(rank_, "end of the run", timeout(), named,
                                named.size() > 1 && named == others));
    }
  }

  void Fail(const std::string& cause) override {
    {
      const std::lock_guard lock(mutex_);
      if (!cause_.empty() || mailbox_.finished()) {
        return;
      }
      cause_ = cause;
      changed_.notify_all();
    }
    const std::int64_t bytes = std::min(std::ssize(cause), tcp::kLongestCause);
    const Frame frame{.kind = Kind::kFail, .from = rank_, .to = tcp::kEverybody, .bytes = bytes};
    // Whoever sends may be stuck, since process 0 stands still. Then the connection is given up:
    // that wakes the sender, and the others see that this process is gone.
    const std::unique_lock lock = LockForWriting();
    if (!lock.owns_lock() || !socket_.Write(&frame, sizeof frame) ||
        !socket_.Write(cause.data(), static_cast<std::size_t>(bytes))) {
      socket_.Shutdown();
    }
  }
  void OnFailure(const void* owner,
                 const std::function<void(const std::string& cause)>& watcher) override {
    std::string cause;
    const std::lock_guard watching(watcher_mutex_);
    {
      const std::lock_guard lock(mutex_);
      cause = cause_;
    }
    if (!watcher) {
      watchers_.erase(owner);
      return;
    }
    if (!cause.empty()) {
      watcher(cause);
    }
    watchers_[owner] = watcher;
  }

  [[nodiscard]] std::set<std::int64_t> Silent() override {
    const auto called = std::chrono::steady_clock::now();
    const std::lock_guard asking(asking_mutex_);  // answers are to one question at a time
    if (called < told_) {
      return silent_;  // another thread asked meanwhile
    }
    silent_ = Ask();
    told_ = std::chrono::steady_clock::now();
    return silent_;
  }

  void Post(std::span<const std::byte> notice) override {
    SW_CHECK(std::ssize(notice) <= tcp::kLongestFrame, "a notice that is too long");
    Write({.kind = Kind::kPost,
           .from = rank_,
           .to = tcp::kEverybody,
           .bytes = static_cast<std::int64_t>(notice.size())},
          notice.data());
  }
  [[nodiscard]] std::vector<std::byte> PostOf(int rank) override {
    const std::lock_guard lock(mutex_);
    return mailbox_.NoticeOf(rank);
  }

 private:
  // The ranks that do not answer within two seconds. Called with asking_mutex_.
  [[nodiscard]] std::set<std::int64_t> Ask() {
    {
      const std::lock_guard lock(mutex_);
      mailbox_.answered().clear();
    }
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && !Tell({.kind = Kind::kPing, .from = rank_, .to = r})) {
        return {};
      }
    }
    std::set<std::int64_t> silent;
    std::unique_lock lock(mutex_);
    const auto count = static_cast<std::size_t>(size_ - 1);
    constexpr std::chrono::milliseconds kPatience{2000};
    // Also where another thread has given up meanwhile: that is no answer of those that are asked.
    if (!changed_.wait_for(lock, kPatience, [&] { return mailbox_.answered().size() == count; })) {
      for (int r = 0; r < size_; ++r) {
        if (r != rank_ && !mailbox_.answered().contains(r)) {
          silent.insert(r);
        }
      }
    }
    // Process 0 passes all answers on.
    return silent.contains(0) ? std::set<std::int64_t>{0} : silent;
  }

  // Some messages that are expected; over when all have come.
  class Group : public Pending {
   public:
    explicit Group(TcpProcesses& all) : all_(all) {}
    void Expect(Channel channel, int from, void* data, std::int64_t bytes) {
      const std::lock_guard lock(all_.mutex_);
      const int rank = all_.RankOf(channel, from);
      tcp::Mailbox::Inbox& inbox = all_.mailbox_.InboxOf(channel, rank);
      expected_.push_back({&inbox, rank, inbox.asked++, data, bytes});
    }
    [[nodiscard]] bool IsOver() override {
      const std::lock_guard lock(all_.mutex_);
      std::erase_if(expected_, [this](const Expected& e) {
        std::vector<std::byte> message;
        if (!all_.mailbox_.Collect(*e.inbox, e.number, &message)) {
          return false;
        }
        const std::int64_t came = std::ssize(message);
        if (came != e.bytes) {
          throw RunError("rank " + std::to_string(all_.rank_) + ": a message of rank " +
                         std::to_string(e.from) + " has " + std::to_string(came) +
                         " bytes, expected " + std::to_string(e.bytes));
        }
        std::copy(message.begin(), message.end(), static_cast<std::byte*>(e.data));
        return true;
      });
      if (!expected_.empty() && !all_.cause_.empty()) {
        throw RunError(all_.cause_);
      }
      return expected_.empty();
    }
    [[nodiscard]] std::set<std::int64_t> Missing() override {
      std::set<std::int64_t> ranks;
      for (const Expected& expected : expected_) {
        ranks.insert(expected.from);
      }
      return ranks;
    }

   private:
    struct Expected {
      tcp::Mailbox::Inbox* inbox = nullptr;
      int from = 0;  // its rank
      std::uint64_t number = 0;
      void* data = nullptr;
      std::int64_t bytes = 0;
    };
    TcpProcesses& all_;
    std::vector<Expected> expected_;
  };

  [[nodiscard]] int RankOf(Channel channel, int member) const {
    return mailbox_.MembersOf(channel)[static_cast<std::size_t>(member)];
  }
  [[nodiscard]] int MemberOf(Channel channel) {
    const std::lock_guard lock(mutex_);
    const std::vector<int>& members = mailbox_.MembersOf(channel);
    return static_cast<int>(FindIn(members, rank_) - members.begin());
  }

  void SendTo(Channel channel, int member, const void* data, std::int64_t bytes) {
    Frame frame{.kind = Kind::kData, .from = rank_, .channel = channel, .left = bytes};
    {
      const std::lock_guard lock(mutex_);
      frame.to = RankOf(channel, member);
    }
    const auto* at = static_cast<const std::byte*>(data);
    do {
      frame.bytes = std::min(frame.left, tcp::kLongestFrame);
      frame.left -= frame.bytes;
      Write(frame, at);
      at += frame.bytes;
    } while (frame.left > 0);
  }
  std::unique_ptr<Pending> Exchange(Channel channel, const void* from,
                                    std::span<const MessagePart> from_parts, void* to,
                                    std::span<const MessagePart> to_parts) {
    auto group = std::make_unique<Group>(*this);
    const int me = MemberOf(channel);
    const int count = static_cast<int>(to_parts.size());
    for (int k = 1; k < count; ++k) {
      const int other = (me + k) % count;
      const auto& part = to_parts[static_cast<std::size_t>(other)];
      group->Expect(channel, other, static_cast<std::byte*>(to) + part.offset, part.bytes);
    }
    for (int k = 1; k < count; ++k) {
      const int other = (me + k) % count;
      const auto& part = from_parts[static_cast<std::size_t>(other)];
      SendTo(channel, other, static_cast<const std::byte*>(from) + part.offset, part.bytes);
    }
    return group;
  }

  // Gives up after a second. (ThreadSanitizer of GCC 12 does not know what a timed mutex does.)
  [[nodiscard]] std::unique_lock<std::mutex> LockForWriting() {
    constexpr int kTries = 1000;
    std::unique_lock lock(write_mutex_, std::try_to_lock);
    for (int i = 0; i < kTries && !lock.owns_lock(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      (void)lock.try_lock();
    }
    return lock;
  }
  // A frame alone; false: it cannot be sent now.
  [[nodiscard]] bool Tell(const Frame& frame) {
    const std::unique_lock lock = LockForWriting();
    return lock.owns_lock() && socket_.Write(&frame, sizeof frame);
  }

  void Write(const Frame& frame, const void* data) {
    const std::lock_guard lock(write_mutex_);
    if (said_bye_ && frame.kind == Kind::kPost) {
      return;  // of a thread that still watches; nobody reads it
    }
    said_bye_ = said_bye_ || frame.kind == Kind::kBye;
    if (socket_.Write(&frame, sizeof frame) &&
        socket_.Write(data, static_cast<std::size_t>(frame.bytes))) {
      return;
    }
    // A part of a message may have gone out, so nothing can follow it.
    Hear(errno == EAGAIN ? WaitedText(rank_, "a message on its way", timeout(), {0}) : Lost());
    socket_.Shutdown();
    const std::lock_guard state(mutex_);
    throw RunError(cause_.empty() ? Lost() : cause_);
  }
  [[nodiscard]] std::string Lost() const {
    return "rank " + std::to_string(rank_) + ": the connection to " + first_ + " is gone";
  }

  void Read() {
    std::string problem;
    try {
      Frame frame;
      while (problem.empty() && socket_.Read(&frame, sizeof frame)) {
        problem = mailbox_.ProblemOf(frame);
        std::vector<std::byte> data(problem.empty() ? static_cast<std::size_t>(frame.bytes)
                                                    : std::size_t{0});
        if (!problem.empty() || !socket_.Read(data.data(), data.size())) {
          break;
        }
        if (frame.kind == Kind::kPing) {
          (void)Tell({.kind = Kind::kPong, .from = rank_, .to = frame.from});
        } else if (frame.kind == Kind::kFail) {
          Hear(tcp::CauseOf(data.data(), frame.bytes));
        } else {
          problem = Take(frame, std::move(data));
        }
      }
    } catch (const std::bad_alloc&) {
      problem = "what it passes on does not fit into memory";
    }
    Hear(problem.empty() ? Lost()
                         : "rank " + std::to_string(rank_) + ": " + first_ + ": " + problem);
    socket_.Shutdown();  // nothing can follow
  }

  [[nodiscard]] std::string Take(const Frame& frame, std::vector<std::byte> data) {
    const std::lock_guard lock(mutex_);
    std::string problem = mailbox_.Take(frame, std::move(data));
    changed_.notify_all();
    return problem;
  }
  void Hear(const std::string& cause) {
    {
      const std::lock_guard lock(mutex_);
      if (mailbox_.finished() || !cause_.empty()) {
        return;
      }
      cause_ = cause;
      changed_.notify_all();
    }
    const std::lock_guard watching(watcher_mutex_);
    for (const auto& [owner, watcher] : watchers_) {
      watcher(cause);
    }
  }

  const int rank_, size_;
  std::string first_;                  // process 0, for messages
  std::unique_ptr<tcp::Relay> relay_;  // of rank 0
  tcp::Socket socket_;
  std::mutex write_mutex_;         // one frame after the other; taken before mutex_
  std::mutex asking_mutex_;        // held while the others are asked whether they are there
  std::set<std::int64_t> silent_;  // the last answer, and when it was there; guarded by
  std::chrono::steady_clock::time_point told_;  // asking_mutex_
  bool said_bye_ = false;                       // guarded by write_mutex_
  std::mutex watcher_mutex_;  // held while one is called, so that it may be taken away safely
  std::map<const void*, std::function<void(const std::string&)>> watchers_;  // by owner; guarded
  std::mutex mutex_;                                                         // taken last
  std::condition_variable changed_;
  tcp::Mailbox mailbox_;  // guarded by mutex_
  std::string cause_;     // guarded by mutex_
  std::thread reader_;
};

}  // namespace

std::unique_ptr<MessagePassing> MeetByTcp(const Launch& launch, std::chrono::milliseconds timeout) {
  return std::make_unique<TcpProcesses>(launch, timeout);
}

}  // namespace shardwright
