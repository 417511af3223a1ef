"""The site's source: every link leads somewhere, and the references have all commands, flags and functions.

    python3 tests/python/site_test.py SHARDWRIGHT FOLDER_OF_THE_PACKAGE
"""

import json
import pathlib
import subprocess
import sys
import unittest

PROGRAM, FOLDER = sys.argv[1:3]
del sys.argv[1:3]
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SITE = ROOT / "build" / "site"
sys.path.insert(0, FOLDER)
try:
    import mkdocs  # noqa: F401
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(77)

import shardwright
import shardwright._native


class Site(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        done = subprocess.run([sys.executable, ROOT / "scripts" / "site.py", PROGRAM, FOLDER], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_references_have_everything(self):
        page = (SITE / "source" / "reference" / "commands.md").read_text()
        table = subprocess.run([PROGRAM, "--help", "--json"], capture_output=True, text=True, check=True).stdout
        for command in json.loads(table)["commands"]:
            section = page.partition(f"\n## {command['name']}\n")[2].partition("\n## ")[0]
            for row in (*command["flags"], *command["switches"]):
                if row["name"] not in ("--json", "--budget"):  # of every command
                    self.assertIn(row["name"], section, command["name"])
        page = (SITE / "source" / "reference" / "python.md").read_text()
        for name in set(shardwright.__all__) - {"__version__", "commands"}:
            self.assertIn(f"\n## shardwright.{name}\n", page)

    def test_pages(self):
        pages = {path.relative_to(SITE / "html").as_posix() for path in (SITE / "html").rglob("*.html")}
        self.assertLessEqual({f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}, pages)
        self.assertLessEqual({"reference/commands.html", "reference/python.html", *(f"gallery/{i}.html" for i in (1, 2, 3))}, pages)
        self.assertIn("gallery/3.html", (SITE / "html" / "gallery.html").read_text())
        self.assertIn("does_it_fit.ipynb", (SITE / "html" / "notebooks.html").read_text())

    def test_links_are_strict(self):
        config = SITE / "mkdocs.yml"
        settings = (ROOT / "mkdocs.yml").read_text().replace("build/site/source", "source").replace("build/site/html", "broken")
        page = SITE / "source" / "index.md"
        whole = page.read_text()
        for link, mended in (("[x](nowhere.md)", "[x](cli.md)"), ("[x](cli.md#nothing)", "[x](cli.md#simulate)")):
            for text, code in ((link, 1), (mended, 0)):
                page.write_text(f"{whole}\n{text}\n")
                config.write_text(settings)
                done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config], capture_output=True, text=True,
                                      check=False)
                self.assertEqual(done.returncode, code, done.stderr)
        page.write_text(whole)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
