// Names of GPUs as drivers, clouds and shops write them: the right card and count, or a refusal.

#include "topologies/gpu_names.h"

#include <string>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "topologies/cluster.h"

namespace shardwright {
namespace {

struct Meant {
  const char* spec;
  const char* gpu;
  std::int64_t gpus = 1, nodes = 1;
};

// As nvidia-smi, PyTorch, lspci, rocm-smi, clouds, schedulers and shops write them.
const std::vector<Meant> kMeant = {
    // nvidia-smi -L and torch.cuda.get_device_name
    {"Tesla V100-SXM2-16GB", "v100-16"},
    {"Tesla V100-SXM2-32GB", "v100-32"},
    {"Tesla V100-SXM3-32GB", "v100-32"},
    {"Tesla V100-PCIE-16GB", "v100-pcie-16"},
    {"Tesla V100-PCIE-32GB", "v100-pcie-32"},
    {"Tesla V100S-PCIE-32GB", "v100s-pcie-32"},
    {"Tesla P100-PCIE-16GB", "p100-pcie-16"},
    {"Tesla P100-PCIE-12GB", "p100-pcie-12"},
    {"Tesla P100-SXM2-16GB", "p100-16"},
    {"Tesla T4", "t4"},
    {"NVIDIA A100-SXM4-40GB", "a100-40"},
    {"A100-SXM4-40GB", "a100-40"},
    {"NVIDIA A100-SXM4-80GB", "a100-80"},
    {"NVIDIA A100-SXM-64GB", "a100-64"},
    {"NVIDIA A100-PCIE-40GB", "a100-pcie-40"},
    {"NVIDIA A100 80GB PCIe", "a100-pcie-80"},
    {"NVIDIA A800-SXM4-80GB", "a800-80"},
    {"NVIDIA A800-SXM4-40GB", "a800-40"},
    {"NVIDIA A800 80GB PCIe", "a800-pcie-80"},
    {"NVIDIA A800-PCIE-80GB", "a800-pcie-80"},
    {"NVIDIA A800 40GB Active", "a800-pcie-40"},
    {"NVIDIA A10", "a10"},
    {"NVIDIA A10G", "a10g"},
    {"NVIDIA A16", "a16"},
    {"NVIDIA A30", "a30"},
    {"NVIDIA A40", "a40"},
    {"NVIDIA L4", "l4"},
    {"NVIDIA L20", "l20"},
    {"NVIDIA L40", "l40"},
    {"NVIDIA L40S", "l40s"},
    {"NVIDIA H100 80GB HBM3", "h100-80"},
    {"NVIDIA H100 80GB HBM2e", "h100-pcie-80"},
    {"NVIDIA H100 PCIe", "h100-pcie-80"},
    {"NVIDIA H100 NVL", "h100-nvl-94"},
    {"NVIDIA H800", "h800-80"},
    {"NVIDIA H800 PCIe", "h800-pcie-80"},
    {"NVIDIA H20", "h20-96"},
    {"NVIDIA H20-3e", "h20-141"},
    {"NVIDIA H200", "h200-141"},
    {"NVIDIA H200 NVL", "h200-nvl-141"},
    {"NVIDIA GH200 480GB", "gh200-96"},
    {"NVIDIA GH200 120GB", "gh200-96"},
    {"NVIDIA GH200 144G HBM3e", "gh200-141"},
    {"NVIDIA B200", "b200-180"},
    {"NVIDIA B300 SXM6 AC", "b300-288"},
    {"NVIDIA GB200", "gb200-186"},
    {"NVIDIA GB300", "gb300-288"},
    {"NVIDIA GB10", "gb10"},
    {"NVIDIA TITAN RTX", "titan-rtx"},
    {"Quadro RTX 8000", "quadro-rtx-8000"},
    {"Quadro RTX 6000", "quadro-rtx-6000"},
    {"NVIDIA RTX A4000", "rtx-a4000"},
    {"NVIDIA RTX A4500", "rtx-a4500"},
    {"NVIDIA RTX A5000", "rtx-a5000"},
    {"NVIDIA RTX A6000", "rtx-a6000"},
    {"NVIDIA RTX 4000 Ada Generation", "rtx-4000-ada"},
    {"NVIDIA RTX 4500 Ada Generation", "rtx-4500-ada"},
    {"NVIDIA RTX 5000 Ada Generation", "rtx-5000-ada"},
    {"NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"},
    {"NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"},
    {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"},
    {"NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"},
    {"NVIDIA GeForce RTX 3070", "rtx-3070"},
    {"NVIDIA GeForce RTX 3080", "rtx-3080-10"},
    {"NVIDIA GeForce RTX 3080 Ti", "rtx-3080-ti"},
    {"NVIDIA GeForce RTX 3090", "rtx-3090"},
    {"NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"},
    {"NVIDIA GeForce RTX 4070", "rtx-4070"},
    {"NVIDIA GeForce RTX 4070 Ti", "rtx-4070-ti"},
    {"NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"},
    {"NVIDIA GeForce RTX 4080", "rtx-4080"},
    {"NVIDIA GeForce RTX 4080 SUPER", "rtx-4080-super"},
    {"NVIDIA GeForce RTX 4090", "rtx-4090"},
    {"NVIDIA GeForce RTX 4090 D", "rtx-4090-d"},
    {"NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"},
    {"NVIDIA GeForce RTX 5080", "rtx-5080"},
    {"NVIDIA GeForce RTX 5090", "rtx-5090"},
    // rocm-smi, lspci
    {"AMD Instinct MI210", "mi210"},
    {"AMD Instinct MI250", "mi250"},
    {"AMD Instinct MI250X", "mi250x"},
    {"AMD Instinct MI250X/MI250", "mi250x"},
    {"AMD Instinct MI300X", "mi300x"},
    {"AMD Instinct MI300X OAM", "mi300x"},
    {"AMD Instinct MI325X", "mi325x"},
    {"AMD Instinct MI350X", "mi350x"},
    {"AMD Instinct MI355X", "mi355x"},
    {"AMD INSTINCT MI250 (MCM) OAM AC MBA", "mi250"},
    {"Advanced Micro Devices, Inc. [AMD/ATI] Aqua Vanjaram [Instinct MI300X] (rev 00)", "mi300x"},
    {"Advanced Micro Devices, Inc. [AMD/ATI] Aqua Vanjaram [Instinct MI300X]", "mi300x"},
    {"3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)", "h100-80"},
    {"NVIDIA Corporation GA100 [A100 PCIe 40GB]", "a100-pcie-40"},
    {"NVIDIA Corporation GV100GL [Tesla V100 PCIe 32GB]", "v100-pcie-32"},
    {"NVIDIA Corporation AD102 [GeForce RTX 4090]", "rtx-4090"},
    // counts before and behind
    {"NVIDIA A100-PCIE-40GB x8", "a100-pcie-40", 8},
    {"8x NVIDIA A100-PCIE-40GB", "a100-pcie-40", 8},
    {"8 x NVIDIA H100 PCIe", "h100-pcie-80", 8},
    {"NVIDIA H100 PCIe (8)", "h100-pcie-80", 8},
    {"NVIDIA H100 PCIe (x8)", "h100-pcie-80", 8},
    {"NVIDIA H100 PCIe (8x)", "h100-pcie-80", 8},
    {"NVIDIA RTX PRO 6000 Blackwell Server Edition x8", "rtx-pro-6000", 8},
    {"8x NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000", 8},
    {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition x2", "rtx-pro-6000", 2},
    {"NVIDIA RTX PRO 6000 Blackwell Server Edition x8, host 1 TiB", "rtx-pro-6000", 8},
    {"RTX 6000 Pro x4", "rtx-pro-6000", 4},
    {"TITAN RTX x2", "titan-rtx", 2},
    {"NVIDIA TITAN RTX x2", "titan-rtx", 2},
    {"2x TITAN RTX", "titan-rtx", 2},
    {"NVIDIA GeForce RTX 4090 x8", "rtx-4090", 8},
    {"8 x GeForce RTX 4090", "rtx-4090", 8},
    {"4090 x2", "rtx-4090", 2},
    {"4090x2", "rtx-4090", 2},
    {"2 4090", "rtx-4090", 2},
    {"2x 3090 Ti", "rtx-3090-ti", 2},
    {"2xRTX4070TI", "rtx-4070-ti", 2},
    {"4 x RTX 2080Ti", "rtx-2080-ti", 4},
    {"8*H100", "h100-80", 8},
    {"8 \xc3\x97 H100", "h100-80", 8},
    {"H100 \xc3\x97 8", "h100-80", 8},
    {"H100 x 8", "h100-80", 8},
    {"8 H100", "h100-80", 8},
    {"8 H100 GPUs", "h100-80", 8},
    {"8 H100s", "h100-80", 8},
    {"H100 (8 GPUs)", "h100-80", 8},
    {"H100 94GB x2", "h100-nvl-94", 2},
    {"Tesla P100 x2", "p100-pcie-16", 2},
    {"DGX A100 80GB", "a100-80", 8},
    {"GB300 NVL72", "gb300-288", 72},
    {"p5e.48xlarge", "h200-141", 8},
    {"ND96asr_v4", "a100-40", 8},
    {"8 GPUs H100", "h100-80", 8},
    {"8x(H100)", "h100-80", 8},
    {"2xA100", "a100-80", 2},
    {"8x 80GB A100", "a100-80", 8},
    {"8x80GB A100", "a100-80", 8},
    {"A100 80 GB x8", "a100-80", 8},
    {"A100-80GBx8", "a100-80", 8},
    {"A100 (80GB) x4", "a100-80", 4},
    {"A100 40G x8", "a100-40", 8},
    {"A100 PCIe 40GB x2", "a100-pcie-40", 2},
    {"AMD Instinct MI300X x8", "mi300x", 8},
    {"8x AMD Instinct MI300X OAM", "mi300x", 8},
    {"MI325X (8)", "mi325x", 8},
    {"Tesla V100-PCIE-32GB x4", "v100-pcie-32", 4},
    {"V100 32GB PCIe x4", "v100-pcie-32", 4},
    {"4xTesla P100-PCIE-16GB", "p100-pcie-16", 4},
    {"NVIDIA A10 x4", "a10", 4},
    {"4x A16", "a16", 4},
    {"L20 x8", "l20", 8},
    {"8 x L40S 48GB", "l40s", 8},
    {"H20-3e x8", "h20-141", 8},
    {"H20 141GB x8", "h20-141", 8},
    {"B200 192GB x8", "b200-180", 8},
    {"RTX A5000 x4", "rtx-a5000", 4},
    {"A6000 x4", "rtx-a6000", 4},
    {"Quadro RTX 8000 x2", "quadro-rtx-8000", 2},
    {"RTX 3080 12GB", "rtx-3080-12"},
    {"2x8 H100, nic 4x200 Gbit/s", "h100-80", 8, 2},
    {"2 nodes of 8 H100, nic 4x200 Gbit/s", "h100-80", 8, 2},
    {"16x NVIDIA H100 80GB HBM3, nic 8x400 Gbit/s", "h100-80", 8, 2},
    {"2x DGX Spark, nic 200 Gbit/s", "gb10", 1, 2},
    {"NVIDIA DGX H100", "h100-80", 8},
    {"2x NVIDIA DGX H100", "h100-80", 8, 2},
    {"DGX B200", "b200-180", 8},
    {"GB200 NVL72", "gb200-186", 72},
    {"HGX H100 x8", "h100-80", 8},
    // clouds, schedulers, shops
    {"nvidia-tesla-t4", "t4"},
    {"nvidia-tesla-v100", "v100-16"},
    {"nvidia-tesla-a100", "a100-40"},
    {"nvidia-a100-80gb", "a100-80"},
    {"nvidia-h100-80gb", "h100-80"},
    {"nvidia-h100-mega-80gb", "h100-80"},
    {"nvidia-h200-141gb", "h200-141"},
    {"NVIDIA-A100-SXM4-80GB", "a100-80"},
    {"NVIDIA-H100-80GB-HBM3", "h100-80"},
    {"gpu_8x_h100_sxm5", "h100-80", 8},
    {"gpu_8x_a100_80gb_sxm4", "a100-80", 8},
    {"gpu_1x_gh200", "gh200-96"},
    {"gpu_4x_a6000", "rtx-a6000", 4},
    {"A100-80GB:8", "a100-80", 8},
    {"H100:8", "h100-80", 8},
    {"gpu:h100:4", "h100-80", 4},
    {"RTX6000-Ada:2", "rtx-6000-ada", 2},
    {"A100_PCIE", "a100-pcie-80"},
    {"A100_SXM4", "a100-80"},
    {"RTX_4090", "rtx-4090"},
    {"RTX 6000Ada", "rtx-6000-ada"},
    {"Q RTX 8000", "quadro-rtx-8000"},
    {"A100 SXM 80GB", "a100-80"},
    {"H100 SXM5 80GB", "h100-80"},
    {"Hopper H100", "h100-80"},
    {"NVIDIA H100 Tensor Core GPU", "h100-80"},
    {"4x p5.48xlarge", "h100-80", 8, 4},
    {"p3.16xlarge", "v100-16", 8},
    {"a2-highgpu-4g", "a100-40", 4},
    {"Standard_ND96isr_H100_v5", "h100-80", 8},
};

TEST_CASE("GpuNames: what drivers, clouds and shops write is that card and count") {
  for (const Meant& meant : kMeant) {
    CAPTURE(std::string(meant.spec));
    const Cluster cluster = LoadCluster(meant.spec);
    CHECK(cluster.gpu.name == meant.gpu);
    CHECK(cluster.gpus_per_node == meant.gpus);
    CHECK(cluster.node_count == meant.nodes);
  }
}

std::string ErrorOf(const std::string& spec) {
  try {
    return "no error, but " + LoadCluster(spec).gpu.name;
  } catch (const InputError& error) {
    return error.what();
  }
}

// Right parts of another card are no card: the message says what there is, or why there is none.
TEST_CASE("GpuNames: what is another card is refused with the way on") {
  const char* const kSlice = "slices of a GPU (MIG) are not modelled";
  const char* const kMakers = "only GPUs of NVIDIA and AMD are modelled";
  const char* const kLaptop = "laptop and Max-Q parts are slower";
  const char* const kOld = "GPUs older than Volta are not modelled";
  const char* const kAnother = "a cluster file may describe another one";
  for (const auto& [spec, why] : std::vector<std::pair<const char*, const char*>>{
           {"NVIDIA H100 SXM5 64GB", "the catalog has of that name h100-80, h100-96, h100-pcie-80"},
           {"H100 SXM5 64GB x8", "the catalog has of that name h100-80"},
           {"A100 48GB", "the catalog has of that name a100-40, a100-80"},
           {"AMD H100", "the catalog has of that name h100-80"},
           {"NVIDIA MI300X", "the catalog has of that name mi300x"},
           {"L40S SXM", "the catalog has of that name l40s"},
           {"NVIDIA L40 NVL", "the catalog has of that name l40"},
           {"RTX 6000", "quadro-rtx-6000, rtx-6000-ada, rtx-pro-6000"},
           {"RTX 3090 Super", "the catalog has of that name rtx-3090"},
           {"8x RTX 4080S", "did you mean \"rtx-4080\"?"},
           {"Intel Data Center GPU Max 1550", kMakers},
           {"MI250X 128GB", "the catalog has of that name mi250x"},
           {"H100 8", "write the count as \"x8\", or the memory as \"8GB\"; the catalog has"},
           {"h100-80 foo x8", "a GPU and a count such as"},
           {"NVIDIA GeForce RTX 4060 x2", kAnother},
           {"NVIDIA RTX PRO 4000 Blackwell SFF Edition", "rtx-4000-ada"},
           {"AMD Radeon RX 7900 XTX", kAnother},
           {"AMD Instinct MI308X", kAnother},
           {"NVIDIA A2", kAnother},
           {"NVIDIA A100-SXM4-80GB MIG 1g.10gb", kSlice},
           {"NVIDIA A100-SXM4-80GB-MIG-3g.40gb x2", kSlice},
           {"NVIDIA GeForce RTX 4090 Laptop GPU", kLaptop},
           {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", kLaptop},
           {"GRID A100-40C", "virtual GPUs"},
           {"AMD Instinct MI300X VF", "virtual GPUs"},
           {"NVIDIA GeForce GTX 1080 Ti", kOld},
           {"Tesla K80", kOld},
           {"Tesla P40", kOld},
           {"gaudi2", kMakers},
           {"8x Gaudi 3", kMakers},
           {"Intel Gaudi2 x8", kMakers},
           {"tpu-v5p", kMakers},
           {"trn2.48xlarge", kMakers},
           {"M2 Max", kMakers},
           {"Apple M3 Ultra", kMakers},
           {"Ascend 910B x8", kMakers},
           {"cpu", "\"host\""},
           {"DGX-H100 x8 H200", "h100-80"}}) {
    CAPTURE(std::string(spec));
    const std::string error = ErrorOf(spec);
    CAPTURE(error);
    CHECK(error.find(why) != std::string::npos);
  }
}

TEST_CASE("GpuNames: a suggestion is of the same kind and near, or none") {
  for (const auto& [spec, hint] :
       std::vector<std::pair<const char*, const char*>>{{"dgx-h10", "did you mean \"dgx-h100\"?"},
                                                        {"dgx-h200x", "did you mean \"dgx-h200\"?"},
                                                        {"something-else-entirely", ""},
                                                        {"p9", ""},
                                                        {"l5", ""},
                                                        {"m7", ""},
                                                        {"gpu", ""}}) {
    CAPTURE(std::string(spec));
    const std::string error = ErrorOf(spec);
    CAPTURE(error);
    const std::size_t at = error.find("did you mean");
    CHECK((at == error.npos ? "" : error.substr(at)) == hint);
  }
}

// Each PCI id and each name of the catalog is that card; no row of the names is unknown there.
TEST_CASE("GpuNames: the catalog's own names are themselves") {
  for (const GpuSpec& gpu : GpuCatalog()) {
    CAPTURE(gpu.name);
    CHECK(ReadGpuName(gpu.name).gpu == gpu.name);
    CHECK(ReadGpuName(gpu.name).assumed.empty());
    CHECK(LoadCluster(gpu.name).gpu.name == gpu.name);
    CHECK(LoadCluster(gpu.name + " x1").gpus_per_node == 1);
  }
  CHECK(GpuOfPciDevice("20f1") == "a100-pcie-40");
  CHECK(GpuOfProduct("NVIDIA A100-PCIE-40GB x8") == "");  // a driver names one card
}

TEST_CASE("GpuNames: what the words leave open is said") {
  CHECK(ReadGpuName("2xA100").assumed ==
        "GPU: a100-80 of a100-80, a100-40, a100-pcie-80, a100-pcie-40, which it may be");
  CHECK(ReadGpuName("A100 80GB").assumed == "");
  CHECK(ReadGpuName("8xH100").assumed == "");
}

// A maker's PCIe card has no NVLink, whoever wrote its name.
TEST_CASE("GpuNames: a PCIe card is never one with NVLink") {
  for (const Meant& meant : kMeant) {
    const std::string spec = meant.spec;
    if (spec.find("PCI") != std::string::npos) {
      CAPTURE(spec);
      CHECK(!LoadCluster(spec).gpu.scale_up);
    }
  }
}

}  // namespace
}  // namespace shardwright
