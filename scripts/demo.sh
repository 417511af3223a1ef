#!/usr/bin/env bash
# Installs what is missing, builds Shardwright and predicts one training step of Llama-3-8B with PyTorch FSDP2
# on two DGX-H100 nodes: step time, throughput, memory by category, and a trace to look at. Then plans, simulates
# and really runs a small GPT on this machine's cores, as two emulated nodes, compares both op by op, and says how
# well another job is predicted with what that run told of this machine.
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

run build/shardwright plan --model scripts/tiny-gpt.json --cluster host --nodes 2 --gpus 2 --seq 64 --micro-batch 2 \
  --dialect native --precision fp32 --wrap block -o demo/small-plan.json
run build/shardwright simulate demo/small-plan.json --trace demo/small-simulated.json.gz
run build/shardwright run demo/small-plan.json --steps 8 --emulate-network --trace demo/small-measured.json.gz
run build/shardwright compare demo/small-simulated.json.gz demo/small-measured.json.gz
profile=()
if run build/shardwright calibrate demo/small-measured.json.gz -o demo/this-machine.json; then
  profile=(--profile demo/this-machine.json)
fi
run build/shardwright plan --model scripts/tiny-gpt.json --cluster host --nodes 2 --gpus 2 --seq 96 --micro-batch 4 \
  --dialect native --precision fp32 --wrap block "${profile[@]}" -o demo/other-plan.json
run build/shardwright run demo/other-plan.json --steps 8 --emulate-network --trace demo/other-measured.json.gz

cat <<'END'

Written: demo/plan.json (the complete plan) and demo/trace.json.gz (the predicted step); demo/small-*, the same for
the small GPT, predicted and measured; demo/this-machine.json, a profile with what the run told about this machine.
To see a step, open https://ui.perfetto.dev in a browser and drop demo/trace.json.gz on it;
the trace stays on your machine.
END
build/shardwright compare demo/small-simulated.json.gz demo/small-measured.json.gz --json |
  python3 -c 'import json, sys
found = json.load(sys.stdin)
print("Matched {matched:,} of {spans:,} measured spans with the simulated program.".format(**found))'
how="calibrated by the first"
[[ ${#profile[@]} -gt 0 ]] || how="not calibrated, since the first run told nothing better"
build/shardwright compare demo/other-plan.json demo/other-measured.json.gz --json |
  HOW="$how" python3 -c 'import json, os, sys
step = json.load(sys.stdin)["step_time"]
print("Another job on this machine ({how}): predicted {simulated:.1f} ms, measured {measured:.1f} ms, off by {off:+.0f} %."
      .format(how=os.environ["HOW"], simulated=1e3 * step["simulated_s"], measured=1e3 * step["measured_s"],
              off=100 * (step["simulated_s"] / step["measured_s"] - 1)))'
