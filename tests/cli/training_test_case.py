"""Small models to train, and what their runs leave."""

import json
import os
import pathlib
import socket
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase

# Two layers of small width on bytes: a step takes milliseconds.
TINY = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}


class Patience:
    """The time-out for runs on this machine at this load: ten times the longest silence that runs without a fault have shown."""

    def __init__(self, least):
        self.silences = [least / 10]

    def learn(self, silence):
        """A run without a fault was silent for so many seconds, from its start or from one line to the next."""
        self.silences = [*self.silences[-9:], silence]

    @property
    def seconds(self):
        return 10 * max(self.silences)

    @property
    def flag(self):
        return ("--timeout", f"{self.seconds:.0f} s")


def tensors(path):
    """The tensors of a safetensors file as {name: (dtype, shape, bytes)}, read by the format's description."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], content[8 + length:][slice(*entry["data_offsets"])])
            for name, entry in header.items()}


class TrainingTestCase(ShardwrightTestCase):
    """Plans small models and trains them."""

    def losses(self, steps):
        return [step["loss"] for step in steps]

    def assert_near(self, found, expected, where):
        self.assertEqual(len(found), len(expected), where)
        for a, b in zip(found, expected):
            self.assertAlmostEqual(a, b, delta=2e-6, msg=where)

    def plan(self, name, ranks, *flags, model=None, precision="fp32"):
        if model is None:
            (self.folder / "config.json").write_text(json.dumps(TINY))
            model = "./config.json"
        if model.endswith("json"):
            flags = (*flags, "--seq", "16")
        cluster = f"h100-80 x{ranks}, nvlink 450 GB/s"
        self.succeed("plan", "--model", model, "--cluster", cluster, "--kernel-set", "shardwright-host", "-o", name,
                     "--precision", precision, "--no-search", *flags)
        return name

    def train(self, plan, *flags):
        """The steps that a run reports."""
        code, out, err = self.run_program("run", plan, "--data", "random:100", "--json", *flags)
        self.assertEqual(code, 0, err)
        return json.loads(out)["steps"]

    def processes(self, ranks, *arguments):
        """What each of so many processes of one run writes, and its exit code."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        runs = [subprocess.Popen([shardwright_test_case.PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 cwd=self.folder,
                                 env=dict(os.environ, OPENBLAS_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(ranks),
                                          LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
                for rank in range(ranks)]
        return [(*run.communicate(timeout=300), run.returncode) for run in runs]

    def checkpoints(self, folder):
        """The names of a folder's checkpoints, and of whatever an interrupted run has left there."""
        return sorted(p.name for p in (self.folder / folder).iterdir() if p.name != ".lock")

    def export(self, folder, name="x.safetensors"):
        self.succeed("checkpoint", "export", folder, "-o", name)
        return tensors(self.folder / name)
