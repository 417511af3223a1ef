#!/usr/bin/env python3
"""Prints the bytes that PyTorch's autograd keeps for backward, and the operators that it runs: the figures in
saved_tensors_test.cc and kernel_bytes_test.cc. With --details also the bytes of each operator.

Not part of the test run, because it needs packages that the build does not:
    pip install torch==2.13 transformers==5.18
    python3 tests/models/measure_saved_tensors.py
Shapes run on meta tensors (CUDA's formulas, no GPU, no memory), except for the experts, whose routing needs
values. A storage counts once; parameters, constants and scalars do not count.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, LlamaConfig, MixtralConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama import modeling_llama
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

BF16 = torch.bfloat16
FP32 = torch.float32


def kept(function, inputs, constants=()):
    """{"in0": bytes, "out": bytes, "extra": bytes} of one call."""
    skipped = {c.untyped_storage()._cdata for c in constants}
    names = {t.untyped_storage()._cdata: f"in{i}" for i, t in enumerate(inputs)}
    seen = {}
    alive = []  # A freed storage's address could come back for another tensor.

    def pack(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage._cdata not in skipped and tensor.numel() > 2:
            seen[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*inputs)
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, torch.Tensor):
            names.setdefault(tensor.untyped_storage()._cdata, "out")
    result = {}
    for address, size in seen.items():
        name = names.get(address, "extra")
        result[name] = result.get(name, 0) + size
    return result


def show(name, result):
    parts = ", ".join(f"{key} {value}" for key, value in sorted(result.items()))
    print(f"{name:34} {sum(result.values()):9}   {parts}")


def zeros(*shape, dtype=BF16, device="meta"):
    return torch.zeros(*shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)


def module(name, m, *inputs):
    m = m.to("meta")
    show(name, kept(m, inputs, [*m.parameters(), *m.buffers()]))


def cuda_dropout(x, p=0.5, training=True, inplace=False):
    """CUDA keeps a mask of one byte per element; the formula for meta tensors would keep a scaled copy."""
    return torch.ops.aten.native_dropout(x, p, True)[0] if p > 0 and training else x


def rms_norm(x, weight):
    wide = x.to(FP32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def gemma_norm(x, weight):
    wide = x.to(FP32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.to(FP32))).type_as(x)


def packed_silu(x):
    gate, up = x.chunk(2, dim=-1)
    return up * F.silu(gate)


def packed_relu(x):
    gate, up = x.chunk(2, dim=-1)
    return up * F.relu(gate)


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def eager_attention(q, k, v, softmax_dtype=None, dropout=0.0, cap=None):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    p = F.softmax(scores, dim=-1, dtype=softmax_dtype).to(q.dtype)
    return torch.matmul(cuda_dropout(p, dropout), v)


def flash_attention(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


# Views and allocations launch nothing.
NO_LAUNCH = {"_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "expand",
             "new_empty_strided", "ones_like", "permute", "select", "slice", "split", "squeeze", "t", "transpose",
             "unbind", "unsqueeze", "view"}


def size(value):
    """Bytes of the tensors in an argument or result; a broadcast one is read from its storage, once."""
    if isinstance(value, torch.Tensor):
        numel = 1
        for length, stride in zip(value.shape, value.stride()):
            numel *= length if stride != 0 else 1
        return numel * value.element_size()
    return sum(size(v) for v in value) if isinstance(value, (tuple, list)) else 0


class Launches(TorchDispatchMode):
    """The operators that launch kernels, in order, with the bytes of their arguments and results."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.read = 0
        self.written = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        if name not in NO_LAUNCH:
            self.names.append(name)
            # new_zeros takes a tensor for its type only; a copy does not read what it overwrites.
            read = 0 if name == "new_zeros" else size(args[1:]) if name == "copy_" else size(args)
            self.read += read
            self.written += size(result)
            if DETAILS:
                print(f"      {name} {read} -> {size(result)}")
        return result


DETAILS = "--details" in sys.argv


