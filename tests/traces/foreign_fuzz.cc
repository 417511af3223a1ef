// Damages files of other programs and feeds them to their readers: each must be read or refused by
// an InputError. Prints what it did; a crash, a hang or another exception is the failure.
//
//   sw_foreign_fuzz_test            a few hundred files per reader, always the same ones
//   sw_foreign_fuzz_test SECONDS    as many as fit in this time, per reader (scripts/deep.sh)

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sqlite3.h>

#include "core/error.h"
#include "tests/traces/temporary_file.h"
#include "topologies/import_topology.h"
#include "traces/gzip.h"
#include "traces/kineto.h"
#include "traces/measured_file.h"
#include "traces/memory_snapshot.h"
#include "traces/nccl_tests.h"
#include "traces/nsight.h"

namespace shardwright {
namespace {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::size_t Draw(std::size_t n) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::size_t>(state_ >> 33) % n;
  }

 private:
  std::uint64_t state_;
};

// One to four edits: a byte replaced, a piece cut or doubled, the rest cut off, a number made huge.
std::string Damage(std::string text, Random& random) {
  for (std::size_t edit = 0; edit <= random.Draw(4) && !text.empty(); ++edit) {
    const std::size_t at = random.Draw(text.size());
    const std::size_t length = 1 + random.Draw(40);
    switch (random.Draw(5)) {
      case 0:
        text[at] = static_cast<char>(random.Draw(256));
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(random.Draw(text.size()), text.substr(at, length));
        break;
      case 3:
        text.resize(random.Draw(8) == 0 ? at : text.size());
        break;
      default: {
        const std::size_t digit = text.find_first_of("0123456789", at);
        text.insert(digit == std::string::npos ? at : digit, "99999999999");
        break;
      }
    }
  }
  return text;
}

std::string KinetoTrace() {
  return R"({"schemaVersion":1,"distributedInfo":{"rank":0,"world_size":2},"traceEvents":[)"
         R"({"ph":"X","cat":"user_annotation","name":"ProfilerStep#1","pid":1,"tid":1,"ts":0,"dur":90},)"
         R"x({"ph":"X","cat":"user_annotation","name":"FSDP::pre_forward (a.b)","pid":1,"tid":1,"ts":1.5,"dur":3},)x"
         R"x({"ph":"X","cat":"user_annotation","name":"FSDP::post_backward_reduce (a.b)","pid":1,"tid":2,"ts":60,"dur":3},)x"
         R"({"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":1,"tid":1,"ts":2,"dur":1,"args":{"correlation":7}},)"
         R"({"ph":"X","cat":"kernel","name":"gemm","pid":0,"tid":7,"ts":10.125,"dur":5,"args":{"device":0,"stream":7,"correlation":7}},)"
         R"({"ph":"X","cat":"kernel","name":"ncclDevKernel_AllGather","pid":0,"tid":9,"ts":12,"dur":5,"args":{"device":0,"stream":9,)"
         R"("correlation":8,"Collective name":"_allgather_base","In msg nelems":64,"Out msg nelems":128,"Group size":2,"dtype":"Float"}},)"
         R"({"ph":"X","cat":"cpu_op","name":"c10d::_allgather_base_","pid":1,"tid":1,"ts":3,"dur":1,"args":{"Input Dims":[[8,2],[4],[]],"Input type":["float",""]}},)"
         R"({"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":5,"dur":1},)"
         R"({"ph":"i","cat":"cpu_instant_event","name":"[memory]","pid":1,"tid":1,"ts":5,"args":{"Total Allocated":512,"Total Reserved":1024,"Device Type":1}}]})";
}

// {"segments": [{device, total_size, blocks: [{size, state}]}], "device_traces": [[{action, addr,
// size}]]}
std::string Snapshot() {
  const auto text = [](const std::string& value) {
    return std::string("\x8c") + static_cast<char>(value.size()) + value;
  };
  const auto number = [](char value) { return std::string("K") + value; };
  const std::string block =
      "}(" + text("size") + number(9) + text("state") + text("active_allocated") + "u";
  const std::string segment = "}(" + text("device") + number(0) + text("total_size") + number(90) +
                              text("blocks") + "](" + block + "eu";
  const std::string frame = "}(" + text("filename") + text("a.py") + text("line") + number(3) +
                            text("name") + text("f") + "u";
  const std::string event = "}(" + text("action") + text("alloc") + text("addr") + number(5) +
                            text("size") + number(9) + text("frames") + "](" + frame + "eu";
  return "\x80\x04}(" + text("segments") + "](" + segment + "e" + text("device_traces") + "](](" +
         event + "ee" + "u.";
}

