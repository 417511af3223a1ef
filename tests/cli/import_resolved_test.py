"""import-run against what the frameworks themselves make of a file: accelerate's launcher and plugins, transformers' classes.

Random settings files of Accelerate, the Trainer and DeepSpeed, most keys left out. The framework's own classes resolve each; what they say is
written out as a second file with every key, and both are imported. Expected: the two plans are equal, and every key that the first file
leaves out and the second one has is listed under "assumed" with the resolved value. Of torchtitan's, which is no package to ask, every key that is
left out is listed."""

import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import types

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["ACCELERATE_LOG_LEVEL"] = "error"
os.environ["DS_ACCELERATOR"] = "cpu"
try:
    import yaml
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
    import torch
except ImportError as error:
    print(f"{error.name} is not installed: skipped")
    sys.exit(77)

PROGRAM = sys.argv[1]
ROUNDS = 100 if "SHARDWRIGHT_DEEP" in os.environ else 12  # of each of four frameworks
RANKS = 8

MODELS = {
    "llama": {"model_type": "llama", "vocab_size": 512, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "bert": {"model_type": "bert", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "intermediate_size": 128, "max_position_embeddings": 256},
    "vit": {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128,
            "image_size": 32, "patch_size": 8},
}


def auto_class(name):
    return {"bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}.get(name, AutoModelForCausalLM)


def torch_model(name):
    with torch.device("meta"):
        return auto_class(name).from_config(AutoConfig.for_model(**MODELS[name]))


TORCH_MODELS = {name: torch_model(name) for name in MODELS}


@contextlib.contextmanager
def environment(values):
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def layers_of(plugin, name):
    """The classes that the plugin wraps, as it finds them in the model; None where it wraps none."""
    if plugin.auto_wrap_policy is None or not hasattr(plugin.auto_wrap_policy, "__name__"):
        return None
    if "transformer" not in plugin.auto_wrap_policy.__name__:
        return None
    plugin.set_auto_wrap_policy(TORCH_MODELS[name])
    return sorted(cls.__name__ for cls in plugin.auto_wrap_policy.keywords["transformer_layer_cls"])


def some(rng, table, odds=0.4):
    return {key: rng.choice(values) for key, values in table.items() if rng.random() < odds}


def layer_class(name):
    return {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "bert": "BertLayer", "vit": "ViTLayer"}[name]


# --- Accelerate

def accelerate_file(rng, name):
    version = rng.choice([1, 2, None])
    fsdp = some(rng, {
        "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
        "fsdp_offload_params": [True, False], "fsdp_activation_checkpointing": [True, False],
        "fsdp_transformer_layer_cls_to_wrap": [layer_class(name)], "fsdp_min_num_params": [10_000, 200_000],
        "fsdp_state_dict_type": ["SHARDED_STATE_DICT"], "fsdp_cpu_ram_efficient_loading": [False],
    })
    if version:
        fsdp["fsdp_version"] = version
    if version == 2:
        fsdp.update(some(rng, {"fsdp_reshard_after_forward": [True, False]}))
    else:
        fsdp.update(some(rng, {"fsdp_sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"],
                               "fsdp_backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
                               "fsdp_forward_prefetch": [True, False], "fsdp_use_orig_params": [True, False],
                               "fsdp_reshard_after_forward": ["HYBRID_SHARD", "SHARD_GRAD_OP"]}))
    file = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_machines": 2, "num_processes": RANKS,
            "machine_rank": 0, "main_process_ip": "10.0.0.1", "main_process_port": 29500, "use_cpu": False, "fsdp_config": fsdp}
    file.update(some(rng, {"mixed_precision": ["no", "bf16", "fp16"]}, 0.6))
    return file


