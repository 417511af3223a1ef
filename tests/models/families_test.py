"""Configurations that people bring, directly and by `shardwright export`: parameters, FLOPs and kept bytes against PyTorch.

    python3 tests/models/families_test.py SHARDWRIGHT                    a few families, directly
    python3 tests/models/families_test.py SHARDWRIGHT --all              every family, directly and exported, as a table
    python3 tests/models/families_test.py SHARDWRIGHT --all --write docs/models.md

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

SOME = ("bloom", "falcon", "stablelm", "olmo2", "glm4", "qwen2_moe", "roberta", "distilbert")
# Whose experts one op runs, for which the counter has no formula; the program names a matrix per expert in the second group.
MIXTURES = {"qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3"}
SEPARATE = {"deepseek_v2", "deepseek_v3"}
AUTO = {"": "AutoModelForCausalLM", "masked-lm": "AutoModelForMaskedLM", "seq2seq-lm": "AutoModelForSeq2SeqLM",
        "speech-seq2seq": "AutoModelForSpeechSeq2Seq", "contrastive": "AutoModel", "image": "AutoModelForImageClassification"}
POINTS = ((2, 64), (1, 64), (2, 32))


def transformer(family, task, values):
    """(module on the meta device, its config.json as the hub has it)"""
    config = transformers.AutoConfig.for_model(family, **values)
    config.use_cache = False
    kind = getattr(transformers, "AutoModelForImageTextToText" if family == "qwen2_vl" else AUTO[task])
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
    return f"{len(unlike)} parameters, {unlike[0]} first" if unlike and family not in SEPARATE else ""


def figures(ours, batch, key):
    rows = [row for row in ours["one_gpu"] if row["dtype"] == "bf16"]
    found = {}
    for row in rows:
        found.setdefault(row["kernel_set"], {})[row["batch"]] = row[key]
    return [one[1] + (one[2] - one[1]) * (batch - 1) for one in found.values()]


def traced(program, path, model, points):
    """Largest deviations (forward, backward, kept bytes by the nearest kernel set) from PyTorch at the points."""
    worst = [0.0, 0.0, 0.0]
    model = export_model.without_data(model, torch.bfloat16).train()
    for batch, length in points:
        ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
        wanted = trace.totals(trace.run(model, {"input_ids": ids, "labels": ids.clone()}, False))
        ours = inspected(program, path, length)
        for i, key in enumerate(("forward_flops", "backward_flops", "saved_bytes")):
            worst[i] = max(worst[i], min(abs(value / wanted[i] - 1) for value in figures(ours, batch, key)))
    return worst


def exported(program, folder, path, task):
    """The inspected export of a config.json, or the line that says why there is none."""
    sizes = ["--image", "32"] if task == "image" else ["--seq", "64"]
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
            if name == "small" and task in ("", "masked-lm") and family not in MIXTURES:
                worst = traced(program, path, model, POINTS)
                row[4:] = [f"{value * 100:.2f} %" for value in worst]
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
        wanted = "AutoModelForImageTextToText" if family == "qwen2_vl" else wanted
        found = export_model.auto_class(auto, config, task == "image")
        config.architectures = ["RobertaForTokenClassification"]
        named = export_model.auto_class(auto, config, False) if family == "roberta" else "AutoModelForTokenClassification"
        if found != wanted or named != "AutoModelForTokenClassification":
            print(f"FAILED {family}: {found} and {named}, expected {wanted}")
            good = False
    return good


PAGE = """# Models that were tried

`tests/models/families_test.py SHARDWRIGHT --all --write docs/models.md` writes this page: configurations of the hub outside the zoo, with
the parameters that transformers {version} has for them. "directly": `--model config.json`, with every name, shape and count equal.
"by export": by one `shardwright export config.json`, tried for the small sizes. FLOPs are the largest deviation from PyTorch's count at
batches of 1 and 2 and lengths of 64 and 32; kept bytes from what autograd keeps in bf16, by the nearest of the kernel sets `torch-eager`
and `hf-trainer`. Small sizes overstate what norms, rotations and the loss keep.

| type | configuration | parameters | loads | forward FLOPs off | backward | kept bytes off |
|---|---|---:|---|---:|---:|---:|
"""


def main(arguments):
    transformers.utils.logging.set_verbosity_error()
    program = str(pathlib.Path(arguments[0]).resolve())
    is_all = "--all" in arguments
    table, good = [], chooses_classes()
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES if is_all else SOME:
            rows, is_right = check(program, pathlib.Path(folder), family, is_all)
            if not is_right:
                print(f"FAILED {family}")
            table += rows
            good &= is_right
    if "--write" in arguments:
        text = PAGE.format(version=transformers.__version__) + "".join("| " + " | ".join(row) + " |\n" for row in table)
        pathlib.Path(arguments[arguments.index("--write") + 1]).write_text(text, encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
