"""How fast the page of `shardwright report` is with 50,000 spans: first paint, first drawing, frames per second while zooming.

    build/venv/bin/python bench/report_page.py build/shardwright

Headless Chromium without a GPU. Wall times and the CPU times of the page's own process, since other programs may be running.
"""

import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PLAN = ["plan", "--model", "llama-3-70b", "--cluster", "dgx-h100", "--nodes", "8", "--seq", "4096", "--recompute", "full",
        "--accumulation", "12", "-o", "plan.json"]
REPETITIONS = 5
# Zooms in and out by wheel events, one per frame, and says how long each frame took.
ZOOM = """
const done = arguments[0], canvas = document.getElementById("spans"), box = canvas.getBoundingClientRect();
canvas.focus();
const times = [];
let last = performance.now(), left = 120;
const frame = (now) => {
  times.push(now - last);
  last = now;
  if (left-- === 0) { done(times.slice(1)); return; }
  canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: left >= 60 ? -60 : 60, clientX: box.left + 500, clientY: box.top + 40,
    bubbles: true, cancelable: true}));
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""
DRAW = """
const times = [];
for (let i = 0; i < 50; ++i) {
  const begin = performance.now();
  shardwright.timeline.draw();
  shardwright.memory.draw();
  times.push(performance.now() - begin);
}
return times;
"""


def renderer_cpu_seconds(driver):
    """CPU time of all renderer processes of this browser."""
    total, tick = 0, os.sysconf("SC_CLK_TCK")
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents[int(entry.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / tick,
                                            (entry / "cmdline").read_bytes())
            except OSError:
                continue
    for pid, (parent, seconds, words) in parents.items():
        while parent in parents and parent != driver.service.process.pid:
            parent = parents[parent][0]
        if parent == driver.service.process.pid and b"--type=renderer" in words:
            total += seconds
    return total


def measure(page):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1500,1000"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get("about:blank")
        before = renderer_cpu_seconds(driver)
        driver.get(page)
        opening = renderer_cpu_seconds(driver) - before
        paint = driver.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
        drawn = driver.execute_script("return performance.getEntriesByName('shardwright-drawn')[0].startTime")
        ops = driver.execute_script("return shardwright.count")
        frames = driver.execute_async_script(ZOOM)
        drawing = driver.execute_script(DRAW)
        return ops, paint, drawn, opening * 1000, frames, drawing
    finally:
        driver.quit()


def main():
    program = str(pathlib.Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program, *PLAN], cwd=folder, check=True, capture_output=True)
        subprocess.run([program, "report", "plan.json", "-o", "report.html"], cwd=folder, check=True)
        page = pathlib.Path(folder) / "report.html"
        rows = [measure(page.as_uri()) for _ in range(REPETITIONS)]
        print(f"{rows[0][0]} ops, {page.stat().st_size / 1e6:.1f} MB, load average {os.getloadavg()[0]:.1f}")
        for name, index in (("first paint, wall", 1), ("all drawn, wall", 2), ("opening, CPU of the page's process", 3)):
            values = sorted(row[index] for row in rows)
            print(f"{name:36} median {statistics.median(values):7.0f} ms, {values[0]:.0f} to {values[-1]:.0f}")
        frames = [time for row in rows for time in row[4]]
        print(f"{'zoom, frames per second, wall':36} median {1000 / statistics.median(frames):7.0f}, "
              f"slowest twentieth {1000 / sorted(frames)[len(frames) * 19 // 20]:.0f}")
        drawing = [time for row in rows for time in row[5]]
        print(f"{'drawing the whole step, wall':36} median {statistics.median(drawing):7.1f} ms")


if __name__ == "__main__":
    main()
