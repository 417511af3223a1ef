"""Lightning itself trains with the files that are emitted for it, as the unwrapped model does.

    python3 tests/cli/emit_frameworks_test.py SHARDWRIGHT

scripts/deep.sh puts the package into build/frameworks. Two gloo processes on the CPU.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(ROOT / "build" / "frameworks")]
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

try:
    import torch
    import transformers
    import lightning.pytorch as lightning
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

from shardwright_test_case import ShardwrightTestCase, main

LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
RANKS, STEPS, TOKENS = 2, 3, 16
TOLERANCE = 2e-5  # as in emit_torch_test.py


def build():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def samples():
    """ids[step][rank]: (1, tokens)."""
    return torch.randint(1, 61, (STEPS, RANKS, 1, TOKENS), generator=torch.Generator().manual_seed(1))


def train(model, ids):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in ids:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_lightning(rank):
    import lightning_plan

    class Module(lightning_plan.PlannedModule):
        losses = []

        def build(self):
            return build()

        def training_step(self, batch, _):
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.5)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
             "use_distributed_sampler": False, "max_epochs": 1}
    trainer = lightning.Trainer(strategy=lightning_plan.strategy(), accelerator="cpu", **lightning_plan.TRAINER, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(list(samples()[:, rank]), batch_size=None))
    return module.losses


def rank_main():
    """One process: prints the losses of its samples."""
    sys.path.insert(0, os.getcwd())
    losses = train_lightning(int(os.environ["RANK"]))
    print("losses", json.dumps(losses), flush=True)
    os._exit(0)  # gloo's threads may wait for the other process


class EmitToFrameworks(ShardwrightTestCase):

    def test_lightning(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (self.folder / "model.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
        self.succeed("plan", "--model", "model.json", "--cluster", f"a100-80 x{RANKS}, nvlink 300 GB/s", "--seq", str(TOKENS),
                     "--precision", "fp32", "--dialect", "fsdp2", "--wrap", "block", "--clip", "off", "-o", "plan.json")
        self.succeed("emit", "plan.json", "--to", "lightning", "-o", "emitted/")
        launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
                    "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
        processes = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, "--rank"], cwd=self.folder / "emitted",
                                      env={**os.environ, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(RANKS)]
        printed = [process.communicate(timeout=300) for process in processes]
        losses = []
        for output, errors in printed:
            self.assertIn("losses", output, errors)
            losses.append(json.loads(output.split("losses", 1)[1]))
        expected = train(build(), samples().flatten(1, 2))
        for step, wanted in enumerate(expected):
            mean = sum(of_rank[step] for of_rank in losses) / RANKS
            self.assertLess(abs(mean - wanted), TOLERANCE * wanted, f"{losses} instead of {expected}")


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank_main()
    main()
