"""Every command and every argument that names a file or folder, on what strangers may have put there: texts of great depth, pipes and
devices in the place of files, names that the system refuses (docs/security.md, "Folders"). The commands come from `--help --json`.
Each argument and each file meets half of the hostile ones, by turns; SHARDWRIGHT_DEEP=1: all."""

import json
import os
import pathlib
import pickle
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import TESTS, main
from training_test_case import TINY

SECONDS = 20  # on a busy machine; each answers in well under one
DEPTH = 100_000
TURNS = 1 if "SHARDWRIGHT_DEEP" in os.environ else 2
NO_UTF8 = os.fsdecode(b"\xff")
# What makes each command read each of its files: {argument: value}. Arguments without a dash stand in the help's order.
WORKS = {
    "estimate": {"MODEL": "config.json", "CLUSTER": "cluster.json", "--profile": "generic", "--seq": "16"},
    "inspect": {"TARGET": "plan.json", "--trace": "sim.json"},
    "plan": {"--model": "config.json", "--cluster": "cluster.json", "--seq": "16", "--profile": "generic", "--wrap": "block",
             "--micro-batch": "1"},
    "simulate": {"PLAN": "plan.json"},
    "sweep": {"--model": "config.json", "--cluster": "cluster.json", "--seq": "16", "--profile": "generic", "--wrap": "block",
              "--micro-batch": "1,2"},
    "goodput": {"PLAN": "plan.json", "--mtbf": "1000 h", "--checkpoint-time": "10 s", "--tokens": "1e9"},
    "baselines": {"--model": "config.json", "--cluster": "cluster.json", "--seq": "16", "--profile": "generic", "--global-batch": "1"},
    "emit": {"PLAN": "plan.json", "--to": "fsdp2", "-o": "emitted"},
    "import-run": {"FILE": "settings/accelerate.yaml", "--model": "config.json", "--cluster": "cluster.json", "--profile": "generic",
                   "--seq": "16"},
    "run": {"PLAN": "plan.json", "--data": "random:100", "--steps": "1", "--test-data": "random:10", "--init": "hub",
            "--training": "training.json", "--rendezvous-key": "key"},
    "eval": {"PLAN": "plan.json", "--data": "random:100", "--checkpoint": "checkpoints", "--rendezvous-key": "key"},
    "checkpoint": {"ACTION": "inspect", "FOLDER": "checkpoints"},
    "compare": {"SIM": "sim.json", "MEASURED": "run.json", "--plan": "plan.json"},
    "advise": {"TRACE": "run.json", "--plan": "plan.json"},
    "validate": {"RUNS": "runs.json", "--profiles": "profiles"},
    "price": {"QUESTIONS": "questions.json"},
    "calibrate": {"TRACE": "run.json", "-o": "calibrated.json", "--profile": "generic", "--plan": "plan.json", "--cluster": "cluster.json",
                  "--profiles": "profiles", "--rendezvous-key": "key"},
    "report": {"PLAN": "plan.json", "SIM": "sim.json", "MEASURED": "run.json", "-o": "page.html", "--search": "search.json",
               "--what-if": "sweep.json"},
    "diff": {"PLAN": "plan.json", "OTHER": "plan.json"},
    "check": {"BUDGET": "budget.toml", "--last": "record.json"},
    "inspect-trace": {"FILE": "run.json"},
    "topo": {"ACTION": "import", "FILE": "topo.txt", "--gpu": "h100-80"},
    "hang": {"DUMP": "dumps", "--plan": "plan.json"},
    "judge": {"LOG": "run.log", "--plan": "plan.json"},
    "export": {"SOURCE": "hub", "--seq": "16", "--python": "/bin/false"},
}
# Beside WORKS: arguments that shut others out, or are read by another action only.
INSTEAD = {
    ("plan", "--from"): {"--from": "plan.json"},
    ("plan", "--keep"): {"--model": "config.json", "--cluster": "cluster.json", "--seq": "16", "--global-batch": "1",
                         "--keep": "plan.json"},
    ("checkpoint", "--model"): {"ACTION": "import", "FOLDER": "hub", "-o": "imported", "--model": "config.json"},
    ("calibrate", "--plan"): {"TRACE": "recorded", "-o": "calibrated.json", "--plan": "plan.json"},
    ("run", "--checkpoint"): {"PLAN": "plan.json", "--data": "random:100", "--steps": "1"},
    ("eval", "--data"): None,  # to its end; run reads the same
    ("run", "--rendezvous-key"): None, ("eval", "--rendezvous-key"): None,  # a key of the user's own; cli_wire
    ("calibrate", "--rendezvous-key"): None, ("calibrate", "--cluster"): None,  # of nccl-tests and GPUs alone
}


