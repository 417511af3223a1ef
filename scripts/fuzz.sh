#!/usr/bin/env bash
# Fuzzes every reader of foreign bytes (tests/fuzz/) with coverage, under AddressSanitizer and UndefinedBehaviorSanitizer, with at
# most 2 GiB and 10 seconds per input. A crash, a hang or too much memory ends it with 1; the input is kept in build-fuzz/found/.
#
#   scripts/fuzz.sh [--jobs N] [--seed N] [SECONDS [READER...]]        so long per reader (10); all readers
#   scripts/fuzz.sh [--jobs N] [--seed N] --inputs COUNT [READER...]   so many inputs in sum: 60 s of each reader, the rest by
#                                                           the five that were fastest, in about the same time each
#
# A reader whose inputs reach fewer than 200 edges fails, too: they are refused before they are read.
# --jobs: as many readers at once (as there are cores). --seed: each reader begins with this random number, not with the clock, so
# that a run tries what the last one tried: an old fault that chance finds is no reason to refuse a new change. What it finds of
# new coverage stays in build-fuzz/corpus/READER, and the next run begins with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=$(nproc)
inputs=
export seed=0
while [[ ${1:-} == --* ]]; do
  case $1 in
    --jobs) jobs=$2 ;;
    --seed) seed=$2 ;;
    --inputs) inputs=$2 ;;
    *) echo "usage: scripts/fuzz.sh [--jobs N] [--seed N] [SECONDS | --inputs COUNT] [READER...]" >&2; exit 2 ;;
  esac
  shift 2
done
seconds=10
if [[ -z $inputs ]]; then
  seconds=${1:-10}
  shift || true
fi
if [[ $# -eq 0 ]]; then
  set -- $(sed -n 's/^sw_fuzz(\([a-z_]*\).*/\1/p' tests/fuzz/CMakeLists.txt)
fi
if [[ -n $inputs ]]; then
  seconds=60
fi

cmake --preset fuzz >build-fuzz.log || { cat build-fuzz.log; exit 1; }
rm build-fuzz.log
cmake --build --preset fuzz -j "$(nproc)"
echo "fuzz: built after ${SECONDS} s"

fuzz() {
  local limit=$1 reader=$2
  local corpus=build-fuzz/corpus/$reader log=build-fuzz/log/$reader.txt begin=$SECONDS edges
  mkdir -p "$corpus" build-fuzz/log build-fuzz/found
  local seeds=("$corpus" "tests/fuzz/corpus/$reader") longest=4096 more=()
  case $reader in
    config) seeds+=(models/zoo tests/data/bad_models) ;;
    model) seeds+=(tests/data/models tests/data/bad_models) ;;
    cluster) seeds+=(topologies/catalog tests/data/topologies) ;;
    recordings) seeds+=(tests/fuzz/corpus/kineto tests/fuzz/corpus/nsight) ;;
    profile) seeds+=(topologies/profiles) ;;
    # Shorter ones are not whole. For the others they are slow to mutate and say little.
    chrome | manifest | nsight | plan | recordings) longest=12288 ;;
  esac
  # A folder has so many features that weighing inputs by their rarity takes as long as reading it.
  case $reader in
    checkpoint | dumps | recordings | weights) more=(-entropic=0) ;;
  esac
  if ! "build-fuzz/tests/fuzz/${reader}_fuzz" "${seeds[@]}" "$limit" "${more[@]}" -seed="$seed" -max_len="$longest" -rss_limit_mb=2048 -timeout=10 \
    -print_final_stats=1 -artifact_prefix="build-fuzz/found/$reader-" >"$log" 2>&1; then
    tail -60 "$log"
    echo "fuzz: $reader failed"
    return 1
  fi
  edges=$(sed -n 's/.*DONE.*cov: \([0-9]*\) .*/\1/p' "$log")
  if [[ $edges -lt 200 ]]; then
    echo "fuzz: $reader reached $edges edges only"
    return 1
  fi
  printf 'fuzz: %-12s %10d inputs in %5d s, %6d edges, at most %d MiB\n' "$reader" \
    "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" $((SECONDS - begin)) "$edges" \
    "$(sed -n 's/^stat::peak_rss_mb: *//p' "$log")"
}
export -f fuzz
count() { sed -n 's/^stat::number_of_executed_units: *//p' "build-fuzz/log/$1.txt"; }
total=0
# Each of the lines "LIMIT READER" of stdin, and their inputs to the total.
fuzz_all() {
  local lines
  lines=$(cat)
  xargs -P "$jobs" -L 1 bash -c 'fuzz "$@"' fuzz <<<"$lines"
  for reader in $(cut -d' ' -f2 <<<"$lines"); do
    total=$((total + $(count "$reader")))
  done
}
printf -- "-max_total_time=$seconds %s\n" "$@" >build-fuzz/readers.txt
fuzz_all <build-fuzz/readers.txt
if [[ -n $inputs && $total -lt $inputs ]]; then
  for reader in "$@"; do echo "$(count "$reader") $reader"; done | sort -rn | head -5 |
    awk -v rest=$((inputs - total)) '{ count[$2] = $1; sum += $1 }
      END { for (reader in count) printf "-runs=%d %s\n", rest * count[reader] / sum + 1, reader }' >build-fuzz/readers.txt
  fuzz_all <build-fuzz/readers.txt
fi
rm -rf /dev/shm/shardwright-fuzz-*
echo "fuzz: $total inputs of $# readers in ${SECONDS} s"