def operators(name, function, *inputs):
    with Launches() as forward:
        output = function(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    gradient = torch.zeros_like(output)
    with Launches() as backward:
        output.backward(gradient)
    print(f"{name}")
    for label, log in (("forward", forward), ("backward", backward)):
        print(f"    {label}: {len(log.names)} launches, {log.read} B read, {log.written} B written: {' '.join(log.names)}")


def launches():
    def heads_last(q, k, v, softmax_dtype=None, dropout=0.0):
        """Projections give (samples, tokens, heads, features); heads move before tokens and back."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return eager_attention(q, k, v, softmax_dtype, dropout).transpose(1, 2).contiguous()

    def rotate(x):
        half = torch.cat((-x[..., 8:], x[..., :8]), -1)
        return x * cos + half * cos

    def route(scores):
        weights, _ = torch.topk(F.softmax(scores, dim=-1, dtype=FP32), 2, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(BF16)

    cos = torch.zeros(1, 1, 64, 16, dtype=BF16, device="meta")
    labels = torch.zeros(64, dtype=torch.long, device="meta")
    operators("linear", nn.Linear(48, 80, dtype=BF16, device="meta"), zeros(2, 64, 48))
    operators("rms norm in HF", rms_norm, zeros(2, 64, 48), zeros(48))
    operators("rms norm in HF, fp32", rms_norm, zeros(2, 64, 48, dtype=FP32), zeros(48, dtype=FP32))
    operators("rms norm of Gemma", gemma_norm, zeros(2, 64, 48), zeros(48))
    operators("rms norm of Gemma, fp32", gemma_norm, zeros(2, 64, 48, dtype=FP32), zeros(48, dtype=FP32))
    operators("gelu_new", gelu_new, zeros(2, 64, 48))
    operators("silu(gate) * up", lambda a, b: F.silu(a) * b, zeros(2, 64, 48), zeros(2, 64, 48))
    operators("silu(gate) * up, packed", packed_silu, zeros(2, 64, 96))
    operators("rope of q", rotate, zeros(2, 3, 64, 16))
    operators("attention", heads_last, *(zeros(2, 64, 3, 16) for _ in range(3)))
    operators("attention of one sample", heads_last, *(zeros(1, 64, 3, 16) for _ in range(3)))
    operators("attention, fp32 softmax, dropout", lambda *t: heads_last(*t, softmax_dtype=FP32, dropout=0.1),
              *(zeros(2, 64, 3, 16) for _ in range(3)))
    operators("cross-entropy of fp32 logits", lambda t: F.cross_entropy(t.float(), labels), zeros(64, 100))
    operators("router after its projection", route, zeros(64, 8))
    operators("select", lambda t: t[:, 0], zeros(2, 64, 48))


def single_ops():
    x, y = zeros(2, 64, 48), zeros(2, 64, 48)
    weight = zeros(48)
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    module("linear", nn.Linear(48, 80, dtype=BF16), x)
    module("layer norm", nn.LayerNorm(48, dtype=BF16), x)
    module("embedding", nn.Embedding(100, 48, dtype=BF16), ids)
    show("rms norm in HF", kept(rms_norm, (x, weight), [weight]))
    show("rms norm in HF, fp32", kept(rms_norm, (zeros(2, 64, 48, dtype=FP32), weight), [weight]))
    show("rms norm of Gemma", kept(gemma_norm, (x, weight), [weight]))
    show("rms norm of Gemma, fp32", kept(gemma_norm, (zeros(2, 64, 48, dtype=FP32), weight), [weight]))
    for f in (F.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, gelu_new, cuda_dropout):
        show(f.__name__, kept(f, (x,)))
    show("silu(gate) * up", kept(lambda a, b: F.silu(a) * b, (x, y)))
    show("relu(gate) * up", kept(lambda a, b: F.relu(a) * b, (x, y)))
    show("silu(gate) * up, packed", kept(packed_silu, (zeros(2, 64, 96),)))
    show("relu(gate) * up, packed", kept(packed_relu, (zeros(2, 64, 96),)))
    show("add", kept(torch.add, (x, y)))
    show("mul", kept(torch.mul, (x, y)))
    qkv = [zeros(2, 3, 64, 16) for _ in range(3)]
    for dtype in (None, FP32):
        for p in (0.0, 0.1):
            name = f"attention, softmax {dtype}, p {p}"
            show(name, kept(lambda q, k, v, d=dtype, p=p: eager_attention(q, k, v, d, p), qkv))
    show("attention with capped scores", kept(lambda *t: eager_attention(*t, FP32, cap=50.0), qkv))
    show("flash attention", kept(flash_attention, qkv))
    heads_first = [torch.cat((t[..., :8], t[..., 8:]), -1) for t in qkv[:2]]
    show("flash attention, heads first", kept(lambda q, k, v: flash_attention(q, k, v).transpose(1, 2).contiguous(), [*heads_first, qkv[2]]))
    image = zeros(2, 3, 32, 32)
    module("conv", nn.Conv2d(3, 8, 3, padding=1, dtype=BF16), image)
    module("batch norm", nn.BatchNorm2d(3), zeros(2, 3, 32, 32, dtype=FP32))
    show("max pool", kept(lambda t: F.max_pool2d(t, 2), (image,)))
    show("average pool", kept(lambda t: F.avg_pool2d(t, 2), (image,)))
    show("global average pool", kept(lambda t: F.adaptive_avg_pool2d(t, 1), (image,)))
    logits, labels = zeros(64, 100), torch.zeros(64, dtype=torch.long, device="meta")
    show("log-softmax", kept(lambda t: F.log_softmax(t, -1), (logits,)))
    show("nll", kept(F.nll_loss, (logits, labels)))
    show("cross-entropy", kept(F.cross_entropy, (logits, labels)))
    show("cross-entropy of fp32 logits", kept(lambda t, l: F.cross_entropy(t.float(), l), (logits, labels)))

    def router(scores):
        weights, indices = torch.topk(F.softmax(scores, dim=-1, dtype=FP32), 2, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(BF16), indices

    show("router after its projection", kept(router, (zeros(64, 8),)))


def hf_flash(layer, q, k, v, mask, **unused):
    groups = layer.num_key_value_groups
    k, v = modeling_llama.repeat_kv(k, groups), modeling_llama.repeat_kv(v, groups)
    return flash_attention(q, k, v).transpose(1, 2).contiguous(), None


def layers():
    F.dropout = cuda_dropout
    ALL_ATTENTION_FUNCTIONS["flash_kernel"] = hf_flash
    for activation in ("gelu", "gelu_new"):
        for p in (0.1, 0.0):
            config = GPT2Config(n_embd=192, n_head=3, n_positions=128, resid_pdrop=p, attn_pdrop=p,
                                activation_function=activation)
            config._attn_implementation = "eager"
            module(f"GPT-2 layer, {activation}, p {p}", GPT2Block(config, layer_idx=0).to(BF16).train(),
                   zeros(4, 128, 192))
    for attention in ("flash_kernel", "eager"):
        config = LlamaConfig(hidden_size=256, num_attention_heads=8, num_key_value_heads=2,
                             intermediate_size=704, max_position_embeddings=128)
        config._attn_implementation = attention
        layer = modeling_llama.LlamaDecoderLayer(config, 0).to(device="meta", dtype=BF16).train()
        angles = torch.zeros(1, 128, 32, dtype=BF16, device="meta"), torch.zeros(1, 128, 32, dtype=BF16, device="meta")
        show(f"Llama layer, {attention}",
             kept(lambda t, m=layer: m(t, position_embeddings=angles), (zeros(2, 128, 256),),
                  [*layer.parameters(), *angles]))


def experts():
    config = MixtralConfig(hidden_size=48, intermediate_size=80, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    layer = MixtralExperts(config).to(BF16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    tokens = 64
    x = zeros(tokens, 48, device="cpu")
    indices = torch.stack([torch.arange(tokens) % 4, (torch.arange(tokens) + 1) % 4], dim=1)
    weights = torch.full((tokens, 2), 0.5, dtype=BF16, requires_grad=True)
    inputs = (x, indices, weights)
    show("Mixtral experts, grouped", kept(lambda *a: grouped_mm_experts_forward(layer, *a), inputs, layer.parameters()))
    show("Mixtral experts, loop", kept(layer, inputs, layer.parameters()))
    operators("Mixtral experts, grouped", lambda *a: grouped_mm_experts_forward(layer, *a), *inputs)


if __name__ == "__main__":
    single_ops()
    launches()
    layers()
    experts()
