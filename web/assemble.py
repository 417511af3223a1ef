"""Puts the page together: one HTML file that needs nothing else, whose policy lets run only the scripts in it.

    web/assemble.py ENGINE_FOLDER D3_FOLDER OUTPUT

ENGINE_FOLDER has what Emscripten made: shardwright_engine.js and shardwright_engine.wasm. Equal inputs give equal bytes.
"""

import base64
import csv
import gzip
import hashlib
import html
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = ROOT / "analysis/report/page"
WEB = ROOT / "web"
# Those of the report, from the list that CMake has.
REPORT_MODULES = ("units.js", "tables.js", "spans.js", "timeline.js", "memory.js", "choices.js", "controls.js")
PAGE_MODULES = ("engine_client.js", "question.js", "answer.js", "costs.js", "published.js", "main.js")


def read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def d3_modules(folder: pathlib.Path) -> list[str]:
    text = read(ROOT / "analysis/report/embed.cmake")
    names = re.search(r"module IN ITEMS ([a-z\s-]+)\)", text)[1].split()
    return [read(folder / f"d3-{name}/dist/d3-{name}.min.js") for name in names]


def policy_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def pictures() -> str:
    """The report's sections with the timeline and the memory, without the table of peaks."""
    text = read(REPORT / "page.html")
    sections = [re.search(rf'<section id="{name}">.*?</section>', text, re.DOTALL)[0] for name in ("timeline", "memory")]
    return "\n".join(sections).replace('<div id="memory-table"></div>\n', "")


def data_block(name: str, text: str) -> str:
    """Text that the page reads and no browser runs."""
    if "</script" in text.lower() or "<!--" in text:
        raise SystemExit(f"assemble.py: {name} holds what would end its script element")
    return f'<script type="text/plain" id="{name}">{text}</script>\n'


def page(engine: dict[str, str], d3: pathlib.Path, source: str = "") -> str:
    """`engine`: the texts of the blocks loader, script, worker and wasm. `source` is where the page may connect to: nowhere."""
    scripts = [*d3_modules(d3), *(read(REPORT / name) for name in REPORT_MODULES), *(read(WEB / "page" / name) for name in PAGE_MODULES)]
    styles = [read(REPORT / "style.css"), read(WEB / "page/style.css")]
    # The worker is made of texts that this page holds, so it needs no other source.
    policy = ["default-src 'none'", "img-src data:", "style-src " + " ".join(map(policy_hash, styles)),
              "script-src 'wasm-unsafe-eval' " + " ".join(map(policy_hash, scripts)), "worker-src blob:", "base-uri 'none'", "form-action 'none'"]
    values = {
        "policy": "; ".join(policy + ([f"connect-src {source}"] if source else [])),
        "report_style": styles[0],
        "style": styles[1],
        "pictures": pictures(),
        "d3_license": html.escape(read(REPORT / "d3_license.txt")),
        "engine": "".join(data_block(f"engine-{name}", text) for name, text in engine.items()),
        "published": data_block("published-runs", published()),
        "scripts": "\n".join(f"<script>{text}</script>" for text in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], read(WEB / "page/page.html"))


def published() -> str:
    """Published runs by the profile that predicts them: {profile: [[id, measured s, predicted s]]}."""
    rows: dict[str, list] = {}
    with open(ROOT / "bench/published/predictions.csv", newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            rows.setdefault(row["profile"], []).append([row["id"], float(row["measured_s"]), float(row["predicted_s"])])
    return json.dumps(rows, separators=(",", ":"))


def packed(wasm: bytes) -> str:
    return base64.b64encode(gzip.compress(wasm, 9, mtime=0)).decode()


def main() -> None:
    built, d3, output = (pathlib.Path(argument) for argument in sys.argv[1:4])
    text = page({"loader": read(built / "shardwright_engine.js"), "script": read(WEB / "engine.js"), "worker": read(WEB / "worker.js"),
                 "wasm": packed((built / "shardwright_engine.wasm").read_bytes())}, d3)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {len(text.encode()) / 1e6:.2f} MB, {len(gzip.compress(text.encode(), 9)) / 1e6:.2f} MB gzipped")


if __name__ == "__main__":
    main()
