"""Random cases of torch_fsdp2_random.py: what lives in a real FSDP2 run when a collective is issued, by category, is what lives in ours.

    python3 tests/schedule/torch_fsdp2_alive.py SHARDWRIGHT [--seeds 0:10,13] [--case JSON] [--no-shrink]

The tensors are those of torch's own objects: shards of parameters, what they are gathered into, gradients of both, and the states
of AdamW without its scalars. Bytes are compared at every collective; those of gradients at all-gathers only, since a reduction's
result belongs to no parameter yet while it is sent, and those of whole gradients only where no parameter is used twice, since
autograd holds the first of two gradients where nobody can ask for it. Nothing is offloaded: all of it is one kind of memory here.
"""

import pathlib
import sys

try:
    import torch
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import random_networks  # noqa: E402
import torch_fsdp2_random  # noqa: E402
from random_cases import Refused, attempt, compare, main_of  # noqa: E402
from torch_fsdp2_random import PLAIN, plan_of, smaller_cases  # noqa: E402,F401

CATEGORIES = ["parameter_shard", "unsharded_parameter", "sharded_gradient", "unsharded_gradient", "optimizer_state"]


def storages(tensors):
    """Bytes of the tensors' memory, each piece once."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            local = getattr(tensor, "_local_tensor", tensor)
            found[local.untyped_storage()._cdata] = local.untyped_storage().size()
    return sum(found.values())


def groups_of(model):
    found = {}
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        found.update({id(group): group for group in groups if group is not None})
    return list(found.values())


def alive(model, optimizer):
    """Bytes of CATEGORIES."""
    groups = groups_of(model)
    parameters = {id(p): p for group in groups for p in group.fsdp_params}.values()
    gathered = [t for p in parameters for t in (*p.all_gather_outputs, getattr(p, "_sharded_post_forward_param_data", None))]
    whole = [p._unsharded_param.grad for p in parameters if hasattr(p, "_unsharded_param")]
    kept = [p.unsharded_accumulated_grad for p in parameters]
    # What the shards have summed and the replicas have not seen.
    sharded = [*(p.sharded_param.grad for p in parameters), *(group._partial_reduce_output for group in groups)]
    states = [t for state in (optimizer.state.values() if optimizer else []) for key, t in state.items() if key != "step"]
    return (storages(p._sharded_param_data for p in parameters), storages(gathered),
            storages(sharded), storages([*whole, *kept]), storages(states))


def random_case(seed):
    return {**torch_fsdp2_random.random_case(seed), "offload": False}


def uses_twice(network):
    """Has some parameter two gradients that are summed?"""
    if network["tied_head"] or network["inputs"] == 3:
        return True
    for _, part in random_networks.paths_of(network["body"]):
        called = [index for index, _ in part.get("calls", [])]
        if part.get("alias") or part.get("tied") or part["kind"] in ("borrow", "moe") or len(called) != len(set(called)):
            return True
    return False


def without_unowned(steps, case):
    """Without the bytes of gradients that torch holds for no parameter yet."""
    def owned(row):
        whole = None if uses_twice(case["network"]) else row[8]
        return (*row[:8], whole, row[9]) if row[0] == "all_gather" else (*row[:7], None, None, row[9])

    return [[owned(row) for row in step] for step in steps]


def run_case(rank, argument):
    return torch_fsdp2_random.run_case(rank, argument, alive)


def judge(ours, pools, case):
    def data_of():
        plan = plan_of(case)
        return ours.collectives(plan, CATEGORIES), ours.emitted(plan, "fsdp2")

    said = attempt(data_of)
    if isinstance(said, Refused):
        return torch_fsdp2_random.judge(ours, pools, case)
    theirs = attempt(lambda: without_unowned(pools.run(case["shard"] * case["replicate"], "torch_fsdp2_alive", "run_case",
                                                       (case, said[1]))[0], case))
    return compare(without_unowned(said[0], case), theirs)


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], sys.modules[__name__], f"PyTorch {torch.__version__} FSDP2", "0:12", "0:200", None, PLAIN))
