// Memory seen from outside the runtime: this program replaces the allocation functions of the whole
// process and counts what lives. What training adds at its peak must be the Placement and little
// more. The expected value is the placement's; the remainder is printed by source.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include "core/json.h"
#include "executor/data/batch.h"
#include "executor/data/dataset.h"
#include "executor/host/session.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_processes.h"
#include "executor/host/tcp_socket.h"
#include "executor/host/together.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SHARDWRIGHT_NO_HOOK
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SHARDWRIGHT_NO_HOOK
#endif
#endif

namespace {

// Constant-initialised: the hooks run before any constructor does.
std::atomic<std::int64_t> live_bytes{0};
std::atomic<std::int64_t> peak_bytes{0};
// Bytes of blocks above this size are counted apart as well.
constexpr std::int64_t kLargeBlock = 64 << 10;
std::atomic<std::int64_t> live_large_bytes{0};
// Bytes that libraries mapped themselves, part of live_bytes.
std::atomic<std::int64_t> mapped_bytes{0};

[[maybe_unused]] void Count(std::int64_t bytes) {
  const std::int64_t now = live_bytes.fetch_add(bytes) + bytes;
  if (std::max(bytes, -bytes) >= kLargeBlock) {
    live_large_bytes.fetch_add(bytes);
  }
  std::int64_t peak = peak_bytes.load();
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

}  // namespace

// A sanitizer brings allocation functions of its own.
#ifndef SHARDWRIGHT_NO_HOOK

// The C library's own functions under the names that it keeps for replacements.
extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* block, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
void __libc_free(void* block);
}

namespace {

void* Counted(void* block) {
  if (block != nullptr) {
    Count(static_cast<std::int64_t>(malloc_usable_size(block)));
  }
  return block;
}

}  // namespace

// All of `operator new`, of this program and of every library it loads, ends here.
extern "C" {
void* malloc(std::size_t size) {
  return Counted(__libc_malloc(size));
}
void* calloc(std::size_t count, std::size_t size) {
  return Counted(__libc_calloc(count, size));
}
void* realloc(void* block, std::size_t size) {
  const auto before = static_cast<std::int64_t>(block != nullptr ? malloc_usable_size(block) : 0);
  void* moved = __libc_realloc(block, size);
  if (moved != nullptr || size == 0) {
    Count(-before);
  }
  return Counted(moved);
}
void* memalign(std::size_t alignment, std::size_t size) {
  return Counted(__libc_memalign(alignment, size));
}
void* aligned_alloc(std::size_t alignment, std::size_t size) {
  return Counted(__libc_memalign(alignment, size));
}
int posix_memalign(void** block, std::size_t alignment, std::size_t size) {
  *block = Counted(__libc_memalign(alignment, size));
  return *block == nullptr ? ENOMEM : 0;
}
void free(void* block) {
  if (block != nullptr) {
    Count(-static_cast<std::int64_t>(malloc_usable_size(block)));
  }
  __libc_free(block);
}
// Calls from within the C library (blocks of malloc, stacks of threads) do not pass here.
void* mmap(void* address, std::size_t size, int protection, int flags, int file, off_t offset) {
  using Map = void* (*)(void*, std::size_t, int, int, int, off_t);
  static const auto real = reinterpret_cast<Map>(dlsym(RTLD_NEXT, "mmap"));
  void* mapped = real(address, size, protection, flags, file, offset);
  if (mapped != MAP_FAILED && (flags & MAP_ANONYMOUS) != 0) {
    Count(static_cast<std::int64_t>(size));
    mapped_bytes += static_cast<std::int64_t>(size);
  }
  return mapped;
}
int munmap(void* address, std::size_t size) {
  using Unmap = int (*)(void*, std::size_t);
  static const auto real = reinterpret_cast<Unmap>(dlsym(RTLD_NEXT, "munmap"));
  Count(-static_cast<std::int64_t>(size));
  mapped_bytes -= static_cast<std::int64_t>(size);
  return real(address, size);
}
}

#endif

