"""What scripts/accuracy.py keeps: fits of the same sources and table, and left-out rows of the report before."""

import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "accuracy.py"
sys.path.insert(0, str(SCRIPT.parent))
SPEC = importlib.util.spec_from_file_location("accuracy", SCRIPT)
accuracy = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(accuracy)
left_out = importlib.import_module("accuracy_left_out")
study = importlib.import_module("left_out")
kernels = importlib.import_module("kernels_table")

REPORT = """| what | goal | reached |  |
| --- | --- | --- | --- |
| step time, llmfoundry, left out, mean | 2.5 % | 2.47 % | met |
| step time, fmsaccel, left out, mean | 8.0 % | 5.84 % | met |

| source | rows | mean | median | p90 | worst | bias |
| --- | --- | --- | --- | --- | --- | --- |
| llmfoundry | 170 | 2.5 % | 1.5 % | 5.0 % | 25.9 % | -1.0 % |
| fmsaccel | 34 | 5.8 % | 4.2 % | 10.7 % | 30.6 % | +0.4 % |

| GPU | framework | left out | rows | mean | median | p90 | worst | bias |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| h100-80 | composer | MPT-3B | 15 | 1.6 % | 0.9 % | 4.0 % | 6.0 % | -0.5 % |
| a100-80 | hf | Llama3-8B | 11 | 8.3 % | 2.0 % | 23.3 % | 30.6 % | -6.4 % |
"""


class KeptFits(unittest.TestCase):

    def setUp(self):
        self.home = os.getcwd()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, self.home)
        os.chdir(folder.name)
        self.addCleanup(setattr, accuracy, "bench_command", accuracy.bench_command)
        accuracy.bench_command = lambda program, name: [program, name]
        profiles = pathlib.Path("topologies/profiles")
        profiles.mkdir(parents=True)
        (profiles / "base.json").write_text("{}")
        (profiles / "fitted.json").write_text('{"fit": {}}')
        pathlib.Path("simulator").mkdir()
        pathlib.Path("simulator/engine.cc").write_text("1")
        pathlib.Path("runs.csv").write_text("id\n")
        program = pathlib.Path("program")
        program.write_text('#!/bin/sh\necho "$*" >> calls\necho "{}"\n')
        program.chmod(0o755)

    def calls(self, *flags):
        """How often the program runs for these flags."""
        before = self.count()
        self.assertEqual(accuracy.kept_fit("./program", pathlib.Path("kept"), "runs.csv", list(flags)), {})
        return self.count() - before

    def count(self):
        return len(pathlib.Path("calls").read_text().splitlines()) if pathlib.Path("calls").exists() else 0

    def test_a_fit_is_made_once(self):
        self.assertEqual(self.calls("--source", "a"), 1)
        self.assertEqual(pathlib.Path("calls").read_text(), "fit runs.csv --source a --json\n")
        self.assertEqual(self.calls("--source", "a"), 0)
        self.assertEqual(self.calls("--source", "b"), 1)

    def test_it_is_made_again_where_what_it_reads_has_changed(self):
        self.assertEqual(self.calls(), 1)
        for path in ("runs.csv", "simulator/engine.cc", "topologies/profiles/base.json"):
            with open(path, "a", encoding="utf-8") as file:
                file.write("\n")
            self.assertEqual((path, self.calls()), (path, 1))
            self.assertEqual((path, self.calls()), (path, 0))
        # No fit starts from what fits have written.
        pathlib.Path("topologies/profiles/fitted.json").write_text('{"fit": {"runs": 1}}')
        self.assertEqual(self.calls(), 0)

    def test_a_fit_that_fails_leaves_nothing(self):
        pathlib.Path("program").write_text("#!/bin/sh\necho '{'\nexit 1\n")
        with self.assertRaises(accuracy.subprocess.CalledProcessError):
            self.calls()
        self.assertEqual(list(pathlib.Path("kept").iterdir()), [])

    def test_rows_of_the_report_before(self):
        pathlib.Path("report.md").write_text(REPORT)
        before = accuracy.Before("report.md", ["llmfoundry"])
        self.assertEqual(before.goals, [["step time, llmfoundry, left out, mean", "2.5 %", "2.47 %", "met"]])
        self.assertEqual(before.by_source, [["llmfoundry", "170", "2.5 %", "1.5 %", "5.0 %", "25.9 %", "-1.0 %"]])
        self.assertEqual(before.by_model,
                         [["h100-80", "composer", "MPT-3B", "15", "1.6 %", "0.9 %", "4.0 %", "6.0 %", "-0.5 %"]])
        self.assertIn("made again: llmfoundry.", before.note)
        none = accuracy.Before("report.md", [])
        self.assertEqual((none.goals, none.by_source, none.by_model, none.note), ([], [], [], ""))


