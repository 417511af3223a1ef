"""tools/export_model.py and `shardwright export`: what they write has the parameters, FLOPs and kept bytes that PyTorch has.

    python3 tests/models/export_model_test.py SHARDWRIGHT

Expected: names and counts from named_parameters(), forward FLOPs from torch's FlopCounterMode, backward FLOPs and kept bytes from
the counter's formulas and autograd's saved-tensor hooks over the same module on the meta device; at two batches and, where there are
tokens, at three lengths of one exported file.
"""

import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "schedule"), str(HERE.parent.parent / "tools")]
import export_model  # noqa: E402
import export_networks as networks  # noqa: E402
import random_networks  # noqa: E402
from model_export import trace  # noqa: E402

KEPT_WITHIN = 0.01  # tables of cosines that kernels recompute, log-sums of attention
SEQUENCE = 64
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES = {
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": SEQUENCE},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 24},
    "gemma2": {**GROUPED, "head_dim": 16},
    "gpt_neox": SIZES,
    "phi3": {**GROUPED, "pad_token_id": 0},
    "opt": {"vocab_size": 256, "hidden_size": 64, "ffn_dim": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 64, "max_position_embeddings": SEQUENCE},
    "mpt": {"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": SEQUENCE},
    "bloom": {"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "stablelm": GROUPED,
    "t5": {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 176, "num_layers": 2, "num_heads": 4},
    "bert": {**SIZES, "max_position_embeddings": SEQUENCE},
    "vit": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176, "image_size": 64, "patch_size": 16},
}
# Whose routers and experts are one op each; the counter has no formula for those.
MIXTURES = {
    "mixtral": {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {**GROUPED, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "decoder_sparse_step": 2},
}


def transformer(name, sizes):
    """(module on the meta device, inputs of one sample, length)"""
    config = transformers.AutoConfig.for_model(name, **sizes)
    config.use_cache = False
    kind = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM,
            "vit": transformers.AutoModelForImageClassification}.get(name, transformers.AutoModelForCausalLM)
    attention = "eager" if name in ("gemma2", "mpt", "t5", "bloom") else "sdpa"  # capped scores, ALiBi, position biases
    with torch.device("meta"):
        model = kind.from_config(config, attn_implementation=attention)
        if name == "vit":
            return model, {"pixel_values": torch.zeros(1, 3, 64, 64), "labels": torch.zeros(1, dtype=torch.long)}, 0
        ids = torch.zeros(1, SEQUENCE, dtype=torch.long)
        return model, {"input_ids": ids, "labels": ids.clone()} | ({"decoder_input_ids": ids.clone()} if name == "t5" else {}), SEQUENCE


def inspected(program, path, length):
    words = [program, "inspect", str(path), "--json", *(["--seq", str(length)] if length else [])]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    return json.loads(result.stdout) if result.returncode == 0 else result.stderr


def at_batch(rows, batch, dtype, key):
    """The figure per kernel set; all are straight lines in the batch."""
    found = {}
    for row in rows:
        if row["dtype"] == dtype:
            found.setdefault(row["kernel_set"], {})[row["batch"]] = row[key]
    return [one[1] + (one[2] - one[1]) * (batch - 1) for one in found.values()]


# Ops that must have their names: only those follow the kernel set, split over ranks and run.
NAMED = {"gpt2": {"attention", "linear", "layer_norm", "embedding", "cross_entropy"}, "llama": {"attention", "linear", "rms_norm", "cross_entropy"},
         "gemma2": {"rms_norm"}, "mixtral": {"attention", "router", "experts"}, "qwen3_moe": {"router", "experts"}, "vit": {"attention", "conv2d", "concat", "select"},
         "MultiheadAttention": {"linear"}, "batch norm": {"conv2d", "batch_norm", "activation"}, "attention without weights": {"attention"}}


