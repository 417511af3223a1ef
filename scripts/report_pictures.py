"""docs/images/report.png and timeline.png: the report in README, in Chromium, and a part of its timeline.

    build/venv/bin/python scripts/report_pictures.py PROGRAM [--check]

Each picture holds the digest of the report that it shows. `--check` writes the report again and says which pictures are of another one;
it needs no browser.
"""

import argparse
import base64
import hashlib
import pathlib
import struct
import subprocess
import sys
import tempfile
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/images"
NAMES = ("report.png", "timeline.png")
PLAN = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "8192", "--micro-batch", "1", "--dialect", "fsdp2",
        "--recompute", "full", "--wrap", "block"]
KEY = b"Report-SHA256\0"
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_report(program, folder):
    for arguments in (["plan", *PLAN, "-o", "plan.json"], ["report", "plan.json", "-o", "report.html"]):
        subprocess.run([program, *arguments], check=True, cwd=folder, capture_output=True)
    return folder / "report.html"


def digest(report):
    return hashlib.sha256(report.read_bytes()).hexdigest()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_digest(picture, value):
    """The PNG with a text chunk behind its header, which has 25 bytes."""
    header = len(SIGNATURE) + 25
    return picture[:header] + chunk(b"tEXt", KEY + value.encode()) + picture[header:]


def digest_in(picture):
    at = picture.find(b"tEXt" + KEY)
    begin = at + len(b"tEXt" + KEY)
    return picture[begin:begin + 64].decode() if at >= 0 else None


def stale(program):
    """The pictures that show another report than the program writes now."""
    with tempfile.TemporaryDirectory() as scratch:
        current = digest(write_report(program, pathlib.Path(scratch)))
    return [name for name in NAMES if not (IMAGES / name).exists() or digest_in((IMAGES / name).read_bytes()) != current]


def clip(driver, height, top=0):
    """A PNG of the page's full width."""
    width = driver.execute_script("return window.innerWidth")
    area = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
    return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": area, "captureBeyondViewport": True})["data"])


def draw(program):
    sys.path.insert(0, str(ROOT / "tests/web"))
    import chromium
    from selenium.webdriver.common.by import By
    with tempfile.TemporaryDirectory() as scratch:
        report = write_report(program, pathlib.Path(scratch))
        driver = chromium.start(width=1100, height=1400)
        try:
            driver.get(report.as_uri())
            edge = lambda of, side: driver.execute_script("return document.getElementById(arguments[0]).getBoundingClientRect()[arguments[1]]", of, side)
            whole = clip(driver, edge("memory", "top") + 370)
            for _ in range(5):
                driver.find_element(By.ID, "zoom-in").click()
            part = clip(driver, edge("spans", "height") + 4, edge("spans", "top"))
        finally:
            driver.quit()
        for name, picture in zip(NAMES, (whole, part)):
            (IMAGES / name).write_bytes(with_digest(picture, digest(report)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    program = str(pathlib.Path(arguments.program).resolve())
    if arguments.check:
        names = stale(program)
        if names:
            sys.exit(f"{', '.join(names)}: of another report; run scripts/report_pictures.py {arguments.program}")
    else:
        draw(program)


if __name__ == "__main__":
    main()
