"""Random networks through tools/export_model.py: each is counted exactly (parameters, FLOPs forward and backward, kept bytes) or refused.

    python3 tests/models/export_property_test.py SHARDWRIGHT COUNT [FIRST_SEED]

A fifth of the networks have an op planted that no rule knows, somewhere in the middle: all of these must be refused by its name.
"""

import pathlib
import random
import sys
import tempfile

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import export_model_test  # noqa: E402
from export_model_test import export_model  # noqa: E402

UNKNOWN = {
    "aten.special_bessel_j0": torch.special.bessel_j0,
    "aten._fft_r2c": lambda x: torch.fft.rfft(x, norm="ortho").abs().sum(-1, keepdim=True) + x,
    "aten.special_erfcx": torch.special.erfcx,
    "aten.digamma": torch.digamma,
    "aten.special_entr": torch.special.entr,
}


class Network(nn.Module):
    """Layers in a row; `self.steps` are functions of x, `planted` is the place of an op that no rule knows."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)
        self.steps, self.words = [], []
        self.layers = nn.ModuleList()
        self.is_image = self.random.random() < 0.5
        self.channels = self.random.choice((8, 12, 16))
        self.size = self.random.choice((12, 16))
        self.length = 16
        self.sample = (self.channels, self.size, self.size) if self.is_image else (self.length, self.channels)
        self.add(self.pick_linear())
        count = self.random.randint(2, 7)
        place = self.random.randrange(count) if self.random.random() < 0.2 else None
        self.planted = None
        for i in range(count):
            self.add(self.random.choice((self.pick_linear, self.pick_elementwise, self.pick_norm, self.pick_shape, self.pick_mix))())
            if i == place:
                self.planted = self.random.choice(sorted(UNKNOWN))
                self.add((self.planted, UNKNOWN[self.planted]))
        self.add(self.pick_linear())

    def add(self, word_and_step):
        self.words.append(word_and_step[0])
        self.steps.append(word_and_step[1])

    def layer(self, module):
        self.layers.append(module)
        return module

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x

    def pick_linear(self):
        out = self.random.choice((8, 12, 16))
        before, self.channels = self.channels, out
        bias = self.random.random() < 0.7
        if not self.is_image:
            if self.random.random() < 0.2:
                table = self.layer(nn.Linear(out, before, bias=False))
                return "x @ w", lambda x: x @ table.weight
            return "linear", self.layer(nn.Linear(before, out, bias=bias))
        kernel = self.random.choice((1, 3, (3, 1)))
        dilation = self.random.choice((1, 1, 2))
        groups = self.random.choice([g for g in (1, 1, 2, 4) if before % g == 0 and out % g == 0])
        padding = self.random.choice((0, 1))
        span = dilation * 2
        if kernel != 1 and self.size - span + 2 * padding < 4:
            kernel = 1
        if kernel == 1:
            padding = 0
        module = nn.Conv2d(before, out, kernel, padding=padding, dilation=dilation, groups=groups, bias=bias)
        self.size = None if kernel == (3, 1) else self.size + 2 * padding - (span if kernel == 3 else 0)
        if self.size is None:  # back to squares
            self.size = 6
            layer = self.layer(module)
            return "conv2d", lambda x: functional.adaptive_avg_pool2d(layer(x), 6)
        return "conv2d", self.layer(module)

    def pick_elementwise(self):
        name = self.random.choice(("relu", "gelu", "silu", "leaky_relu", "elu", "hardswish", "hardsigmoid", "mish", "softplus", "tanh",
                                   "sigmoid", "relu6", "dropout", "celu"))
        if name == "dropout":
            return name, lambda x: functional.dropout(x, 0.1, True)
        function = getattr(torch, name) if name in ("tanh", "sigmoid") else getattr(functional, name)
        return name, lambda x: function(x)

    def pick_norm(self):
        if self.is_image:
            module = self.random.choice((nn.BatchNorm2d(self.channels), nn.GroupNorm(4, self.channels), nn.InstanceNorm2d(self.channels)))
        else:
            module = self.random.choice((nn.LayerNorm(self.channels), nn.RMSNorm(self.channels)))
        return type(module).__name__, self.layer(module)

    def pick_shape(self):
        if not self.is_image:
            return self.random.choice((
                ("flip", lambda x: x.flip(1)), ("roll", lambda x: torch.roll(x, 1, 1)), ("cumsum", lambda x: x.cumsum(1)),
                ("halves", lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)), ("twist", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
                ("pad", lambda x: functional.pad(x, (0, 0, 1, 1))[:, 2:]), ("every second", lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1))))
        choices = [("nearest", lambda x: functional.interpolate(x, scale_factor=2), 2), ("max_pool", lambda x: functional.max_pool2d(x, 3, 2, 1), None),
                   ("avg_pool", lambda x: functional.avg_pool2d(x, 2), 0.5), ("reflect", lambda x: functional.pad(x, (1, 1, 1, 1), "reflect"), "pad")]
        word, step, factor = self.random.choice([c for c in choices if c[2] == 0.5 and 6 <= self.size <= 64 or c[2] == 2 and self.size < 20 or
                                                 c[2] is None and self.size >= 6 or c[2] == "pad"])
        self.size = (self.size + 1) // 2 if factor is None else self.size + 2 if factor == "pad" else int(self.size * factor)
        return word, step

    def pick_mix(self):
        c = self.channels
        if self.is_image:
            gate = self.layer(nn.Conv2d(c, c, 1))
            kind = self.random.choice(("residual", "squeeze", "dense"))
            if kind == "dense":
                self.channels = 2 * c
                return kind, lambda x: torch.cat([x, gate(x)], 1)
            if kind == "squeeze":
                return kind, lambda x: x * torch.sigmoid(gate(x.mean((2, 3), keepdim=True)))
            return kind, lambda x: x + gate(x)
        qkv, out = self.layer(nn.Linear(c, 3 * c)), self.layer(nn.Linear(c, c))
        heads = self.random.choice((2, 4))
        kind = self.random.choice(("sdpa", "softmax", "gated", "einsum"))

        def attend(x):
            b, n, _ = x.shape
            q, k, v = (t.view(b, n, heads, c // heads).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            if kind == "sdpa":
                y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            elif kind == "softmax":
                y = torch.softmax(q @ k.transpose(2, 3) / 3.0, -1) @ v
            else:
                y = torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)
            return x + out(y.transpose(1, 2).reshape(b, n, c))

        def gated(x):
            a, b, d = qkv(x).chunk(3, -1)
            return out(functional.silu(a) * b) + d

        return kind, gated if kind == "gated" else attend


def outcome(program, path, seed):
    """"exact", "refused", or what is wrong."""
    with torch.device("meta"):
        network = Network(seed).train()
        inputs = {"x": torch.zeros(1, *network.sample)}
    try:
        found = export_model_test.problems_of(program, path, network, inputs, 0 if network.is_image else network.length)
    except export_model.Unsupported as error:
        if network.planted is not None and network.planted in str(error):
            return "refused"
        return f"{network.words}: {error}"
    except Exception as error:  # noqa: BLE001  a traceback is never the answer
        return f"{network.words}: {type(error).__name__}: {error}"
    if network.planted is not None:
        return f"{network.words}: accepted"
    return f"{network.words}: {found[:3]}" if found else "exact"


def main(arguments):
    program, count, first = str(pathlib.Path(arguments[0]).resolve()), int(arguments[1]), int((*arguments[2:], 0)[0])
    totals = {"exact": 0, "refused": 0}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            result = outcome(program, pathlib.Path(folder) / "network.json", seed)
            if result in totals:
                totals[result] += 1
            else:
                wrong.append(f"seed {seed}: {result}")
    print(f"{count} networks: {totals['exact']} exact, {totals['refused']} refused, {len(wrong)} wrong")
    for line in wrong[:10]:
        print("FAILED", line)
    # Of planted ops none may slip through, and a test that only refuses shows nothing.
    return 0 if not wrong and totals["exact"] > count // 2 and totals["refused"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
