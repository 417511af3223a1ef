"""Small models saved by Transformers, trained on from their weights by shardwright and by PyTorch: equal losses on 1, 2 and 4
ranks, whole and with adapters; exported they load again, without a missing or unexpected key, with the logits of PyTorch's.

    python3 tests/executor/torch_finetune.py SHARDWRIGHT [KIND...]
    python3 tests/executor/torch_finetune.py SHARDWRIGHT --optimizers

The second form trains a Llama under DDP by bitsandbytes' Lion and Transformers' Adafactor.
"""

import gzip
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers as hf
    from safetensors.torch import load_file
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DIGITS = ROOT / "tests/data/digits"
LENGTH, BATCH, MICRO_BATCH, STEPS = 32, 8, 2, 20
# Both sides compute in fp32 and differ in the order of their sums: 2^-24 = 6e-8 of a loss, which every update hands on.
BOUND = 1e-6
# Where torch's input of a ReLU is this near to 0, ours may lie on the other side: the gradient jumps there, and every update hands on
# a difference of the size of one feature's share.
KINK, BOUND_BEHIND_KINK = 1e-6, 1e-4
# Adam's first steps move a weight whose gradient is near its epsilon, 1e-8, by anything up to the learning rate, 1e-3, as the last
# bits of the gradient are: that is what logits may differ by.
LOGITS = 1e-3
# Without dropout, and with positions for more than a sample.
DECODER = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.0, "bos_token_id": 1,
           "eos_token_id": 2, "pad_token_id": None}
ENCODER = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Ranks that cut layers or tokens, too.
MESHES = ((4, "--shard", "2,tp=2"), (4, "--shard", "4,cp=2:ulysses"), (8, "--shard", "4,cp=2:ring,tp=2"))


def t5(activation):
    return hf.T5ForConditionalGeneration(hf.T5Config(
        vocab_size=256, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
        feed_forward_proj=activation))


MODELS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=256, n_embd=48, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=12, tie_word_embeddings=True)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(
        **DECODER, head_dim=12, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=256, max_position_embeddings=64, pad_token_id=0, **ENCODER)),
    "t5": lambda: t5("gated-gelu"),
    "t5_relu": lambda: t5("relu"),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(
        image_size=28, patch_size=7, num_channels=1, num_labels=10, **ENCODER)),
}
ADAPTED = {"llama": "q_proj,v_proj,down_proj", "gpt2": "c_attn,c_proj"}
LORA = ("--lora-rank", "4", "--lora-alpha", "8", "--lora-targets")


def philox(key, counter):
    """The first word of Philox4x32-10 (Salmon et al., SC 2011), with a counter of 64 bits."""
    mask = 0xFFFFFFFF
    keys = [key & mask, key >> 32]
    c = [counter & mask, counter >> 32, 0, 0]
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(high >> 32) ^ c[1] ^ keys[0], high & mask, (low >> 32) ^ c[3] ^ keys[1], low & mask]
        keys = [(keys[0] + 0x9E3779B9) & mask, (keys[1] + 0xBB67AE85) & mask]
    return c[0]


def mask_key(seed=1):
    """docs/training.md: a key of seed and name."""
    key = 0xCBF29CE484222325
    for byte in b"mask":
        key = (key ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return key ^ (seed * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


def idx(file):
    content = gzip.decompress((DIGITS / file).read_bytes())
    return torch.frombuffer(bytearray(content[16 if "images" in file else 8:]), dtype=torch.uint8)


def batches(kind, ids):
    """Per step what the model is called with, and the labels."""
    if kind == "vit":
        pixels = ((idx("train-images-idx3-ubyte.gz").float() / 255 - 0.1307) / 0.3081).reshape(-1, 1, 28, 28)
        labels = idx("train-labels-idx1-ubyte.gz").long()
        for first in range(0, STEPS * BATCH, BATCH):
            yield {"pixel_values": pixels[first:first + BATCH]}, labels[first:first + BATCH]
        return
    seq2seq = kind.startswith("t5")
    per_sample = 2 * LENGTH if seq2seq else LENGTH
    for step in range(STEPS):
        starts = [(step * BATCH + i) * per_sample for i in range(BATCH)]
        own = torch.stack([ids[s:s + LENGTH] for s in starts])
        after = torch.stack([ids[s + (LENGTH if seq2seq else 1):][:LENGTH] for s in starts])
        if seq2seq:
            shifted = torch.cat([torch.zeros(BATCH, 1, dtype=torch.long), after[:, :-1]], dim=1)
            yield {"input_ids": own, "decoder_input_ids": shifted}, after
        elif kind == "bert":
            hidden = torch.tensor([[philox(mask_key(), s + i) < 0x26666666 for i in range(LENGTH)] for s in starts])
            yield {"input_ids": own.masked_fill(hidden, 103)}, own.masked_fill(~hidden, -100)
        else:
            yield {"input_ids": own}, after


class Adapter(torch.nn.Module):
    """A linear layer with LoRA: x W' + alpha / rank (x A') B'."""

    def __init__(self, base, a, b):
        super().__init__()
        self.base, self.a, self.b = base, torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())
        base.weight.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + 2.0 * torch.nn.functional.linear(torch.nn.functional.linear(x, self.a), self.b)


def adapt(model, weights):
    """Gives the model the adapters of an export, and freezes the rest."""
    model.requires_grad_(False)
    for name in [name for name in weights if name.endswith(".lora_A.weight")]:
        path = name.removesuffix(".lora_A.weight")
        parent, leaf = path.rsplit(".", 1)
        adapter = Adapter(model.get_submodule(path), weights[name], weights[path + ".lora_B.weight"])
        setattr(model.get_submodule(parent), leaf, adapter)


def smooth_steps(model, step, smooth):
    """Notes in `smooth` how many steps come before the first in which some ReLU's input is next to 0."""
    def look(module, inputs):
        if inputs[0].abs().min() < KINK:
            smooth[0] = min(smooth[0], step[0])

    for module in model.modules():
        if isinstance(module, torch.nn.ReLU):
            module.register_forward_pre_hook(look)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-3)


