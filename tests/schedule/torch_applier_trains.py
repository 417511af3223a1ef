"""What `emit` writes trains: random networks under torchrun have the losses of the unwrapped module, and all ranks the same bits.

    python3 tests/schedule/torch_applier_trains.py SHARDWRIGHT [--count N] [--first SEED] [--planted]

Cases are those of torch_fsdp2_random.py (even seeds) and torch_fsdp1_random.py (odd ones) in fp32, the first N that are not refused.
`emit` writes each into a folder, from which gloo processes import the applier. All are forked from this process, which has imported torch
(4 s of CPU); torchrun's launcher starts those of the cases with the fewest ranks. The unwrapped module sees the samples of all ranks at
once, in fp64.

The bound: in fp32 an operation loses u = 2^-24 of its result, and n of them one behind the other, whose errors have random signs,
sqrt(n) u, or L times that with a probability of 2 exp(-L^2 / 2) (Higham and Mary, 2019; L = 8: 3e-14). A loss has behind it, per step
so far, three runs of each op (forward and two gradients) of as many products as the longest sum has. To first order, as if no op made
relative errors larger.

--planted puts faults into the emitted applier, one at a time: the losses of some case of the N must leave the bound for each.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import pathlib
import sys
import tempfile
import warnings

try:
    import torch
    from torch import distributed
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import random_networks  # noqa: E402
import torch_fsdp1_random  # noqa: E402
import torch_fsdp2_random  # noqa: E402
from random_cases import Refused, Shardwright  # noqa: E402
from torch_fsdp1_random import FP32, MAX_NORM, samples_of, train_step  # noqa: E402
from torch_pool import Failure, Pools  # noqa: E402

STEPS = 4
LEARNING_RATE, MOMENTUM = 0.1, 0.9
CERTAINTY = 8.0  # L above
# Name, emitted file, and what is put in the place of what. Ranks stay alike with all of them.
PLANTED = [
    ("fsdp2: one unit's gradients are divided by a rank too many", "shardwright_fsdp2.py", "    model._shardwright_plan = plan\n",
     "    one = targets[plan['units'][0]['name']][0]\n    one.set_force_sum_reduction_for_comms(True)  # gloo has no other\n"
     "    one.set_gradient_divide_factor(mesh.size() + 1.0)\n    model._shardwright_plan = plan\n"),
    ("fsdp2: one unit computes in bf16", "shardwright_fsdp2.py", 'if unit.get("full_precision") else {}',
     "if unit.get('full_precision') else {'mp_policy': MixedPrecisionPolicy(\n"
     "            param_dtype=torch.bfloat16, output_dtype=torch.float32)} if unit is ordered[0] else {}"),
    ("fsdp2: gradients are reduced in bf16", "shardwright_fsdp2.py",
     'reduce_dtype=None if dtypes["reduce"] == dtypes["param"] else dtype_of(dtypes["reduce"])', "reduce_dtype=torch.bfloat16"),
    ("fsdp2: only the first of several micro-batches reduces", "shardwright_fsdp2.py", "set_requires_gradient_sync(is_last)",
     "set_requires_gradient_sync(index == 0)"),
    ("fsdp1: gradients are reduced in bf16", "shardwright_fsdp1.py", "    mixed = None\n",
     "    mixed = MixedPrecision(reduce_dtype=dtype_of('bfloat16'))\n"),
    ("frozen parameters are trained", "shardwright_plan.py", "    return modules\n\n\ndef check_mesh",
     "    model.requires_grad_(True)\n    return modules\n\n\ndef check_mesh"),
]


def random_case(seed):
    module = torch_fsdp1_random if seed % 2 else torch_fsdp2_random
    case = {**module.random_case(seed), "precision": FP32, "mode": "train", "dialect": "fsdp1" if seed % 2 else "fsdp2"}
    return {**case, "offload": False} if "offload" in case else case


def write_case(ours, case, folder):
    """The emitted files, and the case. Raises Refused."""
    module = torch_fsdp1_random if case["dialect"] == "fsdp1" else torch_fsdp2_random
    ours.call("emit", ours.write(module.plan_of(case)), "--to", case["dialect"], "-o", str(folder))
    (folder / "case.json").write_text(json.dumps(case), encoding="utf-8")


def learner(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, momentum=MOMENTUM)


def emitted_applier(dialect, folder):
    """The module in the folder, not that of the same name in the source tree, which the random cases import."""
    for name in ("shardwright_plan", f"shardwright_{dialect}"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(f"shardwright_{dialect}")
    finally:
        sys.path.remove(str(folder))
    assert pathlib.Path(module.__file__).parent == folder, module.__file__
    return module


def train_wrapped(rank, folder):
    """Losses of the steps, and the bits of all parameters at the end."""
    warnings.simplefilter("ignore")
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    dialect = case["dialect"]
    applier = emitted_applier(dialect, folder)
    model = random_networks.make(case["network"]).train()
    random_networks.freeze(model, case["frozen"])
    if dialect == "fsdp1":
        model = applier.apply_plan(model, str(folder / "fsdp1_plan.json"), device_type="cpu", device_id=torch.device("cpu"))
        around, clip = (lambda i: applier.micro_batch(model, i)), lambda: model.clip_grad_norm_(MAX_NORM)
    else:
        applier.apply_plan(model, str(folder / "fsdp2_plan.json"), device_type="cpu")

        def around(i):
            applier.set_micro_batch(model, i)
            return contextlib.nullcontext()

        def clip():
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], MAX_NORM)
    optimizer = learner(model)
    losses = [train_step(case, model, optimizer, samples_of(case, step, rank), around, clip) for step in range(STEPS)]
    if dialect == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        with FullyShardedDataParallel.summon_full_params(model):
            return losses, torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def work(folders):
    """In a process of torchrun's launcher: all cases of these folders."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for folder in folders:
        torch.save(train_wrapped(distributed.get_rank(), folder), folder / f"rank{distributed.get_rank()}.pt")
        distributed.barrier()
    distributed.destroy_process_group()


