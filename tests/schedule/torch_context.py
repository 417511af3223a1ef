"""Context parallel around real FSDP2: the collectives in gloo processes are those of our programs.

    python3 tests/schedule/torch_context.py SHARDWRIGHT [--all] [--random FIRST COUNT] [--verbose]

The network is torch_tensor.py's. Each rank has a part of the tokens; its attention gathers keys and values as DTensors, as torchtitan's
does, and masks as if its queries came first, which changes no size. Or it is the ring of torch's context_parallel, on the op of a CPU, of
which its SDPA knows nothing. Or it exchanges tokens for heads. FSDP cuts parameters over shard and context ranks together. Beside
tensor parallel (torch_tensor.py's) all that is done with a part of the heads.
"""

import contextlib
import random
import sys
import warnings

import torch_tensor
from torch_tensor import LARGE, SMALL, Attention, Log, Net, clip

import mesh_cases  # isort: skip
import torch
from random_cases import Shardwright
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import loss_parallel
from torch_pool import Pools

# Ranks, ranks with parts of the same samples, flags of plan; what LARGE has, for its memory. With as many samples the peak is in the loss:
# in attention's backward we count the scratch memory of a GPU's kernel.
MEMORY_CASES = [
    (4, 2, "--precision bf16-mixed --micro-batch 4", {}),
    (8, 4, "--precision bf16-mixed --micro-batch 8", {}),
    (4, 4, "--recompute full --precision bf16-mixed --micro-batch 8", {}),
    (8, 2, "--shard 4 --replicate 2 --micro-batch 4", {}),
    (4, 2, "--precision bf16-mixed --micro-batch 4", {"adapted": "q,k,v,o,gate,up,down"}),
]
ADAPTED = [
    (2, 2, "--precision bf16-mixed", {"adapted": "q,k,v,o,gate,up,down"}),
    (4, "2:ulysses", "--recompute full --precision bf16-mixed --clip on", {"adapted": "q,o,down"}),
    (4, "4:ring", "--accumulation 2 --sync last", {"adapted": "k,v,up"}),
    (8, "2,tp=2", "--precision bf16-mixed --clip on", {"adapted": "q,v,down"}),
]

# Ranks, ranks with parts of the same samples, flags of plan, what the network has.
RINGS = [
    (2, "2:ring_gather", "", {}),
    (4, "4:ring_gather", "--precision bf16-mixed --clip on --wrap torchtitan", {}),
    (4, "2:ring_gather", "--recompute full --precision bf16-mixed --micro-batch 2", {"bias": True}),
    (4, "4:ring_gather", "--precision bf16 --accumulation 2 --sync last", {"norm": "layer"}),
    (8, "4:ring_gather", "--reshard never", {"head_norm": True}),
    (2, "2:ring", "", {}),
    (4, "4:ring", "--precision bf16-mixed --clip on --wrap torchtitan", {}),
    (4, "2:ring", "--recompute full --precision bf16-mixed --micro-batch 2", {"bias": True}),
    (4, "4:ring", "--precision bf16 --accumulation 2 --sync last", {"norm": "layer"}),
    (8, "8:ring", "--precision bf16-mixed --wrap root", {}),
]
SWAPS = [
    (2, "2:ulysses", "", {"kv_heads": 2}),
    (4, "4:ulysses", "--precision bf16-mixed --clip on --wrap torchtitan", {}),
    (4, "2:ulysses", "--recompute full --precision bf16-mixed --micro-batch 2", {"kv_heads": 2}),
    (8, "4:ulysses", "--shard 4 --replicate 2 --precision bf16 --accumulation 2 --sync last", {"norm": "layer"}),
    (8, "2:ulysses", "--reshard never --micro-batch 2", {"head_norm": True, "bias": True}),
]
# Beside ranks that cut layers.
BOTH = [
    (4, "2,tp=2", "--precision bf16-mixed --clip on --wrap torchtitan", {}),
    (8, "2,tp=2", "--recompute full --precision bf16-mixed --micro-batch 2", {"kv_heads": 2}),
    (8, "4,tp=2", "--precision bf16 --accumulation 2 --sync last", {"norm": "layer", "bias": True}),
    (8, "2,tp=4", "--precision bf16-mixed --clip on", {}),
    (8, "2,tp=2", "--shard 2 --replicate 2 --clip on", {"head_norm": True}),
    (8, "2:ulysses,tp=2", "--precision bf16-mixed --wrap torchtitan", {}),
    (8, "4:ring,tp=2", "--precision bf16-mixed --clip on", {}),
    (8, "2:ring_gather,tp=2", "--recompute full --precision bf16-mixed", {"gated": False}),
]
CASES = [
    (2, 2, "", {}),
    (4, 2, "--precision bf16-mixed --clip on --wrap torchtitan", {"kv_heads": 2}),
    (4, 2, "--recompute full --precision bf16-mixed", {"kv_heads": 2}),
    (4, 4, "--clip on --precision bf16-mixed", {}),
    (4, 2, "--precision bf16 --accumulation 2 --sync last", {"norm": "layer", "bias": True}),
    (4, 2, "--precision bf16-mixed --accumulation 2 --sync last", {"norm": "layer"}),
    (4, 2, "--precision bf16-mixed --accumulation 3 --micro-batch 2", {"kv_heads": 1}),
    (4, 2, "--clip on --micro-batch 2", {"head_norm": True}),
    (8, 2, "--shard 4 --replicate 2 --clip on", {}),
    (8, 2, "--shard 2 --replicate 4 --accumulation 2 --sync replicate_last --precision bf16-mixed", {}),
    (8, 4, "--precision bf16-mixed --micro-batch 2 --wrap torchtitan", {}),
    (8, 4, "--shard 4 --replicate 2 --reshard never", {"bias": True, "gated": False}),
    (8, 2, "--precision bf16", {"kv_heads": 2, "head_norm": True, "bias": True}),
    (4, 2, "--wrap root", {"heads": 5, "kv_heads": 5, "width": 40}),
    (4, 2, "--recompute full:0.5 --wrap torchtitan", {"norm": "layer"}),
    (4, 2, "--frozen embed.*", {}),
    (4, 2, "--precision bf16-mixed --wrap root", {"tied": True}),
    (8, 8, "--precision bf16-mixed --clip on", {}),
]