def resolve_accelerate(folder, file, name):
    """What the plugin holds that `accelerate launch` makes of the file, as a file with every key."""
    path = folder / "launched.yaml"
    path.write_text(yaml.safe_dump(file))
    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    if not hasattr(args, "nondefault"):
        args.nondefault = []
    args, _, _ = _validate_launch_command(args)
    env = prepare_multi_gpu_env(args)
    # What only loads weights needs a GPU.
    env.update({"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"})
    with environment({key: str(value) for key, value in env.items()}):
        plugin = FullyShardedDataParallelPlugin()
        version = plugin.fsdp_version
        fsdp = {"fsdp_version": version, "fsdp_offload_params": bool(plugin.cpu_offload.offload_params if version == 1 else
                                                                    getattr(plugin.cpu_offload, "pin_memory", False)),
                "fsdp_activation_checkpointing": plugin.activation_checkpointing}
        policy = getattr(plugin.auto_wrap_policy, "__name__", "")
        minimum = plugin.min_num_params
        layers = layers_of(plugin, name)
    if layers is not None:
        fsdp["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(layers)
    elif "size" in policy:
        fsdp["fsdp_auto_wrap_policy"] = "SIZE_BASED_WRAP"
        fsdp["fsdp_min_num_params"] = minimum
    else:
        fsdp["fsdp_auto_wrap_policy"] = "NO_WRAP"
    if version == 2:
        fsdp["fsdp_reshard_after_forward"] = plugin.reshard_after_forward
    else:
        fsdp["fsdp_sharding_strategy"] = plugin.sharding_strategy.name
        fsdp["fsdp_backward_prefetch"] = plugin.backward_prefetch.name if plugin.backward_prefetch else "NO_PREFETCH"
        fsdp["fsdp_forward_prefetch"] = plugin.forward_prefetch
        fsdp["fsdp_use_orig_params"] = plugin.use_orig_params
    return {**file, "mixed_precision": env["ACCELERATE_MIXED_PRECISION"], "fsdp_config": fsdp}


# --- Trainer

def trainer_file(rng, name):
    version = rng.choice([1, 2, None])
    config = some(rng, {
        "transformer_layer_cls_to_wrap": [[layer_class(name)]], "cpu_offload": [True, False],
        "activation_checkpointing": [True, False], "auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "NO_WRAP"],
    })
    if version:
        config["version"] = version
    if version == 1:
        config.update(some(rng, {"reshard_after_forward": ["full_shard", "shard_grad_op", "hybrid_shard"],
                                 "backward_prefetch": ["backward_pre", "backward_post"], "forward_prefetch": [True, False],
                                 "use_orig_params": [True, False], "limit_all_gathers": [True, False]}))
    else:
        config.update(some(rng, {"reshard_after_forward": [True, False]}))
    file = {"output_dir": "out", "fsdp": True, "fsdp_config": config}
    file.update(trainer_numbers(rng))
    return file


def trainer_numbers(rng):
    numbers = some(rng, {"per_device_train_batch_size": [2, 4], "gradient_accumulation_steps": [1, 3],
                         "optim": ["adamw_torch", "adamw_torch_fused", "sgd"], "weight_decay": [0.0, 0.1], "max_grad_norm": [0.0, 1.0]})
    numbers.update(rng.choice([{}, {"bf16": True}, {"fp16": True}, {"bf16": False}]))
    return numbers


def arguments_of(file):
    keep = {key: value for key, value in file.items() if key != "deepspeed"}
    return TrainingArguments(use_cpu=True, **keep)


def resolved_numbers(args):
    return {"per_device_train_batch_size": args.per_device_train_batch_size, "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "optim": str(getattr(args.optim, "value", args.optim)), "weight_decay": args.weight_decay, "max_grad_norm": args.max_grad_norm,
            "bf16": args.bf16, "fp16": args.fp16, "gradient_checkpointing": args.gradient_checkpointing}


def resolve_trainer(_, file, name):
    args = arguments_of(json.loads(json.dumps(file)))
    if "sync_module_states" in args.fsdp_plugin_args:
        args.fsdp_plugin_args["sync_module_states"] = False  # which needs a GPU
    with environment({}):
        plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
        version = plugin.fsdp_version
        config = {"version": version, "cpu_offload": bool(args.fsdp_plugin_args.get("cpu_offload", False)),
                  "activation_checkpointing": plugin.activation_checkpointing}
        layers = layers_of(plugin, name)
    config["auto_wrap_policy"] = "NO_WRAP" if layers is None else "TRANSFORMER_BASED_WRAP"
    if layers is not None:
        config["transformer_layer_cls_to_wrap"] = layers
    if version == 2:
        config["reshard_after_forward"] = plugin.reshard_after_forward
    else:
        config["reshard_after_forward"] = args.fsdp_plugin_args["reshard_after_forward"]
        config["backward_prefetch"] = args.fsdp_plugin_args["backward_prefetch"].lower()
        config["forward_prefetch"] = plugin.forward_prefetch
        config["use_orig_params"] = plugin.use_orig_params
        config["limit_all_gathers"] = plugin.limit_all_gathers
    numbers = resolved_numbers(args)
    return {"output_dir": "out", "fsdp": True, "fsdp_config": config, **numbers}


# --- DeepSpeed under the Trainer

def deepspeed_files(rng):
    zero = {"stage": rng.choice([1, 2, 3])}
    zero.update(some(rng, {"reduce_bucket_size": ["auto", "auto", 123456], "contiguous_gradients": [True, False],
                           "overlap_comm": [True, False]}, 0.7))
    if zero["stage"] == 3:
        zero.update(some(rng, {"stage3_prefetch_bucket_size": ["auto", "auto", 4567],
                               "stage3_param_persistence_threshold": ["auto", "auto", 789],
                               "stage3_max_live_parameters": [10 ** 9], "sub_group_size": [10 ** 9]}, 0.7))
    file = {"zero_optimization": zero}
    file.update(some(rng, {"gradient_clipping": ["auto"], "gradient_accumulation_steps": ["auto"],
                           "train_micro_batch_size_per_gpu": ["auto"], "train_batch_size": ["auto"],
                           "bf16": [{"enabled": "auto"}], "fp16": [{"enabled": "auto"}]}, 0.6))
    if rng.random() < 0.5:
        file["optimizer"] = {"type": "AdamW", "params": some(rng, {"lr": ["auto"], "weight_decay": ["auto"]}, 0.7)}
    return {"output_dir": "out", "deepspeed": "ds.json", **trainer_numbers(rng)}, file


def resolve_deepspeed(trainer, file, name):
    args = arguments_of(trainer)
    numbers = resolved_numbers(args)
    wanted = types.SimpleNamespace(**{key: getattr(args, key) for key in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "learning_rate", "adam_beta1", "adam_beta2",
        "adam_epsilon", "weight_decay", "save_on_each_node", "fp16", "bf16", "fp16_full_eval", "bf16_full_eval", "get_warmup_steps")},
        world_size=RANKS)
    config = HfTrainerDeepSpeedConfig(json.loads(json.dumps(file)))
    config.trainer_config_process(wanted)
    config.trainer_config_finalize(wanted, types.SimpleNamespace(config=AutoConfig.for_model(**MODELS[name])), 100)
    out = config.config
    # What accelerate's DeepSpeedPlugin adds in __post_init__ and set_mixed_precision.
    out.setdefault("gradient_accumulation_steps", 1)
    out.setdefault("gradient_clipping", 0.0)
    for key, on in (("bf16", args.bf16), ("fp16", args.fp16)):
        out.setdefault(key, {"enabled": on})
    out["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    out.pop("train_batch_size", None)
    numbers["gradient_accumulation_steps"] = out["gradient_accumulation_steps"]  # DeepSpeed's counts
    if "optimizer" not in out:
        return numbers, out
    numbers.pop("optim")
    return numbers, out


# --- both imported

def run_import(folder, names, model):
    flags = ["--model", f"{model}.json", "--cluster", "dgx-a100", "--nodes", "2", "--gpus", "4"]
    flags += [] if model == "vit" else ["--seq", "64"]
    done = subprocess.run([PROGRAM, "import-run", *names, *flags, "--json"], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, (names, [(folder / name).read_text() for name in names], done.stderr)
    return json.loads(done.stdout)


def flat(settings, prefix=""):
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# Values that no plan depends on, and those that follow from others.
SILENT = {"output_dir", "machine_rank", "optimizer.params.lr", "fp16", "bf16", "fp16.enabled", "bf16.enabled", "train_batch_size"}


def check(folder, kind, model, given, resolved, names):
    found, full = (run_import(folder, files, model) for files in names)
    assert found["plan"] == full["plan"], (kind, model, given, resolved, difference(found["plan"], full["plan"]))
    assumed = {key: json.loads(value) if value[:1] in '"[{tf0123456789-' else value for key, value in found["assumed"].items()
               if not key.startswith("--")}
    said = {key for part in given for key, value in flat(part) if value != "auto"}
    said |= {alias for key, alias in SAID_BY_THE_TRAINER.items() if key in said}
    for part in resolved:
        for key, value in flat(part):
            if key in said or key in SILENT or value is None or f"{key}." in " ".join(said):
                continue
            if key in assumed:
                ours = assumed[key]
                theirs = value if not isinstance(ours, list) or isinstance(value, list) else [value]
                assert ours == theirs or (isinstance(ours, float) and (ours > 0) == (theirs > 0)), (kind, model, key, ours, value, given)
            else:
                assert key in NOT_IN_A_PLAN, (kind, model, key, value, given, found["assumed"])


# What DeepSpeed calls the Trainer's arguments.
SAID_BY_THE_TRAINER = {"per_device_train_batch_size": "train_micro_batch_size_per_gpu", "max_grad_norm": "gradient_clipping",
                       "weight_decay": "optimizer.params.weight_decay"}

# Resolved, and nothing in a plan depends on it; or it is the neutral value of an absent feature.
NOT_IN_A_PLAN = {"zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
                 "fsdp_config.limit_all_gathers", "optim", "weight_decay", "max_grad_norm", "per_device_train_batch_size",
                 "gradient_accumulation_steps", "fsdp_config.activation_checkpointing", "optimizer.params.weight_decay"}


def difference(a, b, path=""):
    if isinstance(a, dict) and isinstance(b, dict):
        return [row for key in sorted(a.keys() | b.keys()) for row in difference(a.get(key), b.get(key), f"{path}.{key}")]
    return [] if a == b else [(path, a if not isinstance(a, list) else a[:2], b if not isinstance(b, list) else b[:2])]


# Of a torchtitan TOML: what a plan depends on, with values that go together on 8 ranks.
TORCHTITAN = {
    "training.local_batch_size": [1, 2], "training.global_batch_size": [48, 96], "training.seq_len": [128, 2048], "training.max_norm": [1.0, 0.5],
    "training.dtype": ["float32"], "training.mixed_precision_param": ["bfloat16", "float32"], "training.mixed_precision_reduce": ["float32"],
    "training.enable_cpu_offload": [True, False], "parallelism.data_parallel_replicate_degree": [1, 2, 4],
    "parallelism.fsdp_reshard_after_forward": ["never", "always", "default"], "activation_checkpoint.mode": ["selective", "full", "none"],
    "activation_checkpoint.selective_ac_option": ["2", "op"], "optimizer.name": ["AdamW", "Adam"],
    "optimizer.implementation": ["fused", "foreach"], "optimizer.weight_decay": [0.1, 0.0], "compile.enable": [True, False]}


def check_torchtitan(folder, rng):
    """Every key that the file leaves out is named as assumed."""
    given = some(rng, TORCHTITAN, odds=0.5)
    if given.get("training.local_batch_size") is None:
        given.pop("training.global_batch_size", None)  # 8 samples per rank by default
    given["parallelism.data_parallel_shard_degree"] = RANKS // given.get("parallelism.data_parallel_replicate_degree", 1)
    lines = ["[model]", 'name = "llama3"', 'flavor = "8B"']
    for section in sorted({key.partition(".")[0] for key in given}):
        lines += [f"[{section}]"] + [f"{key.partition('.')[2]} = {json.dumps(value)}" for key, value in given.items()
                                     if key.startswith(section + ".")]
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    done = subprocess.run([PROGRAM, "import-run", str(folder / "run.toml"), "--cluster", "dgx-h100", "--json"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, (lines, done.stderr)
    assumed = set(json.loads(done.stdout)["assumed"])
    needed = TORCHTITAN.keys() - given.keys()
    if given.get("activation_checkpoint.mode", "selective") != "selective":
        needed -= {"activation_checkpoint.selective_ac_option"}
    assert needed <= assumed, (lines, needed - assumed)


def main():
    seed = int(os.environ.get("SHARDWRIGHT_SEED", "24"))
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for name, config in MODELS.items():
            (folder / f"{name}.json").write_text(json.dumps(config))
        write = lambda name, value: (folder / name).write_text(yaml.safe_dump(value) if name.endswith("yaml") else json.dumps(value))
        for _ in range(ROUNDS):
            model = rng.choice(sorted(MODELS))
            given = accelerate_file(rng, model)
            resolved = resolve_accelerate(folder, given, model)
            write("a.yaml", given), write("b.yaml", resolved)
            check(folder, "accelerate", model, [given], [resolved], (["a.yaml"], ["b.yaml"]))
            model = rng.choice(sorted(MODELS))
            given = trainer_file(rng, model)
            resolved = resolve_trainer(folder, given, model)
            write("a.json", given), write("b.json", resolved)
            check(folder, "trainer", model, [given], [resolved], (["a.json"], ["b.json"]))
            model = rng.choice(sorted(MODELS))
            trainer, file = deepspeed_files(rng)
            numbers, out = resolve_deepspeed(trainer, file, model)
            write("a.json", trainer), write("ds.json", file)
            write("b.json", {"output_dir": "out", **numbers}), write("out.json", out)
            check(folder, "deepspeed", model, [trainer, file], [{**numbers}, out], (["a.json", "ds.json"], ["b.json", "out.json"]))
            check_torchtitan(folder, rng)
    print(f"{4 * ROUNDS} random files, seed {seed}")


main()
print("passed")
