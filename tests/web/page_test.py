"""The page in a real Chromium, as a person uses it. Screenshots go to build/web/screenshots, to be looked at.

    page_test.py SHARDWRIGHT          with the engine that scripts/web.sh built
    page_test.py SHARDWRIGHT D3       with the program where the engine would be; D3: the folder of its modules
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import native_page
import web_test_case

try:
    from selenium import webdriver
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select
except ImportError:
    print("selenium is not installed: skipped")
    sys.exit(77)

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
web_test_case.skip_without(BROWSER is not None and DRIVER is not None, "chromium or chromedriver is not installed")

PROGRAM = sys.argv.pop(1)
D3 = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].startswith("/") else None
if D3 is None:
    web_test_case.skip_unbuilt()
SHOTS = web_test_case.BUILT / ("screenshots" if D3 is None else "screenshots_native")
of_engine = unittest.skipIf(D3 is not None, "asks the engine itself")
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror='window.broken=2'>\"'&\u202e"
CHOSEN = "#how=choose&model=gpt2&cluster=dgx-a100&gpus=4&seq=128&micro-batch=1"


def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1600"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


class Page(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        SHOTS.mkdir(parents=True, exist_ok=True)
        cls.page = web_test_case.BUILT / "shardwright.html"
        if D3 is not None:
            cls.page = cls.folder / "shardwright.html"
            server = native_page.write(PROGRAM, D3, cls.page)
            cls.addClassCleanup(server.shutdown)
        cls.driver = browser()
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
        self.wait(lambda: self.by_id("status").text.startswith("Done"), "no answer")

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
        height = self.js("document.documentElement.scrollHeight")
        width = self.js("window.innerWidth")
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
        self.driver.save_screenshot(str(SHOTS / f"{name}.png"))
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def narrow(self, width):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True})
        self.addCleanup(self.driver.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})

    def test_does_it_fit(self):
        self.open()
        plan = json.loads(self.native("plan", "--json", "--no-search", "--model=gpt2", "--cluster=dgx-a100", "--gpus=4", "--seq=128",
                                      "--micro-batch=1"))["plan_file"]
        simulated = json.loads(self.native("simulate", "--json", "-", text=json.dumps(plan)))
        self.assertIn("Fits, with", self.by_id("verdict").text)
        self.assertEqual(self.by_id("verdict").get_attribute("class"), "yes")
        figures = self.figures()
        self.assertEqual(figures["tokens/s per GPU"].replace(",", ""), str(round(simulated["tokens_per_s_per_gpu"])))
        self.assertEqual(figures["MFU"], f"{100 * simulated['mfu']:.1f} %")
        self.assertTrue(self.by_id("spans").is_displayed())
        self.assertTrue(self.by_id("bytes").is_displayed())
        self.shot("fits")

    def test_it_does_not_fit(self):
        self.open("#how=choose&model=llama-3-70b&cluster=dgx-a100&seq=4096&micro-batch=1")
        self.assertEqual(self.by_id("verdict").get_attribute("class"), "no")
        self.assertIn("does not fit", self.by_id("verdict").text.lower())
        self.shot("does_not_fit")

    def test_search_and_front(self):
        self.open("#how=search&model=gpt2&cluster=dgx-a100&gpus=4&seq=128&global-batch=32")
        self.assertIn("±", self.figures()["step time"])
        dots = self.driver.find_elements(By.CSS_SELECTOR, "#pareto circle")
        self.assertGreater(len(dots), 1)
        self.assertGreater(len(self.driver.find_elements(By.CSS_SELECTOR, "#usual tbody tr")), 2)
        self.shot("search")
        other = next(dot for dot in dots if dot.get_attribute("class") == "dot")
        label = other.get_attribute("aria-label")
        before = self.answers()
        self.driver.execute_script("arguments[0].focus()", other)
        other.send_keys(Keys.ENTER)
        self.wait(lambda: self.answers() > before, "the point does not open")
        self.answered()
        chosen = lambda: self.driver.find_element(By.CSS_SELECTOR, "#pareto circle.chosen").get_attribute("aria-label")
        self.assertEqual(chosen(), label)
        # ": 17.7 ms, 3.5 GiB": the plan is simulated anew.
        self.assertEqual(self.figures()["step time"].split(" ±")[0], label.split(": ")[-1].split(", ")[0])
        self.open(self.js("location.hash"))
        self.assertEqual(chosen(), label)

    def test_nothing_fits(self):
        self.open("#how=search&model=llama-3-70b&cluster=dgx-v100&nodes=1&seq=2048&global-batch=8")
        self.assertIn("Does not fit", self.by_id("verdict").text)
        self.assertIn("page-locked host memory", self.by_id("verdict").text)  # the GPUs alone would do
        self.assertFalse(self.by_id("pictures").is_displayed())

    def test_words_are_those_of_the_command_line(self):
        """Every flag of `plan` is in the form, with its help, but those that belong to files and threads."""
        self.open()
        table = json.loads(self.native("plan", "--help", "--json"))["commands"][0]
        shown = self.js("document.getElementById('question').textContent")
        missing = [flag["name"] for flag in table["flags"] if flag["help"] not in shown]
        self.assertEqual(set(missing), {"--output", "--objective", "--token-budget", "--keep", "--threads", "--budget", "--from"})
        command = self.by_id("command").text
        self.assertEqual(command, "shardwright plan --no-search --model=gpt2 --cluster=dgx-a100 --gpus=4 --seq=128 --micro-batch=1")

    def test_a_link_opens_the_same(self):
        self.open()
        self.set("seq", "256")
        self.set("tokens", "1e9")
        link, figures, title = self.js("location.hash"), self.figures(), self.by_id("title").text
        self.assertIn("seq=256", link)
        self.open(link)
        self.assertEqual(self.figures(), figures)
        self.assertEqual(self.by_id("title").text, title)
        self.assertIn("for 1e9 tokens", figures)

    def test_files(self):
        self.open()
        config = json.loads((web_test_case.ROOT / "models/zoo/llama-3.2-1b.json").read_text())
        config["num_hidden_layers"] = 3
        self.drop("config.json", json.dumps(config))
        self.wait(lambda: "config" in self.by_id("title").text, "the file is not taken")
        self.answered()
        link, title = self.js("location.hash"), self.by_id("title").text
        self.open(link)
        self.assertEqual(self.by_id("title").text, title)
        plan = json.loads(self.native("plan", "--json", "--no-search", "--model=gpt2-medium", "--cluster=dgx-a100", "--seq=128"))["plan_file"]
        self.drop("plan.json", json.dumps(plan))
        self.wait(lambda: "gpt2-medium" in self.by_id("title").text, "the plan is not taken")
        self.answered()

    def test_a_wrong_file(self):
        self.open()
        for name, content in (("photo.json", "\x89PNG"), ("empty.json", ""), ("other.json", '{"a": 1}')):
            self.js("document.getElementById('trouble').textContent = ''")
            self.drop(name, content)
            self.wait(lambda: self.by_id("trouble").text != "", f"{name} is taken")
            self.assertIn(name, self.by_id("trouble").text)
        self.set("seq", "256")  # the page lives on
        self.assertEqual(self.by_id("trouble").text, "")

    def test_the_zoo(self):
        """Every model of the zoo is offered while a name is typed."""
        self.open()
        offered = self.js("[...document.getElementById('models').options].map((option) => option.value)")
        self.assertEqual(offered, [row["name"] for row in json.loads(self.native("list", "models", "--json"))["models"]])
        model = self.by_id("model")
        model.clear()
        model.send_keys("qwen2-0.5", Keys.ENTER)
        self.wait(lambda: "qwen2-0.5b" in self.by_id("trouble").text, "no word on what was meant")
        model.send_keys("b", Keys.ENTER)
        self.wait(lambda: "qwen2-0.5b" in self.by_id("title").text, "no answer")
        self.assertEqual(self.by_id("trouble").text, "")

    def test_wrong_words(self):
        self.open()
        self.js("(() => { const e = document.getElementById('cluster'); e.value = 'dgx-h1000';"
                " e.dispatchEvent(new Event('input', {bubbles: true})); })()")
        self.wait(lambda: self.by_id("trouble").text != "", "no word about it")
        self.assertIn("dgx-h100", self.by_id("trouble").text)
        self.set("cluster", "dgx-h100")

    @of_engine
    def test_cancel(self):
        self.open()
        self.js("(() => { document.getElementById('search-plan').checked = true; document.getElementById('model').value = 'llama-3-70b';"
                " document.getElementById('cluster').value = 'dgx-h100'; document.getElementById('nodes').value = '128';"
                " document.getElementById('gpus').value = ''; document.getElementById('seq').value = '8192';"
                " document.getElementById('global-batch').value = '1024';"
                " document.getElementById('search-plan').dispatchEvent(new Event('input', {bubbles: true})); })()")
        self.wait(lambda: "plans simulated" in self.by_id("status").text, "no progress")
        self.assertIn("none can be below", self.by_id("status").text)
        begin = time.monotonic()
        self.by_id("cancel").click()
        self.wait(lambda: self.by_id("status").text.startswith("Cancelled"), "not cancelled")
        self.assertLess(time.monotonic() - begin, 2)
        self.js("(() => { document.getElementById('choose-plan').checked = true; document.getElementById('seq').value = '128';"
                " document.getElementById('nodes').value = '1'; })()")
        self.set("model", "gpt2")  # by another worker

    def test_settings_equal_the_programs(self):
        self.open()
        Select(self.by_id("target")).select_by_value("fsdp2")
        self.wait(lambda: len(self.driver.find_elements(By.CSS_SELECTOR, "#emitted pre")) > 0, "no settings")
        shown = {e.get_attribute("aria-label"): e.get_attribute("textContent") for e in self.driver.find_elements(By.CSS_SELECTOR, "#emitted pre")}
        plan = json.loads(self.native("plan", "--json", "--no-search", "--model=gpt2", "--cluster=dgx-a100", "--gpus=4", "--seq=128",
                                      "--micro-batch=1"))["plan_file"]
        emitted = json.loads(self.native("emit", "-", "--to=fsdp2", "--json", text=json.dumps(plan)))
        self.assertEqual(shown, {file["name"]: file["text"] for file in emitted["files"]})

    def test_side_by_side(self):
        self.open()
        self.by_id("keep").click()
        self.set("seq", "256")
        self.wait(lambda: "sequence_length" in self.by_id("side-body").text, "no comparison")

    def test_keyboard(self):
        """From the first key to an answer without a mouse."""
        self.open()
        tab = lambda: ActionChains(self.driver).send_keys(Keys.TAB).perform()
        tab()
        self.assertEqual(self.js("document.activeElement.className"), "skip")
        link = self.js("location.hash")
        ActionChains(self.driver).send_keys(Keys.ENTER).perform()
        self.assertEqual((self.js("document.activeElement.id"), self.js("location.hash")), ("answer", link))
        self.js("document.querySelector('.skip').focus()")
        reached = []
        for _ in range(60):
            tab()
            reached.append(self.js("document.activeElement.id"))
            if reached[-1] == "cancel" or "spans" in reached:
                break
        for name in ("model", "cluster", "nodes", "seq", "choose-plan"):
            self.assertIn(name, reached)
        self.driver.execute_script("document.getElementById('seq').focus()")
        seq = self.by_id("seq")
        seq.clear()
        seq.send_keys("512", Keys.ENTER)
        self.wait(lambda: "seq=512" in self.js("location.hash"), "Enter does not answer")
        unnamed = self.js("""[...document.querySelectorAll('input, select, textarea, button')].filter((e) =>
            !(e.labels && e.labels.length > 0 && e.labels[0].textContent.trim()) && !e.textContent.trim() && !e.getAttribute('aria-label')).length""")
        self.assertEqual(unnamed, 0)

    def test_phone(self):
        self.narrow(390)
        self.open()
        self.assertLessEqual(self.js("document.documentElement.scrollWidth"), 390)
        self.shot("phone")

    def test_dark_and_print(self):
        self.open()
        light = self.js("getComputedStyle(document.body).backgroundColor")
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
        self.addCleanup(self.driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", {"media": "", "features": []})
        self.assertNotEqual(self.js("getComputedStyle(document.body).backgroundColor"), light)
        self.shot("dark")
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
        self.assertFalse(self.by_id("question").is_displayed())
        self.assertTrue(self.by_id("verdict").is_displayed())

    def test_hostile_names(self):
        self.open()
        config = json.loads((web_test_case.ROOT / "models/zoo/gpt2.json").read_text())
        config["architectures"] = [HOSTILE]
        self.drop("hostile.json", json.dumps(config))
        self.answered()
        plan = self.native("plan", "--json", "--no-search", "--model=gpt2", "--cluster=dgx-a100", "--seq=128")
        for change in (lambda plan: plan["plan"]["units"][3].update(name=HOSTILE), lambda plan: plan["cluster"].update(name=HOSTILE),
                       lambda plan: plan["model"].update(name=HOSTILE), lambda plan: plan.update({HOSTILE: 1})):
            changed = json.loads(plan)["plan_file"]
            change(changed)
            before = self.answers()
            self.drop("plan.json", json.dumps(changed))
            self.wait(lambda: self.answers() > before or "window.broken" in self.by_id("trouble").text, "neither taken nor refused")
        # Names of files are names of models.
        self.drop(HOSTILE.replace("/", "") + ".json", json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
        self.wait(lambda: "window.broken" in self.by_id("title").text, "not taken")
        self.answered()
        self.open(self.js("location.hash"))
        self.assertIn("window.broken", self.by_id("title").text)
        self.assertEqual(self.js("document.images.length"), 0)
        config["architectures"] = ["x" * 10_000_000]
        self.drop("long.json", json.dumps(config))
        self.wait(lambda: "long" in self.by_id("title").text or "long" in self.by_id("trouble").text, "neither taken nor refused", 60)
        self.assertLess(len(self.by_id("trouble").text), 1000)
        self.by_id("search").send_keys("window.broken", Keys.ENTER)
        self.assertIsNone(self.js("window.broken || null"))

    @of_engine
    def test_no_request_leaves(self):
        self.driver.get_log("performance")
        self.open()
        self.set("seq", "256")
        sent = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [event["params"]["request"]["url"] for event in sent if event["method"] == "Network.requestWillBeSent"]
        self.assertEqual([url for url in urls if not url.startswith(("file:", "blob:", "data:", "about:"))], [])
        self.assertLessEqual(len([url for url in urls if url.startswith("file:")]), 1)
        policy = self.driver.find_element(By.CSS_SELECTOR, "meta[http-equiv]").get_attribute("content")
        self.assertIn("default-src 'none'", policy)
        self.assertNotIn("unsafe-inline", policy)
        self.assertNotIn("'unsafe-eval'", policy)

    @of_engine
    def test_size(self):
        import gzip
        self.assertLess(len(gzip.compress(self.page.read_bytes())), 2_000_000)


if __name__ == "__main__":
    unittest.main()
