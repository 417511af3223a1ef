"""The command `page`: where it finds the page that scripts/web.sh builds. The page itself: tests/web."""

import json
import shutil
import subprocess

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

PAGE = '<!DOCTYPE html>\n<p>"é"\n'


class PageCommand(ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        # The program names the real path of its folder.
        self.root = self.folder.resolve() / "root"
        (self.root / "bin").mkdir(parents=True)
        self.program = self.root / "bin" / "shardwright"
        shutil.copy(shardwright_test_case.PROGRAM, self.program)
        self.places = [self.root / "share/shardwright/shardwright.html", self.root / "bin/web/shardwright.html"]

    def page(self, *arguments):
        done = subprocess.run([self.program, "page", *arguments], capture_output=True, text=True, cwd=self.folder, check=False)
        return done.returncode, done.stdout, done.stderr

    def put(self, place, text=PAGE):
        place.parent.mkdir(parents=True)
        place.write_text(text, encoding="utf-8")

    def test_where_it_was_not_built(self):
        self.assertEqual(self.page(), (4, "", f"error: no {self.places[0]} and no {self.places[1]}; "
                                       "scripts/web.sh in the source tree builds the page\n"))

    def test_from_the_build_tree(self):
        self.put(self.places[1])
        self.assertEqual(self.page(), (0, PAGE, ""))
        self.assertEqual(self.page("-o", "page.html"), (0, "Wrote page.html\n", ""))
        self.assertEqual((self.folder / "page.html").read_text(encoding="utf-8"), PAGE)

    def test_installed(self):
        self.put(self.places[1], "another")
        self.put(self.places[0])
        code, out, err = self.page("--json")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(json.loads(out), {"schema": "shardwright-page", "schema_version": 1, "text": PAGE})


if __name__ == "__main__":
    main()
