#!/usr/bin/env bash
# Writes bench/accuracy.md: predictions against published runs, bad rows included.
#
#   scripts/accuracy.sh [BUILD]     BUILD is a build folder (default build)
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 -B scripts/accuracy.py "${1:-build}/shardwright" bench/published bench/accuracy.md
