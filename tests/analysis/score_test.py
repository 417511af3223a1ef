"""Which published rows are only scored: no row is in two sets, no file has changed, and the page shows every scoring."""

import copy
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import score as script


class Score(unittest.TestCase):

    def test_files_are_those_of_the_protocol(self):
        self.assertEqual(script.changed_files(script.protocol()), [])

    def test_no_row_is_in_two_sets(self):
        self.assertEqual(script.overlaps(script.protocol()), [])

    def test_the_page_shows_every_scoring(self):
        self.assertEqual(script.PAGE.read_text(encoding="utf-8"), script.page(script.protocol(), script.log_lines()))

    def test_a_changed_row_is_seen(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            rules = script.protocol()
            for name in rules["sha256"]:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes((ROOT / name).read_bytes().replace(b"-013,", b"-113,"))
            self.assertIn("bench/published/test_runs.csv", script.changed_files(rules, root))

    def test_a_source_in_two_sets_is_seen(self):
        rules = copy.deepcopy(script.protocol())
        test = next(s for s in rules["sets"] if s["name"] == "test")
        next(s for s in rules["sets"] if s["name"] == "validation").update(file=test["file"], sources=["dgxc-fsdp"])
        self.assertIn("validation and test: dgxc-fsdp-013", script.overlaps(rules))

    def test_a_scoring_is_what_validate_says(self):
        step = {"rows": 2, "mean": 0.15, "median": 0.15, "p90": 0.2, "bias": -0.05}
        group = {"source": "a", "gpu_class": None, "step_time": step, "band_coverage": 0.5, "band_median": 0.1}
        lines = script.scoring({"groups": [group], "pooled": {**group, "source": None}}, "2026-01-02", "abc")
        self.assertEqual([line["source"] for line in lines], ["a", "all"])
        self.assertEqual(lines[0]["bias"], "-0.0500")
        self.assertIn("| 2026-01-02 | abc | a | all | 2 | 15.0 % | 15.0 % | 20.0 % | -5.0 % | 50.0 % | 10.0 % |",
                      script.page(script.protocol(), lines))


if __name__ == "__main__":
    unittest.main()
