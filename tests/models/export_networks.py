"""Networks that export_model_test.py exports: layers of classifiers, text and generative models, and what must be refused."""

import torch
from torch import nn
from torch.nn import functional


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
        x = torch.flatten(self.dropout1(functional.max_pool2d(x, 2)), 1)
        x = self.fc2(self.dropout2(torch.relu(self.fc1(x))))
        return functional.nll_loss(functional.log_softmax(x, dim=1), label.flatten())


class Of(nn.Module):
    """A module of one input, as a function of its layers: Of(function, name=layer, ...)."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


class Double(torch.autograd.Function):
    """A custom function that keeps a tensor."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x) * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (2 - y * y / 2)


def squeeze_excite(m, x):
    return m.b(m.a(x) * torch.sigmoid(m.s(functional.adaptive_avg_pool2d(m.a(x), 1)))).flatten(1)


def windows(m, x):
    b, c, h, w = x.shape
    y = torch.roll(x, (2, 2), (2, 3)).view(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
    q, k, v = m.qkv(m.n(y)).chunk(3, -1)
    return m.o(torch.softmax(q @ k.transpose(1, 2) * c ** -0.5, -1) @ v).sum((1, 2))


def blocks(m, x):
    b, n, c = x.shape
    q, k, v = m.qkv(x).view(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
    return m.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


def in_place(m, x):
    y = m.a(x)
    y.mul_(0.5)
    functional.relu_(y)
    return m.b(functional.hardswish(y, inplace=True))


def meta(make, sample, length=0):
    """A maker of (module, inputs of one sample, length)."""
    def made():
        with torch.device("meta"):
            return make().train(), {"x": torch.zeros(1, *sample)}, length
    return made


def image(function, size=16, channels=8, **layers):
    return meta(lambda: Of(function, **{name: make() for name, make in layers.items()}), (channels, size, size))


def tokens(function, features=32, length=24, **layers):
    return meta(lambda: Of(function, **{name: make() for name, make in layers.items()}), (length, features), length)


def linear():
    return nn.Linear(32, 32)


def elementwise(function):
    return tokens(lambda m, x: m.b(function(m.a(x))), a=linear, b=linear)


FUNCTIONS = {name: elementwise(getattr(functional, name)) for name in
             ("leaky_relu", "elu", "selu", "celu", "relu6", "hardswish", "hardsigmoid", "hardtanh", "mish", "softplus", "softsign",
              "logsigmoid", "tanhshrink", "softshrink")}
EXACT = {
    "ConvNet": lambda: (lambda m: (m, {"image": torch.zeros(1, 1, 28, 28, device="meta"),
                                       "label": torch.zeros(1, 1, dtype=torch.long, device="meta")}, 0))(ConvNet().to("meta")),
    **FUNCTIONS,
    "cumsum": elementwise(lambda y: y.cumsum(1)),
    "interpolate": image(lambda m, x: m.b(functional.interpolate(m.a(x), scale_factor=2)), a=lambda: nn.Conv2d(8, 8, 3), b=lambda: nn.Conv2d(8, 4, 3)),
    "bilinear": image(lambda m, x: m.b(functional.interpolate(m.a(x), size=(24, 20), mode="bilinear")), a=lambda: nn.Conv2d(8, 8, 3),
                      b=lambda: nn.Conv2d(8, 4, 3)),
    "avg_pool2d": image(lambda m, x: m.b(functional.avg_pool2d(m.a(x), 2)), a=lambda: nn.Conv2d(8, 8, 3), b=lambda: nn.Conv2d(8, 4, 3)),
    "mean over pixels": image(lambda m, x: m.b(m.a(x).mean((2, 3))), a=lambda: nn.Conv2d(8, 8, 3), b=lambda: nn.Linear(8, 4)),
    "padded max_pool": image(lambda m, x: m.b(functional.max_pool2d(m.a(x), 3, 2, 1)), a=lambda: nn.Conv2d(8, 8, 3), b=lambda: nn.Conv2d(8, 4, 3)),
    "dilated": image(lambda m, x: m.a(x), a=lambda: nn.Conv2d(8, 8, 3, dilation=2)),
    "grouped": image(lambda m, x: m.b(m.a(x)), a=lambda: nn.Conv2d(8, 16, 3, groups=4), b=lambda: nn.Conv2d(16, 16, (3, 1), groups=16, padding=(1, 0))),
    "transposed": image(lambda m, x: m.b(m.a(x)), a=lambda: nn.Conv2d(8, 8, 3), b=lambda: nn.ConvTranspose2d(8, 4, 2, stride=2)),
    "group norm": image(lambda m, x: m.b(functional.silu(m.n(m.a(x)))), a=lambda: nn.Conv2d(8, 8, 3), n=lambda: nn.GroupNorm(4, 8),
                        b=lambda: nn.Conv2d(8, 4, 3)),
    "batch norm": image(lambda m, x: functional.relu(m.n(m.a(x)), inplace=True), a=lambda: nn.Conv2d(8, 8, 3, bias=False), n=lambda: nn.BatchNorm2d(8)),
    "squeeze and excitation": image(squeeze_excite, a=lambda: nn.Conv2d(8, 8, 1), s=lambda: nn.Conv2d(8, 8, 1), b=lambda: nn.Conv2d(8, 8, 1)),
    "dense block": image(lambda m, x: m.b(torch.cat([x, m.a(x)], 1)), a=lambda: nn.Conv2d(8, 8, 3, padding=1), b=lambda: nn.Conv2d(16, 4, 1)),
    "windows": image(windows, channels=32, n=lambda: nn.LayerNorm(32), qkv=lambda: nn.Linear(32, 96), o=linear),
    "upsampling by shuffle": image(lambda m, x: functional.pixel_shuffle(m.a(x), 2), a=lambda: nn.Conv2d(8, 16, 3)),
    "in place": image(in_place, a=lambda: nn.Conv2d(8, 8, 3), b=lambda: nn.Conv2d(8, 4, 3)),
    "conv1d": tokens(lambda m, x: m.a(x.transpose(1, 2)), a=lambda: nn.Conv1d(32, 16, 3, padding=1)),
    "conv3d": meta(lambda: Of(lambda m, x: m.n(m.a(x)), a=nn.Conv3d(3, 4, 3), n=nn.BatchNorm3d(4)), (3, 4, 8, 8)),
    "blocks of heads": tokens(blocks, qkv=lambda: nn.Linear(32, 96), o=linear),
    "MultiheadAttention": tokens(lambda m, x: m.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(32, 4, batch_first=True)),
    "attention without weights": tokens(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=lambda: nn.MultiheadAttention(32, 4, batch_first=True)),
    "TransformerEncoder with a mask": tokens(
        lambda m, x: m.e(x, mask=torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)),
        e=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)),
    "attention by einsum": tokens(lambda m, x: torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", m.q(x), m.k(x)).softmax(-1), m.v(x)),
                                  q=linear, k=linear, v=linear),
    "product with a weight": tokens(lambda m, x: x @ m.a.weight.t(), a=linear),
    "parameters of the root": tokens(lambda m, x: x @ m.w + m.b, w=lambda: nn.Parameter(torch.zeros(32, 8)), b=lambda: nn.Parameter(torch.zeros(8))),
    "class token": tokens(lambda m, x: m.h(torch.cat([m.t.expand(x.shape[0], -1, -1), x], 1)[:, 0]), t=lambda: nn.Parameter(torch.zeros(1, 1, 32)),
                          h=lambda: nn.Linear(32, 4)),
    "custom function": tokens(lambda m, x: m.b(Double.apply(m.a(x))), a=linear, b=linear),
    "compiled": tokens(lambda m, x: m.a(x), a=lambda: torch.compile(nn.Linear(32, 32))),
    "unused parameter": tokens(lambda m, x: m.a(x), a=linear, b=linear),
    "squared error": tokens(lambda m, x: functional.mse_loss(m.a(x), x), a=linear),
    "bilinear product": tokens(lambda m, x: torch.bmm(m.a(x), m.b(x).transpose(1, 2)).tanh(), a=linear, b=linear),
    "weights of weights": tokens(lambda m, x: functional.linear(x, m.a.weight / m.a.weight.norm(dim=1, keepdim=True)), a=linear),
}


