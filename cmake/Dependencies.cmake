# The libraries Shardwright uses, all from Debian 12 packages (scripts/install-deps.sh installs them).
# Boost is found by its own config file, since CMake 3.30 and later drop their FindBoost module.
find_package(Threads REQUIRED)
find_package(ZLIB REQUIRED)
# HMAC-SHA-256: ranks prove the run's key to each other.
find_package(OpenSSL 3.0 REQUIRED COMPONENTS Crypto)
find_package(Boost 1.74 CONFIG REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(SQLite3 3.40 REQUIRED)
if(NOT TARGET SQLite3::SQLite3)  # its name since CMake 4.3
  add_library(SQLite3::SQLite3 ALIAS SQLite::SQLite3)
endif()
find_package(pugixml 1.13 CONFIG REQUIRED)
find_package(CLI11 2.1 REQUIRED)
# It writes the manual pages and completions, and runs tests.
find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter)
# Settings files of other frameworks.
find_package(yaml-cpp 0.7 REQUIRED)
find_package(tomlplusplus 3.3 CONFIG REQUIRED)
# Debian has NLopt twice, with and without C++ algorithms; either contains the C interface. Its config files set NLOPT_LIBRARIES.
find_package(NLopt 2.7 CONFIG REQUIRED)
include(D3)
if(SHARDWRIGHT_OPENBLAS AND NOT SHARDWRIGHT_WHEEL)
  find_package(OpenBLAS 0.3.21 CONFIG REQUIRED)
endif()
if(SHARDWRIGHT_TESTS)
  find_package(doctest 2.4 REQUIRED)
endif()
if(SHARDWRIGHT_BENCH)
  find_package(benchmark 1.7 REQUIRED)
endif()

# Any MPI will do that has MPI_THREAD_MULTIPLE; tested with Debian's Open MPI.
find_package(MPI QUIET COMPONENTS CXX)
if(MPI_CXX_FOUND)
  message(STATUS "MPI: ${MPI_CXX_LIBRARIES}")
else()
  message(STATUS "MPI: not found (ranks are threads)")
endif()

# The Python module is a shared object of all libraries, which are position-independent code then.
if(NOT SHARDWRIGHT_PYTHON MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "SHARDWRIGHT_PYTHON: got \"${SHARDWRIGHT_PYTHON}\", expected AUTO, ON or OFF")
endif()
if(NOT SHARDWRIGHT_PYTHON STREQUAL "OFF")
  find_package(Python3 3.10 QUIET COMPONENTS Interpreter Development.Module)
  if(Python3_Development.Module_FOUND)
    message(STATUS "Python module: for Python 3.10 and later, with the headers of ${Python3_VERSION}")
    set(CMAKE_POSITION_INDEPENDENT_CODE ON)
    # As in a program: calls within a library may be inlined.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-semantic-interposition>)
  elseif(SHARDWRIGHT_PYTHON STREQUAL "ON")
    message(FATAL_ERROR "SHARDWRIGHT_PYTHON=ON: the headers of Python 3.10 or later were not found")
  else()
    message(STATUS "Python module: no headers of Python 3.10 or later")
  endif()
endif()

# executor/cuda looks for nvcc itself; a build without it lacks libshardwright_cuda.so and nothing else.
if(NOT SHARDWRIGHT_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "SHARDWRIGHT_CUDA: got \"${SHARDWRIGHT_CUDA}\", expected AUTO, ON or OFF")
endif()
