#include "executor/host/tcp_processes.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "executor/host/fault.h"
#include "executor/host/tcp_relay.h"
#include "executor/host/together.h"

namespace shardwright {
namespace {

using tcp::Frame;
using tcp::Kind;

class TcpProcesses : public MessagePassing {
 public:
  TcpProcesses(const Launch& launch, std::chrono::milliseconds timeout)
      : rank_(launch.rank), size_(launch.size), timeout_(timeout) {
    if (rank_ == 0) {
      relay_ = std::make_unique<tcp::Relay>(launch, timeout);
    }
    members_.emplace_back();
    for (int r = 0; r < size_; ++r) {
      members_.front().push_back(r);
    }
    socket_ = tcp::Join(launch, relay_ ? relay_->port() : launch.port, timeout);
    reader_ = std::thread([this] { Read(); });
  }

  ~TcpProcesses() override {
    socket_.Shutdown();  // wakes the reader
    reader_.join();
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }

  [[nodiscard]] Channel Split(int color) override {
    const auto* const mine = reinterpret_cast<const std::byte*>(&color);
    const std::vector<std::byte> bytes(mine, mine + sizeof color);
    const auto colors = ShareBytes(*this, kAll, {"groups of ranks"}, bytes);
    const std::lock_guard lock(mutex_);
    members_.emplace_back();
    for (int r = 0; r < size_; ++r) {
      if (colors[static_cast<std::size_t>(r)] == bytes) {
        members_.back().push_back(r);
      }
    }
    return static_cast<Channel>(members_.size()) - 1;
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
    if (!changed_.wait_for(lock, timeout_, [&] { return finished_ || !cause_.empty(); })) {
      std::set<std::int64_t> others;
      for (int r = 0; r < size_; ++r) {
        others.insert(r);
      }
      others.erase(rank_);
      throw RunError(WaitedText(rank_, "end of the run", timeout_, others, size_ > 2));
    }
  }

