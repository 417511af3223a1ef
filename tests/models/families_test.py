"""Configurations that people bring, directly and by `shardwright export`: parameters, FLOPs and kept bytes against PyTorch.

    python3 tests/models/families_test.py SHARDWRIGHT                    a few families, directly
    python3 tests/models/families_test.py SHARDWRIGHT --all              every family, directly and exported, as a table
    python3 tests/models/families_test.py SHARDWRIGHT --all --write docs/models.md
    python3 tests/models/families_test.py SHARDWRIGHT --all bloom gptj --write docs/models.md    only these, whose rows replace the page's

Expected: names, shapes and counts from named_parameters() of transformers on the meta device, for small sizes and for published ones;
forward and backward FLOPs and kept bytes of the small ones from a trace of the module there (export_model_test.py holds that trace
against torch's FlopCounterMode), at two batches and two lengths. A type whose row the program has must be exact; where it says that it
has none, `shardwright export` must write the small one with as many parameters, or say in one line what is missing.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tools")]
import export_model  # noqa: E402
from families import FAMILIES  # noqa: E402
from model_export import trace  # noqa: E402

SOME = ("bloom", "falcon", "stablelm", "olmo2", "glm4", "qwen2_moe", "roberta", "distilbert", "modernbert", "deberta-v2", "clip", "mamba2", "olmo3", "glm4_moe", "hunyuan_v1_dense")
# The program names a matrix per expert of these.
SEPARATE = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
# Without a trace: kinds of op that the exporter has no rule for, latent attention, sequences that an image is part of, and MPT, which
# is built as llm-foundry runs it.
UNTRACED = {"gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "qwen2_vl", "qwen2_5_vl", "mpt", "youtu", "glm4_moe_lite"}
# Whose routers and experts are one op each in a trace, without FLOPs: hidden size, an expert's size, experts, experts per token and
# layers with experts of the small one. The tokens of a router are products, those of its experts three each.
MIXTURES = {"qwen2_moe": (64, 48, 8, 2, 2), "olmoe": (64, 176, 8, 2, 2), "granitemoe": (64, 176, 8, 2, 2), "phimoe": (64, 176, 4, 2, 2),
            "jamba": (64, 176, 4, 2, 4), "flex_olmo": (64, 176, 8, 2, 2), "glm4_moe": (64, 48, 8, 2, 1), "solar_open": (64, 48, 8, 2, 2),
            "dots1": (64, 48, 8, 2, 1), "minimax_m2": (64, 176, 8, 2, 2), "hy_v3": (64, 48, 8, 2, 1), "exaone_moe": (64, 48, 8, 2, 3)}
# The program keeps what fused kernels of scans keep, transformers what its loops do.
SCANS = {"mamba", "mamba2", "jamba"}
# The names of their checkpoints, which transformers 5 gives to modules of other names.
RENAMED = {"vit", "mpt"}
AUTO = {"": "AutoModelForCausalLM", "masked-lm": "AutoModelForMaskedLM", "seq2seq-lm": "AutoModelForSeq2SeqLM",
        "speech-seq2seq": "AutoModelForSpeechSeq2Seq", "contrastive": "AutoModel", "image": "AutoModelForImageClassification"}
POINTS = ((2, 64), (1, 64), (2, 32))
SEEING = {"qwen2_vl", "qwen2_5_vl"}


def transformer(family, task, values):
    """(module on the meta device, its config.json as the hub has it)"""
    config = transformers.AutoConfig.for_model(family, **values)
    config.use_cache = False
    kind = getattr(transformers, "AutoModelForImageTextToText" if family in SEEING else AUTO[task])
    with torch.device("meta"):
        try:
            model = kind.from_config(config, attn_implementation="sdpa")
        except ValueError:  # ALiBi, position biases
            model = kind.from_config(config, attn_implementation="eager")
    written = json.loads(config.to_json_string(use_diff=True)) | {"model_type": family, "architectures": [type(model).__name__]}
    written.pop("use_cache", None)
    return model, written


def inspected(program, path, length=0):
    words = [program, "inspect", str(path), "--json", *(["--seq", str(length)] if length else [])]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    return json.loads(result.stdout) if result.returncode == 0 else result.stderr.strip()


def parameters_differ(family, model, ours):
    """What of the parameters differs; "" if nothing does."""
    total = sum(p.numel() for p in model.parameters())
    if ours["parameter_count"] != total:
        return f"{ours['parameter_count']} parameters, {total} in PyTorch"
    expected = {name: list(p.shape) or [1] for name, p in model.named_parameters(remove_duplicate=False)}
    found = {p["fqn"]: p["shape"] for p in ours["parameters"]}
    unlike = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    return f"{len(unlike)} parameters, {unlike[0]} first" if unlike and family not in SEPARATE | RENAMED else ""


def figures(ours, batch, key):
    rows = [row for row in ours["one_gpu"] if row["dtype"] == "bf16"]
    found = {}
    for row in rows:
        found.setdefault(row["kernel_set"], {})[row["batch"]] = row[key]
    return [one[1] + (one[2] - one[1]) * (batch - 1) for one in found.values()]


def inputs_of(model, batch, length):
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    if not hasattr(model, "vision_model"):
        return {"input_ids": ids, "labels": ids.clone()}
    side = model.config.vision_config.image_size
    return {"input_ids": ids, "pixel_values": torch.empty(batch, 3, side, side, dtype=torch.bfloat16, device="meta"), "return_loss": True}


def traced(program, path, family, model, points):
    """Largest deviations (forward, backward, kept bytes by the nearest kernel set) from PyTorch at the points."""
    worst = [0.0, 0.0, 0.0]
    model = export_model.without_data(model, torch.bfloat16).train()
    for batch, length in points:
        wanted = list(trace.totals(trace.run(model, inputs_of(model, batch, length), False)))
        if family in MIXTURES:
            hidden, wide, experts, chosen, layers = MIXTURES[family]
            products = 2 * layers * batch * length * hidden * (experts + 3 * chosen * wide)
            wanted[0] += products
            wanted[1] += 2 * products
        ours = inspected(program, path, length)
        for i, key in enumerate(("forward_flops", "backward_flops", "saved_bytes")):
            worst[i] = max(worst[i], min(abs(value / wanted[i] - 1) for value in figures(ours, batch, key)))
    return worst


def exported(program, folder, path, task, image=32):
    """The inspected export of a config.json, or the line that says why there is none."""
    sizes = ["--image", str(image)] if task == "image" else ["--seq", "64"]
    words = [program, "export", str(path), *sizes, "--python", sys.executable, "-o", str(folder / "model.json")]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return result.stderr.strip()
    return inspected(program, folder / "model.json")


def check(program, folder, family, with_export):
    """Rows of the table and whether all is as promised."""
    task, small, published = FAMILIES[family]
    rows, good = [], True
    for name, values in (("small", small), *published.items()):
        try:
            model, config = transformer(family, task, values)
        except (TypeError, ValueError) as error:
            print(f"{family} {name}: transformers does not build it: {error}")
            continue
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        total = sum(p.numel() for p in model.parameters())
        ours = inspected(program, path)
        row = [family, name, f"{total:,}", "", "", "", ""]
        if isinstance(ours, str):
            good &= "shardwright export" in ours
            if with_export and name == "small":
                ours = exported(program, folder, path, task)
                is_exact = not isinstance(ours, str) and not parameters_differ(family, model, ours)
                row[3] = "by export" if is_exact else "refused: " + ours if isinstance(ours, str) else "WRONG"
                good &= row[3] != "WRONG" and "Traceback" not in row[3]
            else:
                row[3] = "by export"
        else:
            differs = parameters_differ(family, model, ours)
            row[3] = "WRONG: " + differs if differs else "directly"
            good &= not differs
            if name == "small" and task in ("", "masked-lm", "contrastive") and family not in UNTRACED:
                worst = traced(program, path, family, model, POINTS)
                row[4:] = [f"{value * 100:.2f} %" for value in worst]
                if family in SCANS or family in MIXTURES:
                    row[6] = ""
                good &= worst[0] <= 1e-3 and worst[1] <= 1e-3
        print(" | ".join(row), flush=True)
        rows.append(row)
    return rows, good


def chooses_classes():
    """`shardwright export` without --task takes the class that such a configuration is for, and the one that the file names."""
    auto = transformers.models.auto.modeling_auto
    good = True
    for family, (task, small, _) in FAMILIES.items():
        config = transformers.AutoConfig.for_model(family, **small)
        wanted = {"contrastive": "AutoModelForZeroShotImageClassification"}.get(task, AUTO[task])
        wanted = "AutoModelForImageTextToText" if family in SEEING else wanted
        found = export_model.auto_class(auto, config, task == "image")
        config.architectures = ["RobertaForTokenClassification"]
        named = export_model.auto_class(auto, config, False) if family == "roberta" else "AutoModelForTokenClassification"
        if found != wanted or named != "AutoModelForTokenClassification":
            print(f"FAILED {family}: {found} and {named}, expected {wanted}")
            good = False
    config = transformers.Dinov2Config(architectures=["Dinov2Model"])
    found = export_model.auto_class(auto, config, True)
    if found != "AutoModel":
        print(f"FAILED Dinov2Model: {found}, expected AutoModel")
        good = False
    return good


def classifies(program, folder):
    """The sequence classifiers of encoders have their parameters, too."""
    good = True
    for family in ("roberta", "electra", "distilbert", "albert", "modernbert", "deberta-v2"):
        config = transformers.AutoConfig.for_model(family, **FAMILIES[family][1], num_labels=3)
        with torch.device("meta"):
            model = transformers.AutoModelForSequenceClassification.from_config(config)
        written = json.loads(config.to_json_string(use_diff=True)) | {"model_type": family, "architectures": [type(model).__name__]}
        path = folder / "config.json"
        path.write_text(json.dumps(written))
        ours = inspected(program, path)
        differs = ours if isinstance(ours, str) else parameters_differ(family, model, ours)
        if differs:
            print(f"FAILED {type(model).__name__}: {differs}")
            good = False
    return good


PAGE = """# Models that were tried

