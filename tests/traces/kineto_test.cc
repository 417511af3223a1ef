// Small traces made by hand, one per rule of docs/import.md; expected values are read off the
// events.

#include "traces/kineto.h"

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "tests/traces/kineto_lines.h"
#include "tests/traces/temporary_file.h"
#include "traces/gzip.h"
#include "traces/measured_file.h"

namespace shardwright {
namespace {

using testing::KinetoLines;
using testing::TemporaryFile;

ProfilerRecording Read(const std::string& text) {
  const TemporaryFile file(text, ".json");
  return ReadKineto(file.name());
}

// The activity of this name; the first of several.
const Activity& Find(const ProfilerRecording& recording, const std::string& name) {
  for (const Activity& activity : recording.activities) {
    if (recording.names[activity.name] == name) {
      return activity;
    }
  }
  FAIL("no activity " << name);
  return recording.activities.front();
}

std::string UnitOf(const ProfilerRecording& recording, const Activity& activity) {
  return activity.unit == kNoSubject ? "none" : recording.units[activity.unit];
}

constexpr SimTime Microseconds(double us) {
  return SimTime(static_cast<std::int64_t>(us * 1e6));
}

std::string ErrorOf(const std::string& text) {
  const TemporaryFile file(text, ".json");
  try {
    (void)ReadKineto(file.name());
  } catch (const InputError& error) {
    std::string what = error.what();
    REQUIRE(what.starts_with(file.name()));
    return what.substr(file.name().size());
  }
  return "read";
}

TEST_CASE("kernels, launches and the clock") {
  // Times since 1970 in microseconds, whose nanoseconds doubles do not hold.
  const ProfilerRecording recording = Read(
      R"({"schemaVersion":1,"traceEvents":[)"
      R"({"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":9,"tid":9,"ts":1717000000000000.001,"dur":3.002,"args":{"correlation":7}},)"
      R"({"ph":"X","cat":"kernel","name":"ampere_bf16_s16816gemm","pid":0,"tid":7,"ts":1717000000000010.123,"dur":0.001,"args":{"device":0,"stream":7,"correlation":7}},)"
      R"({"ph":"X","cat":"Trace","name":"PyTorch Profiler","pid":"Traces","tid":"x","ts":1717000000000000.000,"dur":99},)"
      R"({"ph":"i","cat":"other","name":"Record Window End","pid":"","tid":"","ts":1717000000000099},)"
      R"({"ph":"M","name":"process_name","pid":0,"tid":0,"ts":0,"args":{"name":"python","labels":["a",{"b":[1,2]}]}}]})");
  REQUIRE(recording.activities.size() == 1);
  const Activity& kernel = recording.activities.front();
  CHECK(kernel.issue_begin == SimTime(0));
  CHECK(kernel.issue_end == SimTime(3'002'000));
  CHECK(kernel.start == SimTime(10'122'000));
  CHECK(kernel.end == SimTime(10'123'000));
  CHECK(kernel.kernel == KernelClass::kGemm);
  CHECK(recording.on_device);
  CHECK(recording.events == 5);
}

TEST_CASE("collectives: arguments first, names second") {
  KinetoLines events;
  // A name that says nothing, and one that lies.
  events.Kernel("ncclDevKernel_Generic_4", 0, 10, 20,
                R"("Collective name":"_allgather_base","In msg nelems":100,"Out msg nelems":800,)"
                R"("Group size":8,"dtype":"BFloat16","Process Group Name":"0")");
  events.Kernel("ncclDevKernel_AllGather_RING_LL", 1, 30, 20,
                R"("Collective name":"_reduce_scatter_base","In msg nelems":800,)"
                R"("Out msg nelems":100,"Group size":4,"dtype":"Float")");
  events.Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 2, 50, 20);
  events.Kernel("ncclKernel_SendRecv", 3, 70, 20, R"("Collective name":"alltoallv")");
  events.Kernel("my_nccl_like_kernel", 4, 90, 7);
  const ProfilerRecording recording = Read(events.Text());
  CHECK(recording.rank == 3);
  CHECK(recording.ranks == 8);
  const Activity& gather = Find(recording, "ncclDevKernel_Generic_4");
  CHECK(gather.kind == ActivityKind::kCollective);
  CHECK(gather.collective == OpCode::kAllGather);
  CHECK(gather.bytes == Bytes(1600));
  CHECK(gather.group_size == 8);
  const Activity& scatter = Find(recording, "ncclDevKernel_AllGather_RING_LL");
  CHECK(scatter.collective == OpCode::kReduceScatter);
  CHECK(scatter.bytes == Bytes(3200));
  CHECK(scatter.group_size == 4);
  const Activity& reduce = Find(recording, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)");
  CHECK(reduce.collective == OpCode::kAllReduce);
  CHECK(reduce.bytes == Bytes(0));
  CHECK(Find(recording, "ncclKernel_SendRecv").collective == OpCode::kAllToAll);
  CHECK(Find(recording, "my_nccl_like_kernel").kind == ActivityKind::kKernel);
}

TEST_CASE("kernels of communication libraries are never compute") {
  for (const char* name : {"ncclDevKernel_SendRecv", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t",
                           "ncclDevKernel_Generic", "ncclDevKernel_Generic_1", "nvshmem_put_kernel",
                           "nvshmemi_transfer_rma", "mscclKernel_Sum_half_LL_false"}) {
    CAPTURE(std::string(name));
    for (const char* arguments :
         {"", R"("Collective name":"send")", R"("Collective name":"recv")"}) {
      KinetoLines events;
      events.Kernel(name, 0, 10, 20, arguments);
      const ProfilerRecording recording = Read(events.Text());
      CHECK(Find(recording, name).kind == ActivityKind::kCollective);
      CHECK(Find(recording, name).collective == OpCode::kAllToAll);
    }
  }
}

TEST_CASE("copies between host and device, and inside it") {
  KinetoLines events;
  const std::string where = R"("device":0,"stream":5,"bytes":4096)";
  events.Slice("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 5, where);
  events.Slice("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 10, 5, where);
  events.Slice("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 20, 5, where);
  events.Slice("gpu_memset", "Memset (Device)", 30, 5, where);
  events.Kernel("void at::native::split_with_sizes_copy_out_contiguous", 31, 40, 5);
  events.Slice("cuda_sync", "Stream Sync", 50, 5, R"("stream":5)");
  const ProfilerRecording recording = Read(events.Text());
  REQUIRE(recording.activities.size() == 5);
  CHECK(recording.activities[0].kind == ActivityKind::kToDevice);
  CHECK(recording.activities[0].bytes == Bytes(4096));
  CHECK(recording.activities[1].kind == ActivityKind::kToHost);
  for (const std::size_t i : {2, 3, 4}) {
    CHECK(recording.activities[i].kind == ActivityKind::kWithinDevice);
  }
}

// One micro-batch as FSDP2 marks it, from time `t` on; backward is on another thread.
void AddMicroBatch(KinetoLines& events, const std::string& mb, double t) {
  events.Range("FSDP::root_pre_forward", t, t + 1);
  events.Range("FSDP::pre_forward", t + 2, t + 8);
  events.Range("FSDP::all_gather", t + 3, t + 7);
  events.Kernel("ncclDevKernel_AllGather root f" + mb, t + 4, t + 5, 20);
  events.Kernel("gemm embed " + mb, t + 9, t + 9, 7);
  events.Range("FSDP::pre_forward (layers.0)", t + 20, t + 28);
  events.Range("FSDP::forward_prefetch for layers.1", t + 21, t + 27);
  events.Range("FSDP::all_gather (layers.1)", t + 22, t + 26);
  events.Kernel("ncclDevKernel_AllGather ahead " + mb, t + 23, t + 24, 20);
  events.Kernel("gemm layer0 " + mb, t + 30, t + 31, 7);
  events.Range("FSDP::post_forward (layers.0)", t + 40, t + 41);
  events.Kernel("gemm head " + mb, t + 45, t + 46, 7);
  events.Range("FSDP::post_forward", t + 50, t + 51);
  events.Kernel("softmax loss " + mb, t + 55, t + 56, 7);
  // Backward: on another thread.
  events.Range("FSDP::pre_backward", t + 60, t + 61, 2);
  events.Kernel("gemm head bwd " + mb, t + 63, t + 64, 7);
  events.Range("FSDP::pre_backward (layers.0)", t + 70, t + 71, 2);
  events.Range("FSDP::pre_forward (layers.0)", t + 72, t + 73, 2);  // recomputation
  events.Kernel("gemm again " + mb, t + 74, t + 75, 7);
  events.Range("FSDP::post_forward (layers.0)", t + 76, t + 77, 2);
  events.Range("FSDP::pre_backward (layers.0)", t + 78, t + 79, 2);
  events.Kernel("gemm layer0 bwd " + mb, t + 80, t + 81, 7);
  events.Range("FSDP::post_backward_accumulate (layers.0)", t + 85, t + 86, 2);
  events.Range("FSDP::post_backward_reduce (layers.0)", t + 87, t + 90, 2);
  events.Kernel("ncclDevKernel_ReduceScatter " + mb, t + 88, t + 89, 20);
  events.Kernel("embedding bwd " + mb, t + 92, t + 93, 7);
  events.Range("FSDP::root_post_backward_callback", t + 95, t + 99);
  events.Range("FSDP::post_backward_reduce", t + 96, t + 98);
  events.Kernel("ncclDevKernel_ReduceScatter root " + mb, t + 97, t + 98, 20);
}

TEST_CASE("FSDP2's ranges tell unit, phase and micro-batch") {
  KinetoLines events;
  events.Range("ProfilerStep#5", 0, 1000);
  double t = 10;
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    AddMicroBatch(events, std::to_string(micro_batch), t);
    t += 100;
  }
  events.Kernel("vectorized norm for clipping", t, t + 1, 7);
  events.Range("Optimizer.step#AdamW.step", t + 10, t + 20);
  events.Kernel("multi_tensor_apply_kernel", t + 15, t + 16, 7);
  const ProfilerRecording recording = Read(events.Text());
  struct Expected {
    std::string name, unit;
    Phase phase;
  };
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    const std::string mb = std::to_string(micro_batch);
    for (const Expected& expected : {
             Expected{"ncclDevKernel_AllGather root f", "", Phase::kForward},
             Expected{"gemm embed ", "", Phase::kForward},
             Expected{"ncclDevKernel_AllGather ahead ", "layers.1", Phase::kForward},
             Expected{"gemm layer0 ", "layers.0", Phase::kForward},
             Expected{"gemm head ", "", Phase::kForward},
             Expected{"softmax loss ", "", Phase::kForward},
             Expected{"gemm head bwd ", "", Phase::kBackward},
             Expected{"gemm again ", "layers.0", Phase::kBackward},
             Expected{"gemm layer0 bwd ", "layers.0", Phase::kBackward},
             Expected{"ncclDevKernel_ReduceScatter ", "layers.0", Phase::kBackward},
             Expected{"embedding bwd ", "", Phase::kBackward},
             Expected{"ncclDevKernel_ReduceScatter root ", "", Phase::kBackward},
         }) {
      const Activity& activity = Find(recording, expected.name + mb);
      CAPTURE(expected.name);
      CHECK(UnitOf(recording, activity) == expected.unit);
      CHECK(activity.phase == expected.phase);
      CHECK(activity.micro_batch == micro_batch);
      CHECK(activity.step == 0);
    }
  }
  CHECK(recording.has_units);
  CHECK(Find(recording, "vectorized norm for clipping").phase == Phase::kOptimizer);
  const Activity& update = Find(recording, "multi_tensor_apply_kernel");
  CHECK(update.phase == Phase::kOptimizer);
  CHECK(update.kernel == KernelClass::kOptimizer);
  REQUIRE(recording.steps.size() == 1);
  CHECK(recording.steps[0].name == "ProfilerStep#5");
}

TEST_CASE("without FSDP's ranges autograd tells backward, and backward the micro-batch") {
  KinetoLines events;
  events.Range("ProfilerStep#1", 0, 500);
  double t = 10;
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    const std::string mb = std::to_string(micro_batch);
    events.Kernel("fwd " + mb, t, t + 1, 7);
    events.Slice("cpu_op", "autograd::engine::evaluate_function: MmBackward0", t + 20, 20, "", 2);
    events.Kernel("bwd " + mb, t + 25, t + 26, 7);
    t += 100;
  }
  events.Kernel("clip", t, t + 1, 7);
  events.Range("Optimizer.step#SGD.step", t + 10, t + 30);
  events.Kernel("update", t + 15, t + 16, 7);
  const ProfilerRecording recording = Read(events.Text());
  CHECK_FALSE(recording.has_units);
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    const std::string mb = std::to_string(micro_batch);
    CHECK(Find(recording, "fwd " + mb).phase == Phase::kForward);
    CHECK(Find(recording, "fwd " + mb).micro_batch == micro_batch);
    CHECK(Find(recording, "bwd " + mb).phase == Phase::kBackward);
    CHECK(Find(recording, "bwd " + mb).micro_batch == micro_batch);
  }
  CHECK(Find(recording, "clip").phase == Phase::kOptimizer);
  CHECK(Find(recording, "update").phase == Phase::kOptimizer);
}