namespace shardwright::testing {
namespace {

#ifdef SHARDWRIGHT_NO_HOOK
constexpr bool kHasHook = false;
#else
constexpr bool kHasHook = true;
#endif

struct Training {
  Model model;
  Job job;
  Plan plan;
  TrainingOptions options;
  Program program;
};

const KernelSetOptions& Kernels() {
  return FindKernelSet("shardwright-host", "test");
}

Model FromConfig(const std::string& text) {
  LoadOptions load;
  load.sequence_length = 64;
  return ModelFromJson(JsonValue::Parse(text, "config.json"), "small", load);
}

// Tied embeddings.
Model Gpt(int width) {
  return FromConfig(R"({"model_type": "gpt2", "vocab_size": 1024, "n_positions": 64, "n_layer": 3,)"
                    R"("n_head": 4, "activation_function": "gelu_new", "resid_pdrop": 0.0,)"
                    R"("embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": true,)"
                    R"("n_embd": )" +
                    std::to_string(width) + "}");
}

// RMSNorm, rotary positions, grouped heads, SwiGLU.
Model Llama(int hidden, int layers, bool tied) {
  return FromConfig(R"({"model_type": "llama", "vocab_size": 1024, "intermediate_size": 512,)"
                    R"("num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": )" +
                    std::to_string(hidden) + R"(, "num_hidden_layers": )" + std::to_string(layers) +
                    R"(, "tie_word_embeddings": )" + (tied ? "true}" : "false}"));
}

// Encoder and decoder with one table of tokens.
Model T5() {
  return FromConfig(R"({"model_type": "t5", "vocab_size": 1024, "d_model": 192, "d_kv": 48,)"
                    R"("num_heads": 4, "d_ff": 768, "num_layers": 1, "dropout_rate": 0.0})");
}

struct Case {
  Dialect dialect;
  std::string name;
  Model model;
  std::string wrap = "block";
  std::function<void(Plan&, const Model&)> choose = [](Plan&, const Model&) {};
};

std::vector<Case> Cases() {
  return {
      {Dialect::kDdp, "GPT", Gpt(144), "root"},
      {Dialect::kFsdp2, "GPT", Gpt(192)},
      {Dialect::kFsdp1, "GPT", Gpt(192)},
      {Dialect::kNative, "GPT", Gpt(192)},
      {Dialect::kZero1, "Llama", Llama(192, 2, false), "root"},
      {Dialect::kZero2, "Llama", Llama(192, 2, false), "root"},
      {Dialect::kZero3, "Llama", Llama(288, 1, false), "module"},
      {Dialect::kFsdp2, "Llama, tied, recomputed, offloaded", Llama(192, 3, true), "block",
       [](Plan& plan, const Model& model) {
         plan.recompute = RecomputeBlocks(model, RecomputeKind::kFull, 1, "test");
         plan.offload.parameters = true;
       }},
      {Dialect::kNative, "T5, accumulated", T5(), "block",
       [](Plan& plan, const Model&) {
         plan.accumulation = 2;
         plan.sync = SyncMode::kLast;
       }},
      {Dialect::kFsdp1, "ConvNet", LoadModel("mnist-convnet"), "size:100",
       [](Plan& plan, const Model&) { plan.micro_batch = 8; }},
  };
}

Training MakeTraining(const Case& c) {
  Training t;
  t.model = c.model;
  t.job.sequence_length = std::max<std::int64_t>(t.model.sequence_length, 1);
  t.job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  t.options = DefaultTrainingOptions(t.job);
  t.plan.dialect = c.dialect;
  t.plan.micro_batch = 2;
  (c.dialect == Dialect::kDdp ? t.plan.replicate_size : t.plan.shard_size) = 2;
  if (IsZero(c.dialect)) {  // the default bucket is 2 GB
    t.plan.zero.reduce_bucket = 200000;
  }
  t.plan.units = Wrap(t.model, ParseWrap(c.wrap, "test"), {}, c.dialect, "test");
  c.choose(t.plan, t.model);
  t.program = Lower({t.model, Kernels(), t.job, t.plan});
  REQUIRE(Verify(t.program).empty());
  return t;
}

// Bytes above the start-up baseline. What is live at one of three moments is live at the next.
struct Usage {
  std::int64_t placed = 0;       // both arenas, all ranks
  std::int64_t constructed = 0;  // live when the session stands
  std::int64_t after = 0;        // live after the steps
  std::int64_t large_after = 0;  // of which in blocks of kLargeBlock and more
  std::int64_t peak = 0;
  std::int64_t kept = 0;    // live when the session is gone
  std::int64_t mapped = 0;  // of which mapped by libraries