`tests/models/families_test.py SHARDWRIGHT --all --write docs/models.md` writes this page:
configurations of the hub outside the zoo, with the parameters that transformers {version} has for
them.

- "directly": `--model config.json`, with every name, shape and count equal (`vit` and `mpt`: with
  the names of their checkpoints; `deepseek_v2` and `deepseek_v3`: with a matrix per expert, as
  there).
- "by export": by one `shardwright export config.json`, tried for the small sizes.
- FLOPs are the largest deviation from PyTorch's count at batches of 1 and 2 and lengths of 64
  and 32.
- Kept bytes are the largest deviation from what autograd keeps in bf16, by the nearest of the
  kernel sets `torch-eager` and `hf-trainer`; not of mixtures, whose experts are one op in a trace,
  nor of scans. Small sizes overstate what tables of cosines and the loss keep.

`tests/models/hub_configurations_test.py SHARDWRIGHT` tries 46 more configurations that go by names
of the hub (`tests/data/hub_configurations.json`, from memory). 37 load directly and exactly, the
other 9 by `shardwright export`, in 2 to 25 minutes on a shared core.

`tests/models/export_published_networks_test.py SHARDWRIGHT` exports networks of torchvision 0.28.0,
timm 1.0.31 and diffusers 0.42.1 (classifiers, backbones of detectors, segmentation, video, UNets, a
DiT) and small text models: 64 of 68 with the parameters, FLOPs and kept bytes of PyTorch. An LSTM,
a GRU, swin_v2_t and dm_nfnet_f0 are refused, the latter two by the op that works in place on a
view. `tests/models/export_model_test.py` does so with 48 small networks written by hand.

