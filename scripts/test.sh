#!/usr/bin/env bash
# Installs what is missing, builds everything and runs the fast tests. Arguments go to ctest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install-deps.sh
cmake --preset release
cmake --build --preset release -j "$(nproc)"
ctest --preset fast -j "$(nproc)" "$@"
