"""Model types of language models of recent years that transformers ships: how each config.json loads, and whether it has every parameter.

    python3 tests/models/recent_types_test.py SHARDWRIGHT [--since 2024] [TYPE ...]

A type's year is that of the copyright of its configuration. Its configuration is transformers' default with three layers (all kinds of
layers that the first three have). Expected: the parameters that its class has on the meta device, in the file that `shardwright inspect`
reads or in its export. A wrong count is a failure; a refusal is counted, and must be one line that names what is missing.
"""

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
    from transformers.models.auto import modeling_auto
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

LAYERS = 3
SECONDS = 600  # of an export


def types_since(year):
    folder = pathlib.Path(transformers.__file__).parent / "models"
    for kind in sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        known = {re.search(r"Copyright (20\d\d)", path.read_text()[:900]) for path in
                 (folder / kind.removesuffix("_text")).glob("configuration_*.py")}
        years = [int(found.group(1)) for found in known if found]
        if years and min(years) >= year:
            yield kind


def cut(config):
    """The configuration with three layers, as transformers makes it again from its own values."""
    values = config.to_dict()

    def shorten(table):
        layers = table.get("num_hidden_layers")
        for key, value in list(table.items()):
            if isinstance(value, dict) and key.endswith("config"):
                shorten(value)
            elif isinstance(value, (list, str)) and isinstance(layers, int) and len(value) == layers and layers > LAYERS:
                table[key] = value[:LAYERS]
            elif key in ("num_hidden_layers", "num_layers", "n_layer") and isinstance(value, int):
                table[key] = min(value, LAYERS)
    shorten(values)
    values.pop("model_type", None)
    return values


def made(kind):
    """(module on the meta device, its config.json)"""
    config = transformers.AutoConfig.for_model(kind)
    try:
        config = transformers.AutoConfig.for_model(kind, **cut(config))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # the default cannot be cut; then all of it
        config = transformers.AutoConfig.for_model(kind)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    written = json.loads(model.config.to_json_string(use_diff=True)) | {"architectures": [type(model).__name__]}
    written.setdefault("model_type", kind)
    return model, written


def call(program, *words):
    try:
        return subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 3, "", f"error: no answer in {SECONDS} s")


def outcome(program, folder, kind):
    """("directly", "by export", "refused", "wrong" or "not built", words)"""
    try:
        model, config = made(kind)
    except Exception as error:  # transformers' own defaults do not go together
        return "not built", f"{type(error).__name__}: {error}".splitlines()[0]
    total = sum(p.numel() for p in model.parameters())
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    done = call(program, "inspect", str(path), "--json")
    way = "directly"
    if "only its language model is built" in done.stderr:
        seeing = re.compile(r"vision|multi_modal|projector")
        total = sum(p.numel() for name, p in model.named_parameters() if not seeing.search(name))
    if done.returncode != 0:
        way, said = "by export", done.stderr.strip().splitlines()[-1]
        done = call(program, "export", str(path), "--seq", "64", "--python", sys.executable, "-o", str(folder / "model.json"))
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            is_circle = "config.json of such models" in done.stderr
            return ("wrong" if is_circle or "Traceback" in done.stderr else "refused"), f"{said[-160:]} | export: {lines[-1] if lines else ''}"
        done = call(program, "inspect", str(folder / "model.json"), "--json")
        if done.returncode != 0:
            return "wrong", done.stderr
    count = json.loads(done.stdout)["parameter_count"]
    return (way, f"{total:,}") if count == total else ("wrong", f"{way}: {count:,} parameters, {total:,} in transformers")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("types", nargs="*")
    parser.add_argument("--since", type=int, default=2024)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.types or list(types_since(arguments.since)):
            way, words = outcome(arguments.program, pathlib.Path(folder), kind)
            counts[way] += 1
            print(f"{way} | {kind} | {words}", flush=True)
    print(f"{sum(counts.values())} types since {arguments.since}, transformers {transformers.__version__}: {dict(counts)}")
    sys.exit(1 if counts["wrong"] else 0)


main()