def random_case(seed):
    draw = random.Random(seed)
    ranks = draw.choice((2, 4, 4, 8))
    context = draw.choice([n for n in (2, 2, 4) if n <= ranks])
    shard = context * draw.choice([n for n in (1, 2, 4) if n * context <= ranks])
    flags = mesh_cases.random_flags(draw, shard, ranks, ("fp32", "bf16-mixed", "bf16-mixed", "bf16", "fp32/bf16/bf16"))
    flags, adapted = torch_tensor.draw_adapted(draw, flags)
    network = adapted | {"kv_heads": draw.choice((1, 2, 4)), "norm": draw.choice(("rms", "layer")), "head_norm": draw.choice((False, True)),
               "bias": draw.choice((False, True)), "gated": draw.choice((False, True)), "layers": draw.choice((1, 2, 3)),
               "width": draw.choice((32, 48)), "hidden": draw.choice((64, 96)), "sequence": draw.choice((16, 48))}
    method = draw.choice(("gather", "ulysses") + (("ring", "ring_gather") if "--replicate 1" in flags else ()))
    if method != "gather":
        return ranks, f"{context}:{method}", flags, network | {"kv_heads": 4}
    return ranks, context, flags, network


class Ring(torch.autograd.Function):
    """What context_parallel makes of SDPA on a GPU."""

    @staticmethod
    def forward(ctx, group, *qkv):
        q, k, v = qkv
        out, sums = ring._templated_ring_attention(
            group, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, query=q, key=k, value=v, is_causal=True)[:2]
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, sums = ctx.saved_tensors
        gradients = ring._templated_ring_attention_backward(
            ctx.group, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, grad_out=gradient, grad_out_name="grad_out",
            query=q, key=k, value=v, out=out, logsumexp=sums, is_causal=True, dropout_p=0.0)
        return None, *gradients[:3]


