"""Training steps of a plan's model in PyTorch's FSDP2, eager and compiled: what `shardwright run PLAN` is compared with.

    python3 bench/pytorch_fsdp2.py PLAN.json [--steps 10] [--model CONFIG.json] [--device cpu] [--mode eager|compiled]
    torchrun --nproc-per-node 8 bench/pytorch_fsdp2.py PLAN.json

The model is Transformers' of that configuration (that of models/zoo unless --model names another), with scaled_dot_product_attention, without
dropout; blocks and the root are FSDP2 units with the plan's dtypes of masters, parameters and reductions, fused AdamW, clipping if the plan
clips. Sequence length, micro-batch and accumulation are the plan's; tokens are random. Printed per mode: the median step without the first
two, tokens per second over all ranks, and the largest memory that the allocator has handed out. On one GPU nothing is communicated.
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WARM_UPS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ZOO = pathlib.Path(__file__).resolve().parent.parent / "models" / "zoo"


def make_model(config, device, dtype):
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"), 0.0)
    settings = transformers.AutoConfig.for_model(**{**config, **no_dropout})
    settings.use_cache = False
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=dtype).train()


def blocks_of(model):
    """The longest list of modules: the layers."""
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


class Run:
    def __init__(self, plan, config, device, compiled):
        job, choices = plan["job"], plan["plan"]
        self.device, self.accumulation, self.clips = device, choices["accumulation"], job["clip_gradients"]
        model = make_model(config, device, DTYPES[job["precision"]["master"]])
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[job["precision"]["param"]], reduce_dtype=DTYPES[job["precision"]["reduce"]])
        # One GPU gathers nothing; a plan that keeps parameters is compared with PyTorch keeping them.
        reshards = any(unit["reshard"] != "never" for unit in choices["units"])
        for block in blocks_of(model):
            if compiled:
                block.compile()
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshards)
        self.model = fully_shard(model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.shape = (choices["micro_batch"], job["sequence_length"])
        self.vocabulary = model.config.vocab_size

    def step(self):
        for i in range(self.accumulation):
            self.model.set_requires_gradient_sync(i + 1 == self.accumulation)
            ids = torch.randint(self.vocabulary, self.shape, device=self.device)
            (self.model(input_ids=ids, labels=ids).loss / self.accumulation).backward()
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self, steps):
        times = []
        for _ in range(WARM_UPS + steps):
            begin = time.perf_counter()
            self.step()
            if self.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return times[WARM_UPS:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--mode", choices=("eager", "compiled"), help="one of the two; default: both")
    flags = parser.parse_args()
    if flags.device == "cuda" and not torch.cuda.is_available():
        print("skipped: PyTorch sees no GPU")
        return 77
    plan = json.loads(flags.plan.read_text())
    config = json.loads((flags.model or ZOO / f"{plan['model']['name']}.json").read_text())
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29517")):
        os.environ.setdefault(name, value)
    if flags.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if flags.device == "cuda" else "gloo")
    torch.manual_seed(1)
    for mode in (flags.mode,) if flags.mode else ("eager", "compiled"):
        run = Run(plan, config, flags.device, mode == "compiled")
        step = statistics.median(run.measure(flags.steps))
        tokens = run.accumulation * run.shape[0] * run.shape[1] * dist.get_world_size()
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if flags.device == "cuda" else ""
        if dist.get_rank() == 0:
            print(f"PyTorch {torch.__version__} FSDP2, {mode}: {step:.4f} s per step, {tokens / step:.0f} tokens/s{memory}")
        del run
        gc.collect()
        if flags.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