TEST_CASE("steps: ProfilerStep, else Optimizer.step, else one") {
  KinetoLines marked;
  marked.Range("ProfilerStep#1", 100, 200).Range("ProfilerStep#2", 200, 300);
  marked.Kernel("before", 50, 60, 7).Kernel("first", 100, 110, 7).Kernel("late", 190, 210, 7);
  marked.Kernel("second", 250, 260, 7).Kernel("after", 350, 360, 7);
  const ProfilerRecording by_profiler = Read(marked.Text());
  CHECK(by_profiler.steps.size() == 2);
  CHECK(by_profiler.activities.size() == 3);  // two are outside of all steps
  CHECK(Find(by_profiler, "first").step == 0);
  CHECK(Find(by_profiler, "late").step == 0);  // it ran in the next one, and was launched before
  CHECK(Find(by_profiler, "second").step == 1);

  KinetoLines updated;
  updated.Kernel("a", 10, 11, 7).Range("Optimizer.step#Adam.step", 20, 30);
  updated.Kernel("b", 40, 41, 7).Range("Optimizer.step#Adam.step", 50, 60);
  const ProfilerRecording by_update = Read(updated.Text());
  CHECK(by_update.steps.size() == 2);
  CHECK(Find(by_update, "b").step == 1);

  CHECK(Read(KinetoLines().Kernel("alone", 1, 2, 7).Text()).steps.size() == 1);
}

