// Every reader of files that other programs wrote, but those of settings (tests/planner).

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <sqlite3.h>

#include "executor/checkpoint/safetensors.h"
#include "models/checkpoint_folder.h"
#include "models/loader.h"
#include "tests/traces/fuzz.h"
#include "topologies/import_topology.h"
#include "traces/flight_recorder.h"
#include "traces/gzip.h"
#include "traces/kineto.h"
#include "traces/measured_file.h"
#include "traces/memory_snapshot.h"
#include "traces/nccl_tests.h"
#include "traces/nsight.h"
#include "traces/timed_calls.h"

namespace shardwright {
namespace {

using testing::FuzzTarget;
using testing::OfFile;

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
         R"({"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":1,"dur":4,)"
         R"("args":{"Input Dims":[[8,16],[16,4]],"Input type":["float","c10::Half"],"Concrete Inputs":["",""]}},)"
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

// {"version", "pg_config", "entries": [{process_group, profiling_name, ...}]}
std::string FlightDumpPickle() {
  const auto text = [](const std::string& value) {
    return std::string("\x8c") + static_cast<char>(value.size()) + value;
  };
  const auto number = [](char value) { return std::string("K") + value; };
  const std::string sizes = "](](" + number(8) + number(2) + "ee";
  const std::string frame = "}(" + text("filename") + text("a.py") + text("line") + number(3) +
                            text("name") + text("f") + "u";
  const std::string entry = "}(" + text("process_group") + text("0") + text("default_pg") + "\x86" +
                            text("profiling_name") + text("nccl:all_gather") +
                            text("collective_seq_id") + number(1) + text("input_sizes") + sizes +
                            text("input_dtypes") + "](" + text("Float") + "e" +
                            text("output_sizes") + sizes + text("time_created_ns") + number(9) +
                            text("retired") + "\x88" + text("frames") + "](" + frame + "eu";
  return "\x80\x02}(" + text("version") + text("2.4") + text("pg_config") + "}(" + text("0") +
         "}(" + text("name") + text("0") + text("desc") + text("d") + text("ranks") +
         text("[0, 1]") + "uu" + text("entries") + "](" + entry + "e" + "u.";
}

const std::string kFlightJson =
    R"({"version":"2.10","pg_config":{"0":{"name":"0","desc":"default_pg","ranks":"[0, 1]"}},"entries":[)"
    R"({"process_group":["0","default_pg"],"profiling_name":"gloo:all_reduce","collective_seq_id":1,"input_sizes":[[4]],)"
    R"("input_dtypes":["Float"],"output_sizes":[[4]],"time_created_ns":1795687337424386670,"retired":true,"is_p2p":false}]})";

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

constexpr const char* kConfig =
    R"({"architectures":["MixtralForCausalLM"],"model_type":"mixtral","vocab_size":64,"hidden_size":16,)"
    R"("intermediate_size":32,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,)"
    R"("num_local_experts":4,"num_experts_per_tok":2,"max_position_embeddings":128,"rope_theta":1e6,)"
    R"("rope_scaling":null,"tie_word_embeddings":false,"hidden_act":"silu","rms_norm_eps":1e-05})";
constexpr const char* kModel =
    R"({"format":"shardwright-model","version":1,"class":"Net","block_class":"Block","sequence_length":8,)"
    R"("inputs":{"ids":{"ids":"sequence_length"}},"modules":[{"name":"embed","class":"Embedding",)"
    R"("params":[{"name":"weight","shape":[50,8]}]},{"name":"blocks","class":"ModuleList","modules":[)"
    R"({"repeat":3,"name":"{i}","class":"Block","modules":[{"name":"fc","class":"Linear","params":[)"
    R"({"name":"weight","shape":[8,8]}]}]}]},{"name":"head","class":"Linear","params":[{"name":"weight",)"
    R"("tied_to":"embed.weight"}]}],"ops":[{"op":"embedding","module":"embed","inputs":["ids"],)"
    R"("output":"x0"},{"repeat":3,"ops":[{"op":"linear","module":"blocks.{i}.fc","inputs":["x{i}"],)"
    R"("output":"y{i}"},{"op":"add","module":"blocks.{i}","inputs":["x{i}","y{i}"],"output":"x{i+1}"}]},)"
    R"({"op":"linear","module":"head","inputs":["x3"],"output":"z"}]})";
constexpr const char* kIndex =
    R"({"metadata":{"total_size":16},"weight_map":{"a.weight":"model-00001-of-00002.safetensors",)"
    R"("b.weight":"model-00002-of-00002.safetensors"}})";

// A file of two tensors.
std::string Safetensors() {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a.weight":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},)"
      R"("a.bias":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})";
  std::string text(8, '\0');
  text[0] = static_cast<char>(header.size());
  return text + header + std::string(16, 'x');
}

// Reads a checkpoint's folder in which the content is the file of this name.
std::function<void(const std::string&)> OfCheckpoint(const std::string& name) {
  return [name](const std::string& content) {
    const testing::TemporaryFile place("");
    const std::string folder = place.name() + ".folder";
    std::filesystem::create_directory(folder);
    const auto write = [&](const std::string& file, const std::string& text) {
      std::ofstream(folder + "/" + file, std::ios::binary) << text;
    };
    write("model-00001-of-00002.safetensors", Safetensors());
    write(name, content);
    try {
      (void)ReadCheckpoint(folder);
    } catch (const InputError&) {
      std::filesystem::remove_all(folder);
      throw;
    }
    std::filesystem::remove_all(folder);
  };
}

void ImportText(const std::string& text) {
  TopologyOptions options;
  options.gpu = "h100-80";
  options.nic = BytesPerSecond(50e9);
  (void)ImportTopology(text, "fuzz", options);
}

std::vector<FuzzTarget> Targets() {
  TextSink sink(true);
  sink.Append(KinetoTrace());
  const auto test = [](const std::string& file) { return ReadCollectiveTest(file, "all_gather"); };
  return {
      {"kineto", KinetoTrace(), OfFile(ReadKineto)},
      {"kineto, gzip", sink.Finish(), OfFile(ReadKineto)},
      {"kernels of kineto", KinetoTrace(), OfFile(ReadTimedCalls)},
      {"snapshot", Snapshot(), OfFile(ReadMemorySnapshot)},
      {"flight recorder", FlightDumpPickle(), OfFile(ReadFlightDump)},
      {"flight recorder, JSON", kFlightJson, OfFile(ReadFlightDump)},
      {"nsight", NsightExport(), OfFile(ReadNsight)},
      {"nccl-tests", kNccl, OfFile(test)},
      {"nccl-tests, JSON", kNcclJson, OfFile(test)},
      {"any measured file", KinetoTrace(), OfFile(DetectMeasured)},
      {"topo -m", kMatrix, ImportText},
      {"NCCL XML", kNcclXml, ImportText},
      {"hwloc XML", kHwlocXml, ImportText},
      {"config.json", kConfig,
       OfFile([](const std::string& file) { return LoadModel(file); }, ".json")},
      {"model.json", kModel,
       OfFile([](const std::string& file) { return LoadModel(file); }, ".json")},
      {"safetensors", Safetensors(), OfCheckpoint("model.safetensors")},
      {"safetensors index", kIndex, OfCheckpoint("model.safetensors.index.json")},
      {"safetensors to load", Safetensors(), OfFile(ReadSafetensorsHeader)},
  };
}

}  // namespace
}  // namespace shardwright

int main(int argc, char** argv) {
  return shardwright::testing::FuzzAll(shardwright::Targets(), argc, argv);
}
