"""Reading changes nothing: every command reads every format in each place where it reads a file, and the folder stays as it was.

The commands, and where they read and write, are those of `--help --json`. Each place reads SQLite's files and a third of the
others, by turns; SHARDWRIGHT_DEEP=1: all.
"""

import hashlib
import json
import os
import pathlib
import pickle
import shutil
import sqlite3
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import measured_files_test
import shardwright_test_case
from hang_test import STEP, HangTestCase
from shardwright_test_case import TESTS, main
from training_test_case import TINY, TrainingTestCase

DATA = TESTS / "data"
TURNS = 1 if "SHARDWRIGHT_DEEP" in os.environ else 3
# What a command needs beside the file that is tried: to get as far as reading. Outputs lie elsewhere.
MORE = {"estimate": {"MODEL": "gpt2", "CLUSTER": "dgx-a100"}, "plan": {"--model": "gpt2", "--cluster": "dgx-a100", "--seq": "128"},
        "sweep": {"--model": "gpt2", "--cluster": "dgx-a100", "--seq": "128"},
        "baselines": {"--model": "gpt2", "--cluster": "dgx-a100", "--seq": "128"},
        "goodput": {"--tokens": "1e9", "--mtbf": "1 h", "--checkpoint-time": "1 s"}, "emit": {"--to": "accelerate"},
        "import-run": {"FILE": "run.toml", "--cluster": "dgx-a100"}, "export": {"--seq": "8"}, "run": {"--steps": "1"},
        "eval": {"--checkpoint": "checkpoints", "--data": "random"},
        "compare": {"MEASURED": "trace.json"}, "topo": {"ACTION": "import"}, "checkpoint": {"ACTION": "inspect"},
        "calibrate": {"--cluster": "dgx-a100", "--date": "2026-01-01"}, "check": {"BUDGET": "budget.toml"}}
NEEDS_OUTPUT = ("calibrate", "export")