TEST_CASE("memory events: of the device where there is one") {
  const auto sample = [](double time, int type, int allocated, int reserved) {
    return R"({"ph":"i","cat":"cpu_instant_event","s":"t","name":"[memory]","pid":1,"tid":1,"ts":)" +
           std::to_string(time) + R"(,"args":{"Addr":1,"Bytes":512,"Total Allocated":)" +
           std::to_string(allocated) + R"(,"Total Reserved":)" + std::to_string(reserved) +
           R"(,"Device Type":)" + std::to_string(type) + R"(,"Device Id":0}})";
  };
  KinetoLines events;
  events.Kernel("gemm", 1, 2, 7);
  events.Line(sample(6, 1, 700, 2048)).Line(sample(5, 1, 512, 1024)).Line(sample(4, 0, 9999, 0));
  const ProfilerRecording recording = Read(events.Text());
  REQUIRE(recording.memory.size() == 2);
  CHECK(recording.memory[0].allocated == Bytes(512));
  CHECK(recording.memory[1].allocated == Bytes(700));
  CHECK(recording.memory[1].reserved == Bytes(2048));
  CHECK(recording.memory[1].time == Microseconds(5));

  const ProfilerRecording on_host =
      Read(KinetoLines().Slice("cpu_op", "aten::mm", 1, 2).Line(sample(4, 0, 9999, 0)).Text());
  REQUIRE(on_host.memory.size() == 1);
  CHECK(on_host.memory[0].allocated == Bytes(9999));
}

