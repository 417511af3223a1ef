#include "tests/executor/cuda/emulation/emulated_gpu.h"

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "core/error.h"
#include "executor/cuda/kernels/kernels.h"

namespace shardwright {
namespace {

using KernelFunction = void (*)(gpu::Block&, const void*);

template <class Kernel>
void RunBlock(gpu::Block& block, const void* args) {
  Kernel::Run(block, *static_cast<const typename Kernel::Args*>(args));
}

constexpr std::array kFunctions = {
#define SW_ENTRY(name) &RunBlock<gpu::name##Kernel>,
    SW_KERNELS(SW_ENTRY)
#undef SW_ENTRY
};

Bytes MemoryOfMachine() {
  return Bytes(std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE));
}

class EmulatedGpu : public Gpu {
 public:
  explicit EmulatedGpu(const EmulationOptions& options) : options_(options), random_(options.seed) {
    info_.name = "emulated GPU";
    info_.memory = options.memory > Bytes(0) ? options.memory : MemoryOfMachine();
    info_.multiprocessors = 1;
    info_.shared_bytes = options.shared_bytes;
    info_.library = "own kernels";
  }

  [[nodiscard]] const GpuInfo& Info() const override { return info_; }

  [[nodiscard]] std::byte* Allocate(Bytes size, bool on_host) override {
    const std::lock_guard lock(mutex_);
    CheckNoCapture("an allocation");
    if (size > (on_host ? MemoryOfMachine() : info_.memory - used_)) {
      throw RunError("emulated GPU: out of memory: got " + std::to_string(size.value) + " bytes");
    }
    constexpr std::size_t kAlignment = 256;
    const auto bytes = static_cast<std::size_t>(
        RoundUp(std::max<std::int64_t>(size.value, 1), std::int64_t{kAlignment}));
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes));
    if (memory == nullptr) {
      throw RunError("emulated GPU: out of memory: got " + std::to_string(size.value) + " bytes");
    }
    used_ += on_host ? Bytes(0) : size;
    memory_.emplace_back(memory, std::free);
    std::memset(memory, 0xff, bytes);
    return memory_.back().get();
  }
  [[nodiscard]] Bytes FreeMemory() override {
    const std::lock_guard lock(mutex_);
    return info_.memory - used_;
  }

  [[nodiscard]] GpuStream NewStream(bool /*high_priority*/) override {
    const std::lock_guard lock(mutex_);
    return {static_cast<EmulatedStream*>(&streams_.emplace_back(*this))};
  }
  [[nodiscard]] GpuEvent NewEvent(bool /*timed*/) override {
    const std::lock_guard lock(mutex_);
    events_.emplace_back();
    return {&events_.back()};
  }

  void Record(GpuEvent event, GpuStream stream) override {
    auto* const e = static_cast<Event*>(event.value);
    const std::lock_guard lock(mutex_);
    CheckNotCapturing(stream, "a record");
    e->last = std::make_shared<Recording>();
    Push(stream, [recording = e->last] {
      recording->is_over = true;
      recording->at = std::chrono::steady_clock::now();
      return true;
    });
  }
  void WaitFor(GpuStream stream, GpuEvent event) override {
    const auto* const e = static_cast<Event*>(event.value);
    const std::lock_guard lock(mutex_);
    CheckNotCapturing(stream, "a wait");
    Push(stream, [recording = e->last] { return recording->is_over; });
  }
  [[nodiscard]] bool IsOver(GpuEvent event) override {
    const auto* const e = static_cast<Event*>(event.value);
    const std::lock_guard lock(mutex_);
    CheckNoCapture("a query");
    for (int step = 0; step < kStepsPerLook && !e->last->is_over && Advance(); ++step) {
    }
    return e->last->is_over;
  }
  void Synchronize(GpuEvent event) override {
    const auto* const e = static_cast<Event*>(event.value);
    std::unique_lock lock(mutex_);
    CheckNoCapture("a synchronization");
    const std::shared_ptr<Recording> meant = e->last;
    while (!meant->is_over) {
      waits_for_others_ = false;
      if (Advance()) {
        continue;
      }
      if (!waits_for_others_) {
        throw RunError("emulated GPU: the streams wait for each other");
      }
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      lock.lock();
    }
  }
  [[nodiscard]] SimTime Between(GpuEvent first, GpuEvent second) override {
    const std::lock_guard lock(mutex_);
    const auto elapsed =
        static_cast<Event*>(second.value)->last->at - static_cast<Event*>(first.value)->last->at;
    return SimTime(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count() * 1000);
  }

  void Copy(void* to, const void* from, std::int64_t bytes, GpuStream stream) override {
    const std::lock_guard lock(mutex_);
    Push(stream, [=] {
      std::memmove(to, from, static_cast<std::size_t>(bytes));
      return true;
    });
  }
  void Fill(void* to, std::uint8_t byte, std::int64_t bytes, GpuStream stream) override {
    const std::lock_guard lock(mutex_);
    Push(stream, [=] {
      std::memset(to, byte, static_cast<std::size_t>(bytes));
      return true;
    });
  }
  void Launch(const KernelLaunch& launch, GpuStream stream) override {
    SW_CHECK(launch.shared_bytes <= options_.shared_bytes,
             "a kernel wants " + std::to_string(launch.shared_bytes) + " bytes of shared memory");
    const auto* const args = static_cast<const std::byte*>(launch.args);
    std::vector<std::max_align_t> copy(launch.args_bytes / sizeof(std::max_align_t) + 1);
    std::memcpy(copy.data(), args, launch.args_bytes);
    const std::lock_guard lock(mutex_);
    Push(stream, [launch, copy = std::move(copy)] {
      RunKernel(launch, copy.data());
      return true;
    });
  }
  [[nodiscard]] bool Multiply(const gpu::GemmArgs& /*product*/, void* /*workspace*/,
                              std::int64_t /*bytes*/, GpuStream /*stream*/) override {
    return false;
  }

  void BeginCapture(GpuStream stream) override {
    const std::lock_guard lock(mutex_);
    CheckNoCapture("a second capture");
    StreamOf(stream).capturer = std::this_thread::get_id();
  }
  [[nodiscard]] GpuGraph EndCapture(GpuStream stream) override {
    const std::lock_guard lock(mutex_);
    Stream& of = StreamOf(stream);
    SW_CHECK(of.capturer == std::this_thread::get_id(), "a capture of another thread");
    of.capturer = {};
    graphs_.push_back(std::exchange(of.captured, {}));
    return {&graphs_.back()};
  }
  void DropCapture(GpuStream stream) noexcept override {
    const std::lock_guard lock(mutex_);
    StreamOf(stream).capturer = {};
    StreamOf(stream).captured.clear();
  }
  void LaunchGraph(GpuGraph graph, GpuStream stream) override {
    const std::lock_guard lock(mutex_);
    for (const Step& step : *static_cast<const std::vector<Step>*>(graph.value)) {
      Push(stream, step);
    }
  }

 private:
  static constexpr int kStepsPerLook = 64;

  // One step of a stream; false: it has to wait.
  using Step = std::function<bool()>;
  struct Stream : EmulatedStream {
    explicit Stream(EmulatedGpu& owner) : gpu(owner) {}
    void Push(std::function<bool()> step) override {
      const std::lock_guard lock(gpu.mutex_);
      steps.push_back([this, step = std::move(step)] {
        const bool is_over = step();
        gpu.waits_for_others_ = gpu.waits_for_others_ || !is_over;
        return is_over;
      });
    }

    EmulatedGpu& gpu;
    std::deque<Step> steps;
    std::thread::id capturer;    // none: what is pushed runs
    std::vector<Step> captured;  // instead of running
  };
  // An event may be recorded again, on another stream too, before an earlier recording is over:
  // whoever waits means the last one as of then.
  struct Recording {
    bool is_over = false;
    std::chrono::steady_clock::time_point at;
  };
  struct Event {
    // As in CUDA, an event that was never recorded is over.
    std::shared_ptr<Recording> last = std::make_shared<Recording>(Recording{true, {}});
  };

  static void RunKernel(const KernelLaunch& launch, const void* args) {
    constexpr std::size_t kAlignment = 256;
    const auto bytes = static_cast<std::size_t>(RoundUp(launch.shared_bytes + 1, 256));
    const std::unique_ptr<std::byte, void (*)(void*)> shared(
        static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes)), std::free);
    for (std::int64_t b = 0; b < launch.blocks; ++b) {
      std::memset(shared.get(), 0xff, bytes);
      gpu::Block block(shared.get(), b, launch.blocks, launch.threads);
      kFunctions[static_cast<std::size_t>(launch.kernel)](block, args);
      SW_CHECK(block.used() <= launch.shared_bytes,
               "kernel " + std::to_string(static_cast<int>(launch.kernel)) + " uses " +
                   std::to_string(block.used()) + " bytes of shared memory, its launch has " +
                   std::to_string(launch.shared_bytes));
    }
  }

  static Stream& StreamOf(GpuStream stream) {
    return *static_cast<Stream*>(static_cast<EmulatedStream*>(stream.value));
  }
  static void Push(GpuStream stream, Step step) {
    Stream& to = StreamOf(stream);
    if (to.capturer == std::thread::id()) {
      to.steps.push_back(std::move(step));
    } else {
      SW_CHECK(to.capturer == std::this_thread::get_id(), "a capture of another thread");
      to.captured.push_back(std::move(step));
    }
  }
  // What the driver refuses while a stream is captured in the thread's mode.
  void CheckNoCapture(const char* what) const {
    for (const Stream& stream : streams_) {
      if (stream.capturer == std::this_thread::get_id()) {
        throw RunError("emulated GPU: " + std::string(what) + " in the middle of a capture");
      }
    }
  }
  static void CheckNotCapturing(GpuStream stream, const char* what) {
    if (StreamOf(stream).capturer != std::thread::id()) {
      throw RunError("emulated GPU: " + std::string(what) + " on a stream that is captured");
    }
  }

  // False: it has to wait. A step that throws is gone, so that the stream goes on without it.
  static bool RunFront(Stream& stream) {
    Step step = std::move(stream.steps.front());
    stream.steps.pop_front();
    if (step()) {
      return true;
    }
    stream.steps.push_front(std::move(step));
    return false;
  }

  // Runs one step of a random stream that can; false: none can.
  bool Advance() {
    const std::size_t first = random_() % (streams_.empty() ? 1 : streams_.size());
    for (std::size_t k = 0; k < streams_.size(); ++k) {
      Stream& stream = streams_[(first + k) % streams_.size()];
      if (!stream.steps.empty() && RunFront(stream)) {
        return true;
      }
    }
    return false;
  }

  const EmulationOptions options_;
  GpuInfo info_;
  std::mutex mutex_;
  // All guarded by mutex_; deques, so that elements stay where they are.
  Bytes used_{0};
  std::vector<std::unique_ptr<std::byte, void (*)(void*)>> memory_;
  std::deque<Stream> streams_;
  std::deque<Event> events_;
  std::deque<std::vector<Step>> graphs_;
  std::mt19937_64 random_;
  bool waits_for_others_ = false;  // a step that somebody else ends has been asked in vain
};

}  // namespace

std::unique_ptr<Gpu> MakeEmulatedGpu(const EmulationOptions& options) {
  return std::make_unique<EmulatedGpu>(options);
}

}  // namespace shardwright
