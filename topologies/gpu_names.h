#pragma once

// What tools call the catalog's GPUs.

#include <string>
#include <string_view>

namespace shardwright {

// The catalog's name of a product as nvidia-smi and PyTorch print it, "NVIDIA H100 80GB HBM3";
// empty for one that is not in the catalog.
[[nodiscard]] std::string GpuOfProduct(std::string_view product);

// The same of an NVIDIA GPU's PCI device id, "0x2330" or "2330".
[[nodiscard]] std::string GpuOfPciDevice(std::string_view device);

}  // namespace shardwright
