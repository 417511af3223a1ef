"""How fast the page is, beside the program on one thread: medians of RUNS in one run (docs/web.md). Run by hand.

    speed.py SHARDWRIGHT [RUNS]
"""

import gzip
import pathlib
import statistics
import subprocess
import sys
import time

import chromium
import page_test_case
import web_test_case

RUNS = int(sys.argv.pop(1)) if len(sys.argv) > 1 else 7
CHOSEN = "#how=choose&model={}&cluster=dgx-h100&nodes={}&seq=8192&micro-batch=1&recompute=full"
SEARCH = "#how=search&model=llama-3-70b&cluster=dgx-h100&nodes=128&seq=8192&global-batch=1024"
NATIVE = ["plan", "--json", "--search", "--explain", "--threads=1", "--model=llama-3-70b", "--cluster=dgx-h100", "--nodes=128", "--seq=8192",
          "--global-batch=1024"]


def usable(driver):
    """Seconds from a cold open until the page takes a question."""
    driver.get("about:blank")
    driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    driver.get(PAGE + CHOSEN.format("gpt2", 1))
    return wait(driver, "shardwright-usable", 0) / 1000


def wait(driver, name, count):
    """When the mark was set for the time `count` (from 0), in ms since the page was opened."""
    while True:
        times = driver.execute_script("return performance.getEntriesByName(arguments[0]).map((entry) => entry.startTime)", name)
        if len(times) > count:
            return times[count]
        time.sleep(0.005)


def slider(driver, model, nodes):
    """Seconds from a moved slider to new numbers and pictures."""
    driver.get("about:blank")
    driver.get(PAGE + CHOSEN.format(model, nodes))
    wait(driver, "shardwright-answered", 0)
    times = []
    for i in range(RUNS):
        begin = driver.execute_script("const e = document.getElementById('nodes-slider'); e.value = arguments[0]; const now = performance.now();"
                                      " e.dispatchEvent(new Event('input', {bubbles: true})); return now;", 4 + i % 2)
        times.append((wait(driver, "shardwright-answered", i + 1) - begin) / 1000)
    return statistics.median(times)


def search(driver):
    driver.get("about:blank")
    driver.get(PAGE + SEARCH)
    return (wait(driver, "shardwright-answered", 0) - wait(driver, "shardwright-usable", 0)) / 1000


def renderer_memory():
    """MB of the largest process that renders a page: this one with its worker, if no other browser runs."""
    sizes = [0]
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if b"--type=renderer" in (process / "cmdline").read_bytes():
                lines = (process / "smaps_rollup").read_text().splitlines()
                sizes += [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
        except OSError:
            pass  # it has ended
    return max(sizes) / 1000


def native():
    begin = time.monotonic()
    subprocess.run([page_test_case.PROGRAM, *NATIVE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.monotonic() - begin


PAGE = (web_test_case.BUILT / "shardwright.html").as_uri()


def main():
    driver = chromium.start()
    try:
        print(f"usable after {statistics.median(usable(driver) for _ in range(RUNS)):.2f} s")
        for model, nodes in (("llama-3-8b", 2), ("llama-3-70b", 16)):
            print(f"slider, {model}: {1000 * slider(driver, model, nodes):.0f} ms")
        pairs = [(search(driver), native()) for _ in range(RUNS)]
        page, program = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        print(f"llama-3-70b on 1,024 H100, searched, with pictures: {page:.2f} s; the program on one thread: {program:.2f} s")
        print(f"memory: {renderer_memory():.0f} MB")
        print(f"gzipped: {len(gzip.compress((web_test_case.BUILT / 'shardwright.html').read_bytes())) / 1e6:.2f} MB")
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
