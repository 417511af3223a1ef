"""calibrate as a user types it: fitted to a real run on the host device, it predicts a plan of another size.

How well it predicts depends on what else the machine does, so only the deep run (SHARDWRIGHT_DEEP) judges that."""

import json
import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main


def is_deep():
    return "SHARDWRIGHT_DEEP" in os.environ


class Calibrate(ShardwrightTestCase):

    def plan(self, name, width, layers, *flags):
        """The name of a plan file for a small transformer on ranks of this machine."""
        config = {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": width // 32, "n_positions": 256,
                  "vocab_size": 1000}
        (self.folder / f"{name}-config.json").write_text(json.dumps(config))
        self.succeed("plan", "--model", f"{name}-config.json", "--cluster", "host", "--kernel-set", "shardwright-host",
                     "--dialect", "native", "--precision", "fp32", "--wrap", "block", "-o", f"{name}.json", *flags)
        return f"{name}.json"

    def measure(self, plan, trace):
        """Runs the plan and leaves its trace."""
        code, _, err = self.run_program("run", plan, "--steps", "8" if is_deep() else "3", "--trace", trace)
        self.assertEqual(code, 0, err)

    def test_predicts_another_size(self):
        width = 128 if is_deep() else 64
        flags = ("--gpus", "2", "--micro-batch", "2")
        small = self.plan("small", width, 3, "--seq", f"{width // 2}", *flags)
        for _ in range(4):  # beside other programs a run may show no rate at all
            self.measure(small, "small-trace.json")
            fit = json.loads(self.succeed("calibrate", "small-trace.json", "-o", "mine.json", "--name", "mine", "--even-if-worse",
                                          "--json"))
            profile = json.loads((self.folder / "mine.json").read_text())
            gemm = profile["compute"]["gemm"]["fp32"]
            if gemm["kind"] == "measured":
                break
        self.assertEqual((fit["schema"], fit["profile"]), ("shardwright-calibration", "mine"))
        self.assertEqual(gemm["kind"], "measured")
        self.assertIn("small-trace.json", gemm["source"])
        # Matrix products of a transformer twice as wide and one layer deeper, with longer sequences.
        other = self.plan("other", 2 * width, 4, "--seq", "96", "--profile", "mine.json", *flags)
        # Ranks that wait for a core make steps long; medians of single ops are steadier. So the rate that the second run
        # shows by itself is compared with the one that the first gave, and another run may have a quieter moment.
        ratios = [self.rate_over_prediction(other, gemm["value"])]
        while is_deep() and len(ratios) < 4 and not 1 / 2 < ratios[-1] < 2:
            ratios.append(self.rate_over_prediction(other, gemm["value"]))
        self.assertTrue(ratios[-1] > 0)
        if is_deep():
            self.assertTrue(1 / 2 < ratios[-1] < 2, ratios)

    def rate_over_prediction(self, plan, predicted):
        """Runs a plan; its rate of matrix products over the one in its profile."""
        self.measure(plan, "other-trace.json")
        _, out, _ = self.run_program("compare", plan, "other-trace.json", "--json")
        found = json.loads(out)
        self.assertEqual((found["matched"], found["findings"]), (found["spans"], []))
        again = json.loads(self.succeed("calibrate", "other-trace.json", "-o", "again.json", "--even-if-worse", "--json"))
        rate = next(number for number in again["numbers"] if number["field"] == "compute.gemm.fp32")
        self.assertEqual(rate["before"], predicted)
        run = again["runs"][0]
        print(f"gemm rate of the other plan / predicted {rate['after'] / rate['before']:.2f}, "
              f"step measured / predicted {run['measured_s'] / run['before_s']:.2f}", file=sys.stderr)
        return rate["after"] / rate["before"]

    def test_equal_traces_give_equal_bytes(self):
        self.measure(self.plan("one", 64, 2, "--gpus", "1", "--seq", "32"), "one-trace.json")
        for output in ("a.json", "b.json"):
            self.succeed("calibrate", "one-trace.json", "--date", "2026-11-21", "--even-if-worse", "-o", output)
        self.assertEqual((self.folder / "a.json").read_bytes(), (self.folder / "b.json").read_bytes())

    def test_a_worse_profile_is_not_written(self):
        self.measure(self.plan("held", 64, 2, "--gpus", "1", "--seq", "32"), "held-trace.json")
        self.succeed("calibrate", "held-trace.json", "--even-if-worse", "-o", "mine.json")
        # The same ops, but two seconds pass between any two steps: prices of ops say nothing of them.
        trace = json.loads((self.folder / "held-trace.json").read_text())
        for event in trace["traceEvents"]:
            step = event.get("args", {}).get("step")
            if event.get("ph") == "X" and step is not None:
                delay = 2e6 * (int(step) + 1)
                event["ts"] += delay
                for key in ("issue_begin_us", "issued_us", "issue_end_us", "ready_us", "arrival_us"):
                    if key in event["args"]:
                        event["args"][key] += delay
        lines = ",\n".join(json.dumps(event) for event in trace.pop("traceEvents"))
        header = json.dumps(trace)[:-1]
        (self.folder / "late-trace.json").write_text(header + ', "traceEvents": [\n' + lines + "\n]}\n")
        # A profile that is as slow as those steps, by luck: nearly all of its time is products.
        slow = json.loads((self.folder / "mine.json").read_text())
        factor = 3000
        for _ in range(2):
            gemm = dict(slow["compute"]["gemm"]["fp32"])
            gemm["value"] /= factor
            compute = {**slow["compute"], "gemm": {**slow["compute"]["gemm"], "fp32": gemm}}
            (self.folder / "slow.json").write_text(json.dumps({**slow, "compute": compute}))
            told = json.loads(self.succeed("calibrate", "late-trace.json", "--profile", "slow.json", "--even-if-worse", "-o",
                                           "new.json", "--json"))["runs"][0]
            factor *= told["measured_s"] / told["before_s"]
        (self.folder / "new.json").unlink()
        code, out, _ = self.run_program("calibrate", "late-trace.json", "--profile", "slow.json", "-o", "new.json")
        self.assertEqual(code, 1, out)
        self.assertTrue(out.startswith("No profile was written: it would predict the runs that it was fitted to worse than "
                                       "before.\n"), out)
        self.assertFalse((self.folder / "new.json").exists())
        code, out, _ = self.run_program("calibrate", "late-trace.json", "--profile", "slow.json", "-o", "new.json", "--json")
        found = json.loads(out)
        self.assertEqual((code, found["written"]), (1, False))
        run, = found["runs"]
        self.assertGreater(run["measured_s"], 2)
        self.assertGreater(abs(run["after_s"] - run["measured_s"]), abs(run["before_s"] - run["measured_s"]))
        self.succeed("calibrate", "late-trace.json", "--profile", "slow.json", "--even-if-worse", "-o", "new.json")

    def test_refuses(self):
        self.assert_fails(2, "--output is required; see shardwright calibrate --help", "calibrate", "x.json")
        self.assert_fails(2, "calibrate needs traces, or --device host or cuda", "calibrate", "-o", "out.json")
        self.assert_fails(2, "traces and --device contradict each other", "calibrate", "x.json", "--device", "host", "-o",
                          "out.json")
        self.assert_fails(2, "--ranks needs --device host", "calibrate", "x.json", "--ranks", "2", "-o", "out.json")


if __name__ == "__main__":
    main()
