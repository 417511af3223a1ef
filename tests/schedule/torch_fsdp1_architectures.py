"""Tiny transformers of the kinds that are trained most, under real FSDP1: their collectives are those of our programs.

    python3 tests/schedule/torch_fsdp1_architectures.py SHARDWRIGHT [--only NAME] [--settings N,N]

tools/export_model.py describes each model; `plan` and `emit` make what the applier wraps in gloo processes. Two steps run; compared
are order, kind, group, elements and dtype of all collectives, and the bytes of gathered parameters at each.
"""

import argparse
import json
import pathlib
import shlex
import sys
import warnings

try:
    import torch
    import transformers
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "planner" / "emitters" / "python"))

import shardwright_fsdp1  # noqa: E402
from random_cases import Refused, Shardwright, Tally, attempt, compare  # noqa: E402
from torch_fsdp1_random import gathered_bytes  # noqa: E402
from torch_pool import Pools, Recorder  # noqa: E402

import export_model  # noqa: E402  (random_cases has set its path)

SEQUENCE = 8
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
CONFIGS = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "gemma2": {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8},
    "granite": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "gemma3_text": {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8},
    "olmo2": SIZES,
    "stablelm": SIZES,
    "phi3": SIZES,
    "qwen3_moe": {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "gpt_neox": {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
            "word_embed_proj_dim": 32, "dropout": 0.0, "max_position_embeddings": 32, "pad_token_id": 0},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "bert": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "roberta": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1},
    "vit": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "image_size": 16, "patch_size": 8, "num_labels": 5},
    "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 44, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
           "dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": True},
}
WITHOUT_SDPA = ("gemma2", "bloom")
# Ranks and flags of plan.
SETTINGS = [
    (2, "--wrap block"),
    (2, "--wrap torchtitan --precision bf16-mixed --forward-prefetch on"),
    (4, "--wrap block --shard 2 --backward-prefetch post --accumulation 2 --sync last"),
    (2, "--wrap module --use-orig-params off --reshard never"),
    (2, "--wrap block --recompute full --precision bf16-mixed"),
    (2, "--wrap module --recompute full --backward-prefetch none"),
    (3, "--wrap accelerate --shard 1 --replicate 3 --accumulation 2"),
]


def model_of(name):
    torch.manual_seed(0)
    keys = dict(CONFIGS[name])
    config = transformers.AutoConfig.for_model(name, **keys)
    config.use_cache = False
    kind = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM,
            "roberta": transformers.AutoModelForMaskedLM, "vit": transformers.AutoModelForImageClassification}.get(
        name, transformers.AutoModelForCausalLM)
    return kind.from_config(config, attn_implementation="eager" if name in WITHOUT_SDPA else "sdpa").train()


def inputs_of(name, samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(samples, 3, 16, 16, generator=generator),
                "labels": torch.randint(0, 5, (samples,), generator=generator)}
    ids = torch.randint(2, 64, (samples, SEQUENCE), generator=generator)
    return {"input_ids": ids, "labels": ids, **({"decoder_input_ids": ids} if name == "t5" else {})}


def run_case(rank, argument):
    warnings.simplefilter("ignore")
    name, data = argument
    shard, replicate = data["mesh"]["shard"], data["mesh"]["replicate"]
    groups = {tuple(range(shard)): "shard", **({tuple(range(0, shard * replicate, shard)): "replicate"} if replicate > 1 else {})}
    model = shardwright_fsdp1.apply_plan(model_of(name), data, device_type="cpu", device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    with Recorder(groups, lambda: (gathered_bytes(model),)) as recorder:
        for step in range(2):
            for i in range(data["training"]["accumulation"]):
                with shardwright_fsdp1.micro_batch(model, i):
                    model(**inputs_of(name, data["training"]["micro_batch"], step + rank)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(recorder.take())
    return steps


def judge(ours, pools, name, ranks, flags):
    folder = pathlib.Path(ours.folder.name)

    def data_of():
        precision = "" if "--precision" in flags else "--precision fp32"
        ours.call("plan", "--model", str(folder / f"{name}.json"), "--cluster", f"a100-80 x{ranks}, nvlink 300 GB/s", "--seq",
                  str(SEQUENCE), "--dialect", "fsdp1", "--kernel-set", "torch-eager", "--clip", "off",
                  *shlex.split(f"{flags} {precision}"), "-o", str(folder / "made.json"))
        plan = json.loads((folder / "made.json").read_text(encoding="utf-8"))
        return ours.collectives(plan, categories=["unsharded_parameter"]), ours.emitted(plan, "fsdp1")

    said = attempt(data_of)
    if isinstance(said, Refused):
        return compare(said, [])
    theirs = attempt(lambda: pools.run(ranks, "torch_fsdp1_architectures", "run_case", (name, said[1]))[0])
    return compare(said[0], theirs)


def main_of(arguments, about, script, settings, judge_case):
    """Judges each model under each of the settings."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--only", choices=list(CONFIGS))
    parser.add_argument("--settings", default=",".join(str(i) for i in range(len(settings))))
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    ours, tally = Shardwright(options.program), Tally(f"tests/schedule/{script}")
    with Pools() as pools:
        for name in [options.only] if options.only else CONFIGS:
            document = export_model.export(model_of(name), inputs_of(name, 1), SEQUENCE)
            (pathlib.Path(ours.folder.name) / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
            for i in options.settings.split(","):
                ranks, flags = settings[int(i)]
                tally.add(f"{name}, setting {i} ({flags})", judge_case(ours, pools, name, ranks, flags), {"only": name, "settings": i})
    print(tally.summary())
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], __doc__, "torch_fsdp1_architectures.py", SETTINGS, judge))
