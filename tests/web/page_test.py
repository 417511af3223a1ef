"""The page in a real Chromium, as a person uses it. Screenshots go to build/web/screenshots, to be looked at.

    page_test.py SHARDWRIGHT          with the engine that scripts/web.sh built
    page_test.py SHARDWRIGHT D3       with the program where the engine would be; D3: the folder of its modules
"""

import csv
import json
import os
import re
import statistics
import subprocess
import sys
import time
import unittest

import chromium
import web_test_case
from page_test_case import CHOSEN, PROGRAM, PageTestCase, of_engine
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

HOSTILE = chromium.HOSTILE + "\u202e"


TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 32, "intermediate_size": 44,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False}
# Ends without Python's end: threads of gloo that still hold tensors would abort the process there.
TRAIN = """import json
import os
import torch
import torch.distributed as dist
import transformers
import shardwright_fsdp2
dist.init_process_group("gloo")
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**json.load(open("tiny.json"))))
model = shardwright_fsdp2.apply_plan(model, "fsdp2_plan.json", device_type="cpu")
assert sum(isinstance(m, torch.distributed.fsdp.FSDPModule) for m in model.modules()) >= 3
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(1, 61, (1, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for step in range(20):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    losses.append(loss.item() / 2)
if dist.get_rank() == 0:
    print(json.dumps(losses), flush=True)
dist.destroy_process_group()
os._exit(0)
"""


def fields(value, path=()):
    """The places of all values; of a list those of each element that has other fields than the ones before."""
    seen = set()
    for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
        kind = tuple(inner) + (inner.get("ph"),) if isinstance(inner, dict) else type(inner)
        if isinstance(value, dict) or kind not in seen:
            seen.add(kind)
            yield (*path, step)
            if isinstance(inner, (dict, list)):
                yield from fields(inner, (*path, step))


def planted(document):
    """Copies with HOSTILE in one place each: every value, and the first name of every object."""
    for path in fields(document):
        for is_name in (False, True):
            changed = json.loads(json.dumps(document))
            place = changed
            for step in path[:-1]:
                place = place[step]
            if not is_name:
                place[path[-1]] = HOSTILE
            elif isinstance(place, dict) and path[-1] == next(iter(place)):
                place[HOSTILE] = place.pop(path[-1])
            else:
                continue
            yield changed


