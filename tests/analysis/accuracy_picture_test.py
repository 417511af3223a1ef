"""The picture of accuracy in the README is the one that its script makes of what the program predicts today."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import accuracy_picture as script


class Picture(unittest.TestCase):

    def test_it_is_current(self):
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder) / "accuracy.svg"
            subprocess.run([sys.executable, "-B", str(ROOT / "scripts/accuracy_picture.py"), PROGRAM, str(made)], check=True)
            self.assertEqual(made.read_text(encoding="utf-8"), (ROOT / "docs/images/accuracy.svg").read_text(encoding="utf-8"))

    def test_where_dots_stand(self):
        # Times from 0.1 to 10 s are two decades of 760 pixels, errors of -20 and +10 % three steps of 360.
        points = [(1.0, 0.8, False), (0.1, 0.11, True), (10.0, 10.0, False)]
        axes = script.Axes(points)
        self.assertAlmostEqual(axes.x(1.0), 70 + 380)
        self.assertAlmostEqual(axes.y(-0.2), 20 + 360)
        self.assertAlmostEqual(axes.y(0.0), 20 + 120)
        text = script.picture(points)
        self.assertIn('<circle cx="450.0" cy="380.0" r="3.5" fill="#b3420e"', text)
        self.assertIn('fill="none" stroke="#1f5fa8"', text)
        self.assertIn("1 runs with a profile fitted to runs of this table: median error 10.0 %", text)
        self.assertIn("2 runs of stacks to which nothing was fitted: median error 10.0 %", text)

    def test_what_counts_as_fitted(self):
        self.assertTrue(script.is_fitted("h100-80-torch"))
        self.assertFalse(script.is_fitted("ada-torch-eager"))


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