def problems_of(program, path, model, inputs, length, dtype=torch.float32, counts_products=True):
    """What differs between an export of the module and PyTorch; [] if nothing does. Refused: the error."""
    document = export_model.export(model.train(), inputs, length, dtype)
    path.write_text(json.dumps(document))
    names = sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    problems = []
    for run, (batch, tokens) in zip(export_model.export.traces, export_model.export.points):
        ours = inspected(program, path, tokens)
        if isinstance(ours, str):
            return [ours]
        if ours["parameter_count"] != sum(p.numel() for p in model.parameters()) or sorted(p["fqn"] for p in ours["parameters"]) != names:
            problems.append(f"{ours['parameter_count']} parameters")
        forward, backward, kept = trace.totals(run)
        label = "fp32" if dtype is torch.float32 else "bf16"
        for key, wanted, within in (("forward_flops", forward, 0), ("backward_flops", backward, 0), ("saved_bytes", kept, KEPT_WITHIN)):
            if not counts_products:
                continue
            got = at_batch(ours["one_gpu"], batch, label, key)
            if all(abs(value - wanted) > within * wanted for value in got):
                problems.append(f"{key} {got} where PyTorch has {wanted} (batch {batch}, length {tokens})")
    # The trace itself against the counter, run without any of our code.
    if counts_products:
        by_position, given = export_model.positional(model, inputs)
        given = export_model.resized(given, 0, 2, 0, dtype)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, trace.told_of_tracing(fused=False):
            model(*given.values()) if by_position else model(**given)
        if counter.get_total_flops() != trace.totals(export_model.export.traces[0])[0]:
            problems.append(f"{counter.get_total_flops()} FLOPs counted by torch")
    return problems


def check(program, path, name, made, **options):
    model, inputs, length = made
    found = problems_of(program, path, model, inputs, length, **options)
    missing = NAMED.get(name, set()) - {op["op"] for op in json.loads(path.read_text())["ops"]}
    found += [f"no op {op}" for op in sorted(missing)]
    print(f"{'FAILED ' if found else ''}{name} {found[:4]}")
    return not found


def refused(name, made, words):
    model, inputs, length = made
    try:
        export_model.export(model.train(), inputs, length, torch.float32)
    except export_model.Unsupported as error:
        if all(word in str(error) for word in words):
            return True
        print(f"FAILED {name}: {error}")
        return False
    print(f"FAILED {name}: accepted")
    return False


