"""From a published run to a job: the columns of a row decide on the words that a user of `shardwright plan` would type.

What a row leaves open is filled by the rules of its stack (stacks.json), and said in a note. Neither the id nor the source nor any
measured value has a part in it.
"""

import copy
import functools
import hashlib
import json
import math
import pathlib
import re
import tempfile

from lab.base import InputError, data
from lab.runs import MOST

STACKS = data("stacks.json")
GPU_CLASSES = data("gpu_classes.json")["classes"]
DATA_PARALLEL = "single, ddp, fsdp, hsdp or zero1 to zero3"


class Job:
    """One row on its way to the program."""

    def __init__(self, run):
        self.run = run
        self.skipped = ""  # why there is no plan
        self.notes = []    # what was assumed or is only near what the row says
        self.flags = {}    # of `shardwright plan`
        self.model = None  # a config.json; None: the model that the flags name
        self.count_note = 0  # where among the notes stands that the model has another number of parameters
        self.micro_batch = self.accumulation = self.sequence_length = 0
        # What no flag says: parameters are held between a unit's modules, lists of tensors, one communicator.
        self.holds_table = self.has_tensor_lists = False
        self.is_known = True  # the framework
        self.has_static_memory = False
        self.answer = None

    def has_changes(self):
        return self.holds_table or self.has_tensor_lists


def fits_row(stack, run):
    """Dates are "2024-09", "2023-05..07" or "2024": text order is time order for their beginnings."""
    return (all(part in run.framework for part in stack.get("framework", "").split(" & ")) and stack.get("gpu", "") in run.gpu_class
            and ("words" not in stack or any(word in run.framework.lower() for word in stack["words"]))
            and (not stack.get("compiled") or (stack["compiled"] == "y") == run.compiled.startswith("y"))
            and (not stack.get("before") or run.date < stack["before"]))


def stack_of(run, unknown=False):
    """The first row of the table that fits, with the defaults. A framework that no row of "stacks" names is priced by "nearest", and `is_known`
    is false. `unknown`: so are all, as if nobody had heard of any."""
    for stack in STACKS["nearest"] if unknown else STACKS["stacks"] + STACKS["nearest"]:
        if fits_row(stack, run):
            return {**STACKS["defaults"], **stack, "is_known": "framework" in stack}
    raise AssertionError("the last row fits everything")


def precision_of(run, stack, notes):
    """The column param_dtype is a sentence; the first key that it contains decides."""
    text = run.param_dtype
    # HF keeps masters in the dtype of the checkpoint when there is one GPU and so no FSDP.
    is_pure_on_one = "pure bf16 on 1 GPU" in text and run.gpus == 1
    is_torchtune = "torchtune" in run.framework or "litgpt" in run.framework
    if text.startswith("pure fp16"):
        return "fp16/fp16/fp16"
    if (text.startswith("pure bf16") or is_pure_on_one or "bf16 states" in text or "bf16-true" in text
            or "bf16 masters" in text or "bf16_master" in text or (is_torchtune and text.startswith("bf16"))):
        return "bf16/bf16/bf16"
    if "MP mode PURE" in text:
        return "fp32/bf16/bf16"
    if "MP mode DEFAULT" in text or "fp32 reduce" in text:
        return "fp32/bf16/fp32"
    if "fp16" in text:
        return "fp32/fp16/fp16"
    if text == "fp32":
        return "fp32/fp32/fp32"
    if not text:
        notes.append("dtypes not stated: bf16 with fp32 masters")
    return "fp32/bf16/" + stack["reduce"]


def fp8_of(run, notes):
    """Which products are in fp8, as --precision says it."""
    if run.compute_dtype not in ("fp8", "fp4"):
        return ""
    if run.compute_dtype == "fp4":
        notes.append("fp4 products are not known: taken as fp8")
    elif words := [word for word in ("mxfp8", "TE ", "Transformer Engine", "block", "delayed") if word in run.param_dtype]:
        notes.append(f"fp8 of {words[0].strip()} is not known: taken as one scale per tensor")
    return "+fp8-rowwise" if "rowwise" in run.param_dtype and "rowwise_with_gw_hp" not in run.param_dtype else "+fp8"


