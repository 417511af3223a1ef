"""Tiny transformers of the kinds that are trained most, under real FSDP2: their collectives are those of our programs.

    python3 tests/schedule/torch_fsdp2_architectures.py SHARDWRIGHT [--only NAME] [--settings N,N]

As torch_fsdp1_architectures.py, which has the models: tools/export_model.py describes each, `plan` and `emit` make what the applier
wraps in gloo processes. Three steps run; compared are order, kind, group, elements and dtype of all collectives.
"""

import json
import pathlib
import shlex
import sys
import warnings

try:
    import torch
    import transformers  # noqa: F401
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from random_cases import Refused, attempt, compare  # noqa: E402
from torch_fsdp1_architectures import SEQUENCE, inputs_of, main_of, model_of  # noqa: E402
from torch_fsdp2_random import groups_of, mesh_of, shardwright_fsdp2  # noqa: E402
from torch_pool import Recorder  # noqa: E402

# Ranks and flags of plan.
SETTINGS = [
    (2, "--wrap block"),
    (2, "--wrap torchtitan --precision bf16-mixed --clip on"),
    (4, "--wrap block --shard 2 --accumulation 2 --sync last"),
    (3, "--wrap module --reshard never"),
    (2, "--wrap block --recompute full --precision bf16-mixed"),
]


def run_case(rank, argument):
    warnings.simplefilter("ignore")
    name, data, case = argument
    model = shardwright_fsdp2.apply_plan(model_of(name), data, mesh_of(case))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    steps = []
    with Recorder(groups_of(case)) as recorder:
        for step in range(3):
            for i in range(data["training"]["accumulation"]):
                shardwright_fsdp2.set_micro_batch(model, i)
                model(**inputs_of(name, data["training"]["micro_batch"], step + rank)).loss.backward()
            if case["clip"]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(recorder.take())
    return steps


def judge(ours, pools, name, ranks, flags):
    folder = pathlib.Path(ours.folder.name)

    def data_of():
        defaults = "".join(text for flag, text in (("--precision", " --precision fp32"), ("--clip", " --clip off")) if flag not in flags)
        ours.call("plan", "--model", str(folder / f"{name}.json"), "--cluster", f"a100-80 x{ranks}, nvlink 300 GB/s", "--seq",
                  str(SEQUENCE), "--dialect", "fsdp2", "--kernel-set", "torch-eager", *shlex.split(flags + defaults),
                  "-o", str(folder / "made.json"))
        plan = json.loads((folder / "made.json").read_text(encoding="utf-8"))
        return ours.collectives(plan), ours.emitted(plan, "fsdp2")

    said = attempt(data_of)
    if isinstance(said, Refused):
        return compare(said, [])
    shard = said[1]["mesh"]["shard"]
    case = {"shard": shard, "replicate": ranks // shard, "clip": "--clip on" in flags}
    theirs = attempt(lambda: pools.run(ranks, "torch_fsdp2_architectures", "run_case", (name, said[1], case))[0])
    return compare(said[0], theirs)


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], __doc__, "torch_fsdp2_architectures.py", SETTINGS, judge))
