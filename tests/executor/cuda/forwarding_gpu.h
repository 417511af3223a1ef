#pragma once

// A GPU that is another one, for tests that change what one of its functions does.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "executor/cuda/gpu.h"

namespace shardwright::testing {

class ForwardingGpu : public Gpu {
 public:
  explicit ForwardingGpu(std::unique_ptr<Gpu> gpu) : gpu_(std::move(gpu)) {}

  [[nodiscard]] const GpuInfo& Info() const override { return gpu_->Info(); }
  void MakeCurrent() override { gpu_->MakeCurrent(); }
  [[nodiscard]] std::byte* Allocate(Bytes size, bool on_host) override {
    return gpu_->Allocate(size, on_host);
  }
  [[nodiscard]] Bytes FreeMemory() override { return gpu_->FreeMemory(); }
  [[nodiscard]] GpuStream NewStream(bool high) override { return gpu_->NewStream(high); }
  [[nodiscard]] GpuEvent NewEvent(bool timed) override { return gpu_->NewEvent(timed); }
  void Record(GpuEvent event, GpuStream stream) override { gpu_->Record(event, stream); }
  void WaitFor(GpuStream stream, GpuEvent event) override { gpu_->WaitFor(stream, event); }
  [[nodiscard]] bool IsOver(GpuEvent event) override { return gpu_->IsOver(event); }
  void Synchronize(GpuEvent event) override { gpu_->Synchronize(event); }
  [[nodiscard]] SimTime Between(GpuEvent first, GpuEvent second) override {
    return gpu_->Between(first, second);
  }
  void Copy(void* to, const void* from, std::int64_t bytes, GpuStream stream) override {
    gpu_->Copy(to, from, bytes, stream);
  }
  void Fill(void* to, std::uint8_t byte, std::int64_t bytes, GpuStream stream) override {
    gpu_->Fill(to, byte, bytes, stream);
  }
  void Launch(const KernelLaunch& launch, GpuStream stream) override {
    gpu_->Launch(launch, stream);
  }
  [[nodiscard]] bool Multiply(const gpu::GemmArgs& product, void* workspace, std::int64_t bytes,
                              GpuStream stream) override {
    return gpu_->Multiply(product, workspace, bytes, stream);
  }
  [[nodiscard]] bool Attend(const gpu::AttentionArgs& args, bool is_backward, void* workspace,
                            std::int64_t bytes, GpuStream stream) override {
    return gpu_->Attend(args, is_backward, workspace, bytes, stream);
  }
  [[nodiscard]] bool Convolve(const gpu::ConvArgs& args, ConvPass pass, void* workspace,
                              std::int64_t bytes, GpuStream stream) override {
    return gpu_->Convolve(args, pass, workspace, bytes, stream);
  }

  void BeginCapture(GpuStream stream) override { gpu_->BeginCapture(stream); }
  [[nodiscard]] GpuGraph EndCapture(GpuStream stream) override { return gpu_->EndCapture(stream); }
  void DropCapture(GpuStream stream) noexcept override { gpu_->DropCapture(stream); }
  void LaunchGraph(GpuGraph graph, GpuStream stream) override { gpu_->LaunchGraph(graph, stream); }

 private:
  std::unique_ptr<Gpu> gpu_;
};

}  // namespace shardwright::testing