def lion(groups):
    import bitsandbytes
    return bitsandbytes.optim.Lion32bit(groups, lr=1e-3, betas=(0.9, 0.999))


def adafactor(groups):
    return hf.optimization.Adafactor(groups, lr=1e-3, scale_parameter=False, relative_step=False)


def train_in_torch(kind, model, ids, make=adamw):
    """The losses, and how many of them do not depend on the side of a ReLU's 0 that an input lies on."""
    model.train()
    step, smooth = [0], [STEPS]
    smooth_steps(model, step, smooth)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = make([{"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
                      {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}])
    losses = []
    for inputs, labels in batches(kind, ids):
        optimizer.zero_grad()
        logits = model(**inputs).logits
        # The mean over micro-batches, as with DDP, in which BERT asks for unequal numbers of tokens.
        parts = [torch.nn.functional.cross_entropy(own.reshape(-1, own.shape[-1]), its.reshape(-1))
                 for own, its in zip(logits.split(MICRO_BATCH), labels.split(MICRO_BATCH))]
        loss = torch.stack(parts).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        losses.append(loss.item())
        step[0] += 1
    # The loss of that step is before the jump of the gradient.
    return losses, min(smooth[0] + 1, STEPS)


class Job:
    """A model's folder, and the program's runs in it."""

    def __init__(self, program, folder, kind, adapted):
        self.program, self.folder, self.kind, self.adapted = program, folder, kind, adapted
        options = {"format": "shardwright-training", "version": 1, "shuffle": False}
        for name, rate in (("options.json", 1e-3), ("still.json", 0.0)):
            optimizer = {"learning_rate": rate, "weight_decay": 0.1 if rate else 0.0}
            (folder / name).write_text(json.dumps({**options, "optimizer": optimizer}))
        self.data = str(DIGITS / "train-images-idx3-ubyte.gz") if kind == "vit" else "text:text"

    def run(self, *arguments):
        done = subprocess.run([self.program, *arguments], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, check=False)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout

    def plan(self, ranks, *more):
        flags = () if self.kind == "vit" else ("--seq", str(LENGTH))
        self.run("plan", "--model", "./hub", "--cluster", f"h100-80 x{ranks}, nvlink 450 GB/s", "--kernel-set", "shardwright-host",
                 "--precision", "fp32", "--micro-batch", str(MICRO_BATCH), "--global-batch", str(BATCH), "--no-search", "-o", "plan.json",
                 *flags, *more, *((*LORA, ADAPTED[self.kind]) if self.adapted else ()))

    def train(self, steps, options, checkpoint):
        kept = ("--checkpoint", checkpoint) if checkpoint else ()
        report = json.loads(self.run("run", "plan.json", "--init", "hub", "--steps", str(steps), "--data", self.data,
                                     "--training", options, *kept, "--json"))
        return [step["loss"] for step in report["steps"]]


def reload(job, folder, model, plain=None):
    """Loads an exported file as `plain` (nothing: the model) is one; its largest distance of a logit from the model's."""
    # The parts that the folder has stay beside it: the one file goes first.
    shutil.copytree(job.folder / "hub", job.folder / folder)
    shutil.move(job.folder / "out.safetensors", job.folder / folder / "model.safetensors")
    again, info = type(plain or model).from_pretrained(job.folder / folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    inputs, _ = next(iter(batches(job.kind, job.ids)))
    with torch.no_grad():
        far = (again.eval()(**inputs).logits - model.eval()(**inputs).logits).abs().amax(-1).flatten()
    # A router's choice between two experts with nearly equal scores may fall otherwise, for a few tokens.
    return far.quantile(0.9 if job.kind in ("mixtral", "qwen3_moe") else 1.0).item()


def compare(program, kind, adapted):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        text = (ROOT / "LICENSE").read_bytes()  # a page of docs would be another text after every change
        (folder / "text").write_bytes(text)
        job = Job(program, folder, kind, adapted)
        job.ids = torch.tensor(list(text))
        torch.manual_seed(7)
        model = MODELS[kind]()
        model.save_pretrained(folder / "hub", max_shard_size="60KB")  # in parts
        assert len(list((folder / "hub").glob("*.safetensors"))) > 1
        first = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        if adapted:
            job.plan(1)
            job.train(1, "still.json", "still")
            job.run("checkpoint", "export", "still", "-o", "still.safetensors")
            adapt(model, load_file(folder / "still.safetensors"))
        theirs, smooth = train_in_torch(kind, model, job.ids)
        good = theirs[-1] < (0.999 if adapted else 0.97) * theirs[0]  # it learns: far more than the bound
        for ranks, *mesh in ((1,), (2,), (4,), *(MESHES if adapted and kind == "llama" else ())):
            job.plan(ranks, *mesh)
            ours = job.train(STEPS, "options.json", f"c{ranks}" if not mesh else mesh[-1])
            far = [abs(a - b) / b for a, b in zip(ours, theirs)]
            worst = max(far[:smooth])
            print(f"{kind}{' with adapters' if adapted else ''}, {' '.join([str(ranks), 'ranks', *mesh])}: loss {ours[0]:.4f} -> {ours[-1]:.4f}, "
                  f"largest relative distance {worst:.1e}" +
                  (f" in {smooth} steps, then {max(far[smooth:]):.1e}" if smooth < STEPS else ""))
            good = good and len(ours) == STEPS and smooth >= 4 and worst <= BOUND and max(far) <= BOUND_BEHIND_KINK
        if adapted:
            job.run("checkpoint", "export", MESHES[0][-1] if kind == "llama" else "c2", "-o", "out.safetensors", "--adapters", "merge")
            distance = reload(job, "merged", model, MODELS[kind]())
            print(f"    logits of merged weights differ by {distance:.1e}")
            return good and distance < LOGITS
        job.run("checkpoint", "export", "c2", "-o", "out.safetensors")
        distances = [reload(job, "again", model)]
        job.run("checkpoint", "export", "c4", "-o", "out.safetensors", "--transformers", "4")
        distances.append(reload(job, "again4", model))
        # Import and export are inverses: what the hub had comes back, under the modules' names.
        job.run("checkpoint", "import", "hub", "-o", "imported")
        job.run("checkpoint", "export", "imported", "-o", "out.safetensors")
        back = load_file(folder / "out.safetensors")
        good = good and all(torch.equal(first[key], back[key]) for key in back) and len(back) > 10
        model.load_state_dict(first)
        distances.append(reload(job, "imported-again", model))
        print(f"    logits of exported weights differ by {distances[0]:.1e}, {distances[1]:.1e}, of imported ones by {distances[2]:.1e}")
        return good and max(distances[:2]) < LOGITS and distances[2] == 0.0


def compare_optimizer(program, make):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        text = (ROOT / "LICENSE").read_bytes()
        (folder / "text").write_bytes(text)
        torch.manual_seed(7)
        model = MODELS["llama"]()
        model.save_pretrained(folder / "hub")
        job = Job(program, folder, "llama", False)
        theirs, _ = train_in_torch("llama", model, torch.tensor(list(text)), make)
        good = theirs[-1] < 0.97 * theirs[0]
        for ranks in (1, 2, 4):
            job.plan(ranks, "--dialect", "ddp", "--optimizer", make.__name__)
            ours = job.train(STEPS, "options.json", "")
            worst = max(abs(a - b) / b for a, b in zip(ours, theirs))
            print(f"{make.__name__}, {ranks} ranks: loss {ours[0]:.4f} -> {ours[-1]:.4f}, largest relative distance {worst:.1e}")
            good = good and len(ours) == STEPS and worst <= BOUND
        return good


def main(arguments):
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    if arguments[1:] == ["--optimizers"]:
        return 0 if all([compare_optimizer(arguments[0], make) for make in (adamw, lion, adafactor)]) else 1
    kinds = arguments[1:] or list(MODELS)
    results = [compare(arguments[0], kind, False) for kind in kinds]
    if not arguments[1:]:
        results += [compare(arguments[0], kind, True) for kind in ADAPTED]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
