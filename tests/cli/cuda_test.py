"""run --device cuda on a machine without a GPU: what is wrong with the plan comes first, then what the machine lacks."""

import json
import pathlib
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 100}


class Cuda(ShardwrightTestCase):

    def plan(self, kernel_set, gpus):
        """The name of a plan file for a small transformer."""
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        name = f"{kernel_set}-{gpus}.json"
        self.succeed("plan", "--model", "config.json", "--cluster", f"h200-141 x{gpus}, nvlink 450 GB/s", "--kernel-set",
                     kernel_set, "--dialect", "native", "--seq", "16", "-o", name)
        return name

    def test_flags(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        self.assert_fails(2, "--loopback needs --device cuda", "run", plan, "--loopback", "2")
        self.assert_fails(2, "the plan has 2 ranks, and several GPUs are not there yet: --loopback 2 runs them all on one",
                          "run", plan, "--device", "cuda")
        self.assert_fails(2, "--checkpoint is not there yet for --device cuda", "run", plan, "--device", "cuda",
                          "--loopback", "2", "--checkpoint", "c")

    def test_wrong_kernel_set(self):
        self.assert_fails(3, 'plan: kernel_set: got "torch-eager", expected "shardwright-cuda-plain", the kernels that '
                          "the CUDA device has; make the plan with --kernel-set shardwright-cuda-plain",
                          "run", self.plan("torch-eager", 1), "--device", "cuda", "--data", "random:8")

    @unittest.skipIf(shutil.which("nvidia-smi"), "this machine may have a GPU")
    def test_no_gpu(self):
        code, out, err = self.run_program("run", self.plan("shardwright-cuda-plain", 1), "--device", "cuda", "--data",
                                          "random:8")
        self.assertEqual((code, out), (4, ""))
        self.assertRegex(err, "error: device cuda: (this machine has no NVIDIA driver|.*this build has no CUDA module)")


if __name__ == "__main__":
    main()
