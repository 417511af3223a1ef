"""Live modules: the peak of memory that a plan predicts, and the one that PyTorch's tracker of tensors counts.

torch.distributed._tools.FSDPMemTracker follows two steps of one rank of 4; a process group that moves nothing stands for the others. It
does not see workspaces inside of kernels, so tokens and heads fill the tiles of fused attention, which needs little then.
tests/schedule/torch_fsdp2_memory.py compares by category. SHARDWRIGHT_DEEP=1: all modules of live_test.py.
"""

import os
import sys
import unittest
import warnings

import live_test
import shardwright
import torch
import vision_models
from tensor_tracker import peak_of
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, CLOSE = 4, 0.03
LLAMA = live_test.LLAMA | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "max_position_embeddings": 128}
# One of each way to keep something: norms, a GELU in one operator and in several, powers, experts, images.
SOME = ("llama", "qwen3", "gpt2", "starcoder2", "nemotron", "mixtral", "mixer", "gated", "torchvision convnext", "timm mixer")


def set_up():
    """Modules of sizes that kernels like, of which one rank is looked at."""
    live_test.RANKS, live_test.TOKENS, live_test.SIDE = RANKS, 128, vision_models.WIDE.side
    live_test.Attentive.width = 128
    live_test.BUILDERS.update({name: live_test.transformer(name, **settings) for name, settings in live_test.many(LLAMA).items()})
    live_test.BUILDERS.update(vision_models.builders(vision_models.WIDE))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())


def tracked(name, plan):
    """Bytes of all tensors at the peak of two steps."""
    model = shardwright.apply(live_test.build(name), plan, device_type="cpu")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return peak_of(model, optimizer, live_test.samples(name, live_test.SAMPLES))["Total"]


class Memory(unittest.TestCase):

    def test_peaks(self):
        set_up()
        self.addCleanup(distributed.destroy_process_group)
        self.assertGreaterEqual(len(live_test.ALL), 9)
        errors = {}
        some = [(name, {"wrap": "block"}) for name in SOME if name in live_test.BUILDERS]
        for name, flags in live_test.ALL if "SHARDWRIGHT_DEEP" in os.environ else some:
            with self.subTest(model=name):
                plan = live_test.plan_of(live_test.build(name), name, flags)
                counted = tracked(name, plan)
                error = plan.memory.peak / counted - 1
                errors[name] = error
                print(f"{name}: {plan.memory.peak} bytes predicted, {counted} counted ({100 * error:+.2f} %), {plan.memory.place}")
                self.assertLess(abs(error), CLOSE)
        close = [error for error in errors.values() if abs(error) < CLOSE]
        print(f"{len(close)} of {len(errors)} modules within 3 %, at most {100 * max(map(abs, close)):.2f} % apart")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