def deep(opening, closing, inside=""):
    return opening * DEPTH + inside + closing * DEPTH


def nested_pickle(depth):
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def deep_files(folder):
    """One of each format whose reader nests."""
    texts = {
        "list.json": deep("[", "]"), "object.json": deep('{"a":', "}", "1"), "trace.json": '{"traceEvents": ' + deep("[", "]") + "}",
        "args.json": '{"traceEvents": [{"ph": "X", "args": ' + deep('{"a":', "}", "1") + "}]}", "open.json": "[" * DEPTH,
        "model.json": '{"format": "shardwright-model", "ops": ' + deep("[", "]") + "}",
        "flow.yaml": "a: " + deep("[", "]"), "block.yaml": "".join(" " * i + "a:\n" for i in range(1000)), "dashes.yaml": "- " * DEPTH,
        "tags.yaml": "? " * DEPTH, "value.toml": "a = " + deep("[", "]"), "inline.toml": "a = " + deep("{a=", "}", "1"),
        "dotted.toml": "a." * DEPTH + "a = 1", "table.toml": "[" + "a." * DEPTH + "a]", "topo.xml": deep("<a>", "</a>"),
        "system.xml": '<system version="1">' + deep("<pci>", "</pci>") + "</system>", "script.sh": "accelerate launch " + "'\"" * DEPTH,
        "words.txt": "a" * 3 * DEPTH, "lines.csv": "," * DEPTH + "\n" + "\"" * DEPTH,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "lists_rank_0").write_bytes(nested_pickle(DEPTH))
    database = sqlite3.connect(folder / "views.sqlite")
    database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    database.execute("PRAGMA writable_schema = 1")
    database.execute("INSERT INTO sqlite_master VALUES ('view', 'v', 'v', 0, ?)", ("CREATE VIEW v AS SELECT " + "(" * 900 + "1" + ")" * 900,))
    database.commit()
    database.close()
    return sorted(folder.iterdir())


def make_good(folder, run):
    """Files and folders of every format, as the program and its users write them."""
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "run.log").write_text("10 s/step\n")
    run("topo", "import", "topo.txt", "--gpu", "h100-80", "-o", "cluster.json")
    run("plan", "--model", "config.json", "--cluster", "h100-80 x1", "--seq", "16", "--no-search", "--kernel-set", "shardwright-host",
        "--precision", "fp32", "-o", "plan.json")
    run("simulate", "plan.json", "--trace", "sim.json")
    run("run", "plan.json", "--data", "random:100", "--steps", "2", "--checkpoint", "checkpoints", "--trace", "run.json")
    (folder / "hub").mkdir()
    shutil.copy(folder / "config.json", folder / "hub")
    run("checkpoint", "export", "checkpoints", "-o", "hub/model.safetensors")
    shutil.copytree(folder / "hub", folder / "sharded")
    (folder / "sharded" / "model.safetensors").rename(folder / "sharded" / "a.safetensors")
    content = (folder / "sharded" / "a.safetensors").read_bytes()
    names = json.loads(content[8:8 + struct.unpack("<Q", content[:8])[0]]).keys() - {"__metadata__"}
    index = {"weight_map": dict.fromkeys(sorted(names), "a.safetensors")}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "training.json").write_text('{"optimizer": {"learning_rate": 0.001}}')
    (folder / "budget.toml").write_text('[job.a]\nplan = "plan.json"\nmemory = "80 GiB"\n')
    run("check", "budget.toml", "--save", "record.json")
    for name, words in (("search.json", ("plan", "--model", "config.json", "--cluster", "h100-80 x1", "--seq", "16", "--global-batch", "1")),
                        ("sweep.json", ("sweep", "--model", "config.json", "--cluster", "h100-80 x1", "--seq", "16"))):
        (folder / name).write_text(run(*words, "--json"))
    (folder / "key").write_text("0123456789abcdef" * 4)
    (folder / "key").chmod(0o600)
    (folder / "dumps").mkdir()
    for rank in (0, 1):
        (folder / "dumps" / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(
            {"version": "2.4", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "entries": []}, protocol=2))
    (folder / "runs.json").write_text(shardwright_test_case.run_list())
    (folder / "questions.json").write_text('{"kernels": [{"gpu": "h100-80", "op": "gemm", "dtype": "bf16", "m": 8, "n": 8, "k": 8}]}')
    shutil.copytree(TESTS.parent / "topologies" / "profiles", folder / "profiles")
    (folder / "few").mkdir()
    shutil.copy(folder / "profiles" / "generic.json", folder / "few")
    shutil.copytree(TESTS / "data" / "digits", folder / "digits")
    (folder / "recorded").mkdir()
    shutil.copy(TESTS / "fuzz" / "corpus" / "kineto" / "trace.json", folder / "recorded" / "rank0.json")
    (folder / "tokens").mkdir()
    (folder / "tokens" / "a.bin").write_bytes(bytes(1000))
    make_settings(folder / "settings")