| type | configuration | parameters | loads | forward FLOPs off | backward | kept bytes off |
|---|---|---:|---|---:|---:|---:|
"""


def write(path, tried, table):
    """The page with the rows of `table`; rows of families that were not tried stay."""
    kept = []
    if path.exists():
        before = path.read_text(encoding="utf-8").partition("\n## ")[0]
        rows = [line.strip("| \n").split(" | ") for line in before.splitlines() if line.startswith("| ")]
        kept = [row + [""] * (7 - len(row)) for row in rows if row[0] in FAMILIES and row[0] not in tried]
    order = list(FAMILIES)
    rows = sorted(kept + table, key=lambda row: order.index(row[0]))
    text = PAGE.format(version=transformers.__version__) + "".join("| " + " | ".join(row) + " |\n" for row in rows)
    others = "".join(path.read_text(encoding="utf-8").partition("\n## ")[1:]) if path.exists() else ""  # of another test
    path.write_text(text + others, encoding="utf-8")


def main(arguments):
    transformers.utils.logging.set_verbosity_error()
    program = str(pathlib.Path(arguments[0]).resolve())
    is_all = "--all" in arguments
    page = pathlib.Path(arguments[arguments.index("--write") + 1]) if "--write" in arguments else None
    named = [word for word in arguments if word in FAMILIES]
    tried = named or (list(FAMILIES) if is_all else SOME)
    good = bool(named) or chooses_classes()
    with tempfile.TemporaryDirectory() as folder:
        good &= bool(named) or classifies(program, pathlib.Path(folder))
        for family in tried:
            rows, is_right = check(program, pathlib.Path(folder), family, is_all)
            if not is_right:
                print(f"FAILED {family}")
            good &= is_right
            if page:  # so that what was tried before an interruption is not lost
                write(page, {family}, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
