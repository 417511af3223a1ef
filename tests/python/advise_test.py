"""advise on what PyTorch records: FSDP2 jobs under two gloo processes.

Two of them have a planted problem, which the first advice must name, with the plan and without: gradients that are reduced after each
micro-batch, and parameters that are freed after forward although memory is plentiful. One has none.
SHARDWRIGHT_DEEP=1: 20 pairs of plans. Plan A is traced, plan B predicted from that trace, and both are run, in turn, step by step; the
faster of the two must be told in at least 18, and the predicted ratio of step times be within 10 % in the median.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(sys.argv.pop(1)).resolve()))
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", GLOO_SOCKET_IFNAME="lo")

try:
    import torch
    import torch.distributed as dist
    import transformers
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

import shardwright

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from gloo_ranks import run_ranks

RANKS, SAMPLES, VOCABULARY = 2, 2, 512
DEEP = "SHARDWRIGHT_DEEP" in os.environ


@dataclasses.dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    tokens: int


SMALL, WIDE, LONG = Shape(256, 4, 16), Shape(512, 3, 32), Shape(256, 3, 128)


def build(shape):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=shape.width, intermediate_size=2 * shape.width,
                                      num_hidden_layers=shape.layers, num_attention_heads=4, num_key_value_heads=4,
                                      max_position_embeddings=256, tie_word_embeddings=False, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def plan_of(shape, **flags):
    ids = torch.zeros((SAMPLES, shape.tokens), dtype=torch.int64)
    job = shardwright.describe(build(shape), {"input_ids": ids, "labels": ids}, optimizer=torch.optim.SGD)
    return shardwright.plan(job, cluster="host", gpus=RANKS, precision="fp32", kernel_set="hf-eager", clip="off", dialect="fsdp2",
                            **{"wrap": "block", "micro_batch": SAMPLES, **flags})


class Training:
    """A model trained by a plan, a step at a time."""

    def __init__(self, shape, plan):
        self.model = shardwright.apply(build(shape), plan, device_type="cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        choices = plan.file["plan"]
        self.accumulation = choices["accumulation"]
        self.ids = torch.randint(1, VOCABULARY, (choices["micro_batch"], shape.tokens))

    def step(self):
        """Seconds."""
        begin = time.perf_counter()
        for i in range(self.accumulation):
            shardwright.set_micro_batch(self.model, i)
            (self.model(input_ids=self.ids, labels=self.ids).loss / self.accumulation).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


def record(training, plan, folder, steps):
    with shardwright.record(plan, folder, wait=1, warmup=1, steps=steps) as recording:
        while not recording.is_complete:
            training.step()
            recording.step()


def run_job(job, _rank):
    """One plan is recorded; with another one, both are timed, too: the medians of their steps."""
    shape, plan, other, folder = job
    trainings = [Training(shape, one) for one in (plan, other) if one is not None]
    times = [[] for _ in trainings]
    for i in range(17 if other is not None else 0):
        for training, seconds in zip(trainings, times):
            dist.barrier()
            taken = training.step()
            if i >= 3:
                seconds.append(taken)
    record(trainings[0], plan, folder, 3)
    return [statistics.median(seconds) if seconds else 0.0 for seconds in times]


def run_jobs(jobs):
    """What run_job returned on rank 0 for each job. All ranks must have run all of them."""
    results = run_ranks(RANKS, jobs, run_job)
    for done in results:
        assert len(done) == len(jobs) and not any(isinstance(one, str) for one in done), done
    return results[0]


def corrected(plan, profile):
    """The plan with this profile, predicted."""
    file = json.loads(json.dumps(plan.file))
    file["profile"] = {"json": profile}
    return shardwright.simulate(file)


# Shape, flags of A, flags of B.
def pairs():
    for shape in (SMALL, WIDE, LONG):
        yield shape, {}, {"reshard": "never"}
        yield shape, {"reshard": "always"}, {"recompute": "full"}
        yield shape, {"accumulation": 4}, {"accumulation": 4, "sync": "last"}
        yield shape, {"accumulation": 4, "sync": "last"}, {"accumulation": 4, "reshard": "never"}
        yield shape, {"accumulation": 4}, {"accumulation": 1, "micro_batch": 4 * SAMPLES}
        yield shape, {"recompute": "full"}, {"reshard": "never"}
    yield SMALL, {"wrap": "root"}, {"reshard": "always"}
    yield WIDE, {"accumulation": 2, "reshard": "never"}, {"accumulation": 2, "sync": "last", "recompute": "full"}


class Advise(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def test_planted_problems(self):
        cases = {"sync": {"accumulation": 4, "reshard": "never"}, "reshard": {"wrap": "root", "reshard": "always"}}
        jobs = [(SMALL, plan_of(SMALL, **flags), None, self.folder / topic) for topic, flags in cases.items()]
        run_jobs(jobs)
        other = plan_of(LONG)
        for topic, (_, plan, _, folder) in zip(cases, jobs):
            with self.subTest(topic=topic):
                report = shardwright.advise(folder, plan=plan, fix="batch")
                self.assertEqual(report.advice[0].topic, topic, report)
                self.assertGreater(report.gain, 0.01)
                self.assertTrue(report["calibration"]["is_corrected"])
                self.assertIn("fsdp2_plan.json", report.patch)
                alone = shardwright.advise(folder)
                self.assertEqual(alone.advice[0].topic, topic, alone)
                self.assertIsNone(alone.better)
                for ask in (shardwright.compare, lambda plan, traces: shardwright.advise(traces, plan=plan)):
                    with self.assertRaisesRegex(shardwright.InputError, "^not a run of this plan: "):
                        ask(other, folder)

    @unittest.skipUnless(DEEP, "SHARDWRIGHT_DEEP")
    def test_pairs(self):
        cases = list(pairs())
        self.assertEqual(len(cases), 20)
        right, errors = 0, []
        for i, (shape, a, b) in enumerate(cases):
            plan, changed, folder = plan_of(shape, **a), plan_of(shape, **b), self.folder / str(i)
            (own, other), = run_jobs([(shape, plan, changed, folder)])
            measured, predicted = other / own, self.predicted(plan, changed, folder)
            right += (predicted < 1) == (measured < 1)
            errors.append(abs(predicted / measured - 1))
            print(f"{shape} {a} -> {b}: {own:.4f} s -> {other:.4f} s, ratio {measured:.3f}, predicted {predicted:.3f}", flush=True)
        print(f"ranked right {right} of {len(errors)}, error of the ratio: median {statistics.median(errors):.3f}, max {max(errors):.3f}")
        self.assertGreaterEqual(right, 18)
        self.assertLessEqual(statistics.median(errors), 0.1)

    def predicted(self, plan, changed, folder):
        """Step time of the changed plan over that of the traced one, under the profile that its trace corrects."""
        plan.save(self.folder / "plan.json")
        path = self.folder / "profile.json"
        shardwright.commands.calibrate(folder, plan=self.folder / "plan.json", output=path, even_if_worse=True)
        profile = json.loads(path.read_text())
        return corrected(changed, profile).step_time / corrected(plan, profile).step_time


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
