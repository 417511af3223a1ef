"""torchtitan's own classes take the files that are emitted for it, of both kinds.

    python3 tests/cli/emit_torchtitan_test.py SHARDWRIGHT

scripts/deep.sh puts torchtitan's two versions into build/ without what they need (Triton and a GPU's libraries); so their packages
are imported without running __init__, one version per process.
"""

import dataclasses
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib
import types
import typing

BUILD = pathlib.Path(__file__).resolve().parent.parent.parent / "build"
PROGRAM = pathlib.Path(sys.argv[1]).resolve()
JOB = ("--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "8192", "--dialect", "fsdp2", "--wrap", "torchtitan")
PLANS = [(), ("--recompute", "full", "--replicate", "2"), ("--recompute", "selective", "--reshard", "never"),
         ("--reshard", "always", "--precision", "bf16", "--accumulation", "2"), ("--offload", "parameters", "--optimizer", "adamw:fused"),
         ("--precision", "fp8"), ("--precision", "fp8-rowwise")]


def enter(version, *packages):
    root = BUILD / f"torchtitan-{version}"
    sys.path.insert(0, str(root))
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = module


def run(*arguments, folder):
    done = subprocess.run([str(PROGRAM), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_fields(owner, values, where):
    """The class has such fields, and their types allow the values."""
    hints = typing.get_type_hints(type(owner))
    for key, value in values.items():
        assert key in hints, f"{where}: torchtitan has no {key}"
        if isinstance(value, dict):
            check_fields(getattr(owner, key), value, f"{where}.{key}")
            continue
        kind = hints[key]
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
        choices = [choice for one in kinds if typing.get_origin(one) is typing.Literal for choice in typing.get_args(one)]
        kinds = [typing.get_origin(one) or one for one in kinds]
        fits = value in choices if choices else type(value) in kinds or (type(value) is int and float in kinds)
        assert fits, f"{where}: {key} = {value!r} is no {kind}"


def check_toml(folder):
    """Sections and keys of JobConfig; every N-th block is what its own function wraps."""
    enter("0.2.2", "torchtitan", "torchtitan.config", "torchtitan.distributed")
    config = importlib.import_module("torchtitan.config.job_config").JobConfig()
    for path in sorted(folder.glob("*/torchtitan.toml")):
        for section, values in tomllib.loads(path.read_text()).items():
            check_fields(getattr(config, section), values, f"{path.parent.name} {section}")
    titan = sys.modules["torchtitan.config"]
    titan.ActivationCheckpoint = type(config.activation_checkpoint)  # what the next import takes from it
    checkpointing = importlib.import_module("torchtitan.distributed.activation_checkpoint")
    torch = importlib.import_module("torch")
    option = dataclasses.replace(config.activation_checkpoint, mode="selective", selective_ac_option="3")
    layers = [torch.nn.Linear(1, 1) for _ in range(32)]
    wrapped = [i for i, layer in enumerate(layers) if checkpointing._apply_layer_sac(layer, option) is not layer]
    text = (folder / "0" / "torchtitan.toml").read_text()
    mode = text.index("[activation_checkpoint]")
    (folder / "third.toml").write_text(text[:mode] + '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "3"\n')
    run("import-run", "third.toml", "--cluster", "dgx-h100", "--nodes", "2", "-o", "third.json", folder=folder)
    regions = json.loads((folder / "third.json").read_text())["plan"]["recompute"]
    ours = [int(region["module"].rpartition(".")[2]) for region in regions]
    assert ours == wrapped, (ours, wrapped)


def check_recipe(folder):
    """apply_plan sets fields that the classes of a Trainer.Config have, and shardwright.torchtitan reads them."""
    sys.path.insert(0, str(BUILD / "python"))
    titan = importlib.import_module("shardwright.torchtitan")
    enter("0.3.0", "torchtitan", "torchtitan.distributed")
    configs = importlib.import_module("torchtitan.config.configs")
    for path in sorted(folder.glob("*/torchtitan_recipe.py")):
        spec = importlib.util.spec_from_file_location("recipe", path)
        recipe = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(recipe)
        parts = {"training": configs.TrainingConfig(), "parallelism": configs.ParallelismConfig(),
                 "compile": configs.CompileConfig()}
        config = recipe.apply_plan(types.SimpleNamespace(activation_checkpoint=None, **parts))
        for name, part in parts.items():
            # With slots: apply_plan could set nothing else.
            values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
            check_fields(part, values, f"{path.parent.name} {name}")
        # And back: the same plan as of the TOML.
        planned = tomllib.loads((path.parent / "torchtitan.toml").read_text())["optimizer"]
        group = types.SimpleNamespace(optimizer_name=planned["name"], optimizer_kwargs={key: planned[key] for key in ("lr", "weight_decay")})
        config.optimizer = types.SimpleNamespace(param_groups=[group], implementation=planned["implementation"])
        config.model_spec = types.SimpleNamespace(name="llama3", flavor="8B")
        back = path.parent / "back.toml"
        back.write_text(titan.toml(config))
        read = []
        for file in (path.parent / "torchtitan.toml", back):
            text = file.read_text().replace('converters = ["quantize.linear.float8"]\n', "")  # which a recipe does not set
            file.write_text(text)
            run("import-run", file, "--cluster", "dgx-h100", "--nodes", "2", "-o", file.with_suffix(".json"), folder=folder)
            read.append(json.loads(file.with_suffix(".json").read_text()))
        for part in ("plan", "job"):
            assert read[0][part] == read[1][part], f"plan {path.parent.name}: {part} is read back as another one"
        mode = type(config.activation_checkpoint).__qualname__
        expected = {"1": "FullAC.Config", "2": "SelectiveAC.Config"}.get(path.parent.name, "NoneType")
        assert mode == expected, f"plan {path.parent.name}: {mode}"


def main():
    if len(sys.argv) > 2:
        {"toml": check_toml, "recipe": check_recipe}[sys.argv[2]](pathlib.Path(sys.argv[3]))
        return 0
    if not all((BUILD / f"torchtitan-{version}").is_dir() for version in ("0.2.2", "0.3.0")):
        print("torchtitan is not in build/ (scripts/deep.sh puts it there): skipped")
        return 77
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for i, flags in enumerate(PLANS):
            run("plan", *JOB, *flags, "-o", f"{i}.json", folder=folder)
            run("emit", f"{i}.json", "--to", "torchtitan", "-o", f"{i}/", folder=folder)
        for check in ("toml", "recipe"):
            subprocess.run([sys.executable, "-B", __file__, sys.argv[1], check, name], check=True)
    print(f"torchtitan takes the files of {len(PLANS)} plans")
    return 0


if __name__ == "__main__":
    sys.exit(main())
