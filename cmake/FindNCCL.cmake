# Finds NCCL's header and library: NCCL_ROOT or NCCL_HOME, the CUDA toolkit, Debian packages (libnccl2, libnccl-dev), or the
# wheel nvidia-nccl-cu12 or -cu13 of the Python environment that is active or in build/venv.
#
# Sets NCCL_FOUND, NCCL_VERSION, NCCL_INCLUDE_DIR and NCCL_LIBRARY. Nothing links it: the program loads it when a run has several
# GPUs. So the header serves to check our declarations, the library's path as the last place to look at run time.
set(nccl_wheels)
foreach(environment "$ENV{VIRTUAL_ENV}" "$ENV{CONDA_PREFIX}" "${PROJECT_SOURCE_DIR}/build/venv")
  if(environment)
    file(GLOB nccl_found "${environment}/lib/python3*/site-packages/nvidia/nccl")
    list(APPEND nccl_wheels ${nccl_found})
  endif()
endforeach()
set(nccl_places ENV NCCL_HOME ${nccl_wheels} ENV CUDA_HOME /usr/local/cuda)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${nccl_places} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} PATH_SUFFIXES include)
# Wheels have the soname only.
find_library(NCCL_LIBRARY NAMES libnccl.so.2 nccl HINTS ${nccl_places} PATH_SUFFIXES lib lib64)
if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" nccl_lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^;]* ([0-9]+)" "\\1" nccl_numbers "${nccl_lines}")
  list(JOIN nccl_numbers "." NCCL_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