def make_settings(folder):
    folder.mkdir()
    (folder / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 1\n"
        "deepspeed_config:\n  deepspeed_config_file: settings/zero.json\n")
    (folder / "zero.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, '
                                      '"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}')
    (folder / "trainer.json").write_text('{"output_dir": "o", "per_device_train_batch_size": 1, "deepspeed": "settings/zero.json"}')
    (folder / "launch.sh").write_text(
        "accelerate launch --config_file settings/accelerate.yaml train.py --output_dir o --per_device_train_batch_size 1 "
        "--model_name_or_path hub --bf16 true\n")


TOPO = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t0\n\nLegend:\n"
# Folders that a stranger has made, with what reads them. Every file in them is replaced in turn.
FOLDERS = {
    "checkpoints": (("checkpoint", "inspect", "checkpoints"), ("checkpoint", "export", "checkpoints", "-o", "x.safetensors"),
                    ("eval", "plan.json", "--data", "random:10", "--checkpoint", "checkpoints"),
                    ("run", "plan.json", "--data", "random:100", "--steps", "3", "--checkpoint", "checkpoints", "--resume")),
    "hub": (("inspect", "hub"), ("inspect", "hub/config.json"), ("plan", "--model", "hub", "--cluster", "h100-80 x1", "--seq", "16"),
            ("run", "plan.json", "--data", "random:10", "--steps", "1", "--init", "hub"),
            ("checkpoint", "import", "hub", "-o", "imported")),
    "sharded": (("inspect", "sharded"), ("plan", "--model", "sharded", "--cluster", "h100-80 x1", "--seq", "16"),
                ("inspect", "sharded/model.safetensors.index.json"),
                ("run", "plan.json", "--data", "random:10", "--steps", "1", "--init", "sharded"),
                ("checkpoint", "import", "sharded", "-o", "imported")),
    "settings": (("import-run", "settings/launch.sh", "--model", "config.json", "--cluster", "h100-80 x1", "--seq", "16"),
                 ("import-run", "settings/launch.sh", "--cluster", "h100-80 x1", "--seq", "16"),
                 ("import-run", "settings/accelerate.yaml", "--model", "config.json", "--cluster", "h100-80 x1", "--seq", "16"),
                 ("import-run", "settings/trainer.json", "--model", "config.json", "--cluster", "h100-80 x1", "--seq", "16")),
    "dumps": (("hang", "dumps"),),
    "recorded": (("compare", "plan.json", "recorded"), ("advise", "recorded", "--plan", "plan.json"),
                 ("calibrate", "recorded", "--plan", "plan.json", "-o", "c.json")),
    "few": (("validate", "runs.json", "--profiles", "few"),),
    "digits": (("run", "images.json", "--data", "digits", "--steps", "1"),),
    "tokens": (("run", "plan.json", "--data", "tokens", "--steps", "1"), ("run", "plan.json", "--data", "tokens/a.bin", "--steps", "1")),
}
# Names that readers look for beside what they were given, in folders that lack them.
ALSO = {"hub": ("model.safetensors.index.json", "model.json"), "sharded": ("model.safetensors", "model.json"),
        "checkpoints": ("manifest.json", "step-00000009/manifest.json", ".unfinished-step-00000009-1"),
        "dumps": ("nccl_trace_rank_7",), "recorded": ("z.json", "z.json.gz", "z.sqlite"),
        "few": ("a.json",), "tokens": ("b.bin", "b.txt"), "digits": ("a-images-idx3-ubyte",), "settings": ()}


