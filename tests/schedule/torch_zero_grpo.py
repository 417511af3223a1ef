"""A policy's forward without gradients in front of its own, as GRPO runs it, under real DeepSpeed ZeRO-3.

    python3 tests/schedule/torch_zero_grpo.py SHARDWRIGHT

Two gloo processes train a tiny Llama on DeepSpeed's CPU accelerator for four steps, with what `emit --to deepspeed` writes for the
same plan without GRPO. Compared are order, kind, elements and dtype of every collective of the first and the last step. DeepSpeed
takes each call of the model for a pass: the second forward follows what the first one recorded, and backward forgets it.
"""

import json
import logging
import os
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch_zero_random as zero  # noqa: E402

try:
    import transformers
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

import deepspeed  # noqa: E402
import torch  # noqa: E402
from random_cases import Shardwright, Tally, attempt, compare  # noqa: E402
from torch_pool import Pools  # noqa: E402

CONFIG = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
TOKENS, STEPS = 12, 4
PLAIN = {"has_old": True, "recompute": True, "reentrant": False, "by_engine": False, "prefetch": 0, "reuse": 0, "persist": 0, "micro_batches": 1}
CASES = {
    "its own forward alone": {**PLAIN, "has_old": False, "prefetch": 2000, "reuse": 3000},
    "nothing recomputed": {**PLAIN, "recompute": False, "prefetch": 2000, "reuse": 10**6},
    "recomputed": PLAIN,
    "recomputed, used again soon": {**PLAIN, "reuse": 3000},
    "recomputed by the reentrant checkpoint, persistent": {**PLAIN, "reentrant": True, "reuse": 10**6, "prefetch": 10**6, "persist": 40},
    "micro-batches, by the engine": {**PLAIN, "by_engine": True, "persist": 40, "prefetch": 300, "micro_batches": 2},
}


def log_probabilities(model):
    ids, half = torch.arange(3, 3 + TOKENS).repeat(2, 1), TOKENS // 2
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=half + 1).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, half:, None]).squeeze(-1)


def run_case(rank, argument):
    """In a worker: the collectives of each step."""
    case, settings = argument
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # needs a compiler, and is for inference
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    keys = dict(CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)).train()
    if case["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": case["reentrant"]})
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    steps = []
    for _ in range(STEPS):
        with zero.Collectives() as recorder:
            for _ in range(case["micro_batches"]):
                old = None
                if case["has_old"]:
                    with torch.no_grad():
                        old = log_probabilities(engine if case["by_engine"] else model)
                new = log_probabilities(engine)
                engine.backward(-torch.exp(new - (new.detach() if old is None else old)).mean())
                engine.step()
        steps.append(recorder.found)
    engine.destroy()
    torch.nn.functional.linear = zero.LINEAR
    return steps


def plan_of(ours, case):
    config = pathlib.Path(ours.folder.name) / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    flags = {"model": config, "cluster": "dgx-a100", "gpus": 2, "dialect": "zero3", "seq": TOKENS, "precision": "fp32", "clip": "off",
             "mode": f"grpo,completion={TOKENS // 2},generations=2,engine={'apart' if case['has_old'] else 'trainer'}", "micro-batch": 2,
             "accumulation": case["micro_batches"], "optimizer": "adamw:foreach", "reduce-bucket": 10**9, "prefetch-bucket": case["prefetch"],
             "max-live-parameters": 10**9, "max-reuse-distance": case["reuse"], "persistence-threshold": case["persist"], "sub-group": 10**9}
    plan = json.loads(ours.call("plan", "--no-search", *[text for key, value in flags.items() for text in (f"--{key}", str(value))]))
    if case["recompute"]:
        plan["plan"]["recompute"] = [{"module": f"model.layers.{i}", "kind": "full"} for i in range(CONFIG["num_hidden_layers"])]
    if case["reentrant"]:
        plan["kernel_set"] = {"name": "torch-2022"}
    return plan


def settings_of(ours, case):
    """Of the plan without GRPO, which no file of DeepSpeed says."""
    plan = plan_of(ours, {**case, "recompute": False})
    del plan["job"]["trains_by"], plan["job"]["rollout"]
    return json.loads(json.loads(ours.call("emit", ours.write(plan), "--to", "deepspeed", "--json"))["files"][0]["text"])


def main(program):
    ours, tally = Shardwright(program), Tally("tests/schedule/torch_zero_grpo.py")
    with Pools() as pools:
        for name, case in CASES.items():
            theirs = attempt(lambda: pools.run(2, "torch_zero_grpo", "run_case", (case, settings_of(ours, case)))[0])
            tally.add(name, compare(attempt(lambda: ours.collectives(plan_of(ours, case))), theirs), case)
    print(tally.summary())
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
