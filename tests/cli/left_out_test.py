"""Profiles of a folder instead of the shipped ones, profiles from step times, and how many numbers were fitted."""

import csv
import json
import pathlib
import shutil

from shardwright_test_case import BenchTestCase, main

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNS = ROOT / "bench/published/measured_runs.csv"


class LeftOut(BenchTestCase):

    def setUp(self):
        super().setUp()
        shutil.copytree(ROOT / "topologies/profiles", self.folder / "profiles")

    def table(self, name, ids, **changed):
        """The published rows of these ids, with some columns changed."""
        with open(RUNS, newline="", encoding="utf-8") as lines:
            rows = [{**row, **changed} for row in csv.DictReader(lines) if row["id"] in ids]
        with open(self.folder / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def row(self, *arguments):
        row, = json.loads(self.succeed("validate", "runs.csv", *arguments, "--json"))["rows"]
        return row

    def test_a_folder_takes_the_place_of_the_shipped_profiles(self):
        self.table("runs.csv", ["fmsaccel-010"], tier="A")
        shipped = self.row()
        self.assertTrue(shipped["profile"].startswith("a100-80-hf-"))
        self.assertEqual(self.row("--profiles", "profiles"), shipped)
        for path in (self.folder / "profiles").glob("a100-80-hf-*.json"):
            path.unlink()
        self.assertEqual(self.row("--profiles", "profiles")["profile"], "a100-80-torch")
        (self.folder / "profiles/a100-80-torch.json").unlink()
        code, out, error = self.run_program("validate", "runs.csv", "--profiles", "profiles")
        self.assertEqual((code, out), (3, ""))
        self.assertIn('ampere-torch.json: extends: got "a100-80-torch"', error)
        for name in ("ampere-torch", "ampere-half-torch"):
            (self.folder / f"profiles/{name}.json").unlink()
        self.assertEqual(self.row("--profiles", "profiles")["profile"], "a100-torch-eager")
        self.assert_fails(3, "none: got no profile, expected a folder of .json files", "validate", "runs.csv", "--profiles", "none")

    def test_one_step_time_makes_a_profile(self):
        self.table("runs.csv", ["llmfoundry-256"])
        before = self.row("--profile", "generic", "--bands")
        self.table("own.csv", ["llmfoundry-256"], step_time_s=str(1.2 * before["predicted"]))
        self.succeed("jobs", "own.csv", "-o", "jobs")
        report = json.loads(self.succeed("calibrate", "jobs/runs.json", "--profile", "generic", "-o", "mine.json", "--date", "2026-11-28",
                                         "--json"))
        run, = report["runs"]
        self.assertAlmostEqual(run["before_s"], before["predicted"], delta=0.002 * before["predicted"])
        self.assertAlmostEqual(run["measured_s"], 1.2 * before["predicted"])
        self.assertLess(abs(run["after_s"] / run["measured_s"] - 1), 0.2 * (1 - 1 / 1.2))
        after = self.row("--profile", "mine.json", "--bands")
        self.assertAlmostEqual(after["predicted"], run["after_s"], delta=0.002 * run["after_s"])
        self.assertLess(after["band"], before["band"])
        number = json.loads((self.folder / "mine.json").read_text())["compute"]["gemm"]["bf16"]
        self.assertEqual((number["kind"], number["source"], number["date"]),
                         ("fitted", "shardwright calibrate over the step times of llmfoundry-256", "2026-11-28"))

    def test_step_times_and_traces_do_not_mix(self):
        runs = {"format": "shardwright-runs", "version": 1, "runs": [
            {"id": "mine", "step_time_s": 0.5, "flags": {"--model": "gpt2", "--cluster": "dgx-h100"}},
            {"id": "other", "step_time_s": 0.5, "flags": {"--model": "gpt2", "--cluster": "dgx-a100"}}]}
        (self.folder / "runs.json").write_text(json.dumps(runs))
        (self.folder / "trace.json").write_text('{"traceEvents": []}')
        self.assert_fails(2, "step times and traces do not mix: trace.json is no list of runs", "calibrate", "runs.json", "trace.json",
                          "-o", "mine.json")
        self.assert_fails(3, "other: got a run on a100-80, expected one on h100-80, as mine", "calibrate", "runs.json", "-o", "mine.json")
        runs["runs"] = [{**runs["runs"][0], "step_time_s": 0}]
        (self.folder / "runs.json").write_text(json.dumps(runs))
        self.assert_fails(3, "mine: got no step_time_s, expected seconds per step", "calibrate", "runs.json", "-o", "mine.json")

    def test_fitted_numbers_are_counted(self):
        profiles = {p["name"]: p for p in json.loads(self.succeed("list", "profiles", "--json"))["profiles"]}
        own = json.loads((self.folder / "profiles/v100-torch-eager.json").read_text())
        shipped = json.loads((self.folder / "profiles/generic.json").read_text())
        host = {**shipped["host"], **own.get("host", {})}
        self.assertEqual(profiles["v100-torch-eager"]["fitted_numbers"].get("host", 0),
                         sum(1 for number in host.values() if isinstance(number, dict) and number.get("kind") == "fitted"))
        # By hand: FlashAttention-2's four numbers; cuDNN's backward is assumed, so three.
        self.assertEqual(profiles["h100-torch-eager"]["fitted_numbers"]["attention"], 4)
        self.assertEqual(profiles["h100-torch-eager"]["fitted_numbers"]["cudnn_attention"], 3)
        # Of Triton's kernels llm-foundry's steps tell two; on A100 they are published, which is no fit.
        self.assertEqual(profiles["a100-80-composer-2024"]["fitted_numbers"]["triton_attention"], 2)
        self.assertNotIn("triton_attention", profiles["a100-torch-eager"]["fitted_numbers"])


if __name__ == "__main__":
    main()
