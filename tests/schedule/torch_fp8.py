"""Weights gathered in fp8 under real FSDP2 with torchao's Float8Linear: their collectives are those of our plans.

    python3 tests/schedule/torch_fp8.py SHARDWRIGHT [--random N]

Tiny Llamas become torchao's (products emulated) and are sharded in gloo processes, layer by layer. Two steps run; compared are order,
kind, group, elements and dtype of all collectives, and the bytes of gathered parameters at each. --random N draws N cases instead of the
fixed ones. A weight whose rows do not divide is refused by us, and fails there.
"""

import argparse
import functools
import json
import pathlib
import random
import sys
import warnings

try:
    import torch
    import torchao.float8.float8_utils as ao
    import transformers
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from random_cases import Shardwright, Tally, attempt, compare  # noqa: E402
from torch_pool import Pools, Recorder  # noqa: E402

FIXED = [
    {"shard": 2, "replicate": 1, "master": "fp32", "precomputes": True, "hidden": 64, "middle": 160, "layers": 2, "reshards": True, "micro": 1},
    {"shard": 2, "replicate": 2, "master": "bf16", "precomputes": False, "hidden": 32, "middle": 56, "layers": 2, "reshards": False, "micro": 2},
    {"shard": 4, "replicate": 1, "master": "bf16", "precomputes": True, "hidden": 64, "middle": 96, "layers": 3, "reshards": True, "micro": 2},
    {"shard": 3, "replicate": 1, "master": "fp32", "precomputes": True, "hidden": 64, "middle": 96, "layers": 1, "reshards": True, "micro": 1},
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def drawn(generator):
    shard, replicate = generator.choice([(2, 1), (4, 1), (2, 2), (3, 1), (1, 2)])
    return {"shard": shard, "replicate": replicate, "master": generator.choice(["fp32", "bf16"]), "precomputes": generator.random() < 0.5,
            "hidden": 16 * generator.choice([2, 3, 4, 6]), "middle": 8 * generator.randint(5, 24), "layers": generator.randint(1, 3),
            "reshards": generator.random() < 0.6, "micro": generator.choice([1, 1, 2, 3])}


def config_of(case):
    return {"model_type": "llama", "vocab_size": 64 * case["hidden"], "hidden_size": case["hidden"], "intermediate_size": case["middle"],
            "num_hidden_layers": case["layers"], "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def gathered_bytes(model):
    total = 0
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, "_get_fsdp_state") else None
        for param in group.fsdp_params if group else []:
            total += sum(t.untyped_storage().size() for t in param.all_gather_outputs)
    return total


def run_case(rank, case):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    ao.all_reduce = lambda *given: functional.all_reduce(*given)  # as the recorder has it
    keys = config_of(case)
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(DTYPES[case["master"]]).train()

    def converts(module, name):
        return isinstance(module, torch.nn.Linear) and name != "lm_head" and not any(size % 16 for size in module.weight.shape)

    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True), module_filter_fn=converts)
    mesh = init_device_mesh("cpu", (case["replicate"], case["shard"]), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if case["replicate"] > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=case["reshards"])
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(rank)
    ranks = case["shard"] * case["replicate"]
    place, size = rank // case["shard"], case["shard"]
    groups = {tuple(range(rank % size, ranks, size)): "replicate", tuple(range(place * size, (place + 1) * size)): "shard"}
    steps = []
    with Recorder(groups, functools.partial(lambda m: (gathered_bytes(m),), model)) as recorder:
        for _ in range(2):
            for _ in range(case["micro"]):
                ids = torch.randint(2, 64, (1, 16), generator=generator)
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if case["precomputes"]:
                precompute_float8_dynamic_scale_for_fsdp(model)
            # Nothing travels in a group of one rank.
            steps.append([row for row in recorder.take() if size > 1 or row[1] != "shard"])
    return steps


def plan_of(ours, case):
    folder = pathlib.Path(ours.folder.name)
    (folder / "config.json").write_text(json.dumps(config_of(case)), encoding="utf-8")
    ranks = case["shard"] * case["replicate"]
    ours.call("plan", "--model", str(folder / "config.json"), "--cluster", f"h100-80 x{ranks}, nvlink 450 GB/s", "--dialect", "fsdp2", "--no-search",
              "--kernel-set", "torch-eager", "--seq", "16", "--micro-batch", "1", "--accumulation", str(case["micro"]), "--shard", str(case["shard"]),
              "--replicate", str(case["replicate"]), "--precision", f"{case['master']}/bf16/fp32+fp8-{'precomputed' if case['precomputes'] else 'gathered'}",
              "--optimizer", "sgd:for_loop", "--clip", "off", "-o", str(folder / "made.json"))
    plan = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    layers = [f"model.layers.{i}" for i in range(case["layers"])]
    plan["plan"]["sync"] = "every"
    plan["plan"]["units"] = [{"name": name, "modules": [name], "reshard": "always" if case["reshards"] else "never"} for name in layers]
    plan["plan"]["units"].append({"name": "root", "modules": [""], "reshard": "never"})
    return plan


def judge(ours, pools, case):
    ranks = case["shard"] * case["replicate"]
    made = attempt(lambda: ours.collectives(plan_of(ours, case), categories=["unsharded_parameter"]))
    return compare(made, attempt(lambda: pools.run(ranks, "torch_fp8", "run_case", case)[0]))


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=51)
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    generator = random.Random(options.seed)
    ours, tally = Shardwright(options.program), Tally("tests/schedule/torch_fp8.py")
    with Pools() as pools:
        for case in [drawn(generator) for _ in range(options.random)] or FIXED:
            tally.add(json.dumps(case), judge(ours, pools, case), case)
    print(tally.summary())
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
