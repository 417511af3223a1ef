"""More modules as users write them, added to those of user_modules.py: layers of torch.nn's own, losses, several heads, loops."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from user_modules import SELF, TOKENS, WIDTH, WORDS, Block, Net, Taught, case, changed


def blocks_of(make, count=2):
    """A Net whose blocks are made so."""
    def build():
        model = Net()
        model.blocks = nn.ModuleList(make() for _ in range(count))
        return model
    return build


def encoder_layer():
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


case("layers of nn.TransformerEncoderLayer")(blocks_of(encoder_layer))
case("an nn.TransformerEncoder", flags={})(changed(lambda model: setattr(
    model, "blocks", nn.ModuleList([nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)]))))


class SelfAttention(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.norm = nn.LayerNorm(WIDTH)
        if how == "module":
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        else:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.register_buffer("mask", torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool)), persistent=False)

    def forward(self, x):
        y = self.norm(x)
        if self.how == "module":
            return x + self.attention(y, y, y, need_weights=False)[0]
        q, k, v = (t.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2) for t in self.qkv(y).chunk(3, dim=-1))
        if self.how == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
            y = torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(~self.mask, float("-inf")).softmax(-1), v)
        else:
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            y = scores.masked_fill(~self.mask, torch.finfo(scores.dtype).min).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


for how in ("module", "fused", "einsum", "matrix products"):
    case(f"attention: {how}")(blocks_of(lambda how=how: SelfAttention(how)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.inner(x)[0]


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH)
        self.depth = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.point = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x):
        return x + self.point(F.gelu(self.depth(self.norm(x.transpose(1, 2))))).transpose(1, 2)


class RootMeanSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RootMeanSquare()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gamma = nn.Parameter(1e-1 * torch.ones(WIDTH))

    def forward(self, x):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.gamma * self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """All experts see all tokens; a softmax weighs them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i:i + 1] * expert(x) for i, expert in enumerate(self.experts))


case("an LSTM in each block", describe="LSTM, a loop over the tokens")(blocks_of(lambda: Recurrent(nn.LSTM)))
case("a GRU in each block", describe="GRU, a loop over the tokens")(blocks_of(lambda: Recurrent(nn.GRU)))
case("convolutions in each block")(blocks_of(Convolved))
case("gated blocks with a scale and a norm written by hand")(blocks_of(Gated))
case("experts that all tokens see", flags={})(blocks_of(Experts))
case("a PReLU of one parameter")(blocks_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU())))


# How blocks are called.
class Called(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def body(self, x):
        first, second, third = self.blocks
        if self.how == "one block three times":
            return first(first(first(x)))
        if self.how == "the block of an index read from a list":
            for i in [2, 0, 1]:
                x = self.blocks[i](x)
            return x
        if self.how == "a skip as in a U":
            low = first(x)
            return third(second(low) + low) + x
        if self.how == "the mean of all":
            return torch.stack([block(x) for block in self.blocks]).mean(0)
        if self.how == "in halves of the tokens":
            left, right = x.chunk(2, 1)
            return torch.cat([third(second(first(left))), third(second(first(right)))], 1)
        if self.how == "by keyword":
            return third(x=second(x=first(x=x)))
        x = x + torch.utils.checkpoint.checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)
        return x


for how in ("one block three times", "the block of an index read from a list", "a skip as in a U", "the mean of all",
            "in halves of the tokens", "by keyword"):
    case(f"blocks called: {how}")(lambda how=how: Called(how))
case("checkpoint_sequential", describe=SELF)(lambda: Called("checkpoint_sequential"))


