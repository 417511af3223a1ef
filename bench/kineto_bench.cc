// How fast traces of PyTorch's profiler are read, and in how much memory. The trace is generated:
// steps of an FSDP2 run on a GPU, as the profiler records them with shapes, stacks and memory. One
// iteration reads the whole file; bytes_per_second is CPU time and counts the bytes of the text,
// unpacked ones for gzip. peak_rss is the largest resident set of the process so far, so run one
// case at a time (--benchmark_filter) to read it.
//
//   build/bench/kineto_bench --benchmark_filter=Plain/1024   # 1 GiB, in $TMPDIR

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <benchmark/benchmark.h>
#include <sys/resource.h>
#include <unistd.h>

#include "traces/gzip.h"
#include "traces/kineto.h"

namespace shardwright {
namespace {

constexpr std::int64_t kLayers = 32;

// The events of layers, forward and backward, one after the other: per layer 64 host ops, 16 Python
// frames, 8 changes of memory, 16 kernels with their launches and arrows, and an all-gather or
// reduce-scatter.
class Generator {
 public:
  std::string NextLayer() {
    std::string text;
    const bool is_forward = layer_ % (2 * kLayers) < kLayers;
    if (layer_ % (2 * kLayers) == 0) {
      Event(text, "user_annotation", "ProfilerStep#" + std::to_string(++steps_), kStepTime,
            "\"External id\": 1");
    }
    const std::string unit =
        "layers." + std::to_string(is_forward ? layer_ % kLayers : kLayers - 1 - layer_ % kLayers);
    for (const char* name : {"FSDP::all_gather", "FSDP::pre_forward"}) {
      Event(text, "user_annotation",
            (is_forward ? name : "FSDP::post_backward") + (" (" + unit + ")"), 2,
            "\"External id\": 1");
    }
    for (int i = 0; i < 16; ++i) {
      AddOps(text);
      AddKernel(text);
    }
    AddCollective(text, is_forward);
    ++layer_;
    return text;
  }
  [[nodiscard]] std::int64_t steps() const { return steps_; }
  [[nodiscard]] std::int64_t events() const { return events_; }

 private:
  static constexpr std::int64_t kStepTime = 49'900;  // microseconds; steps begin 49,925 apart

  void AddOps(std::string& text) {
    Event(text, "python_function", "torch/nn/modules/linear.py(130): forward", 9,
          "\"Python id\": 81723, \"Python parent id\": 81722, \"Ev Idx\": 90211");
    for (int op = 0; op < 4; ++op) {
      Event(text, "cpu_op", "aten::linear", 3,
            "\"External id\": 12345, \"Record function id\": 0, \"Concrete Inputs\": [\"\", \"\", "
            "\"\"], \"Input type\": [\"c10::BFloat16\", \"c10::BFloat16\", \"\"], \"Input "
            "Strides\": [[4194304, 4096, 1], [4096, 1], []], \"Input Dims\": [[1, 4096, 4096], "
            "[14336, 4096], []], \"Ev Idx\": 777");
    }
    if (++changes_ % 2 == 0) {
      Event(text, "cpu_instant_event", "[memory]", -1,
            "\"Total Reserved\": 8589934592, \"Total Allocated\": " +
                std::to_string(changes_ % 1024 * 1048576) +
                ", \"Bytes\": 1048576, \"Addr\": 140078912, \"Device Id\": 0, \"Device Type\": 1, "
                "\"Ev Idx\": 778");
    }
  }
  void AddKernel(std::string& text) {
    const std::string number = std::to_string(++correlation_);
    Event(text, "cuda_runtime", "cudaLaunchKernel", 4,
          "\"External id\": 12345, \"cbid\": 211, \"correlation\": " + number);
    Event(text, "kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 90,
          "\"External id\": 12345, \"queued\": 0, \"device\": 0, \"context\": 1, \"stream\": 7, "
          "\"correlation\": " +
              number +
              ", \"registers per thread\": 168, \"shared memory\": 213504, \"blocks per SM\": "
              "3.878788, \"warps per SM\": 46.545456, \"grid\": [2, 256, 1], \"block\": [384, 1, "
              "1], \"est. achieved occupancy %\": 19");
    for (const char* end : {"s", "f"}) {
      Begin(text);
      text += std::string("  {\"ph\": \"") + end + "\", \"id\": " + number +
              ", \"pid\": 18484, \"tid\": 18484, \"ts\": " + std::to_string(time_) +
              ".123, \"cat\": \"ac2g\", \"name\": \"ac2g\"}";
    }
  }
  void AddCollective(std::string& text, bool is_gather) {
    const std::string number = std::to_string(++correlation_);
    Event(text, "cuda_runtime", "cudaLaunchKernelExC", 4, "\"correlation\": " + number);
    const std::string name = is_gather ? "AllGather" : "ReduceScatter";
    Event(
        text, "kernel", "ncclDevKernel_" + name + "_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 900,
        "\"device\": 0, \"stream\": 20, \"correlation\": " + number + ", \"Collective name\": \"" +
            (is_gather ? "_allgather_base" : "_reduce_scatter_base") +
            "\", \"In msg nelems\": 27262976, \"Out msg nelems\": 218103808, \"Group size\": 8, "
            "\"dtype\": \"BFloat16\", \"Process Group Name\": \"0\", \"Process Group "
            "Description\": \"default_pg\"");
  }
  void Begin(std::string& text) {
    time_ += 5;
    ++events_;
    text += (is_first_ ? "\n" : ",\n");
    is_first_ = false;
  }
  // A negative duration makes an instant.
  void Event(std::string& text, const std::string& category, const std::string& name,
             std::int64_t duration, const std::string& args) {
    Begin(text);
    text += "  {\n    \"ph\": \"";
    text += (duration < 0 ? 'i' : 'X');
    text += "\", \"cat\": \"" + category + "\", \"name\": \"" + name +
            "\", \"pid\": 18484, \"tid\": 18484,\n    \"ts\": " + std::to_string(time_) + ".123";
    text += duration < 0 ? ", \"s\": \"t\"" : ", \"dur\": " + std::to_string(duration) + ".456";
    text += ",\n    \"args\": {\n      " + args + "\n    }\n  }";
  }