def lengths(program, folder):
    """One file at three lengths: each has its own step time. A file that is of one length says why."""
    path = folder / "llama.json"
    model, inputs, length = transformer("llama", GROUPED)
    path.write_text(json.dumps(export_model.export(model.train(), inputs, length, torch.bfloat16)))
    swept = subprocess.run([program, "sweep", "--model", str(path), "--cluster", "dgx-h100", "--gpus", "4", "--seq", "64,8192,32768", "--json"],
                           capture_output=True, text=True, check=False)
    rows = json.loads(swept.stdout)["rows"] if swept.returncode == 0 else []
    times = [(row["step_time_s"], row["device_bytes"]) for row in rows]
    good = len(times) == 3 and all(shorter[i] < longer[i] for shorter, longer in zip(times, times[1:]) for i in (0, 1))
    model, inputs, length = networks.FIXED["loop over tokens"]()
    path.write_text(json.dumps(export_model.export(model, inputs, length, torch.float32)))
    said = inspected(program, path, length // 2)
    good &= isinstance(said, str) and "its own length" in said and "runs unbind in the place of" in said
    print(f"{'' if good else 'FAILED '}lengths: {times} {said if isinstance(said, str) else ''}")
    return good


def command(program, folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.run([program, "export", *words, "--python", sys.executable], capture_output=True, text=True, check=False, cwd=folder,
                          env=environment)


def commands(program, folder):
    """`shardwright export`: files, modes, errors in one line."""
    done = command(program, folder, "export_networks:ConvNet", "--input", "image=1x28x28,label=1:int64", "--json", "-o", "net.json")
    good = done.returncode == 0 and json.loads(done.stdout)["parameter_count"] == 1199882
    mask = os.umask(0)
    os.umask(mask)
    good &= good and stat.S_IMODE((folder / "net.json").stat().st_mode) == 0o666 & ~mask
    (folder / "config.json").write_text(json.dumps({"model_type": "stablelm", **GROUPED}))
    done = command(program, folder, "config.json", "--seq", "64", "--json", "-o", "stablelm.json")
    good &= done.returncode == 0 and (folder / "stablelm.json").exists()
    if not good:
        print(f"FAILED export: {done.stderr}")
    for words, code, text in ((("export_networks:Erf", "--input", "x=8x8"), 3, "no rule for aten.special_bessel_j0"),
                              (("export_networks:none", "--seq", "8"), 3, "has no attribute 'none'"),
                              (("no_such:thing", "--seq", "8"), 3, "No module named 'no_such'"),
                              (("export_networks:Branches", "--input", "x=8x8"), 3, "depends on values of tensors")):
        done = command(program, folder, *words, "-o", "bad.json")
        fine = done.returncode == code and text in done.stderr and done.stderr.count("\n") == 1 and not list(folder.glob("*bad*"))
        if not fine:
            print(f"FAILED {words}: {done.returncode} {done.stderr}")
        good &= fine
    return good


def belongs_to_readers():
    """A list of indices that a layer reads belongs to the layer: as an op of the root it would gather the layer's unit anew."""
    with torch.device("meta"):
        layer = networks.Of(lambda m, x: m.a(x)[:, [-1, 0]], a=torch.nn.Linear(8, 8))
        model = networks.Of(lambda m, x: m.layer(x), layer=layer)
        document = export_model.export(model, {"x": torch.zeros(1, 6, 8)})
    found = [op.get("module") for op in document["ops"] if op.get("function") == "constant"]
    if found != ["layer"]:
        print(f"FAILED constants of modules {found}")
    return found == ["layer"]


def sums_no_gradients():
    """Backward of an op in place is its own: autograd's sums of the gradients of parameters are none of it."""
    model, inputs, length = networks.EXACT["in place"]()
    document = export_model.export(model, inputs, length, torch.float32)
    written = {op["function"]: [kernel["written"] for kernel in op["backward_data"]] for op in document["ops"] if op.get("backward_data")}
    found = written.get("aten.hardswish")
    good = found is not None and len(found) == 1
    if not good:
        print(f"FAILED backward of ops in place {written}")
    return good


def marks_what_returns_its_input():
    """Ops that end a call of a module which drops what it computes and returns what it is given: of the first call, the result of which
    is dropped, too, no gradient comes back to it."""
    second = {"kind": "seq", "list": False, "calls": [[0, "dead"]], "children": [{"kind": "linear"}]}
    network = {"width": 8, "vocabulary": 16, "sequence": 4, "inputs": 1, "norm": False, "tied_head": False, "body": {
        "kind": "seq", "list": False, "calls": [[0, "chain"], [1, "dead"], [1, "chain"], [0, "chain"], [1, "residual"]],
        "children": [{"kind": "linear"}, second]}}
    document = export_model.export(random_networks.make(network), random_networks.sample(network, 1), 4)
    found = [op.get("returns_input") for op in document["ops"] if op.get("module") == "body.c1.c0"]
    if found != [None, ["body.c1"], ["body.c1"]]:
        print(f"what returns its input: {found}")
        return False
    return True


def pairs_of_samples(program, path):
    """A loss over all pairs of samples is one op, whose costs grow with the square of the batch: PyTorch's at two batches and lengths."""
    model, inputs, length = networks.PAIRS()
    document = export_model.export(model.train(), inputs, length, torch.float32)
    path.write_text(json.dumps(document))
    problems = [] if [op.get("function") for op in document["ops"]].count("pairs_of_samples") == 1 else ["no such op"]
    for batch, tokens in ((1, length), (2, length), (2, length // 2)):
        wanted = trace.totals(trace.run(model, export_model.resized(inputs, length, batch, tokens, torch.float32), True))
        ours = inspected(program, path, tokens)
        for key, value in zip(("forward_flops", "backward_flops", "saved_bytes"), wanted):
            got = ours if isinstance(ours, str) else at_batch(ours["one_gpu"], batch, "fp32", key)
            if isinstance(got, str) or all(abs(one - value) > (KEPT_WITHIN * value if key == "saved_bytes" else 0) for one in got):
                problems.append(f"{key} {got} where PyTorch has {value} (batch {batch}, length {tokens})")
    print(f"{'FAILED ' if problems else ''}pairs of samples {problems[:4]}")
    return not problems


def says_what_it_cannot_run(program, folder):
    """What has no kernel on this machine can be planned; `run` names the op."""
    model, inputs, length = networks.EXACT["cumsum"]()
    (folder / "sums.json").write_text(json.dumps(export_model.export(model, inputs, length, torch.float32)))
    words = ["--model", "./sums.json", "--cluster", "host", "--gpus", "2", "--wrap", "root", "--precision", "fp32", "-o", "plan.json"]
    subprocess.run([program, "plan", *words], capture_output=True, check=True, cwd=folder)
    done = subprocess.run([program, "run", "plan.json", "--steps", "1"], capture_output=True, text=True, check=False, cwd=folder)
    good = done.returncode == 3 and done.stderr == \
        "error: plan: op aten.cumsum_1: no kernel of the host does aten.cumsum, which can be planned only\n"
    if not good:
        print(f"FAILED run: {done.returncode} {done.stderr}")
    return good


def with_weights(program, path):
    """A module with weights, one of them shared, whose router gives (batch, tokens, experts): all is as it is without weights."""
    network = {"width": 8, "vocabulary": 21, "sequence": 4, "inputs": 1, "norm": False, "tied_head": True, "body": {
        "kind": "seq", "list": False, "calls": [[0, "chain"]], "children": [{"kind": "moe", "hidden": 12, "experts": 4}]}}
    model = random_networks.make(network)
    count = sum(p.numel() for p in model.parameters())
    document = export_model.export(model, random_networks.sample(network, 1), network["sequence"])
    path.write_text(json.dumps(document))
    kinds = [op["op"] for op in document["ops"]]
    head = next(m for m in document["modules"] if m["name"] == "head")["params"]
    found = inspected(program, path, network["sequence"])
    good = kinds == ["embedding", "router", "experts", "add", "linear", "cross_entropy"] and \
        head == [{"name": "weight", "tied_to": "embed.weight"}] and not isinstance(found, str) and found["parameter_count"] == count
    print(f"{'' if good else 'FAILED '}with weights {kinds} {head}")
    return good


def pads_experts(program, name, folder):
    """FSDP2 cuts every parameter of the real module along its first dimension; ours, from config.json and exported, do the same.

    Expected: sum of ceil(d0 / 4) * 4 * (other dimensions) over named_parameters() of the layers and of the rest. On 4 ranks the 6
    experts of Mixtral, one tensor, become 8; on --shard 2 and as one matrix per expert (transformers 4) nothing is added.
    """
    config = transformers.AutoConfig.for_model(name, **MIXTURES[name])
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    padded = lambda p, ranks: -(-p.shape[0] // ranks) * ranks * (p.numel() // p.shape[0])  # noqa: E731
    routes = {"config": folder / "config.json", "exported": folder / "exported.json"}
    routes["config"].write_text(json.dumps({"model_type": name, **MIXTURES[name]}))
    subprocess.run([sys.executable, export_model.__file__, "--config", str(routes["config"]), "--seq", str(SEQUENCE), "-o",
                    str(routes["exported"])], check=True, capture_output=True)
    good = True
    for ranks, replicas in ((4, 1), (2, 2)):
        expected = sorted(sum(padded(p, ranks) for p in layer.parameters()) for layer in model.model.layers)
        for route, path in routes.items():
            plan = subprocess.run([program, "plan", "--model", str(path), "--cluster", "dgx-h100", "--nodes", "1", "--gpus", "4",
                                   "--seq", str(SEQUENCE), "--shard", str(ranks), "--replicate", str(replicas), "-o",
                                   str(folder / "plan.json")], check=True, capture_output=True, text=True)
            found = units_of(program, folder / "plan.json")
            warned = "experts of a layer" in plan.stderr
            is_padded = MIXTURES[name].get("num_local_experts", 8) % ranks != 0
            if found != expected or warned != is_padded:
                print(f"FAILED {name} from {route} on {ranks} x {replicas}: layers of {found}, expected {expected}; warned: {warned}")
                good = False
    separate = json.loads((folder / "plan.json").read_text())
    separate["kernel_set"] = {"name": "torch-2024"}
    separate["plan"].update(shard_size=4, replicate_size=1)
    separate["model"] = {"name": name, "json": json.loads(routes["config"].read_text())}
    (folder / "plan.json").write_text(json.dumps(separate))
    expected = sorted(sum(p.numel() if p.dim() == 3 else padded(p, 4) for p in layer.parameters()) for layer in model.model.layers)
    if units_of(program, folder / "plan.json") != expected:
        print(f"FAILED {name}, a matrix per expert: {units_of(program, folder / 'plan.json')}, expected {expected}")
        good = False
    return good


def units_of(program, plan):
    """Padded elements of the layers, ascending."""
    shown = subprocess.run([program, "inspect", str(plan), "--json"], check=True, capture_output=True, text=True)
    return sorted(unit["padded_elements"] for unit in json.loads(shown.stdout)["units"] if "layers" in unit["name"])


def main(arguments):
    transformers.utils.logging.set_verbosity_error()
    program = str(pathlib.Path(arguments[0]).resolve())
    good = True
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        path = folder / "exported.json"
        good &= commands(program, folder) and lengths(program, folder) and with_weights(program, path)
        good &= pairs_of_samples(program, path) and belongs_to_readers() and sums_no_gradients() and marks_what_returns_its_input() and says_what_it_cannot_run(program, folder)
        for name, sizes in FAMILIES.items():
            good &= check(program, path, name, transformer(name, sizes))
        good &= check(program, path, "llama in bf16", transformer("llama", GROUPED), dtype=torch.bfloat16)
        for name, sizes in MIXTURES.items():
            good &= check(program, path, name, transformer(name, sizes), counts_products=False)
        for name, make in {**networks.EXACT, **networks.FIXED}.items():
            good &= check(program, path, name, make())
        for name, (make, words) in networks.REFUSED.items():
            good &= refused(name, make(), words)
        for name in MIXTURES:
            good &= pads_experts(program, name, folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
