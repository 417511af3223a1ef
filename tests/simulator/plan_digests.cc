// Digests of random plans over all dialects: what their programs are, and what is predicted for
// them. Lines of an older build beside those of a newer one show what a change of the lowering, the
// program or the simulator changed: `sw_plan_digests 300 > old`, and so on.

#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <string>

#include "models/loader.h"
#include "schedule/place.h"
#include "simulator/simulate.h"
#include "tests/schedule/random_plan.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

using testing::DrawCase;
using testing::DrawDeepCase;
using testing::LowerCase;
using testing::RandomCase;

// FNV-1a over numbers.
class Digest {
 public:
  Digest& Add(std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ = (hash_ ^ ((value >> (8 * byte)) & 0xff)) * 0x100000001b3ULL;
    }
    return *this;
  }
  Digest& Add(std::int64_t value) { return Add(static_cast<std::uint64_t>(value)); }
  Digest& Add(double value) { return Add(std::bit_cast<std::uint64_t>(value)); }
  template <typename Enum>
  Digest& Of(Enum value) {
    return Add(static_cast<std::uint64_t>(value));
  }
  [[nodiscard]] std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ULL;
};

std::array<const Body*, 3> BodiesOf(const Program& program) {
  return {&program.init, &program.warmup, &program.step};
}

// Ops with what they are priced by, their edges, and when buffers begin and end.
std::uint64_t OpsOf(const Program& program) {
  Digest digest;
  for (const Body* body : BodiesOf(program)) {
    for (std::uint32_t i = 0; i < body->size(); ++i) {
      const Op& op = body->ops[i];
      const OpShape& shape = program.ShapeOf(op);
      digest.Of(shape.code).Of(shape.stream).Of(shape.dtype).Of(shape.group.value);
      digest.Add(shape.bytes.value).Of(op.subject).Of(op.micro_batch).Of(op.occurrence);
      digest.Of(op.phase);
      for (const Kernel& kernel : program.KernelsOf(shape)) {
        digest.Of(kernel.kind).Of(kernel.dtype).Add(kernel.m).Add(kernel.n).Add(kernel.k);
        digest.Add(kernel.flops.value).Add(kernel.read.value).Add(kernel.written.value);
      }
      for (const Edge edge : body->EdgesOf(OpId(i))) {
        digest.Of(edge.value);
      }
      for (const MemoryPoint& point : body->PointsBefore(OpId(i))) {
        digest.Of(point.buffer.value).Of(point.kind).Of(point.recorded_streams);
      }
    }
    for (const MemoryPoint& point : body->PointsAtEnd()) {
      digest.Of(point.buffer.value).Of(point.kind).Of(point.recorded_streams);
    }
    for (const OpId op : body->carries) {
      digest.Of(op.value);
    }
  }
  return digest.value();
}

std::uint64_t AccessesOf(const Program& program) {
  Digest digest;
  for (const Body* body : BodiesOf(program)) {
    for (const Access& access : body->accesses) {
      digest.Of(access.buffer.value).Of(access.mode).Of(access.role).Of(access.index);
      digest.Add(access.bytes.value);
    }
  }
  return digest.value();
}

std::uint64_t BuffersOf(const Program& program) {
  Digest digest;
  for (const Buffer& buffer : program.buffers) {
    digest.Add(buffer.size.value).Of(buffer.category).Of(buffer.owner).Of(buffer.on_host);
    digest.Of(buffer.zero_filled).Of(buffer.flat);
    for (const Bytes piece : program.PiecesOf(buffer)) {
      digest.Add(piece.value);
    }
  }
  return digest.value();
}

void PrintCase(int number, const RandomCase& c) {
  const std::int64_t ranks = c.plan.shard_size * c.plan.replicate_size;
  const std::int64_t nodes = ranks % 8 == 0 ? ranks / 8 : 1;
  const Cluster cluster = LoadCluster(
      "h100-80 x" + std::to_string(ranks / nodes) + ", nvlink 450 GB/s, nic 2x200 Gbit/s", nodes);
  const Program program = LowerCase(c);
  const Profile profile = DefaultProfile(cluster.gpu, c.kernel_set);
  SimulateOptions options;
  options.reserved = true;
  const SimulationResult result = Simulate(program, cluster, profile, options);
  std::printf(
      "%d %s ops %016llx accesses %016llx buffers %016llx step %lld first %lld peak %lld "
      "reserved %lld placed %lld\n",
      number, program.dialect.c_str(), static_cast<unsigned long long>(OpsOf(program)),
      static_cast<unsigned long long>(AccessesOf(program)),
      static_cast<unsigned long long>(BuffersOf(program)),
      static_cast<long long>(result.step_time.value),
      static_cast<long long>(result.first_step_time.value),
      static_cast<long long>(result.memory.allocated.DevicePeak().total.value),
      static_cast<long long>(result.memory.reserved->peak_steady.value),
      static_cast<long long>(Place(program).device_size.value));
}

int Run(std::span<const char* const> args) {
  const int count = args.size() > 1 ? std::atoi(args[1]) : 300;
  std::mt19937 random(20261125);
  const Model deep = LoadModel("llama-2-7b");
  for (int i = 0; i < count; ++i) {
    PrintCase(i, i % 10 == 9 ? DrawDeepCase(random, deep) : DrawCase(random));
  }
  return 0;
}

}  // namespace
}  // namespace shardwright

int main(int argc, char** argv) {
  return shardwright::Run({argv, static_cast<std::size_t>(argc)});
}
