#!/usr/bin/env bash
# What can only be checked on a machine with an NVIDIA GPU. Needs no network: nvcc, cmake, and the packages of
# scripts/install-deps.sh, or a folder that holds their headers (SHARDWRIGHT_HEADERS=FOLDER, searched like /usr).
#
#   scripts/gpu_check.sh build      compiles what the other parts need
#   scripts/gpu_check.sh tests      every kernel and the loopback ranks against the host's arithmetic
#   scripts/gpu_check.sh kernels    speed of the kernels, as a fraction of what the memory or the matrix units could do
#   scripts/gpu_check.sh training   steps of small plans on 1, 2, 4 and 8 ranks of one GPU
#   scripts/gpu_check.sh gpus       the same on as many GPUs as there are, a process each, with NCCL
#   scripts/gpu_check.sh sanitizer  compute-sanitizer memcheck and racecheck over the kernel tests
#   scripts/gpu_check.sh            all of them, one after the other
#
# Each part ends within ten minutes on one H200's machine or is cut there. Prints one table; raw output goes to
# build-gpu/*.log. Exit code 0: everything held; 1: something did not; 4: this machine lacks something.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tree=build-gpu
limit=${SHARDWRIGHT_LIMIT:-580}
failed=0
mkdir -p "$tree"

row() { printf '%-34s %-8s %s\n' "$1" "$2" "$3"; }

# check NAME COMMAND...: runs it within the limit; its last line is the note.
check() {
  local name=$1 log="$tree/${1// /_}.log" begin=$SECONDS verdict=ok
  shift
  timeout "$limit" "$@" >"$log" 2>&1
  local code=$?
  case $code in
    0) ;;
    77) verdict=skipped ;;
    *) verdict="FAILED $code"; failed=1 ;;
  esac
  row "$name" "$verdict" "$((SECONDS - begin)) s  $(grep -v '^$' "$log" | tail -1 | cut -c1-120)"
}

need() {
  command -v "$1" >/dev/null || { echo "gpu_check.sh: no $1 on this machine" >&2; exit 4; }
}

build() {
  need nvcc
  need cmake
  local flags=(-S . -B "$tree" -DCMAKE_BUILD_TYPE=Release -DSHARDWRIGHT_CUDA=ON -DSHARDWRIGHT_BENCH=OFF)
  command -v ninja >/dev/null && flags+=(-G Ninja)
  [[ -n ${SHARDWRIGHT_HEADERS:-} ]] && flags+=("-DCMAKE_PREFIX_PATH=$SHARDWRIGHT_HEADERS")
  if ! echo 'int main(){}' | c++ -x c++ - -lopenblas -o /dev/null 2>/dev/null; then
    flags+=(-DSHARDWRIGHT_OPENBLAS=OFF)
  fi
  check "configure" cmake "${flags[@]}"
  check "compile" cmake --build "$tree" -j "$(nproc)" \
    --target shardwright shardwright_cuda sw_cuda_gpu_test sw_cuda_kernels_test sw_cuda_device_test cuda_kernels_bench
}

tests() {
  check "kernels and ranks, emulated" bash -c "cd tests && ../$tree/tests/executor/kernels/sw_cuda_kernels_test && ../$tree/tests/executor/cuda/sw_cuda_device_test"
  check "kernels and ranks, GPU" bash -c "cd tests && ../$tree/sw_cuda_gpu_test"
}

kernels() {
  check "kernel speed" "$tree/cuda_kernels_bench"
  cat "$tree/kernel_speed.log"
}

plan() {
  local ranks=$1
  check "plan for $ranks" "$tree/shardwright" plan --model gpt2 --cluster "h200-141 x$ranks, nvlink 450 GB/s" \
    --kernel-set shardwright-cuda-plain --dialect native --seq 1024 --global-batch 8 --micro-batch "$((8 / ranks))" \
    --precision bf16-mixed -o "$tree/plan$ranks.json"
}

training() {
  for ranks in 1 2 4 8; do
    plan "$ranks"
    check "training on $ranks ranks" "$tree/shardwright" run "$tree/plan$ranks.json" --device cuda \
      --loopback "$ranks" --steps 10 --trace "$tree/trace$ranks.json.gz"
  done
}

gpus() {
  local count
  count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  if [[ $count -lt 2 ]]; then
    row "training with NCCL" skipped "$count GPU"
  fi
  for ranks in 2 4 8; do
    if [[ $ranks -le $count ]]; then
      plan "$ranks"
      check "training on $ranks GPUs" "$tree/shardwright" run "$tree/plan$ranks.json" --device cuda --steps 10 \
        --trace "$tree/trace${ranks}gpus.json.gz"
    fi
  done
}

sanitizer() {
  if ! command -v compute-sanitizer >/dev/null; then
    row "compute-sanitizer" skipped "not installed"
    return
  fi
  for tool in memcheck racecheck; do
    check "compute-sanitizer $tool" bash -c \
      "cd tests && compute-sanitizer --tool $tool --error-exitcode 1 ../$tree/sw_cuda_gpu_test --test-case='HostKernels*'"
  done
}

row "what" "verdict" "time and last line"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader
case "${1:-all}" in
  build | tests | kernels | training | gpus | sanitizer) "$1" ;;
  all)
    build
    [[ $failed -eq 0 ]] && tests && kernels && training && gpus && sanitizer
    ;;
  *)
    echo "gpu_check.sh: got \"$1\", expected build, tests, kernels, training, gpus, sanitizer or nothing" >&2
    exit 2
    ;;
esac
exit "$failed"
