#pragma once

// How a kernel is written once and runs twice: as CUDA code on a GPU, and as plain loops on the
// CPU, where tests compare every kernel with exact arithmetic although there is no GPU.
//
// A kernel is a function of a Block. Work of the threads stands in Each(f): f(t) runs for every
// thread t, and nobody goes on before all have ended (a __syncthreads on the GPU, a finished loop
// on the CPU). A value that a thread keeps from one Each to the next is a PerThread; values for
// other threads lie in Shared memory. Warps work together in EachWarp (matrix tiles). No kernel
// communicates in another way, and none uses atomics, so every sum has one order.
//
// Example, the largest of 256 numbers and then their distance to it:
//   PerThread<float> x;
//   block.Each([&](int t) { x[t] = Load(args.x, t); });
//   const float largest = BlockMax(block, scratch, x);
//   block.Each([&](int t) { Store(args.y, t, largest - x[t]); });
// On a GPU x is one register of each of 256 threads, and Each ends with a barrier. On the CPU x is
// an array of 512 numbers, and Each is a loop over t.
//
// Why one order of sums matters: in fp32 (1e8 + 1) - 1e8 is 0, but (1e8 - 1e8) + 1 is 1. With
// atomics the order changes from run to run, and a repeated training step would differ in its last
// bits.

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define SW_DEVICE __device__ __forceinline__
#define SW_UNROLL _Pragma("unroll")
#define SW_NO_UNROLL _Pragma("unroll 1")
#else
#define SW_DEVICE inline
#define SW_UNROLL
#define SW_NO_UNROLL
#endif

namespace shardwright::gpu {

inline constexpr int kMaxThreads = 512;
inline constexpr int kWarp = 32;

#if defined(__CUDACC__)

template <class T>
class PerThread {
 public:
  SW_DEVICE T& operator[](int /*thread*/) { return value_; }
  SW_DEVICE const T& operator[](int /*thread*/) const { return value_; }

 private:
  T value_{};
};
template <class T>
using PerWarp = PerThread<T>;

class Block {
 public:
  SW_DEVICE explicit Block(std::byte* shared) : shared_(shared) {}
  [[nodiscard]] SW_DEVICE std::int64_t index() const { return blockIdx.x; }
  [[nodiscard]] SW_DEVICE std::int64_t count() const { return gridDim.x; }
  [[nodiscard]] SW_DEVICE int threads() const { return static_cast<int>(blockDim.x); }
  [[nodiscard]] SW_DEVICE int warps() const { return threads() / kWarp; }
  template <class F>
  SW_DEVICE void Each(const F& f) const {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  template <class F>
  SW_DEVICE void EachWarp(const F& f) const {
    f(static_cast<int>(threadIdx.x) / kWarp);
    __syncthreads();
  }
  SW_DEVICE void Sync() const { __syncthreads(); }
  template <class T>
  SW_DEVICE T* Shared(std::int64_t n) {
    T* const piece = reinterpret_cast<T*>(shared_ + used_);
    used_ += (n * static_cast<std::int64_t>(sizeof(T)) + 127) / 128 * 128;
    return piece;
  }

 private:
  std::byte* shared_;
  std::int64_t used_ = 0;
};

#else

template <class T>
class PerThread {
 public:
  T& operator[](int thread) { return values_[thread]; }
  const T& operator[](int thread) const { return values_[thread]; }

 private:
  T values_[kMaxThreads] = {};
};
template <class T>
class PerWarp {
 public:
  T& operator[](int warp) { return values_[warp]; }

 private:
  T values_[kMaxThreads / kWarp] = {};
};

class Block {
 public:
  Block(std::byte* shared, std::int64_t index, std::int64_t count, int threads)
      : shared_(shared), index_(index), count_(count), threads_(threads) {}
  [[nodiscard]] std::int64_t index() const { return index_; }
  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] int threads() const { return threads_; }
  [[nodiscard]] int warps() const { return threads_ / kWarp; }
  template <class F>
  void Each(const F& f) const {
    for (int t = 0; t < threads_; ++t) {
      f(t);
    }
  }
  template <class F>
  void EachWarp(const F& f) const {
    for (int w = 0; w < warps(); ++w) {
      f(w);
    }
  }
  void Sync() const {}
  template <class T>
  T* Shared(std::int64_t n) {
    T* const piece = reinterpret_cast<T*>(shared_ + used_);
    used_ += SharedBytes(n, sizeof(T));
    return piece;
  }
  [[nodiscard]] std::int64_t used() const { return used_; }

 private:
  [[nodiscard]] static std::int64_t SharedBytes(std::int64_t n, std::size_t size) {
    return (n * static_cast<std::int64_t>(size) + 127) / 128 * 128;
  }

  std::byte* shared_;
  std::int64_t index_, count_;
  int threads_;
  std::int64_t used_ = 0;
};

#endif

// Bytes that Shared<T>(n) takes; the host adds these up for a launch. Example: 100 floats take 400
// bytes, rounded up to 512. The emulated GPU refuses a launch with fewer bytes than its kernel
// takes.
template <class T>
[[nodiscard]] constexpr std::int64_t SharedSize(std::int64_t n) {
  return (n * static_cast<std::int64_t>(sizeof(T)) + 127) / 128 * 128;
}

#if defined(__CUDACC__)

// One value of all threads of the block, a multiple of 32: first in each warp, every lane with its
// neighbours, then over the warps in order. `scratch`: one T per thread.
template <class T, class F>
SW_DEVICE T BlockFold(const Block& block, T* scratch, const PerThread<T>& values, const F& fold) {
  const int thread = static_cast<int>(threadIdx.x);
  T value = values[thread];
  SW_UNROLL
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fold(value, __shfl_xor_sync(0xffffffffU, value, distance));
  }
  if (thread % kWarp == 0) {
    scratch[thread / kWarp] = value;
  }
  block.Sync();
  T result = scratch[0];
  for (int warp = 1; warp < block.warps(); ++warp) {
    result = fold(result, scratch[warp]);
  }
  block.Sync();  // before anybody writes scratch again
  return result;
}

#else

// In the same order as on a GPU.
template <class T, class F>
T BlockFold(const Block& block, T* scratch, const PerThread<T>& values, const F& fold) {
  block.Each([&](int t) { scratch[t] = values[t]; });
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    block.Each([&](int t) {
      if ((t & distance) == 0) {
        scratch[t] = scratch[t ^ distance] = fold(scratch[t], scratch[t ^ distance]);
      }
    });
  }
  T result = scratch[0];
  for (int warp = 1; warp < block.warps(); ++warp) {
    result = fold(result, scratch[warp * kWarp]);
  }
  return result;
}

#endif

// Sum and maximum over the block's threads.
template <class T>
SW_DEVICE T BlockSum(const Block& block, T* scratch, const PerThread<T>& values) {
  return BlockFold(block, scratch, values, [](T a, T b) { return a + b; });
}

template <class T>
SW_DEVICE T BlockMax(const Block& block, T* scratch, const PerThread<T>& values) {
  return BlockFold(block, scratch, values, [](T a, T b) { return b > a ? b : a; });
}

}  // namespace shardwright::gpu
