"""bench/lab/fit.py finds numbers again that made the "measurements", of a machine whose step time is a formula.

    python3 tests/analysis/fit_test.py
"""

import contextlib
import io
import json
import math
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
try:
    from lab import base, fit
    fit.nlopt()
except (ImportError, base.UsageError) as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

GEMM, ELEMENTWISE, ATTENTION, FP16 = "compute.gemm.bf16", "compute.elementwise", "compute.attention_backward", "compute.gemm.fp16"
STARTS = {GEMM: 0.7, FP16: 0.6, ELEMENTWISE: 0.7, ATTENTION: 0.4, "host.step": 5e-3}
SHAPES = [(model, size, sequence) for model in (1, 3) for size, sequence in ((1, 1), (4, 1), (8, 1), (2, 2), (1, 4))]


def time_of(shape, numbers):
    """Products grow with the model's width squared, element-wise ops with the width, attention with the sequence squared."""
    model, size, sequence = shape
    tokens = size * sequence
    return (0.02 * tokens * model ** 2 / numbers[GEMM] + 0.02 * tokens * model / numbers[ELEMENTWISE]
            + 0.01 * size * sequence ** 2 * model / numbers[ATTENTION] + 0.001)


class Machine:
    """In the place of fit.Simulations: GPU types of one chip."""

    def __init__(self, gpus=("a100-40",)):
        self.shapes = [(gpu, shape) for gpu in gpus for shape in SHAPES]
        self.about = {"runs": [{"gpu": gpu, "chip": "ampere", "gpus": 8, "kernel_set": "composer-2023"} for gpu, _ in self.shapes],
                      "profiles": {gpu: {"name": "a100-torch-eager", "gemm": {"bf16": 1, "tf32": 2},
                                         "numbers": {path: {"value": value, "is_time": path == "host.step"}
                                                     for path, value in STARTS.items()}} for gpu in gpus}}

    def times(self, points, rows):
        return [time_of(self.shapes[run][1], {**STARTS, **points[point]}) for run, point in rows]

    def runs(self, truths, source=lambda shape: "made"):
        """Measured where the numbers of a GPU type are those of `truths`."""
        return [{"id": f"{gpu} {shape}", "source": source(shape), "model": f"width {shape[0]}", "variant": "",
                 "step_time_s": time_of(shape, {**STARTS, **truths[gpu]})} for gpu, shape in self.shapes]


def fitted(machine, runs, numbers=(GEMM, ELEMENTWISE), leave_out="none", **more):
    with contextlib.redirect_stderr(io.StringIO()):
        return fit.fit_runs(machine, runs, list(numbers), [numbers[0], ELEMENTWISE], leave_out=leave_out, **more)


def values(stack):
    return {number["path"]: number["value"] for number in stack["numbers"]}


TRUTH = {GEMM: 0.55, ELEMENTWISE: 0.5, ATTENTION: 0.3}
PULL = 0.02  # the mild pull towards what is expected costs about a percent


