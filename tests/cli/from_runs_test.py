"""Random runs of each framework through import-run, `plan --from`, emit, and import-run of what was emitted.

Expected of each run that is read: the answer of `plan --from` is not slower than the run, as the framework that it came from will run it; and
the plan that comes back from the emitted files is the plan that emit predicted. All keys that the readers use are drawn.
SHARDWRIGHT_RUNS=N: N runs of each framework (100). SHARDWRIGHT_SEED and SHARDWRIGHT_FRAMEWORK=NAME choose others."""

import json
import os
import pathlib
import random
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import TESTS, ShardwrightTestCase, main

RUNS = int(os.environ.get("SHARDWRIGHT_RUNS", 100))
SEED = os.environ.get("SHARDWRIGHT_SEED", "49")
ONE = os.environ.get("SHARDWRIGHT_FRAMEWORK", "")
KEYS = json.loads((TESTS.parent / "planner/importers/setting_keys.json").read_text())["frameworks"]
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
         "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 1024, "n_layer": 4, "n_head": 16,
        "n_positions": 2048}
CLASSES = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}
CLUSTERS = {"h100": (8, ["--cluster", "dgx-h100"]), "two": (16, ["--cluster", "dgx-a100", "--nodes", "2"]),
            "slow": (8, ["--cluster", "a100-80 x4, nvlink 300 GB/s, nic 1x25 Gbit/s", "--nodes", "2"]),
            "pcie": (4, ["--cluster", "pcie-8x4090", "--gpus", "4"])}
# Predicted times are whole nanoseconds; a plan that goes through a file may round once.
SLACK = 1.0001


def yaml_of(value, indent=""):
    """JSON's scalars and lists are YAML's."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{key}:", yaml_of(item, indent + "  ").rstrip("\n")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(item)}")
    return "\n".join(lines) + "\n"


def nested(flat):
    root = {}
    for key, value in flat.items():
        *above, last = key.split(".")
        table = root
        for word in above:
            table = table.setdefault(word, {})
        table[last] = value
    return root


def toml_of(flat):
    lines = []
    for section in sorted({key.rpartition(".")[0] for key in flat}):
        lines += [f"[{section}]"] + [f"{key.rpartition('.')[2]} = {json.dumps(value)}" for key, value in flat.items()
                                     if key.rpartition(".")[0] == section]
    return "\n".join(lines) + "\n"


def leaves(value, prefix=""):
    for key, item in value.items():
        yield prefix + key
        if isinstance(item, dict):
            yield from leaves(item, f"{prefix}{key}.")


class Run:
    """Settings files of one run, and how they are read."""

    def __init__(self, rng, model="", cluster=""):
        self.rng = rng
        self.model = model or rng.choice(("llama", "llama", "gpt2"))
        self.cluster = cluster or rng.choice(sorted(CLUSTERS))
        self.ranks, self.flags = CLUSTERS[self.cluster]
        self.flags = list(self.flags)
        self.files = {}
        self.said = {}    # {framework's table of keys: keys that were written}
        self.recipe = {}  # what a script says again when it starts the emitted files
        self.named = []   # the files of the command line; the others are named by them

    def some(self, choices, odds=0.4):
        return {key: self.rng.choice(values) for key, values in choices.items() if self.rng.random() < odds}

    def add(self, name, table, value, text, is_named=True):
        self.files[name] = text
        self.said.setdefault(table, set()).update(leaves(value))
        self.named += [name] if is_named else []

    def batch(self):
        return {"micro": self.rng.choice((1, 1, 2, 4)), "steps": self.rng.choice((1, 1, 2, 4))}


# --- torchtitan

def torchtitan(rng):
    run = Run(rng, "titan")
    batch = run.batch()
    flat = {"model.name": "qwen3", "model.flavor": "0.6B"}
    old = rng.random() < 0.2
    table = "training" if old else "parallelism"
    flat.update(run.some({"optimizer.name": ["Adam", "AdamW"], "optimizer.lr": [1e-4], "optimizer.weight_decay": [0.0, 0.1],
                          "training.seq_len": [1024, 2048], "training.max_norm": [1.0, 0.5], "training.dtype": ["float32", "bfloat16"],
                          "training.mixed_precision_param": ["bfloat16", "float32"], "training.mixed_precision_reduce": ["float32"],
                          "training.enable_cpu_offload": [True, False, False], "activation_checkpoint.mode": ["none", "full", "selective"],
                          "activation_checkpoint.selective_ac_option": ["op", "1", "2", "3"],
                          f"{table}.fsdp_reshard_after_forward": ["default", "always", "never"], "lr_scheduler.warmup_steps": [10]}))
    flat.update(run.some({"optimizer.fused": [True, False]} if old else {"optimizer.implementation": ["fused", "foreach", "for-loop"]}))
    flat.update(run.some({"training.compile": [True, False], "training.tensor_parallel_degree": [1]} if old else
                         {"compile.enable": [True, False]}, 0.5))
    if not old:
        flat.update(run.some({"compile.components": [["model", "loss"], ["model"]]}))
    if rng.random() < 0.8:
        flat["training.batch_size" if old else "training.local_batch_size"] = batch["micro"]
        flat.update(run.some({"training.global_batch_size": [batch["micro"] * batch["steps"] * run.ranks, -1]}, 0.6))
    if rng.random() < 0.4:
        replicate = rng.choice((1, 2, run.ranks // 2, run.ranks))
        flat[f"{table}.data_parallel_replicate_degree"] = replicate
        shard = rng.choice((-1, run.ranks // replicate))
        flat["training.data_parallel_degree" if old and replicate == 1 else f"{table}.data_parallel_shard_degree"] = shard
    else:
        flat.update(run.some({f"{table}.data_parallel_shard_degree": [-1, run.ranks]}))
    if rng.random() < 0.6 and run.cluster == "h100":
        short = "float8" if old or rng.random() < 0.5 else "quantize.linear.float8"
        flat.update({"model.converters": [short], f"{short}.filter_fqns": ["output"]})
        flat.update(run.some({f"{short}.recipe_name": ["tensorwise", "rowwise"], f"{short}.enable_fsdp_float8_all_gather": [False]}))
    run.add("run.toml", "torchtitan", nested(flat), toml_of(flat))
    return run


# --- Accelerate, the Trainer, DeepSpeed

def accelerate_table(run, kind):
    rng = run.rng
    table = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "num_machines": 2 if
             "--nodes" in run.flags else 1, "num_processes": run.ranks}
    table.update(run.some({"mixed_precision": ["no", "bf16", "bf16", "fp16"], "machine_rank": [0], "rdzv_backend": ["static"],
                           "main_process_ip": ["10.0.0.1"], "main_process_port": [29500], "debug": [False], "main_training_function": ["main"],
                           "use_cpu": [False]}, 0.5))
    return table


def fsdp_of(run, version):
    """fsdp_config of Accelerate's files."""
    rng = run.rng
    config = {"fsdp_version": version}
    policy = rng.choice(("TRANSFORMER_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", None))
    if policy:
        config["fsdp_auto_wrap_policy"] = policy
        config.update(run.some({"fsdp_transformer_layer_cls_to_wrap": [CLASSES[run.model]]} if policy[0] == "T" else
                               {"fsdp_min_num_params": [10**6, 10**8]} if policy[0] == "S" else {}, 0.6))
    config.update(run.some({"fsdp_offload_params": [True, False, False], "fsdp_activation_checkpointing": [True, False],
                            "fsdp_state_dict_type": ["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
                            "fsdp_cpu_ram_efficient_loading": [True, False]}))
    if version == 1:
        config.update(run.some({"fsdp_sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"],
                                "fsdp_backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
                                "fsdp_forward_prefetch": [True, False], "fsdp_use_orig_params": [True, False],
                                "fsdp_sync_module_states": [True], "fsdp_backward_prefetch_policy": ["BACKWARD_PRE"]}))
    else:
        config.update(run.some({"fsdp_reshard_after_forward": [True, False]}))
        if config.get("fsdp_activation_checkpointing"):
            config.update(run.some({"fsdp_activation_checkpointing_offload": [True, False]}))
    return config