def optimizer_of(run, stack, notes):
    """[kind, implementation, what updates matrices instead]."""
    text, kind, matrices = run.optimizer, "adamw", "none"
    if "Muon" in text:
        matrices = "muon_distributed" if "distributed" in text else "muon"
    elif "SOAP" in text:
        matrices = "soap"
    elif "SGD" in text:
        kind = "sgd"
    elif text == "Adam":
        kind = "adam"
    elif text and "AdamW" not in text and "adam" not in text:
        notes.append(f"optimizer {text} taken as AdamW")
    return [kind, "foreach" if "foreach" in text else "fused" if "fused" in text else stack["optimizer"], matrices]


def offload_of(run, stack):
    text = run.offload
    if text.startswith("n"):
        on_host = "checkpoints to CPU" in text or (stack.get("checkpoints_on_host") and run.checkpointing.startswith("full"))
        return ["activations"] if on_host else []
    parts = ["parameters"] if "param" in text or text.startswith("y") else ["optimizer"] if "optimizer" in text else []
    return parts + (["activations"] if "activation" in text or "checkpoints" in text else [])


def recomputed_fraction(run, notes):
    """Which blocks are computed twice follows from the published ratio of hardware to model FLOPs: full recomputation adds one forward pass
    to three, so hfu / mfu = 1 + fraction / 3."""
    if run.hfu_percent <= 0 or run.mfu_percent <= 0:
        notes.append("which blocks are recomputed is not stated: every second")
        return 0.5
    return min(max(3 * (run.hfu_percent / run.mfu_percent - 1), 0.0), 1.0)


def recompute_of(run, stack, notes):
    """As --recompute says it."""
    text = run.checkpointing or ("full" if stack.get("recomputes") else "")
    if not run.checkpointing:
        notes.append("activation checkpointing not stated: " + (text or "none"))
    if not text or text.startswith("none"):
        return "none"
    if text.startswith("full"):
        return "full"
    if "every" in text:
        fraction = 0.5 if "2nd" in text else recomputed_fraction(run, notes)
        return f"full:{fraction!r}" if fraction > 0 else "none"
    # MaxText's policies keep the results of all projections and, with "flash", the attention's.
    if text.startswith("selective (minimal"):
        return "selective:1"
    if text.startswith("selective"):
        if "per-op" not in text:
            notes.append(text + " taken as torchtitan's per-op rule")
        return "selective:2"
    raise InputError("activation_checkpointing", f'"{text}"', "none, full or selective")


def dialect_of(run, stack, notes):
    """Whose rules the run followed."""
    text = run.parallelism
    if run.gpus > 1 and "zero1" in text:
        return "zero1"
    if run.gpus == 1 and stack.get("engine"):
        notes.append("DeepSpeed on one GPU, stage not stated: ZeRO-3, whose hooks run all the same")
        return "zero3"
    if run.gpus == 1 or text.startswith(("single", "ddp")):
        return "ddp"
    if text.startswith(("zero2", "zero3")):
        return text[:5]
    if not text.startswith(("fsdp", "hsdp")):
        raise InputError("parallelism", f'"{text}"', DATA_PARALLEL)
    return stack["dialect"]


def is_zero(dialect):
    return dialect.startswith("zero")


def shards_of(run, dialect, per_node):
    """Ranks that share one copy."""
    if dialect == "ddp":
        return 1
    if run.parallelism.startswith("hsdp") or "HYBRID" in run.sharding:
        return per_node
    if dialect == "zero1":  # "ddp+zero1(group 8)"
        group = re.search(r"\(group (\d+)", run.parallelism)
        if group and int(group[1]) > 0 and run.gpus % int(group[1]) == 0:
            return int(group[1])
    return run.gpus