class Page(PageTestCase):

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
        self.assertEqual(self.by_id("confidence").text, f"How sure: {simulated['confidence']}.")
        self.assertTrue(self.by_id("spans").is_displayed())
        self.assertTrue(self.by_id("bytes").is_displayed())
        self.shot("fits")

    def test_published_runs_of_the_profile(self):
        self.open()
        plan = self.native("plan", "--json", "--no-search", "--model=gpt2", "--cluster=dgx-a100", "--gpus=4", "--seq=128", "--micro-batch=1")
        profile = json.loads(plan)["plan_file"]["profile"]["name"]
        with open(web_test_case.ROOT / "bench/published/predictions.csv", newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if row["profile"] == profile]
        errors = [abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1) for row in rows]
        self.assertGreater(len(rows), 3)
        self.assertEqual(self.by_id("published-body").find_element(By.TAG_NAME, "p").text,
                         f"Step times of {len(rows)} published runs by the profile {profile}: median error {100 * statistics.median(errors):.1f} %, "
                         f"greatest {100 * max(errors):.1f} %.")
        self.assertEqual(len(self.by_id("published-body").find_elements(By.TAG_NAME, "circle")), len(rows))
        self.open("#how=choose&model=gpt2&cluster=pcie-8x4090&seq=128&micro-batch=1")
        self.assertEqual(self.by_id("published-body").text, "No published run is known that the profile ada-half-torch-eager predicts.")

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
        self.assertEqual(self.figures()["step time"].split("\n")[0], label.split(": ")[-1].split(", ")[0])
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

    def rows(self, table):
        """Its lines, as lists of texts."""
        return [[cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")]
                for row in self.driver.find_elements(By.CSS_SELECTOR, f"{table} tbody tr")]

    def test_a_dropped_trace_is_compared(self):
        """Two ranks that trained here, against the plan that they trained: the same figures as the program's, and both in the pictures."""
        def path(name):
            return str(self.folder / name)
        (self.folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
        self.native("plan", "--no-search", "--model", path("tiny.json"), "--cluster=host", "--gpus=2", "--seq=16", "--micro-batch=1",
                    "-o", path("plan.json"))
        self.native("run", path("plan.json"), "--steps=2", "--data=random", "--trace", path("run.json"))
        expected = json.loads(self.native("compare", path("plan.json"), path("run.json"), "--json"))["step_time"]
        self.open()
        self.assertFalse(self.by_id("measured").is_displayed())
        self.drop("plan.json", (self.folder / "plan.json").read_text(encoding="utf-8"))
        self.wait(lambda: "tiny" in self.by_id("title").text, "the plan is not taken")
        self.answered()
        trace = (self.folder / "run.json").read_text(encoding="utf-8")
        self.drop("run.json", trace)
        self.wait(self.by_id("measured").is_displayed, "the trace is not taken")
        step = self.rows("#measured-body")[0]
        shown = [float(text.split()[0]) * {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}[text.split()[1]] for text in step[1:3]]
        for text, value in zip(shown, (expected["simulated_s"], expected["measured_s"])):
            self.assertAlmostEqual(text / value, 1, delta=0.006)  # three digits
        self.assertIn("Black dashes: measured.", self.by_id("memory").text)
        self.shot("compared")
        self.native("simulate", path("plan.json"), "--trace", path("simulated.json"))
        simulated = (self.folder / "simulated.json").read_text(encoding="utf-8")
        for name, content, error in (("simulated.json", simulated, "simulated.json: got a simulated trace, expected one that was measured."),
                                     ("nothing.json", '{"traceEvents": []}', "nothing.json"), ("cut.json", trace[:len(trace) // 2], "cut.json")):
            self.drop(name, content)
            self.wait(lambda: error in self.by_id("trouble").text, f"{name} is taken")
            self.assertEqual(self.by_id("status").text, "This file cannot be compared.")
        before = self.answers()
        self.drop("hostile.json", trace.replace('"mb0.', '"' + HOSTILE.replace('"', '\\"') + "mb0."))
        self.wait(lambda: self.answers() > before or "hostile.json" in self.by_id("trouble").text, "neither compared nor refused")
        self.open()  # another plan is not the run's
        self.assertFalse(self.by_id("measured").is_displayed())

    def test_a_dropped_snapshot_is_compared(self):
        snapshot = web_test_case.ROOT / "tests/fuzz/corpus/snapshot/snapshot.pickle"
        device = max(json.loads(self.native("inspect-trace", str(snapshot), "--json"))["devices"], key=lambda one: one["peak_allocated_bytes"])
        self.open("#how=choose&model=llama-3-70b&cluster=dgx-h100&nodes=1&seq=8192&micro-batch=1&recompute=none")
        simulated = self.figures()["allocated at the peak"]
        self.by_id("file").send_keys(str(snapshot))
        self.wait(self.by_id("measured").is_displayed, "the snapshot is not taken")
        allocated, reserved = self.rows("#measured-body .scroll:first-child")
        self.assertEqual(allocated[:2], ["allocated", simulated])
        for row, key in ((allocated, "peak_allocated_bytes"), (reserved, "peak_reserved_bytes")):
            number, unit = row[2].split()
            self.assertAlmostEqual(float(number) * {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit] / device[key], 1, delta=0.006)

    def test_what_is_measured_needs_a_plan(self):
        self.open("#how=search&model=llama-3.1-405b&cluster=dgx-h100&nodes=1&seq=8192&global-batch=8")
        self.drop("run.json", '{"traceEvents": []}')
        self.wait(lambda: self.by_id("trouble").text.startswith("No plan is shown"), "a comparison with nothing")

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

    @of_engine
    def test_what_it_emits_trains(self):
        """The files that the page gives, in a script of two ranks under torchrun."""
        try:
            import torch  # noqa: F401
            import transformers  # noqa: F401
        except ImportError as missing:
            self.skipTest(f"{missing.name} is not installed")
        self.open("#how=choose&model=gpt2&cluster=dgx-a100&gpus=2&seq=16&micro-batch=1&precision=fp32")
        self.drop("tiny.json", json.dumps(TINY))
        self.wait(lambda: "tiny on" in self.by_id("title").text, "the file is not taken")
        self.answered()
        folder = self.folder / "emitted"
        folder.mkdir()
        for shown in self.driver.find_elements(By.CSS_SELECTOR, "#emitted pre"):
            (folder / shown.get_attribute("aria-label")).write_text(shown.get_attribute("textContent"), encoding="utf-8")
        (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"],
                              cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        losses = json.loads(done.stdout.splitlines()[-1])
        self.assertLess(losses[-1], 0.8 * losses[0])

    def test_a_saved_report_leads_back(self):
        """It shows what the search considered, and its link opens the plan in the page again."""
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(self.folder)})
        self.open("#how=search&model=gpt2&cluster=dgx-a100&gpus=4&seq=128&global-batch=32")
        title, figures = self.by_id("title").text, self.figures()
        self.by_id("save-report").click()
        saved = self.folder / "report.html"
        self.wait(saved.exists, "no report")
        self.driver.get(saved.as_uri())
        self.assertGreater(len(self.driver.find_elements(By.CSS_SELECTOR, "#pareto circle")), 1)
        self.by_id("to-page").click()
        self.answered()
        self.assertEqual(self.driver.current_url.partition("#")[0], self.page.as_uri())
        self.assertEqual(self.by_id("title").text, title)
        self.assertEqual(self.figures()["MFU"], figures["MFU"])

    def test_side_by_side(self):
        self.open()
        self.by_id("keep").click()
        self.set("seq", "256")
        self.wait(lambda: "sequence_length" in self.by_id("side-body").text, "no comparison")
        rows = [[cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")]
                for row in self.driver.find_elements(By.CSS_SELECTOR, "#side-body > :first-child tbody tr")]
        self.assertEqual([row[0] for row in rows], ["step time", "exposed communication", "allocated at the peak", "reserved", "fits"])
        picture = self.driver.find_element(By.CSS_SELECTOR, "#side-body svg")
        self.assertEqual(picture.get_attribute("aria-label"),
                         "Kept and this plan: " + "; ".join(f"{name} {kept} and {this}" for name, kept, this in rows[:4]))
        overlap = self.js("""[...arguments[0].querySelectorAll('g')].some((row) => row.querySelector('text').getBoundingClientRect().right >
            row.querySelector('rect').getBoundingClientRect().left)""", picture)
        self.assertFalse(overlap)
        # The longer bar of each pair is full, the other one shorter by as much as the plan is better.
        widths = [float(bar.get_attribute("width")) for bar in picture.find_elements(By.TAG_NAME, "rect")]
        (kept, this), full = [[float(text.split()[0]) for text in rows[0][1:]], max(widths)]
        self.assertAlmostEqual(widths[0] / full, kept / this, delta=0.002)  # texts have three digits
        self.assertEqual(widths[1], full)
        self.shot("side_by_side")

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
        # Its help opens below, and moves no field aside.
        top = lambda name: self.js("document.getElementById(arguments[0]).getBoundingClientRect().top", name)
        self.assertEqual(top("seq"), top("global-batch"))
        seq = self.by_id("seq")
        seq.clear()
        seq.send_keys("512", Keys.ENTER)
        self.wait(lambda: "seq=512" in self.js("location.hash"), "Enter does not answer")
        unnamed = self.js("""[...document.querySelectorAll('input, select, textarea, button')].filter((e) =>
            !(e.labels && e.labels.length > 0 && e.labels[0].textContent.trim()) && !e.textContent.trim() && !e.getAttribute('aria-label')).length""")
        self.assertEqual(unnamed, 0)

    def test_a_config_of_each_family(self):
        """A config.json as people have it, of each kind that the zoo holds."""
        texts = [path.read_text(encoding="utf-8") for path in (web_test_case.ROOT / "models/zoo").glob("*.json")]
        families = {json.loads(text)["model_type"]: text for text in texts if "model_type" in json.loads(text)}
        self.assertGreater(len(families), 10)
        self.open()
        for family, text in sorted(families.items()):
            with self.subTest(family=family):
                is_shown = lambda: f"my-{family} on" in self.by_id("title").text and self.by_id("status").text.startswith("Done")
                is_refused = lambda: "which has no sequences" in self.by_id("trouble").text
                self.js("document.getElementById('seq').value = '128'")
                self.drop(f"my-{family}.json", text)
                self.wait(lambda: is_shown() or is_refused(), "the file is not taken")
                if is_refused():  # of images
                    self.set("seq", "")
                    self.wait(is_shown, "no answer without a length")
                self.assertNotIn("error", self.by_id("trouble").text)

    def test_what_each_choice_costs(self):
        """The small pictures say what the program says."""
        self.open("#how=search&model=gpt2&cluster=dgx-a100&gpus=4&seq=128&global-batch=32")
        search = json.loads(self.native("plan", "--json", "--search", "--explain", "--threads=1", "--model=gpt2", "--cluster=dgx-a100", "--gpus=4",
                                        "--seq=128", "--global-batch=32"))
        expected = [f"{100 * abs(change):.1f} %" for row in search["explanation"]["alternatives"] if row["simulated"] and row["fits"]
                    for change in [row["step_time_s"] / search["step_time_s"] - 1]]
        self.assertGreater(len(expected), 3)
        shown = " ".join(picture.get_attribute("aria-label") for picture in self.driver.find_elements(By.CSS_SELECTOR, "#costs-body svg"))
        self.assertEqual(re.findall(r"[+−]([\d.]+ %), [+−]", shown), expected)
        # All texts stand inside of their picture.
        outside = self.js("""[...document.querySelectorAll('#costs-body svg')].flatMap((svg) => [...svg.querySelectorAll('text')].filter((text) =>
            text.getBoundingClientRect().right > svg.getBoundingClientRect().right + 1).map((text) => text.textContent))""")
        self.assertEqual(outside, [])

    def test_accessible(self):
        """Nothing that axe finds, and no faint text: an answer, a search, a refusal; light and dark; on a screen and a phone."""
        self.addCleanup(chromium.media, self.driver)
        for link in (CHOSEN, "#how=search&model=gpt2&cluster=dgx-a100&gpus=4&seq=128&global-batch=32",
                     "#how=search&model=llama-3-70b&cluster=dgx-v100&nodes=1&seq=2048&global-batch=8"):
            self.open(link)
            self.by_id("keep").click() if link == CHOSEN else None
            self.js("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
            for scheme in ("light", "dark"):
                with self.subTest(link=link, scheme=scheme):
                    chromium.media(self.driver, scheme=scheme)
                    self.assertEqual(chromium.accessibility_faults(self.driver), [])
                    if link == CHOSEN:
                        self.wait(lambda: chromium.faint_texts(self.driver) == [], "texts are faint")
        self.narrow(390)
        self.open()
        self.assertEqual(chromium.accessibility_faults(self.driver), [])

    def test_phone(self):
        self.narrow(390)
        self.open()
        self.assertLessEqual(self.js("document.documentElement.scrollWidth"), 390)
        # Names of files are not squeezed beside their buttons.
        self.assertGreater(self.js("document.querySelector('#emitted summary').getBoundingClientRect().width"), 200)
        self.shot("phone")

    def test_dark_and_print(self):
        self.open()
        light = self.js("getComputedStyle(document.body).backgroundColor")
        chromium.media(self.driver, scheme="dark")
        self.addCleanup(chromium.media, self.driver)
        self.assertNotEqual(self.js("getComputedStyle(document.body).backgroundColor"), light)
        self.shot("dark")
        chromium.media(self.driver, "print")
        self.assertFalse(self.by_id("question").is_displayed())
        self.assertTrue(self.by_id("verdict").is_displayed())

    @of_engine
    def test_hostile_fields(self):
        """In every field of plans, models, clusters and traces, one at a time, here and in the reports of the plans that are taken."""
        (self.folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
        for name, cluster in (("plan.json", "8x H100"), ("host.json", "host")):
            self.native("plan", "--no-search", "--model", str(self.folder / "tiny.json"), f"--cluster={cluster}", "--gpus=2", "--seq=16",
                        "--micro-batch=1", "-o", str(self.folder / name))
        self.native("run", str(self.folder / "host.json"), "--steps=2", "--data=random", "--trace", str(self.folder / "run.json"))
        catalog = web_test_case.ROOT / "topologies/catalog/dgx-h100.json"
        documents = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in (
            ("config.json", self.folder / "tiny.json"), ("plan.json", self.folder / "plan.json"), ("cluster.json", catalog),
            ("model.json", web_test_case.ROOT / "tests/data/models/tiny-llama-written-out.json"), ("run.json", self.folder / "run.json"))}
        self.open()
        taken = {}
        for name, document in documents.items():
            if name == "run.json":
                self.drop("host.json", (self.folder / "host.json").read_text(encoding="utf-8"))
                self.wait(lambda: "host" in self.by_id("title").text, "the plan is not taken")
                self.answered()
            for changed in planted(document):
                before = self.answers()
                self.js("document.getElementById('trouble').textContent = ''")
                self.drop(name, json.dumps(changed))
                self.wait(lambda: self.answers() > before or self.by_id("trouble").text != "", f"{name} is neither taken nor refused")
                taken.setdefault(name, []).extend([changed] if self.answers() > before else [])
                self.assertIsNone(self.js("window.broken || null"), changed)
                self.assertEqual(self.js("document.images.length"), 0, changed)
        self.assertGreater(min(len(taken[name]) for name in ("config.json", "plan.json", "run.json")), 1)
        report = self.folder / "report.html"
        for changed in taken["plan.json"]:
            self.native("report", "-", "-o", str(report), text=json.dumps(changed))
            self.driver.get(report.as_uri())
            self.assertIsNone(self.js("window.broken || null"), changed)
            self.assertEqual(self.js("document.images.length"), 0, changed)

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
