// Rows of bench/published whose plan was worked out by hand from their columns.

#include "analysis/run_mapping.h"

#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "analysis/measured_run.h"
#include "analysis/predict_run.h"
#include "analysis/validate.h"
#include "core/error.h"
#include "models/model.h"

namespace shardwright {
namespace {

const std::vector<MeasuredRun>& Table() {
  static const std::vector<MeasuredRun> runs =
      ReadMeasuredRuns("../bench/published/measured_runs.csv");
  return runs;
}

const MeasuredRun& RowNamed(const std::string& id) {
  const auto found = std::find_if(Table().begin(), Table().end(),
                                  [&](const MeasuredRun& run) { return run.id == id; });
  REQUIRE(found != Table().end());
  return *found;
}

MappedRun Map(const std::string& id) {
  return MapRun(RowNamed(id), "auto");
}

TEST_CASE("Runs: a row of llm-foundry") {
  // MPT-30B, sequence 2048, 16 H100-80, micro-batch 10, three of them, full recomputation, DEFAULT
  // mixed precision, "unknown" network.
  const MeasuredRun& run = RowNamed("llmfoundry-024");
  CHECK(run.Source() == "llmfoundry");
  CHECK(run.step_time_s == doctest::Approx(27.1491));
  const MappedRun mapped = MapRun(run, "auto");
  REQUIRE(mapped.skipped.empty());
  const PlanFile& plan = mapped.plan;
  // The row's own count: 29,975,214,080.
  CHECK(CountParameters(plan.model.model) == 29975214080);
  CHECK(plan.cluster.gpu.name == "h100-80");
  CHECK(plan.cluster.node_count == 2);
  CHECK(plan.cluster.gpus_per_node == 8);
  CHECK(plan.plan.dialect == Dialect::kFsdp1);
  CHECK(plan.plan.backward_prefetch == BackwardPrefetch::kPost);
  CHECK(plan.plan.shard_size == 16);
  CHECK(plan.plan.micro_batch == 10);
  CHECK(plan.plan.accumulation == 3);
  CHECK(plan.plan.recompute.size() == 48);
  CHECK(plan.plan.units.size() == 49);
  CHECK(plan.job.sequence_length == 2048);
  CHECK(plan.job.global_batch == 480);
  CHECK(plan.job.precision == Precision{DType::kFp32, DType::kBf16, DType::kFp32});
  CHECK(mapped.notes ==
        std::vector<std::string>{"network not stated: 400 Gbit/s InfiniBand per GPU"});
}

TEST_CASE("Runs: FairScale before 0.4.5 has one communicator") {
  MeasuredRun run = RowNamed("fairseq-002");
  CHECK(MapRun(run, "auto").plan.profile.memory.next_communicator.value == Bytes(0));
  run.date = "2022-02";
  CHECK(MapRun(run, "auto").plan.profile.memory.next_communicator.value > Bytes(0));
}

TEST_CASE("Runs: networks are read from their text") {
  // "8x200Gb RoCE (1600 Gbps node-node)" and, for two nodes of eight, PURE mixed precision.
  const MappedRun mapped = Map("llmfoundry-253");
  REQUIRE(mapped.skipped.empty());
  CHECK(mapped.plan.cluster.network == "roce");
  CHECK(mapped.plan.job.precision == Precision{DType::kFp32, DType::kBf16, DType::kBf16});
  // "4x100Gb RoCE per node": four NICs of a node with eight GPUs.
  MeasuredRun run = RowNamed("llmfoundry-253");
  run.network = "4x100Gb RoCE per node";
  const auto nics = [](const Cluster& cluster) {
    std::vector<double> rates;
    for (const Component& component : cluster.node.components) {
      if (component.kind == ComponentKind::kNic) {
        rates.push_back(component.bandwidth.value);
      }
    }
    return rates;
  };
  CHECK(nics(MapRun(run, "auto").plan.cluster) == std::vector<double>(4, 12.5e9));
  run.network = "400Gb/s RDMA per GPU";
  CHECK(nics(MapRun(run, "auto").plan.cluster) == std::vector<double>(8, 50e9));
  run.network = "800Gbps";
  CHECK(nics(MapRun(run, "auto").plan.cluster) == std::vector<double>(8, 12.5e9));
}

TEST_CASE("Runs: which blocks are recomputed follows from HFU and MFU") {
  // ibmfsdp-003: 69 / 61 = 1.131, so 0.393 of 40 blocks: floor(40 * 0.3934) = 15.
  const MappedRun mapped = Map("ibmfsdp-003");
  REQUIRE(mapped.skipped.empty());
  CHECK(mapped.plan.plan.recompute.size() == 15);
  CHECK(mapped.plan.job.precision == Precision{DType::kFp32, DType::kBf16, DType::kBf16});
}

TEST_CASE("Runs: DeepSpeed before 2022 waits for each of its gathers") {
  // ZeRO-3 over 16 nodes of Jean Zay by the Megatron-LM that DeepSpeed ships as an example, whose
  // script keeps checkpoints on the host.
  const MappedRun mapped = Map("bigscience-016");
  REQUIRE(mapped.skipped.empty());
  const PlanFile& plan = mapped.plan;
  CHECK(plan.plan.dialect == Dialect::kZero3);
  CHECK(plan.plan.zero.overlap_comm == Overlap::kOff);
  CHECK(plan.plan.zero.prefetch_bucket == 0);
  CHECK(plan.plan.offload.activations);
  CHECK(plan.kernels.name == "megatron-1.1");
  CHECK(plan.cluster.network == "opa");
  // Lists of 64 tensors: 64 times the issue of an op (6 us) and a launch (4 us) per collective.
  const Profile base = LoadProfile(plan.profile.name);
  const auto latency = [](const Profile& profile) {
    return FindTransport(profile, "opa").protocols.front().base_latency.value.value;
  };
  CHECK((latency(plan.profile) - latency(base)) * 1e6 == doctest::Approx(640));
  MeasuredRun run = RowNamed("bigscience-016");
  run.offload = "n";
  CHECK(MapRun(run, "auto").plan.plan.offload.activations);
  run.date = "2022-05";
  CHECK(MapRun(run, "auto").plan.plan.zero == ZeroOptions{});
  // "reduce_scatter" was off by default for some weeks of 2021.
  CHECK(plan.plan.zero.gradient_reduction == GradientReduction::kAllReduce);
  CHECK(plan.plan.zero.before_deepspeed_0_6);
  for (const char* date : {"2021-03", "2021-09"}) {
    run.date = date;
    const Plan other = MapRun(run, "auto").plan.plan;
    CHECK(ScattersGradients(other));
    CHECK(other.zero.before_deepspeed_0_6);
  }
  // bigscience's script: buckets by the hidden size, the example's own AdamW; Megatron's model
  // holds the table of the embedding, which its head reads.
  CHECK(plan.plan.zero.reduce_bucket == 67'108'864);
  CHECK(plan.job.optimizer.impl == OptimizerImpl::kForLoop);
  CHECK(plan.plan.units.front().modules.size() == 2);
  CHECK(plan.plan.units.front().gap == Gap::kHold);
  CHECK(Map("blogs-009").plan.kernels.name == "megatron-2021");
  const Plan offloaded = Map("bigscience-033").plan.plan;
  CHECK(offloaded.dialect == Dialect::kZero3);
  CHECK(offloaded.zero.overlap_comm == Overlap::kOff);
  CHECK(offloaded.offload.parameters);
  CHECK(Map("bigscience-029").plan.plan.offload.optimizer);
  // Transformers' "auto" sizes are those of one hidden x hidden matrix: 8192 x 8192.
  const MappedRun hf = Map("bigscience-028");
  CHECK(hf.plan.plan.zero.reduce_bucket == 67'108'864);
  CHECK(hf.plan.plan.zero.persistence_threshold == 81'920);
  CHECK_FALSE(hf.plan.plan.offload.activations);
  CHECK(hf.plan.plan.units.front().gap == Gap::kRegather);
}

TEST_CASE("Runs: Muon and SOAP by the optimizer's name, where nothing is sharded") {
  CHECK(Map("moddednanogpt-002").plan.job.optimizer.matrices == MatrixRule::kSoap);
  CHECK(Map("moddednanogpt-003").plan.job.optimizer.matrices == MatrixRule::kMuon);
  MeasuredRun run = RowNamed("moddednanogpt-005");
  CHECK(MapRun(run, "auto").plan.job.optimizer.matrices == MatrixRule::kMuonDistributed);
  run.parallelism = "fsdp";
  const MappedRun sharded = MapRun(run, "auto");
  CHECK(sharded.plan.job.optimizer.matrices == MatrixRule::kNone);
  CHECK(std::find(sharded.notes.begin(), sharded.notes.end(),
                  "optimizer Muon(distributed)+AdamW of sharded matrices taken as AdamW") !=
        sharded.notes.end());
}

TEST_CASE("Runs: attention as the row names it, else as the stack has it") {
  MeasuredRun run = RowNamed("fairseq-002");
  CHECK(MapRun(run, "auto").plan.kernels.attention == AttentionImpl::kMaterialized);
  run.attention_kernel = "flash v2";
  CHECK(MapRun(run, "auto").plan.kernels.attention == AttentionImpl::kFlash);
  run = RowNamed("torchtitan-058");
  run.attention_kernel = "";
  CHECK(MapRun(run, "auto").plan.kernels.attention == AttentionImpl::kFlash);
  run.attention_kernel = "eager";
  CHECK(MapRun(run, "auto").plan.kernels.attention == AttentionImpl::kMaterialized);
}

TEST_CASE("Runs: whose attention, by name, stack and date") {
  MeasuredRun run = RowNamed("torchtitan-077");  // scaled_dot_product_attention, November 2025
  CHECK(MapRun(run, "auto").plan.kernels.attention == AttentionImpl::kCudnn);
  run.date = "2025-09";
  CHECK(MapRun(run, "auto").plan.kernels.attention == AttentionImpl::kFlash);
  run.attention_kernel = "cudnn";
  CHECK(MapRun(run, "auto").plan.kernels.attention == AttentionImpl::kCudnn);
  run = RowNamed("maxtext-001");
  CHECK(MapRun(run, "auto").plan.kernels.attention == AttentionImpl::kCudnn);
}

TEST_CASE("Runs: how fp8 operands are scaled") {
  const auto is_by_row = [](const char* row) {
    const KernelSetOptions kernels = MapRun(RowNamed(row), "auto").plan.kernels;
    CHECK(kernels.fp8 != Fp8Products::kNone);
    return kernels.fp8 == Fp8Products::kPerRow;
  };
  CHECK(is_by_row("torchao-003"));
  CHECK_FALSE(is_by_row("torchao-002"));  // per tensor
  CHECK_FALSE(is_by_row("torchao-006"));  // per row but for gradients of weights
}

TEST_CASE("Runs: nanoGPT was compiled before PyTorch had flash attention") {
  MeasuredRun run = RowNamed("nanogpt-001");
  const KernelSetOptions kernels = MapRun(run, "auto").plan.kernels;
  CHECK(kernels.name == "torch-compile-2023");
  CHECK(kernels.attention == AttentionImpl::kMaterialized);
  CHECK(kernels.fused_softmax);
  run.date = "2023-06";
  CHECK(MapRun(run, "auto").plan.kernels.name == "torch-compile");
}

TEST_CASE("Runs: MaxText is compiled and keeps all projections") {
  const MappedRun mapped = Map("jaxtoolbox-024");
  REQUIRE(mapped.skipped.empty());
  CHECK(mapped.plan.kernels.name == "jax-xla");
  REQUIRE(mapped.plan.plan.recompute.size() == 32);
  CHECK(mapped.plan.plan.recompute[0].kind == RecomputeKind::kSelective);
  CHECK(mapped.plan.plan.recompute[0].keep_every == 1);
}

TEST_CASE("Runs: samples of different lengths, and accelerate's accumulation") {
  // 987.156 tokens per second and GPU for 1.1792 s are 1,164 tokens, of 2 times 2 samples: 291
  // each.
  const MappedRun mapped = Map("fmsaccel-056");
  REQUIRE(mapped.skipped.empty());
  CHECK(mapped.plan.job.sequence_length == 291);
  const std::string mean = "tokens per sample not stated: their mean, by step time and throughput";
  CHECK(mapped.notes == std::vector<std::string>{mean});
  // FSDP1's no_sync keeps whole gradients: 2 bytes of 7.24e9 parameters are 13.49 GiB. With half of
  // weights and Adam's moments (6 bytes, 20.23 GiB) that is 33.72 before any activation or gathered
  // unit, where reducing each time needs 33.74 altogether (the foreach update). Published: 36.37.
  CHECK(mapped.plan.plan.accumulation == 2);
  CHECK(mapped.plan.plan.sync == SyncMode::kLast);
  const RunPrediction prediction = PredictRun(mapped.plan);
  const double gib = static_cast<double>(prediction.allocated.value) / (1024.0 * 1024.0 * 1024.0);
  CHECK(gib == doctest::Approx(36.37).epsilon(0.02));
}

TEST_CASE("Runs: outcomes take lengths that they lack from the measured run of the same job") {
  MeasuredRun run = RowNamed("fmsaccel-056");
  MeasuredRun outcome = run;  // as in a table of outcomes
  outcome.id = "oom-fmsaccel-094";
  outcome.tier.clear();
  outcome.compute_dtype.clear();
  outcome.global_batch = 0;
  outcome.step_time_s = 0;
  outcome.tokens_per_s_per_gpu = 0;
  outcome.outcome = RunOutcome::kFits;
  const auto predict = [&](const std::vector<MeasuredRun>& measured) {
    const OutOfMemoryReport report = ValidateOutcomes({outcome}, measured, {});
    CHECK(report.score.skipped + report.score.fits == 1);
    return report.rows.at(0);
  };
  const ValidatedRow row = predict({run});
  CHECK(row.skipped.empty());
  CHECK(row.notes.at(0) == "tokens per sample not stated: their mean, by step time and throughput");
  const std::string nothing =
      "seq_len: got nothing, expected tokens per sample, or the step time and throughput that "
      "tell them";
  CHECK(predict({}).skipped == nothing);
  MeasuredRun longer = run;  // of two measured runs the one with more tokens, whatever their order
  longer.step_time_s *= 2;
  const Seconds one = predict({run}).prediction.step_time;
  const Seconds other = predict({longer}).prediction.step_time;
  CHECK(other > one);
  CHECK(predict({run, longer}).prediction.step_time == other);
  CHECK(predict({longer, run}).prediction.step_time == other);
  run.micro_batch = 4;  // another job
  CHECK(predict({run}).skipped == nothing);
  longer.sequence_length = 512;  // a run of fixed length says nothing about others
  CHECK(predict({longer}).skipped == nothing);
}

TEST_CASE("Runs: GPT-2 of unknown length has as many tokens as positions") {
  MeasuredRun run = RowNamed("llmfoundry-024");
  run.sequence_length = 0;
  run.tokens_per_s_per_gpu = 0;
  run.model_name = "GPT-2 1.5B (48L,1600,16 heads)";
  const MappedRun mapped = MapRun(run, "auto");
  CHECK(mapped.plan.job.sequence_length == 1024);
  CHECK(mapped.notes.at(0) == "tokens per sample not stated: GPT-2's 1024");
}

TEST_CASE("Runs: why rows are skipped") {
  CHECK(
      Map("torchtune-002").skipped ==
      "param_dtype: got \"bf16 states (4090: 8-bit/optimizer-in-bwd recipe)\", expected states in "
      "the masters' dtype, updated after backward");
  MeasuredRun unknown = RowNamed("torchtune-005");
  unknown.gpu_class = "TPU-v3";
  CHECK(MapRun(unknown, "auto").skipped ==
        "gpu_class: got \"TPU-v3\", expected a GPU type of the catalog");
  MeasuredRun run = RowNamed("llmfoundry-024");
  run.sequence_length = 0;
  run.tokens_per_s_per_gpu = 0;
  CHECK(MapRun(run, "auto").skipped ==
        "seq_len: got nothing, expected tokens per sample, or the step time and throughput that "
        "tell them");
  run.step_time_s = 1e300;
  run.tokens_per_s_per_gpu = 1e300;  // hostile: the product is no number
  CHECK(MapRun(run, "auto").skipped ==
        "seq_len: got nothing, expected tokens per sample, or the step time and throughput that "
        "tell them");
  run = RowNamed("llmfoundry-024");
  run.data_parallel_only = false;
  CHECK(MapRun(run, "auto").skipped == "parallelism: got \"fsdp\", expected data parallelism only");
  run = RowNamed("llmfoundry-024");
  run.gpus = 12;
  CHECK(MapRun(run, "auto").skipped == "gpus: got 12, expected a multiple of gpus_per_node 8");
}

TEST_CASE("Runs: tables with mistakes") {
  CHECK_THROWS_WITH_AS((void)ParseMeasuredRuns("id,gpus\nx,1\n", "t.csv"),
                       "t.csv: line 1: got no column model_name, n_params, n_layers, hidden, "
                       "n_heads, n_kv_heads, ffn_hidden, vocab, ffn_kind, seq_len, gpu, "
                       "gpus_per_node, internode_network, parallelism, sharding_strategy, "
                       "param_dtype, optimizer, activation_checkpointing, cpu_offload, "
                       "microbatch_per_gpu, grad_accum, compiled, attention_kernel, framework, "
                       "date, expected a table of measured runs",
                       InputError);
}

// A prediction must not know where a row comes from: with other ids, sources, tiers and measured
// values the same columns give the same numbers.
TEST_CASE("Runs: ids, sources and measurements never influence a prediction") {
  std::vector<MeasuredRun> runs;
  for (const char* id : {"llmfoundry-298", "llmfoundry-103", "torchtitan-046", "fmsaccel-031",
                         "ibmfsdp-012", "internevo-010"}) {
    runs.push_back(RowNamed(id));
  }
  std::vector<MeasuredRun> shuffled = runs;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    MeasuredRun& run = shuffled[i];
    run.id = runs[(i + 1) % runs.size()].id;
    run.line = 0;
    run.tier.clear();
    run.step_time_s = 1;
    run.tokens_per_s_per_gpu = 1;
  }
  const ValidationReport given = Validate(runs, {});
  const ValidationReport other = Validate(shuffled, {});
  for (std::size_t i = 0; i < runs.size(); ++i) {
    CAPTURE(runs[i].id);
    REQUIRE(given.rows[i].skipped.empty());
    CHECK(given.rows[i].prediction.step_time.value == other.rows[i].prediction.step_time.value);
    CHECK(given.rows[i].prediction.allocated == other.rows[i].prediction.allocated);
    CHECK(given.rows[i].prediction.reserved == other.rows[i].prediction.reserved);
    CHECK(given.rows[i].profile == other.rows[i].profile);
  }
}

}  // namespace
}  // namespace shardwright
