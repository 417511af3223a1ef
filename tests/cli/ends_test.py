"""How runs of four processes end that are killed, stopped or hung up at random moments: nothing is lost, nothing is left, and the
rank is named. SHARDWRIGHT_DEEP=1: 200 ends instead of 12."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import main
from training_test_case import Patience, TrainingTestCase

DEEP = "SHARDWRIGHT_DEEP" in os.environ
ENDS = 200 if DEEP else 12
RANKS, STEPS = 4, 30
# In the order in which they come again and again: one rank is killed, all are, one is stopped, one or all hear that the terminal
# is gone.
KINDS = ("kill", "kill", "hang up", "kill", "stop", "kill", "kill all", "hang up all", "kill", "kill")


class Run:
    """Four ranks, and what each says."""

    def __init__(self, folder, flags, program):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.ranks = [subprocess.Popen(
            [program, "run", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
            env=dict(os.environ, OPENBLAS_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank),
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))) for rank in range(RANKS)]
        self.out, self.err = [""] * RANKS, [[] for _ in range(RANKS)]
        self.heard, self.silence = time.monotonic(), 0.0
        self.readers = [threading.Thread(target=self.read, args=(rank,)) for rank in range(RANKS)]
        for reader in self.readers:
            reader.start()

    def read(self, rank):
        for line in self.ranks[rank].stderr:
            self.err[rank].append(line)
            if rank == 0:
                now = time.monotonic()
                self.heard, self.silence = now, max(self.silence, now - self.heard)
        self.out[rank] = self.ranks[rank].stdout.read()

    def steps(self):
        """The losses that rank 0 has told: {step: "2.3456"}."""
        return {int(found[1]): found[2] for line in list(self.err[0])
                if (found := re.match(r"step (\d+)/\d+  loss (\S+) ", line))}

    def wait_for_steps(self, count):
        while len(self.steps()) < count and self.ranks[0].poll() is None:
            time.sleep(0.002)

    def finish(self, patience, victim=None):
        """The exit codes. A victim that was stopped is killed when the others have ended."""
        for rank, process in enumerate(self.ranks):
            if rank != victim:
                process.wait(60 + 10 * patience.seconds)
        if victim is not None:
            self.ranks[victim].kill()
        for reader in self.readers:
            reader.join()
        for process in self.ranks:
            process.wait(60 + patience.seconds)
            process.stdout.close()
            process.stderr.close()
        return [process.returncode for process in self.ranks]

    def kill(self):
        for process in self.ranks:
            if process.poll() is None:
                process.kill()

    def error(self, rank):
        """What a rank says at its end."""
        return [line for line in self.err[rank] if line.startswith("error: ")][-1]

    def is_too_slow(self, victims):
        """Whether a rank has waited too long for one that nothing was done to."""
        lists = re.findall(r"^error: .* waited \d+ ms (?:at port \d+ )?for (.*)$", "".join(map("".join, self.err)), re.M)
        return not {int(rank) for ranks in lists for rank in re.findall(r"\d+", ranks)} <= set(victims)


class Ends(TrainingTestCase):

    def setUp(self):
        super().setUp()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ranks would inherit that nohup ignores it
        self.plan("p.json", RANKS, "--global-batch", "4", "--micro-batch", "1")
        # Waits are measured, since the machine may be full: here, and at each end before it is brought about.
        self.patience = Patience(5)
        self.too_slow = 0
        quiet = self.start("--steps", "5", "--checkpoint", "quiet", "--every", "1")
        self.assertEqual(quiet.finish(self.patience), [0] * RANKS, quiet.err)
        self.patience.learn(quiet.silence)

    def forgive_slow(self, run, victims, most):
        """True: the run met its time-out without need. So many may, each with twice the patience of the one before."""
        if not run.is_too_slow(victims):
            return False
        self.too_slow += 1
        print(f"too slow: {self.patience.flag} {run.err}", file=sys.stderr)
        self.assertLessEqual(self.too_slow, most, run.err)
        self.patience.learn(self.patience.seconds / 5)
        return True

    def start(self, *flags):
        run = Run(self.folder, ("p.json", "--data", "random:100", *flags), shardwright_test_case.PROGRAM)
        self.addCleanup(run.kill)
        return run

    def newest(self):
        """Of the whole checkpoints in "c"."""
        return max((path.parent.name for path in (self.folder / "c").glob("step-*/manifest.json")), default=None)

    def end(self, run, kind, victim):
        """Brings the end about; the exit codes."""
        self.patience.learn(run.silence)
        if kind == "stop":
            run.ranks[victim].send_signal(signal.SIGSTOP)
            return run.finish(self.patience, victim)
        number = signal.SIGHUP if kind.startswith("hang up") else signal.SIGKILL
        for rank, process in enumerate(run.ranks):
            if kind.endswith("all") or rank == victim:
                process.send_signal(number)
        return run.finish(self.patience)

    def check_words(self, run, kind, victim, codes, has_begun):
        """Ranks that are well end by themselves, and say who is not."""
        if all(code in (0, -signal.SIGKILL) for code in codes):
            return  # the run was over, or all were killed
        if kind.startswith("hang up"):
            # Before the first step it ends that rank at once.
            self.assertEqual(set(codes) - ({0, 130} if has_begun else {0, 5, 130, -signal.SIGHUP}), set(), run.err)
            return
        self.assertEqual({codes[rank] for rank in range(RANKS) if rank != victim} - {0}, {5}, run.err)
        for rank in range(RANKS):
            if rank != victim and codes[rank] == 5:
                end = run.error(rank)
                self.assertIn(f"rank {victim}", end.removeprefix(f"error: rank {rank}"))
                if kind == "stop" and has_begun:
                    self.assertRegex(end, rf"^error: rank \d.*: waited \d+ ms for rank {victim}\n$")

    def test_random_ends(self):
        code, out, err = self.run_program("run", "p.json", "--data", "random:100", "--steps", str(STEPS), "--json")
        self.assertEqual(code, 0, err)
        losses = [step["loss"] for step in json.loads(out)["steps"]]
        rng = random.Random(12)
        done, whole, counts = 0, 0, {}
        while done < ENDS:
            before, newest = set(), None
            if (self.folder / "c").exists():
                before, newest = {name for name in os.listdir(self.folder / "c") if name.startswith(".unfinished")}, self.newest()
            keep = rng.choice((1, 2, 3))
            run = self.start("--steps", str(STEPS), "--every", "1", "--keep", str(keep), "--checkpoint", "c", "--resume", "--json",
                             *self.patience.flag)
            # Before the ranks have met, or in any step, between or inside of what it writes.
            if rng.random() < 0.25:
                time.sleep(rng.uniform(0, 0.3))
            else:
                run.wait_for_steps(rng.randrange(1, 12))
                time.sleep(rng.uniform(0, 0.02))
            kind, victim = KINDS[done % len(KINDS)], rng.randrange(RANKS)
            has_begun = bool(run.steps())
            codes = self.end(run, kind, victim)
            with self.subTest(number=done, kind=kind, victim=victim, codes=codes):
                if not self.forgive_slow(run, range(RANKS) if kind.endswith("all") else [victim], 1 + ENDS // 20):
                    self.check_words(run, kind, victim, codes, has_begun)
                told = run.steps()
                for step, loss in told.items():
                    self.assertEqual(loss, f"{losses[step - 1]:.4f}", step)
                said = "".join(run.err[0])
                if told:
                    self.assertEqual("resumed from" in said, newest is not None)
                    self.assertIn(f"resumed from c/{newest}\n" if newest else "", said)
                    self.assertEqual(before & set(os.listdir(self.folder / "c")), set())
                if set(codes) in ({0}, {130}) and told:
                    names = self.checkpoints("c")
                    self.assertEqual([n for n in names if not re.fullmatch(r"step-\d{8}", n)], [])
                    self.assertLessEqual(len(names), keep)
                    for step in json.loads(run.out[0])["steps"]:
                        self.assertEqual(step["loss"], losses[step["step"]])
                    self.assertEqual(int(names[-1].removeprefix("step-")), max(told))
            if set(codes) != {0}:
                done += 1
                counts[kind] = counts.get(kind, 0) + 1
                if done % 10 == 0:
                    print(f"{done} ends, {self.too_slow} too slow, time-out {self.patience.flag[1]}", file=sys.stderr, flush=True)
            elif self.newest() == f"step-{STEPS:08}":
                whole += 1
                shutil.rmtree(self.folder / "c")
        print(f"{done} ends: {counts}; {whole} runs got to their end meanwhile, {self.too_slow} met a time-out of {self.patience.flag}",
              file=sys.stderr)
        # What the last one has left is resumed to the end, and nothing else is there.
        run = self.start("--steps", str(STEPS), "--checkpoint", "c", "--resume", "--json", "--keep", "1", "--every", "1",
                         "--timeout", "600 s")
        self.assertEqual(run.finish(self.patience), [0] * RANKS, run.err)
        for step in json.loads(run.out[0])["steps"]:
            self.assertEqual(step["loss"], losses[step["step"]])
        self.assertEqual(self.checkpoints("c"), [f"step-{STEPS:08}"])

    def test_each_rank_that_stands_still_is_named_by_all(self):
        # Rank 0 passes messages on; the checkpoint's writer and the collectives each ask who is there, at nearly the same time.
        victims = [3, 2, 1, 0, 0, 0]
        while victims:
            victim = victims.pop()
            run = self.start("--steps", "100000000", *self.patience.flag, "--checkpoint", f"c{len(victims)}", "--every", "1", "--resume")
            waited = round(self.patience.seconds) * 1000
            run.wait_for_steps(3)
            codes = self.end(run, "stop", victim)
            if victim != 0 and self.forgive_slow(run, [victim], 2):
                victims.append(victim)
                continue
            self.assertEqual([code for rank, code in enumerate(codes) if rank != victim], [5] * (RANKS - 1), run.err)
            for rank in range(RANKS):
                if rank != victim:
                    self.assertRegex(run.error(rank), rf"^error: rank \d, .+: waited {waited} ms for rank {victim}\n$")

    def test_a_terminal_that_closes(self):
        # Kernel and shell both tell all processes.
        for pause in (0, 2.5):  # however late the second one comes, no rank ends without the others
            run = self.start("--steps", "100000000", "--checkpoint", f"c{pause}", "--every", "1", "--keep", "1", "--timeout", "600 s")
            run.wait_for_steps(2)
            if pause:
                run.ranks[1].send_signal(signal.SIGSTOP)  # the step does not end meanwhile
            for process in run.ranks:
                process.send_signal(signal.SIGHUP)
            time.sleep(pause)
            for process in run.ranks:
                if process.poll() is None:
                    process.send_signal(signal.SIGHUP)
            run.ranks[1].send_signal(signal.SIGCONT)
            self.assertEqual(run.finish(self.patience), [130] * RANKS, run.err)
            (saved,) = self.checkpoints(f"c{pause}")
            self.assertIn(f"saved in c{pause}/{saved}; --resume goes on from there\n", run.err[0][-1])


if __name__ == "__main__":
    main()
