"""Ranks of one run that were given different things: refused before the first step, by rank and field, at every flag of the table
that `run --help --json` has. What is each machine's own matter may differ."""

import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

CONFIG = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 256}
STARTS = 60
BASE = {"PLAN": "p.json", "--steps": "3", "--data": "random:100"}

# By flag: what all ranks are given beside BASE (None: not that), and what one is given instead. A flag that is not here gets what
# VALUES has for its kind of value.
CASES = {
    "--epochs": ({"--steps": None, "--data": "random:8", "--epochs": "1"}, "2"),
    "--test-data": ({"--test-data": "random:8"}, "random:9"),
    "--eval-every": ({"--test-data": "random:8", "--eval-every": "2"}, "3"),
    "--init": ({"--init": "1.safetensors"}, "2.safetensors"),
    "--checkpoint": ({"--checkpoint": "new"}, None),
    "--trace": ({"--trace": "t.json"}, None),
    "--every": ({"--checkpoint": "new"}, "2"),
    "--keep": ({"--checkpoint": "new"}, "2"),
    "--resume-from": ({"--checkpoint": "saved", "--resume-from": "1"}, "2"),
    "--resume": ({"--checkpoint": "saved"}, ""),
    "--graphs": ({"--device": "cuda", "--graphs": "off"}, "on"),
    "--data": ({}, "random:101"),
    "--training": ({"--training": "a.training"}, "b.training"),
}
VALUES = {"N": "7", "stop|continue": "continue", "host|cuda": "cuda", "any|ordered": "ordered"}
# The rank that has it ends by itself, since a launcher's ranks are processes; the others wait for it.
ALONE = {"--loopback"}
# Each rank's own matter, as the table must say, and a value that only one has.
OWN = {"--rendezvous-key": None, "--insecure-network": None, "--timeout": "50 s", "--threads": "1", "--memory-limit": "1 GiB",
       "--delays": "5", "--poison": "", "--budget": "2", "--json": ""}


