"""Which published collectives numbers are fitted to: the rule, by hand, and that nobody has moved a row."""

import json
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import collective_sets as script


def sweep(source, system, count, gpu="H100", nodes="1", network="NVLink", op="all_reduce"):
    return [{"source": source, "system": system, "gpu": gpu, "nodes": nodes, "network": network, "op": op, "bytes": str(2**i)}
            for i in range(count)]


class CollectiveSets(unittest.TestCase):

    def test_table_and_split_are_those_that_were_fixed(self):
        chosen = script.sets_of(script.read_table()[1])
        self.assertEqual(json.loads(script.PROTOCOL.read_text(encoding="utf-8"))["sha256"], script.hashes(chosen))
        self.assertEqual({name: chosen.count(name) for name in script.SETS}, {"fit": 365, "validation": 132, "test": 261})

    def test_a_single_report_is_split_by_size(self):
        self.assertEqual(script.sets_of(sweep("a", "x", 10)), ["fit", "validation", "fit", "test"] * 2 + ["fit", "validation"])

    def test_small_reports_are_only_scored(self):
        chosen = script.sets_of(sweep("a", "x", 10) + sweep("b", "y", 9))
        self.assertEqual(chosen[10:], ["test"] * 9)
        self.assertIn("validation", chosen[:10])

    def test_of_two_reports_one_is_scored_and_of_three_one_is_for_validation(self):
        # SHA-256 of "a|x" begins with 4a, of "b|y" with 22, of "c|z" with d3.
        a, b, c = sweep("a", "x", 10), sweep("b", "y", 10), sweep("c", "z", 10)
        self.assertEqual(script.sets_of(a + b), ["test"] * 10 + ["fit"] * 10)
        self.assertEqual(script.sets_of(a + b + c), ["validation"] * 10 + ["fit"] * 10 + ["test"] * 10)

    def test_times_do_not_matter(self):
        columns, rows = script.read_table()
        self.assertIn("time_us", columns)
        before = script.sets_of(rows)
        for row in rows:
            row["time_us"] = row["algbw_GBs"] = row["busbw_GBs"] = "1"
        self.assertEqual(script.sets_of(rows), before)

    def test_fabrics(self):
        for row, fabric in (({"nodes": "1", "gpu": "GB200", "network": "NVLink5"}, "blackwell node"),
                            ({"nodes": "18", "gpu": "GB200", "network": "NVL72 (one NVLink domain)"}, "blackwell node"),
                            ({"nodes": "2", "gpu": "H100", "network": "EFAv2 32x100Gb/s"}, "efav2"),
                            ({"nodes": "2", "gpu": "H100", "network": "InfiniBand (rate unstated)"}, "ib"),
                            ({"nodes": "2", "gpu": "H100", "network": "GPUDirect-TCPXO 8x200Gb/s"}, "tcpxo")):
            self.assertEqual(script.fabric_of(row), fabric)


if __name__ == "__main__":
    unittest.main()