def picture(folder, reads=False):
    """Of each file what says that it is the same one as before: nobody sets the time of a change (ctime) back."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if reads and path.is_file() else ""
        found[str(path.relative_to(folder))] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


def commands():
    """{command: (the places that read, the positionals that are needed)}"""
    printed = shardwright_test_case.subprocess.run([shardwright_test_case.PROGRAM, "--help", "--json"], capture_output=True, check=True).stdout
    return {row["name"]: row for row in json.loads(printed)["commands"]}


def in_wal_mode(path, checkpointed):
    """An export of Nsight Systems that a job was cut off in: with its log and its index, or with neither."""
    measured_files_test.nsight(path)
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE late (x)")
    database.commit()
    if checkpointed:
        database.close()
        return
    for ending in ("", "-wal", "-shm"):
        shutil.copy(f"{path}{ending}", f"{path}.copy{ending}")
    database.close()
    for ending in ("", "-wal", "-shm"):
        os.replace(f"{path}.copy{ending}", f"{path}{ending}")


class Untouched(TrainingTestCase, HangTestCase):

    def make_files(self):
        """One of each format, by names that say which. Folders count as one."""
        folder = self.folder
        self.plan("plan.json", 2)
        self.train("plan.json", "--steps", "2", "--checkpoint", "checkpoints", "--trace", "run.json.gz")
        self.succeed("checkpoint", "export", "checkpoints", "-o", "model.safetensors")
        self.succeed("simulate", "plan.json", "--trace", "trace.json")
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--seq", "128", "--json", "--no-search")
        self.succeed("sweep", "--model", "gpt2", "--cluster", "dgx-a100", "--seq", "128", "--micro-batch", "1,2", "--csv", "sweep.csv")
        self.succeed("emit", "plan.json", "--to", "torchtitan", "-o", "emitted/")
        (folder / "budget.toml").write_text('[job.a]\nplan = "plan.json"\nmemory = "1 TB"\n')
        self.succeed("check", "budget.toml", "--save", "record.json")
        (folder / "job.sh").write_text("torchrun train.py --config_file settings.yaml\n")
        (folder / "settings.yaml").write_text("fsdp: full_shard\nper_device_train_batch_size: 1\n")
        shutil.copy(next((folder / "emitted").glob("*.toml")), folder / "run.toml")
        (folder / "training.json").write_text('{"learning_rate": 0.1}')
        (folder / "snapshot.pickle").write_bytes(pickle.dumps(measured_files_test.SNAPSHOT))
        for rank in range(4):
            self.dump(rank, STEP)
        (folder / "nccl.txt").write_text(measured_files_test.NCCL_TEXT)
        (folder / "matrix.txt").write_text(measured_files_test.MATRIX)
        (folder / "topo.xml").write_text(measured_files_test.NCCL_XML)
        measured_files_test.nsight(folder / "nsight.sqlite")
        in_wal_mode(folder / "wal.sqlite", True)
        in_wal_mode(folder / "unfinished.sqlite", False)
        (folder / "tokens.bin").write_bytes(struct.pack("<500H", *range(500)))
        shutil.copy(DATA / "digits" / "t10k-images-idx3-ubyte.gz", folder)
        (folder / "key").write_text("a key of many letters\n")
        (folder / "key").chmod(0o600)
        shutil.copy(TESTS.parent / "topologies" / "profiles" / "a100-80-torch.json", folder / "profile.json")
        shutil.copy(TESTS.parent / "topologies" / "catalog" / "dgx-a100.json", folder / "cluster.json")
        (folder / "runs.json").write_text(shardwright_test_case.run_list())
        (folder / "questions.json").write_text('{"kernels": [{"gpu": "h100-80", "op": "gemm", "dtype": "bf16", "m": 8, "n": 8, "k": 8}]}')

    def test_every_command_and_format(self):
        self.make_files()
        outside = self.folder.parent / f"{self.folder.name}-out"
        outside.mkdir()
        self.addCleanup(shutil.rmtree, outside)
        whole, before = picture(self.folder, reads=True), picture(self.folder)
        formats = sorted(path.name for path in self.folder.iterdir() if not path.name.endswith(("_1", "_2", "_3")))
        formats += ["checkpoints/step-00000002", "text:job.sh", "random"]
        self.assertGreater(len(formats), 25)
        read = {code: 0 for code in (0, 1, 2, 3, 4, 5)}
        turn = 0
        for name, row in commands().items():
            places = [place["name"] for place in (*row["positionals"], *row["flags"]) if place["file"] == "read"]
            for place in places:
                turn += 1
                for tried in (file for i, file in enumerate(formats) if (i + turn) % TURNS == 0 or file.endswith(".sqlite")):
                    words = self.words(name, row, place, tried, outside)
                    code, _, err = self.run_program(*words)
                    read[code] += 1
                    after = picture(self.folder)
                    changed = {file for file in {*before, *after} if before.get(file) != after.get(file)}
                    self.assertEqual(changed, set(), (words, code, err))
        self.assertEqual(picture(self.folder, reads=True), whole)
        self.assertGreater(read[0], 60 / TURNS)  # the rest is refused
        self.assertGreater(read[3], 500 / TURNS)
        print(f"{sum(read.values())} readings; exit codes {read}")

    @staticmethod
    def words(name, row, place, tried, outside):
        given = {**MORE.get(name, {}), place: tried}
        words = [name]
        for positional in row["positionals"]:
            if positional["name"] in given or positional["required"]:
                words.append(given.pop(positional["name"], "plan.json"))
        for flag, value in given.items():
            words += [flag, value]
        return [*words, "-o", str(outside / "x")] if name in NEEDS_OUTPUT else words

    def test_links_under_the_names_that_sqlite_makes(self):
        """An index of WAL mode overwrote what such a link leads to; archives carry hard links, too."""
        for kind in ("wal", "shm", "journal"):
            for link in (os.link, os.symlink):
                in_wal_mode(self.folder / "x.sqlite", True)
                victim = self.folder / "victim"
                victim.write_bytes(b"" if kind != "shm" else b"mine\n")
                link(victim, self.folder / f"x.sqlite-{kind}")
                before = picture(self.folder)
                self.assertEqual(self.run_program("inspect-trace", "x.sqlite")[0], 0)
                self.assertEqual(picture(self.folder), before)
                for path in self.folder.iterdir():
                    path.unlink()

    def test_rows_that_are_not_in_the_file_yet(self):
        in_wal_mode(self.folder / "x.sqlite", False)
        error = ("x.sqlite: got rows that are still in its -wal, expected an export of Nsight Systems (nsys export --type sqlite); "
                 "sqlite3 FILE 'PRAGMA journal_mode = DELETE' moves them into the file")
        self.assert_fails(3, error, "inspect-trace", "x.sqlite")
        (self.folder / "link.sqlite").symlink_to("x.sqlite")  # SQLite looks beside the file itself
        self.assert_fails(3, error.replace("x.sqlite:", "link.sqlite:"), "inspect-trace", "link.sqlite")
        database = sqlite3.connect(self.folder / "x.sqlite")
        database.execute("PRAGMA journal_mode = DELETE")
        database.close()
        self.succeed("inspect-trace", "x.sqlite")
        # A transaction that was cut off in the rollback mode.
        (self.folder / "x.sqlite-journal").write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(504))
        self.assert_fails(3, error.replace("-wal", "-journal"), "inspect-trace", "x.sqlite")

    def test_journals_that_are_over(self):
        """PERSIST leaves the journal of a finished transaction, its header zeroed; TRUNCATE leaves an empty one."""
        measured_files_test.nsight(self.folder / "x.sqlite")
        said = self.succeed("inspect-trace", "x.sqlite")
        for mode, size in (("PERSIST", 1000), ("TRUNCATE", 0)):
            database = sqlite3.connect(self.folder / "x.sqlite")
            database.execute(f"PRAGMA journal_mode = {mode}")
            database.execute(f"CREATE TABLE of_{mode} (x)")
            database.commit()
            journal = (self.folder / "x.sqlite-journal").read_bytes()
            self.assertEqual((len(journal) > size, journal[:28]), (size > 0, bytes(28 if size else 0)))
            # While another transaction is open its header is there.
            database.execute("PRAGMA cache_size = 1")
            database.execute("BEGIN")
            database.executemany(f"INSERT INTO of_{mode} VALUES (?)", [("x" * 4000,)] * 100)
            self.assertEqual(self.run_program("inspect-trace", "x.sqlite")[0], 3)
            database.rollback()
            database.close()
            before = picture(self.folder)
            self.assertEqual(self.succeed("inspect-trace", "x.sqlite"), said)
            self.assertEqual(picture(self.folder), before)

    def test_names_that_mean_something_in_a_uri(self):
        for name in ("a?mode=rwc.sqlite", "a%41.sqlite", "a#b.sqlite", "file:a.sqlite", "a b&cache=shared.sqlite", "ä.sqlite"):
            with self.subTest(name=name):
                measured_files_test.nsight(self.folder / name)
                before = picture(self.folder)
                for path in (name, f"./{name}", str(self.folder / name), "/" + str(self.folder / name)):
                    self.succeed("inspect-trace", path)
                self.assertEqual(picture(self.folder), before)


if __name__ == "__main__":
    main()
