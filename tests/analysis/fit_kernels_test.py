"""scripts/fit_kernels.py finds the number that made a table, on the rows that it reads, whatever the others say."""

import csv
import importlib
import json
import math
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
script = importlib.import_module("fit_kernels")
script.bench_command = lambda program, name: [program, name]

# Predicts n microseconds at a rate of 1.
PROGRAM = """#!{python}
import csv, json, sys
rate = json.load(open(sys.argv[4]))["compute"]["rate"]["value"]
rows = list(csv.DictReader(open(sys.argv[2])))
print(json.dumps({{"rows": [{{"error": float(row["n"]) / rate / float(row["time_us"]) - 1}} for row in rows]}}))
"""


class FitKernels(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.program = self.folder / "program"
        self.program.write_text(PROGRAM.format(python=sys.executable))
        self.program.chmod(0o755)

    def table(self, rate, rate_of_left_out):
        table = script.Table(str(self.program), self.file(rate, rate_of_left_out), [("op", ["a"])])
        self.addCleanup(table.scratch.cleanup)
        return table

    def file(self, rate, rate_of_left_out):
        rows = [{"op": op, "n": n, "time_us": 0, "statistic": "", "source": "", "note": ""} for op in ("a", "b") for n in range(10, 30)]
        for row in rows:
            shape = {key: str(value) for key, value in row.items()}
            row["time_us"] = row["n"] / (rate_of_left_out if script.is_left_out(shape) else rate)
        path = self.folder / "rows.csv"
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path

    def test_the_rate_of_the_rows_that_are_read(self):
        table = self.table(0.5, 0.8)
        self.assertEqual(len(table.rows), 20)
        self.assertTrue(0 < sum(table.left_out) < 20)
        profile = {"compute": {"rate": {"value": 0.3}}}
        script.fit(table, profile, ["compute.rate"])
        self.assertAlmostEqual(profile["compute"]["rate"]["value"], 0.5, delta=0.003)
        left = [e for e, out in zip(table.errors(profile), table.left_out) if out]
        self.assertAlmostEqual(script.mean_error(left), 0.6, delta=0.01)  # predicted at 0.5, measured at 0.8

    def test_a_fraction_stays_one(self):
        table = self.table(3, 3)
        profile = {"compute": {"rate": {"value": 0.5}}}
        script.fit(table, profile, ["compute.rate"])
        self.assertLessEqual(profile["compute"]["rate"]["value"], script.MOST)

    def test_a_hash_of_the_shape_leaves_rows_out(self):
        row = {"gpu": "x", "n": "3", "time_us": "1", "statistic": "mean", "source": "s", "note": "n"}
        self.assertEqual(script.is_left_out(row), script.is_left_out({**row, "time_us": "2", "source": "t", "note": ""}))
        self.assertEqual(len({script.is_left_out({**row, "n": str(n)}) for n in range(20)}), 2)

    def test_rows_left_out_do_not_count(self):
        self.assertEqual(script.loss([0, 9], [False, True]), 1)

    def test_times_keep_their_unit(self):
        number = {"value": "7 us"}
        self.assertTrue(math.isclose(script.value_of(number), 7e-6))
        script.set_value(number, 1.25e-5)
        self.assertEqual(json.dumps(number), '{"value": "12.5 us"}')


if __name__ == "__main__":
    unittest.main()
