"""A test of the page in Chromium: the first arguments say which page (page_test.py has them), the methods do what a person does."""

import pathlib
import sys
import tempfile
import time
import unittest
import urllib.parse

import chromium
import native_page
import web_test_case
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

PROGRAM = sys.argv.pop(1)
D3 = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].startswith("/") else None
if D3 is None:
    web_test_case.skip_unbuilt()
SHOTS = web_test_case.BUILT / ("screenshots" if D3 is None else "screenshots_native")
of_engine = unittest.skipIf(D3 is not None, "asks the engine itself")
CHOSEN = "#how=choose&model=gpt2&cluster=dgx-a100&gpus=4&seq=128&micro-batch=1"


class PageTestCase(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        cls.page = web_test_case.BUILT / "shardwright.html"
        if D3 is not None:
            cls.page = cls.folder / "shardwright.html"
            server = native_page.write(PROGRAM, D3, cls.page)
            cls.addClassCleanup(server.shutdown)
        cls.driver = chromium.start(logs=("browser", "performance"))
        cls.addClassCleanup(cls.driver.quit)

    def tearDown(self):
        self.assertEqual(self.driver.get_log("browser"), [])
        self.assertIsNone(self.js("window.broken || null"))

    def js(self, text, *arguments):
        return self.driver.execute_script("return " + text, *arguments)

    def by_id(self, name):
        return self.driver.find_element(By.ID, name)

    def wait(self, condition, what, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), end, f"{what}; status: {self.by_id('status').text}; {self.by_id('trouble').text}")
            time.sleep(0.05)

    def answers(self):
        return self.js("performance.getEntriesByName('shardwright-answered').length")

    def answered(self):
        """With the settings, which come last."""
        self.wait(lambda: self.by_id("status").text.startswith("Done") and self.js(
            "document.getElementById('take').hidden || document.getElementById('emitted').childElementCount > 0"), "no answer")

    def open(self, link=CHOSEN):
        self.driver.get("about:blank")
        self.driver.get(self.page.as_uri() + link)
        self.answered()

    def set(self, name, value):
        """A new value, as if it were typed; the page answers when it likes."""
        before = self.answers()
        self.js("(() => { const e = document.getElementById(arguments[0]); e.value = arguments[1];"
                " e.dispatchEvent(new Event('input', {bubbles: true})); })()", name, value)
        self.wait(lambda: self.answers() > before, f"nothing after {name}={value}")
        self.answered()

    def figures(self):
        return dict(zip([e.text for e in self.driver.find_elements(By.CSS_SELECTOR, "#figures dt")],
                        [e.text for e in self.driver.find_elements(By.CSS_SELECTOR, "#figures dd")]))

    def drop(self, name, content):
        path = self.folder / name
        path.write_text(content, encoding="utf-8")
        self.by_id("file").send_keys(str(path))

    def native(self, *words, text=""):
        return web_test_case.native(PROGRAM, *words, text=text)[1]

    def shot(self, name):
        chromium.screenshot(self.driver, SHOTS / f"{name}.png")

    def type(self, name, text):
        """As a person does, in what was there."""
        element = self.by_id(name)
        element.clear()
        element.send_keys(text)

    def ask(self, last="seq", **said):
        """Writes into the form, leaves empty what is not said, and answers with Enter; waits for this question's answer."""
        for name in ("model", "cluster", "nodes", "gpus", "global-batch", "lora-rank", "micro-batch", "seq"):
            if self.by_id(name).is_displayed():
                self.type(name, said.get(name.replace("-", "_"), ""))
        self.by_id(last).send_keys(Keys.ENTER)
        wanted = {name.replace("_", "-"): text for name, text in said.items()}

        def is_answered():
            found = dict(urllib.parse.parse_qsl(self.js("location.hash")[1:]))
            return self.by_id("status").text.startswith("Done") and {name: found.get(name) for name in wanted} == wanted
        self.wait(is_answered, f"no answer to {said}", 600)

    def choose(self, name):
        self.by_id(name).click()

    def narrow(self, width):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True})
        self.addCleanup(self.driver.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})
