"""Bytes of 8-bit optimizer states under real DeepSpeed: ours equal bitsandbytes' of the flat partitions that ZeRO hands it.

    python3 tests/schedule/torch_zero_states.py SHARDWRIGHT

Two gloo processes train a small Llama for a step on DeepSpeed's CPU accelerator: stages 1 and 2 with one flat tensor, stage 3 with
one and with several sub-groups, of which small ones stay in fp32. No embedding is told apart, since ZeRO's tensors are no module's.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", DEEPSPEED_LOG_LEVEL="error")

try:
    import bitsandbytes
    import deepspeed
    import torch
    import transformers
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

CONFIG = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 352,
          "num_key_value_heads": 2}
RANKS = 2
WHOLE = 10**9
# Stage and sub-group. Of 1 element every parameter is one: a norm's 64 stay in fp32, matrices are packed.
CASES = [(1, WHOLE), (2, WHOLE), (3, WHOLE), (3, 50000), (3, 1)]


def planned(program, folder, stage, sub_group):
    """Bytes of the states of a rank."""
    model, plan = folder / "config.json", folder / "plan.json"
    model.write_text(json.dumps({"model_type": "llama", **CONFIG}))
    subprocess.run([program, "plan", "--model", str(model), "--cluster", "dgx-a100", "--nodes", "1", "--gpus", str(RANKS), "--seq", "64",
                    "--dialect", f"zero{stage}", "--precision", "bf16-mixed", "--optimizer", "adamw_bnb_8bit", "-o", str(plan)], check=True,
                   stdout=subprocess.DEVNULL)
    document = json.loads(plan.read_text())
    if stage == 3:
        document["plan"]["zero"]["sub_group"] = sub_group
    plan.write_text(json.dumps(document))
    said = subprocess.run([program, "simulate", str(plan), "--json"], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)["memory"]["at_peak"]["optimizer_state"]


def kept(stage, sub_group):
    """Bytes that bitsandbytes keeps on this rank after a step, without its tables."""
    config = transformers.AutoConfig.for_model("llama", **CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "sub_group_size": sub_group}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    tokens = torch.zeros(1, 8, dtype=torch.long)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    return sum(value.numel() * value.element_size() for state in optimizer.state.values() for key, value in state.items()
               if torch.is_tensor(value) and "qmap" not in key)


def work(rank, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, auto_mpi_discovery=False)
    bytes_of = [kept(*case) for case in CASES]
    (pathlib.Path(folder) / f"bytes{rank}.json").write_text(json.dumps(bytes_of))


def main(arguments):
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_RANK="0")
        torch.multiprocessing.spawn(work, (name,), nprocs=RANKS)
        for rank in range(RANKS):
            for case, theirs in zip(CASES, json.loads((folder / f"bytes{rank}.json").read_text())):
                ours = planned(arguments[0], folder, *case)
                good &= ours == theirs
                print(f"rank {rank}, stage {case[0]}, sub-group {case[1]}: {ours} bytes, bitsandbytes {theirs}{'' if ours == theirs else '   <<<'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