class Ranks(ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        for name, rate in (("a", 0.001), ("b", 0.002)):
            (self.folder / f"{name}.training").write_text(json.dumps(
                {"format": "shardwright-training", "version": 1, "optimizer": {"learning_rate": rate}}))
        (table,) = json.loads(self.succeed("run", "--help", "--json"))["commands"]
        self.table = {row["name"]: row for row in table["flags"] + table["switches"]}

    def plan(self, ranks, *flags, name="p.json"):
        self.succeed("plan", "--model", "./config.json", "--cluster", f"h100-80 x{ranks}, nvlink 450 GB/s", "--kernel-set",
                     "shardwright-host", "--precision", "fp32", "--seq", "16", "--micro-batch", "1", "--global-batch", "12", "-o",
                     name, "--no-search", *flags)
        shutil.rmtree(self.folder / "new", ignore_errors=True)

    def words(self, given):
        given = dict(BASE, **given)
        return [word for flag, value in given.items() if value is not None
                for word in ((value,) if flag == "PLAN" else (flag, value) if value else (flag,))]

    def start(self, given, folders=None):
        """(exit code, standard output, standard error) of each rank, given these flags beside BASE."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        runs = [subprocess.Popen(
            [shardwright_test_case.PROGRAM, "run", *self.words(flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=self.folder / (folders[rank] if folders else "."),
            env=dict(os.environ, OPENBLAS_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(len(given)), LOCAL_RANK=str(rank),
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))) for rank, flags in enumerate(given)]
        texts = [run.communicate(timeout=300) for run in runs]
        return [(run.returncode, *text) for run, text in zip(runs, texts)]

    def assert_refused(self, ends, victim, field):
        """All end before the first step, and name the rank that differs from the first one (the first one: who differs from it)."""
        others = ", ".join(map(str, range(1, len(ends))))
        who = f"rank {victim}" if victim > 0 else f"rank {others}" if len(ends) == 2 else f"ranks {others}"
        for code, out, err in ends:
            self.assertEqual((code, out), (3, ""), (field, ends))
            self.assertNotIn("step 1/", err)
            self.assertRegex(err, rf"(?m)^error: {who}: {field} .+, rank 0 has .+; give all ranks the same$", (field, ends))

    def differ(self, ranks, victim, common, field, other, named=None):
        given = [dict(common) for _ in range(ranks)]
        given[victim][field] = other
        self.assert_refused(self.start(given), victim, named or field)

    def make_checkpoints(self):
        """Of two seeds: weights to start from, and a folder to resume from."""
        for seed, folder in (("1", "saved"), ("2", "other")):
            code, _, err = self.run_program("run", *self.words({"--checkpoint": folder, "--seed": seed, "--steps": "2",
                                                                "--every": "1", "--data": "random:100"}))
            self.assertEqual(code, 0, err)
            self.succeed("checkpoint", "export", folder, "-o", f"{seed}.safetensors")

    def cases(self):
        """(flag, what all are given, what one is given), for everything in the table that must be the same."""
        for name, row in self.table.items():
            if row["ranks"] == "any":
                self.assertIn(name, OWN)
            elif name in CASES:
                yield (name, *CASES[name])
            elif name not in ALONE:
                self.assertIn(row.get("value", ""), {"", *VALUES}, f"{name}: this test does not know what to give it")
                yield name, {}, VALUES.get(row.get("value", ""), "")

    def test_every_flag_of_the_table(self):
        rng = random.Random(47)
        cases, done = list(self.cases()), 0
        self.assertGreater(len(cases), 15)
        for ranks in (2, 3, 4):
            self.plan(ranks)
            for name in ("saved", "other"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self.make_checkpoints()
            # All of them once; then by chance, to sixty.
            chosen = cases[ranks - 2::3] if ranks < 4 else cases[2::3] + rng.choices(cases, k=STARTS - len(cases))
            for name, common, other in chosen:
                victim = rng.randrange(ranks)
                with self.subTest(ranks=ranks, victim=victim, flag=name):
                    self.differ(ranks, victim, common, name, other, f"{name}(: [a-z_.]+)?")
                    done += 1
        self.assertEqual(done, STARTS)

    def test_content_counts_and_names_do_not(self):
        self.plan(2)
        here = self.folder / "here"
        here.mkdir()
        (self.folder / "data.txt").write_text("abcdefghij" * 100)
        common = {"--data": "data.txt"}
        for name in ("p.json", "a.training", "data.txt"):
            shutil.copy(self.folder / name, here)
        # One field of the plan, of the training options, a byte of the data; all under the same names.
        self.plan(2, "--clip", "off", name="free.json")
        for name, text, flag, field in (
                ("p.json", (self.folder / "free.json").read_text(), {}, "PLAN: job.clip_gradients"),
                ("a.training", (self.folder / "b.training").read_text(), {"--training": "a.training"},
                 "--training: optimizer.learning_rate"),
                ("data.txt", "abcdefghij" * 99 + "abcdefghi!", {}, "--data: content")):
            with self.subTest(name=name):
                before = (here / name).read_text()
                (here / name).write_text(text)
                self.assert_refused(self.start([{**common, **flag}] * 2, (".", "here")), 1, field)
                (here / name).write_text(before)
        # Another folder of checkpoints under the same name.
        self.assert_refused(self.start([{"--checkpoint": "c"}] * 2, (".", "here")), 1, "lock in --checkpoint")
        # The same under other names, and everything that is a rank's own matter.
        shutil.copy(here / "data.txt", self.folder / "d.txt")
        document = json.dumps(json.loads((here / "p.json").read_text()), indent=7)
        (self.folder / "q.json").write_text(document)
        own = {name: OWN[name] for name, row in self.table.items() if row["ranks"] == "any"}
        ends = self.start([{**common, "--training": "a.training"},
                           {**own, "PLAN": "q.json", "--data": "d.txt", "--training": "here/a.training"}])
        self.assertEqual([end[0] for end in ends], [0, 0], ends)
        self.assertIn("step 3/3", ends[0][2])

    def test_plans_for_other_numbers_of_ranks(self):
        self.plan(4, name="q.json")
        self.plan(2)
        self.differ(2, 1, {}, "PLAN", "q.json", r"PLAN: cluster\.json\.description")

    def test_who_ends_alone_is_named_by_the_others(self):
        self.plan(3)
        for flag in ALONE:
            ends = self.start([{"--device": "cuda", "--timeout": "3 s"}, {"--device": "cuda", flag: "3"},
                               {"--device": "cuda", "--timeout": "3 s"}])
            self.assertEqual([end[0] for end in ends], [5, 2, 5])
            self.assertIn(f"error: {flag} runs all ranks in one process", ends[1][2])
            self.assertRegex(ends[0][2], r"error: rank 0: waited 3000 ms at port \d+ for rank 1\n")

    def test_evaluations(self):
        self.plan(2)
        self.make_checkpoints()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        runs = [subprocess.Popen(
            [shardwright_test_case.PROGRAM, "eval", "p.json", "--checkpoint", "saved", "--data", f"random:{8 + rank}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
            env=dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
            for rank in range(2)]
        for run in runs:
            out, err = run.communicate(timeout=300)
            self.assertEqual((run.returncode, out, err),
                             (3, "", "error: rank 1: --data: samples 9, rank 0 has 8; give all ranks the same\n"))


if __name__ == "__main__":
    main()