def accelerate_fsdp(rng, version):
    run = Run(rng)
    table = accelerate_table(run, "FSDP")
    table["fsdp_config"] = fsdp_of(run, version)
    if version == 2 and rng.random() < 0.3:
        replicate = rng.choice((1, 2, run.ranks // 2))
        table["parallelism_config"] = {"parallelism_config_dp_replicate_size": replicate,
                                       "parallelism_config_dp_shard_size": run.ranks // replicate}
    run.add("accelerate.yaml", "accelerate", table, yaml_of(table))
    script_flags(run, has_recompute=True)
    return run


def script_flags(run, has_recompute=False, has_micro=False, has_accumulation=False):
    """What a script decides where no file of the run says it."""
    batch = run.batch()
    run.flags += ["--seq", run.rng.choice(("512", "2048"))]
    run.flags += ["--micro-batch", str(batch["micro"])] if not has_micro else []
    run.flags += ["--accumulation", str(batch["steps"])] if not has_accumulation else []
    run.flags += ["--optimizer", run.rng.choice(("adamw", "adamw:fused", "sgd"))] if run.rng.random() < 0.4 else []
    run.flags += ["--recompute", run.rng.choice(("none", "full"))] if not has_recompute else []


def deepspeed_table(run, stage, may_be_auto):
    rng = run.rng
    auto = ["auto"] if may_be_auto else []
    zero = {"stage": stage}
    zero.update(run.some({"contiguous_gradients": [True, False], "overlap_comm": [True, False], "reduce_bucket_size": [*auto, 5e8, 2e8],
                          "reduce_scatter": [True, False]}))
    if stage in (1, 2):
        zero.update(run.some({"allgather_bucket_size": [2e8, 5e8]}))
    if stage == 3:
        names = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        old = "" if rng.random() < 0.2 else "stage3_"
        zero.update(run.some({old + names[0]: [*(auto if old else []), 10**7, 5e7], old + names[1]: [*(auto if old else []), 10**5, 10**6],
                              old + names[2]: [1e9, 10**8], old + names[3]: [1e9, 10**8], "sub_group_size": [1e9, 10**8]}))
        kind = rng.choice(("none", "none", "none", "optimizer", "both", "old", "old both", "older"))
        if kind in ("optimizer", "both"):
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if kind == "both":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        if kind.startswith("old"):
            zero.update({"cpu_offload": True, "cpu_offload_pin_memory": True, "cpu_offload_use_pin_memory": True})
            zero.update({"cpu_offload_param": True} if kind == "old both" else {"cpu_offload_params": True} if kind == "older" else {})
        if rng.random() < 0.15:
            zero["mics_shard_size"] = rng.choice((-1, run.ranks // 2))
        if rng.random() < 0.2:
            zero["leaf_module"] = {"classes": [CLASSES[run.model]]}
    return {"zero_optimization": zero}


def deepspeed(rng):
    """DeepSpeed's file alone."""
    run = Run(rng)
    table = deepspeed_table(run, rng.choice((0, 1, 2, 3, 3)), may_be_auto=False)
    batch = run.batch()
    sizes = {"train_micro_batch_size_per_gpu": batch["micro"], "gradient_accumulation_steps": batch["steps"],
             "train_batch_size": batch["micro"] * batch["steps"] * run.ranks}
    sizes.pop(rng.choice(sorted(sizes) + ["none"]), None)
    table.update(sizes)
    table.update(rng.choice(({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {"bf16": {"enabled": "auto"}})))
    table.update(run.some({"gradient_clipping": [1.0, 0.0], "communication_data_type": ["fp32", "bf16", "fp16"], "steps_per_print": [10]}))
    if rng.random() < 0.8:
        kind = rng.choice(("Adam", "AdamW", "SGD"))
        params = run.some({"lr": [1e-4], "weight_decay": [0.0, 0.01], **({"momentum": [0.0, 0.9]} if kind == "SGD" else
                                                                      {"torch_adam": [True, False]})}, 0.5)
        table["optimizer"] = {"type": kind, "params": params}
    run.add("ds.json", "deepspeed", table, json.dumps(table))
    run.flags += ["--seq", rng.choice(("512", "2048")), "--recompute", rng.choice(("none", "full"))]
    run.flags += ["--precision", "bf16-mixed"] if "bf16" in table and table["bf16"]["enabled"] == "auto" else []
    return run


def accelerate_deepspeed(rng):
    """Accelerate's YAML over DeepSpeed, by a file or by keys of its own."""
    run = Run(rng)
    table = accelerate_table(run, "DEEPSPEED")
    stage = rng.choice((1, 2, 3, 3))
    if rng.random() < 0.5:
        inner = deepspeed_table(run, stage, may_be_auto=True)
        inner.update({"train_micro_batch_size_per_gpu": rng.choice((1, 2)), "gradient_accumulation_steps": rng.choice((1, 2))})
        run.add("ds.json", "deepspeed", inner, json.dumps(inner), is_named=False)
        table["deepspeed_config"] = {"deepspeed_config_file": "ds.json", **run.some({"zero3_init_flag": [True]})}
        table.pop("mixed_precision", None)
        inner.update({"bf16": {"enabled": True}})
        run.files["ds.json"] = json.dumps(inner)
    else:
        table["deepspeed_config"] = {"zero_stage": stage, **run.some({"gradient_accumulation_steps": [1, 2], "gradient_clipping": [1.0],
                                                                     "zero3_init_flag": [True, False]})}
        offload = rng.choice(("none", "none", "cpu"))
        table["deepspeed_config"].update(run.some({"offload_optimizer_device": ["none"], "offload_param_device": ["none"],
                                                   "offload_optimizer_nvme_path": ["none"], "offload_param_nvme_path": ["none"]}))
        if stage == 3 and offload == "cpu":
            table["deepspeed_config"]["offload_optimizer_device"] = "cpu"
            table["deepspeed_config"].update(run.some({"offload_param_device": ["cpu", "none"]}))
    run.add("accelerate.yaml", "accelerate", table, yaml_of(table))
    script_flags(run, has_micro="ds.json" in run.files, has_accumulation=True)
    return run


def accelerate_ddp(rng):
    run = Run(rng)
    table = accelerate_table(run, "MULTI_GPU")
    run.add("accelerate.yaml", "accelerate", table, yaml_of(table))
    script_flags(run)
    return run


def trainer_numbers(run, is_cheap=True):
    batch = run.batch()
    table = {"per_device_train_batch_size": batch["micro"], "gradient_accumulation_steps": batch["steps"]}
    table.update(run.some({"optim": ["adamw_torch", "adamw_torch_fused", "sgd", *(() if not is_cheap else (
        "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"))], "weight_decay": [0.0, 0.1], "max_grad_norm": [0.0, 1.0],
        "logging_steps": [1]}, 0.5))
    table.update(run.rng.choice(({}, {"bf16": True}, {"bf16": True}, {"fp16": True})))
    return table


def trainer_fsdp(run, prefix):
    """fsdp and fsdp_config of a Trainer's file: keys with and without "fsdp_"."""
    rng = run.rng
    version = rng.choice((1, 2))
    accelerate = fsdp_of(run, version)
    for key in ("fsdp_version", "fsdp_sharding_strategy", "fsdp_backward_prefetch_policy", "fsdp_offload_params",
                "fsdp_activation_checkpointing_offload"):
        accelerate.pop(key, None)
    config = {key if prefix else key.removeprefix("fsdp_"): value for key, value in accelerate.items()}
    config["fsdp_version" if prefix else "version"] = version
    config.update(run.some({f"{prefix}cpu_offload": [True, False]}, 0.3))
    name = f"{prefix}backward_prefetch"
    if name in config:
        config[name] = config[name].lower()
    if config.get(f"{prefix}backward_prefetch") == "no_prefetch":
        del config[name]
    if version == 1:
        config.update(run.some({f"{prefix}reshard_after_forward": ["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"],
                                f"{prefix}limit_all_gathers": [True, False]}))
    return version, config


def trainer(rng, script=None):
    """TrainingArguments, alone or among those of a script."""
    run = Run(rng, "llama" if script else "")
    kind = rng.choice(("fsdp", "fsdp", "fsdp words", "ddp", "deepspeed", "accelerate"))
    table = trainer_numbers(run, is_cheap=kind != "deepspeed")
    name = "run.json" if not script else "run.yaml"
    if kind == "fsdp":
        table["fsdp"] = True
        _, table["fsdp_config"] = trainer_fsdp(run, rng.choice(("", "fsdp_")))
    elif kind == "fsdp words":
        table["fsdp"] = rng.choice(("full_shard auto_wrap", "shard_grad_op auto_wrap", "full_shard auto_wrap offload", "hybrid_shard auto_wrap",
                                    ["full_shard", "auto_wrap"], "full_shard"))
        if "auto_wrap" in table["fsdp"]:
            table.update(run.some({"fsdp_transformer_layer_cls_to_wrap": [CLASSES[run.model]]}))
            if "fsdp_transformer_layer_cls_to_wrap" not in table:
                table.update(run.some({"fsdp_min_num_params": [10**6]}))
    elif kind == "ddp":
        table.update(run.some({"ddp_find_unused_parameters": [True, False], "ddp_bucket_cap_mb": [25, 100]}))
        table.update(run.some({"ddp_static_graph": [False]}))
    elif kind == "deepspeed":
        inner = deepspeed_table(run, rng.choice((1, 2, 3, 3)), may_be_auto=True)
        inner.update({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}})
        inner.update(run.some({"gradient_clipping": ["auto"], "train_batch_size": ["auto"], "fp16": [{"enabled": "auto"}]}))
        if "offload_optimizer" in inner["zero_optimization"]:
            table["optim"] = "adamw_torch"
        run.add("ds.json", "deepspeed", inner, json.dumps(inner), is_named=False)
        table["deepspeed"] = "ds.json"
    else:
        inner = accelerate_table(run, "FSDP")
        inner["fsdp_config"] = fsdp_of(run, rng.choice((1, 2)))
        run.add("accelerate.yaml", "accelerate", inner, yaml_of(inner))
        if inner.get("fsdp_config", {}).get("fsdp_activation_checkpointing"):
            table["gradient_checkpointing"] = False
    if not table.get("fsdp_config", {}).get("activation_checkpointing") and not table.get("fsdp_config", {}).get(
            "fsdp_activation_checkpointing") and "gradient_checkpointing" not in table:
        table["gradient_checkpointing"] = rng.random() < 0.5
    else:
        table["gradient_checkpointing"] = False
    table.update(rng.choice(({}, {}, {"torch_compile": True}, {"use_liger_kernel": True})) if run.model == "llama" else {})
    table.update(run.some({"accelerator_config": [{"gradient_accumulation_kwargs": {"sync_each_batch": True}}]}, 0.15))
    table["output_dir"] = "out"
    if script:
        script(run, table)
    elif rng.random() < 0.2 and isinstance(table.get("fsdp_config"), dict):
        inner = table["fsdp_config"]
        run.said.setdefault("trainer", set()).update("fsdp_config." + key for key in inner)
        run.files["fsdp.json"] = json.dumps(inner)
        table["fsdp_config"] = "fsdp.json"
    run.add(name, "trainer", table, json.dumps(table) if not script else yaml_of(table))
    if not script:
        run.flags += ["--seq", rng.choice(("512", "2048"))]
    return run


def trl(run, table):
    rng = run.rng
    table["model_name_or_path"] = "./" + run.model
    length = rng.choice(("max_length", "max_length", "max_seq_length"))
    table.update({length: rng.choice((512, 1024)), "packing": True, "dataset_name": "some/text"})
    table.update(run.some({"attn_implementation": ["flash_attention_2", "sdpa", "eager", "flash_attention_3"],
                           rng.choice(("dtype", "torch_dtype")): ["bfloat16", "float32"], "loss_type": ["nll", "chunked_nll"],
                           "activation_offloading": [True, False]}))
    if table.get("use_liger_kernel"):
        table.pop("loss_type", None)
    if rng.random() < 0.4:
        table["use_peft"] = True
        table.update(run.some({"lora_r": [8, 64], "lora_alpha": [16], "lora_dropout": [0.0, 0.1], "use_rslora": [True, False],
                               "lora_target_modules": ["all-linear", ["q_proj", "v_proj"]], "use_dora": [False], "lora_modules_to_save": [[]]}))
        if "deepspeed" not in table:
            table.update(run.some({"load_in_4bit": [True], "load_in_8bit": [False], "use_bnb_nested_quant": [True, False], "bnb_4bit_quant_type": ["nf4"]}, 0.3))


def llamafactory(run, table):
    rng = run.rng
    table["model_name_or_path"] = "./" + run.model
    table.update({"stage": rng.choice(("sft", "pt")), "do_train": True, "template": "llama3", "dataset": "alpaca_en_demo"})
    table.update(run.some({"cutoff_len": [512, 1024], "flash_attn": ["fa2", "disabled", "auto", "fa3"]}, 0.6))
    if "use_liger_kernel" in table:
        table["enable_liger_kernel"] = table.pop("use_liger_kernel")
    if table.pop("gradient_checkpointing"):
        table.update(run.some({"disable_gradient_checkpointing": [False]}))
    else:
        table["disable_gradient_checkpointing"] = True
    kind = rng.choice(("full", "full", "lora", None))
    table.update({"finetuning_type": kind} if kind else {})
    if kind != "full":
        table.update(run.some({"lora_rank": [8, 64], "lora_alpha": [16], "lora_dropout": [0.0], "lora_target": ["all", "q_proj,v_proj"],
                               "use_rslora": [True, False], "additional_target": [""]}))
        if "deepspeed" not in table:
            table.update(run.some({"quantization_bit": [4], "quantization_method": ["bnb"], "quantization_type": ["nf4"],
                                   "double_quantization": [True, False]}, 0.3))


def llamafactory_v1(rng):
    run = Run(rng, "llama")
    batch = run.batch()
    table = {"model": "./llama", "model_class": "llm", "micro_batch_size": batch["micro"], "output_dir": "out",
             "dist_config": {"name": "fsdp2", **run.some({"reshard_after_forward": [True, False], "offload_params": [True, False, False]})}}
    table.update(run.some({"global_batch_size": [batch["micro"] * batch["steps"] * run.ranks], "cutoff_len": [512, 1024],
                           "bf16": [True, False], "max_grad_norm": [1.0], "enable_activation_checkpointing": [True, False],
                           "flash_attn": ["fa2", "eager"], "kernel_config": [{"name": "auto"}, {"name": "liger_kernel"}]}, 0.5))
    if rng.random() < 0.2:
        inner = deepspeed_table(run, rng.choice((2, 3)), may_be_auto=True)
        inner.update({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}})
        run.add("ds.json", "deepspeed", inner, json.dumps(inner), is_named=False)
        table["dist_config"] = {"name": "deepspeed", "config_file": "ds.json"}
    if rng.random() < 0.4:
        table["peft_config"] = {"name": "lora", **run.some({"r": [8, 16], "lora_alpha": [16], "lora_dropout": [0.05], "use_rslora": [True],
                                                            "target_modules": ["all", ["q_proj", "v_proj"]]})}
        if rng.random() < 0.5 and table["dist_config"]["name"] == "fsdp2":
            table["quant_config"] = {"name": "bnb", "quantization_bit": 4, **run.some({"double_quantization": [True, False]})}
    run.add("v1.yaml", "llamafactory-v1", table, yaml_of(table))
    return run


def axolotl(rng):
    run = Run(rng, "llama")
    batch = run.batch()
    table = {"base_model": "./llama", "micro_batch_size": batch["micro"], "output_dir": "out", "datasets": [{"path": "x"}]}
    table.update(rng.choice(({}, {"gradient_accumulation_steps": batch["steps"]}, {"batch_size": batch["micro"] * batch["steps"]})))
    table.update(rng.choice(({}, {"bf16": "auto"}, {"bf16": True}, {"bfloat16": True}, {"fp16": True})))
    table.update(run.some({"sequence_len": [512, 1024], "optimizer": ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "sgd"],
                           "weight_decay": [0.0, 0.1], "max_grad_norm": [1.0], "attn_implementation": ["flash_attention_2", "eager"],
                           "gradient_checkpointing": [True, False, "offload"], "activation_offloading": [True, False, "legacy"],
                           "torch_compile": [True, False, False]}))
    if rng.random() < 0.2 and "attn_implementation" not in table:
        table["eager_attention"] = True
    kind = rng.choice(("fsdp", "fsdp", "ddp", "deepspeed"))
    if kind == "fsdp":
        version, config = trainer_fsdp(run, rng.choice(("", "fsdp_")))
        for key in [key for key in config if key.endswith("version")]:
            del config[key]
        if rng.random() < 0.5:
            table["fsdp_version"] = version
        else:
            config[rng.choice(("version", "fsdp_version"))] = version
        if rng.random() < 0.3:
            config[rng.choice(("offload_params", "fsdp_offload_params"))] = False
        if version == 1 and rng.random() < 0.3:
            config.pop("reshard_after_forward", None), config.pop("fsdp_reshard_after_forward", None)
            config[rng.choice(("sharding_strategy", "fsdp_sharding_strategy"))] = rng.choice(("FULL_SHARD", "SHARD_GRAD_OP"))
        table["fsdp_config"] = config
        if rng.random() < 0.2:
            table["fsdp"] = ["full_shard", "auto_wrap"]
        if any(key.endswith("activation_checkpointing") and value for key, value in config.items()):
            table.pop("gradient_checkpointing", None), table.pop("activation_offloading", None)
        if version == 2 and rng.random() < 0.3:
            table.update(run.some({"dp_shard_size": [run.ranks // 2, run.ranks]}, 0.8))
            if "dp_shard_size" in table:
                table.update(run.some({"dp_replicate_size": [run.ranks // table["dp_shard_size"]]}))
    elif kind == "deepspeed":
        inner = deepspeed_table(run, rng.choice((1, 2, 3)), may_be_auto=True)
        inner.update({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}})
        table["optimizer"] = "adamw_torch"
        run.add("ds.json", "deepspeed", inner, json.dumps(inner), is_named=False)
        table["deepspeed"] = "ds.json"
    plugins = run.some({"liger": [1], "cut": [1]}, 0.25)
    if plugins:
        table["plugins"] = [{"liger": "axolotl.integrations.liger.LigerPlugin",
                             "cut": "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"}[name] for name in plugins]
        if "liger" in plugins:
            table.update(rng.choice(({}, {"liger_rope": True, "liger_rms_norm": True, rng.choice(("liger_glu_activation", "liger_swiglu")): True})))
            table.update({} if "cut" in plugins else run.some({"liger_fused_linear_cross_entropy": [True, False]}))
        else:
            table.update(run.some({"cut_cross_entropy": [True, False]}))
    table.update(run.some({"model_quantization_config": ["Mxfp4Config"]}, 0.1))
    if "model_quantization_config" in table:
        table["model_quantization_config_kwargs"] = {"dequantize": True}
    adapter = rng.choice(("", "", "lora", "qlora"))
    if adapter and kind != "deepspeed":
        table["adapter"] = adapter
        table["lora_r"] = rng.choice((8, 32))
        table.update({"load_in_4bit": True} if adapter == "qlora" else {"load_in_8bit": True} if kind == "ddp" and rng.random() < 0.2 else {})
        table.update(rng.choice(({"lora_target_linear": True}, {"lora_target_modules": ["q_proj", "v_proj"]}, {})))
        table.update(run.some({"lora_alpha": [16], "lora_dropout": [0.05], "peft_use_rslora": [True], "lora_mlp_kernel": [True],
                               "lora_qkv_kernel": [True], "lora_o_kernel": [True], "lora_embedding_kernel": [True], "peft_use_dora": [False],
                               "lora_modules_to_save": [[]]}))
        table.update(run.some({"bnb_config_kwargs": [{"bnb_4bit_use_double_quant": False}]}) if adapter == "qlora" else {})
    table.update(run.some({"accelerator_config": [{"gradient_accumulation_kwargs": {"sync_each_batch": True}}]}, 0.1))
    run.add("axolotl.yaml", "axolotl", table, yaml_of(table))
    return run


def words_of(value):
    """What a command line says of a value."""
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def command_line(rng):
    """A text file with the launcher's line: torchrun, accelerate launch or deepspeed before a script of the Trainer."""
    run = Run(rng, "llama")
    table = {**trainer_numbers(run), "output_dir": "out", "model_name_or_path": "./llama", "gradient_checkpointing": rng.random() < 0.5}
    launcher = rng.choice(("torchrun", "accelerate", "deepspeed", "flags"))
    nodes = 2 if "--nodes" in run.flags else 1
    said = {"nnodes": nodes, "nproc_per_node": run.ranks // nodes}
    if launcher == "torchrun":
        table.update(rng.choice(({"fsdp": "full_shard auto_wrap"}, {"fsdp": "shard_grad_op auto_wrap",
                                                                  "fsdp_transformer_layer_cls_to_wrap": CLASSES["llama"]}, {})))
    elif launcher in ("accelerate", "flags"):
        inner = accelerate_table(run, "FSDP")
        inner.pop("use_cpu", None)
        inner["fsdp_config"] = fsdp_of(run, rng.choice((1, 2)))
        if inner["fsdp_config"].get("fsdp_activation_checkpointing"):
            table["gradient_checkpointing"] = False
        run.add("accelerate.yaml", "accelerate", inner, yaml_of(inner), is_named=False)
        said = {"config_file": "accelerate.yaml", **({"num_machines": nodes, "num_processes": run.ranks} if launcher == "flags" else {})}
    else:
        inner = deepspeed_table(run, rng.choice((1, 2, 3)), may_be_auto=True)
        inner.update({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}})
        table["optim"] = "adamw_torch"
        run.add("ds.json", "deepspeed", inner, json.dumps(inner), is_named=False)
        table["deepspeed"] = "ds.json"
        said = {"num_gpus": run.ranks // nodes}
    kind = rng.choice(("trl", "clm", "clm", "own"))
    table.update({"dataset_name": "x", "max_length": 512} if kind == "trl" else {"dataset_name": "x", "block_size": 512} if kind == "clm" else
                 {"model_max_length": 512, **run.some({"lora_enable": [False], "use_lora": [False]})})
    starts = {"torchrun": "torchrun", "accelerate": "accelerate launch", "flags": "accelerate launch", "deepspeed": "deepspeed"}[launcher]
    words = [*starts.split(), *(word for key, value in said.items() for word in (f"--{key}", *words_of(value))), "train.py",
             *(word for key, value in table.items() for word in (f"--{key}", *([f'"{value}"'] if key == "fsdp" else words_of(value))))]
    run.add("train.sh", "trainer", {**said, **table}, " ".join(words) + "\n")
    return run


GENERATORS = {"torchtitan": torchtitan, "accelerate-fsdp1": lambda rng: accelerate_fsdp(rng, 1),
              "accelerate-fsdp2": lambda rng: accelerate_fsdp(rng, 2), "accelerate-deepspeed": accelerate_deepspeed,
              "accelerate-ddp": accelerate_ddp, "deepspeed": deepspeed, "trainer": trainer, "trl": lambda rng: trainer(rng, trl),
              "llamafactory": lambda rng: trainer(rng, llamafactory), "llamafactory-v1": llamafactory_v1, "axolotl": axolotl, "command-line": command_line}


# --- The way around

# Keys of the readers that no run has, since what they turn on is refused or is another file's: {table: keys}.
NOT_DRAWN = {
    "trainer": {"lora_bias", "lora_target_parameters", "bnb_4bit_quant_storage"},
    "axolotl": {"lora_target_parameters", "lora_rank_pattern.", "lora_alpha_pattern.", "peft_layer_replication", "peft_trainable_token_indices",
                "peft_autocast_adapter_dtype", "fsdp_config.min_num_params"},
    "llamafactory-v1": {"peft_config.use_dora", "peft_config.modules_to_save", "peft_config.adapter_name_or_path", "optim_config.name"}}


def parts(plan):
    """What a plan says, without what belongs to the machine that reads it."""
    return {"kernel_set": plan["kernel_set"], "job": {k: v for k, v in plan["job"].items() if k != "memory_margin"}, "plan": plan["plan"]}


def differences(a, b, path=""):
    if isinstance(a, dict) and isinstance(b, dict):
        return [row for key in sorted(a.keys() | b.keys()) for row in differences(a.get(key), b.get(key), f"{path}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [row for i, pair in enumerate(zip(a, b)) for row in differences(*pair, f"{path}[{i}]")][:4]
    return [] if a == b else [f"{path}: {json.dumps(a)[:150]} -> {json.dumps(b)[:150]}"]


OPTIMIZERS = {("adamw", "foreach"): "adamw_torch", ("adamw", "fused"): "adamw_torch_fused", ("adamw", "for_loop"): "adamw_hf",
              ("sgd", "foreach"): "sgd"}
STATES = {"bnb_8bit": "adamw_bnb_8bit", "bnb_8bit_paged": "paged_adamw_8bit", "bnb_32bit_paged": "paged_adamw_32bit"}


def recipe_of(emitted, model, keeps_fp32=False):
    """The recipe of TRL's script, or LLaMA-Factory's, that starts an emitted run: what emit leaves to the user's script. `keeps_fp32`: adapters
    above quantized weights."""
    job, plan = emitted["job"], emitted["plan"]
    optimizer = job["optimizer"]
    word = STATES.get(optimizer.get("states")) or OPTIMIZERS.get((optimizer["kind"], optimizer["impl"]), "adamw_torch")
    recipe = {"model_name_or_path": "./" + model, "max_length": job["sequence_length"], "loss_type": "nll",
              "per_device_train_batch_size": plan["micro_batch"], "gradient_accumulation_steps": plan["accumulation"], "optim": word,
              "weight_decay": 0.01 if optimizer["weight_decay"] else 0.0, "max_grad_norm": 1.0 if job["clip_gradients"] else 0.0,
              "gradient_checkpointing": False, "activation_offloading": plan["offload"]["activations"],
              "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": plan["sync"] == "every"}},
              **{word: job["precision"]["param"] == word != job["precision"]["master"] for word in ("bf16", "fp16")}}
    if job["lora_rank"] > 0 and keeps_fp32:  # LLaMA-Factory's words
        recipe.update({"stage": "sft", "do_train": True, "finetuning_type": "lora", "cutoff_len": recipe.pop("max_length"),
                       "lora_rank": job["lora_rank"], "lora_alpha": job.get("lora_alpha", job["lora_rank"]),
                       "lora_dropout": job.get("lora_dropout", 0.0), "lora_target": ",".join(job["lora_targets"])})
        stored = job.get("frozen_format", "")
        recipe.update({"quantization_bit": 4, "double_quantization": stored == "nf4_double"} if stored.startswith("nf4") else
                      {"quantization_bit": 8} if stored == "int8" else {})
        del recipe["loss_type"]
        recipe["disable_gradient_checkpointing"] = not recipe["gradient_checkpointing"]
    elif job["lora_rank"] > 0:
        recipe.update({"use_peft": True, "lora_r": job["lora_rank"], "lora_alpha": job.get("lora_alpha", job["lora_rank"]),
                       "lora_dropout": job.get("lora_dropout", 0.0), "lora_target_modules": job["lora_targets"]})
        stored = job.get("frozen_format", "")
        recipe.update({"load_in_4bit": True, "use_bnb_nested_quant": stored == "nf4_double"} if stored.startswith("nf4") else
                      {"load_in_8bit": True} if stored == "int8" else {})
    if plan["dialect"] == "ddp":
        recipe.update({"ddp_find_unused_parameters": plan["find_unused_parameters"], "ddp_static_graph": plan["static_graph"]})
    if job["precision"]["master"] == "bf16" or job.get("frozen_format") == "param":
        recipe["dtype"] = "bfloat16"
    return recipe


class FromRuns(ShardwrightTestCase):

    def call(self, *words):
        code, out, err = self.run_program(*words)
        return code, out, "\n".join(line for line in err.splitlines() if not line.startswith("searching for "))

    def time_of(self, plan):
        code, out, err = self.call("simulate", plan, "--json")
        self.assertIn(code, (0, 1), err)
        answer = json.loads(out)
        return answer["step_time_s"], code == 0 and answer.get("fits", True)

    def read_back(self, run, target, emitted):
        """The flags and files by which the emitted settings are read as a user of them reads them."""
        files = sorted(str(path.relative_to(self.folder)) for path in (self.folder / "run").iterdir() if path.suffix != ".py")
        kernels = emitted["kernel_set"]
        flags = [word for word in run.flags]
        for flag in ("--seq", "--micro-batch", "--accumulation", "--optimizer", "--recompute", "--precision"):
            if flag in flags:
                del flags[flags.index(flag):flags.index(flag) + 2]
        flags += ["--kernel-set", kernels["name"], "--attention", kernels["attention"], "--loss-chunks", str(kernels["loss_chunks"])]
        if target == "torchtitan":
            return files, [*flags, "--model", "qwen3-0.6b"]
        recipe = recipe_of(emitted, run.model, bool(run.said.keys() & {"axolotl"}) or "finetuning_type" in run.said.get("trainer", ()) or
                           "template" in run.said.get("trainer", ()))
        if target == "trainer":
            given = json.loads((self.folder / "run/training_arguments.json").read_text())
            recipe = {**recipe, **given}
            files.remove("run/training_arguments.json")
        elif target == "deepspeed":
            recipe["deepspeed"] = "run/ds_config.json"
            recipe["gradient_checkpointing"] = bool(emitted["plan"]["recompute"])
            files.remove("run/ds_config.json")
        elif "deepspeed_config" in (self.folder / "run/accelerate.yaml").read_text() or "MULTI_GPU" in (
                self.folder / "run/accelerate.yaml").read_text():
            recipe["gradient_checkpointing"] = bool(emitted["plan"]["recompute"])
        if "disable_gradient_checkpointing" in recipe:
            recipe["disable_gradient_checkpointing"] = not recipe["gradient_checkpointing"]
        (self.folder / "recipe.json").write_text(json.dumps(recipe))
        files = [name for name in files if not name.endswith("ds_config.json")]
        return ["recipe.json", *files], flags

    def around(self, name, run):
        """What became of the run: "refused", or the words for what is wrong; none where nothing is."""
        for file, text in run.files.items():
            (self.folder / file).write_text(text)
        model = ["--model", "qwen3-0.6b"] if run.model == "titan" else ["--model", "./" + run.model]
        code, _, err = self.call("import-run", *run.named, *model, *run.flags, "-o", "plan.json")
        if code == 3:
            return [("refused", err)]
        if code != 0:
            return [("import-run", err)]
        before, fits = self.time_of("plan.json")
        code, _, err = self.call("plan", "--from", "plan.json", "-o", "best.json")
        if code == 1:
            return [("nothing fits", err)] if not fits else [("nothing found", err)]
        if code != 0:
            return [("plan", err)]
        if "no plan found fits as" in err:
            return [("not as emitted", err)] if not fits else [("own run not as emitted", err)]
        target = json.loads((self.folder / "plan.json").read_text()).get("imported_from")
        if target is None:  # no target writes such settings
            after, _ = self.time_of("best.json")
            return [("slower", f"{before} -> {after}")] if fits and after > SLACK * before else []
        for old in (self.folder / "run").glob("*") if (self.folder / "run").is_dir() else []:
            old.unlink()
        (self.folder / "run").mkdir(exist_ok=True)
        (self.folder / "emitted.json").unlink(missing_ok=True)
        code, _, err = self.call("emit", "best.json", "--to", target, "-o", "run/" if target not in SINGLE else "run/" + SINGLE[target],
                                 "--as-emitted", "emitted.json")
        found = [] if code == 0 else [("emit", err or "exit code 1: does not fit")]
        if code not in (0, 1) or not (self.folder / "emitted.json").is_file():
            return found
        after, _ = self.time_of("emitted.json")
        if fits and after > SLACK * before:
            found.append(("slower", f"{before} -> {after}"))
        emitted = json.loads((self.folder / "emitted.json").read_text())
        files, flags = self.read_back(run, target, emitted)
        if target not in ("torchtitan",):
            flags = [*model, *flags]
        code, _, err = self.call("import-run", *files, *flags, "-o", "back.json")
        if code != 0:
            return found + [("back", err)]
        rows = differences(parts(emitted), parts(json.loads((self.folder / "back.json").read_text())))
        return found + ([("differs", "; ".join(rows))] if rows else [])

    def test_runs(self):
        for model, config in (("llama", LLAMA), ("gpt2", GPT2)):
            (self.folder / model).mkdir()
            (self.folder / model / "config.json").write_text(json.dumps(config))
        said = {}
        for name, generate in GENERATORS.items():
            if ONE not in ("", name):
                continue
            counts = {}
            for number in range(RUNS):
                run = generate(random.Random(f"{SEED}/{name}/{number}"))
                for table, keys in run.said.items():
                    said.setdefault(table, set()).update(keys)
                found = self.around(name, run)
                for kind, words in found or [("good", "")]:
                    counts[kind] = counts.get(kind, 0) + 1
                    if kind not in ("good",):
                        print(f"  {name} {number} {kind}: {words}", file=sys.stderr, flush=True)
                with self.subTest(framework=name, number=number):
                    self.assertEqual([row for row in found if row[0] not in ("refused", "nothing fits", "not as emitted")], [],
                                     (run.files, run.flags))
            print(name, counts, file=sys.stderr, flush=True)
        if not ONE:
            for table, keys in said.items():
                missing = [key for key in KEYS[table]["used"] if key not in keys and key not in NOT_DRAWN.get(table, ())]
                self.assertEqual(missing, [], table)


SINGLE = {"accelerate": "accelerate.yaml"}

if __name__ == "__main__":
    main()