# Heads and losses.
class Lossy(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how
        if how == "two heads":
            self.second = nn.Linear(WIDTH, WORDS)
        if how == "a temperature":
            self.scale = nn.Parameter(torch.ones(1))
        if how == "positions looked up":
            self.places = nn.Embedding(TOKENS, WIDTH)
        if how == "contrasted":
            self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids, labels):
        x = self.embed(ids)
        labels = labels.flatten()
        if self.how == "positions looked up":
            x = x + self.places(torch.arange(ids.shape[1], device=ids.device))
        if self.how == "each block has a say":
            losses = []
            for block in self.blocks:
                x = block(x)
                losses.append(F.cross_entropy(self.head(x).flatten(0, 1), labels))
            return sum(losses) / len(losses)
        x = self.body(x)
        if self.how == "the embedding as a head":
            return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), labels)
        scores = self.head(x).flatten(0, 1)
        if self.how == "two heads":
            return F.cross_entropy(scores, labels) + 0.5 * F.cross_entropy(self.second(x).flatten(0, 1), labels)
        if self.how == "a temperature":
            scores = scores * self.scale.exp()
        if self.how == "smoothed":
            return F.cross_entropy(scores, labels, label_smoothing=0.1)
        if self.how == "by hand":
            return -scores.log_softmax(-1).gather(1, labels[:, None]).mean()
        if self.how == "with a penalty":
            return F.cross_entropy(scores, labels) + 1e-3 * torch.logsumexp(scores, -1).pow(2).mean()
        if self.how == "contrasted":
            a, b = F.normalize(x.mean(1), dim=-1), F.normalize(self.other(x[:, -1]), dim=-1)
            return (1 - (a * b).sum(-1)).mean() + F.cross_entropy(scores, labels)
        return F.cross_entropy(scores, labels)


for how in ("two heads", "a temperature", "positions looked up", "contrasted", "each block has a say", "smoothed", "by hand",
            "with a penalty"):
    case(f"the loss: {how}")(lambda how=how: Lossy(how))
case("the loss: the embedding as a head", flags={"wrap": "root"})(lambda: Lossy("the embedding as a head"))


class Distilled(Taught):
    """The student's scores are drawn to those of the teacher."""

    def body(self, x):
        return Net.body(self, x)

    def forward(self, ids, labels):
        x = self.embed(ids)
        scores = self.head(self.body(x))
        with torch.no_grad():
            for block in self.teacher.eval():
                x = block(x)
            wanted = self.head(x).softmax(-1)
        return F.kl_div(scores.log_softmax(-1), wanted, reduction="none").sum(-1).mean() + F.cross_entropy(
            scores.flatten(0, 1), labels.flatten())


class Backbone(Net):
    """Features of frozen blocks; a head on them is trained."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks.requires_grad_(False)

    @torch.no_grad()
    def body(self, x):
        return super().body(x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Adversarial(Net):
    def forward(self, ids, labels):
        x = self.body(self.embed(ids))
        return F.cross_entropy(self.head(Reversed.apply(x)).flatten(0, 1), labels.flatten())


class Counting(Net):
    """Counts its calls, as norms with statistics do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def body(self, x):
        self.calls += 1
        return super().body(x)


class Casting(Net):
    def body(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().body(x).float()


class CastingOnGpu(Net):
    def body(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            return super().body(x).float()


class Penalized(Net):
    """The gradient of an input is part of the loss."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        loss = F.cross_entropy(self.head(self.body(x)).flatten(0, 1), labels.flatten())
        slope, = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.pow(2).sum()


case("distilled from scores of a teacher")(Distilled)
case("a head on features of frozen blocks")(Backbone)
case("a gradient that is reversed")(Adversarial)
case("a buffer that counts")(Counting)
case("autocast in forward", describe="autocast in forward")(Casting)
case("autocast on a GPU that is not here", describe="autocast in forward")(CastingOnGpu)
case("a penalty on a gradient", describe="a gradient taken in forward")(Penalized)
case("a spectral norm", describe="no rule for aten.vdot")(
    changed(lambda model: torch.nn.utils.parametrizations.spectral_norm(model.head)))
case("a full backward hook")(changed(
    lambda model: model.blocks[1].register_full_backward_hook(lambda module, given, got: None)))
case("DataParallel", describe="the root module is wrapped by DataParallel")(lambda: nn.DataParallel(Net()))
case("a scripted block", describe="blocks.1 is TorchScript")(changed(
    lambda model: model.blocks.__setitem__(1, torch.jit.trace(Block(), torch.zeros(2, TOKENS, WIDTH)))))


@case("layers dropped at random", describe="drawn at random")
class Dropping(Net):
    def body(self, x):
        for block in self.blocks:
            if torch.rand(()).item() > 0.1:
                x = block(x)
        return x
