"""Modules as users write them, for user_modules_test.py: what they freeze, recompute, stop, compile, cast, tie, nest and hook.

CASES: name -> Case. Expected of each: it trains as planned, or a step refuses it by name before anything is wrapped.
"""

import copy
import dataclasses
import os
import typing

import torch
import transformers
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS, TOKENS = (int(size) for size in os.environ.get("USER_MODULES_SIZES", "16,37,8").split(","))


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Net(nn.Module):
    """An embedding, three blocks, a head. `body` is what variants replace."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.body(self.embed(ids))).flatten(0, 1), labels.flatten())


@dataclasses.dataclass
class Case:
    build: typing.Callable[[], nn.Module]
    describe: str = ""  # what describe's refusal says
    apply: str = ""  # what apply's refusal says, with `before`, if any, done to the module that is applied to
    before: typing.Callable[[nn.Module], typing.Any] = lambda model: None
    after: typing.Callable[[nn.Module], typing.Any] = lambda model: None  # done to the wrapped module
    each_step: typing.Callable[[nn.Module], typing.Any] = lambda model: None
    flags: dict = dataclasses.field(default_factory=lambda: {"wrap": "block"})
    tolerance: float = 2e-5


CASES: dict[str, Case] = {}


def case(name, **options):
    """Of a class, or a function that makes a module."""
    def add(build):
        assert name not in CASES
        CASES[name] = Case(build, **options)
        return build
    return add


def changed(change, base=Net):
    def build():
        model = base()
        change(model)
        return model
    return build


def freeze(*names):
    def change(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))
    return change


def train_only(*names):
    def change(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in names))
    return change


# Frozen parts.
for title, change in {"a frozen embedding": freeze("embed"), "a frozen head": freeze("head"), "a frozen first block": freeze("blocks.0"),
                      "a frozen last block": freeze("blocks.2"), "a frozen block in the middle": freeze("blocks.1."),
                      "all but the head frozen": train_only("head"), "biases alone are trained": train_only("bias"),
                      "frozen norms": freeze("norm"), "matrices alone are frozen in one block": freeze("blocks.1.wide.weight")}.items():
    case(title)(changed(change))
case("frozen after it was described", apply='parameter "embed.weight" has requires_grad False, the plan expects True',
     before=lambda model: model.embed.requires_grad_(False))(Net)
case("unfrozen after it was described", apply='parameter "head.weight" has requires_grad True, the plan expects False',
     before=lambda model: model.requires_grad_(True))(changed(freeze("head")))


class LowRank(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@case("adapters written by hand")
def adapters():
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.wide = LowRank(block.wide)
    return model


# Checkpointing of the module's own.
class Checkpointed(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def body(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Recomputing(torch.autograd.Function):
    """Checkpointing as it was written before PyTorch had any."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class OwnCheckpoint(Net):
    def body(self, x):
        for block in self.blocks:
            x = Recomputing.apply(block, x)
        return x


