#!/usr/bin/env bash
# Builds dist/shardwright-<version>-cp310-abi3-manylinux_2_28_x86_64.whl and the sdist: program, module and package for Python 3.10 and
# later on any Linux with glibc 2.28 or later.
#
#   scripts/build-wheel.sh            both
#   scripts/build-wheel.sh --sdist    the sdist alone, in seconds
#
# On Debian 12 (x86_64), with scripts/install-deps.sh --ci, no network but apt and PyPI. The compiler is zig's clang (PyPI's ziglang),
# which links against an old glibc and brings its own C++ library; libraries that are no headers are built from Debian's sources, static.
# All of it stays in build/wheel-tools, so that a second run compiles only what changed (with ccache, if it is there).
#
# Debian's sources come with Debian's security patches. PyPI's packages must have the hashes of scripts/wheel-tools.txt. A source or
# package with an advisory of scripts/advisories.json ends the build. The wheel lists what is linked into it, with versions and
# hashes, as CycloneDX in shardwright-*.dist-info/sboms/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
work=$root/build/wheel-tools
prefix=$work/prefix
target=x86_64-linux-gnu.2.28
jobs=${JOBS:-$(nproc)}
tools=scripts/wheel-tools.txt
linked=(pugixml yaml-cpp nlopt sqlite3 zlib openssl)

say() { printf '\n=== %s\n' "$*" >&2; }

python_tools() {
  python3 scripts/advisories.py --pinned "$tools"
  if ! cmp -s "$tools" "$work/tools.txt"; then
    say "tools from PyPI"
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r "$tools"
    cp "$tools" "$work/tools.txt"
  fi
}