  [[nodiscard]] std::int64_t Remainder() const { return peak - placed; }
};

Usage RunOnce(const Training& t, const HostSession::KernelWrapper& wrapper) {
  const std::unique_ptr<Dataset> data = OpenDataset("random:64", t.model, 3);
  const Sampler sampler{data->size(), t.plan.shard_size * t.plan.replicate_size *
                                          t.plan.micro_batch * t.plan.accumulation};
  RunOptions run;
  run.inputs = [&](const BatchKey& key, std::span<const View> views) {
    WriteBatch(t.model, *data, sampler, {key.step, key.first_sample, key.count}, views);
  };
  const std::int64_t ranks = t.program.shard_size * t.program.replicate_size;
  Usage usage;
  const std::int64_t mapped_before = mapped_bytes;
  const std::int64_t baseline = live_bytes, large_baseline = live_large_bytes;
  peak_bytes = baseline;
  {
    const SessionInput input{t.model, Kernels(), t.job, t.program, t.options};
    HostSession session({&input, 1}, HostOptions(), run, wrapper);
    const Placement& placement = session.runtime().LargestInput().placement;
    usage.placed = ranks * (placement.device_size + placement.host_size).value;
    usage.constructed = live_bytes - baseline;
    session.runtime().Initialize();
    session.runtime().RunSteps(3);
    usage.after = live_bytes - baseline;
    usage.large_after = live_large_bytes - large_baseline;
    usage.peak = peak_bytes - baseline;
  }
  usage.kept = live_bytes - baseline;
  usage.mapped = mapped_bytes - mapped_before;
  return usage;
}

// Some steps of the rank that this process, or what passes for one, is. Bytes of its arenas.
std::int64_t RunRank(const Training& t, MessagePassing& processes) {
  const std::unique_ptr<Dataset> data = OpenDataset("random:64", t.model, 3);
  const Sampler sampler{data->size(), processes.size() * t.plan.micro_batch * t.plan.accumulation};
  HostOptions host;
  host.processes = &processes;
  RunOptions run;
  run.inputs = [&](const BatchKey& key, std::span<const View> views) {
    WriteBatch(t.model, *data, sampler, {key.step, key.first_sample, key.count}, views);
  };
  JoinRun(processes, run);
  const SessionInput input{t.model, Kernels(), t.job, t.program, t.options};
  HostSession session({&input, 1}, host, run);
  session.runtime().Initialize();
  session.runtime().RunSteps(3);
  const Placement& placement = session.runtime().LargestInput().placement;
  return (placement.device_size + placement.host_size).value;
}

// The ranks as processes are, but for what a process has once: each with a connection of its own.
Usage RunOverTcp(const Training& t) {
  const auto ranks = static_cast<int>(t.program.shard_size * t.program.replicate_size);
  Usage usage;
  // What libcrypto takes when it is first used, and keeps, is part of its start.
  (void)tcp::Session("a key", tcp::NewNonce(), tcp::NewNonce()).WorkerProof();
  const std::int64_t baseline = live_bytes;
  peak_bytes = baseline;
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  std::vector<std::jthread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Launch launch{.rank = r, .size = ranks, .address = "127.0.0.1", .key = "of this test"};
      launch.port = tcp::PortOf(listener);
      launch.listener = r == 0 ? ::dup(listener.fd()) : -1;
      const std::unique_ptr<MessagePassing> processes = MeetByTcp(launch, HostOptions().timeout);
      const std::int64_t placed = RunRank(t, *processes);
      FinishTogether(processes.get());
      if (r == 0) {
        usage.placed = ranks * placed;
      }
    });
  }
  threads.clear();
  usage.peak = peak_bytes - baseline;
  return usage;
}

// One rank of a run under mpirun; what MPI allocates when it starts is start-up.
Usage RunUnderMpi(const Training& t, MessagePassing& processes) {
  Usage usage;
  const std::int64_t baseline = live_bytes;
  peak_bytes = baseline;
  usage.placed = RunRank(t, processes);
  usage.peak = peak_bytes - baseline;
  return usage;
}

// The module that ctest names where it starts this program under mpirun; null: it did not.
MessagePassing* ProcessesOfMpi() {
  const char* const path = std::getenv("SHARDWRIGHT_MPI_MODULE");
  if (path == nullptr) {
    return nullptr;
  }
  void* module = ::dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  REQUIRE_MESSAGE(module != nullptr, ::dlerror());
  using Join = MessagePassing* (*)(std::chrono::milliseconds);
  return reinterpret_cast<Join>(::dlsym(module, "ShardwrightJoinProcesses"))(HostOptions().timeout);
}

// What a library maps once per process and keeps belongs to start-up: OpenBLAS maps a buffer when
// more threads than ever before multiply at the same time. A run that met this is repeated; what
// a run took each time would be there at the last one, too.
Usage Run(const Training& t, const HostSession::KernelWrapper& wrapper) {
  Usage usage = RunOnce(t, wrapper);
  for (int attempt = 0; attempt < 8 && usage.mapped > 0; ++attempt) {
    MESSAGE("a library mapped " << usage.mapped << " bytes and keeps them; once more");
    usage = RunOnce(t, wrapper);
  }
  CHECK(usage.mapped == 0);
  CHECK(usage.kept < 4 << 10);  // the runtime gives everything back
  return usage;
}

bool IsWithinTwoPercent(const Usage& usage) {
  return usage.Remainder() >= 0 && usage.Remainder() * 50 <= usage.placed;
}

