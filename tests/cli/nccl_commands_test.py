"""validate-nccl and fit-nccl as a user types them."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import TESTS, ShardwrightTestCase, main

PUBLISHED = TESTS.parent / "bench" / "published"
SWEEP = str(PUBLISHED / "nccl_measured.csv")
HEADER = "source,system,gpu,gpus,nodes,gpus_per_node,network,op,bytes,time_us\n"


class ValidateNccl(ShardwrightTestCase):

    def test_every_row_is_predicted_or_skipped_with_a_reason(self):
        report = json.loads(self.succeed("validate-nccl", SWEEP, "--json"))
        self.assertEqual((report["schema"], report["schema_version"]), ("shardwright-collective-validation", 1))
        skipped = sum(group["rows"] for group in report["skipped"])
        with open(SWEEP, encoding="utf-8") as file:
            rows = sum(1 for _ in file) - 1
        self.assertEqual(len(report["rows"]) + skipped, rows)
        self.assertEqual(sum(group["rows"] for group in report["groups"]), len(report["rows"]))
        for row in report["rows"]:
            self.assertAlmostEqual(row["predicted_s"] / row["measured_s"] - 1, row["error"])

    def test_statistics_are_those_of_the_rows(self):
        report = json.loads(self.succeed("validate-nccl", SWEEP, "--json"))
        errors = sorted(abs(row["error"]) for row in report["rows"]
                        if row["op"] in ("all_gather", "reduce_scatter") and 2**16 <= row["bytes"] <= 2**34)
        pooled = report["pooled"]
        self.assertEqual(pooled["count"], len(errors))
        self.assertAlmostEqual(pooled["mean"], sum(errors) / len(errors))
        self.assertAlmostEqual(pooled["max"], errors[-1])
        half = len(errors) // 2
        self.assertAlmostEqual(pooled["median"], (errors[half - 1] + errors[half]) / 2)  # an even count

    def test_two_runs_give_the_same_bytes(self):
        scale = str(PUBLISHED / "nccl_simai_ratio.csv")
        first = self.succeed("validate-nccl", SWEEP, "--left-out", "--scale", scale)
        self.assertEqual(first, self.succeed("validate-nccl", SWEEP, "--left-out", "--scale", scale))
        self.assertIn("Each fabric left out of the fit", first)
        self.assertIn("128 nodes", first)

    def test_bad_tables(self):
        (self.folder / "s.csv").write_text("source,system\n")
        self.assert_fails(3, "s.csv: line 1: got no column gpu, expected a table of collective measurements",
                          "validate-nccl", "s.csv")
        (self.folder / "s.csv").write_text(HEADER + "a,b,H100,8,1,8,n,all_gather,1024,x\n")
        self.assert_fails(3, 's.csv: line 2: time_us: got "x", expected a positive number or nothing',
                          "validate-nccl", "s.csv")


class FitNccl(ShardwrightTestCase):

    def test_the_written_profile_predicts_as_well(self):
        self.succeed("fit-nccl", SWEEP, "--extends", "h100-torch-eager", "--date", "2026-11-21", "-o", "mine.json")
        profile = json.loads((self.folder / "mine.json").read_text())
        efficiency = profile["transports"]["roce"]["efficiency"]
        self.assertEqual((efficiency["kind"], efficiency["date"]), ("fitted", "2026-11-21"))
        report = json.loads(self.succeed("validate-nccl", SWEEP, "--profile", "mine.json", "--json"))
        roce = next(g for g in report["groups"] if g["fabric"] == "roce" and g["op"] == "all_gather")
        self.assertLess(roce["errors"]["median"], 0.08)

    def test_all_reduces_are_fitted_over_the_gathers(self):
        numbers = json.loads(self.succeed("fit-nccl", SWEEP, "--all-reduce", "--json"))["numbers"]
        self.assertIn("tcpxo: all_reduce_gain", [number["name"] for number in numbers])
        self.assertNotIn("roce: efficiency", [number["name"] for number in numbers])

    def test_a_profile_needs_a_date(self):
        self.assert_fails(2, "--date is required; see shardwright fit-nccl --help", "fit-nccl", SWEEP, "-o", "m.json")
        self.assert_fails(2, '--date: got "2026-13-01", expected a date such as "2026-11-21"',
                          "fit-nccl", SWEEP, "--date", "2026-13-01", "-o", "m.json")

    def test_nothing_to_fit(self):
        (self.folder / "s.csv").write_text(HEADER + "a,b,H100,8,1,8,n,all_reduce,1048576,40\n")
        self.assert_fails(3, "sweep: got no all-gather or reduce-scatter of 64 KiB to 16 GiB on a known fabric, "
                          "expected some to fit to", "fit-nccl", "s.csv")


if __name__ == "__main__":
    main()
