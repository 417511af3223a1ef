"""150 names of GPUs as drivers, clouds and shops write them: the right card and count, or refused, and never silently another card.

Names are those of nvidia-smi and rocm-smi, of price lists of AWS, Azure, Google Cloud, Lambda, RunPod, Vast, CoreWeave, OVH and Scaleway,
and of makers' data sheets. A name without a row in the catalog is to be refused.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

# "name; GPU of the catalog, or - for a refusal; GPUs of a node".
SPELLINGS = """
NVIDIA A100-SXM4-40GB; a100-40; 1
NVIDIA A100-SXM4-80GB x8; a100-80; 8
8x NVIDIA A100-SXM4-80GB; a100-80; 8
8 x NVIDIA A100 80GB SXM; a100-80; 8
A100 SXM4 80GB x 4; a100-80; 4
A100 SXM 80 GB x2; a100-80; 2
A100-80GB x8; a100-80; 8
NVIDIA A100 80GB PCIe; a100-pcie-80; 1
NVIDIA A100 80GB PCIe x4; a100-pcie-80; 4
4x A100 PCIe 80GB; a100-pcie-80; 4
A100 PCIe 40GB x2; a100-pcie-40; 2
NVIDIA A100-PCIE-40GB x8; a100-pcie-40; 8
A100-PCIE-80GB x2; a100-pcie-80; 2
2x A100-80G; a100-80; 2
a100-40gb x8; a100-40; 8
8*A100-40G; a100-40; 8
NVIDIA A100-SXM-64GB x4; a100-64; 4
A100 64GB x4; a100-64; 4
NVIDIA H100 80GB HBM3; h100-80; 1
NVIDIA H100 80GB HBM3 x8; h100-80; 8
8x NVIDIA H100 80GB HBM3; h100-80; 8
8x H100 SXM5; h100-80; 8
H100 SXM x8; h100-80; 8
H100 SXM5 80GB x8; h100-80; 8
8x H100 80GB SXM5; h100-80; 8
NVIDIA H100 Tensor Core GPU x8; h100-80; 8
NVIDIA H100 PCIe; h100-pcie-80; 1
2x NVIDIA H100 PCIe; h100-pcie-80; 2
H100 PCIe 80GB x4; h100-pcie-80; 4
NVIDIA H100 NVL; h100-nvl-94; 1
NVIDIA H100 NVL x8; h100-nvl-94; 8
H100 NVL 94GB x2; h100-nvl-94; 2
H100 SXM5 64GB x4; -; 0
H100 SXM5 94GB x4; -; 0
nvidia-h100-80gb x8; h100-80; 8
nvidia-h100-mega-80gb x8; h100-80; 8
nvidia-tesla-a100 x8; a100-40; 8
nvidia-a100-80gb x8; a100-80; 8
nvidia-l4 x4; l4; 4
nvidia-tesla-t4 x4; t4; 4
nvidia-tesla-v100 x8; v100-16; 8
nvidia-tesla-p100 x4; p100-pcie-16; 4
nvidia-h200-141gb x8; h200-141; 8
nvidia-b200 x8; b200-180; 8
NVIDIA H200 x8; h200-141; 8
NVIDIA H200; h200-141; 1
8x H200 SXM5; h200-141; 8
H200 SXM 141GB x8; h200-141; 8
8x NVIDIA H200 141GB HBM3e; h200-141; 8
NVIDIA H200 NVL x4; h200-nvl-141; 4
H200 NVL 141GB; h200-nvl-141; 1
NVIDIA H800 x8; h800-80; 8
NVIDIA H800 PCIe x4; h800-pcie-80; 4
NVIDIA H20 x8; h20-96; 8
NVIDIA H20-3e x8; h20-141; 8
8x H20 96GB; h20-96; 8
NVIDIA GH200 480GB; gh200-96; 1
NVIDIA GH200 96GB; gh200-96; 1
GH200 144GB HBM3e; gh200-141; 1
NVIDIA B200 x8; b200-180; 8
8x B200 SXM; b200-180; 8
B200 180GB x8; b200-180; 8
NVIDIA B300 x8; b300-288; 8
B300 SXM6 AC x8; b300-288; 8
NVIDIA B300 SXM6 AC; b300-288; 1
NVIDIA GB200 x4; gb200-186; 4
NVIDIA GB300 x4; gb300-288; 4
NVIDIA GB10; gb10; 1
NVIDIA A800-SXM4-80GB x8; a800-80; 8
NVIDIA A800 80GB PCIe x4; a800-pcie-80; 4
A800-SXM4-40GB x8; a800-40; 8
Tesla V100-SXM2-16GB x8; v100-16; 8
Tesla V100-SXM2-32GB x8; v100-32; 8
Tesla V100-SXM3-32GB x16; v100-32; 16
Tesla V100-PCIE-16GB x2; v100-pcie-16; 2
Tesla V100-PCIE-32GB x4; v100-pcie-32; 4
Tesla V100S-PCIE-32GB; v100s-pcie-32; 1
4x V100 32GB; v100-32; 4
Tesla P100-PCIE-16GB; p100-pcie-16; 1
Tesla P100-SXM2-16GB x4; p100-16; 4
Tesla P40 x2; -; 0
Tesla K80 x8; -; 0
Tesla M60; -; 0
Tesla T4; t4; 1
Tesla T4 x2; t4; 2
2x T4; t4; 2
NVIDIA T4 16GB; t4; 1
NVIDIA T4G; -; 0
NVIDIA L4 x8; l4; 8
L4 24GB; l4; 1
NVIDIA L40 x4; l40; 4
NVIDIA L40S x8; l40s; 8
8x L40S 48GB; l40s; 8
NVIDIA L40S-48GB x4; l40s; 4
NVIDIA L20 x8; l20; 8
NVIDIA L40G; -; 0
NVIDIA A10 x4; a10; 4
NVIDIA A10G x4; a10g; 4
4x A10G 24GB; a10g; 4
NVIDIA A16 x4; a16; 4
NVIDIA A2; -; 0
NVIDIA A30 x4; a30; 4
NVIDIA A40 x8; a40; 8
A40 48GB PCIe x2; a40; 2
NVIDIA RTX A6000 x4; rtx-a6000; 4
RTX A6000 48GB x8; rtx-a6000; 8
8x RTXA6000; rtx-a6000; 8
NVIDIA RTX A5000 x2; rtx-a5000; 2
NVIDIA RTX A4500; rtx-a4500; 1
NVIDIA RTX A4000 x4; rtx-a4000; 4
NVIDIA RTX A2000 12GB; -; 0
NVIDIA RTX 6000 Ada Generation x8; rtx-6000-ada; 8
RTX 6000 Ada 48GB x4; rtx-6000-ada; 4
NVIDIA RTX 5000 Ada Generation; rtx-5000-ada; 1
NVIDIA RTX 4000 Ada Generation x2; rtx-4000-ada; 2
NVIDIA RTX 4000 SFF Ada Generation; -; 0
NVIDIA RTX 2000 Ada Generation; -; 0
NVIDIA RTX PRO 6000 Blackwell Server Edition x8; rtx-pro-6000; 8
NVIDIA RTX PRO 6000 Blackwell Workstation Edition; rtx-pro-6000; 1
NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition; -; 0
RTX PRO 6000 x2; rtx-pro-6000; 2
NVIDIA RTX PRO 4500 Blackwell; -; 0
Quadro RTX 8000 x2; quadro-rtx-8000; 2
Quadro RTX 6000 x4; quadro-rtx-6000; 4
Quadro RTX 5000; -; 0
NVIDIA TITAN RTX x2; titan-rtx; 2
NVIDIA TITAN V; -; 0
NVIDIA GeForce RTX 4090 x8; rtx-4090; 8
8x NVIDIA GeForce RTX 4090; rtx-4090; 8
GeForce RTX 4090 24GB x2; rtx-4090; 2
NVIDIA GeForce RTX 4090 D x4; rtx-4090-d; 4
NVIDIA GeForce RTX 4090 Laptop GPU; -; 0
NVIDIA GeForce RTX 4080 SUPER; rtx-4080-super; 1
NVIDIA GeForce RTX 4070 Ti SUPER; rtx-4070-ti-super; 1
NVIDIA GeForce RTX 3090 x4; rtx-3090; 4
NVIDIA GeForce RTX 3090 Ti; rtx-3090-ti; 1
NVIDIA GeForce RTX 3080 Laptop GPU; -; 0
NVIDIA GeForce RTX 3060; -; 0
NVIDIA GeForce RTX 2080 Ti x4; rtx-2080-ti; 4
NVIDIA GeForce GTX 1080 Ti x4; -; 0
NVIDIA GeForce RTX 5090 x8; rtx-5090; 8
NVIDIA GeForce RTX 5090 D; -; 0
NVIDIA GeForce RTX 5080; rtx-5080; 1
AMD Instinct MI300X x8; mi300x; 8
8x AMD MI300X 192GB; mi300x; 8
AMD Instinct MI300X VF x8; -; 0
AMD Instinct MI300A; -; 0
AMD Instinct MI325X x8; mi325x; 8
AMD Instinct MI355X x8; mi355x; 8
AMD Instinct MI250X x4; mi250x; 4
AMD Instinct MI210; mi210; 1
AMD Instinct MI100; -; 0
AMD Radeon RX 7900 XTX; -; 0
Intel Gaudi 3 x8; -; 0
Google TPU v5e; -; 0
Apple M2 Max; -; 0
""".strip().splitlines()


class Spellings(ShardwrightTestCase):

    def test_each(self):
        self.assertGreaterEqual(len(SPELLINGS), 150)
        wrong, refused = [], []
        for line in SPELLINGS:
            name, card, count = (part.strip() for part in line.split(";"))
            code, out, err = self.run_program("plan", "--model", "gpt2", "--cluster", name, "--micro-batch", "1", "--no-search", "--json")
            if code == 0:
                cluster = json.loads(out)["plan_file"]["cluster"]["json"]
                found = f"{cluster['gpu']['name']}; {cluster['gpus_per_node']}"
                if found != f"{card}; {count}":
                    wrong.append(f"{name}: {found}, expected {card}; {count}")
            elif card != "-":
                refused.append(f"{name}: {err.strip()}")
            else:
                self.assertEqual(code, 3, name)
        self.assertEqual((wrong, refused), ([], []))


if __name__ == "__main__":
    main()