# zig as a compiler that CMake and make know how to call.
wrappers() {
  local zig
  zig=$("$work/venv/bin/python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
  mkdir -p "$work/bin"
  printf '#!/bin/sh\nexec "%s" cc -target %s -g0 "$@"\n' "$zig" "$target" >"$work/bin/zig-cc"
  printf '#!/bin/sh\nexec "%s" c++ -target %s -g0 "$@"\n' "$zig" "$target" >"$work/bin/zig-c++"
  printf '#!/bin/sh\nexec "%s" ar "$@"\n' "$zig" >"$work/bin/zig-ar"
  printf '#!/bin/sh\nexec "%s" ranlib "$@"\n' "$zig" >"$work/bin/zig-ranlib"
  chmod +x "$work"/bin/*
  export CC=$work/bin/zig-cc CXX=$work/bin/zig-c++ AR=$work/bin/zig-ar RANLIB=$work/bin/zig-ranlib
  export ZIG_GLOBAL_CACHE_DIR=$work/zig-cache ZIG_LOCAL_CACHE_DIR=$work/zig-cache
}

# Debian's sources with its patches, by lists of our own, since a machine seldom has deb-src lines. Writes their names, versions and
# hashes to sources.txt. A mirror may list a version that it does not have yet: then the next older one is taken, with a word.
sources() {
  rm -rf "$work/src"
  mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/src"
  local host=http://deb.debian.org key=/usr/share/keyrings/debian-archive-keyring.gpg
  printf "deb-src [signed-by=$key] $host/%s main\n" "debian bookworm" "debian bookworm-updates" "debian-security bookworm-security" \
    >"$work/apt/sources.list"
  cat >"$work/apt/apt.conf" <<END
Dir::Etc::sourcelist "$work/apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$work/apt/lists";
Dir::Cache "$work/apt/cache";
APT::Sandbox::User "root";
END
  (cd "$work/src"
   export APT_CONFIG=$work/apt/apt.conf
   apt-get -qq update
   local name version taken
   for name in "${linked[@]}"; do
     taken=
     while read -r version; do
       if apt-get -qq source "$name=$version" >"$name.log" 2>&1; then
         taken=$version
         break
       fi
       echo "build-wheel.sh: no sources of $name $version; trying an older one" >&2
     done < <(apt-cache showsrc "$name" | sed -n 's/^Version: //p' | sort --version-sort --reverse --unique)
     [[ $taken ]] || { cat "$name.log" >&2; exit 4; }
     echo "$name $taken $(sha256sum "$name"_*.dsc | cut -d' ' -f1)"
   done >sources.txt)
  python3 scripts/advisories.py --debian "$work/src/sources.txt"
}

# The folder of a Debian source: "yaml-cpp" -> yaml-cpp-0.7.0+dfsg.
unpacked() {
  local folder
  for folder in "$1"-*/debian; do
    dirname "$folder"
  done
}

cmake_library() {  # folder, options
  local folder=$1
  shift
  cmake -S "$folder" -B "$folder-build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DBUILD_SHARED_LIBS=OFF -DCMAKE_AR="$AR" -DCMAKE_RANLIB="$RANLIB" \
    -DCMAKE_CXX_SCAN_FOR_MODULES=OFF -Wno-dev "$@" >"$folder-build.log"
  cmake --build "$folder-build" -j "$jobs" --target install >>"$folder-build.log"
}

libraries() {
  [[ -e $work/libraries-are-built ]] && return
  export CMAKE_POLICY_VERSION_MINIMUM=3.5  # also for the scripts that NLopt's build runs with CMake 4
  say "libraries from Debian's sources"
  sources
  (cd "$work/src"
   mkdir -p "$prefix/lib" "$prefix/include"
   cmake_library "$(unpacked pugixml)"
   cmake_library "$(unpacked yaml-cpp)" -DYAML_CPP_BUILD_TESTS=OFF -DYAML_CPP_BUILD_TOOLS=OFF
   cmake_library "$(unpacked nlopt)" -DNLOPT_CXX=OFF -DNLOPT_PYTHON=OFF -DNLOPT_OCTAVE=OFF -DNLOPT_MATLAB=OFF -DNLOPT_GUILE=OFF -DNLOPT_SWIG=OFF \
     -DNLOPT_TESTS=OFF
   (cd "$(unpacked zlib)"
    "$CC" -O2 -fPIC -DHAVE_UNISTD_H -D_LARGEFILE64_SOURCE=1 -c adler32.c compress.c crc32.c deflate.c gzclose.c gzlib.c gzread.c gzwrite.c \
      infback.c inffast.c inflate.c inftrees.c trees.c uncompr.c zutil.c
    "$AR" rcs "$prefix/lib/libz.a" ./*.o
    cp zlib.h zconf.h "$prefix/include")
   (cd "$(unpacked sqlite3)"
    CFLAGS=-O2 ./configure --disable-shared --disable-readline --disable-tcl >configure.log
    make sqlite3.c >make.log
    "$CC" -w -O2 -fPIC -DSQLITE_OMIT_LOAD_EXTENSION -c sqlite3.c
    "$AR" rcs "$prefix/lib/libsqlite3.a" sqlite3.o
    cp sqlite3.h "$prefix/include")
   (cd "$(unpacked openssl)"  # HMAC-SHA-256 and random bytes are all that is used of it
    ./Configure linux-x86_64 no-shared no-tests no-dso no-engine no-legacy no-module no-cms no-cmp no-ct no-ts no-ocsp no-srp no-ec no-dh \
      no-dsa no-sm2 no-sm3 no-sm4 no-aria no-camellia no-idea no-seed no-bf no-cast no-rc2 no-rc4 no-rc5 no-md4 no-mdc2 no-rmd160 \
      no-whirlpool no-des no-blake2 no-siphash no-poly1305 no-chacha no-gost no-psk no-sock no-async no-scrypt --prefix="$prefix" -fPIC \
      >configure.log
    make -j "$jobs" build_generated libcrypto.a >make.log
    cp libcrypto.a "$prefix/lib"
    cp -r include/openssl "$prefix/include"))
  touch "$work/libraries-are-built"
}

# Headers of libraries that are nothing else, in a folder of their own: /usr/include has those of a newer glibc, too.
headers() {
  mkdir -p "$work/headers/x86_64-linux-gnu"
  local name version of_target
  for name in nlohmann CLI boost toml++; do
    ln -sfn "/usr/include/$name" "$work/headers/$name"
  done
  while read -r name version of_target; do
    mkdir -p "$prefix/lib/cmake/$name"
    cat >"$prefix/lib/cmake/$name/${name}Config.cmake" <<END
if(NOT TARGET $of_target)
  add_library($of_target INTERFACE IMPORTED)
  set_target_properties($of_target PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "$work/headers")
endif()
END
    cat >"$prefix/lib/cmake/$name/${name}ConfigVersion.cmake" <<END
set(PACKAGE_VERSION $version)
if(NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
END
  done <<END
nlohmann_json $(dpkg-query -W -f='${source:Upstream-Version}' nlohmann-json3-dev) nlohmann_json::nlohmann_json
CLI11 $(dpkg-query -W -f='${source:Upstream-Version}' libcli11-dev | sed 's/+.*//') CLI11::CLI11
Boost $(dpkg-query -W -f='${source:Upstream-Version}' libboost1.74-dev | sed 's/+.*//') Boost::headers
tomlplusplus $(dpkg-query -W -f='${source:Upstream-Version}' libtomlplusplus-dev | sed 's/+.*//') tomlplusplus::tomlplusplus
END
}

wheel() {
  say "the wheel"
  local launcher=()
  if command -v ccache >/dev/null; then
    export CCACHE_COMPILERTYPE=clang
    launcher=(-C cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  # zig's C++ library has what Boost 1.74 uses, but behind a name.
  export CXXFLAGS="-D_LIBCPP_ENABLE_CXX17_REMOVED_UNARY_BINARY_FUNCTION"
  export CMAKE_BUILD_PARALLEL_LEVEL=$jobs CMAKE_GENERATOR=Ninja
  rm -rf "$work/wheel"
  "$work/venv/bin/python" -m build --wheel --no-isolation --skip-dependency-check --outdir "$work/wheel" \
    -C cmake.define.CMAKE_PREFIX_PATH="$prefix" -C cmake.define.CMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF \
    -C cmake.define.OPENSSL_ROOT_DIR="$prefix" -C cmake.define.OPENSSL_USE_STATIC_LIBS=ON \
    -C cmake.define.CMAKE_AR="$AR" -C cmake.define.CMAKE_RANLIB="$RANLIB" "${launcher[@]}" .
  # The name says what auditwheel finds in the file.
  "$work/venv/bin/python" -m wheel tags --remove --platform-tag manylinux_2_28_x86_64 "$work"/wheel/*.whl
  "$work/venv/bin/auditwheel" show "$work"/wheel/*.whl | tee "$work/audit.txt" >&2
  grep -q '"manylinux_2_28_x86_64"\|manylinux_2_28' "$work/audit.txt"
  mkdir -p dist
  rm -rf "$work/unpacked"
  "$work/venv/bin/python" -m wheel unpack --dest "$work/unpacked" "$work"/wheel/*.whl
  python3 scripts/sbom.py "$work/src/sources.txt" "$tools" "$work"/unpacked/*/*.dist-info
  "$work/venv/bin/python" -m wheel pack --dest-dir dist "$work"/unpacked/*
}

# From a copy of what git knows: the build backend would walk through all of build/.
sdist() {
  say "the sdist"
  rm -rf "$work/tree"
  mkdir -p "$work/tree"
  git ls-files -z | tar --create --null --files-from=- | tar --extract --directory "$work/tree"
  "$work/venv/bin/python" -m build --sdist --no-isolation --outdir dist "$work/tree"
}

mkdir -p "$work"
python_tools
sdist
if [[ ${1:-} != --sdist ]]; then
  wrappers
  libraries
  headers
  wheel
fi
ls -l dist >&2
