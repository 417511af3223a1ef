#include "schedule/print.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "schedule/program.h"
#include "tests/schedule/random_program.h"

namespace shardwright {
namespace {

// One unit on four ranks: gather, compute, reduce, with every kind of line that Print knows.
Program TinyProgram() {
  Program program;
  program.dialect = "fsdp2";
  program.shard_size = 4;
  program.micro_batch = 2;
  program.groups = {{"shard", 4, 1}};
  program.units = {{"root", {{ParamId(0), 0, 0, 16}}, 14, 16, 4}};
  program.model_op_names = {"lin"};
  ShapeInterner interner(program);
  OpShape initialize;
  initialize.code = OpCode::kInitialize;
  initialize.dtype = DType::kFp32;
  OpShape gather;
  gather.code = OpCode::kAllGather;
  gather.stream = Stream::kGather;
  gather.group = GroupId(0);
  gather.bytes = Bytes(64);
  OpShape compute;
  Kernel gemm;
  gemm.kind = KernelClass::kGemm;
  gemm.m = 2;
  gemm.n = 3;
  gemm.k = 4;
  gemm.flops = Flops(48);
  gemm.read = Bytes(40);
  gemm.written = Bytes(12);
  Kernel norm;
  norm.kind = KernelClass::kNorm;
  norm.dtype = DType::kFp32;
  OpShape wait;
  wait.code = OpCode::kHostWait;
  wait.stream = Stream::kHost;

  BodyBuilder init(program, program.init);
  const BufferId shard = init.NewAllocated({Bytes(16), Category::kParameterShard});
  const BufferId buffer = init.NewAllocated({Bytes(8), Category::kModelBuffer, Stream::kCompute,
                                             /*on_host=*/true, /*zero_filled=*/true});
  init.Add({interner.Intern(initialize), Phase::kInit, 0});
  init.Use(shard, AccessMode::kWrite, Role::kParameter);
  init.Finish();

  BodyBuilder step(program, program.step);
  const BufferId full = step.NewAllocated({Bytes(64), Category::kAllGather, Stream::kGather});
  const OpId all_gather = step.Add({interner.Intern(gather), Phase::kForward, 0});
  step.AfterSlot(0);
  step.Use(shard, AccessMode::kRead, Role::kInput);
  step.Use(full, AccessMode::kWrite, Role::kOutput);
  const BufferId a = step.NewAllocated({Bytes(12)});
  const BufferId b = step.NewAllocated({Bytes(12)});
  const OpId op =
      step.Add({interner.Intern(compute, std::vector<Kernel>{gemm, norm}), Phase::kForward, 0});
  step.After(all_gather);
  step.Use(full, AccessMode::kRead, Role::kParameter);
  step.Use(a, AccessMode::kWrite, Role::kOutput);
  step.UseFirst(b, Bytes(4), AccessMode::kReadWrite, Role::kWorkspace, 1);
  step.Free(full, 1U << static_cast<unsigned>(Stream::kCompute));
  step.Add({interner.Intern(wait), Phase::kForward, kNoSubject, 0, 1});
  step.After(op);
  step.Alloc(buffer, PointKind::kAllocOnce);
  step.Free(a);
  step.Free(b);
  step.SetCarry(0, op);
  step.Finish();
  return program;
}

TEST_CASE("Print: golden text") {
  // Written by hand from the program above.
  CHECK(Print(TinyProgram()) ==
        R"(program fsdp2: shard 4, replicate 1, micro_batch 2 x 1
group shard: size 4, stride 1
unit root: elements 14, padded 16, shard 4
  param 0: shard offset 0, unsharded offset 0, padded 16
buffer parameter_shard@init/root.init.initialize: 16 B, owner compute
buffer model_buffer@init/root.init.initialize: 8 B, owner compute, on host, zeros
buffer all_gather@mb0.root.fwd.all_gather: 64 B, owner gather
buffer temporary@mb0.lin.fwd: 12 B, owner compute
buffer temporary@mb0.lin.fwd#1: 12 B, owner compute
body init: 1 ops
  alloc parameter_shard@init/root.init.initialize
  alloc model_buffer@init/root.init.initialize
  root.init.initialize [compute, fp32]
    write parameter 0: parameter_shard@init/root.init.initialize, 16 B
body warmup: 0 ops
body step: 3 ops
  alloc all_gather@mb0.root.fwd.all_gather
  mb0.root.fwd.all_gather [gather, group shard, 64 B, bf16]
    after carry 0
    read input 0: parameter_shard@init/root.init.initialize, 16 B
    write output 0: all_gather@mb0.root.fwd.all_gather, 64 B
  alloc temporary@mb0.lin.fwd
  alloc temporary@mb0.lin.fwd#1
  mb0.lin.fwd [compute, bf16]
    after mb0.root.fwd.all_gather
    read parameter 0: all_gather@mb0.root.fwd.all_gather, 64 B
    write output 0: temporary@mb0.lin.fwd, 12 B
    update workspace 1: temporary@mb0.lin.fwd#1, 4 B
    kernel gemm bf16 1 x (2, 3, 4): 48 flop, reads 40 B, writes 12 B
    kernel norm fp32: 0 flop, reads 0 B, writes 0 B
  free all_gather@mb0.root.fwd.all_gather, recorded compute
  mb0.fwd.host_wait#1 [host, bf16]
    after mb0.lin.fwd
  alloc_once model_buffer@init/root.init.initialize
  free temporary@mb0.lin.fwd
  free temporary@mb0.lin.fwd#1
  carry 0 = mb0.lin.fwd
)");
}

TEST_CASE("PrintSummary: golden text") {
  CHECK(PrintSummary(TinyProgram()) ==
        R"(program fsdp2: shard 4, replicate 1, micro_batch 2 x 1
buffers parameter_shard: 1, 16 B in all
buffers all_gather: 1, 64 B in all
buffers temporary: 2, 24 B in all
buffers model_buffer: 1, 8 B in all
init: 1 ops, 0 edges, 1 accesses, 2 memory points
  stream compute: 1 ops
warmup: 0 ops, 0 edges, 0 accesses, 0 memory points
step: 3 ops, 3 edges, 5 accesses, 7 memory points
  stream host: 1 ops
  stream compute: 1 ops
  stream gather: 1 ops
  group shard: 1 all_gather, 64 B
)");
}

TEST_CASE("Print, PrintSummary: what repeats") {
  Program program;
  ShapeInterner interner(program);
  BodyBuilder step(program, program.step);
  for (std::uint16_t layer = 0; layer < 3; ++layer) {
    step.MarkLayer();
    step.Add({interner.Intern({}), Phase::kForward, kNoSubject, 0, layer});
  }
  step.Finish();
  CHECK(Print(program).find("  repeat from mb0.fwd: 3 x 1 ops\n") != std::string::npos);
  CHECK(PrintSummary(program).find("  repeat: 3 x 1 ops from op 0\n") != std::string::npos);
}

TEST_CASE("Print: equal programs give equal text, different ones do not") {
  CHECK(Print(RandomProgram(3)) == Print(RandomProgram(3)));
  CHECK(Print(RandomProgram(3)) != Print(RandomProgram(4)));
}

TEST_CASE("Print: a new op adds its own lines and changes no other, though all ids shift") {
  Program program = TinyProgram();
  std::string expected = Print(program);
  Op op = program.step.ops[0];  // without edges, accesses and points: the next op begins there, too
  op.occurrence = 9;
  program.step.ops.insert(program.step.ops.begin(), op);
  for (Edge& edge : program.step.edges) {
    edge = edge.is_carried() ? edge : Edge{edge.value + 1};
  }
  program.step.carries[0] = OpId(program.step.carries[0].value + 1);
  const std::string header = "body step: 3 ops\n";
  expected.replace(expected.find(header), header.size(),
                   "body step: 4 ops\n"
                   "  mb0.root.fwd.all_gather#9 [gather, group shard, 64 B, bf16]\n");
  CHECK(Print(program) == expected);
}

TEST_CASE("BufferName: unused buffers, ends of bodies") {
  Program program;
  program.buffers.resize(2);
  program.buffers[1].category = Category::kInput;
  program.init.points = {{BufferId(1), PointKind::kAlloc, 0}};
  CHECK(BufferName(program, BufferId(0)) == "temporary@never#0");
  CHECK(BufferName(program, BufferId(1)) == "input@init/end");
}

}  // namespace
}  // namespace shardwright