class Statistics(unittest.TestCase):

    def test_a_source_in_two_fits(self):
        fits = [{"left_out_rows": [{"id": "a-1", "error": -0.1}, {"id": "b-1", "error": 0.5}], "left_out": []},
                {"left_out_rows": [{"id": "a-2", "error": 0.3}], "left_out": []}]
        by_source, by_model = accuracy.left_out_section(fits)
        self.assertEqual(by_model, [])
        self.assertEqual(sorted(by_source), ["a", "b"])
        # |errors| 0.1 and 0.3; their mean -0.1 + 0.3 over 2; p90 at 0.9 of the way between them.
        for key, value in {"rows": 2, "mean": 0.2, "median": 0.2, "p90": 0.28, "max": 0.3, "bias": 0.1}.items():
            self.assertAlmostEqual(by_source["a"][key], value)

    def test_numbers_are_those_of_the_script_that_writes_profiles(self):
        text = (SCRIPT.parent / "fit_profiles.sh").read_text().replace("\n", "").replace(" ", "")
        for flags in accuracy.FITS:
            if "--numbers" in flags:
                self.assertIn(flags[-1], text)
            if "--gpu-class" in flags:
                self.assertIn("--gpu-class" + flags[flags.index("--gpu-class") + 1], text)


def log_line(commit, what, group, mean, **more):
    return {"date": "2026-11-28", "commit": commit, "left_out": what, "group": group, "rows": "3", "mean": mean, "median": mean, "p90": mean,
            "bias": mean, "inside_band": "", "half_width": "", "left_of_error": "", **more}


class LeftOutSections(unittest.TestCase):

    def test_the_first_and_the_last_line_of_a_group_count(self):
        log = [log_line("a", "source", "all", "0.20"), log_line("b", "source", "all", "0.08"), log_line("c", "source", "all", "0.04"),
               log_line("c", "size", "all", "0.03")]
        self.assertIn("| all | 3 | 20.0 % | 20.0 % | 20.0 % | 4.0 % |", left_out.before_and_now(log, "source"))
        self.assertIn("| all | 3 |  |  |  | 3.0 % |", left_out.before_and_now(log, "size"))
        self.assertIn("mean 4.0 % (goal 5.0 %, met), median 4.0 % (goal 2.5 %, **missed**)", left_out.goal_lines(log, "source"))

    def test_half_of_an_error_is_enough(self):
        log = [log_line("a", what, source, mean, left_of_error=left) for source, left in (("one", "0.5"), ("two", "0.51"))
               for what, mean in (("row", "0.05"), ("row, before", "0.1"))]
        halved, sources, text = left_out.one_row_table(log)
        self.assertEqual((halved, sources), (1, 2))
        self.assertIn("| one | 3 | 10.0 % | 5.0 % | +50.0 % |", text)

    def test_a_bar_per_group(self):
        svg = left_out.picture([("steps", "fit", "a <b>", 4, 0.1), ("kernels", "test", "c", 2, 0.9)])
        self.assertIn("a &lt;b&gt; (4)", svg)
        self.assertIn('width="105.0"', svg)  # a tenth of what 40 % are
        self.assertIn('width="420.0"', svg)  # no longer than the axis
        self.assertIn("90.0 %", svg)


