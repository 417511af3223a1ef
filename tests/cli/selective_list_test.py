"""What selective recomputation keeps is one list: that of the program, and that of the applier under torch, on each kind of op."""

import importlib.util
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

try:
    import torch
    import torch.utils.checkpoint as checkpointing
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase

APPLIER = pathlib.Path(__file__).resolve().parent.parent.parent / "planner" / "emitters" / "python" / "shardwright_plan.py"
TINY = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "vocab_size": 1024,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}


def applier():
    spec = importlib.util.spec_from_file_location("shardwright_plan", APPLIER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def products(x):
    for _ in range(4):
        x = x @ torch.ones(8, 8, requires_grad=True)
    return x


def grouped(x):
    ends = torch.tensor([4, 8], dtype=torch.int32)
    return torch._grouped_mm(x.bfloat16(), torch.ones(2, 8, 8, dtype=torch.bfloat16, requires_grad=True), offs=ends)


# What is kept of the ops of a kind, in order.
KINDS = {
    "products of two matrices": (products, [True, False, True, False]),
    "linear with bias": (lambda x: torch.nn.functional.linear(x, torch.ones(8, 8, requires_grad=True), torch.ones(8)), [True]),
    "fused attention": (lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 2, 4, 8)] * 3), [True]),
    "convolution": (lambda x: torch.nn.functional.conv2d(x.view(1, 1, 8, 8), torch.ones(1, 1, 3, 3, requires_grad=True)), [True]),
    "batched product": (lambda x: torch.bmm(x.view(2, 4, 8), torch.ones(2, 8, 4, requires_grad=True)), [False]),
    "grouped product": (grouped, [False]),
    "activation": (torch.nn.functional.gelu, [False]),
    "norm": (lambda x: torch.nn.functional.layer_norm(x, (8,)), [False]),
    "top-k": (lambda x: torch.topk(x, 2).values, [False]),
}
NAMED = {"products of two matrices": ("mm", "addmm"), "linear with bias": ("addmm", "mm", "linear"),
         "fused attention": ("_scaled_dot_product",), "convolution": ("convolution",), "batched product": ("bmm",),
         "grouped product": ("_grouped_mm",), "activation": ("gelu",), "norm": ("layer_norm",), "top-k": ("topk",)}


class Lists(ShardwrightTestCase):

    def decisions(self, body):
        """[(op, whether it is kept)] of the applier's policy in a forward pass."""
        seen = []
        original = checkpointing.create_selective_checkpoint_contexts

        def recording(policy):
            def told(context, op, *arguments, **keywords):
                answer = policy(context, op, *arguments, **keywords)
                if not context.is_recompute:
                    seen.append((str(op), answer == checkpointing.CheckpointPolicy.MUST_SAVE))
                return answer
            return original(told)

        checkpointing.create_selective_checkpoint_contexts = recording
        self.addCleanup(setattr, checkpointing, "create_selective_checkpoint_contexts", original)
        x = torch.ones(8, 8, requires_grad=True)
        out = checkpointing.checkpoint(body, x, use_reentrant=False, context_fn=applier()._selective_contexts(2))
        out.float().sum().backward()
        return seen

    def test_applier(self):
        for kind, (body, kept) in KINDS.items():
            with self.subTest(kind=kind):
                try:
                    body(torch.ones(8, 8))
                except (RuntimeError, NotImplementedError, AttributeError) as error:
                    print(f"not on this machine: {kind}: {str(error)[:80]}")
                    continue
                told = [is_kept for op, is_kept in self.decisions(body)
                        if any(name in op.split(".")[1] for name in NAMED[kind]) and "backward" not in op]
                self.assertEqual(told, kept)

    def test_program(self):
        """q, v and the router's product are the first, third and fifth of a layer; attention is kept, the experts are not."""
        (self.folder / "config.json").write_text(json.dumps(TINY))
        self.succeed("plan", "--model", "config.json", "--cluster", "8xA100-80", "--seq", "256", "--recompute", "selective:2", "-o", "plan.json")
        program = self.succeed("inspect", "plan.json", "--program")
        kept = set(re.findall(r"buffer activation@mb0\.model\.layers\.0\.([\w.]+)\.fwd[:#]", program))
        kept -= {name for name in kept if name.startswith("add_")}  # a layer's result is the next one's input
        self.assertEqual(kept, {"self_attn.q_proj", "self_attn.v_proj", "self_attn.attn", "mlp.gate"})
        again = set(re.findall(r"@mb0\.model\.layers\.0\.([\w.]+)\.rec[:#]", program))
        self.assertIn("mlp.experts", again)
        self.assertIn("self_attn.k_proj", again)


if __name__ == "__main__":
    shardwright_test_case.main()
