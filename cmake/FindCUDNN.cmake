# Finds cuDNN's header and library: CUDNN_ROOT or CUDNN_HOME, the CUDA toolkit, NVIDIA's Debian packages (libcudnn9-cuda-13,
# libcudnn9-dev-cuda-13), or the wheel nvidia-cudnn-cu12 or -cu13 of the Python environment that is active or in build/venv.
#
# Sets CUDNN_FOUND, CUDNN_VERSION, CUDNN_INCLUDE_DIR and CUDNN_LIBRARY. Nothing links it: the program loads it when a run has a
# GPU. So the header serves to check our declarations, the library's path as the last place to look at run time.
set(cudnn_wheels)
foreach(environment "$ENV{VIRTUAL_ENV}" "$ENV{CONDA_PREFIX}" "${PROJECT_SOURCE_DIR}/build/venv")
  if(environment)
    file(GLOB cudnn_found "${environment}/lib/python3*/site-packages/nvidia/cudnn")
    list(APPEND cudnn_wheels ${cudnn_found})
  endif()
endforeach()
set(cudnn_places ENV CUDNN_HOME ${cudnn_wheels} ENV CUDA_HOME /usr/local/cuda)
# The declarations used are in this header of cuDNN 9.
find_path(CUDNN_INCLUDE_DIR cudnn_graph.h HINTS ${cudnn_places} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} PATH_SUFFIXES include)
# Wheels have the soname only.
find_library(CUDNN_LIBRARY NAMES libcudnn.so.9 HINTS ${cudnn_places} PATH_SUFFIXES lib lib64)
if(CUDNN_INCLUDE_DIR)
  file(STRINGS "${CUDNN_INCLUDE_DIR}/cudnn_version.h" cudnn_lines REGEX "^#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) ")
  string(REGEX REPLACE "[^;]* ([0-9]+)" "\\1" cudnn_numbers "${cudnn_lines}")
  list(JOIN cudnn_numbers "." CUDNN_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUDNN REQUIRED_VARS CUDNN_INCLUDE_DIR VERSION_VAR CUDNN_VERSION)
mark_as_advanced(CUDNN_INCLUDE_DIR CUDNN_LIBRARY)
