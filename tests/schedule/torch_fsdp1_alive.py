"""Random cases of torch_fsdp1_random.py: what lives in a real FSDP1 run when a collective is issued, by category, is what lives in ours.

    python3 tests/schedule/torch_fsdp1_alive.py SHARDWRIGHT [--seeds 0:10,13] [--case JSON] [--no-shrink]

The tensors are those of torch's flat parameters: shards, what they are gathered into, gradients of both, and the states of AdamW
without its scalars. Bytes are compared at every collective, but those of gradients not while backward runs: of whole ones autograd
holds parts that nobody can ask for, and a reduction's result belongs to no parameter while it is sent. All-gathers in backward have
those of sharded ones, too. Of a flat parameter's states the rank with the most counts: of an original parameter each has what lies in its
shard, and our program is the same for all ranks.
"""

import pathlib
import sys

try:
    import torch
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch_fsdp1_random  # noqa: E402
from random_cases import Refused, attempt, compare, main_of  # noqa: E402
from torch_fsdp1_random import PLAIN, gathered_bytes, smaller_cases  # noqa: E402,F401
from torch_fsdp2_alive import CATEGORIES, storages  # noqa: E402
from torch_pool import Failure  # noqa: E402


def random_case(seed):
    """On a CPU nothing tells what lies on the host."""
    return {**torch_fsdp1_random.random_case(seed), "offload": False}


def plan_of(case):
    plan = torch_fsdp1_random.plan_of(case)
    plan["job"]["optimizer"] = {"kind": "adamw", "impl": "foreach"}
    return plan


def alive(model, optimizer):
    """Bytes of CATEGORIES, of the last by flat parameter, and whether backward runs."""
    flats = [module._handle.flat_param for module in model.modules() if getattr(module, "_handle", None) is not None]
    shards = {id(flat): getattr(flat, "_saved_grad_shard", None) for flat in flats}
    whole = []
    for flat in flats:
        if flat.grad is not None and flat.grad.numel() != flat._local_shard.numel():
            whole.append(flat.grad)
        elif flat.grad is not None:
            shards[id(flat)] = flat.grad
    states = [[t for p in (flat, *(flat._params or ())) for key, t in optimizer.state.get(p, {}).items() if key != "step"]
              for flat in flats]
    return (storages(flat._local_shard for flat in flats), gathered_bytes(model), storages(shards.values()), storages(whole),
            tuple(map(storages, states)), torch._C._current_graph_task_id() != -1)


def run_case(rank, argument):
    return torch_fsdp1_random.run_case(rank, argument, alive, "adamw")


def known(steps, theirs):
    """`steps` without the bytes of gradients that torch holds out of sight in `theirs`."""
    found = []
    for ours, rows in zip(steps, theirs):
        rows = [(*row[:10], bool(row[10:]) and row[10]) for row in rows] + [(None,) * 11] * max(0, len(ours) - len(rows))
        found.append([(*row[:7], None if other[10] and row[0] != "all_gather" else row[7], None if other[10] else row[8], row[9])
                      for row, other in zip(ours, rows)])
    return found


def judge(ours, pools, case):
    def data_of():
        plan = plan_of(case)
        return ours.collectives(plan, CATEGORIES), ours.emitted(plan, "fsdp1")

    said = attempt(data_of)
    if isinstance(said, Refused):
        return torch_fsdp1_random.judge(ours, pools, case)
    answers = attempt(lambda: pools.run(case["shard"] * case["replicate"], "torch_fsdp1_alive", "run_case", (case, said[1])))
    if isinstance(answers, Failure):
        return compare(said[0], answers)
    theirs = [[(*rows[0][:9], sum(map(max, zip(*(row[9] for row in rows)))), rows[0][10])
               for rows in zip(*(answer[0][step] for answer in answers))] for step in (0, -1)]
    return compare(known(said[0], theirs), known(theirs, theirs))


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], sys.modules[__name__], f"PyTorch {torch.__version__} FSDP1", "0:4", "0:100", None, PLAIN))
