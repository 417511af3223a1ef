"""Modules as users write them: describe -> plan -> apply trains each as its unwrapped module does, or refuses it by name.

    python3 tests/python/user_modules_test.py PACKAGE_FOLDER [NAME ...]

Two gloo processes run what is not refused: their losses are those of the unwrapped module on the samples of both, and their collectives
those of the program, of every step. What apply refuses is as it was. The modules are those of user_modules.py; with SHARDWRIGHT_DEEP
those of user_modules_more.py, too.
"""

import os
import pathlib
import sys
import tempfile
import unittest
import warnings

sys.path.insert(0, str(pathlib.Path(sys.argv.pop(1)).resolve()))
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", GLOO_SOCKET_IFNAME="lo")

try:
    import torch
    import transformers  # noqa: F401
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "schedule"))

import program_collectives
import shardwright
import torch_pool
from gloo_ranks import run_ranks
from user_modules import CASES, TOKENS, WORDS

if os.environ.get("SHARDWRIGHT_DEEP"):
    import user_modules_more  # noqa: F401

RANKS, STEPS, SAMPLES = 2, 3, 2
ONLY = sys.argv[1:]
warnings.simplefilter("ignore")


def chosen():
    return {name: case for name, case in CASES.items() if not ONLY or name in ONLY}


def build(case):
    torch.manual_seed(0)
    return case.build().train()


def samples(count):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(WORDS, (count, TOKENS), generator=generator) for name in ("ids", "labels")}


def plan_of(case):
    job = shardwright.describe(build(case), samples(SAMPLES), optimizer=torch.optim.SGD, device_type="cpu",
                               dtype=torch.bfloat16 if case.flags.get("precision") == "bf16" else torch.float32)
    return shardwright.plan(job, **{"cluster": "host", "gpus": RANKS, "micro_batch": SAMPLES, "precision": "fp32", "kernel_set": "torch-eager",
                                    "clip": "off", "dialect": "fsdp2", **case.flags})


def state(model):
    """What apply may not change where it refuses."""
    return ([(name, id(module), type(module).__name__, len(module._forward_hooks), len(module._forward_pre_hooks))
             for name, module in model.named_modules()],
            [(name, id(parameter), parameter.requires_grad, parameter.dtype) for name, parameter in model.named_parameters()])


def train(case, model, batch, after_step=lambda: None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        case.each_step(model)
        losses.append(loss.item())
    return losses


def run_case(job, rank):
    """Losses, and per step the collectives."""
    name, plan = job
    case = CASES[name]
    model = shardwright.apply(build(case), plan, device_type="cpu")
    case.after(model)
    batch = {key: tensor.chunk(RANKS)[rank] for key, tensor in samples(RANKS * SAMPLES).items()}
    steps = []
    with torch_pool.Recorder({tuple(range(RANKS)): "shard"}) as recorder:
        losses = train(case, model, batch, lambda: steps.append(recorder.take()))
    return losses, steps


class UserModules(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def programs(self, plan):
        """The collectives of the first and of a steady step, as the program has them."""
        trace = self.folder / "trace.json"
        shardwright.commands.simulate(plan, exact=True, trace=str(trace))
        return program_collectives.collectives_of(trace)

    def test_what_describe_refuses(self):
        for name, case in chosen().items():
            if case.describe:
                with self.subTest(name):
                    with self.assertRaises(shardwright.InputError) as caught:
                        plan_of(case)
                    self.assertIn(case.describe, str(caught.exception))
                    self.assertNotIn(tempfile.gettempdir(), str(caught.exception))

    def test_what_is_frozen_costs_nothing(self):
        """FLOPs and kept bytes, as torch's counter and autograd have them."""
        from shardwright import _live
        exporter = _live._exporter
        for name in ("biases alone are trained", "matrices alone are frozen in one block", "frozen norms", "a frozen first block",
                     "a frozen teacher under no_grad", "adapters written by hand"):
            with self.subTest(name):
                job = shardwright.describe(build(CASES[name]), samples(SAMPLES), dtype=torch.float32, device_type="cpu")
                forward, backward, kept = exporter.trace.totals(exporter.export.traces[0])
                batch, _ = exporter.export.points[0]
                rows = [row for row in shardwright.commands.inspect(job.model)["one_gpu"]
                        if (row["kernel_set"], row["dtype"], row["batch"]) == ("torch-eager", "fp32", batch)]
                self.assertEqual(len(rows), 1)
                self.assertEqual((rows[0]["forward_flops"], rows[0]["backward_flops"]), (forward, backward))
                self.assertLess(abs(rows[0]["saved_bytes"] - kept), 0.02 * kept, f"{rows[0]['saved_bytes']} for {kept}")

    def test_what_apply_refuses(self):
        for name, case in chosen().items():
            if not case.apply:
                continue
            with self.subTest(name):
                plan, model = plan_of(case), build(case)
                case.before(model)
                before = state(model)
                with self.assertRaises(shardwright.InputError) as caught:
                    shardwright.apply(model, plan, device_type="cpu")
                self.assertIn(case.apply, str(caught.exception))
                self.assertEqual(state(model), before)

    def test_the_others_train(self):
        self.assertGreaterEqual(len(CASES), 60)
        cases = {name: case for name, case in chosen().items() if not case.describe and not case.apply}
        jobs = {}
        for name, case in cases.items():
            with self.subTest(name, step="plan"):
                jobs[name] = plan_of(case)
        ranks = [dict(zip(jobs, results)) for results in run_ranks(RANKS, list(jobs.items()), run_case, goes_on=True)]
        for name, plan in jobs.items():
            with self.subTest(name):
                results = [found.get(name, "the process died") for found in ranks]
                for result in results:
                    self.assertIsInstance(result, list, result)
                mean = [sum(losses) / RANKS for losses in zip(*(losses for losses, _ in results))]
                expected = train(CASES[name], build(CASES[name]), samples(RANKS * SAMPLES))
                for ours, theirs in zip(mean, expected):
                    self.assertLess(abs(ours - theirs), CASES[name].tolerance * abs(theirs), f"{mean} instead of {expected}")
                for what, planned, found in zip(("first", "last"), self.programs(plan), (results[0][1][0], results[0][1][-1])):
                    self.assertEqual(program_collectives.first_difference(planned, [tuple(row) for row in found]), "", f"the {what} step")


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main(argv=sys.argv[:1])