def contrast(m, x):
    """Scores of each sample's first token with the mean of every sample, both ways, as CLIP has them of texts and images."""
    scores = m.a(x[:, 0]) @ m.b(x.mean(1)).t() * m.scale.exp()
    places = torch.arange(x.shape[0], device=x.device)
    return functional.cross_entropy(scores, places) + functional.cross_entropy(scores.t(), places)


def contrast_twice(m, x):
    a, b = m.a(x[:, 0]), m.b(x[:, 1])
    scores = a @ b.t()
    return (scores + torch.relu(scores.softmax(-1) @ b) @ a.t()).sum()


# What is not per sample: a size of the batch times the batch.
PAIRS = tokens(contrast, a=linear, b=linear, scale=lambda: nn.Parameter(torch.zeros(())))


def loop(m, x):
    state = x[:, 0]
    for token in x.unbind(1):
        state = torch.tanh(m.a(token) + m.b(state))
    return state


FIXED = {"loop over tokens": tokens(loop, length=8, a=linear, b=linear)}


def branches(m, x):
    return m.a(x) if x.sum() > 0 else x


def of_batch(m, x):
    return m.a(x) if x.shape[0] == 2 else m.b(m.a(x))


REFUSED = {
    "fft": (tokens(lambda m, x: torch.fft.rfft(m.a(x)).abs(), a=linear), ("no rule for aten._fft_r2c", "[2, 24, 32]")),
    "branch on values": (tokens(branches, a=linear), ("depends on values of tensors",)),
    "in place on a view": (tokens(in_place, a=linear, b=linear), ("the root module: relu_ in place on a view",)),
    "LSTM": (tokens(lambda m, x: m.l(x)[0], l=lambda: nn.LSTM(32, 32)), ("l: LSTM",)),
    "between ops on pairs": (tokens(contrast_twice, a=linear, b=linear), ("relu between ops on pairs of samples",)),
    "ops that depend on the batch": (tokens(of_batch, a=linear, b=linear), ("depends on the batch",)),
    "an unknown function": (tokens(lambda m, x: torch.special.bessel_j0(x) + m.a(x), a=linear), ("no rule for aten.special_bessel_j0",)),
}


def Erf():
    return Of(lambda m, x: torch.special.bessel_j0(m.a(x)), a=nn.Linear(8, 8))


def Branches():
    return Of(branches, a=nn.Linear(8, 8))