std::string NsightExport() {
  sqlite3* database = nullptr;
  sqlite3_open(":memory:", &database);
  sqlite3_exec(
      database,
      "CREATE TABLE StringIds (id INTEGER, value TEXT);"
      "INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'ncclDevKernel_AllGather');"
      "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId "
      "INTEGER, streamId INTEGER, correlationId INTEGER, shortName INTEGER);"
      "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0, 7, 1, 1), (2, 5, 0, 9, 2, 2);"
      "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, globalTid "
      "INTEGER, text TEXT, textId INTEGER);"
      "INSERT INTO NVTX_EVENTS VALUES (0, 9, 59, 1, 'ProfilerStep#1', NULL);",
      nullptr, nullptr, nullptr);
  sqlite3_int64 size = 0;
  unsigned char* bytes = sqlite3_serialize(database, "main", &size, 0);
  std::string file(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(size));
  sqlite3_free(bytes);
  sqlite3_close(database);
  return file;
}

constexpr const char* kNccl = R"(# Collective test starting: all_gather_perf
#  Rank  0 Group  0 Pid   1 on  n1 device  0 [0x1] H100
#       size         count      type   redop    root     time   algbw   busbw  #wrong
    67108864       2097152     float    none      -1   412.30  162.77  142.42       0
)";
constexpr const char* kNcclJson =
    R"({"config":{"t":"all_gather_perf"},"devices":[{}],"results":[{"size":64,"type":"half",)"
    R"("out_of_place":{"time":3.5}}]})";
constexpr const char* kMatrix =
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV18\tPIX\t0-55\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t56-111\t1\n"
    "NIC0\tPIX\tSYS\t X \n\nLegend:\n  X = Self\n";
constexpr const char* kNcclXml =
    R"(<system version="1"><cpu vendor="GenuineIntel"><pci busid="a" link_speed="32.0 GT/s PCIe" link_width="16">)"
    R"(<pci busid="b" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90"><nvlink target="c" count="18" tclass="0x068000"/>)"
    R"(</gpu></pci><pci busid="d"><nic><net name="mlx5_0" speed="400000"/></nic></pci></pci></cpu></system>)";
constexpr const char* kHwlocXml =
    R"(<topology version="2.0"><object type="Machine"><object type="Package"><object type="NUMANode" local_memory="1024"/>)"
    R"(<object type="Bridge" pci_link_speed="31.5"><object type="PCIDev" pci_type="0302 [10de:20b2] a1" pci_link_speed="31.5"/>)"
    R"(<object type="PCIDev" pci_type="0207 [15b3:101b]"><object type="OSDev" osdev_type="3"/></object></object></object></object></topology>)";

struct Target {
  std::string name;
  std::string good;
  std::function<void(const std::string& content)> read;
};

// A reader of files.
template <class Read>
std::function<void(const std::string&)> OfFile(Read read) {
  return [read](const std::string& content) {
    const testing::TemporaryFile file(content);
    (void)read(file.name());
  };
}

void ImportText(const std::string& text) {
  TopologyOptions options;
  options.gpu = "h100-80";
  options.nic = BytesPerSecond(50e9);
  (void)ImportTopology(text, "fuzz", options);
}

std::vector<Target> Targets() {
  TextSink sink(true);
  sink.Append(KinetoTrace());
  const auto test = [](const std::string& file) { return ReadCollectiveTest(file, "all_gather"); };
  return {
      {"kineto", KinetoTrace(), OfFile(ReadKineto)},
      {"kineto, gzip", sink.Finish(), OfFile(ReadKineto)},
      {"snapshot", Snapshot(), OfFile(ReadMemorySnapshot)},
      {"nsight", NsightExport(), OfFile(ReadNsight)},
      {"nccl-tests", kNccl, OfFile(test)},
      {"nccl-tests, JSON", kNcclJson, OfFile(test)},
      {"any measured file", KinetoTrace(), OfFile(DetectMeasured)},
      {"topo -m", kMatrix, ImportText},
      {"NCCL XML", kNcclXml, ImportText},
      {"hwloc XML", kHwlocXml, ImportText},
  };
}

// Returns false when even the undamaged file is refused: then nothing was tested.
bool Run(const Target& target, std::optional<double> seconds) {
  constexpr int kRounds = 300;
  const auto begin = std::chrono::steady_clock::now();
  const auto goes_on = [&](int round) {
    const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin;
    return seconds ? gone.count() < *seconds : round < kRounds;
  };
  try {
    target.read(target.good);
  } catch (const InputError& error) {
    std::printf("%s: the undamaged file is refused: %s\n", target.name.c_str(), error.what());
    return false;
  }
  Random random(20261122);
  int read = 0, refused = 0;
  for (int round = 0; goes_on(round); ++round) {
    const std::string content = Damage(target.good, random);
    try {
      target.read(content);
      ++read;
    } catch (const InputError&) {
      ++refused;
    }
  }
  std::printf("%s: %d read, %d refused\n", target.name.c_str(), read, refused);
  return true;
}

}  // namespace
}  // namespace shardwright

int main(int argc, char** argv) {
  std::optional<double> seconds;
  if (argc > 1) {
    seconds = std::atof(argv[1]);
  }
  bool is_good = true;
  for (const shardwright::Target& target : shardwright::Targets()) {
    is_good = shardwright::Run(target, seconds) && is_good;
  }
  return is_good ? 0 : 1;
}
