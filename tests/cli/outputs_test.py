"""Every output flag of every command: names that nobody knows before, no link followed, no file replaced that was read.

The flags are those of `--help --json` whose "file" is "write".
"""

import ctypes
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import measured_files_test
import shardwright_test_case
import untouched_test
from shardwright_test_case import TESTS, main
from training_test_case import TINY, TrainingTestCase

JOB = ("--model", "gpt2", "--cluster", "dgx-a100", "--seq", "128", "--no-search")
# Words with which each flag writes; the last one is followed by the output's name.
RECIPES = {
    "plan --output": ("plan", *JOB, "--output"), "simulate --trace": ("simulate", "plan.json", "--trace"),
    "sweep --csv": ("sweep", *JOB[:-1], "--micro-batch", "1", "--csv"),
    "emit --output": ("emit", "plan.json", "--to", "accelerate", "--output"),
    "emit --as-emitted": ("emit", "plan.json", "--to", "accelerate", "--as-emitted"),
    "import-run --output": ("import-run", "job.sh", "--cluster", "dgx-a100", "--model", "gpt2", "--seq", "128", "--output"),
    "run --trace": ("run", "plan.json", "--steps", "1", "--data", "random:100", "--trace"),
    "checkpoint --output": ("checkpoint", "export", "checkpoints", "--output"),
    "advise --output": ("advise", "traces", "--plan", "plan.json", "--output"),
    "advise --patch": ("advise", "traces", "--plan", "plan.json", "--patch"),
    "report --output": ("report", "plan.json", "--output"),
    "check --save": ("check", "budget.toml", "--save"), "topo --output": ("topo", "import", "matrix.txt", "--gpu", "h100-80", "--nic", "400 Gbit/s", "--output"),
    "calibrate --output": ("calibrate", "traces/run.json.gz", "--plan", "plan.json", "--even-if-worse", "--output"),
}
ELSEWHERE = {"export --output": "interpreters_test.py",  # needs Python with torch
             "page --output": "page_test.py"}  # needs the page that scripts/web.sh makes
UNKNOWN = re.compile(r"\.tmp\.[0-9a-f]{16}$|^\.unfinished-|^\.tmp-")
CREATED, MOVED_TO = 0x100, 0x80


class Watch:
    """The names that are made in a folder, by inotify."""

    def __init__(self, folder):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self.libc.inotify_init1(os.O_NONBLOCK)
        assert self.libc.inotify_add_watch(self.descriptor, os.fsencode(folder), CREATED | MOVED_TO) > 0

    def names(self):
        """Since the last call: those that were created, and those that came by renaming."""
        created, renamed = set(), set()
        try:
            while True:
                events = os.read(self.descriptor, 1 << 20)
                while events:
                    _, mask, _, length = struct.unpack_from("iIII", events)
                    name = events[16:16 + length].rstrip(b"\0").decode()
                    (created if mask & CREATED else renamed).add(name)
                    events = events[16 + length:]
        except BlockingIOError:
            return created, renamed

    def close(self):
        os.close(self.descriptor)


