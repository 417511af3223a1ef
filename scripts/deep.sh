#!/usr/bin/env bash
# The long checks, run by hand before a release and after a change of the spine: every header alone,
# the deep tests in the release build (60 random mutants among them), a minute of damaged files per reader of foreign files and of
# settings, the table of how costs grow, 10^8 inputs of libFuzzer in sum (FUZZ_INPUTS), every ci test under AddressSanitizer and
# UndefinedBehaviorSanitizer, the threaded tests under ThreadSanitizer, and clang-tidy with the
# path-sensitive analyzer. Record the last lines, with the machine, in bench/log/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=$(nproc)

scripts/install-deps.sh --ci
scripts/install-deps.sh --web
cmake --preset release
cmake --build --preset release -j "$jobs"
cmake --build --preset release -j "$jobs" --target all_verify_interface_header_sets
scripts/web.sh
# Without what torchtitan needs to run; the test reads its settings' classes alone.
scripts/install-python.sh
for version in 0.2.2 0.3.0; do
  build/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "build/torchtitan-$version" \
    "torchtitan==$version" tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.1
done
# Lightning; what else it needs is there.
build/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/frameworks \
  lightning==2.6.6 lightning_utilities==0.15.3 torchmetrics==1.9.0
# More published networks that the exporter is tried on.
build/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/networks \
  diffusers==0.42.1 pillow==13.0.0 importlib_metadata==10.2.0 zipp==4.1.2
ctest --preset deep --no-tests=ignore -j "$jobs"
build/tests/traces/sw_foreign_fuzz_test 60s
build/tests/planner/sw_settings_fuzz_test 60s
python3 bench/growth.py build/shardwright
scripts/fuzz.sh --inputs "${FUZZ_INPUTS:-100000000}"

# With the checks that double the time to compile, which .ci/run leaves out.
cmake --preset debug-asan-ubsan -DSHARDWRIGHT_BENCH=OFF \
  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
cmake --build --preset debug-asan-ubsan -j "$jobs"
ctest --test-dir build-asan -L '^ci$' --output-on-failure -j "$jobs"
build-asan/tests/traces/sw_foreign_fuzz_test 60s

cmake --preset tsan -DSHARDWRIGHT_BENCH=OFF
cmake --build --preset tsan -j "$jobs"
ctest --preset tsan --no-tests=ignore -j "$jobs"

scripts/tidy.sh --analyzer

echo "deep: passed in ${SECONDS} s on ${jobs} cores, $(date -u +%Y-%m-%d), commit $(git rev-parse HEAD)"
