#include "topologies/instance_types.h"

#include <array>

namespace shardwright {
namespace {

// Host memory is what the instance has, the network what all of its GPUs share; GPUs without NVLink
// meet over PCIe. Sizes of AWS' g4dn to g6: its table of EC2 GPU instances (AWS Batch's guide),
// looked up 2026-11-28; g6e, Google's and Azure's from general knowledge.
constexpr std::array kTypes = {
    InstanceType{"a2-highgpu-8g", "a100-40 x8, host 680 GB, nic 100 Gbit/s"},
    InstanceType{"a2-ultragpu-8g", "a100-80 x8, host 1360 GB, nic 100 Gbit/s"},
    InstanceType{"a3-highgpu-8g", "a3-high"},
    InstanceType{"a3-megagpu-8g", "a3-mega"},
    InstanceType{"a3-ultragpu-8g", "a3-ultra"},
    InstanceType{"g2-standard-96", "l4 x8, host 384 GB, nic 100 Gbit/s"},
    InstanceType{"g4dn.12xlarge", "t4 x4, host 192 GiB, nic 50 Gbit/s"},
    InstanceType{"g5.12xlarge", "a10g x4, host 192 GiB, nic 40 Gbit/s"},
    InstanceType{"g5.24xlarge", "a10g x4, host 384 GiB, nic 50 Gbit/s"},
    InstanceType{"g5.48xlarge", "a10g x8, host 768 GiB, nic 100 Gbit/s"},
    InstanceType{"g6.48xlarge", "l4 x8, host 768 GiB, nic 100 Gbit/s"},
    InstanceType{"g6e.12xlarge", "l40s x4, host 384 GiB, nic 100 Gbit/s"},
    InstanceType{"g6e.24xlarge", "l40s x4, host 768 GiB, nic 200 Gbit/s"},
    InstanceType{"g6e.48xlarge", "l40s x8, host 1536 GiB, nic 4x100 Gbit/s"},
    InstanceType{"p3dn.24xlarge", "p3dn"},
    InstanceType{"p4d.24xlarge", "p4d"},
    InstanceType{"p4de.24xlarge", "p4de"},
    InstanceType{"p5.48xlarge", "p5"},
    InstanceType{"p5en.48xlarge", "p5en"},
    InstanceType{"p6-b200.48xlarge", "p6-b200"},
    InstanceType{"standard_nc48ads_a100_v4", "a100-pcie-80 x2, host 440 GiB, nic 40 Gbit/s"},
    InstanceType{"standard_nc96ads_a100_v4", "a100-pcie-80 x4, host 880 GiB, nic 80 Gbit/s"},
    InstanceType{"standard_nd96amsr_a100_v4", "ndm-a100-v4"},
    InstanceType{"standard_nd96asr_v4", "nd-a100-v4"},
    InstanceType{"standard_nd96isr_h100_v5", "nd-h100-v5"},
    InstanceType{"standard_nd96isr_mi300x_v5", "nd-mi300x-v5"},
};

}  // namespace

std::span<const InstanceType> InstanceTypes() {
  return kTypes;
}

}  // namespace shardwright
