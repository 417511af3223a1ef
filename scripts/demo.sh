#!/usr/bin/env bash
# Installs what is missing, builds Shardwright and predicts one training step of Llama-3-8B with PyTorch FSDP2
# on two DGX-H100 nodes: step time, throughput, memory by category, and a trace to look at.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install-deps.sh
cmake --preset release
cmake --build --preset release --target shardwright -j "$(nproc)"

mkdir -p demo
run() {
  printf '\n$ %s\n' "$*"
  "$@"
}
run build/shardwright plan --model llama-3-8b --cluster dgx-h100 --nodes 2 --seq 8192 --micro-batch 1 \
  --dialect fsdp2 --recompute full --wrap block -o demo/plan.json
run build/shardwright simulate demo/plan.json --trace demo/trace.json.gz

cat <<'END'

Written: demo/plan.json (the complete plan) and demo/trace.json.gz (the predicted step).
To see the step, open https://ui.perfetto.dev in a browser and drop demo/trace.json.gz on it;
the trace stays on your machine.
END