def zero_flags(run, stack):
    """DeepSpeed's sizes and streams."""
    flags = {}
    if stack.get("sizes_by_hidden"):
        flags["--reduce-bucket"] = run.hidden * run.hidden
        flags["--prefetch-bucket"] = run.hidden * run.hidden * 9 // 10
        flags["--persistence-threshold"] = 10 * run.hidden
    if stack.get("waits_for_gathers"):
        flags.update({"--overlap-comm": "off", "--prefetch-bucket": 0, "--before-deepspeed-0-6": "on"})
        # "reduce_scatter" was off unless asked for between DeepSpeed's pull requests 971 (April 2021) and 1058; a log of May 2021 prints it
        # as false with stage 3.
        if "2021-04" <= run.date < "2021-07":
            flags["--gradient-reduction"] = "all_reduce"
        # Nothing was kept for later while more than max_live_parameters were gathered, as they are with a weight of that size
        # (`_keep_for_later` of DeepSpeed 0.3 and 0.4).
        if run.hidden * run.ffn_hidden > 1e9:
            flags["--max-reuse-distance"] = 0
    return flags


def liger_chunks(run):
    """Liger's fused linear cross-entropy works on as many rows at a time as make its chunk of logits no larger than the hidden states: of
    131,072 tokens with 896 features and 151,936 words 1,024, in 128 chunks (fused_linear_cross_entropy.py)."""
    rows = run.micro_batch * run.sequence_length
    ratio = -(-run.vocabulary // run.hidden)
    chunk = 1 << (-(-rows // ratio) - 1).bit_length()
    return -(-rows // chunk)


def attention_of(run, stack, kernel_sets, notes):
    """The kernel that the row names, where it names one; empty: the stack's."""
    own = kernel_sets[stack["kernel_set"]]
    text = re.sub(r"[ _-]|attention|attn", "", run.attention_kernel.lower())  # "flash_attention_3", "flash-attn 3", "flash3": flash3
    is_blackwell = "B200" in run.gpu_class or "B300" in run.gpu_class

    def is_named(*words):
        return any(word in text for word in words)
    if is_named("cudnn") or text == "te":
        return "cudnn"
    if is_named("flash3", "fa3", "flash4", "fa4"):
        if is_named("3") == is_blackwell:
            notes.append(f"attention {run.attention_kernel}: priced as the newest FlashAttention known on this chip")
        return "flash3"
    if is_named("flash2", "fa2") and is_blackwell:
        notes.append(f"attention {run.attention_kernel} on Blackwell: priced as kernels that multiply with Ampere's instructions")
        return "triton"
    if is_named("sdpa") and stack["sdpa"] != "flash":
        return stack["sdpa"]
    if is_named("triton") and not is_named("flex") and own != "triton":
        return "triton"
    if is_named("flash", "triton", "sdpa", "flex", "xformers"):
        return "flash" if own == "materialized" else ""
    if is_named("torch", "eager", "math"):
        return "materialized"
    if text:
        notes.append(f'attention "{run.attention_kernel}" is not known: the stack\'s own')
    return ""


def tokens_of(run, notes):
    """The column; where samples differ in length and none is given, the mean by what was measured; of GPT-2, which is trained on as many
    tokens as it has positions, those."""
    if run.sequence_length > 0:
        return run.sequence_length
    samples = run.micro_batch * max(run.accumulation, 1)
    average = run.tokens_per_step() / samples if samples > 0 else 0
    average = math.floor(average + 0.5) if average < MOST else math.inf
    if average < 1 and run.model_name.startswith(("GPT-2", "GPT2")):
        notes.append("tokens per sample not stated: GPT-2's 1024")  # n_positions of its config.json
        return 1024
    if not 1 <= average <= MOST:
        raise InputError("seq_len", "nothing", "tokens per sample, or the step time and throughput that tell them")
    notes.append("tokens per sample not stated: their mean, by step time and throughput")
    return average


def batch_of(run, notes):
    """(micro-batch, accumulation)."""
    accumulation = max(run.accumulation, 1)
    micro_batch = run.micro_batch
    if micro_batch == 0:
        if run.global_batch == 0 or run.global_batch % (run.gpus * accumulation) != 0:
            raise InputError("microbatch_per_gpu", "nothing", "samples per GPU and pass")
        micro_batch = run.global_batch // (run.gpus * accumulation)
        notes.append("micro-batch from the global batch")
    batch = run.gpus * micro_batch * accumulation
    if run.global_batch > 0 and run.global_batch != batch:
        notes.append(f"global batch is {batch} by micro-batch and accumulation, the row says {run.global_batch}")
    return micro_batch, accumulation


# Clusters


def nics_in(text, gpus):
    """(count, Gbit/s each) of a node in "8x200Gb RoCE", "400Gb/s RDMA per GPU" or "800Gbps"; None where there is no rate."""
    match = re.search(r"(\d*)$", text[:text.find("Gb")]) if "Gb" in text else None
    if not match or not 0 < len(match[1]) <= 6 or int(match[1]) == 0:
        return None
    rate, before = int(match[1]), text[:match.start()]
    count = re.search(r"(\d{1,7})x$", before)
    if count and len(count[1]) <= 6 and int(count[1]) > 0:
        return int(count[1]), rate
    if "per GPU" in text:
        return gpus, rate
    # A rate of the whole node; all GPUs share it evenly over 100 Gbit/s ports.
    return (rate // 100, 100) if rate % 100 == 0 else (1, rate)


def network_kind(text):
    for words, kind in ((("RoCE", "RDMA"), "roce"), (("EFA",), "efa"), (("Omni-Path", "OPA"), "opa"), (("TCPXO",), "tcpxo")):
        if any(word in text for word in words):
            return kind
    return "ib"


def cluster_of(run, notes):
    """(inline text, nodes, GPUs per node): GPUs of the row's class in nodes with the network it names, or what such machines usually have."""
    gpu = next((row for row in GPU_CLASSES if run.gpu_class.startswith(row["class"]) and row.get("words", "") in run.gpu), None)
    if gpu is None:
        raise InputError("gpu_class", f'"{run.gpu_class}"', "a GPU type of the catalog")
    if run.gpus <= 0:
        raise InputError("gpus", "nothing", "a number of GPUs")
    if "note" in gpu:
        notes.append(gpu["note"])
    node = min(run.gpus, run.gpus_per_node or 8)
    if run.gpus % node != 0:
        raise InputError("gpus", run.gpus, f"a multiple of gpus_per_node {node}")
    nodes = run.gpus // node
    nics, network = (node, gpu["nic_gbit_per_s"]), "ib"
    if nodes > 1:
        named, network = nics_in(run.network, node), network_kind(run.network)
        if named:
            nics = named
        else:
            kind = "Omni-Path" if network == "opa" else "InfiniBand"
            notes.append(f"network not stated: {nics[1]} Gbit/s {kind} per GPU")
    host = max(gpu["host_gib"] * node // 8, 64)
    return f"{gpu['gpu']} x{node}, nic {nics[0]}x{nics[1]} Gbit/s, host {host} GiB, network {network}", nodes, node


# Models


def llama(run, kind=None):
    """Decoders with gated MLPs and rotary positions."""
    name = run.model_name.lower()
    kind = kind or ("qwen3" if "qwen3" in name else "qwen2" if "qwen2" in name else "llama")
    if run.hidden % run.heads != 0 and not ("qwen2" in name or "qwen3" in name):
        raise InputError("hidden", run.hidden, "a multiple of n_heads")
    return {"model_type": kind, "vocab_size": run.vocabulary or 50257, "hidden_size": run.hidden, "intermediate_size": run.ffn_hidden,
            "num_hidden_layers": run.layers, "num_attention_heads": run.heads, "num_key_value_heads": run.kv_heads or run.heads,
            "max_position_embeddings": run.sequence_length, "tie_word_embeddings": run.tied_embedding == "y"}


def mpt(run):
    if run.ffn_hidden % run.hidden != 0:
        raise InputError("ffn_hidden", run.ffn_hidden, "a multiple of hidden")
    return {"model_type": "mpt", "vocab_size": run.vocabulary or 50257, "d_model": run.hidden, "n_layers": run.layers, "n_heads": run.heads,
            "expansion_ratio": run.ffn_hidden // run.hidden, "max_seq_len": run.sequence_length, "no_bias": False,
            "attn_config": {"attn_type": "multihead_attention", "alibi": False}}


def gpt2(run, activation, stack):
    dropout = stack.get("dropout", 0.0)
    tied = run.tied_embedding != "n" if run.tied_embedding else not stack.get("has_own_head")
    return {"model_type": "gpt2", "vocab_size": run.vocabulary or 50257, "n_positions": run.sequence_length, "n_embd": run.hidden,
            "n_layer": run.layers, "n_head": run.heads, "n_inner": run.ffn_hidden, "activation_function": activation,
            "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout, "tie_word_embeddings": tied}


def config_of(run, stack, notes):
    if run.ffn_kind in ("swiglu", "geglu"):
        return llama(run)
    if run.ffn_kind == "gelu":
        return mpt(run) if "llm-foundry" in run.framework else gpt2(run, "gelu", stack)
    if run.ffn_kind in ("relu", "relu^2"):
        if run.ffn_kind != "relu":
            notes.append(f"ffn_kind {run.ffn_kind} taken as a GPT-2 block with relu")
        return gpt2(run, "relu", stack)
    if run.ffn_kind == "moe-swiglu 8 experts top2":
        return {**llama(run), "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    raise InputError("ffn_kind", f'"{run.ffn_kind}"', "swiglu, geglu, gelu, relu, relu^2 or moe-swiglu 8 experts top2")


def letters(text):
    """"Llama3.2-3B" and the zoo's "llama-3.2-3b" are the same letters and digits."""
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def model_of(run, stack, notes, zoo):
    """(config or None, zoo name or None): from the row's dimensions, or, where it has none, the zoo model of the same name."""
    if run.layers > 0 and run.hidden > 0 and run.heads > 0 and run.ffn_hidden > 0:
        if run.vocabulary == 0:
            notes.append("no vocabulary given: 50257 as GPT-2")
        return config_of(run, stack, notes), None
    wanted = letters(run.model_name.split(" (")[0])
    name = next((name for name in zoo if letters(name) == wanted), None)
    if name is None:
        raise InputError("model_name", f'"{run.model_name}"', "dimensions in n_layers, hidden, n_heads and ffn_hidden, or a model of the zoo")
    notes.append(f"no dimensions given: {name} of the zoo")
    return None, name


# All of it


def check_parallelism(run):
    """Refuses everything that has no fully sharded data parallel meaning."""
    if run.problem:
        raise InputError(run.problem)
    if not run.data_parallel_only:
        raise InputError("parallelism", f'"{run.parallelism}"', "data parallelism only")
    known = ("SHARD", "FSDP", "fsdp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "full", "never")
    if run.sharding and not any(word in run.sharding for word in known):
        raise InputError("sharding_strategy", f'"{run.sharding}"',
                         "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD, FSDP or ZeRO-1 to ZeRO-3")


def check_optimizer(run):
    """Refuses what plans cannot say."""
    if "8-bit" in run.param_dtype or "optimizer-in-bwd" in run.param_dtype:
        raise InputError("param_dtype", f'"{run.param_dtype}"', "states in the masters' dtype, updated after backward")
    if run.optimizer and not any(word in run.optimizer for word in ("Adam", "adam", "SGD", "SOAP", "Muon")):
        raise InputError("optimizer", f'"{run.optimizer}"', "AdamW, Adam, SGD, SOAP or Muon")


class Names:
    """What the program knows by name."""

    def __init__(self, program, unknown=False):
        self.program = program
        self.unknown = unknown  # no framework is known by name (stack_of)

    def listed(self, what, key):
        return json.loads(self.program.run("list", what, "--json"))[key]

    @functools.cached_property
    def zoo(self):
        return sorted(row["name"] for row in self.listed("models", "models"))

    @functools.cached_property
    def attention(self):
        """Of each kernel set."""
        return {row["name"]: row["attention"] for row in self.listed("kernel-sets", "kernel_sets")}


def fill(job, names, profile):
    run, notes = copy.copy(job.run), job.notes
    check_parallelism(run)
    stack = stack_of(run, names.unknown)
    job.is_known = stack["is_known"]
    if not job.is_known:
        notes.append(f'framework "{run.framework}" is not known: taken as {stack["kernel_set"]}, the nearest ({stack["why"]})')
    job.sequence_length = tokens_of(run, notes)
    run.sequence_length = job.sequence_length
    precision = precision_of(run, stack, notes)
    kind, implementation, matrices = optimizer_of(run, stack, notes)
    cluster, nodes, per_node = cluster_of(run, notes)
    check_optimizer(run)
    job.model, zoo_name = model_of(run, stack, notes, names.zoo if not run.layers or not run.ffn_hidden or not run.heads or not run.hidden else ())
    job.count_note = len(notes)
    dialect = dialect_of(run, stack, notes)
    if dialect == "zero3" and run.date and run.date < "2022":
        stack = {**stack, "waits_for_gathers": True}  # whoever's the model, the engine was DeepSpeed's
    shards = shards_of(run, dialect, per_node)
    offload = offload_of(run, stack)
    if dialect in ("zero1", "zero2") and "parameters" in offload:
        notes.append(dialect + " with offload taken as fsdp2")
        dialect = "fsdp2"
    if matrices != "none" and dialect != "ddp":
        notes.append(f"optimizer {run.optimizer} of sharded matrices taken as AdamW")
        matrices = "none"
    job.micro_batch, job.accumulation = batch_of(run, notes)
    flags = {"--model": zoo_name, "--cluster": cluster, "--nodes": nodes, "--kernel-set": stack["kernel_set"], "--seq": job.sequence_length,
             "--micro-batch": job.micro_batch, "--accumulation": job.accumulation, "--dialect": dialect, "--shard": shards,
             "--precision": precision + fp8_of(run, notes), "--optimizer": ":".join((kind, implementation, matrices)),
             "--offload": ",".join(offload) or "none", "--attention": attention_of(run, stack, names.attention, notes),
             "--profile": "" if profile == "auto" else profile}
    if run.accumulation > 1 and not is_zero(dialect):
        flags["--sync"] = stack["sync"]
    if dialect == "fsdp1":
        flags["--backward-prefetch"] = stack["backward_prefetch"]
    if dialect == "zero3":
        flags.update(zero_flags(run, stack))
    if dialect == "zero1" and stack.get("scatters"):
        flags.update({"--gradient-reduction": "reduce_scatter", "--wrap": "block"})
    if dialect != "ddp" and not is_zero(dialect):
        flags["--wrap"] = stack["wrap"]
        if "SHARD_GRAD_OP" in run.sharding or "never" in run.sharding:
            flags["--reshard"] = "never"
    if stack["kernel_set"] == "hf-liger-full" and run.vocabulary and run.micro_batch:
        flags["--loss-chunks"] = liger_chunks(run)
    if stack.get("expandable_segments"):
        flags["--allocator"] = "expandable_segments:True"
    flags["--recompute"] = recompute_of(run, stack, notes)
    job.flags = {flag: str(value) for flag, value in flags.items() if value not in ("", None)}
    job.holds_table = bool(stack.get("holds_table"))
    job.has_tensor_lists = bool(stack.get("waits_for_gathers"))
    job.has_static_memory = bool(stack.get("static_memory"))


def job_of(run, names, profile="auto"):
    """`profile` is the name or file of a profile, or "auto": the default one of GPU and kernel set."""
    job = Job(run)
    try:
        fill(job, names, profile)
    except InputError as error:
        job.skipped = str(error)
    return job


# What no flag says


def merged(below, above):
    """A profile's numbers over those of the one that it extends; a list of what the GPU has (gemm) is never mixed."""
    result = dict(below)
    for key, value in above.items():
        is_section = isinstance(value, dict) and "value" not in value and key != "gemm" and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if is_section else value
    return result


def whole_profile(folder, name):
    profile = json.loads((pathlib.Path(folder) / (name + ".json")).read_text(encoding="utf-8"))
    return merged(whole_profile(folder, profile["extends"]), profile) if "extends" in profile else profile


def seconds(text):
    """Of "6 us"."""
    value, unit = text.split()
    return float(value) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


def changed_plan(job, plan, folder):
    """The plan with what its stack changes besides. `folder` has the profiles that ship."""
    if job.holds_table:
        for unit in plan["plan"]["units"]:
            unit["gap"] = "hold"
    name = plan["profile"].get("name") or plan["profile"]["json"]["name"]
    whole = plan["profile"].get("json") or whole_profile(folder, name)
    changes = {}
    if job.has_tensor_lists:
        # PyTorch's all_gather and reduce_scatter of lists: Python makes a tensor per rank, then C++ starts a copy of each, while the device
        # waits. That is time per collective.
        each = seconds(whole["host"]["op_issue"]["value"]) + seconds(whole["host"]["kernel_launch"]["value"])
        changes["transports"] = {
            transport: {"protocols": {protocol: {"base_latency": {**numbers["base_latency"], "value": (
                f"{(seconds(numbers['base_latency']['value']) + each * job.run.gpus) * 1e6!r} us")}}
                for protocol, numbers in row["protocols"].items()}} for transport, row in whole["transports"].items()}
    if changes:
        base = {key: value for key, value in whole.items() if key != "extends"}
        plan["profile"] = {"name": name, "json": merged(base, changes)}
    return plan


class Files:
    """Files of the models and plans that rows describe: in a folder, or as long as it lives."""

    def __init__(self, folder=None):
        self.scratch = None if folder else tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(folder or self.scratch.name)

    def path(self, document):
        text = json.dumps(document)
        path = self.folder / (hashlib.sha256(text.encode()).hexdigest()[:16] + ".json")
        path.write_text(text, encoding="utf-8")
        return str(path)


def run_list(runs, **more):
    return {"format": "shardwright-runs", "version": 1, **more, "runs": runs}


def listed(program, jobs, files, flags=(), folder=None):
    """The runs of a list for the program, one for each job that is not skipped."""
    folder = folder or pathlib.Path(__file__).resolve().parents[2] / "topologies/profiles"
    runs = []
    for job in jobs:
        if job.skipped:
            continue
        words = {**job.flags, **({"--model": files.path(job.model)} if job.model else {})}
        run = job.run
        runs.append({"id": run.id, "source": run.source(), "model": run.model_name, "variant": run.param_dtype,
                     "step_time_s": run.step_time_s, "flags": words})
    wanted = [run for run, job in zip(runs, (job for job in jobs if not job.skipped)) if job.has_changes()]
    if wanted:
        by_id = {job.run.id: job for job in jobs}
        for run, answer in zip(wanted, program.ask("validate", run_list(wanted, plans=True), *flags)["runs"]):
            if "plan" in answer:
                del run["flags"]
                run["plan"] = files.path(changed_plan(by_id[run["id"]], answer["plan"], folder))
    return runs
