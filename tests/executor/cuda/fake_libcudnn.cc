// A libcudnn that has all functions and was built for a CUDA of which no library is installed.

#include <cstddef>

extern "C" {
std::size_t cudnnGetVersion() {
  return 91900;
}
std::size_t cudnnGetCudartVersion() {
  return 99000;
}
#define SW_REFUSED(name) \
  int name() {           \
    return 1001;         \
  }
SW_REFUSED(cudnnCreate)
SW_REFUSED(cudnnDestroy)
SW_REFUSED(cudnnSetStream)
SW_REFUSED(cudnnGetErrorString)
SW_REFUSED(cudnnGetLastErrorString)
SW_REFUSED(cudnnBackendCreateDescriptor)
SW_REFUSED(cudnnBackendDestroyDescriptor)
SW_REFUSED(cudnnBackendSetAttribute)
SW_REFUSED(cudnnBackendGetAttribute)
SW_REFUSED(cudnnBackendFinalize)
SW_REFUSED(cudnnBackendExecute)
#undef SW_REFUSED
}