class KernelsTable(unittest.TestCase):

    def test_the_page_has_the_table(self):
        page = kernels.PAGE.read_text(encoding="utf-8")
        self.assertTrue(kernels.current(page) == page, "run scripts/kernels_table.py")
        without = page.replace(kernels.line(kernels.read()[0]), "")
        self.assertTrue(without != page and kernels.current(without) == page)

    def test_a_line(self):
        row = dict(chip="A", library="L", op="norm", rows="3", mean_before="0.2", bias_before="-0.1", mean="0.05", bias="0.014", goal="0.12")
        self.assertEqual(kernels.line(row), "| A, L | norm | 3 | 20.0 % (-10.0) | 5.0 % (+1.4) | 12 % |\n")
        self.assertEqual(kernels.line({**row, "mean": "0.2", "bias": "-0.1", "goal": ""}), "| A, L | norm | 3 | 20.0 % (-10.0) | the same | |\n")

    def test_bars_are_the_same_rows(self):
        self.assertEqual([row[:2] for row in left_out.kernel_rows()], [(f"{r['chip']}, {r['library']}", r["op"]) for r in kernels.read()])
        self.assertAlmostEqual(left_out.kernel_rows()[0][3], 0.089)


class NewRuns(unittest.TestCase):

    def test_deviations_of_a_balanced_table(self):
        # Two sources of two rows: variances within 0.5 and 0.5, means 2 and -1: (4 + 1) / 2 less half of 0.5.
        rows = [("a", "p", 1.5), ("a", "p", 2.5), ("b", "p", -0.5), ("b", "p", -1.5)]
        of_sources, of_shapes = study.new_run_spread(rows)
        self.assertAlmostEqual(of_shapes ** 2, 0.5)
        self.assertAlmostEqual(of_sources ** 2, 2.25)

    def test_no_difference_between_sources_is_none(self):
        self.assertEqual(study.new_run_spread([("a", "p", 1), ("a", "p", -1)])[0], 0)

    def test_a_band_does_not_know_the_source_that_it_is_for(self):
        rows = [("a", "p", 0.1), ("a", "p", -0.1), ("b", "p", 9), ("b", "p", -9)]
        self.assertAlmostEqual(study.band_of_others(rows, "b"), 1.2816 * 0.02 ** 0.5)


class LeftOutFolder(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        source = pathlib.Path(folder.name) / "source"
        source.mkdir()
        number = {"value": 0.5, "kind": "fitted", "source": "shardwright fit runs.csv --source x"}
        for name, profile in {"base": {"compute": {"a": number, "b": number}}, "one": {"extends": "base", "compute": {"a": {"value": 0.7}}},
                              "two": {"extends": "one"}, "other": {}}.items():
            (source / (name + ".json")).write_text(json.dumps(profile))
        self.folder = study.Folder(source, pathlib.Path(folder.name) / "copy")

    def test_what_extends_a_profile_goes_with_it(self):
        self.folder.remove(["one"])
        self.assertEqual(self.folder.names(), ["base", "other"])

    def test_a_whole_profile_has_what_it_extends(self):
        self.assertEqual({key: number["value"] for key, number in self.folder.whole("two")["compute"].items()}, {"a": 0.7, "b": 0.5})

    def test_a_profile_for_gpus_without_runs_follows_its_chip(self):
        for name, profile in {"h100-80-torch": {}, "h100-96-torch": {}, "hopper-torch": {"extends": "h100-80-torch"}}.items():
            self.folder.write(name, profile)
        study.redirect(self.folder, ["h100-80-torch"], ["h100-96-torch"])
        self.assertEqual(self.folder.read("hopper-torch")["extends"], "h100-96-torch")
        self.assertNotIn("h100-80-torch", self.folder.names())

    def test_recipes_write_what_their_flags_say(self):
        mi = {"fit": {"gpu": "mi300x"}, "compute": {"a": {"source": "shardwright fit runs.csv --source torchtitan,torchao,ibmfsdp,torchtune"}}}
        of_it = [study.is_of(mi, recipe) for recipe in study.recipes()]
        self.assertEqual(of_it, [False, False, False, False, True, False, False])
        for text, seconds in ((0.3, 0.3), ("9.7 us", 9.7e-6), ("5 ms", 5e-3)):
            self.assertAlmostEqual(study.seconds(text), seconds)


if __name__ == "__main__":
    unittest.main()
