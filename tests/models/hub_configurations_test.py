"""Configurations like those of the hub, written from memory: how each loads, and whether it has every parameter.

    python3 tests/models/hub_configurations_test.py SHARDWRIGHT [NAME ...]

Rows of tests/data/hub_configurations.json say "directly" or "export". Expected: `parameters` of the row is what the class that the file
names has in transformers on the meta device, and what `shardwright inspect` finds in the file or in its export.
"""

import json
import pathlib
import sys
import tempfile

try:
    import torch
    import transformers
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import families_test  # noqa: E402

OF_IMAGES = {"facebook/dinov2-large"}


def parameters_of(config):
    """The count of transformers on the meta device."""
    values = dict(config)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return sum(p.numel() for p in getattr(transformers, config["architectures"][0])(made).parameters())


def problem_of(program, folder, row):
    """What of a row is not as it says; "" if nothing is."""
    path = folder / "config.json"
    path.write_text(json.dumps(row["config"]))
    total = parameters_of(row["config"])
    if total != row["parameters"]:
        return f"{total} parameters in transformers, {row['parameters']} in the row"
    ours = families_test.inspected(program, path)
    if isinstance(ours, str) != (row["loads"] != "directly"):
        return f"not {row['loads']}: {ours if isinstance(ours, str) else 'it loads'}"
    if isinstance(ours, str):
        ours = families_test.exported(program, folder, path, "image" if row["name"] in OF_IMAGES else "", image=224)
    if isinstance(ours, str):
        return ours
    return "" if ours["parameter_count"] == total else f"{ours['parameter_count']} parameters, {total} in transformers"


def main(arguments):
    transformers.utils.logging.set_verbosity_error()
    program = str(pathlib.Path(arguments[0]).resolve())
    rows = json.loads((HERE.parent / "data" / "hub_configurations.json").read_text())
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            if arguments[1:] and row["name"] not in arguments[1:]:
                continue
            problem = problem_of(program, pathlib.Path(folder), row)
            print(f"{'FAILED ' if problem else ''}{row['name']}: {problem or row['loads']}", flush=True)
            failed += bool(problem)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
