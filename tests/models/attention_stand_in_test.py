"""The exporter's stand-in for attention with a learned mask keeps, counts and returns what PyTorch's memory-efficient kernel does.

    python3 tests/models/attention_stand_in_test.py

Expected: of aten._scaled_dot_product_efficient_attention itself, on the meta device: what saved-tensor hooks see (but for the two
numbers of its random state), FLOPs of torch's FlopCounterMode, shapes of gradients. CUDA's choice of kernels (sdp_utils.cpp,
can_use_mem_efficient_attention) has no rule against masks that are learned; that of flash attention takes no mask at all.
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


if __name__ == "__main__":
    unittest.main()
