#!/usr/bin/env bash
# Fits the compute numbers of the shipped profiles to the published runs again.
#
#   scripts/fit_profiles.sh DATE [BUILD]
#
# Writes <gpu>-torch.json for all stacks of PyTorch together.
#
# DATE is written into the profiles (YYYY-MM-DD). BUILD is a build folder (default build). Writes
# topologies/profiles/<gpu>-<kernel set>.json; a build afterwards makes them the shipped ones.
set -euo pipefail
cd "$(dirname "$0")/.."

date=${1:?fit_profiles.sh: no date given, expected YYYY-MM-DD}
program=${2:-build}/shardwright
runs=bench/published/measured_runs.csv

fit() {
  python3 -B bench/fit.py "$runs" --program "$program" --date "$date" -o topologies/profiles/ "$@" >/dev/null
}

# One call per framework; the sources with eight or more rows of tier A.
fit --source llmfoundry --numbers "$(tr -d ' \n' <<'LIST'
compute.gemm.bf16, compute.elementwise, compute.triton_attention_forward,
compute.triton_attention_backward, overlap.compute_sensitivity, compute.rank_spread,
compute.gemm.fp8, compute.gemm_ramp
LIST
)"
# Stacks of PyTorch share one profile per GPU, so that they differ by their kernels alone. Attention
# and norms of A100 and H100 are known from single kernels, and steps are not asked for them; nor are
# those of A100 for element-wise work, which 16 rows do not tell: without it 4.3 % off left out, 7.1
# with it.
torch=torchtitan,torchao,ibmfsdp,torchtune
few=compute.gemm.bf16,overlap.compute_sensitivity,compute.rank_spread,host.step
fit --source "$torch" --one-per-gpu --gpu-class A100 --numbers "$few"
fit --source "$torch" --one-per-gpu --gpu-class H100 --numbers "$(tr -d ' \n' <<'LIST'
compute.gemm.bf16, compute.elementwise, overlap.compute_sensitivity, compute.gemm.fp8, host.step,
compute.rank_spread, compute.fp8_rowwise
LIST
)"
fit --source "$torch" --one-per-gpu --gpu-class B200 --numbers "$(tr -d ' \n' <<'LIST'
compute.gemm.bf16, compute.elementwise, compute.attention_forward, compute.attention_backward,
compute.reduction, overlap.compute_sensitivity, compute.gemm.fp8, host.step
LIST
)"
# MI300X: products in bf16, attention's forward pass, norms and element-wise work are known from
# single kernels; of AOTriton's backward pass and fp8 of that time only a range is.
fit --source "$torch" --one-per-gpu --gpu-class MI300 --numbers "$(tr -d ' \n' <<'LIST'
compute.attention_backward, compute.gemm.fp8, compute.fp8_rowwise
LIST
)"
# Transformers and InternEvo: element-wise work, norms and attention of A100 are known from single
# kernels, too.
fit --source fmsaccel --numbers "$few"
fit --source internevo --numbers "$few"
