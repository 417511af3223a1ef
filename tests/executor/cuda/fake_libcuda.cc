// A libcuda.so.1 without a GPU, as far as cuDNN asks it while it makes plans: code is loaded
// nowhere, and kernels in it are found. Everything else is missing.

#include <cstddef>

namespace {
constexpr int kSuccess = 0;
constexpr int kNotFound = 500;  // CUDA_ERROR_NOT_FOUND
int some_object = 0;
int kernel_count = 0;
}  // namespace

extern "C" {

// How many kernels have been looked up since the last call.
int FakeLibcudaKernels() {
  const int count = kernel_count;
  kernel_count = 0;
  return count;
}

int cuInit(unsigned /*flags*/) {
  return kSuccess;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
int cuGetProcAddress_v2(const char* /*name*/, void** function, int /*version*/,
                        unsigned long long /*flags*/, void* /*status*/) {
  *function = nullptr;
  return kNotFound;
}
int cuGetProcAddress(const char* /*name*/, void** function, int /*version*/,
                     unsigned long long /*flags*/) {
  *function = nullptr;
  return kNotFound;
}
int cuGetExportTable(const void** table, const void* /*id*/) {
  *table = nullptr;
  return kNotFound;
}
int cuGetErrorName(int /*error*/, const char** text) {
  *text = "an error of the fake libcuda";
  return kSuccess;
}
int cuGetErrorString(int error, const char** text) {
  return cuGetErrorName(error, text);
}
int cuDeviceGetCount(int* count) {
  *count = 1;  // otherwise code is not loaded before it runs
  return kSuccess;
}

int cuLibraryLoadData(void** library) {
  *library = &some_object;
  return kSuccess;
}
int cuLibraryGetKernel(void** kernel, void* /*library*/, const char* /*name*/) {
  ++kernel_count;
  *kernel = &some_object;
  return kSuccess;
}
int cuLibraryUnload(void* /*library*/) {
  return kSuccess;
}
int cuKernelSetAttribute() {
  return kSuccess;
}
int cuKernelGetAttribute(int* value) {
  *value = 0;
  return kSuccess;
}

// cuDNN wants to find these as well.
#define SW_NOTHING(name) \
  int name() {           \
    return kSuccess;     \
  }
SW_NOTHING(cuCtxGetCurrent)
SW_NOTHING(cuCtxGetLimit)
SW_NOTHING(cuCtxPopCurrent)
SW_NOTHING(cuCtxPushCurrent)
SW_NOTHING(cuDeviceGet)
SW_NOTHING(cuLaunchCooperativeKernel)
SW_NOTHING(cuLaunchKernel)
SW_NOTHING(cuLaunchKernelEx)
SW_NOTHING(cuLibraryLoadFromFile)
SW_NOTHING(cuLinkAddData)
SW_NOTHING(cuLinkComplete)
SW_NOTHING(cuLinkCreate)
SW_NOTHING(cuLinkDestroy)
SW_NOTHING(cuOccupancyMaxPotentialClusterSize)
SW_NOTHING(cuStreamGetCtx)
#undef SW_NOTHING
}