  void Fail(const std::string& cause) override {
    {
      const std::lock_guard lock(mutex_);
      if (!cause_.empty() || finished_) {
        return;
      }
      cause_ = cause;
      changed_.notify_all();
    }
    const Frame frame{.kind = Kind::kFail,
                      .from = rank_,
                      .to = tcp::kEverybody,
                      .bytes = static_cast<std::int64_t>(cause.size())};
    // Whoever sends may be stuck, since process 0 stands still. Then the connection is given up:
    // that wakes the sender, and the others see that this process is gone. (ThreadSanitizer of GCC
    // 12 does not know what a timed mutex does.)
    constexpr int kTries = 1000;
    std::unique_lock lock(write_mutex_, std::try_to_lock);
    for (int i = 0; i < kTries && !lock.owns_lock(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      (void)lock.try_lock();
    }
    if (!lock.owns_lock() || !socket_.Write(&frame, sizeof frame) ||
        !socket_.Write(cause.data(), cause.size())) {
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

  void Post(std::span<const std::byte> notice) override {
    Write({.kind = Kind::kPost,
           .from = rank_,
           .to = tcp::kEverybody,
           .bytes = static_cast<std::int64_t>(notice.size())},
          notice.data());
  }
  [[nodiscard]] std::vector<std::byte> PostOf(int rank) override {
    const std::lock_guard lock(mutex_);
    const auto found = notices_.find(rank);
    return found == notices_.end() ? std::vector<std::byte>() : found->second;
  }

 private:
  // Messages of one sender on one channel, in the order in which they were sent; receivers take
  // them in the order in which they asked.
  struct Inbox {
    std::uint64_t asked = 0, arrived = 0;
    std::map<std::uint64_t, std::vector<std::byte>> messages;
  };

  // Some messages that are expected; over when all have come.
  class Group : public Pending {
   public:
    explicit Group(TcpProcesses& all) : all_(all) {}
    void Expect(Channel channel, int from, void* data, std::int64_t bytes) {
      const std::lock_guard lock(all_.mutex_);
      Inbox& inbox = all_.InboxOf(channel, from);
      expected_.push_back({&inbox, inbox.asked++, data, bytes});
    }
    [[nodiscard]] bool IsOver() override {
      const std::lock_guard lock(all_.mutex_);
      std::erase_if(expected_, [](const Expected& e) {
        const auto found = e.inbox->messages.find(e.number);
        if (found == e.inbox->messages.end()) {
          return false;
        }
        SW_CHECK(static_cast<std::int64_t>(found->second.size()) == e.bytes,
                 "a message of another length");
        std::copy(found->second.begin(), found->second.end(), static_cast<std::byte*>(e.data));
        e.inbox->messages.erase(found);
        return true;
      });
      if (!expected_.empty() && !all_.cause_.empty()) {
        throw RunError(all_.cause_);
      }
      return expected_.empty();
    }

   private:
    struct Expected {
      Inbox* inbox = nullptr;
      std::uint64_t number = 0;
      void* data = nullptr;
      std::int64_t bytes = 0;
    };
    TcpProcesses& all_;
    std::vector<Expected> expected_;
  };

  [[nodiscard]] Inbox& InboxOf(Channel channel, int member) {
    return inboxes_[{
        channel, members_[static_cast<std::size_t>(channel)][static_cast<std::size_t>(member)]}];
  }
  [[nodiscard]] int MemberOf(Channel channel) {
    const std::lock_guard lock(mutex_);
    const std::vector<int>& members = members_[static_cast<std::size_t>(channel)];
    return static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  }

  void SendTo(Channel channel, int member, const void* data, std::int64_t bytes) {
    Frame frame{.kind = Kind::kData, .from = rank_, .channel = channel, .bytes = bytes};
    {
      const std::lock_guard lock(mutex_);
      frame.to = members_[static_cast<std::size_t>(channel)][static_cast<std::size_t>(member)];
    }
    Write(frame, data);
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

  void Write(const Frame& frame, const void* data) {
    const std::lock_guard lock(write_mutex_);
    if (socket_.Write(&frame, sizeof frame) &&
        socket_.Write(data, static_cast<std::size_t>(frame.bytes))) {
      return;
    }
    // A part of a message may have gone out, so nothing can follow it.
    Hear(errno == EAGAIN ? WaitedText(rank_, "a message on its way", timeout_, {0}) : Lost());
    socket_.Shutdown();
    const std::lock_guard state(mutex_);
    throw RunError(cause_.empty() ? Lost() : cause_);
  }
  [[nodiscard]] std::string Lost() const {
    return "rank " + std::to_string(rank_) + ": the connection to rank 0 is gone";
  }

  void Read() {
    Frame frame;
    while (socket_.Read(&frame, sizeof frame)) {
      std::vector<std::byte> data(static_cast<std::size_t>(frame.bytes));
      if (!socket_.Read(data.data(), data.size())) {
        break;
      }
      if (frame.kind == Kind::kFail) {
        Hear({reinterpret_cast<const char*>(data.data()), data.size()});
        continue;
      }
      const std::lock_guard lock(mutex_);
      if (frame.kind == Kind::kBye) {
        finished_ = true;
      } else if (frame.kind == Kind::kPost) {
        notices_[frame.from] = std::move(data);
      } else {
        Inbox& inbox = inboxes_[{frame.channel, frame.from}];
        inbox.messages.emplace(inbox.arrived++, std::move(data));
      }
      changed_.notify_all();
    }
    Hear(Lost());
  }
  void Hear(const std::string& cause) {
    {
      const std::lock_guard lock(mutex_);
      if (finished_ || !cause_.empty()) {
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
  const std::chrono::milliseconds timeout_;
  std::unique_ptr<tcp::Relay> relay_;  // of rank 0
  tcp::Socket socket_;
  std::mutex write_mutex_;    // one frame after the other; taken before mutex_
  std::mutex watcher_mutex_;  // held while one is called, so that it may be taken away safely
  std::map<const void*, std::function<void(const std::string&)>> watchers_;  // by owner; guarded
  std::mutex mutex_;                                                         // taken last
  std::condition_variable changed_;
  // All guarded by mutex_; elements of the maps stay where they are.
  std::vector<std::vector<int>> members_;  // by channel: ranks
  std::map<std::pair<Channel, int>, Inbox> inboxes_;
  std::map<int, std::vector<std::byte>> notices_;  // by rank
  std::string cause_;
  bool finished_ = false;
  std::thread reader_;
};

}  // namespace

std::unique_ptr<MessagePassing> MeetByTcp(const Launch& launch, std::chrono::milliseconds timeout) {
  return std::make_unique<TcpProcesses>(launch, timeout);
}

}  // namespace shardwright
