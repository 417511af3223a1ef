#!/usr/bin/env bash
# clang-tidy 14 over the sources of the product, on all cores, after `cmake --preset release`; any finding fails.
#
#   scripts/tidy.sh              every check of .clang-tidy but clang-analyzer-*, which takes most of the time
#   scripts/tidy.sh --analyzer   every check
#   scripts/tidy.sh --changed REV  only sources that differ from revision REV (all of them where REV is not known)
#   scripts/tidy.sh FILE...      the named files only (may follow --analyzer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checks=('--checks=-clang-analyzer-*')
if [[ ${1:-} == --analyzer ]]; then
  checks=()
  shift
fi
changed_since=
if [[ ${1:-} == --changed ]]; then
  changed_since=$2
  shift 2
fi
if [[ ! -f build/compile_commands.json ]]; then
  echo "tidy.sh: build/compile_commands.json is missing; run cmake --preset release first" >&2
  exit 4
fi

# The sources come from the build itself, so that a file outside it cannot be half checked.
files=("$@")
if [[ ${#files[@]} -eq 0 ]]; then
  mapfile -t files < <(python3 scripts/list_sources.py build/compile_commands.json)
fi
if [[ -n $changed_since ]] && git rev-parse --quiet --verify "$changed_since^{commit}" >/dev/null; then
  mapfile -t files < <(printf '%s\n' "${files[@]}" |
    grep -Fx -f <(git diff --name-only --diff-filter=d "$changed_since" -- '*.cc') || true)
fi
if [[ ${#files[@]} -eq 0 ]]; then
  echo "clang-tidy: no source changed"
  exit 0
fi
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(nproc)" clang-tidy-14 -p build --quiet "${checks[@]}" 2> >(grep -v 'warnings generated' >&2)
echo "clang-tidy: ${#files[@]} files clean"
