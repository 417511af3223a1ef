#!/usr/bin/env bash
# Fuzzes every reader of foreign bytes (tests/fuzz/) with coverage, under AddressSanitizer and UndefinedBehaviorSanitizer, with at
# most 2 GiB and 10 seconds per input. A crash, a hang or too much memory ends it with 1; the input is kept in build-fuzz/found/.
#
#   scripts/fuzz.sh [SECONDS [READER...]]   so long per reader (10), as many at once as there are cores; all readers
#
# What it finds of new coverage stays in build-fuzz/corpus/READER, and the next run begins with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export seconds=${1:-10}
shift || true

cmake --preset fuzz >build-fuzz.log || { cat build-fuzz.log; exit 1; }
rm build-fuzz.log
cmake --build --preset fuzz -j "$(nproc)"
echo "fuzz: built after ${SECONDS} s"

fuzz() {
  local reader=$1 corpus=build-fuzz/corpus/$1 log=build-fuzz/log/$1.txt
  mkdir -p "$corpus" build-fuzz/log build-fuzz/found
  # Inputs of more than a few kB are slow to mutate and say little.
  local seeds=("$corpus" "tests/fuzz/corpus/$reader")
  case $reader in
    config) seeds+=(models/zoo tests/data/bad_models) ;;
    model) seeds+=(tests/data/models tests/data/bad_models) ;;
    cluster) seeds+=(topologies/catalog tests/data/topologies) ;;
    profile) seeds+=(topologies/profiles) ;;
  esac
  if ! "build-fuzz/tests/fuzz/${reader}_fuzz" "${seeds[@]}" -max_total_time="$seconds" -max_len=16384 \
    -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 -artifact_prefix="build-fuzz/found/$reader-" >"$log" 2>&1; then
    tail -60 "$log"
    echo "fuzz: $reader failed"
    return 1
  fi
  echo "fuzz: $reader: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, at most $(sed -n 's/^stat::peak_rss_mb: *//p' "$log") MiB"
}
export -f fuzz
if [[ $# -eq 0 ]]; then
  set -- $(sed -n 's/^sw_fuzz(\([a-z_]*\).*/\1/p' tests/fuzz/CMakeLists.txt)
fi
printf '%s\n' "$@" | xargs -P "$(nproc)" -I{} bash -c 'fuzz {}'
total=0
for reader in "$@"; do
  total=$((total + $(sed -n 's/^stat::number_of_executed_units: *//p' "build-fuzz/log/$reader.txt")))
done
rm -rf /dev/shm/shardwright-fuzz-*
echo "fuzz: $total inputs of $# readers in ${SECONDS} s"