class Fit(unittest.TestCase):

    def assert_near(self, found, expected, most=PULL):
        self.assertLess(abs(found / expected - 1), most)

    def test_known_numbers_are_found_again(self):
        machine = Machine()
        stack, = fitted(machine, machine.runs({"a100-40": TRUTH}), (GEMM, ELEMENTWISE, ATTENTION, FP16))["stacks"]
        self.assertEqual((stack["runs"], stack["sources"]), ({"composer-2023": len(SHAPES)}, ["made"]))
        for path, value in TRUTH.items():
            self.assert_near(values(stack)[path], value)
        # No row multiplies fp16: it stays as far from bf16 as the base profile has it.
        self.assert_near(values(stack)[FP16], STARTS[FP16] * values(stack)[GEMM] / STARTS[GEMM], 0.002)
        self.assertLess(stack["errors"]["max"], 0.01)

    def test_gpu_types_of_one_chip_share_all_numbers_but_those_of_each_stack(self):
        machine = Machine(("a100-40", "a100-80"))
        truths = {"a100-40": TRUTH, "a100-80": {GEMM: 0.65, ELEMENTWISE: 0.6, ATTENTION: 0.3}}
        stacks = fitted(machine, machine.runs(truths), (GEMM, ELEMENTWISE, ATTENTION, FP16))["stacks"]
        self.assertEqual([stack["gpu"] for stack in stacks], ["a100-40", "a100-80"])
        for stack in stacks:
            found = values(stack)
            for path, value in truths[stack["gpu"]].items():
                self.assert_near(found[path], value)
            self.assertEqual(found[ATTENTION], values(stacks[0])[ATTENTION])
            # Of a further dtype the ratio is shared: slower products are slower in both.
            self.assert_near(found[FP16] / STARTS[FP16] / (found[GEMM] / STARTS[GEMM]), 1, 0.002)

    def predicted(self, machine, runs, leave_out, is_left):
        rows = {row["id"]: row["error"] for row in fitted(machine, runs, leave_out=leave_out)["left_out_rows"]}
        return [(1 + rows[run["id"]]) * run["step_time_s"] for run in runs if is_left(run)]

    def assert_not_seen(self, leave_out, is_left, source=lambda shape: "made"):
        machine = Machine()
        runs = machine.runs({"a100-40": TRUTH}, source)
        before = self.predicted(machine, runs, leave_out, is_left)
        for run in runs:
            run["step_time_s"] *= 2 if is_left(run) else 1
        after = self.predicted(machine, runs, leave_out, is_left)
        self.assertTrue(0 < len(before) < len(runs))
        self.assertTrue(all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(after, before)))

    def test_what_is_left_out_is_not_seen(self):
        self.assert_not_seen("model", lambda run: run["model"] == "width 1")
        self.assert_not_seen("source", lambda run: run["source"] == "second", lambda shape: "second" if shape[1] > 2 else "first")

    def test_sources_and_models_of_a_source_are_left_out(self):
        machine = Machine()
        runs = machine.runs({"a100-40": TRUTH}, lambda shape: "second" if shape[0] == 1 and shape[1] > 2 else "first")
        by_source = fitted(machine, runs, leave_out="source")
        self.assertEqual([fold["model"] for fold in by_source["left_out"]], ["first", "second"])
        self.assertEqual([row["id"] for row in by_source["left_out_rows"]], [run["id"] for run in runs])
        self.assertEqual(sum(fold["errors"]["rows"] for fold in by_source["left_out"]), len(runs))
        by_size = fitted(machine, runs, leave_out="size")  # the second source has one model
        self.assertEqual([fold["model"] for fold in by_size["left_out"]], ["first, width 1", "first, width 3"])
        self.assertEqual(len(by_size["left_out_rows"]), sum(run["source"] == "first" for run in runs))

    def test_a_group_with_one_model_leaves_out_its_variants(self):
        machine = Machine()
        runs = [{**run, "model": "one", "variant": "bf16" if i % 2 else "fp32"} for i, run in enumerate(machine.runs({"a100-40": TRUTH}))]
        self.assertEqual([fold["model"] for fold in fitted(machine, runs, leave_out="model")["left_out"]], ["bf16", "fp32"])

    def test_too_few_rows_and_unknown_numbers(self):
        machine = Machine()
        runs = machine.runs({"a100-40": TRUTH})
        few = [{**run, "step_time_s": 0} if i > 2 else run for i, run in enumerate(runs)]
        with self.assertRaisesRegex(base.InputError, "^table: got no chip and framework with 4 rows that have a step time, expected more rows$"):
            fitted(machine, few)
        with self.assertRaisesRegex(base.InputError, '^--numbers: got "compute.gem.bf16", expected a number of a profile such as'):
            fitted(machine, runs, ("compute.gem.bf16",))

    def test_a_profile(self):
        """By hand: three digits, the runs of each kernel set, and the rates of the base profile that were not fitted."""
        stack = {"gpu": "a100-80", "kernel_set": "composer-2024", "base": {"name": "a100-torch-eager", "gemm": {"bf16": 1, "tf32": 2}},
                 "runs": {"composer-2024": 7, "composer-2023": 5}, "sources": ["llmfoundry"], "spread": 0.05, "left_out_error": 0.03216,
                 "numbers": [{"path": GEMM, "value": 0.71234, "is_time": False}, {"path": "host.step", "value": 0.005731, "is_time": True}]}
        profile = json.loads(fit.profile_of(stack, "a test", "2026-11-21"))
        origin = {"kind": "fitted", "source": "a test", "date": "2026-11-21", "spread": 0.05}
        self.assertEqual(profile, {
            "format": "shardwright-profile", "version": 1, "name": "a100-80-composer-2024",
            "description": "a100-80, composer-2024, fitted to 12 published runs", "extends": "a100-torch-eager", "architecture": "a100-80",
            "kernel_set": "composer-2024",
            "fit": {"gpu": "a100-80", "runs": {"composer-2023": 5, "composer-2024": 7}, "sources": ["llmfoundry"], "left_out_error": 0.0322},
            "compute": {"gemm": {"bf16": {"value": 0.712, **origin}, "tf32": 2}}, "host": {"step": {"value": "5.73 ms", **origin}}})


if __name__ == "__main__":
    unittest.main()
