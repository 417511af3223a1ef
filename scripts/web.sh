#!/usr/bin/env bash
# Builds the planner as a page in a browser (docs/web.md) into build/web/: shardwright.html, which holds everything, and the same as
# site/index.html for a static server.
#
#   scripts/web.sh        needs what scripts/install-deps.sh --web installs
#
# Exit code 4 (environment) where Emscripten is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v em++ >/dev/null || [[ ! -e /usr/share/nodejs/acorn/package.json ]]; then
  echo "web.sh: Emscripten is missing; run scripts/install-deps.sh --web" >&2
  exit 4
fi
export NODE_PATH=/usr/share/nodejs  # where Debian's Emscripten finds acorn
launcher=()
if command -v ccache >/dev/null; then
  launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  export CCACHE_COMPILERTYPE=clang CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
fi
cmake -S . -B build/web -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_UNITY_BUILD=ON "${launcher[@]}" \
  -DCMAKE_TOOLCHAIN_FILE=/usr/share/emscripten/cmake/Modules/Platform/Emscripten.cmake
cmake --build build/web --target shardwright_engine -j "${SHARDWRIGHT_JOBS:-$(nproc)}"
d3=$(sed -n 's/^SHARDWRIGHT_D3:PATH=//p' build/web/CMakeCache.txt)
python3 web/assemble.py build/web "$d3" build/web/shardwright.html
mkdir -p build/web/site
cp build/web/shardwright.html build/web/site/index.html