TEST_CASE("the host's ops are the work where there is no device") {
  KinetoLines events;
  events.Range("ProfilerStep#0", 0, 1000);
  events.Slice("cpu_op", "aten::linear", 10, 20).Slice("cpu_op", "aten::addmm", 12, 10);
  events.Slice("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 40, 30);
  events.Slice("cpu_op", "AddmmBackward0", 41, 28).Slice("cpu_op", "aten::mm", 45, 10);
  const std::string dims =
      R"("Input Dims":[[1600],[800],[],[]],"Input type":["float","float","",""])";
  events.Slice("cpu_op", "c10d::_reduce_scatter_base_", 80, 5, dims);
  events.Slice("cpu_op", "c10d::_allgather_base_", 90, 5, dims);
  events.Slice("cpu_op", "c10d::_reduce_scatter_base_", 95, 4, dims);
  // gloo's threads; their own ops are part of the collective.
  events.Slice("user_annotation", "gloo:all_reduce", 100, 50, "", 3);
  events.Slice("cpu_op", "aten::copy_", 110, 10, "", 3);
  events.Slice("user_annotation", "gloo:all_gather", 120, 60, "", 4);
  events.Slice("user_annotation", "gloo:all_reduce", 160, 30, "", 3);
  const ProfilerRecording recording = Read(events.Text());
  CHECK_FALSE(recording.on_device);
  REQUIRE(recording.activities.size() == 5);
  const Activity& linear = Find(recording, "aten::linear");
  CHECK(linear.kernel == KernelClass::kGemm);
  CHECK(linear.end - linear.start == Microseconds(20));
  CHECK(Find(recording, "aten::mm").phase == Phase::kBackward);
  const Activity& scatter = Find(recording, "c10d::_reduce_scatter_base_");
  CHECK(scatter.kind == ActivityKind::kCollective);
  CHECK(scatter.collective == OpCode::kReduceScatter);
  CHECK(scatter.bytes == Bytes(6400));
  CHECK(scatter.issue_begin == Microseconds(80));
  CHECK(scatter.start == Microseconds(100));
  CHECK(scatter.end == Microseconds(150));
  const Activity& gather = Find(recording, "c10d::_allgather_base_");
  CHECK(gather.start == Microseconds(120));
  CHECK(recording.activities.back().start == Microseconds(160));
}

TEST_CASE("products and attention are told by the host's calls, with their sizes") {
  KinetoLines events;
  events.Range("ProfilerStep#0", 0, 1000).Range("ProfilerStep#1", 1000, 2000);
  const auto dims = [](const std::string& text) { return "\"Input Dims\":" + text; };
  events.Slice("cpu_op", "aten::linear", 10, 20, dims("[[2,8,16],[32,16],[]]"));
  events.Slice("cpu_op", "aten::addmm", 12, 10, dims("[[32],[16,64],[64,32],[],[]]"));
  events.Slice("cpu_op", "aten::bmm", 40, 5, dims("[[4,8,16],[4,16,24]]"));
  events.Slice("cpu_op", "aten::mm", 50, 5);  // record_shapes=False
  events.Slice("cpu_op", "aten::_scaled_dot_product_flash_attention", 60, 9,
               dims("[[2,4,128,64],[2,2,128,64],[2,2,128,64],[],[],[],[]]"));
  events.Slice("cpu_op", "aten::_flash_attention_forward", 62, 5, dims("[[2,128,4,64]]"));
  events.Slice("cpu_op", "aten::_scaled_dot_product_flash_attention_backward", 1010, 9,
               dims("[[2,4,128,64],[2,4,128,64]]"));
  events.Slice("cpu_op", "aten::_scaled_dot_product_attention_math", 1015, 4,
               dims("[[2,4,128,64],[2,4,128,64],[2,4,128,64],[],[],[],[],[],[]]"));
  events.Slice("cpu_op", "aten::bmm", 1016, 2, dims("[[8,128,64],[8,64,128]]"));
  events.Slice("cpu_op", "aten::convolution_backward", 1020, 9, dims("[[2,4,8,8],[4,4,3,3]]"));
  events.Slice("cpu_op", "aten::mm", 2500, 5, dims("[[2,4],[4,8]]"));  // outside of steps
  const ProfilerRecording recording = Read(events.Text());
  struct Expected {
    CallKind kind;
    std::uint32_t step;
    std::int64_t batch, m, n, k;
  };
  const std::vector<Expected> expected = {
      {CallKind::kProduct, 0, 1, 16, 32, 64},
      {CallKind::kProduct, 0, 4, 8, 24, 16},
      {CallKind::kProduct, 0, 0, 0, 0, 0},
      {CallKind::kAttentionForward, 0, 8, 128, 0, 64},
      {CallKind::kAttentionBackward, 1, 8, 128, 0, 64},
      {CallKind::kAttentionWrittenOut, 1, 8, 128, 0, 64},
      {CallKind::kProduct, 1, 8, 128, 128, 64},
      {CallKind::kConvolution, 1, 0, 0, 0, 0},
  };
  REQUIRE(recording.calls.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    const HostCall& call = recording.calls[i];
    CHECK(call.kind == expected[i].kind);
    CHECK(call.step == expected[i].step);
    CHECK(call.batch == expected[i].batch);
    CHECK(call.m == expected[i].m);
    CHECK(call.n == expected[i].n);
    CHECK(call.k == expected[i].k);
  }
}

TEST_CASE("a collective of a list of tensors has their elements") {
  KinetoLines events;
  events.Range("ProfilerStep#0", 0, 1000);
  events.Slice("cpu_op", "aten::mm", 10, 5);
  events.Slice("cpu_op", "c10d::allreduce_", 80, 5,
               R"("Input Dims":[[[4160],[2,3]],[],[]],"Input type":["TensorList","",""])");
  const ProfilerRecording recording = Read(events.Text());
  CHECK(Find(recording, "c10d::allreduce_").bytes == Bytes(4 * (4160 + 6)));
}

TEST_CASE("a unit that ends below another one, and begins again above it") {
  KinetoLines events;
  events.Range("ProfilerStep#0", 0, 1000);
  for (const auto& [name, begin] :
       std::vector<std::pair<std::string, int>>{{"FSDP::pre_forward (a)", 10},
                                                {"FSDP::pre_forward (b)", 20},
                                                {"FSDP::post_forward (a)", 30},
                                                {"FSDP::pre_forward (a)", 40},
                                                {"FSDP::post_forward (b)", 50},
                                                {"FSDP::post_forward (a)", 60}}) {
    events.Range(name, begin, begin + 1);
  }
  for (const int begin : {15, 25, 35, 45, 55, 65}) {
    events.Slice("cpu_op", "aten::mm", begin, 1);
  }
  const ProfilerRecording recording = Read(events.Text());
  std::vector<std::string> units;
  for (const Activity& activity : recording.activities) {
    units.push_back(recording.units[activity.unit]);
  }
  CHECK(units == std::vector<std::string>{"a", "b", "b", "a", "a", ""});
}

TEST_CASE("classes by name") {
  for (const auto& [name, expected] : std::vector<std::pair<std::string, KernelClass>>{
           {"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", KernelClass::kGemm},
           {"nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", KernelClass::kGemm},
           {"void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", KernelClass::kGemm},
           {"Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs", KernelClass::kGemm},
           {"void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", KernelClass::kAttentionForward},
           {"void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", KernelClass::kAttentionBackward},
           {"fmha_cutlassF_bf16_aligned_64x64_rf_sm80", KernelClass::kAttentionForward},
           {"fmha_cutlassB_bf16_aligned_64x64_k64_sm80", KernelClass::kAttentionBackward},
           {"cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma",
            KernelClass::kAttentionBackward},
           {"sm80_xmma_dgrad_implicit_gemm_bf16", KernelClass::kConv},
           {"void at::native::vectorized_layer_norm_kernel", KernelClass::kNorm},
           {"void cunn_SoftMaxForward<4, float>", KernelClass::kSoftmax},
           {"void at::native::indexSelectLargeIndex", KernelClass::kGatherScatter},
           {"void at::native::chunk_cat_cuda_kernel", KernelClass::kCopy},
           {"void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>",
            KernelClass::kElementwise},
       }) {
    const std::string kernel = name;  // clang 14 captures no structured binding
    CAPTURE(kernel);
    CHECK(ClassOfKernelName(kernel) == expected);
  }
}

TEST_CASE("plain, compressed, metadata behind the events, and a list without a header") {
  KinetoLines events;
  events.Range("ProfilerStep#1", 0, 100)
      .Kernel("gemm", 10, 20, 7)
      .Kernel("nccl AllReduce", 11, 40, 9);
  const ProfilerRecording plain = Read(events.Text());
  TextSink sink(true);
  sink.Append(events.Text());
  const TemporaryFile packed(sink.Finish(), ".json.gz");
  CHECK(DetectMeasured(packed.name()) == MeasuredKind::kKineto);
  for (const ProfilerRecording& other :
       {ReadKineto(packed.name()), Read(events.Text(false)), Read(events.List())}) {
    REQUIRE(other.activities.size() == plain.activities.size());
    for (std::size_t i = 0; i < plain.activities.size(); ++i) {
      CHECK(other.activities[i].start == plain.activities[i].start);
      CHECK(other.activities[i].kind == plain.activities[i].kind);
    }
  }
  CHECK(Read(events.Text(false)).rank == 3);
}

TEST_CASE("bad traces say what is wrong with them") {
  const std::string good = KinetoLines().Kernel("gemm", 1, 2, 7).Text();
  CHECK(ErrorOf(good.substr(0, good.size() / 2)).find("broken JSON at byte") != std::string::npos);
  CHECK(ErrorOf("{}") == ": got no \"traceEvents\", expected a trace of PyTorch's profiler");
  CHECK(ErrorOf(R"({"traceEvents":[]})") ==
        ": got no kernels, collectives or ops, expected a recording of training steps, with CPU "
        "activities at least");
  const auto event = [](const std::string& ts, const std::string& dur, const std::string& args) {
    return R"({"traceEvents":[{"ph":"M"},{"ph":"X","cat":"kernel","name":"k","ts":)" + ts +
           R"(,"dur":)" + dur + R"(,"args":{)" + args + "}}]}";
  };
  CHECK(ErrorOf(event("\"soon\"", "1", "")) ==
        ": traceEvents[1].ts: got \"soon\", expected a time in microseconds");
  CHECK(ErrorOf(event("1", "-5", "")) ==
        ": traceEvents[1].dur: got \"-5\", expected a time in microseconds, not negative");
  CHECK(ErrorOf(event("1e300", "1", "")) ==
        ": traceEvents[1].ts: got \"1e300\", expected a time in microseconds");
  CHECK(ErrorOf(event("1", "1", R"("correlation":1.5)")) ==
        ": traceEvents[1].args.correlation: got \"1.5\", expected a whole number");
  CHECK(ErrorOf(event("1", "9000000000000", "")) ==
        ": got times that are more than 50 days apart, expected one clock");
  CHECK(ErrorOf(std::string(100000, '[')).find("nesting deeper than 64") != std::string::npos);
  CHECK(ErrorOf("{\"a\":\"" + std::string(std::size_t{20} << 20, 'x'))
            .find("a name or number of more than 8 MiB") != std::string::npos);
}

}  // namespace
}  // namespace shardwright
