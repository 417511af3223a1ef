"""The ten questions of docs/questions.md, asked of the page; arguments as of page_test.py. What is expected is quoted there."""

import re
import shlex
import unittest

import web_test_case
from page_test_case import PageTestCase
from selenium.webdriver.common.by import By

PAGE = (web_test_case.ROOT / "docs/questions.md").read_text(encoding="utf-8")
# Per question what was typed and the two lines of the answer.
QUOTED = [(shlex.split(command), answer) for command, answer in
          re.findall(r"^```text\n\$ shardwright ([^\n]*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)]
FIELDS = {"--nodes": "nodes", "--seq": "seq", "--lora-rank": "lora_rank"}


class Questions(PageTestCase):

    def quoted(self, number):
        """The words and the answer of an `estimate`: {field: text}, whether it fits, its tokens/s per GPU less its error."""
        (command, model, cluster, *flags), answer = QUOTED[number - 1]
        self.assertEqual(command, "estimate")
        said = {"model": model, "cluster": cluster, **{FIELDS[name]: value for name, value in zip(flags[::2], flags[1::2])}}
        rate = re.search(r"^([\d,]+) tokens/s per GPU \+- ([\d.]+) %", answer, re.MULTILINE)
        return said, ": fits " in answer, None if rate is None else int(rate[1].replace(",", "")) / (1 + float(rate[2]) / 100)

    def estimated(self, number):
        """Asks for the largest batch, and gets an answer as good as the one which is quoted, within its band."""
        said, fits, rate = self.quoted(number)
        self.open()
        self.choose("search-plan")
        if "lora_rank" in said:
            self.choose("lora")
        self.ask(**said)
        self.assertEqual(self.by_id("verdict").get_attribute("class"), "yes" if fits else "no")
        self.shot(f"question_{number}")
        if fits:
            self.assertGreaterEqual(int(self.figures()["tokens/s per GPU"].split("\n")[0].replace(",", "")), rate)
            self.assertRegex(self.by_id("command").text, r"^shardwright plan --search --explain --model \S+ .* --global-batch \d+$")

    def test_1_a_32b_model_on_eight_h100(self):
        self.estimated(1)

    def test_2_a_70b_model_with_lora(self):
        self.estimated(2)

    def test_3_7b_on_two_rtx_4090(self):
        self.estimated(3)

    def test_4_13b_on_64_a100_with_a_slow_network(self):
        self.estimated(4)

    def test_5_405b_on_16384_gpus(self):
        self.estimated(5)

    def test_6_why_do_i_run_out_of_memory(self):
        words, answer = QUOTED[5]
        self.assertEqual(words[:3], ["plan", "--model", "llama-3-8b"])
        self.open()
        self.ask(model="llama-3-8b", cluster="dgx-h100", seq="8192", micro_batch="4")
        self.assertEqual(self.by_id("verdict").get_attribute("class"), "no")
        sums, largest = re.search(r"^does not fit: (.*); the largest part is (.*)$", answer, re.MULTILINE).groups()
        self.assertIn(sums, self.by_id("verdict").text)
        first = self.driver.find_element(By.CSS_SELECTOR, "#advice-body tbody tr")
        self.assertEqual(", ".join(cell.text for cell in first.find_elements(By.CSS_SELECTOR, "th, td")), largest)

    def test_7_fsdp1_or_fsdp2(self):
        """One is kept, the other asked for, and both stand side by side."""
        words, answer = QUOTED[6]
        self.assertIn("fsdp1,fsdp2", words)
        expected = re.search(r"^fsdp1 is best: ([\d.]+) ms; fsdp2 ([\d.]+) ms", answer, re.MULTILINE).groups()
        self.open("#how=search&model=llama-3.2-1b&cluster=dgx-a100&seq=2048&global-batch=64&dialect=fsdp1")
        self.by_id("keep").click()
        self.set("dialect", "fsdp2")
        self.wait(lambda: "plan.dialect" in self.by_id("side-body").text, "no comparison")
        cells = [cell.text for cell in self.driver.find_elements(By.CSS_SELECTOR, "#side-body tbody tr:first-child td")[:2]]
        self.assertEqual([f"{float(text.removesuffix(' ms')):.3g}" for text in cells], list(expected))
        differs = {row.find_element(By.TAG_NAME, "th").text: [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
                   for row in self.driver.find_elements(By.CSS_SELECTOR, "#side-body table:last-child tbody tr")}
        self.assertEqual(differs["plan.dialect"], ["fsdp1", "fsdp2"])
        self.shot("question_7")

    def test_8_a_cluster_that_no_catalog_has(self):
        self.estimated(8)

    def test_9_128k_tokens(self):
        self.estimated(9)
        self.assertIn("147 GiB too much of 76.9 GiB even with the least memory found", self.by_id("verdict").text)
        self.assertIn("--loss-chunks 16", self.by_id("advice-body").text)

    def test_10_a_gpu_of_a_data_sheet(self):
        """Its file is dropped on the page, and is in the link."""
        said, fits, rate = self.quoted(10)
        self.assertTrue(fits)
        self.open()
        self.choose("search-plan")
        self.type("model", said["model"])
        self.drop(said["cluster"], re.search(r"```json my-box.json\n(.*?)```", PAGE, re.DOTALL)[1])
        self.wait(lambda: self.by_id("cluster").get_attribute("value") == said["cluster"], "the cluster is not taken")
        self.assertEqual(self.by_id("nodes").get_attribute("value"), "")
        self.ask(**said)
        self.assertGreaterEqual(int(self.figures()["tokens/s per GPU"].split("\n")[0].replace(",", "")), rate)
        link, title, figures = self.js("location.hash"), self.by_id("title").text, self.figures()
        self.assertIn("my-box", title)
        self.open(link)
        self.assertEqual((self.by_id("title").text, self.figures()), (title, figures))


if __name__ == "__main__":
    unittest.main()
