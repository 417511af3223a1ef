"""The exporter's stand-ins: attention with a learned mask keeps, counts and returns what PyTorch's memory-efficient kernel does.

    python3 tests/models/attention_stand_in_test.py

Expected: of aten._scaled_dot_product_efficient_attention itself, on the meta device: what saved-tensor hooks see (but for the two
numbers of its random state), FLOPs of torch's FlopCounterMode, shapes of gradients. CUDA's choice of kernels (sdp_utils.cpp,
can_use_mem_efficient_attention) has no rule against masks that are learned; that of flash attention takes no mask at all.
The gated delta rule is held against numbers by hand, of what flash-linear-attention's chunk_gated_delta_rule saves and multiplies.
"""

import pathlib
import sys
import unittest

try:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tools"))
from model_export import rules, trace  # noqa: E402

BATCH, HEADS, TOKENS, SIZE = 3, 4, 40, 16


def run(attention):
    """Bytes that autograd keeps, FLOPs, and shapes of the gradients."""
    make = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    q, k, v = (torch.empty(BATCH, HEADS, TOKENS, SIZE, **make) for _ in range(3))
    bias = torch.empty(1, HEADS, TOKENS, TOKENS, **make)
    kept, alive = {}, []

    def pack(tensor):
        alive.append(tensor)
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    def flops(name):
        func = getattr(torch.ops.shardwright_export, name).default

        def count(*args, **_):
            return rules.attention_flops(func, args)

        count._get_raw = True
        return count

    names = ("attention_biased", "attention_biased_backward")
    counter = FlopCounterMode(display=False, custom_mapping={getattr(torch.ops.shardwright_export, name): flops(name) for name in names})
    with counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attention(q, k, v, bias)
        out.backward(torch.empty_like(out))
    return sum(kept.values()), counter.get_total_flops(), [tuple(t.grad.shape) for t in (q, k, v, bias)]


def torchs_own(q, k, v, bias):
    mask = bias.expand(BATCH, HEADS, TOKENS, TOKENS)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, False)[0]


def exporters(q, k, v, bias):
    with trace.AsOnDevices():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class StandIn(unittest.TestCase):

    def test_a_learned_mask(self):
        kept, flops, shapes = run(exporters)
        wanted, wanted_flops, wanted_shapes = run(torchs_own)
        self.assertIn(wanted - kept, range(33))  # seed and offset of the random state
        self.assertEqual((flops, shapes), (wanted_flops, wanted_shapes))
        # By hand: q, k, v and the output, the bias once, a sum in fp32 for each row of whole tiles of 32.
        rows = BATCH * HEADS * TOKENS
        self.assertEqual(kept, 2 * (4 * rows * SIZE + HEADS * TOKENS * TOKENS) + 4 * BATCH * HEADS * 64)

    def test_the_gated_delta_rule(self):
        make = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
        heads, value_heads, size, value_size, chunk = 2, 4, 16, 8, 64
        q, k = (torch.empty(BATCH, TOKENS, heads, size, **make) for _ in range(2))
        v, g, beta = (torch.empty(BATCH, TOKENS, value_heads, *last, **make) for last in ((value_size,), (), ()))
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage()._cdata] = (tensor, tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = trace.delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        out.backward(torch.empty_like(out))
        self.assertEqual([out.shape, *(t.grad.shape for t in (q, k, v, g, beta))], [t.shape for t in (v, q, k, v, g, beta)])
        # Of a token: queries and keys of unit length, their factors in fp32, values, betas, sums of decays in fp32, a row of each triangle.
        token = 2 * heads * (size * 2 + 4) + value_heads * (value_size * 2 + 2 + 4 + chunk * 2)
        self.assertEqual(sum(nbytes for _, nbytes in kept.values()), BATCH * TOKENS * token)
        # Of a token and head, multiply-adds: keys with 64 keys, 64 * 64 / 3 for the inverse; it with keys and values; the state three
        # times; queries with 64 keys, scores with 64 values. Backward: two for each, and all but the first two once more.
        first = 64 * 16 + 64 * 64 / 3
        rest = 64 * (16 + 8) + 3 * 16 * 8 + 64 * (16 + 8)
        inverse = torch.empty(BATCH, TOKENS, value_heads, chunk, device="meta")
        forward, backward = rules.delta_rule_flops(k, v, inverse)
        rows = BATCH * TOKENS * value_heads
        self.assertAlmostEqual(forward / rows, 2 * (first + rest), delta=1)
        self.assertAlmostEqual(backward / rows, 2 * (2 * first + 3 * rest), delta=2)


if __name__ == "__main__":
    unittest.main()
