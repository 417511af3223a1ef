// Prices against formulas worked out by hand, with round numbers instead of a real profile.

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "simulator/costs/collectives.h"
#include "simulator/costs/contention.h"
#include "simulator/costs/kernels.h"
#include "simulator/costs/pricer.h"
#include "tests/simulator/round_numbers.h"

namespace shardwright {
namespace {

using testing::RoundCluster;
using testing::RoundProfile;

constexpr double kTolerance = 1e-12;  // a few roundings of doubles

double Micros(Seconds s) {
  return s.value * 1e6;
}

TEST_CASE("Matrix products: operations over the reached rate, or memory, and a ramp") {
  // By hand: 100 multiprocessors, 1000 TFLOP/s at 50 percent, 1 TB/s at 80 percent, ramp 5 us.
  const KernelRates rates = FindKernelRates(RoundCluster(1).gpu, RoundProfile().compute);
  Kernel gemm;
  gemm.kind = KernelClass::kGemm;
  gemm.m = 256 * 10;
  gemm.n = 128 * 10;  // 100 tiles of 256 x 128: exactly one wave
  gemm.k = 1000;
  gemm.flops = Flops(1e11);
  gemm.read = Bytes(1000);
  CHECK(TileOverhead(1, gemm.m, gemm.n, 100) == 1);
  CHECK(Micros(KernelTime(gemm, rates)) == doctest::Approx(200 + 5).epsilon(kTolerance));
  gemm.read = Bytes(400'000'000);  // 500 us on the memory bus
  CHECK(Micros(KernelTime(gemm, rates)) == doctest::Approx(500 + 5).epsilon(kTolerance));
}

TEST_CASE("Tiles and waves: what is computed for nothing") {
  // One row: the smallest tile that covers it has 64, so 64 times the work, in waves of 100 tiles.
  // 6400 columns are 100 tiles of 64 x 64: 64 / 1.
  CHECK(TileOverhead(1, 1, 6400, 100) == doctest::Approx(64));
  // 101 tiles of 64 x 64 would need two waves; 51 tiles of 64 x 128 need one of twice the size.
  CHECK(TileOverhead(1, 64, 6464, 100) == doctest::Approx(100.0 * 64 * 128 / (64.0 * 6464)));
  CHECK(TileOverhead(0, 64, 64, 100) == 1);
}

TEST_CASE("Kernels priced by bytes, and the floor") {
  const KernelRates rates = FindKernelRates(RoundCluster(1).gpu, RoundProfile().compute);
  Kernel copy;
  copy.kind = KernelClass::kCopy;
  copy.read = Bytes(40'000'000);
  copy.written = Bytes(40'000'000);
  CHECK(Micros(KernelTime(copy, rates)) == doctest::Approx(100).epsilon(kTolerance));  // 80 %
  copy.kind = KernelClass::kNorm;
  CHECK(Micros(KernelTime(copy, rates)) == doctest::Approx(160).epsilon(kTolerance));  // 50 %
  copy.kind = KernelClass::kOptimizer;
  CHECK(Micros(KernelTime(copy, rates)) == doctest::Approx(200).epsilon(kTolerance));  // 40 %
  copy.read = copy.written = Bytes(8);
  CHECK(Micros(KernelTime(copy, rates)) == doctest::Approx(2).epsilon(kTolerance));
  Kernel attention;
  attention.kind = KernelClass::kAttentionForward;
  attention.flops = Flops(4e10);  // at 40 percent of 1000 TFLOP/s
  CHECK(Micros(KernelTime(attention, rates)) == doctest::Approx(100).epsilon(kTolerance));
  attention.kind = KernelClass::kAttentionBackward;  // at 20 percent
  CHECK(Micros(KernelTime(attention, rates)) == doctest::Approx(200).epsilon(kTolerance));
}

TEST_CASE("Attention of a library without fractions of its own is the usual one's") {
  ComputeProfile profile;
  profile.attention.forward.value = 0.4;
  for (const AttentionImpl library : {AttentionImpl::kTriton, AttentionImpl::kCudnn}) {
    CHECK(&AttentionOf(profile, library) == &profile.attention);
  }
  profile.triton_attention.forward.value = 0.2;
  CHECK(&AttentionOf(profile, AttentionImpl::kTriton) == &profile.triton_attention);
  CHECK(&AttentionOf(profile, AttentionImpl::kCudnn) == &profile.attention);
}

TEST_CASE("Fused attention: tiles over multiprocessors, keys and head dimension") {
  Kernel kernel;
  kernel.kind = KernelClass::kAttentionForward;
  kernel.batch = 32;
  kernel.m = kernel.n = 1024;
  kernel.k = 128;
  kernel.flops = Flops(4.0 * 32 * 1024 * 1024 * 128);
  CHECK(AttentionOverhead(kernel, 0.3, 0, 100) == 1);
  kernel.attention = AttentionImpl::kTriton;
  CHECK(AttentionOverhead(kernel, 0.3, 100, 100) == 1);
  kernel.attention = AttentionImpl::kOwn;  // goes by scores: half the features take as long
  CHECK(AttentionOverhead(kernel, 0.3, 100, 100) == 1);
  kernel.k = 64;
  CHECK(AttentionOverhead(kernel, 0.3, 100, 100) == 2);
  kernel.k = 128;
  kernel.attention = AttentionImpl::kFlash;
  // 256 tiles of 128 queries on 64 multiprocessors: four each, and one more. A tile sees 1024 keys
  // and takes as long as 1124.
  CHECK(AttentionOverhead(kernel, 0, 100, 64) == doctest::Approx(1124 * (1 + 0.25) / 1024));
  // Of a key's time 0.3 stay when the head dimension is halved, of half as many operations.
  kernel.k = 64;
  kernel.flops = kernel.flops * 0.5;
  CHECK(AttentionOverhead(kernel, 0.3, 100, 64) ==
        doctest::Approx(1124 * 1.25 / 1024 * (0.7 + 0.3 * 2)));
  // Causal: 576 of 1024 keys, tiles on the diagonal whole; half a tile more for the mask.
  kernel.k = 128;
  kernel.flops = Flops(4.0 * 32 * 1024 * 576 * 128);
  const double causal = ((576 + 164) + (1024 + 164) * 0.25) / 576;
  CHECK(AttentionOverhead(kernel, 0, 100, 64) == doctest::Approx(causal));
  // Backward has five products instead of two.
  kernel.kind = KernelClass::kAttentionBackward;
  kernel.flops = kernel.flops * 2.5;
  CHECK(AttentionOverhead(kernel, 0, 100, 64) == doctest::Approx(causal));
  // A tile that is not full takes as long as a full one.
  kernel.m = 1000;
  kernel.flops = Flops(10.0 * 32 * 1000 * 1024 * 128);
  CHECK(AttentionOverhead(kernel, 0, 100, 64) == doctest::Approx(1.024 * 1124 * 1.25 / 1024));
}

TEST_CASE("Fused attention: long tiles first end when the longest or an equal share does") {
  Kernel kernel;
  kernel.kind = KernelClass::kAttentionForward;
  kernel.batch = 32;
  kernel.m = kernel.n = 1024;
  kernel.k = 128;
  kernel.flops = Flops(4.0 * 32 * 1024 * 576 * 128);  // causal: 576 of 1024 keys
  // 128 tiles of 256 queries on 64 multiprocessors: an equal share is two mean tiles of 576 + 164.
  CHECK(AttentionOverhead(kernel, 0, 100, 64, 256) == doctest::Approx((576 + 164) / 576.0));
  // On 256 multiprocessors the longest tile, 1024 + 164 keys, takes twice what 128 tiles share.
  CHECK(AttentionOverhead(kernel, 0, 100, 256, 256) == doctest::Approx(2 * (1024 + 164) / 576.0));
  // Backward goes by 256 tiles of 128: its longest tile takes as long as its share.
  kernel.kind = KernelClass::kAttentionBackward;
  kernel.flops = kernel.flops * 2.5;
  CHECK(AttentionOverhead(kernel, 0, 100, 256, 256) == doctest::Approx((1024 + 164) / 576.0));
}

TEST_CASE("Fused attention: numbers of the library, or the usual one's") {
  Profile profile = RoundProfile();
  profile.compute.cudnn_attention.forward.value = 0.8;
  profile.compute.cudnn_attention.backward.value = 0.4;
  profile.compute.ck_attention.forward.value = 0.1;
  profile.compute.ck_attention.backward.value = 0.2;
  const KernelRates rates = FindKernelRates(RoundCluster(1).gpu, profile.compute);
  Kernel kernel;
  kernel.kind = KernelClass::kAttentionForward;
  kernel.flops = Flops(4e10);  // of 1000 TFLOP/s 40 percent by the usual library, 80 by cuDNN's
  const auto time = [&](AttentionImpl attention) {
    kernel.attention = attention;
    return Micros(KernelTime(kernel, rates));
  };
  CHECK(time(AttentionImpl::kFlash) == doctest::Approx(100).epsilon(kTolerance));
  CHECK(time(AttentionImpl::kCudnn) == doctest::Approx(50).epsilon(kTolerance));
  CHECK(time(AttentionImpl::kFlash3) == doctest::Approx(100).epsilon(kTolerance));
  CHECK(time(AttentionImpl::kCk) == doctest::Approx(400).epsilon(kTolerance));
  kernel.kind = KernelClass::kAttentionBackward;
  CHECK(time(AttentionImpl::kFlash) == doctest::Approx(200).epsilon(kTolerance));
  CHECK(time(AttentionImpl::kCudnn) == doctest::Approx(100).epsilon(kTolerance));
}

TEST_CASE("Products that move more than they multiply have a rate of their own") {
  ComputeProfile profile = RoundProfile().compute;
  const GpuSpec gpu = RoundCluster(1).gpu;
  Kernel thin;
  thin.kind = KernelClass::kGemm;
  thin.m = 16;
  thin.n = thin.k = 4096;
  thin.flops = Flops(2.0 * 16 * 4096 * 4096);
  thin.read = Bytes(2 * (16 * 4096 + 4096 * 4096));
  thin.written = Bytes(2 * 16 * 4096);
  const auto streaming = [&] {
    const KernelRates rates = FindKernelRates(gpu, profile);
    return (KernelTime(thin, rates) - rates.gemm_ramp).value;
  };
  const double bytes = 2 * (2 * 16 * 4096 + 4096 * 4096);
  const double memory = gpu.memory_bandwidth.value.value;
  CHECK(streaming() == doctest::Approx(bytes / (memory * profile.elementwise.value)));
  profile.gemm_memory.value = profile.elementwise.value / 2;
  CHECK(streaming() == doctest::Approx(2 * bytes / (memory * profile.elementwise.value)));
  thin.kind = KernelClass::kElementwise;  // not theirs
  thin.flops = Flops(0);
  CHECK(KernelTime(thin, FindKernelRates(gpu, profile)).value ==
        doctest::Approx(bytes / (memory * profile.elementwise.value)));
}

TEST_CASE("Grouped products that the host asks for one by one take as long as the host") {
  ComputeProfile profile = RoundProfile().compute;
  Kernel grouped;
  grouped.kind = KernelClass::kGroupedGemm;
  grouped.batch = 64;
  grouped.m = grouped.n = grouped.k = 128;
  grouped.flops = Flops(2.0 * 64 * 128 * 128 * 128);
  const auto time = [&] {
    return KernelTime(grouped, FindKernelRates(RoundCluster(1).gpu, profile)).value;
  };
  const double together = time();
  profile.grouped_call.value = Seconds(10e-6);
  CHECK(time() == together);
  grouped.calls = 64;
  CHECK(time() == doctest::Approx(640e-6));
  profile.grouped_call.value = Seconds(1e-12);  // the device is the slower one
  CHECK(time() == together);
}

TEST_CASE("Fused attention: backward of heads that are wider than a tile") {
  Profile profile = RoundProfile();
  profile.compute.attention.wide.value = 1.25;
  const KernelRates rates = FindKernelRates(RoundCluster(1).gpu, profile.compute);
  Kernel kernel;
  kernel.kind = KernelClass::kAttentionBackward;
  kernel.flops = Flops(4e10);
  kernel.k = 128;
  const double usual = KernelTime(kernel, rates).value;
  kernel.k = 192;
  CHECK(KernelTime(kernel, rates).value == doctest::Approx(1.25 * usual));
  kernel.kind = KernelClass::kAttentionForward;
  const double wide = KernelTime(kernel, rates).value;
  kernel.k = 128;
  CHECK(KernelTime(kernel, rates).value == wide);
}

TEST_CASE("Products in fp8 with a scale per row") {
  ComputeProfile profile = RoundProfile().compute;
  Cluster cluster = RoundCluster(1);
  Kernel product;
  product.kind = KernelClass::kGemm;
  product.m = product.n = product.k = 4096;
  product.flops = Flops(2.0 * 4096 * 4096 * 4096);
  const auto time = [&](bool scaled_by_row) {
    product.scaled_by_row = scaled_by_row;
    const KernelRates rates = FindKernelRates(cluster.gpu, profile);
    return (KernelTime(product, rates) - rates.gemm_ramp).value;
  };
  CHECK(time(true) == doctest::Approx(time(false)).scale(1e-9));
  const double plain = time(false);
  profile.fp8_rowwise.value = 0.8;
  CHECK(time(true) == doctest::Approx(plain / 0.8).scale(1e-9));
  CHECK(time(false) == doctest::Approx(plain).scale(1e-9));
}

TEST_CASE("Products of experts in the executor's own kernels") {
  ComputeProfile profile = RoundProfile().compute;
  const Cluster cluster = RoundCluster(1);
  Kernel product;
  product.kind = KernelClass::kGroupedGemm;
  product.batch = 8;
  product.m = product.n = product.k = 4096;
  product.flops = Flops(8 * 2.0 * 4096 * 4096 * 4096);
  const auto time = [&](bool is_own) {
    product.is_own = is_own;
    const KernelRates rates = FindKernelRates(cluster.gpu, profile);
    return (KernelTime(product, rates) - rates.gemm_ramp).value;
  };
  const double plain = time(false);
  CHECK(time(true) == doctest::Approx(plain).scale(1e-9));
  profile.own_grouped.value = 0.005;  // of a peak of which products reach a half
  CHECK(time(true) == doctest::Approx(plain * 100).scale(1e-9));
  product.dtype = DType::kFp32;  // was not measured
  CHECK(time(true) == doctest::Approx(time(false)).scale(1e-9));
  product.dtype = DType::kBf16;
  CHECK(time(false) == doctest::Approx(plain).scale(1e-9));
}

// Of 228 problems that cuDNN was asked for, gradients of heads wider than 128 had plans on compute
// capability 9.0 alone (CudnnLibrary.GradientsOfWideHeadsAreHoppersAlone).
TEST_CASE("Attention that cuDNN has no plan for is priced as the executor's own") {
  ComputeProfile profile = RoundProfile().compute;
  profile.own_attention.forward.value = profile.own_attention.backward.value = 0.01;
  GpuSpec gpu = RoundCluster(1).gpu;
  Kernel gradients;
  gradients.kind = KernelClass::kAttentionBackward;
  gradients.batch = 8;
  gradients.m = gradients.n = 4096;
  gradients.flops = Flops(1e13);
  const auto time = [&](const char* architecture, std::int64_t head, bool is_ours) {
    gpu.architecture = architecture;
    gradients.k = head;
    gradients.is_own = is_ours;
    return KernelTime(gradients, FindKernelRates(gpu, profile)).value;
  };
  const auto own_time = [&](std::int64_t head) {
    const AttentionImpl asked = std::exchange(gradients.attention, AttentionImpl::kOwn);
    const double own = time("ampere", head, true);
    gradients.attention = asked;
    return own;
  };
  for (const std::int64_t head : {std::int64_t{192}, std::int64_t{256}}) {
    CHECK(time("hopper", head, true) < own_time(head) / 2);
    for (const char* const other : {"ampere", "ada", "ada-half", "blackwell", "blackwell-rtx"}) {
      CHECK(time(other, head, true) == own_time(head));
      CHECK(time(other, head, false) < own_time(head) / 2);  // PyTorch asks another library
    }
  }
  CHECK(time("ampere", 128, true) < own_time(128) / 2);
  gradients.kind = KernelClass::kAttentionForward;
  CHECK(time("ampere", 256, true) < own_time(256) / 2);
}

TEST_CASE("Grouped products: a part of the shorter hides behind the longer") {
  ComputeProfile profile = RoundProfile().compute;
  profile.grouped_overlap.value = 0.25;
  const KernelRates rates = FindKernelRates(RoundCluster(1).gpu, profile);
  Kernel product;
  product.kind = KernelClass::kGroupedGemm;
  product.batch = 8;
  product.m = 200;  // in tiles of 128: 256
  product.n = product.k = 4096;
  product.flops = Flops(8 * 2.0 * 200 * 4096 * 4096);
  const double multiplying = product.flops.value * 1.28 / 500e12;  // s, at half of 1000 TFLOP/s
  const auto time = [&](double streaming) {
    product.read = Bytes(static_cast<std::int64_t>(streaming * rates.elementwise.value));
    return (KernelTime(product, rates) - rates.gemm_ramp).value;
  };
  CHECK(time(0) == doctest::Approx(multiplying).scale(1e-9));
  CHECK(time(multiplying / 2) == doctest::Approx(multiplying * (1 + 0.75 / 2)).scale(1e-9));
  CHECK(time(multiplying * 2) == doctest::Approx(multiplying * (2 + 0.75)).scale(1e-9));
}

TEST_CASE("Long rows are read again unless the rows at work fit into half of the cache") {
  ComputeProfile profile = RoundProfile().compute;
  profile.rows.value = 0.5;
  GpuSpec gpu = RoundCluster(1).gpu;
  gpu.sm_count.value = 100;
  gpu.l2.value = Bytes(40'000'000);  // 200 rows of 100 kB at a time
  Kernel softmax;
  softmax.kind = KernelClass::kSoftmax;
  softmax.read = softmax.written = Bytes(1'000'000'000);
  softmax.row = Bytes(100'000);
  softmax.reread = Bytes(2'000'000'000);
  const double pass = 1e9 / (gpu.memory_bandwidth.value.value * 0.5);
  const auto time = [&] { return KernelTime(softmax, FindKernelRates(gpu, profile)).value; };
  CHECK(time() == doctest::Approx(2 * pass).scale(1e-9));
  softmax.row = Bytes(100'001);
  CHECK(time() == doctest::Approx(4 * pass).scale(1e-9));
  gpu.l2.value = Bytes(0);  // nobody knows
  CHECK(time() == doctest::Approx(2 * pass).scale(1e-9));
  softmax.row = Bytes(0);  // a kernel of which only its bytes are known
  CHECK(time() == doctest::Approx(2e9 / FindKernelRates(gpu, profile).reduction.value).scale(1e-9));
}

TEST_CASE("Lookups have a rate of their own, and loads in turn take their time") {
  ComputeProfile profile = RoundProfile().compute;
  profile.gather.value = 0.25;
  profile.load.value = Seconds(0.5e-6);
  const GpuSpec gpu = RoundCluster(1).gpu;
  const KernelRates rates = FindKernelRates(gpu, profile);
  Kernel lookup;
  lookup.kind = KernelClass::kGatherScatter;
  lookup.read = Bytes(1'000'000'000);
  const double moving = 1e9 / (gpu.memory_bandwidth.value.value * 0.25);
  CHECK(KernelTime(lookup, rates).value == doctest::Approx(moving).scale(1e-9));
  lookup.waits = 100'000;
  CHECK(KernelTime(lookup, rates).value == doctest::Approx(0.05).scale(1e-9));
  lookup.waits = 0;
  lookup.reread = Bytes(500'000'000);  // from whatever cache
  CHECK(KernelTime(lookup, rates).value == doctest::Approx(1.5 * moving).scale(1e-9));
}

TEST_CASE("A QR by its operations and its columns, and a step's part of one") {
  Profile profile = RoundProfile();
  profile.compute.qr_column.value = Seconds(7e-6);
  const KernelRates rates = FindKernelRates(RoundCluster(1).gpu, profile.compute);
  Kernel qr;
  qr.kind = KernelClass::kQr;
  qr.m = 1000;
  qr.batch = 10;
  qr.flops = Flops(1e11);  // at 50 percent of 1000 TFLOP/s: 200 us, and 100 columns
  CHECK(Micros(KernelTime(qr, rates)) == doctest::Approx(900).epsilon(kTolerance));
}

TEST_CASE("Ring collectives inside a node") {
  // By hand: 8 ranks, 400 GB/s at 80 percent = 320 GB/s, base 10 us, 1 us per hop, 7 hops.
  const Cluster cluster = RoundCluster(1);
  const Profile profile = RoundProfile();
  const CollectivePath path = FindCollectivePath(cluster, profile, {8, 1});
  const Bytes size(320'000'000);
  const double sent = 1000.0 * 7 / 8;  // us
  CHECK(Micros(CollectiveTime(OpCode::kAllGather, size, path)) ==
        doctest::Approx(10 + 7 + sent).epsilon(kTolerance));
  CHECK(Micros(CollectiveTime(OpCode::kReduceScatter, size, path)) ==
        doctest::Approx(10 + 7 + sent).epsilon(kTolerance));
  CHECK(Micros(CollectiveTime(OpCode::kAllReduce, size, path)) ==
        doctest::Approx(10 + 14 + 2 * sent).epsilon(kTolerance));
  CHECK(Micros(CollectiveTime(OpCode::kBroadcast, size, path)) ==
        doctest::Approx(10 + 7 + 1000).epsilon(kTolerance));
  // Small messages take the other protocol: base 2 us, .5 us per hop, a tenth of the rate.
  CHECK(Micros(CollectiveTime(OpCode::kAllGather, Bytes(8), path)) ==
        doctest::Approx(2 + 3.5 + 8.0 * 7 / 8 / 32e3).epsilon(kTolerance));
  CHECK(ChannelsOf(path) == 20);
  CHECK(BusBytesPerByte(OpCode::kAllReduce, 8) == 1.75);
}

TEST_CASE("Through gloo a reduce-scatter is an all-reduce") {
  const Cluster cluster = RoundCluster(1);
  Profile profile = RoundProfile();
  const Bytes size(320'000'000);
  const Seconds gather =
      CollectiveTime(OpCode::kAllGather, size, FindCollectivePath(cluster, profile, {8, 1}));
  profile.overlap.gloo.value = 1;
  const CollectivePath path = FindCollectivePath(cluster, profile, {8, 1});
  CHECK(CollectiveTime(OpCode::kReduceScatter, size, path) ==
        CollectiveTime(OpCode::kAllReduce, size, path));
  CHECK(CollectiveTime(OpCode::kAllGather, size, path) == gather);
}

TEST_CASE(
    "Ring collectives across nodes: the network's base, both kinds of hops, the slower rate") {
  // By hand: 4 nodes of 8; 8 NICs of 25 GB/s = 200 GB/s < 400 GB/s, at 50 percent; 28 hops of 1 us
  // and 3 of 20 us, base 30 us.
  const Cluster cluster = RoundCluster(4);
  const Profile profile = RoundProfile();
  const CollectivePath path = FindCollectivePath(cluster, profile, {32, 1});
  CHECK(Micros(CollectiveTime(OpCode::kAllGather, Bytes(320'000'000), path)) ==
        doctest::Approx(30 + 28 + 60 + 3200.0 * 31 / 32).epsilon(kTolerance));
  CHECK(ChannelsOf(path) == 20);
  // Across the nodes only, eight groups at once: each rank has one NIC; no hop inside a node.
  const CollectivePath across = FindCollectivePath(cluster, profile, {4, 8});
  CHECK(Micros(CollectiveTime(OpCode::kReduceScatter, Bytes(100'000'000), across)) ==
        doctest::Approx(30 + 60 + 8000.0 * 3 / 4).epsilon(kTolerance));
}

TEST_CASE("One rank alone pays only for the copy that is really made") {
  const CollectivePath path = FindCollectivePath(RoundCluster(1), RoundProfile(), {1, 1});
  const Bytes size(400'000'000);
  CHECK(CollectiveTime(OpCode::kAllGather, size, path).value == 0);
  CHECK(CollectiveTime(OpCode::kAllReduce, size, path).value == 0);
  // 800 MB at 800 GB/s.
  CHECK(Micros(CollectiveTime(OpCode::kReduceScatter, size, path)) ==
        doctest::Approx(1000).epsilon(kTolerance));
}

TEST_CASE("Issue costs: a dispatch per op, a launch per kernel, a hook per unit collective") {
  Program program;
  program.groups = {{"shard", 8, 1}};
  Kernel kernel;
  kernel.kind = KernelClass::kCopy;
  kernel.read = Bytes(80'000'000);  // 100 us
  program.kernels = {kernel, kernel};
  OpShape compute;
  compute.kernel_count = 2;
  OpShape gather;
  gather.code = OpCode::kAllGather;
  gather.stream = Stream::kGather;
  gather.group = GroupId(0);
  gather.bytes = Bytes(8);
  gather.issue = Issue::kHook;
  OpShape copy;
  copy.code = OpCode::kCopyH2d;
  copy.stream = Stream::kH2d;
  copy.bytes = Bytes(50'000'000);
  OpShape update = compute;  // 160 MB, a GPU's share of the host memory 50 GB/s
  update.code = OpCode::kHostOptimizerStep;
  update.stream = Stream::kHost;
  program.shapes = {compute, gather, copy, update};
  const PriceTable table = PriceProgram(program, RoundCluster(1), RoundProfile());
  // Two kernels of 100 us with gaps of 1 us; dispatch 3 us, launches of 4 us.
  CHECK(table.prices[0].duration == ToSimTime(Seconds(202e-6)));
  CHECK(table.prices[0].tail == ToSimTime(Seconds(101e-6)));
  CHECK(table.prices[0].first_launch == ToSimTime(Seconds(7e-6)));
  CHECK(table.prices[0].issue == ToSimTime(Seconds(11e-6)));
  CHECK(table.prices[1].issue == ToSimTime(Seconds(50e-6)));  // 30 us and a hook of 20 us
  // 50 MB at 50 GB/s x .8, and a latency of 10 us.
  CHECK(table.prices[2].duration == ToSimTime(Seconds(1260e-6)));
  CHECK(table.prices[3].duration == ToSimTime(Seconds(3.2e-3)));
  program.shapes[1].issue = Issue::kLoop;
  program.shapes[0].issue = Issue::kHook;  // ZeRO-3's hooks before a module and after it
  const PriceTable other = PriceProgram(program, RoundCluster(1), RoundProfile());
  CHECK(other.prices[1].issue == ToSimTime(Seconds(30e-6)));
  CHECK(other.prices[0].issue == ToSimTime(Seconds(51e-6)));
  CHECK(other.prices[0].duration == table.prices[0].duration);
}

// Eight ranks multiply eight parts, each while the next one is on its way: max(P, T + P / 8) for
// both together, and the products' own ops stand for P.
TEST_CASE("Transfers beside products cost what the products do not hide") {
  Program program;
  program.groups = {{"tp", 8, 1}};
  Kernel gemm;
  gemm.kind = KernelClass::kGemm;
  gemm.m = 256 * 10;
  gemm.n = 128 * 10;
  gemm.k = 1000;
  gemm.flops = Flops(1e11);  // 205 us, as above
  program.kernels = {gemm, gemm};
  OpShape alone;
  alone.code = OpCode::kAllGather;
  alone.group = GroupId(0);
  alone.bytes = Bytes(100'000'000);
  OpShape one = alone, two = alone;
  one.kernel_count = 1;
  two.kernel_count = 2;
  program.shapes = {alone, one, two};
  const auto left = [&](Bytes bytes) {
    for (OpShape& shape : program.shapes) {
      shape.bytes = bytes;
    }
    const PriceTable table = PriceProgram(program, RoundCluster(1), RoundProfile());
    std::vector<double> micros;
    for (const Price& price : table.prices) {
      micros.push_back(Micros(ToSeconds(price.duration)));
    }
    return micros;
  };
  const std::vector<double> large = left(Bytes(400'000'000));
  REQUIRE(large[0] > 2 * 205);
  CHECK(large[1] == doctest::Approx(large[0] - 205 * 7 / 8.0));
  CHECK(large[2] == doctest::Approx(large[0] - 2 * 205 * 7 / 8.0));
  const std::vector<double> small = left(Bytes(8'000));
  CHECK((small[0] > 0 && small[0] < 205 * 7 / 8.0));
  CHECK((small[1] == 0 && small[2] == 0));
}

RunningClasses RunningOn(std::uint8_t compute, std::uint8_t gather, std::uint8_t reduce) {
  RunningClasses running{};
  running[static_cast<std::size_t>(Stream::kCompute)] = compute;
  running[static_cast<std::size_t>(Stream::kGather)] = gather;
  running[static_cast<std::size_t>(Stream::kReduce)] = reduce;
  return running;
}

TEST_CASE("Contention: multiprocessors, memory bandwidth and links") {
  ContentionModel model;
  model.compute_sensitivity = 0.5;
  model.collective_rate = 0.9;
  model.resource_count = 1;
  ContentionClass matrix;
  matrix.kind = LoadKind::kKernel;
  ContentionClass stream;  // all of the memory bandwidth
  stream.kind = LoadKind::kKernel;
  stream.hbm_share = 1;
  ContentionClass gather;
  gather.kind = LoadKind::kCollective;
  gather.sm_share = 0.2;
  gather.hbm_share = 0.25;
  gather.bus_rate = 100;
  gather.links[0] = {0, 0.01};  // fills the link alone
  gather.link_count = 1;
  ContentionClass slow = gather;  // bound by latency: a quarter of the link
  slow.bus_rate = 25;
  model.classes = {ContentionClass{}, matrix, stream, gather, slow};
  const auto compute = static_cast<std::size_t>(Stream::kCompute);
  const auto first = static_cast<std::size_t>(Stream::kGather);
  const auto second = static_cast<std::size_t>(Stream::kReduce);

  CHECK(SolveSpeeds(model, RunningOn(1, 0, 0))[compute] == 1);
  // Ideal slow-down 1 / .8 = 1.25; half of it is felt.
  const Speeds with_matrix = SolveSpeeds(model, RunningOn(1, 3, 0));
  CHECK(with_matrix[compute] == doctest::Approx(1 / 1.125).epsilon(kTolerance));
  CHECK(with_matrix[first] == doctest::Approx(0.9).epsilon(kTolerance));
  // Memory: the collective at .9 x .25 = .225 gets it, less than half; the kernel gets the rest.
  const Speeds with_stream = SolveSpeeds(model, RunningOn(2, 3, 0));
  CHECK(with_stream[compute] == doctest::Approx(0.775).epsilon(kTolerance));
  CHECK(with_stream[first] == doctest::Approx(0.9).epsilon(kTolerance));
  // Two rings over one link get half each; a ring that wants less than half keeps it.
  const Speeds equal = SolveSpeeds(model, RunningOn(0, 3, 3));
  CHECK(equal[first] == doctest::Approx(0.5).epsilon(kTolerance));
  CHECK(equal[second] == doctest::Approx(0.5).epsilon(kTolerance));
  const Speeds unequal = SolveSpeeds(model, RunningOn(0, 3, 4));
  CHECK(unequal[first] == doctest::Approx(0.75).epsilon(kTolerance));
  CHECK(unequal[second] == doctest::Approx(1).epsilon(kTolerance));
}

TEST_CASE("Costs: the slowest of eight GPUs") {
  // 1 + 0.01 * (1/2 + 1/3 + ... + 1/8) = 1.01717857.
  Profile profile = RoundProfile();
  const GpuSpec gpu = RoundCluster(1).gpu;
  const KernelRates alone = FindKernelRates(gpu, profile.compute, 8);
  profile.compute.rank_spread.value = 0.01;
  const KernelRates slowest = FindKernelRates(gpu, profile.compute, 8);
  constexpr auto kBf16 = static_cast<std::size_t>(MathType::kBf16);
  CHECK(alone.gemm[kBf16].value / slowest.gemm[kBf16].value ==
        doctest::Approx(1.01717857).epsilon(1e-5));
  CHECK(alone.elementwise.value / slowest.elementwise.value ==
        doctest::Approx(1.01717857).epsilon(1e-5));
  // One GPU is the mean GPU.
  CHECK(FindKernelRates(gpu, profile.compute, 1).gemm[kBf16].value == alone.gemm[kBf16].value);
}

}  // namespace
}  // namespace shardwright