class OnHost(Net):
    def body(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().body(x)


def wrap_checkpoints(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def wrap_offload(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
    model.blocks[1] = offload_wrapper(model.blocks[1])


def compose_checkpoints(model):
    from torch.distributed._composable.checkpoint_activation import checkpoint
    checkpoint(model.blocks[0])


class Llama(nn.Module):
    """Transformers' own, whose loss is its first result."""

    def __init__(self):
        super().__init__()
        self.inner = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, use_cache=False, tie_word_embeddings=False))

    def forward(self, ids, labels):
        return self.inner(input_ids=ids, labels=labels).loss


SELF = "checkpointing of the module's own"
case("checkpoint() in forward", describe=SELF)(lambda: Checkpointed(False))
case("reentrant checkpoint() in forward", describe="reentrant " + SELF)(lambda: Checkpointed(True))
case("checkpoint_wrapper", describe=SELF)(changed(wrap_checkpoints))
case("composable checkpoint", describe=SELF)(changed(compose_checkpoints))
case("gradient_checkpointing_enable()", describe=SELF)(changed(lambda model: model.inner.gradient_checkpointing_enable(), Llama))
case("an autograd function that recomputes", describe="runs again in backward")(OwnCheckpoint)
case("save_on_cpu", describe="hooks on tensors that autograd keeps")(OnHost)
case("checkpoint_wrapper after it was described", apply='module "blocks.0" is a CheckpointWrapper', before=wrap_checkpoints)(Net)
case("offload_wrapper after it was described", apply='module "blocks.1" is a OffloadWrapper', before=wrap_offload)(Net)
case("composable checkpoint after it was described", apply='module "blocks.0" is wrapped by checkpoint', before=compose_checkpoints)(Net)
case("gradient_checkpointing_enable() after it was described", apply="recomputes by itself",
     before=lambda model: model.inner.gradient_checkpointing_enable())(Llama)
case("a transformer that the plan recomputes", flags={"wrap": "block", "recompute": "full"})(Llama)


# Teachers, and other parts without gradients.
class Taught(Net):
    """The student's hidden state is drawn to that of a frozen teacher."""

    def __init__(self, stops=True):
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        self.stops = stops

    def body(self, x):
        y = x
        with torch.set_grad_enabled(not self.stops):
            for block in self.teacher:
                y = block(y)
        x = super().body(x)
        return x + 0.1 * (x - y)


class Untrained(Net):
    """The second block is trained, but not here."""

    def body(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            y = self.blocks[1](x)
        return self.blocks[2](x + y)


class Detached(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def body(self, x):
        first, second, third = self.blocks
        x = first(x)
        if self.how == "between":
            return third(second(x.detach()))
        if self.how == "data":
            return third(x + second(x.data))
        if self.how == "target":
            return third(x) + second(x).detach()
        if self.how == "twice":
            return third(x + second(x.detach().detach()) + x.detach())
        if self.how == "straight through":
            return third(second(x + (torch.round(x * 8) / 8 - x).detach()))
        with torch.no_grad():
            size = x.abs().amax(-1, keepdim=True)
        return third(second(x / (1 + size)))


@case("a metric without gradients")
class Measured(Net):
    def forward(self, ids, labels):
        scores = self.head(self.body(self.embed(ids)))
        with torch.no_grad():
            self.accuracy = (scores.argmax(-1) == labels).float().mean()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


@case("positions made without gradients")
class Positions(Net):
    @torch.no_grad()
    def angles(self, x):
        return torch.sin(torch.arange(x.shape[1], device=x.device)[:, None] / torch.arange(1, WIDTH + 1, device=x.device))

    def body(self, x):
        return super().body(x + self.angles(x).to(x.dtype))


class Inferring(Net):
    def body(self, x):
        with torch.inference_mode():
            y = self.blocks[1](x)
        return self.blocks[2](self.blocks[0](x)) + y


class OwnWeight(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def body(self, x):
        x = super().body(x)
        if self.how == "detached":
            return x + F.linear(x, self.blocks[0].narrow.weight.detach() @ self.blocks[0].wide.weight)
        if self.how == "average":
            with torch.no_grad():
                self.blocks[0].norm.weight.lerp_(self.blocks[1].norm.weight, 0.1)
            return x
        with torch.no_grad():
            x.clamp_(-1, 1)
        return x


case("a frozen teacher under no_grad")(Taught)
case("a frozen teacher with gradients on")(lambda: Taught(stops=False))
case("a trained block under no_grad")(Untrained)
for how in ("between", "data", "target", "twice", "straight through", "sizes"):
    case(f"detached: {how}")(lambda how=how: Detached(how))
case("inference_mode", describe="inference_mode in forward")(Inferring)
case("a weight read detached", describe="parameter blocks.0.narrow.weight, which is trained, is read here without a gradient")(
    lambda: OwnWeight("detached"))
case("an average of weights in forward", describe="changes parameter blocks.0.norm.weight in forward")(lambda: OwnWeight("average"))
case("in place without a gradient", describe="changes a tensor that needs a gradient in place and without one")(lambda: OwnWeight("clamped"))


def follow(model):
    """The teacher becomes a running average of the student."""
    with torch.no_grad():
        for student, teacher in zip(model.blocks.parameters(), model.teacher.parameters()):
            teacher.lerp_(student, 0.5)


def average(model):
    with torch.no_grad():
        if not hasattr(model, "averages"):
            model.averages = [parameter.detach().clone() for parameter in model.parameters()]
        for mean, parameter in zip(model.averages, model.parameters()):
            mean.lerp_(parameter.detach(), 0.1)


case("a teacher that is an average, in the loop", each_step=follow)(Taught)
case("an average of all weights, in the loop", each_step=average)(Net)


# Compilers.
def compile_blocks(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")


def compile_in_place(model):
    for block in model.blocks:
        block.compile(backend="eager")


case("compiled before", apply="the model is a OptimizedModule")(lambda: torch.compile(Net(), backend="eager"))
case("blocks compiled before", apply='module "blocks.0" is a OptimizedModule')(changed(compile_blocks))
case("blocks compiled in place before")(changed(compile_in_place))
case("compiled after", after=lambda model: model.compile(backend="eager"))(Net)
case("blocks compiled after", after=compile_in_place)(Net)


# Dtypes and layouts.
class Scaled(Net):
    def __init__(self, *shape):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def body(self, x):
        return super().body(x) * self.scale


def transpose(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().t().contiguous().t())


case("all in bf16", flags={"wrap": "block", "precision": "bf16"}, tolerance=3e-2)(lambda: Net().bfloat16())
case("some in bf16", describe="parameters have several dtypes")(changed(lambda model: model.blocks.bfloat16()))
case("all in fp64", describe="dtype torch.float64")(lambda: Net().double())
case("a parameter of whole numbers", describe="dtype torch.int8")(
    changed(lambda model: model.register_parameter("codes", nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False))))
case("cast after it was described", apply="have dtype torch.float16, the plan expects torch.float32", before=lambda model: model.half())(Net)
case("a parameter that is not contiguous", apply='parameter "head.weight" is not contiguous', before=transpose)(Net)
case("a parameter without dimensions", describe="parameter scale has no dimension")(Scaled)
case("a parameter of one element")(lambda: Scaled(1))


# Ties.
def tie_blocks(model):
    model.blocks[2].wide.weight = model.blocks[0].wide.weight


def register_twice(model):
    model.blocks.append(model.blocks[0])


case("a tied head")(changed(lambda model: setattr(model.head, "weight", model.embed.weight)))
case("a frozen tied head")(changed(lambda model: setattr(model.head, "weight", model.embed.requires_grad_(False).weight)))
case("tied matrices of blocks", flags={"wrap": "root"})(changed(tie_blocks))
case("a block under two names")(changed(register_twice))
case("untied after it was described", apply="are tied in the plan, not in the model",
     before=lambda model: setattr(model.head, "weight", nn.Parameter(model.head.weight.detach().clone())))(
         changed(lambda model: setattr(model.head, "weight", model.embed.weight)))


# Containers.
class Nested(Net):
    def __init__(self, make):
        super().__init__()
        self.blocks = make()

    def body(self, x):
        for stage in (self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks):
            for part in (stage if isinstance(stage, (nn.ModuleList, nn.Sequential)) else stage.parts):
                x = part(x)
        return x


class Holder(nn.Module):
    """Is never called: others run what it holds."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])


def pair():
    return [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]


for title, make in {"lists in a list": lambda: nn.ModuleList(nn.ModuleList(pair()) for _ in range(3)),
                    "lists in a dictionary": lambda: nn.ModuleDict({f"s{i}": nn.ModuleList(pair()) for i in range(2)}),
                    "a Sequential that is only a list": lambda: nn.ModuleList(nn.Sequential(*pair()) for _ in range(3)),
                    "holders that nothing calls": lambda: nn.ModuleList(Holder() for _ in range(3))}.items():
    case(title, flags={})(lambda make=make: Nested(make))
case("Sequentials in a Sequential", flags={})(
    changed(lambda model: setattr(model, "blocks", nn.Sequential(*(nn.Sequential(*pair()) for _ in range(3))))))


@case("a list of parameters", flags={"wrap": "root"})
class Listed(Net):
    def __init__(self):
        super().__init__()
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(3))

    def body(self, x):
        for block, shift in zip(self.blocks, self.shifts):
            x = block(x) + shift
        return x


# Hooks.
def hook(model):
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.5)


def pre_hook(model):
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))


def parameter_hook(model):
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


def step_hook(model):
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


case("a forward hook on a block")(changed(hook))
case("a forward pre-hook on a block")(changed(pre_hook))
case("a forward hook on the root")(changed(lambda model: model.register_forward_hook(lambda module, args, output: output * 2)))
case("a forward hook on what is recomputed", apply='module "blocks.1" has forward hooks, and the plan recomputes it',
     flags={"wrap": "block", "recompute": "full"})(changed(hook))
case("a hook on a parameter", apply='parameter "head.weight" has hooks', before=parameter_hook)(Net)
case("a hook behind a gradient", apply='parameter "head.weight" has hooks', before=step_hook)(Net)
case("a weight norm", flags={"wrap": "root"})(
    changed(lambda model: torch.nn.utils.parametrizations.weight_norm(model.head)))