  std::int64_t time_ = 4449914237498;
  std::int64_t layer_ = 0;
  std::int64_t correlation_ = 0;
  std::int64_t changes_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t events_ = 0;
  bool is_first_ = true;
};

// A file of about `mebibytes` (unpacked) that is gone at the end.
class GeneratedTrace {
 public:
  GeneratedTrace(std::int64_t mebibytes, bool compressed)
      : name_((std::filesystem::temp_directory_path() /
               ("shardwright_bench." + std::to_string(::getpid()) + ".json"))
                  .string()) {
    std::ofstream file(name_, std::ios::binary);
    TextSink sink(compressed);
    const auto write = [&](const std::string& text) {
      bytes_ += static_cast<std::int64_t>(text.size());
      compressed ? sink.Append(text) : void(file << text);
    };
    write(
        "{\"schemaVersion\": 1, \"distributedInfo\": {\"rank\": 0, \"world_size\": 8},\n"
        "\"traceEvents\": [");
    while (bytes_ < mebibytes << 20) {
      write(generator_.NextLayer());
    }
    write("]}");
    if (compressed) {
      file << sink.Finish();
    }
  }
  ~GeneratedTrace() { std::remove(name_.c_str()); }
  GeneratedTrace(const GeneratedTrace&) = delete;
  GeneratedTrace& operator=(const GeneratedTrace&) = delete;
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  [[nodiscard]] const Generator& generator() const { return generator_; }

 private:
  std::string name_;
  std::int64_t bytes_ = 0;
  Generator generator_;
};

void Read(benchmark::State& state, bool compressed) {
  const GeneratedTrace trace(state.range(0), compressed);
  std::int64_t events = 0;
  for (auto _ : state) {
    const ProfilerRecording recording = ReadKineto(trace.name());
    events = recording.events;
    if (events != trace.generator().events() ||
        std::ssize(recording.steps) != trace.generator().steps()) {
      state.SkipWithError("events or steps were lost");
    }
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * trace.bytes());
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  constexpr double kKibibyte = 1024;
  state.counters["events"] = static_cast<double>(events);
  state.counters["peak_rss"] =
      benchmark::Counter(static_cast<double>(usage.ru_maxrss) * kKibibyte,
                         benchmark::Counter::kDefaults, benchmark::Counter::OneK::kIs1024);
}

void ReadPlain(benchmark::State& state) {
  Read(state, false);
}
void ReadGzip(benchmark::State& state) {
  Read(state, true);
}
BENCHMARK(ReadPlain)
    ->Name("Plain")
    ->Arg(64)
    ->Arg(256)
    ->Arg(1024)
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime();
BENCHMARK(ReadGzip)
    ->Name("Gzip")
    ->Arg(64)
    ->Arg(1024)
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime();

}  // namespace
}  // namespace shardwright

BENCHMARK_MAIN();