class Outputs(TrainingTestCase):

    def setUp(self):
        super().setUp()
        self.plan("plan.json", 2)
        self.train("plan.json", "--steps", "2", "--checkpoint", "checkpoints", "--trace", "run.json.gz")
        (self.folder / "traces").mkdir()
        shutil.move(self.folder / "run.json.gz", self.folder / "traces")
        (self.folder / "budget.toml").write_text('[job.a]\nplan = "plan.json"\nmemory = "1 TB"\n')
        (self.folder / "job.sh").write_text("accelerate launch --config_file settings.yaml train.py --per_device_train_batch_size 1\n")
        (self.folder / "settings.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n")
        (self.folder / "matrix.txt").write_text(measured_files_test.MATRIX)
        (self.folder / "runs.json").write_text(shardwright_test_case.run_list())
        self.victim = self.folder / "victim"
        self.victim.write_text("mine\n")

    def flags(self):
        return {f"{name} {flag['name']}" for name, row in untouched_test.commands().items() for flag in row["flags"] if flag["file"] == "write"}

    def test_all_flags_are_here(self):
        self.assertEqual(self.flags(), {*RECIPES, *ELSEWHERE})

    def test_names_that_nobody_knows_before(self):
        written = 0
        for flag, words in RECIPES.items():
            out = self.folder / "out"
            unknown = []
            for _ in range(2):
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                watches = [Watch(out), Watch(self.folder)]
                code, _, err = self.run_program(*words, "out/x.json")
                self.assertIn(code, (0, 1), (flag, err))
                (created, renamed), (beside, _) = (watch.names() for watch in watches)
                for watch in watches:
                    watch.close()
                self.assertEqual(beside, set(), flag)
                unknown.append(created)
                self.assertEqual({name for name in created if not UNKNOWN.search(name)}, set(), flag)
                self.assertEqual(set(os.listdir(out)), renamed, flag)
                written += len(renamed)
            self.assertEqual(unknown[0] & unknown[1], set(), flag)
        self.assertGreater(written, len(RECIPES))

    def test_planted_names(self):
        """Names by the process id, which is that of the shell; what they were before, and what other programs take."""
        endings = ("", ".tmp", ".new", ".part", ".partial", ".draft", "~", ".bak", ".lock", ".unfinished")
        plant = "; ".join(f"ln -s ../victim 'out/{dot}x.json{ending}{number}'" for dot in ("", ".") for ending in endings
                          for number in ("", "'.$$'", "'-$$'", "'$$'", ".0") if (dot, ending, number) != ("", "", ""))
        for flag, words in RECIPES.items():
            out = self.folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            done = subprocess.run(["sh", "-c", f'{plant}; exec "$@"', "sh", shardwright_test_case.PROGRAM, *words,
                                   "out/x.json"],
                                  cwd=self.folder, capture_output=True, text=True, check=False)
            self.assertIn(done.returncode, (0, 1, 4), (flag, done.stderr))
            self.assertEqual(self.victim.read_text(), "mine\n", flag)
            self.assertGreater(len(os.listdir(out)), 70)

    def refused(self, *words, output):
        """The output is a file that the command reads: exit code 2, before anything is written."""
        target = self.folder / output
        for name in (output, f"./{output}", "link", "twin"):
            for made in ("twin", "link"):
                (self.folder / made).unlink(missing_ok=True)
            (self.folder / "link").symlink_to(output)
            if name == "twin":
                if output.endswith(".lock"):
                    continue  # a lock with a hard link is no lock
                os.link(target, self.folder / "twin")
            before = untouched_test.picture(self.folder)
            code, _, err = self.run_program(*words, name)
            self.assertEqual((code, err.count("error: ")), (2, 1), (words, name, err))
            self.assertIn("would overwrite", err)
            after = untouched_test.picture(self.folder)
            for found in (before, after):
                found.pop("checkpoints/.lock")  # a run says there which process it is
            self.assertEqual(after, before, words)
        for made in ("twin", "link"):
            (self.folder / made).unlink(missing_ok=True)

    def test_second_hops_of_settings(self):
        imported = ("import-run", "job.sh", "--cluster", "dgx-a100", "--model", "gpt2", "--seq", "128", "-o")
        self.refused(*imported, output="settings.yaml")
        (self.folder / "trainer.json").write_text(json.dumps({"deepspeed": "ds.json", "per_device_train_batch_size": 1}))
        (self.folder / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
        self.refused("import-run", "trainer.json", *imported[2:], output="ds.json")
        (self.folder / "net").mkdir()
        (self.folder / "net" / "config.json").write_text(json.dumps({**TINY, "n_positions": 128}))
        (self.folder / "recipe.yaml").write_text("model_name_or_path: ./net\nfsdp: full_shard\nper_device_train_batch_size: 1\n")
        self.refused("import-run", "recipe.yaml", "--cluster", "dgx-a100", "--seq", "128", "-o", output="net/config.json")

    def test_second_hops_of_folders(self):
        self.refused("check", "budget.toml", "--save", output="plan.json")
        self.refused("advise", "traces", "--plan", "plan.json", "-o", output="traces/run.json.gz")
        self.refused("advise", "traces", "--plan", "plan.json", "-o", "better.json", "--patch", output="traces/run.json.gz")
        self.refused("checkpoint", "export", "checkpoints", "-o", output="checkpoints/step-00000002/manifest.json")
        shard = sorted((self.folder / "checkpoints" / "step-00000002").glob("*.safetensors"))[-1].relative_to(self.folder)
        self.refused("checkpoint", "export", "checkpoints", "-o", output=str(shard))
        self.succeed("checkpoint", "export", "checkpoints", "-o", "model.safetensors")
        (self.folder / "weights").mkdir()
        shutil.move(self.folder / "model.safetensors", self.folder / "weights")
        (self.folder / "weights" / "config.json").write_text(json.dumps(TINY))
        self.refused("plan", "--model", "weights", *JOB[2:4], "--seq", "16", "--no-search", "-o", output="weights/model.safetensors")

    def test_traces_of_runs(self):
        """A run's trace is written at its end: what it would replace is known before the first step."""
        tokens = ("run", "plan.json", "--steps", "4")
        run = (*tokens, "--data", "random:100")
        step = "checkpoints/step-00000002"
        shards = sorted(path.name for path in (self.folder / step).iterdir())
        self.assertGreater(len(shards), 2)
        for name in shards:
            self.refused(*run, "--checkpoint", "checkpoints", "--resume", "--trace", output=f"{step}/{name}")
        self.refused(*run, "--checkpoint", "checkpoints", "--resume", "--trace", output="checkpoints/.lock")
        self.succeed("checkpoint", "export", "checkpoints", "-o", "model.safetensors")
        self.refused(*run, "--init", "model.safetensors", "--trace", output="model.safetensors")
        (self.folder / "weights").mkdir()
        shutil.move(self.folder / "model.safetensors", self.folder / "weights")
        self.refused(*run, "--init", "weights", "--trace", output="weights/model.safetensors")
        for folder in ("tokens", "tests"):
            (self.folder / folder).mkdir()
            for name in ("a.bin", "b.bin"):
                (self.folder / folder / name).write_bytes(struct.pack("<500H", *(i % 256 for i in range(500))))
        self.refused(*tokens, "--data", "tokens", "--trace", output="tokens/b.bin")
        self.refused(*tokens, "--data", "tokens", "--test-data", "tests", "--trace", output="tests/b.bin")
        (self.folder / "training.json").write_text('{"learning_rate": 0.1}')
        self.refused(*run, "--training", "training.json", "--trace", output="training.json")

    def test_a_file_may_be_written_again(self):
        """What was read by an earlier command may be replaced, and what was not read as well."""
        for flag, words in RECIPES.items():
            for _ in range(2):
                code, _, err = self.run_program(*words, "again")
                self.assertIn(code, (0, 1), (flag, err))
            shutil.rmtree(self.folder / "again") if (self.folder / "again").is_dir() else (self.folder / "again").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
