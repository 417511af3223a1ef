"""tools/export_model.py: models of torch and transformers, exported and loaded by us, have their parameters, names and FLOPs.

    python3 tests/models/export_model_test.py SHARDWRIGHT

Expected: names and counts from named_parameters(), FLOPs from torch's FlopCounterMode over the forward pass. `inspect` prints
FLOPs by the convention of published figures, a third of which is the forward pass; it also counts position tables, hence BOUND.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tools"))
import export_model  # noqa: E402

BOUND = 0.04
SEQUENCE = 128
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES = {
    "gpt2": {"vocab_size": 512, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": SEQUENCE},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 48},
    "gemma": {**SIZES, "num_key_value_heads": 1, "head_dim": 32},
    "gemma2": {**GROUPED, "head_dim": 32},
    "gemma3_text": {**GROUPED, "head_dim": 32},
    "gpt_neox": SIZES,
    "phi3": {**GROUPED, "pad_token_id": 0},
    "opt": {"vocab_size": 512, "hidden_size": 128, "ffn_dim": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
            "word_embed_proj_dim": 128, "max_position_embeddings": SEQUENCE},
    "mpt": {"vocab_size": 512, "d_model": 128, "n_layers": 3, "n_heads": 4, "max_seq_len": SEQUENCE},
    "mixtral": {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {**GROUPED, "head_dim": 32, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 3,
                  "decoder_sparse_step": 2},
    "t5": {"vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 352, "num_layers": 3, "num_heads": 4},
    "bert": {**SIZES, "max_position_embeddings": SEQUENCE},
    "vit": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 352,
            "image_size": 64, "patch_size": 16},
}
MIXTURES = ("mixtral", "qwen3_moe")


class ConvNet(nn.Module):
    """The network of PyTorch's FSDP tutorial, which the zoo has as mnist-convnet."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, image, label):
        x = torch.relu(self.conv2(torch.relu(self.conv1(image))))
        x = torch.flatten(self.dropout1(nn.functional.max_pool2d(x, 2)), 1)
        x = self.fc2(self.dropout2(torch.relu(self.fc1(x))))
        return nn.functional.nll_loss(nn.functional.log_softmax(x, dim=1), label)


class Odd(nn.Module):
    """What model.json has no op for."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(torch.matmul(x, self.layer.weight))


def build(name):
    if name == "ConvNet":
        return ConvNet().train(), {"image": torch.zeros(1, 1, 28, 28), "label": torch.zeros(1, dtype=torch.long)}
    config = transformers.AutoConfig.for_model(name, **FAMILIES[name])
    config.use_cache = False
    if name == "vit":
        model = transformers.AutoModelForImageClassification.from_config(config)
        return model.train(), {"pixel_values": torch.zeros(1, 3, 64, 64), "labels": torch.zeros(1, dtype=torch.long)}
    kind = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}.get(
        name, transformers.AutoModelForCausalLM)
    attention = "eager" if name in ("gemma2", "mpt", "t5") else "sdpa"  # capped scores, ALiBi, position biases
    # Without loops over the experts that have rows, which tensors without data cannot tell.
    extra = {"experts_implementation": "batched_mm"} if name in MIXTURES else {}
    ids = torch.zeros(1, SEQUENCE, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids.clone()} | ({"decoder_input_ids": ids.clone()} if name == "t5" else {})
    return kind.from_config(config, attn_implementation=attention, **extra).train(), inputs


def check(program, name, path):
    is_image = name in ("vit", "ConvNet")
    with torch.device("meta") if is_image else FakeTensorMode():
        model, inputs = build(name)
        document = export_model.export(model, inputs, 0 if is_image else SEQUENCE)
        # The flash kernel of the CPU has no formula in the counter; batched products have.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(**inputs)
    path.write_text(json.dumps(document))
    result = subprocess.run([program, "inspect", str(path), "--json"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(f"FAILED {name}: {result.stderr}")
        return False
    ours = json.loads(result.stdout)
    parameters = sum(p.numel() for p in model.parameters())
    names = sorted(n for n, _ in model.named_parameters(remove_duplicate=False))
    distance = ours["convention_flops_per_sample"] / 3 / counter.get_total_flops() - 1
    good = ours["parameter_count"] == parameters and sorted(p["fqn"] for p in ours["parameters"]) == names
    good = good and abs(distance) < BOUND
    print(f"{'' if good else 'FAILED '}{name}: {ours['parameter_count']} parameters ({parameters}), {len(names)} names, "
          f"{len(document['ops'])} ops, forward FLOPs {distance:+.2%}")
    return good


def refuses_what_it_cannot_say():
    try:
        with torch.device("meta"):
            export_model.export(Odd(), {"x": torch.zeros(1, 2, 8)})
    except export_model.Unsupported as error:
        return "a product with a parameter outside a linear layer" in str(error)
    return False


def refuses_latent_attention():
    config = transformers.AutoConfig.for_model("deepseek_v3", **SIZES, num_key_value_heads=4, first_k_dense_replace=3)
    try:
        with FakeTensorMode():
            export_model.export(transformers.AutoModelForCausalLM.from_config(config), {"input_ids": torch.zeros(1, 8, dtype=torch.long)})
    except export_model.Unsupported as error:
        return "model.layers.0.self_attn: latent attention (shardwright reads the config.json" in str(error)
    return False


def pads_experts(program, name, folder):
    """FSDP2 cuts every parameter of the real module along its first dimension; ours, from config.json and exported, do the same.

    Expected: sum of ceil(d0 / 4) * 4 * (other dimensions) over named_parameters() of the layers and of the rest. On 4 ranks the 6
    experts of Mixtral, one tensor, become 8; on --shard 2 and as one matrix per expert (transformers 4) nothing is added.
    """
    config = transformers.AutoConfig.for_model(name, **FAMILIES[name])
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    padded = lambda p, ranks: -(-p.shape[0] // ranks) * ranks * (p.numel() // p.shape[0])  # noqa: E731
    routes = {"config": folder / "config.json", "exported": folder / "exported.json"}
    routes["config"].write_text(json.dumps({"model_type": name, **FAMILIES[name]}))
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
            is_padded = FAMILIES[name].get("num_local_experts", 8) % ranks != 0
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
    good = refuses_what_it_cannot_say() and refuses_latent_attention()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "exported.json"
        for name in [*FAMILIES, "ConvNet"]:
            good &= check(arguments[0], name, path)
            if name == "llama":
                subprocess.run([arguments[0], "plan", "--model", str(path), "--cluster", "dgx-h100", "--nodes", "1",
                                "--recompute", "full", "-o", str(path) + ".plan"], check=True, capture_output=True)
                simulated = subprocess.run([arguments[0], "simulate", str(path) + ".plan", "--json"], check=True,
                                           capture_output=True, text=True)
                good &= json.loads(simulated.stdout)["step_time_s"] > 0
        for name in MIXTURES:
            good &= pads_experts(arguments[0], name, pathlib.Path(folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
