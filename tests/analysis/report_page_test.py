"""The page of `shardwright report` in a real Chromium: it opens, zooms, searches, prints, and a hostile name does nothing."""

import gzip
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "web"))

import chromium
from chromium import HOSTILE
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

PROGRAM = sys.argv.pop(1)


def program(*arguments, folder):
    result = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


class Page(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        program("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "-o", "plan.json", folder=cls.folder)
        program("simulate", "plan.json", "--trace", "sim.json.gz", folder=cls.folder)
        program("report", "plan.json", "sim.json.gz", "-o", "report.html", folder=cls.folder)
        plan = json.loads((cls.folder / "plan.json").read_text())
        plan["plan"]["units"][3]["name"] = HOSTILE
        (cls.folder / "hostile.json").write_text(json.dumps(plan))
        program("report", "hostile.json", "-o", "hostile.html", folder=cls.folder)
        cls.driver = chromium.start(width=1200, height=1400)
        cls.addClassCleanup(cls.driver.quit)

    def open(self, name):
        self.driver.get((self.folder / name).as_uri())
        self.assertEqual(self.driver.get_log("browser"), [])

    def run_script(self, text):
        return self.driver.execute_script("return " + text)

    def domain(self):
        return self.run_script("shardwright.timeline.state.x.domain()")

    def setUp(self):
        self.open("report.html")

    def tearDown(self):
        self.assertEqual(self.driver.get_log("browser"), [])

    def test_it_shows_the_step(self):
        figures = json.loads(program("simulate", "plan.json", "--json", folder=self.folder))
        begin, end = self.domain()
        self.assertLessEqual(begin, 0)
        self.assertGreaterEqual(end, figures["step_time_s"] * 1e9 * 0.999)
        self.assertLess(end, figures["step_time_s"] * 1e9 * 1.1)
        self.assertIn("Fits", self.driver.find_element(By.ID, "verdict").text)
        # Something of every colour in use is on the canvas.
        colours = self.run_script("""(() => {
            const canvas = document.getElementById('spans');
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let i = 0; i < pixels.length; i += 4) seen.add(`${pixels[i]},${pixels[i+1]},${pixels[i+2]}`);
            return [...seen];
        })()""")
        for colour in ("86,180,233", "0,114,178", "0,158,115"):  # forward, backward, optimizer
            self.assertIn(colour, colours)

    def test_bands_say_where_compute_is(self):
        """Above the streams stand pass and unit, with their names."""
        program("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "--accumulation", "2", "--recompute", "full",
                "-o", "two.json", folder=self.folder)
        program("report", "two.json", "-o", "two.html", folder=self.folder)
        for name, passes in (("report.html", ["forward", "backward", "optimizer"]),
                             ("two.html", ["micro-batch 1 forward", "micro-batch 1 backward", "micro-batch 2 forward", "micro-batch 2 backward",
                                           "optimizer"])):
            self.open(name)
            bands = self.run_script("shardwright.lanes.slice(0, 2).map((lane) => [lane.name, lane.labels, [...lane.start], [...lane.end]])")
            self.assertEqual([band[0] for band in bands], ["pass", "unit"])
            self.assertEqual(bands[0][1], passes)
            self.assertEqual(set(bands[1][1]), {"root"} | {f"transformer.h.{i}" for i in range(12)})
            for _, labels, start, end in bands:  # one after another, within the step
                self.assertTrue(all(a < b for a, b in zip(start, end)))
                self.assertTrue(all(b <= a for b, a in zip(end, start[1:])))
        self.assertEqual(bands[1][1][:3], ["root", "transformer.h.0", "transformer.h.1"])

    def test_reserved_is_not_below_allocated(self):
        """Where a plan does not fit, what is reserved was cut at the device's memory: it is not drawn, nor does the caption speak of it."""
        program("plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--seq", "8192", "--micro-batch", "4", "-o", "large.json",
                folder=self.folder)
        program("report", "large.json", "-o", "large.html", folder=self.folder)
        lines = lambda: self.driver.find_element(By.ID, "bytes-lines").text
        self.assertIn("Dotted: reserved by the caching allocator.", lines())
        self.open("large.html")
        self.assertEqual(lines(), "Brown dashes: the limit.")

    def test_a_colour_has_one_meaning(self):
        same = {("optimizer", "optimizer_state"), ("all_gather", "all_gather"), ("reduce_scatter", "reduce_scatter")}
        self.addCleanup(chromium.media, self.driver)
        for scheme in ("light", "dark"):
            chromium.media(self.driver, scheme=scheme)
            pairs = self.run_script("""(() => {
                const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
                const {colours, category_names} = shardwright.data;
                return colours.flatMap((op, i) => category_names.filter((_, k) => css(`--op${i}`) === css(`--memory${k}`)).map((name) => [op, name]));
            })()""")
            self.assertEqual({tuple(pair) for pair in pairs}, same)

    def test_accessible(self):
        """Nothing that axe finds, and no faint text, in light and dark."""
        self.addCleanup(chromium.media, self.driver)
        self.driver.execute_script("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        for scheme in ("light", "dark"):
            chromium.media(self.driver, scheme=scheme)
            self.assertEqual(chromium.accessibility_faults(self.driver), [])
            self.assertEqual(chromium.faint_texts(self.driver), [])

    def test_nothing_is_fetched(self):
        self.assertEqual(self.run_script("performance.getEntriesByType('resource').length"), 0)
        policy = self.driver.find_element(By.CSS_SELECTOR, "meta[http-equiv]").get_attribute("content")
        self.assertIn("default-src 'none'", policy)
        self.assertNotIn("unsafe", policy)

    def test_the_policy_holds(self):
        """A script without a hash does not run."""
        self.driver.execute_script("const s = document.createElement('script'); s.textContent = 'window.broken = 1';"
                                   "document.body.append(s)")
        self.assertIsNone(self.run_script("window.broken || null"))
        self.assertEqual(len([entry for entry in self.driver.get_log("browser")
                              if "Content Security Policy" in entry["message"]]), 1)

    def test_zoom(self):
        canvas = self.driver.find_element(By.ID, "spans")
        begin, end = self.domain()
        canvas.send_keys("+")
        closer = self.domain()
        self.assertAlmostEqual((closer[1] - closer[0]) * 1.5, end - begin, delta=(end - begin) * 1e-6)
        canvas.send_keys(Keys.ARROW_RIGHT)
        self.assertGreater(self.domain()[0], closer[0])
        canvas.send_keys("0")
        self.assertEqual(self.domain(), [begin, end])
        # The wheel belongs to the page until the canvas has the focus.
        self.driver.execute_script("document.activeElement.blur()")
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
        origin = ScrollOrigin.from_element(canvas)
        ActionChains(self.driver).scroll_from_origin(origin, 0, -300).perform()
        self.assertEqual(self.domain(), [begin, end])
        canvas.send_keys("")
        self.driver.execute_script("arguments[0].focus()", canvas)
        ActionChains(self.driver).scroll_from_origin(origin, 0, -300).perform()
        self.assertLess(self.domain()[1] - self.domain()[0], (end - begin) * 0.9)
        self.driver.find_element(By.ID, "zoom-all").click()
        self.assertEqual(self.domain(), [begin, end])

    def test_search(self):
        with gzip.open(self.folder / "sim.json.gz") as file:
            events = json.load(file)["traceEvents"]
        ops = [event["args"] for event in events if "op" in event.get("args", {})]
        last = max(op["step"] for op in ops)
        expected = {op["op"] for op in ops if op["step"] == last and op["body"] == "step" and "h.3." in op["op"]}
        self.assertGreater(len(expected), 10)
        box = self.driver.find_element(By.ID, "search")
        box.send_keys("H.3.")
        self.assertTrue(self.driver.find_element(By.ID, "found").text.startswith(f"{len(expected)} of "))
        box.send_keys(Keys.ENTER)
        self.assertIn(self.driver.find_element(By.CSS_SELECTOR, "#details h3").text, expected)
        box.clear()
        box.send_keys("no such op")
        self.assertTrue(self.driver.find_element(By.ID, "found").text.startswith("0 of "))

    def test_click_and_keys(self):
        canvas = self.driver.find_element(By.ID, "spans")
        op = self.run_script("""(() => {
            const lane = shardwright.lanes.find((lane) => lane.name === 'compute');
            let longest = 0;
            for (let i = 0; i < lane.size; ++i) if (lane.end[i] - lane.start[i] > lane.end[longest] - lane.start[longest]) longest = i;
            const rect = document.getElementById('spans').getBoundingClientRect();
            const x = shardwright.timeline.state.x((lane.start[longest] + lane.end[longest]) / 2);
            return [shardwright.nameOf(lane.op[longest]), x - rect.width / 2, lane.y + 11 - rect.height / 2];
        })()""")
        ActionChains(self.driver).move_to_element_with_offset(canvas, round(op[1]), round(op[2])).click().perform()
        self.assertEqual(self.driver.find_element(By.CSS_SELECTOR, "#details h3").text, op[0])
        self.assertIn("simulated: runs", self.driver.find_element(By.ID, "details").text)
        self.assertIn("simulated at", self.driver.find_element(By.ID, "bytes-at").text)
        ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(Keys.ARROW_LEFT).key_up(Keys.SHIFT).perform()
        self.assertNotEqual(self.driver.find_element(By.CSS_SELECTOR, "#details h3").text, op[0])
        canvas.send_keys(Keys.ENTER)
        self.assertLess(self.domain()[1] - self.domain()[0], 0.5 * self.run_script("shardwright.range[1]"))
        canvas.send_keys(Keys.ESCAPE)
        self.assertEqual(self.driver.find_elements(By.CSS_SELECTOR, "#details h3"), [])

    def test_hostile_names(self):
        self.open("hostile.html")
        self.assertIsNone(self.run_script("window.broken || null"))
        self.assertEqual(self.run_script("document.images.length"), 0)
        self.assertIn(HOSTILE, self.run_script("[...document.querySelectorAll('#units th')].map((cell) => cell.textContent)"))
        self.driver.find_element(By.ID, "search").send_keys("window.broken", Keys.ENTER)
        self.assertIn(HOSTILE, self.driver.find_element(By.CSS_SELECTOR, "#details h3").text)
        self.assertIsNone(self.run_script("window.broken || null"))

    def test_a_recording_of_pytorchs_profiler(self):
        """Its kernels stand below the simulation, with their own names."""
        events = []
        for step in range(2):
            begin = 1000 * step
            events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1, "ts": begin, "dur": 1000})
            for i, (name, stream) in enumerate(((f"gemm {HOSTILE}", 7), ("ncclDevKernel_AllGather", 9))):
                launch = {"correlation": 10 * step + i + 1}
                events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
                               "ts": begin + 10 * i + 1, "dur": 2, "args": launch})
                events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin + 100 + 200 * i,
                               "dur": 300, "args": {"device": 0, "stream": stream, **launch}})
        (self.folder / "kineto.json").write_text(json.dumps({"traceEvents": events}))
        program("report", "plan.json", "kineto.json", "-o", "kineto.html", folder=self.folder)
        self.open("kineto.html")
        lanes = self.run_script("shardwright.lanes.filter((lane) => lane.recording.name === 'measured').map((lane) => [lane.name, lane.size])")
        self.assertEqual(lanes, [["compute", 1], ["gather", 1], ["host", 2]])
        self.assertEqual(self.run_script("shardwright.data.recordings[1].period"), 1_000_000)  # from end to end of the gemm
        # A step was to take longer: the cards and the tables say what was measured, next to what was simulated.
        figures = json.loads(program("simulate", "plan.json", "--json", folder=self.folder))
        cards = self.cards()
        self.assertEqual(cards["step time, measured"], "1 ms")
        self.assertEqual(cards["tokens/s per GPU, simulated"], str(round(figures["tokens_per_s_per_gpu"])))
        self.assertEqual(cards["tokens/s per GPU, measured"], str(round(figures["tokens_per_s_per_gpu"] * figures["step_time_s"] / 1e-3)))
        self.assertEqual(self.table("At the peak of any step")[0], ["category", "simulated", "measured"])
        self.assertEqual({row[2] for row in self.table("At the peak of any step")[1:]}, {""})  # memory was not recorded
        self.assertTrue(self.driver.find_element(By.ID, "comparison").is_displayed())
        parts = self.table("The step, seen from the compute stream: largest difference first")
        self.assertEqual(parts[1:], self.run_script("""shardwright.data.comparison.parts.map((part) => [part.name, units.formatSeconds(part.simulated_s),
            units.formatSeconds(part.measured_s), (part.measured_s < part.simulated_s ? '-' : '+') +
            units.formatSeconds(Math.abs(part.measured_s - part.simulated_s))])"""))
        self.driver.find_element(By.ID, "search").send_keys("gemm", Keys.ENTER)
        self.assertIn(HOSTILE, self.driver.find_element(By.CSS_SELECTOR, "#details h3").text)
        self.assertIn("300 µs, from 700 µs", self.driver.find_element(By.ID, "details").text)
        self.driver.find_element(By.ID, "spans").send_keys(Keys.ENTER)
        self.assertGreaterEqual(self.domain()[0], 0)
        self.assertIsNone(self.run_script("window.broken || null"))

    def test_considered_plans(self):
        search = {"schema": "shardwright-plan-summary", "family": "full", "label": "slow", "step_time_s": 0.2,
                  "memory": {"allocated": 2**32, "outside": 0}, "rejected": [
                      {"family": "ddp", "reason": f"no room {HOSTILE}", "count": 7, "best_time_s": 0.5, "least_deficit_bytes": 2048},
                      {"family": "full", "reason": "bound", "count": 1, "best_time_s": 0, "least_deficit_bytes": 0}], "pareto": [
                      {"family": "ddp", "label": "fast", "step_time_s": 0.1, "memory_bytes": 2**34},
                      {"family": "full", "label": "slow", "step_time_s": 0.2, "memory_bytes": 2**32}]}
        (self.folder / "search.json").write_text(json.dumps(search))
        sweep = {"schema": "shardwright-sweep", "rows": [{"error": "x"}, {"nodes": 2, "micro_batch": 1, "sequence": 64, "shard_size": 4,
                                                                          "bandwidth_factor": 0.5, "fits": False, "step_time_s": 0.25, "device_bytes": 1024}]}
        (self.folder / "sweep.json").write_text(json.dumps(sweep))
        program("report", "plan.json", "--search", "search.json", "--what-if", "sweep.json", "-o", "considered.html", folder=self.folder)
        self.open("considered.html")
        dots = [(float(dot.get_attribute("cx")), float(dot.get_attribute("cy")), dot.get_attribute("class"))
                for dot in self.driver.find_elements(By.CSS_SELECTOR, "#pareto circle")]
        self.assertEqual([dot[2] for dot in dots], ["dot", "dot chosen"])
        self.assertLess(dots[0][0], dots[1][0])  # faster is further left
        self.assertLess(dots[0][1], dots[1][1])  # more memory is further up
        self.assertEqual(self.table("Not chosen"), [["family", "reason", "plans", "best", "missing at least"],
                                                    ["ddp", f"no room {HOSTILE}", "7", "500 ms", "2 KiB"], ["full", "bound", "1", "", ""]])
        self.assertEqual(self.table("From fast to frugal")[1:], [["ddp: fast", "100 ms", "16 GiB", ""], ["full: slow", "200 ms", "4 GiB", "chosen"]])
        self.assertEqual(self.table("What if")[1:], [["nodes 2, micro-batch 1, sequence 64, shard 4, bandwidth x 0.5 (does not fit)", "250 ms", "1 KiB", ""]])

    def test_a_link_to_the_page(self):
        """The plan is in the part of the link that no server sees; what is no address of a page is no link."""
        link = self.driver.find_element(By.ID, "to-page")
        self.assertFalse(link.is_displayed())
        program("report", "plan.json", "--page", "https://example.org/a/?b=1#c", "-o", "linked.html", folder=self.folder)
        self.open("linked.html")
        address, _, fragment = self.driver.find_element(By.ID, "to-page").get_attribute("href").partition("#")
        self.assertEqual(address, "https://example.org/a/?b=1")
        plan = dict(urllib.parse.parse_qsl(fragment))["page-plan-file"]
        self.assertEqual(json.loads(plan), json.loads((self.folder / "plan.json").read_text()))
        # The program refuses such an address (tests/cli/comfort_test.py); a page that has one anyway does not follow it.
        text = (self.folder / "linked.html").read_text()
        self.assertEqual(text.count("https://example.org/a/?b=1#c"), 1)
        (self.folder / "hostile_link.html").write_text(text.replace("https://example.org/a/?b=1#c", "javascript:window.broken=1"))
        self.open("hostile_link.html")
        self.assertFalse(self.driver.find_element(By.ID, "to-page").is_displayed())

    def test_dark(self):
        light = self.run_script("getComputedStyle(document.body).backgroundColor")
        chromium.media(self.driver, scheme="dark")
        self.addCleanup(chromium.media, self.driver)
        self.assertNotEqual(self.run_script("getComputedStyle(document.body).backgroundColor"), light)

    def test_print(self):
        """On paper stand the pictures, with finer dots, and the tables, without what answers to a hand."""
        dots = lambda: self.run_script("[...document.querySelectorAll('canvas')].map((canvas) => canvas.width / canvas.clientWidth)")
        self.assertEqual(dots(), [1, 1])
        chromium.media(self.driver, "print")
        self.addCleanup(chromium.media, self.driver)
        until = time.monotonic() + 10  # the browser tells the page in its own time
        while round(dots()[-1]) != 4 and time.monotonic() < until:
            time.sleep(0.05)
        self.assertEqual([round(ratio) for ratio in dots()], [4, 4])
        shown = lambda selector: [part.is_displayed() for part in self.driver.find_elements(By.CSS_SELECTOR, selector)]
        self.assertEqual(shown("canvas, figure svg"), [True] * 3)
        self.assertEqual(set(shown(".tools, .keys, #details")), {False})
        self.assertGreaterEqual(sum(shown("table")), 4)

    def test_without_scripts(self):
        """The verdict, and what the page needs for the rest."""
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        self.addCleanup(self.driver.execute_cdp_cmd, "Emulation.setScriptExecutionDisabled", {"value": False})
        self.driver.get((self.folder / "report.html").as_uri())
        self.assertIn("Fits", self.driver.find_element(By.ID, "verdict").text)
        self.assertIn("Without JavaScript", self.driver.find_element(By.TAG_NAME, "noscript").text)
        self.assertFalse(self.driver.find_element(By.TAG_NAME, "main").is_displayed())

    def table(self, caption):
        """The cells of the table of this caption, row by row, its head first."""
        return self.driver.execute_script("""
            const table = [...document.querySelectorAll('table')].find((one) => one.caption !== null && one.caption.textContent === arguments[0]);
            return [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent));""", caption)

    def cards(self):
        return dict(self.run_script("[...document.querySelectorAll('#figures div')].map((card) => [...card.children].map((part) => part.textContent))"))

    def test_figures_as_the_program_writes_them(self):
        """Cards and tables have the texts of `simulate`: the same digits and units, down to the smallest."""
        text = program("simulate", "plan.json", folder=self.folder)
        figures = json.loads(program("simulate", "plan.json", "--json", folder=self.folder))
        cards = self.cards()
        for name, card in (("step time", "step time"), ("allocated", "allocated at the peak"), ("outside the allocator", "outside the allocator")):
            self.assertRegex(text, rf"{name} +{re.escape(cards[card])}\n")
        self.assertEqual(cards["tokens/s per GPU"], str(round(figures["tokens_per_s_per_gpu"])))
        peaks = self.table("At the peak of any step")
        self.assertEqual([row[0] for row in peaks[1:]], [name.replace("_", " ") for name, size in figures["memory"]["at_peak"].items() if size] + ["all"])
        for name, size in peaks[1:-1]:
            self.assertRegex(text, rf"{name.replace(' ', '_')} +{re.escape(size)}\n")
        waits = [row for row in self.table("What the compute stream waited for, in the end") if row[1] != "1 ns"]  # the trace's last digit
        self.assertEqual([row[0].split()[0] for row in waits[1:]], [row["op"] for row in figures["time"]["compute_waits_for"][:8]])
        self.assertRegex(text, rf"{re.escape(waits[1][1])} +{re.escape(waits[1][2])} +{re.escape(waits[1][0])}")
        # From core/quantity_test.cc: the largest unit of which there is one, three digits, no zeros behind them.
        for call, expected in (("formatSeconds(0)", "0 s"), ("formatSeconds(0.0009996)", "1 ms"), ("formatSeconds(119.4)", "119 s"), ("formatSeconds(300)", "5 min"),
                               ("formatBytes(85094039552)", "79.2 GiB"), ("formatBytes(2 ** 40)", "1 TiB"), ("formatSeconds(9000)", "2.5 h"), ("formatPercent(0.12)", "12 %"), ("formatPercent(0.12345)", "12.3 %")):
            self.assertEqual(self.run_script(f"units.{call}"), expected, call)

    def test_size(self):
        page = (self.folder / "report.html").read_bytes()
        begin = page.index(b'id="data">')
        data = page.index(b"</script>", begin) - begin
        self.assertLess(len(page) - data, 1_000_000)


if __name__ == "__main__":
    unittest.main()