def attend_in_ring(group, method):
    def attend(q, k, v):
        ring._cp_options.rotate_method = ring._RotateMethod.ALL_TO_ALL if method == "ring" else ring._RotateMethod.ALL_GATHER
        return Ring.apply(group, *(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return attend


class Swap(torch.autograd.Function):
    """Tokens of all heads for all tokens of some heads, or back: DeepSpeed's single_all_to_all, by torch's collective."""

    @staticmethod
    def forward(ctx, group, x, to_heads):
        ctx.group, ctx.to_heads = group, to_heads
        return swap(group, x, to_heads)

    @staticmethod
    def backward(ctx, gradient):
        return None, swap(ctx.group, gradient, not ctx.to_heads), None


def swap(group, x, to_heads):
    ranks, cut, joined = group.size(), 2 if to_heads else 1, 1 if to_heads else 2
    sent = torch.stack(x.chunk(ranks, dim=cut))
    come = torch.empty_like(sent)
    distributed.all_to_all_single(come, sent, group=group)
    return torch.cat(come.unbind(), dim=joined)


def attend_to_heads(group):
    def attend(q, k, v):
        return Swap.apply(group, Attention.attend(*(Swap.apply(group, t, True) for t in (q, k, v))), False)
    return attend


class ContextLog(Log):
    KINDS = Log.KINDS | {"all_to_all_single": "all_to_all", "alltoall_base_": "all_to_all"}


def attend_gathered(mesh):
    def attend(q, k, v):
        k, v = (DTensor.from_local(t, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
                .to_local(grad_placements=[Partial()]) for t in (k, v))
        return Attention.attend(q, k, v)
    return attend


def cut(model, mesh, plan):
    method, group = plan.get("context_method"), mesh.get_group()
    for block in model.blocks:
        block.attn.attend = (attend_gathered(mesh) if not method else attend_to_heads(group) if method == "ulysses"
                             else attend_in_ring(group, method))


def model_of(argument):
    warnings.simplefilter("ignore")
    plan, job, network = argument["plan"], argument["job"], argument["network"]
    shard, replicate, context, tp = plan["shard_size"], plan["replicate_size"], plan["context_size"], plan.get("tensor_size", 1)
    mesh = init_device_mesh("cpu", (replicate, shard // context, context, tp), mesh_dim_names=("replicate", "rows", "cp", "tp"))
    mesh["rows", "cp"]._flatten("shard")
    torch.manual_seed(0)
    model = Net(network)
    cut(model, mesh["cp"], plan)
    if tp > 1:
        torch_tensor.cut(model, mesh["tp"], network)
    if network["tied"]:
        model.head.weight = model.embed.weight
    torch_tensor.freeze(model, argument)
    data = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
    mesh_cases.wrap(model, plan, job, lambda _: data)
    return model


def draw_ids(argument):
    network, plan = argument["network"], argument["plan"]
    return torch.randint(network["vocabulary"], (plan["micro_batch"], network["sequence"] // plan["context_size"]))


def run_memory(_, argument):
    return mesh_cases.peak_memory(model_of(argument), draw_ids(argument))


def run_case(_, argument):
    tp = argument["plan"].get("tensor_size", 1)
    with loss_parallel() if tp > 1 else contextlib.nullcontext(), ContextLog() as log:
        return mesh_cases.train(model_of(argument), argument, lambda: draw_ids(argument), clip, log.take)


def ranks_of(plan):
    shard, replicate, context, tp = plan["shard_size"], plan["replicate_size"], plan["context_size"], plan.get("tensor_size", 1)
    groups = {"tp": range(tp), "cp": range(0, context * tp, tp), "shard": range(0, shard * tp, tp),
              "replicate": range(0, shard * tp * replicate, shard * tp)}
    return {name: str(tuple(ranks)) for name, ranks in groups.items()}


def made_by(ours, ranks, context, flags, network):
    tp = int(str(context).partition("tp=")[2] or 1)
    return mesh_cases.made_by(ours, torch_tensor.model_json(network), ranks, ranks // tp, f"cp={context}",
                              torch_tensor.flags_of(flags, network))


def memory_agrees(ours, pools, ranks, context, flags, network):
    """The whole peak to 0.5 %; activations to 0.2 % (a CPU's layer norm keeps its statistics in bf16), where none are made again."""
    network = LARGE | network
    made = made_by(ours, ranks, context, flags, network)
    theirs = pools.run(ranks, "torch_context", "run_memory", made | {"network": network})[0]
    kept, peak = mesh_cases.memory_differs(ours, theirs, made)
    good = abs(peak) <= 0.005 and ("recompute" in flags or abs(kept) <= 0.002 * theirs["Activation"])
    print(f"memory of {ranks} ranks, cp {context} {flags} {network['adapted']}: activations {kept:+} B, peak {peak:+.2%}" + ("" if good else " <<<"))
    return good


def main(arguments):
    ours, failures = Shardwright(arguments[0]), 0
    with Pools() as pools:
        for ranks, context, flags, network in mesh_cases.chosen_cases(arguments, CASES + RINGS + SWAPS + BOTH + ADAPTED,
                                                                    CASES[1:3] + RINGS[1:2] + RINGS[7:8] + SWAPS[2:3] + BOTH[:1] + ADAPTED[1:2],
                                                                    random_case):
            network = SMALL | network
            made = made_by(ours, ranks, context, flags, network)
            failures += not mesh_cases.is_equal(ours, pools, "torch_context", ranks, made, {"network": network}, ranks_of(made["plan"]),
                                                f"{ranks} ranks, cp {context} {flags} {network['adapted']}", "--verbose" in arguments)
    with Pools("fake") as pools:
        for case in MEMORY_CASES if "--all" in arguments else ():
            failures += not memory_agrees(ours, pools, *case)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
