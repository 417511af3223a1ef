"""The 25 families that are fine-tuned most: directly and exported alike, and both like PyTorch.

    python3 tests/models/trained_families_test.py SHARDWRIGHT [FAMILY ...]
    python3 tests/models/trained_families_test.py SHARDWRIGHT --write docs/models.md

Expected: parameters of transformers on the meta device; FLOPs forward and backward of torch's FlopCounterMode and the bytes that
saved-tensor hooks see, both of the module itself in bf16 with none of the exporter's rules, at three lengths and two batches. The kernel
set is the nearest of `torch-eager` and `hf-trainer`. Step times of config.json and of its export, on eight H100 with the kernels that
transformers runs, are compared with one another. Models have their published widths and few layers (trained_families.py).
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import families_test  # first: it finds the exporter, and skips where a package is missing
import export_model
import torch
import trained_families
import transformers
from model_export import rules, trace
from torch.utils.flop_counter import FlopCounterMode

FLOPS_WITHIN, KEPT_WITHIN, TIME_WITHIN = 1e-3, 1e-2, 1e-2
BATCHES = (1, 2)
KEYS = ("forward_flops", "backward_flops", "saved_bytes")


def grouped_products(a, b, *_, **__):
    """Every row meets one expert's matrix; torch's counter has a formula for the dense product alone."""
    return 2 * a[0] * a[1] * (b[2] if len(b) == 3 else b[1])


def fused(name):
    """The flash kernel of the exporter's stand-in for it."""
    func = getattr(torch.ops.shardwright_export, name).default

    def count(*args, **_):
        return rules.attention_flops(func, args)

    count._get_raw = True
    return count


def measured(model, inputs):
    """(forward FLOPs, backward FLOPs, kept bytes) of the module."""
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    kept, alive = {}, []  # a freed storage's address could come back for another tensor

    def pack(tensor):
        memory = tensor.untyped_storage()
        alive.append(tensor)
        if memory._cdata not in own:
            kept[memory._cdata] = memory.nbytes()
        return tensor

    names = ("attention", "attention_backward", "attention_biased", "attention_biased_backward")
    counted = {getattr(torch.ops.shardwright_export, name): fused(name) for name in names} | {torch.ops.aten._grouped_mm: grouped_products}
    for parameter in model.parameters():
        parameter.grad = None
    with trace.told_of_tracing(), trace.AsOnDevices(), FlopCounterMode(display=False, custom_mapping=counted) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = model(**inputs)
        forward = counter.get_total_flops()
        outputs.loss.backward()
    return forward, counter.get_total_flops() - forward, sum(kept.values())


def inputs_of(model, task, batch, length):
    if task == "image":
        side = model.config.image_size
        return {"pixel_values": torch.empty(batch, 3, side, side, dtype=torch.bfloat16, device="meta"),
                "labels": torch.zeros(batch, dtype=torch.long, device="meta")}
    inputs = families_test.inputs_of(model, batch, length)
    return inputs | ({"decoder_input_ids": inputs["input_ids"].clone()} if task == "seq2seq-lm" else {})


def deviations(program, path, wanted):
    """The largest of each key over all points, by the kernel set that is nearest over all of them."""
    worst = {}
    for (batch, length), figures in wanted.items():
        ours = families_test.inspected(program, path, length)
        if isinstance(ours, str):
            raise RuntimeError(ours)
        for i, key in enumerate(KEYS):
            for at, value in enumerate(families_test.figures(ours, batch, key)):
                worst.setdefault(at, [0.0] * 3)
                worst[at][i] = max(worst[at][i], abs(value / figures[i] - 1))
    return min(worst.values(), key=lambda one: one[2])