def train_plain(case):
    """Losses of the unwrapped module in fp64, and what fp32 may lose of them."""
    model = random_networks.make(case["network"]).double().train()
    random_networks.freeze(model, case["frozen"])
    ops = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_: ops.append(1))
    optimizer = learner(model)
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # noqa: E731
    losses = [train_step(case, model, optimizer, samples_of(case, step), lambda _: contextlib.nullcontext(), clip) for step in range(STEPS)]
    tokens = case["network"]["sequence"] * case["micro_batch"] * case["accumulation"] * case["shard"] * case["replicate"]
    longest = max(tokens, *(max(p.shape) for p in model.parameters()))
    per_pass = len(ops) / STEPS / case["accumulation"]
    return losses, CERTAINTY * math.sqrt(STEPS * 3 * per_pass * longest) * 2.0 ** -24


def judge(case, answers):
    """What is wrong; empty: nothing. And the share of the bound that is used. `answers`: of train_wrapped, by rank."""
    wanted, bound = train_plain(case)
    means = [sum(losses[step] for losses, _ in answers) / len(answers) for step in range(STEPS)]
    off = max(abs(a - b) / abs(b) for a, b in zip(means, wanted))
    if any(not torch.equal(parameters, answers[0][1]) for _, parameters in answers):
        return "the ranks end with different parameters", 0.0
    if not off <= bound:
        return f"losses {means} instead of {wanted}: {off:.2e} of them off, at most {bound:.2e} expected", 0.0
    return "", off / bound


def ranks_of(case):
    return case["shard"] * case["replicate"]


def launch(ranks, folders):
    """Under torchrun's launcher, as by `torchrun --standalone`: the answers of all ranks for each folder. Raises Failure."""
    os.environ.update(OMP_NUM_THREADS="1", TORCH_DISTRIBUTED_DEBUG="OFF")
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="trains",
                          start_method="fork")
    try:
        elastic_launch(config, work)(folders)
    except ChildFailedError as error:
        raise Failure(f"torchrun with {ranks} ranks: {error}") from None
    return {folder: [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)] for folder in folders}


def train_all(cases):
    """What is wrong with each case that is not good, and the shares of the bound that the others use."""
    bad, used = [], []
    fewest = min(map(ranks_of, cases.values()))
    answers = {}
    with Pools() as pools:  # forks before torchrun starts threads
        for folder, case in cases.items():
            try:
                if ranks_of(case) != fewest:
                    answers[folder] = pools.run(ranks_of(case), "torch_applier_trains", "train_wrapped", folder)
            except Failure as failure:
                print(f"{folder.name}: {getattr(failure, 'trace', failure)}", file=sys.stderr)
    try:
        answers |= launch(fewest, [folder for folder, case in cases.items() if ranks_of(case) == fewest])
    except Failure as failure:
        print(failure, file=sys.stderr)
    for folder, case in cases.items():
        if folder not in answers:
            bad.append(f"{folder.name}: did not run")
            continue
        text, share = judge(case, answers[folder])
        used.append(share)
        if text:
            bad.append(f"{folder.name} ({case['dialect']}, {ranks_of(case)} ranks): {text}\n    {json.dumps(case)}")
    return bad, used


def planted(cases):
    """A table of the faults and the first case whose losses leave the bound with each; 0 when each has one."""
    print("| fault | cases with the file | found | by |\n|---|---:|---:|---|")
    missed = 0
    for name, file, old, new in PLANTED:
        with_file = {folder: case for folder, case in cases.items() if (folder / file).exists()}
        for folder in with_file:
            text = (folder / file).read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{file}: {text.count(old)} times instead of once: {old}"
            (folder / file).write_text(text.replace(old, new), encoding="utf-8")
        found = [text for text in train_all(with_file)[0] if ": losses [" in text]
        for folder in with_file:
            text = (folder / file).read_text(encoding="utf-8")
            (folder / file).write_text(text.replace(new, old), encoding="utf-8")
        missed += not found
        print(f"| {name} | {len(with_file)} | {len(found)} | {found[0].splitlines()[0] if found else 'none'} |", flush=True)
    return 1 if missed else 0


def main(arguments):
    torch.set_num_threads(1)  # its backward is that of small tensors
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=50 if os.environ.get("SHARDWRIGHT_DEEP") else 6)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--planted", action="store_true", help="with each of the planted faults")
    options = parser.parse_args(arguments)
    ours, cases, refused, seed = Shardwright(options.program), {}, 0, options.first
    with tempfile.TemporaryDirectory() as name:
        while len(cases) < options.count:
            folder = pathlib.Path(name) / f"seed{seed}"
            try:
                write_case(ours, random_case(seed), folder)
                cases[folder] = random_case(seed)
            except Refused:
                refused += 1
            seed += 1
        if options.planted:
            return planted(cases)
        bad, used = train_all(cases)
        for text in bad:
            print(text)
    print(f"{len(cases) - len(bad)} of {len(cases)} cases train as the unwrapped module, seeds {options.first} to {seed - 1}, {refused} "
          f"refused; at most {max(used, default=0):.1%} of the bound")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
