#!/usr/bin/env bash
# What can only be checked on a machine with an NVIDIA GPU. Needs no network there. Two ways to get the programs onto it:
#
#   * build there: nvcc, cmake and the packages of scripts/install-deps.sh, or a folder that holds their headers and libraries
#     (SHARDWRIGHT_HEADERS=FOLDER, searched like /usr);
#   * build here, on any x86-64 machine with nvcc and no newer C library: `scripts/gpu_check.sh build && scripts/gpu_check.sh pack`,
#     then carry the repository with build-carry/ (about 20 MB), which the other parts use where there is no build-gpu/.
#
# Who has the machine for half an hour asks three times, ten minutes at most each, what is worth most first; who has it for longer
# goes on with the parts.
#
#   scripts/gpu_check.sh first      doctor, tests, training, schedule
#   scripts/gpu_check.sh second     profile, mfu
#   scripts/gpu_check.sh third      large, offload, kernels, gelu, graphs
#
#   scripts/gpu_check.sh build      compiles what the other parts need into build-gpu/
#   scripts/gpu_check.sh pack       copies it, with the libraries that a bare machine lacks, into build-carry/
#   scripts/gpu_check.sh doctor     what is found of the driver, the GPU and the libraries
#   scripts/gpu_check.sh tests      every kernel and the loopback ranks against the host's arithmetic
#   scripts/gpu_check.sh training   steps of GPT-2 on 1, 2, 4 and 8 ranks of one GPU
#   scripts/gpu_check.sh schedule   native, fsdp2 and fsdp1 on four ranks of one GPU, one against the other
#   scripts/gpu_check.sh profile    calibrate --device cuda; mfu and large predict with its profile, and make it if it is not there
#   scripts/gpu_check.sh mfu        steps of 1.5 and 3 billion parameters on one GPU, measured against predicted and against PyTorch
#   scripts/gpu_check.sh large      the same of 8 billion (16-bit states), and of 1.5 billion with 8,192 tokens per sample
#   scripts/gpu_check.sh offload    13 billion on one GPU with AdamW's moments on the host (104 GiB of free host memory): predicted, then run
#   scripts/gpu_check.sh kernels    speed of the kernels, as a fraction of what the memory or the matrix units could do
#   scripts/gpu_check.sh gelu       GPT-2 of 1.5 billion with GELU inside its products, and residual sums inside its norms as well,
#                                   against all of them in passes of their own
#   scripts/gpu_check.sh graphs     GPT-2 on 1 and 4 ranks of one GPU with --graphs on against off: the same bits, and how much faster
#   scripts/gpu_check.sh long       3 billion, and 8 billion with 16-bit states, with 8,192 tokens per sample
#   scripts/gpu_check.sh gpus       GPT-2 on as many GPUs as there are, a process each, with NCCL, with and without its windows
#   scripts/gpu_check.sh sanitizer  compute-sanitizer memcheck and racecheck over the kernel tests
#   scripts/gpu_check.sh hostid     GPT-2 in two processes on ONE GPU, which NCCL takes for two machines (two minutes at most)
#   scripts/gpu_check.sh            all of them but pack and hostid, one after the other
#
# Each part ends within ten minutes (SHARDWRIGHT_LIMIT, 580 seconds) or is cut there; what is left of a part is cut first, not
# the table. Several parts may be named: each has its own time, but those of first, second and third share one. A part that fails
# takes no other with it. Prints one table; raw output and the table go to the folder of the programs, traces to traces/recorded/ as
# well, and with SHARDWRIGHT_RESULTS=FOLDER all is there when the script ends: results.tar.gz, and traces.tar.gz in pieces of 15 MB
# (cat traces.tar.gz.* | tar xz). Exit code 0: everything held; 1: something did not; 4: this machine lacks something.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tree=build-gpu
[[ ! -d $tree && -d build-carry ]] && tree=build-carry
limit=${SHARDWRIGHT_LIMIT:-580}
deadline=$((SECONDS + limit))
failed=0
programs=(shardwright sw_cuda_gpu_test cuda_kernels_bench)

# Whatever is printed is kept, too.
say() { if [[ -d $tree ]]; then tee -a "$tree/table.log"; else cat; fi; }
row() { printf '%-34s %-10s %s\n' "$1" "$2" "$3" | say; }