std::string Text(const Usage& usage) {
  return std::to_string(usage.placed) + " bytes placed, remainder " +
         std::to_string(usage.Remainder()) + " (" +
         std::to_string(100.0 * static_cast<double>(usage.Remainder()) /
                        static_cast<double>(usage.placed)) +
         " %): bound program, names and reports " +
         std::to_string(usage.constructed - usage.placed) + ", kept by streams and steps " +
         std::to_string(usage.after - usage.constructed) + ", temporary " +
         std::to_string(usage.peak - usage.after) +
         "; blocks of 64 KiB and more: " + std::to_string(usage.large_after - usage.placed) +
         " beside the arenas";
}

// One MiB that no kernel declared, in one op of the program.
ModelKernel Greedy(const ModelKernel& kernel) {
  return [kernel](const ModelOpCall& call, bool is_backward) {
    std::vector<std::byte> scratch;
    const OpKind kind = call.spec->kind;
    if ((kind == OpKind::kCrossEntropy || kind == OpKind::kNllLoss) && !is_backward) {
      scratch.resize(std::size_t{1} << 20);
    }
    kernel(call, is_backward);
  };
}

}  // namespace

TEST_CASE("MemoryHook: counts what this program and its libraries allocate" *
          doctest::skip(!kHasHook)) {
  struct {
    std::int64_t start = 0, with_block = 0, without_block = 0, with_map = 0, without_map = 0;
  } at;
  // OpenBLAS may still start threads, which allocate: tried until nothing came between.
  for (int attempt = 0; attempt == 0 || (attempt < 20 && at.without_map != at.start); ++attempt) {
    at.start = live_bytes;
    auto block = std::make_unique<std::vector<double>>(100000);
    at.with_block = live_bytes;
    block.reset();
    at.without_block = live_bytes;
    void* mapped = mmap(nullptr, 1 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    at.with_map = live_bytes;
    munmap(mapped, 1 << 20);
    at.without_map = live_bytes;
  }
  CHECK(at.with_block - at.start >= 800000);
  CHECK(at.with_block - at.start < 800000 + (8 << 10));  // the C library rounds up to pages
  CHECK(at.without_block == at.start);
  CHECK(at.with_map - at.start == 1 << 20);
  CHECK(at.without_map == at.start);
}

TEST_CASE("MemoryHook: training takes what was placed and at most 2 % more" *
          doctest::skip(!kHasHook)) {
  for (const Case& c : Cases()) {
    CAPTURE(std::string(NameOf(c.dialect)));
    CAPTURE(c.name);
    const Training training = MakeTraining(c);
    const Usage usage = Run(training, {});
    MESSAGE(std::string(NameOf(c.dialect)) << ", " << c.name << ": " << Text(usage));
    CHECK(usage.placed > 20 << 20);
    CHECK(usage.placed < 50 << 20);  // 2 % of it are less than 1 MiB
    CHECK(IsWithinTwoPercent(usage));

    const Usage greedy = Run(training, Greedy);
    CHECK_FALSE(IsWithinTwoPercent(greedy));
    CHECK(greedy.Remainder() - usage.Remainder() > 900 << 10);

    // Frames that wait for a rank on a busy machine are no part of what a run takes: the least of
    // three.
    Usage processes = RunOverTcp(training);
    for (int attempt = 1; attempt < 3 && !IsWithinTwoPercent(processes); ++attempt) {
      processes = RunOverTcp(training);
    }
    MESSAGE("as processes: remainder " << processes.Remainder() << " of " << processes.placed);
    CHECK(IsWithinTwoPercent(processes));
  }
}

// Two processes, by ctest. What libraries take when they are first used and keep (OpenBLAS maps its
// buffers, MPI allocates those of its connections) is part of their start, so the second run
// counts; what a run took each time would be there, too.
TEST_CASE("MemoryHook: a rank under mpirun takes what was placed and at most 2 % more" *
          doctest::skip(!kHasHook || std::getenv("SHARDWRIGHT_MPI_MODULE") == nullptr)) {
  MessagePassing* const processes = ProcessesOfMpi();
  REQUIRE(processes->size() == 2);
  for (const Case& c : Cases()) {
    CAPTURE(std::string(NameOf(c.dialect)));
    CAPTURE(c.name);
    const Training training = MakeTraining(c);
    const Usage first = RunUnderMpi(training, *processes);
    const Usage usage = RunUnderMpi(training, *processes);
    MESSAGE(std::string(NameOf(c.dialect))
            << ", " << c.name << ", rank " << processes->rank() << ": " << usage.placed
            << " bytes placed, remainder " << first.Remainder() << " the first time, then "
            << usage.Remainder());
    CHECK(IsWithinTwoPercent(usage));
  }
  FinishTogether(processes);
}

}  // namespace shardwright::testing
