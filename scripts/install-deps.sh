#!/usr/bin/env bash
# Installs the Debian 12 packages that Shardwright is built from, and only those that are missing.
#
#   scripts/install-deps.sh        what the build, the demo and the tests need
#   scripts/install-deps.sh --ci   the above and the tools that .ci/run and deep.sh add (clang with its sanitizers, clang-format, clang-tidy, MPI,
#                                  venv, chromium)
#   scripts/install-deps.sh --web  what the build needs, and Emscripten with Node (scripts/web.sh)
#
# Runs as root, or through sudo. Exit code 4 (environment) when packages are missing and neither works.
set -euo pipefail

packages=(
  g++
  cmake
  ninja-build
  libboost-graph-dev
  nlohmann-json3-dev
  libpugixml-dev
  libsqlite3-dev
  libssl-dev
  libcli11-dev
  libnlopt-dev
  libtomlplusplus-dev
  libyaml-cpp-dev
  libopenblas-dev
  doctest-dev
  libbenchmark-dev
  zlib1g-dev
  node-d3
  dpkg-dev
  pkg-config
  python3
)

case "${1:-}" in
  "") ;;
  --ci) packages+=(clang-14 libclang-rt-14-dev clang-format-14 clang-tidy-14 libopenmpi-dev openmpi-bin python3-dev python3-venv chromium chromium-driver) ;;
  --web) packages+=(emscripten node-acorn nodejs) ;;
  *)
    echo "install-deps.sh: got \"$1\", expected no argument, --ci or --web" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "install-deps.sh: this is no Debian system; not installing. The build needs what these packages" >&2
  echo "provide: ${packages[*]}" >&2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "install-deps.sh: missing packages, and this user is neither root nor has sudo. As root, run:" >&2
    echo "  apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 4
  fi
  as_root=(sudo)
fi

echo "Installing: ${missing[*]}"
# env, because sudo drops the variables of its caller.
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
install=("${apt[@]}" install -y --no-install-recommends "${missing[@]}")
# The package lists may be absent or old; refresh them first, but go on with the old ones when offline.
"${apt[@]}" update || echo "install-deps.sh: could not refresh the package lists; trying with the old ones" >&2
if ! "${install[@]}" >/dev/null; then
  echo "install-deps.sh: could not install ${missing[*]}; see the messages of apt-get above" >&2
  exit 4
fi
