"""What the system does not give, threads and address space, is an error of the environment (exit code 4) with the limit's name:
no command aborts, waits for ever or takes it for its own bug."""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import main, run_list
from training_test_case import TrainingTestCase


class Limits(TrainingTestCase):

    def setUp(self):
        super().setUp()
        self.folder.chmod(0o777)
        self.plan("p.json", 2, "--global-batch", "4")
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "-o", "q.json")
        kernel = '{"ph":"X","cat":"kernel","name":"gemm","tid":7,"ts":1,"dur":5,"args":{"device":0,"stream":7,"correlation":1}}'
        for name in ("a.json", "b.json"):
            (self.folder / name).write_text('{"traceEvents":[' + kernel + "]}")
        (self.folder / "runs.json").write_text(run_list())
        (self.folder / "budget.toml").write_text('[job.one]\nplan = "q.json"\nmemory = "72 GiB"\n')

    # What makes threads: the helpers of loops, ranks, their streams, a search's line, the writer of checkpoints.
    def threaded(self):
        job = ("--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "--global-batch", "8")
        return {"plan": ("plan", *job, "-o", "s.json"),
                "sweep": ("sweep", *job[:-2], "--micro-batch", "1,2,4"),
                "advise": ("advise", "a.json", "--plan", "q.json"),
                "run": ("run", "p.json", "--steps", "1", "--data", "random:9", "--checkpoint", "kept"),
                "compare": ("compare", "q.json", "a.json", "b.json"),
                "validate": ("validate", "runs.json"),
                "baselines": ("baselines", *job)}

    def single(self):
        return {"simulate": ("simulate", "q.json"), "emit": ("emit", "q.json", "--to", "fsdp2", "-o", "e"),
                "report": ("report", "q.json", "-o", "r.html"), "inspect": ("inspect", "q.json"), "check": ("check", "budget.toml"),
                "diff": ("diff", "q.json", "q.json"), "inspect-trace": ("inspect-trace", "a.json")}

    def calls(self):
        """Words per command: all that the program's help lists, without arguments where nothing is known of them."""
        commands = json.loads(self.succeed("--help", "--json"))["commands"]
        names = [command["name"] if isinstance(command, dict) else command for command in commands]
        known = {**self.threaded(), **self.single()}
        self.assertEqual(set(known) - set(names), set())
        return {name: known.get(name, (name,)) for name in names}

    def run_limited(self, words, limit):
        """(exit code, standard error) under limits that `limit` sets, as a user of its own where root has none."""
        def prepare():
            limit()
            self.become_user()
        done = subprocess.run([shardwright_test_case.PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, errors="replace", cwd=self.folder, timeout=200, preexec_fn=prepare,
                              check=False)
        return done.returncode, done.stderr

    @staticmethod
    def become_user(user=200_000 + os.getpid() % 100_000):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)

    def test_no_threads(self):
        for name, words in self.calls().items():
            with self.subTest(name):
                code, err = self.run_limited(words, lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)))
                print(f"{name}: exit {code} {err[-150:]!r}", file=sys.stderr)
                self.assertIn(code, (0, 1, 2, 3, 4), err)
                if name in ("plan", "sweep", "run", "validate", "baselines"):
                    self.assertEqual(code, 4, err)
                    self.assertIn("cannot start a thread: Resource temporarily unavailable (ulimit -u: 1 threads of this user", err)

    def test_few_threads(self):
        """Some of a run's threads are there, the next one is not: none is left waiting for the others."""
        for threads in (2, 3, 5, 8):
            words = (*self.threaded()["run"][:-1], f"kept{threads}")
            code, err = self.run_limited(words, lambda t=threads: resource.setrlimit(resource.RLIMIT_NPROC, (t, t)))
            self.assertIn(code, (0, 4), err)
            if code == 4:
                self.assertIn("cannot start a thread", err)

    def test_threads_that_are_refused_to_a_run_under_way(self):
        if shutil.which("prlimit") is None:
            self.skipTest("no prlimit")
        run = subprocess.Popen([shardwright_test_case.PROGRAM, "run", "p.json", "--data", "random:9", "--steps", "100000000", "--every", "5",
                                "--checkpoint", "late"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.folder,
                               preexec_fn=self.become_user)
        self.addCleanup(run.kill)
        said = ""
        for line in run.stderr:
            said += line
            if line.startswith("step 2/"):
                subprocess.run(["prlimit", "--nproc=1:1", "--pid", str(run.pid)], preexec_fn=self.become_user, check=True)
        run.stderr.close()
        self.assertEqual(run.wait(60), 4, said)
        self.assertIn("error: cannot start a thread: Resource temporarily unavailable (ulimit -u: 1 threads of this user", said)

    def test_little_address_space(self):
        calls = {**self.threaded(), **self.single()}
        for megabytes in (160, 400):
            for name in ("sweep", "run", "simulate", "report", "inspect", "emit"):
                words = calls[name]
                with self.subTest(f"{name} in {megabytes} MiB"):
                    bytes_ = megabytes << 20
                    code, err = self.run_limited(words, lambda b=bytes_: resource.setrlimit(resource.RLIMIT_AS, (b, b)))
                    print(f"{name} in {megabytes} MiB: exit {code} {err[-150:]!r}", file=sys.stderr)
                    if code == 127:  # the system's loader has no room for the libraries
                        self.assertIn("error while loading shared libraries", err)
                    else:
                        self.assertIn(code, (0, 1, 4), err)


if __name__ == "__main__":
    main()
