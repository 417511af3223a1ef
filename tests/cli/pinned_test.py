"""Host memory of offload: PyTorch rounds each page-locked block up to a power of two.

Expected values by hand from the shapes of the models and the source of PyTorch 2.13 and DeepSpeed 0.19.8, not measured."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase

RANKS = 8
GIB = 2**30


def up(size):
    """The power of two that a block of so many bytes takes."""
    return 1 << (size - 1).bit_length() if size else 0


def qwen(hidden, layers, heads, kv, inner, vocab, dim=128):
    """Shapes of the parameters of an untied Qwen2.5."""
    yield (vocab, hidden)
    yield (vocab, hidden)
    yield (hidden,)
    for _ in range(layers):
        yield from ((heads * dim, hidden), (heads * dim,), (kv * dim, hidden), (kv * dim,), (kv * dim, hidden), (kv * dim,),
                    (hidden, heads * dim), (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,))


def shard(shape, ranks=RANKS):
    """Elements of a rank's padded part along the first dimension."""
    elements = -(-shape[0] // ranks)
    for size in shape[1:]:
        elements *= size
    return elements


class Pinned(ShardwrightTestCase):

    def host(self, *flags):
        plan = self.succeed("plan", *flags)
        code, out, _ = self.run_program("simulate", "-", "--json", stdin=plan)
        return json.loads(out)["memory"]["host_peak_bytes_per_node"]

    def test_fsdp2(self):
        """Masters and gradients in fp32, each parameter a block of its own; two moments that are not page-locked."""
        shapes = list(qwen(5120, 64, 40, 8, 27648, 152064))
        expected = RANKS * sum(2 * up(4 * shard(s)) + 8 * shard(s) for s in shapes)
        self.assertAlmostEqual(expected / GIB, 684, delta=1)  # where the numbers alone are 488
        job = ("--model", "qwen2.5-32b", "--cluster", "h100-80 x8, host 1 TiB", "--offload", "parameters", "--recompute", "full", "--seq", "1024")
        host = self.host(*job)
        self.assertLess(abs(host - expected), 0.002 * expected)  # inputs, too
        exact = self.host(*job, "--allocator", "pinned_max_round_threshold_mb:1")
        self.assertLess(abs(exact - RANKS * sum(16 * shard(s) for s in shapes)), 0.002 * exact)

    def test_does_not_fit(self):
        plan = self.succeed("plan", "--model", "qwen2.5-32b", "--cluster", "h100-80 x8, host 640 GiB", "--offload", "parameters",
                            "--recompute", "full", "--seq", "1024")
        code, out, _ = self.run_program("simulate", "-", stdin=plan)
        self.assertEqual(code, 1)
        self.assertIn("host", out)

    def test_native_locks_one_arena(self):
        shapes = list(qwen(5120, 64, 40, 8, 27648, 152064))
        host = self.host("--model", "qwen2.5-32b", "--cluster", "h100-80 x8, host 1 TiB", "--offload", "parameters", "--recompute", "full", "--seq",
                         "1024", "--dialect", "native")
        self.assertLess(host, 1.05 * RANKS * sum(16 * shard(s) for s in shapes))

    def test_zero3(self):
        """One block of all weights in 16 bits, one of all gradients in 16 bits, one of each sub-group's in fp32; masters and moments unlocked."""
        elements = 32_763_876_352 // RANKS  # of the model card
        group = 1_000_000_000
        host = self.host("--model", "qwen2.5-32b", "--cluster", "h100-80 x8, host 2 TiB", "--offload", "parameters", "--recompute", "full", "--seq",
                         "1024", "--dialect", "zero3", "--optimizer", "adamw:fused")
        least = RANKS * (2 * up(2 * elements) + 4 * elements + 12 * elements)
        most = RANKS * (2 * up(2 * elements) + 2 * up(4 * group) * (elements // group + 1) + 12 * elements)
        self.assertTrue(0.99 * least <= host <= 1.02 * most, (least / GIB, host / GIB, most / GIB))


if __name__ == "__main__":
    shardwright_test_case.main()