def step_times(program, path, lengths):
    words = [program, "sweep", "--model", str(path), "--cluster", "dgx-h100", "--nodes", "1", "--gpus", "8",
             "--kernel-set", "hf-trainer", "--micro-batch", ",".join(map(str, BATCHES)), "--json"]
    words += ["--seq", ",".join(map(str, lengths))] if lengths != (0,) else []
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return [row["step_time_s"] for row in json.loads(done.stdout)["rows"]]


def compared(program, path, wanted, total):
    """Columns of one way of loading a model, and whether they are as near as promised."""
    ours = families_test.inspected(program, path)
    if isinstance(ours, str):
        return [ours, "", ""], False
    worst = deviations(program, path, wanted)
    good = ours["parameter_count"] == total and all(value <= limit for value, limit in zip(worst, (FLOPS_WITHIN, FLOPS_WITHIN, KEPT_WITHIN)))
    return [f"{value * 100:.2f} %" for value in worst], good


def check(program, folder, family):
    """The row of the table and whether all is as promised."""
    task, name, values = trained_families.sizes(family)
    lengths = trained_families.OWN_LENGTHS.get(family, trained_families.LENGTHS)
    model, config = families_test.transformer(family, task, values)
    direct, exported = folder / "config.json", folder / "model.json"
    direct.write_text(json.dumps(config))
    total = sum(p.numel() for p in model.parameters())
    model = export_model.without_data(model, torch.bfloat16).train()
    wanted = {(batch, length): measured(model, inputs_of(model, task, batch, length)) for length in lengths for batch in BATCHES}
    columns, good = compared(program, direct, wanted, total)
    row = [family, name, f"{total:,}", *columns]
    exported.write_text(json.dumps(export_model.export(model, inputs_of(model, task, 1, lengths[0]), lengths[0], torch.bfloat16)))
    columns, is_right = compared(program, exported, wanted, total)
    times = [step_times(program, path, lengths) for path in (direct, exported)]
    apart = max(abs(a / b - 1) for a, b in zip(*times))
    good &= is_right and apart <= TIME_WITHIN and len(times[0]) == len(times[1]) == len(lengths) * len(BATCHES)
    return row + columns + [f"{apart * 100:.2f} %"], good


PAGE = "## The families that are trained most\n"
HEAD = """
`tests/models/trained_families_test.py SHARDWRIGHT --write docs/models.md` writes this table: 25
families, chosen by what we remember of the hub's downloads, each as a published model at its full
width and with few layers (`tests/models/trained_families.py`), in bf16, at batches of 1 and 2 and
three lengths. The columns are the largest deviations of FLOPs forward and backward from PyTorch's
`FlopCounterMode` and of kept bytes from its saved-tensor hooks, of `config.json` and of its export,
and how far apart the two's step times on eight H100 are. Parameters are exact in all of them; the
test fails beyond 0.1 % of FLOPs, 1 % of kept bytes or 1 % of a step.

| family | model | parameters | directly: forward | backward | kept | exported: forward | backward | kept | step times apart |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""


def write(page, rows):
    """The page with this table at its end, or in the place of an earlier one."""
    before = page.read_text(encoding="utf-8").partition(PAGE)[0].rstrip("\n")
    table = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    page.write_text(f"{before}\n\n{PAGE}{HEAD}{table}", encoding="utf-8")


def main(arguments):
    transformers.utils.logging.set_verbosity_error()
    program = str(pathlib.Path(arguments[0]).resolve())
    named = [word for word in arguments[1:] if word in trained_families.TRAINED]
    page = pathlib.Path(arguments[arguments.index("--write") + 1]) if "--write" in arguments else None
    rows, good = [], True
    with tempfile.TemporaryDirectory() as folder:
        for family in named or trained_families.TRAINED:
            try:
                row, is_right = check(program, pathlib.Path(folder), family)
            except (RuntimeError, export_model.Unsupported) as error:
                row, is_right = [family, str(error)], False
            print(("" if is_right else "FAILED ") + " | ".join(row), flush=True)
            rows.append(row)
            good &= is_right
            if page and not named:
                write(page, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
