#!/usr/bin/env bash
# Writes bench/accuracy.md: predictions against published runs, bad rows included.
#
#   scripts/accuracy.sh [BUILD [SOURCE...]]     BUILD is a build folder (default build)
#
# The fits to a SOURCE, such as llmfoundry (some 15 minutes of one core), are not made: their
# left-out rows stay those of the present bench/accuracy.md, which says so.
#
# Builds the program first. Fits, which take nearly all of the time, are kept in BUILD/accuracy and
# made again where a source file, a profile that fits start from, the table or the list of numbers
# has changed; whoever stops the script loses only the fits that had not ended. To make all anew,
# delete that folder.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
cmake --build "$build" --target shardwright >/dev/null
exec python3 -B scripts/accuracy.py "$build" bench/published bench/accuracy.md "${@:2}"
