# Finds CUPTI's header and library: CUPTI_ROOT, the CUDA toolkit (its own folder, or extras/CUPTI as NVIDIA's packages have it),
# or the wheel nvidia-cuda-cupti (nvidia/cuda_cupti, with CUDA 13 nvidia/cu13) of the Python environment that is active or in
# build/venv.
#
# Sets CUPTI_FOUND, CUPTI_VERSION (CUPTI_API_VERSION), CUPTI_INCLUDE_DIR and CUPTI_LIBRARY. Nothing links it: a traced run on a
# GPU loads it. So the header serves to check our declarations, the library's path as the last place to look at run time.
set(cupti_wheels)
foreach(environment "$ENV{VIRTUAL_ENV}" "$ENV{CONDA_PREFIX}" "${PROJECT_SOURCE_DIR}/build/venv")
  if(environment)
    file(GLOB cupti_found "${environment}/lib/python3*/site-packages/nvidia/cu13"
      "${environment}/lib/python3*/site-packages/nvidia/cuda_cupti")
    list(APPEND cupti_wheels ${cupti_found})
  endif()
endforeach()
set(cupti_places ${cupti_wheels} ENV CUDA_HOME /usr/local/cuda)
find_path(CUPTI_INCLUDE_DIR cupti_activity.h
  HINTS ${cupti_places} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} PATH_SUFFIXES include extras/CUPTI/include)
find_library(CUPTI_LIBRARY NAMES libcupti.so.13 libcupti.so.12 cupti
  HINTS ${cupti_places} PATH_SUFFIXES lib lib64 extras/CUPTI/lib64)
if(CUPTI_INCLUDE_DIR)
  file(STRINGS "${CUPTI_INCLUDE_DIR}/cupti_version.h" CUPTI_VERSION REGEX "^#define CUPTI_API_VERSION ")
  string(REGEX REPLACE ".* ([0-9]+)" "\\1" CUPTI_VERSION "${CUPTI_VERSION}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUPTI REQUIRED_VARS CUPTI_INCLUDE_DIR VERSION_VAR CUPTI_VERSION)
mark_as_advanced(CUPTI_INCLUDE_DIR CUPTI_LIBRARY)