# check NAME COMMAND...: runs it within what is left of the part's time; its last line is the note.
check() {
  local name=$1 log="$tree/${1// /_}.log" begin=$SECONDS left=$((deadline - SECONDS)) verdict=ok
  shift
  if [[ $left -lt 5 ]]; then
    row "$name" "no time" ""
    failed=1
    return 1
  fi
  timeout -k 5 "$left" "$@" >"$log" 2>&1
  local code=$?
  case $code in
    0) ;;
    77) verdict=skipped ;;
    124 | 137) verdict="cut off"; failed=1 ;;
    *) verdict="FAILED $code"; failed=1 ;;
  esac
  row "$name" "$verdict" "$((SECONDS - begin)) s  $(grep -v '^$' "$log" | tail -1 | cut -c1-120)"
  return "$code"
}

# Lines of a check's output that belong into the table.
show() { grep -hE "$2" "$tree/${1// /_}.log" 2>/dev/null | sed 's/^/    /' | cut -c1-150 | say; }

need() {
  command -v "$1" >/dev/null || { echo "gpu_check.sh: no $1 on this machine" >&2; exit 4; }
}

# The path of a program, wherever the build puts it.
program() { find "$PWD/$tree" -name "$1" -type f -perm -u+x | head -1; }

# cuBLASLt, cuDNN, NCCL and libnvrtc may lie in Python's wheels only.
libraries() {
  local wheels
  wheels=$(python3 -c 'import glob, sys
print(":".join(f for p in sys.path for f in sorted(glob.glob(p + "/nvidia/*/lib"))))' 2>/dev/null)
  export LD_LIBRARY_PATH="$PWD/$tree:$PWD/$tree/lib${wheels:+:$wheels}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

build() {
  need nvcc
  need cmake
  mkdir -p "$tree"
  # Products on the host are few and small here; OpenBLAS is the largest library by far.
  local flags=(-S . -B "$tree" -DCMAKE_BUILD_TYPE=Release -DSHARDWRIGHT_CUDA=ON -DSHARDWRIGHT_BENCH=OFF -DSHARDWRIGHT_OPENBLAS=OFF)
  command -v ninja >/dev/null && flags+=(-G Ninja)
  [[ -n ${SHARDWRIGHT_HEADERS:-} ]] && flags+=("-DCMAKE_PREFIX_PATH=$SHARDWRIGHT_HEADERS")
  check "configure" cmake "${flags[@]}" &&
    check "compile" cmake --build "$tree" -j "$(nproc)" --target shardwright_cuda "${programs[@]}"
}

pack() {
  local carry=build-carry name
  [[ $tree == build-gpu ]] || { echo "gpu_check.sh: pack needs build-gpu/: scripts/gpu_check.sh build" >&2; exit 4; }
  rm -rf "$carry"
  mkdir -p "$carry"
  for name in "${programs[@]}"; do
    cp "$(program "$name")" "$carry/" || exit 1
  done
  cp "$tree/libshardwright_cuda.so" "$carry/"
  find "$carry" -type f -exec strip {} +
  mkdir "$carry/lib"
  # Libraries of the compiler and of the C library are everywhere, in a version of their own.
  find "$carry" -type f -exec ldd {} + | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so' | xargs -r cp -t "$carry/lib"
  row "pack" ok "$(du -sh "$carry" | cut -f1) in $carry/"
}

doctor() {
  check "doctor" "$(program shardwright)" doctor
  show "doctor" 'CUDA device|cuBLASLt|cuDNN|NCCL|CUPTI'
}

tests() {
  check "kernels and ranks" env -C tests "$(program sw_cuda_gpu_test)"
  show "kernels and ranks" ' by (cuDNN|our own)|^warning|ERROR|TEST CASE'
}

# Products by our own kernels would take the whole time and tell nothing.
has_products() {
  "$(program shardwright)" doctor 2>/dev/null | grep -qE '^ *ok +cuBLASLt' && return
  row "$1" skipped "no cuBLASLt on this machine: set SHARDWRIGHT_CUBLASLT"
  return 1
}

kernels() {
  check "kernel speed" "$(program cuda_kernels_bench)"
  show "kernel speed" .
}

# gpt2 RANKS: a plan in $tree/gpt2-RANKS.json.
gpt2() {
  check "plan for $1" "$(program shardwright)" plan --model gpt2 --cluster "h200-141 x$1, nvlink 450 GB/s" \
    --kernel-set shardwright-cuda-plain --dialect native --seq 1024 --global-batch 8 --micro-batch "$((8 / $1))" \
    --precision bf16-mixed -o "$tree/gpt2-$1.json"
}

# train NAME PLAN FLAGS...: runs a plan and compares its trace with the prediction.
train() {
  local name=$1 plan=$2 trace="$tree/${1// /_}.json.gz"
  shift 2
  check "$name" "$(program shardwright)" run "$plan" --device cuda --steps 10 --trace "$trace" "$@" || return
  show "$name" 'multiprocessors|CUPTI|by cuDNN|own kernel|^NCCL|^all-gathers|^warning|throughput|^memory'
  check "$name, compared" "$(program shardwright)" compare "$plan" "$trace"
  show "$name, compared" '^(step|total|measured|simulated)'
}

training() {
  for ranks in 1 2 4 8; do
    gpt2 "$ranks" && train "GPT-2 on $ranks ranks" "$tree/gpt2-$ranks.json" --loopback "$ranks"
  done
}

# Of this card, from plans that are none of those below.
profile() {
  check "calibrate" "$(program shardwright)" calibrate --device cuda --cluster "h200-141 x1" --name this-gpu \
    -o "$tree/this-gpu.json"
  show "calibrate" 'compute\.|copy\.|host\.'
}

# beside_pytorch NAME MODEL FLAGS... (batches that fit both sides): predicted, measured, and PyTorch's own; then what the fsdp2 dialect says of PyTorch's.
beside_pytorch() {
  local name=$1 model=$2 profile=()
  shift 2
  has_products "$name" || return
  [[ -f $tree/this-gpu.json ]] || profile
  [[ -f $tree/this-gpu.json ]] && profile=(--profile "$tree/this-gpu.json")
  local plan=("$(program shardwright)" plan --model "$model" --cluster "h200-141 x1" "$@")
  check "plan $name" "${plan[@]}" --kernel-set shardwright-cuda-plain --dialect native "${profile[@]}" -o "$tree/$name.json" &&
    train "$name" "$tree/$name.json" --loopback 1
  if python3 -c 'import torch, transformers' 2>/dev/null; then
    check "PyTorch $name" python3 bench/pytorch_fsdp2.py "$tree/$name.json" --steps 5
  else
    row "PyTorch $name" skipped "no PyTorch with transformers on this machine"
  fi
  show "PyTorch $name" '^PyTorch'
  ratio "$name, ours to PyTorch eager" "$name" "PyTorch $name" eager
  ratio "$name, ours to PyTorch compiled" "$name" "PyTorch $name" compiled
  check "plan $name, fsdp2" "${plan[@]}" --kernel-set hf-eager --dialect fsdp2 -o "$tree/$name-fsdp2.json" &&
    check "simulate $name, fsdp2" "$(program shardwright)" simulate "$tree/$name-fsdp2.json"
  show "simulate $name, fsdp2" '^  (step time|tokens/s|MFU|allocated|reserved)'
}

# Tokens per second in the last line of a log that names them, with or without a word beside them.
tokens() { grep -hE "$2" "$tree/${1// /_}.log" 2>/dev/null | grep -oE '[0-9.e+]+ tokens/s' | tail -1 | cut -d' ' -f1; }
# ratio ROW CHECK CHECK [WORD]: of the throughputs that two checks printed.
ratio() {
  local ours theirs
  ours=$(tokens "$2" '^throughput')
  theirs=$(tokens "$3" "${4:-^throughput}")
  [[ -n $ours && -n $theirs ]] && row "$1" "$(awk "BEGIN {printf \"%.3f\", $ours / $theirs}")" "$ours and $theirs tokens/s"
}

mfu() {
  for name in qwen2.5-1.5b llama-3.2-3b; do
    beside_pytorch "$name" "$name" --seq 2048 --global-batch 32 --micro-batch 4 --optimizer adamw:fused
  done
}

large() {
  beside_pytorch "llama-3.1-8b" llama-3.1-8b --seq 2048 --global-batch 16 --micro-batch 2 --precision bf16 \
    --optimizer adamw:fused
  beside_pytorch "qwen2.5-1.5b-8192" qwen2.5-1.5b --seq 8192 --global-batch 8 --micro-batch 1 --optimizer adamw:fused
}

long() {
  beside_pytorch "llama-3.2-3b-8192" llama-3.2-3b --seq 8192 --global-batch 8 --micro-batch 1 --optimizer adamw:fused
  beside_pytorch "llama-3.1-8b-8192" llama-3.1-8b --seq 8192 --global-batch 4 --micro-batch 1 --precision bf16 \
    --optimizer adamw:fused
}

offload() {
  local name="13B, moments on the host" free
  has_products "$name" || return
  free=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
  if [[ $free -lt 104 ]]; then
    row "$name" skipped "needs 104 GiB of free host memory, 97 of them for the moments; there are $free"
    return
  fi
  check "plan $name" "$(program shardwright)" plan --model llama-2-13b --cluster "h200-141 x1, host $free GiB" \
    --kernel-set shardwright-cuda-plain --dialect native --seq 2048 --global-batch 8 --micro-batch 8 --recompute full --clip off \
    --optimizer adamw:fused --offload moments -o "$tree/offload.json" &&
    check "simulate $name" "$(program shardwright)" simulate "$tree/offload.json" || return
  show "simulate $name" '^  (step time|MFU|allocated|host, all GPUs)'
  train "$name" "$tree/offload.json" --loopback 1
}

# A model with GELU's tanh form, by three kernel sets.
gelu() {
  local set
  has_products "GELU in products" || return
  for set in plain gelu fused; do
    check "plan, cuda-$set" "$(program shardwright)" plan --model gpt2-xl --cluster "h200-141 x1" --dialect native \
      --kernel-set "shardwright-cuda-$set" --seq 1024 --global-batch 16 --micro-batch 8 --optimizer adamw:fused -o "$tree/xl-$set.json" &&
      train "GPT-2 XL, cuda-$set" "$tree/xl-$set.json" --loopback 1
    show "GPT-2 XL, cuda-$set" '^cuBLASLt has nothing'
  done
  ratio "GELU in products to apart" "GPT-2 XL, cuda-gelu" "GPT-2 XL, cuda-plain"
  ratio "that and sums in norms to apart" "GPT-2 XL, cuda-fused" "GPT-2 XL, cuda-plain"
}

# Without a trace, which graphs do not go with.
graphs() {
  local ranks mode name
  for ranks in 1 4; do
    gpt2 "$ranks" || continue
    for mode in off on; do
      name="graphs $mode, $ranks ranks"
      check "$name" "$(program shardwright)" run "$tree/gpt2-$ranks.json" --device cuda --loopback "$ranks" --steps 30 --graphs "$mode" \
        --json
      show "$name" '^graphs|^warning'
      grep '"loss"' "$tree/${name// /_}.log" >"$tree/losses-$mode.log"
    done
    if [[ -s $tree/losses-on.log ]] && cmp -s "$tree/losses-off.log" "$tree/losses-on.log"; then
      row "graphs, $ranks ranks, losses" ok "30 steps, the same bits"
    else
      row "graphs, $ranks ranks, losses" FAILED "they differ"
      failed=1
    fi
    row "graphs on to off, $ranks ranks" "$(awk -F'[:,]' '/"tokens_per_s"/ {rate[FILENAME] = $2; names[++n] = FILENAME}
      END {if (n == 2) printf "%.3f", rate[names[1]] / rate[names[2]]}' "$tree/graphs_on,_${ranks}_ranks.log" \
      "$tree/graphs_off,_${ranks}_ranks.log")" "tokens/s"
  done
}

schedule() {
  local dialect
  has_products "native to fsdp2" || return
  for dialect in native fsdp2 fsdp1; do
    check "plan, $dialect" "$(program shardwright)" plan --model qwen2.5-0.5b --cluster "h200-141 x4, nvlink 450 GB/s" \
      --kernel-set shardwright-cuda-plain --dialect "$dialect" --seq 2048 --global-batch 8 --micro-batch 2 \
      --precision bf16-mixed --optimizer adamw:fused -o "$tree/schedule-$dialect.json" &&
      train "4 ranks, $dialect" "$tree/schedule-$dialect.json" --loopback 4
  done
  ratio "native to fsdp2" "4 ranks, native" "4 ranks, fsdp2"
  ratio "native to fsdp1" "4 ranks, native" "4 ranks, fsdp1"
}

gpus() {
  local count
  count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  if [[ $count -lt 2 ]]; then
    row "training with NCCL" skipped "$count GPU"
  fi
  for ranks in 2 4 8; do
    if [[ $ranks -le $count ]]; then
      gpt2 "$ranks" && train "GPT-2 on $ranks GPUs" "$tree/gpt2-$ranks.json"
      NCCL_WIN_ENABLE=0 train "GPT-2 on $ranks GPUs, no windows" "$tree/gpt2-$ranks.json"
    fi
  done
}

# A process per rank, all with the one GPU: each says that it is a machine of its own, and all goes over the loopback interface.
two_processes() {
  local rank pids=() code=0
  for rank in 0 1; do
    env RANK="$rank" WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29531 NCCL_HOSTID="rank$rank" NCCL_NET=Socket \
      NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_MAX_CTAS=2 NCCL_WIN_ENABLE=0 timeout 120 "$(program shardwright)" run "$tree/gpt2-2.json" \
      --device cuda --steps 2 --timeout 60s &
    pids+=($!)
  done
  for rank in "${pids[@]}"; do
    wait "$rank" || code=$?
  done
  return "$code"
}

hostid() {
  gpt2 2
  # In this shell: `timeout` runs programs only, and every process has its own.
  two_processes >"$tree/hostid.log" 2>&1
  local code=$?
  row "two NCCL ranks on one GPU" "$([[ $code -eq 0 ]] && echo ok || echo "FAILED $code")" "$(tail -1 "$tree/hostid.log" | cut -c1-120)"
  [[ $code -eq 0 ]] || failed=1
}

sanitizer() {
  if ! command -v compute-sanitizer >/dev/null; then
    row "compute-sanitizer" skipped "not installed"
    return
  fi
  for tool in memcheck racecheck; do
    check "compute-sanitizer $tool" env -C tests compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$(program sw_cuda_gpu_test)" --test-case='HostKernels*'
  done
}

# Whatever ended the script: what was found is kept.
results() {
  local traces=("$tree"/*.json.gz)
  if [[ -f ${traces[0]} ]]; then
    mkdir -p traces/recorded
    cp "${traces[@]}" traces/recorded/
  fi
  [[ -z ${SHARDWRIGHT_RESULTS:-} || ! -d $tree ]] && return
  mkdir -p "$SHARDWRIGHT_RESULTS"
  find "$tree" -maxdepth 1 \( -name '*.log' -o -name '*.json' \) -print0 |
    tar -czf "$SHARDWRIGHT_RESULTS/results.tar.gz" --null -T -
  find "$tree" -maxdepth 1 -name '*.json.gz' -print0 | tar -cz --null -T - |
    split -b 15m - "$SHARDWRIGHT_RESULTS/traces.tar.gz."
}

# The parts of a round share the time of one.
parts_of() {
  case $1 in
    first) echo doctor tests training schedule ;;
    second) echo profile mfu ;;
    third) echo large offload kernels gelu graphs ;;
    *) echo "$1" ;;
  esac
}
all=(build doctor tests training schedule profile mfu large offload kernels gelu graphs long gpus sanitizer)

parts=("$@")
[[ ${#parts[@]} -eq 0 ]] && parts=("${all[@]}")
for part in "${parts[@]}"; do
  if [[ " ${all[*]} pack hostid first second third " != *" $part "* ]]; then
    echo "gpu_check.sh: got \"$part\", expected first, second or third, or of ${all[*]} pack hostid" >&2
    exit 2
  fi
done
trap results EXIT
row "what" "verdict" "time and last line"
libraries
gpu=$(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null)
[[ -n $gpu ]] && say <<<"$gpu"
for part in "${parts[@]}"; do
  end=$((SECONDS + limit))
  if [[ $part != build && $part != pack ]]; then
    if [[ ! -d $tree ]]; then
      echo "gpu_check.sh: neither build-gpu/ nor build-carry/ is here: scripts/gpu_check.sh build" >&2
      exit 4
    fi
    # A container may have a GPU and no nvidia-smi.
    if [[ -z $gpu ]] && ! "$(program shardwright)" doctor 2>/dev/null | grep -qE '^ *ok +CUDA device'; then
      echo "gpu_check.sh: no GPU here, shardwright doctor and nvidia-smi show none; only build and pack can be done" >&2
      exit 4
    fi
  fi
  read -ra steps <<<"$(parts_of "$part")"
  for i in "${!steps[@]}"; do
    # A minute is left for each that comes after.
    deadline=$((end - 60 * (${#steps[@]} - 1 - i)))
    "${steps[i]}"
  done
  [[ $part == build && $failed -ne 0 ]] && break
done
exit "$failed"