class ForeignFiles(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.good = pathlib.Path(scratch.name) / "good"
        cls.good.mkdir()
        (cls.good / "topo.txt").write_text(TOPO)

        def run(*words):
            done = subprocess.run([shardwright_test_case.PROGRAM, *words], cwd=cls.good, capture_output=True, text=True, check=False)
            if done.returncode not in (0, 1):
                raise AssertionError(f"{words}: {done.stderr}")
            return done.stdout
        make_good(cls.good, run)

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name) / "f"
        shutil.copytree(self.good, self.folder)

    def ends(self, *words, **options):
        """(exit code, standard error) of a command that must end in time, by an answer or one of the errors that are the user's."""
        try:
            done = subprocess.run([shardwright_test_case.PROGRAM, *words], cwd=self.folder, timeout=SECONDS, check=False, text=True,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace", **options)
        except subprocess.TimeoutExpired:
            self.fail(f"{' '.join(words)[:300]}: still running after {SECONDS} s")
        self.assertIn(done.returncode, (0, 1, 2, 3, 4), f"{' '.join(words)[:300]}: {done.stderr[:500]}")
        return done.returncode, done.stderr


def all_commands():
    """What the program knows of its commands."""
    printed = subprocess.run([shardwright_test_case.PROGRAM, "--help", "--json"], capture_output=True, check=True).stdout
    return json.loads(printed)["commands"]


def writers():
    """(command, flag) of each output."""
    for command in all_commands():
        for row in command["flags"]:
            if row["file"] == "write" or row["name"] == "--checkpoint":
                yield command, row["name"]


def output_words(command, flag, value):
    """A command that writes to `value`."""
    works = {name: text for name, text in WORKS.get(command["name"], {}).items() if name not in ("-o", "--init", "--rendezvous-key", flag)}
    order = [part["name"] for part in command["positionals"]]
    words = [works[name] for name in order if name in works]
    for name, text in works.items():
        words += [name, text] if name.startswith("-") else []
    return [command["name"], *words, flag, value]


class Arguments(ForeignFiles):

    def words(self, command, argument, value):
        """A command that reads `value` as `argument`; None where that takes more than this machine has."""
        works = INSTEAD.get((command["name"], argument), WORKS.get(command["name"], {}))
        if works is None:
            return None
        order = [row["name"] for row in command["positionals"]]
        given = {**works, argument: value}
        words = [given[name] for name in order if name in given]
        for name, text in given.items():
            words += [name, text] if name.startswith("-") else []
        return [command["name"], *words]

    def readers(self):
        """(command, argument) of each file that a command reads, by the help."""
        for command in all_commands():
            for row in (*command["positionals"], *command["flags"]):
                if row["file"] == "read" or "FOLDER" in row.get("value", "") and row["file"] == "none":
                    yield command, row["name"]

    def test_each_argument_is_read(self):
        """Else the tests below would prove nothing."""
        found = list(self.readers())
        self.assertGreater(len(found), 60)
        for command, argument in found:
            words = self.words(command, argument, "no-such/file.json")
            if words is not None and command["name"] != "run" and argument != "--checkpoint":
                with self.subTest(command=command["name"], argument=argument):
                    code, error = self.ends(*words)
                    self.assertEqual((code, "no-such/file.json" in error), (3, True), error)

    def test_deep_texts_and_refused_names(self):
        """std::regex, a copied list and the destruction of nested documents took the stack."""
        (self.folder / "deep").mkdir()
        hostile = [f"deep/{file.name}" for file in deep_files(self.folder / "deep")]
        (self.folder / "a").symlink_to("b")
        (self.folder / "b").symlink_to("a")
        hostile += ["n" * 300, "n" * 60_000, "h100 " * 12_000, "8x" * 30_000, "h100-80 x1, " + "a" * 60_000, "a", "a/x.json", "b/x/y", "/",
                    "plan.json/x", "n" * 300 + "/x.json", "x/" * 3000, "deep", "/dev/null", "", NO_UTF8, "hub" + NO_UTF8, "checkpoints" + NO_UTF8,
                    "dumps" + NO_UTF8, "recorded" + NO_UTF8]
        for name in ("hub", "checkpoints", "dumps", "recorded"):
            shutil.copytree(self.folder / name, self.folder / (name + NO_UTF8))
        for turn, (command, argument) in enumerate(self.readers()):
            with self.subTest(command=command["name"], argument=argument):
                for value in hostile[turn % TURNS::TURNS]:
                    words = self.words(command, argument, value)
                    if words is not None:
                        self.ends(*words)

    def test_without_permission(self):
        """EACCES was exit code 70. Root may everything, so that another user asks where the tests are root's."""
        options = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        for path in (self.folder.parent, self.folder):
            path.chmod(0o777)
        closed = self.folder / "closed"
        closed.mkdir()
        (closed / "x.json").write_text("{}")
        (self.folder / "mine.json").write_text("{}")
        (self.folder / "mine.json").chmod(0)
        closed.chmod(0)
        blind = self.folder / "blind"  # may be written, not entered
        blind.mkdir()
        blind.chmod(0o222)
        for folder in (closed, blind):
            self.addCleanup(folder.chmod, 0o700)
        values = ("closed/x.json", "closed", "mine.json", "blind", "blind/x.json")
        for command, argument in self.readers():
            with self.subTest(command=command["name"], argument=argument):
                for value in values:
                    words = self.words(command, argument, value)
                    if words is not None:
                        self.ends(*words, **options)
        for command, flag in writers():
            with self.subTest(command=command["name"], flag=flag):
                for value in (name for name in values if name != "mine.json"):  # which a rename replaces
                    code = self.ends(*output_words(command, flag, value), **options)[0]
                    self.assertTrue(code != 0 or command["name"] == "advise")


class Planted(ForeignFiles):

    def plant(self, place, kind):
        """Puts something that is no file where a file may be."""
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                before = os.getcwd()
                os.chdir(place.parent)  # the name of a socket is short
                listener.bind(place.name)
                os.chdir(before)
        elif kind == "folder":
            place.mkdir()
        elif kind == "nothing":
            pass
        else:
            place.symlink_to(kind)

    def test_folders(self):
        """A pipe nobody writes to, a device without end, a socket, a circle of links in the place of each file of a folder."""
        self.assertEqual(sorted(FOLDERS), sorted(ALSO))
        for folder, commands in FOLDERS.items():
            files = [file.relative_to(self.good) for file in sorted((self.good / folder).rglob("*")) if file.is_file()]
            for turn, file in enumerate((*files, *(pathlib.Path(folder) / name for name in ALSO[folder]))):
                for kind in ("pipe", "/dev/zero", "/dev/tty", "socket", file.name, "folder")[turn % TURNS::TURNS]:
                    shutil.rmtree(self.folder / folder)
                    shutil.copytree(self.good / folder, self.folder / folder)
                    self.plant(self.folder / file, kind)
                    for words in commands:
                        if kind in ("pipe", "/dev/tty", "/dev/zero") and str(file) in words:
                            continue  # the user names it, and may write to it
                        with self.subTest(file=str(file), kind=kind, words=words):
                            self.ends(*words)
                            shutil.rmtree(self.folder / "imported", ignore_errors=True)

    def test_names_in_files(self):
        """What a file names, in place of a file: second hops of settings, budgets, indices and manifests."""
        os.mkfifo(self.folder / "pipe")
        os.mkfifo(self.folder / "pipe.json")
        os.mkfifo(self.folder / "pipe.yaml")
        os.mkfifo(self.folder / "pipe.safetensors")
        job = ("--model", "config.json", "--cluster", "h100-80 x1", "--seq", "16")
        settings = self.folder / "settings"
        for name in ("pipe", "pipe.json", "pipe.yaml", "/dev/zero", "/dev/tty", "/proc/kmsg", "/dev/watchdog"):
            texts = {
                "a.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: NAME\n",
                "a.json": '{"output_dir": "o", "deepspeed": "NAME"}', "b.yaml": "base_model: NAME\ndeepspeed: NAME\n",
                "a.sh": "accelerate launch --config_file NAME train.py --output_dir o\n",
                "b.sh": "deepspeed --num_gpus 1 train.py --deepspeed NAME --model_name_or_path NAME --output_dir o\n",
                "c.sh": "torchrun --nproc_per_node 1 train.py --deepspeed=NAME --output_dir=o --model_name_or_path=NAME\n",
                "d.sh": "torchrun --nproc_per_node 1 train.py --config NAME NAME\n",
                "a.toml": '[job]\nconfig_file = "NAME"\n[model]\nname = "llama3"\nflavor = "NAME"\nhf_assets_path = "NAME"\n',
            }
            for file, text in texts.items():
                (settings / file).write_text(text.replace("NAME", name))
                with self.subTest(file=file, name=name):
                    self.ends("import-run", f"settings/{file}", *job)
                    self.ends("import-run", f"settings/{file}", *job[2:])
            for text in ('[job.a]\nplan = "NAME"\n', '[job.a]\nflags = ["--model", "NAME", "--cluster", "h100-80 x1"]\n',
                         '[job.a]\nflags = ["--model", "config.json", "--cluster", "NAME"]\n',
                         '[job.a]\nflags = ["--from", "NAME"]\n', '[job.a]\nflags = ["--model", "gpt2", "--cluster", "./NAME"]\n'):
                (self.folder / "budget.toml").write_text(text.replace("NAME", name))
                with self.subTest(text=text, name=name):
                    self.ends("check", "budget.toml")
        self.indices()

    def indices(self):
        """Names that an index of weights and a manifest hold."""
        os.mkfifo(self.folder / "sharded" / "pipe.safetensors")
        index = self.folder / "sharded" / "model.safetensors.index.json"
        text = index.read_text()
        for name in ("pipe.safetensors", "../pipe.safetensors", "/dev/zero"):
            index.write_text(text.replace("a.safetensors", name))
            for words in FOLDERS["sharded"]:
                with self.subTest(words=words, name=name):
                    self.ends(*words)
        step = next((self.folder / "checkpoints").glob("step-*"))
        os.mkfifo(step / "pipe")
        manifest = (step / "manifest.json").read_text()
        for name in ("pipe", "../../pipe", "/dev/zero", "n" * 300, ".", "manifest.json"):
            body = manifest.rpartition(',\n "manifest_crc32"')[0].replace("rank-00000.safetensors", name)
            (step / "manifest.json").write_text(f'{body},\n "manifest_crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n')
            for words in FOLDERS["checkpoints"]:
                with self.subTest(words=words, name=name):
                    self.assertEqual(self.ends(*words)[0], 3)

    def test_what_the_user_names_may_be_a_pipe(self):
        for words in (("simulate", "/dev/stdin"), ("inspect", "/dev/stdin"), ("diff", "plan.json", "/dev/stdin"), ("emit", "/dev/stdin",
                       "--to", "fsdp2", "-o", "emitted")):
            with self.subTest(words=words):
                done = subprocess.run([shardwright_test_case.PROGRAM, *words], cwd=self.folder, input=(self.folder / "plan.json").read_bytes(),
                                      capture_output=True, timeout=SECONDS, check=False)
                self.assertIn(done.returncode, (0, 1), done.stderr)
        for script in ('"$0" simulate <(cat plan.json)', '"$0" plan --model <(cat config.json) --cluster "h100-80 x1" --seq 16',
                       'mkfifo p; (sleep 0.2; cat plan.json >p) & "$0" simulate p'):
            with self.subTest(script=script):
                done = subprocess.run(["bash", "-c", script, shardwright_test_case.PROGRAM], cwd=self.folder, capture_output=True,
                                      timeout=SECONDS, check=False)
                self.assertEqual(done.returncode, 0, done.stderr)


class Outputs(ForeignFiles):

    def test_names_that_the_system_refuses(self):
        """A name of 300 characters, a circle of links and a folder that may not be entered were exit code 70."""
        (self.folder / "a").symlink_to("b")
        (self.folder / "b").symlink_to("a")
        seen = 0
        for command, flag in writers():
            self.ends(*output_words(command, flag, NO_UTF8), "--json")
            for value in ("n" * 300, "n" * 300 + "/x", "a", "a/x", "a/x/", "plan.json/x", "plan.json/", "n" * 5000, "/proc/x/y"):
                with self.subTest(command=command["name"], flag=flag, value=value[:20]):
                    seen += 1
                    code = self.ends(*output_words(command, flag, value))[0]
                    self.assertTrue(code != 0 or command["name"] == "advise")  # which writes where a plan is better
        self.assertGreater(seen, 150)

    def test_records_that_lack_parts(self):
        """`check --last` without jobs was exit code 70."""
        record = json.loads((self.folder / "record.json").read_text())
        for change in ({"jobs": None}, {"jobs": []}, {"jobs": 1}, {"jobs": {"a": None}}, {"jobs": {"a": []}}, {"jobs": {"a": {}}},
                       {"jobs": {"a": {**record["jobs"]["a"], "plan": None}}}, {"jobs": {"a": {**record["jobs"]["a"], "plan": [1]}}},
                       {"schema": None}, {"schema": 1}, {"schema_version": {}}):
            with self.subTest(change=change):
                (self.folder / "record.json").write_text(json.dumps({k: v for k, v in {**record, **change}.items() if v is not None}))
                self.assertIn(self.ends("check", "budget.toml", "--last", "record.json")[0], (0, 3))


if __name__ == "__main__":
    main()
