"""Models of which a part learns, under Accelerate's own FSDP2: bytes of parameters and states are those of import-run's plans.

    python3 tests/schedule/torch_partly.py SHARDWRIGHT [--random N]

Tiny Llamas in bf16 are frozen by axolotl's patterns (`unfrozen_parameters`), or get PEFT's adapters, and go through Accelerate's
fsdp2_prepare_model in two gloo processes. After a step of AdamW, bytes of each rank's shards, by whether they learn, and of its states equal
the plan's of an axolotl file. --random N draws the patterns of N cases.
"""

import argparse
import json
import logging
import pathlib
import random
import re
import subprocess
import sys
import types
import warnings

try:
    import accelerate
    import accelerate.utils.fsdp_utils as prepare
    import peft
    import torch
    import transformers
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from random_cases import Shardwright  # noqa: E402
from torch_pool import Failure, Pools  # noqa: E402

SIZES = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32}
FIXED = [
    {"patterns": ["^lm_head.weight$", "^model.embed_tokens.weight$", "model.layers.(1|2).mlp"], "tied": False},
    {"patterns": ["model.layers.2", "lm_head"], "tied": True},
    {"patterns": ["model.layers..+.self_attn.(q|v)_proj", "model.norm.weight"], "tied": False},
    {"adapters": ["q_proj", "down_proj"], "tied": False},
    {"patterns": ["model.layers.7"], "tied": False},
]


def drawn(generator):
    if generator.random() < 0.3:
        return {"adapters": generator.sample(["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"], generator.randint(1, 3)),
                "tied": generator.random() < 0.5}
    parts = ["", ".mlp", ".self_attn", ".self_attn.(q|k)_proj", ".input_layernorm.weight$", ".mlp.(up|gate)_proj", ".mlp.*"]
    words = ["model.layers." + generator.choice(["0", "[0-9]+", "1", "2", "(1|2)", ".+", r"\d", "[12]"]) + generator.choice(parts) for _ in range(2)]
    words += generator.sample(["^lm_head.weight$", "lm_head", "model.embed_tokens", "^model.norm", "model.*", "embed_tokens"], 2)
    return {"patterns": generator.sample(words, generator.randint(1, 3)), "tied": generator.random() < 0.4}


def run_case(_, case):
    """Bytes of this rank's shards that learn, of the others, and of states."""
    warnings.simplefilter("ignore")
    prepare.logger = logging.getLogger("quiet")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SIZES, tie_word_embeddings=case["tied"])
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if "adapters" in case:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=case["adapters"], task_type="CAUSAL_LM"))
    else:
        # As freeze_layers_except of axolotl's utils/freeze.py makes and asks expressions.
        expressions = [re.compile(re.sub(r"\.(?!\+)", "\\.", pattern)) for pattern in case["patterns"]]
        for name, param in model.named_parameters():
            param.requires_grad = any(expression.match(name) for expression in expressions)
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
                                                       transformer_cls_names_to_wrap=["LlamaDecoderLayer"], reshard_after_forward=True)
    plugin.set_mixed_precision("bf16")
    accelerator = types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin), mixed_precision="bf16", is_main_process=True,
                                        device=torch.device("cpu"), torch_device_mesh=None)
    model = prepare.fsdp2_prepare_model(accelerator, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.arange(2, 10).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()

    def size(tensors):
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local)

    states = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return size(model.parameters()), size(states)


def planned(ours, case):
    """The same of the plan; None: import-run refuses the file."""
    folder = pathlib.Path(ours.folder.name)
    (folder / "config.json").write_text(json.dumps({**SIZES, "tie_word_embeddings": case["tied"]}), encoding="utf-8")
    file = {"base_model": "some/model", "bf16": True, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "sequence_len": 8,
            "optimizer": "adamw_torch", "fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                                                                          "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}
    file |= {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": case["adapters"]} if "adapters" in case else \
        {"unfrozen_parameters": case["patterns"]}
    (folder / "run.yml").write_text(json.dumps(file), encoding="utf-8")
    made = subprocess.run([ours.program, "import-run", str(folder / "run.yml"), "--model", str(folder / "config.json"), "--cluster",
                           "a100-80 x2, nvlink 300 GB/s", "-o", str(folder / "made.json")], capture_output=True, text=True, check=False)
    if made.returncode == 3:
        return None, made.stderr.strip().splitlines()[-1]
    said = subprocess.run([ours.program, "simulate", str(folder / "made.json"), "--json"], capture_output=True, text=True, check=True)
    at_peak = json.loads(said.stdout)["memory"]["at_peak"]
    return at_peak["parameter_shard"], at_peak["optimizer_state"]


def judge(ours, pools, case):
    """Whether both say the same, and what."""
    made = planned(ours, case)
    try:
        theirs = pools.run(2, "torch_partly", "run_case", case)[0]
    except Failure as failure:  # nothing learns
        return made[0] is None, f"refused: {made[1]}; there {failure}"
    # A pattern that no name has is refused here; there others may learn all the same.
    alone = made[0] is None and "a pattern of names" in made[1] or "by such patterns" in str(made[1])
    return alone or made == theirs, f"{made}, there {theirs}"


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=51)
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    generator, ours, bad = random.Random(options.seed), Shardwright(options.program), 0
    with Pools() as pools:
        for case in [drawn(generator) for _ in range(options.random)] or FIXED:
            good, said = judge(ours, pools, case)
            bad += not good
            print(f"{json.dumps(case)}: {said}{'' if good else '   <<<'}")
    print(f"{bad} of {options.random or len(FIXED)} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
