"""What a run does with its folder of checkpoints when it is not alone there, or does not end as it should."""

import fcntl
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import main
from training_test_case import TINY, TrainingTestCase


class RunFolder(TrainingTestCase):

    def setUp(self):
        super().setUp()
        self.run_flags = ("run", self.plan("p.json", 2, "--global-batch", "4"), "--data", "random:100")

    def start(self, *flags, **options):
        """A run that has done its second step."""
        process = subprocess.Popen([shardwright_test_case.PROGRAM, *self.run_flags, *flags], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, cwd=self.folder, **options)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        for line in process.stderr:
            if line.startswith("step 2/"):
                break
        return process

    def test_a_new_run_leaves_the_checkpoints_of_another_alone(self):
        self.train("p.json", "--steps", "6", "--checkpoint", "c", "--every", "1")
        before = self.export("c")
        self.assert_fails(3, "c: got checkpoints of an earlier run, the newest c/step-00000006, expected a folder without any; "
                             "--resume goes on from there, another --checkpoint FOLDER begins anew",
                          *self.run_flags, "--seed", "2", "--steps", "3", "--checkpoint", "c", "--every", "1")
        self.assertEqual(self.checkpoints("c"), ["step-00000004", "step-00000005", "step-00000006"])
        self.assertEqual(self.export("c"), before)

    def test_a_file_of_others_in_the_place_of_the_lock_is_left_alone(self):
        folder = self.folder / "c"
        folder.mkdir()
        lock = folder / ".lock"
        mine = self.folder / "mine"
        mine.write_text("my notes\n")
        lock.hardlink_to(mine)
        self.assert_fails(3, "c/.lock: got a file that is no lock, expected one that a run has made, or none", *self.run_flags,
                          "--steps", "1", "--checkpoint", "c")
        self.assertEqual(mine.read_text(), "my notes\n")
        lock.unlink()
        lock.write_text("my notes\n")
        self.assert_fails(3, "c/.lock: got a file that is no lock, expected one that a run has made, or none", *self.run_flags,
                          "--steps", "1", "--checkpoint", "c")
        self.assertEqual(lock.read_text(), "my notes\n")

    def test_tokens_that_are_cut_short_under_a_run(self):
        tokens = self.folder / "tokens.bin"
        tokens.write_bytes(b"\1\0" * (1 << 20))
        self.run_flags = ("run", "p.json", "--data", "tokens.bin")
        process = self.start("--steps", "100000000")
        tokens.write_bytes(b"")
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 4, err)
        self.assertIn("error: a file of data or weights was cut short while it was read\n", err)

    def test_two_runs_at_once(self):
        first = self.start("--steps", "100000000", "--checkpoint", "c", "--every", "1")
        for resume in ((), ("--resume",)):
            code, out, err = self.run_program(*self.run_flags, "--steps", "3", "--checkpoint", "c", *resume)
            self.assertEqual((code, out), (4, ""), err)
            self.assertRegex(err, rf"\Aerror: c: another run \(process {first.pid} on \S+\) is at work in it; give another "
                                  r"--checkpoint FOLDER, or wait for its end\n\Z")
        while not any(name.startswith("step-") for name in self.checkpoints("c")):
            self.assertIsNone(first.poll())
            time.sleep(0.01)
        first.send_signal(signal.SIGKILL)
        first.wait()
        # A dead run holds nothing, and what it saved is whole.
        done = int(self.checkpoints("c")[-1].removeprefix("step-"))
        self.assertEqual([s["step"] for s in self.train("p.json", "--steps", str(done + 2), "--checkpoint", "c", "--resume")],
                         [done, done + 1])

    def damage(self, file):
        content = (self.folder / file).read_bytes()
        (self.folder / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def options(self, **fields):
        (self.folder / "options.json").write_text(json.dumps({"format": "shardwright-training", "version": 1, **fields}))
        return ("--training", "options.json")

    def weights(self, folder):
        """All exported weights as numbers."""
        return [x for _, _, data in self.export(folder).values() for x in struct.unpack(f"<{len(data) // 4}f", data)]

    def test_a_signal_saves_what_there_is(self):
        for number, name in ((signal.SIGTERM, "term"), (signal.SIGINT, "int"), (signal.SIGHUP, "hup")):
            # Also where every step is the last one before a checkpoint.
            every = ("--every", "1", "--keep", "1") if number == signal.SIGHUP else ()
            run = self.start("--steps", "100000000", "--checkpoint", name, "--trace", f"{name}.json", *every)
            run.send_signal(number)
            out, err = run.communicate(timeout=60)
            self.assertEqual(run.returncode, 130, err)
            (saved,) = self.checkpoints(name)
            done = int(saved.removeprefix("step-"))
            self.assertIn(f"interrupted after step {done}, saved in {name}/{saved}; --resume goes on from there\n", err)
            self.assertIn(f": {done} steps\n", out)
            spans = json.loads((self.folder / f"{name}.json").read_text())["traceEvents"]
            self.assertGreater(len(spans), 100)
            # Bit for bit what a run of so many steps has, and it goes on.
            self.train("p.json", "--steps", str(done), "--checkpoint", f"whole-{name}")
            self.assertEqual(self.export(name), self.export(f"whole-{name}"))
            self.assertEqual([s["step"] for s in self.train("p.json", "--steps", str(done + 1), "--checkpoint", name, "--resume")],
                             [done])

    def test_a_terminal_that_closes(self):
        # Its shell sends the signal, too; what the run would say goes nowhere.
        terminal, end = os.openpty()
        run = subprocess.Popen([shardwright_test_case.PROGRAM, *self.run_flags, "--steps", "100000000", "--checkpoint", "c"],
                               stdin=end, stdout=end, stderr=end, cwd=self.folder, start_new_session=True,
                               preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(end)
        said = b""
        while b"step 2/" not in said:
            said += os.read(terminal, 1000)
        os.close(terminal)
        run.send_signal(signal.SIGHUP)
        self.assertIn(run.wait(60), (4, 130))
        (saved,) = self.checkpoints("c")
        self.train("p.json", "--steps", str(int(saved.removeprefix("step-")) + 1), "--checkpoint", "c", "--resume")

    def test_nohup(self):
        run = self.start("--steps", "100000000", "--checkpoint", "c", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        run.send_signal(signal.SIGHUP)
        for line in run.stderr:
            if line.startswith("step 1000/"):
                break
        self.assertIsNone(run.poll())
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, err)

    def test_a_folder_that_goes_is_not_made_anew(self):
        folder, moved, other = self.folder / "c", self.folder / "moved", self.folder / "other"
        message = r"c: no longer the folder that this run has locked: it was removed, renamed or replaced; put it back"
        for way in ("removed", "renamed", "a link", "another one", "its lock removed"):
            with self.subTest(way=way):
                run = self.start("--steps", "100000000", "--checkpoint", "c", "--every", "1")
                if way == "its lock removed":
                    (folder / ".lock").unlink()
                else:
                    folder.rename(moved)
                other.mkdir()
                if way == "a link":
                    folder.symlink_to(other)
                elif way == "another one":
                    folder.mkdir()
                while way == "removed" and moved.exists():  # the run may be writing into it
                    shutil.rmtree(moved, ignore_errors=True)
                for line in run.stderr:
                    if line.startswith("warning: "):
                        break
                self.assertRegex(line, rf"^warning: no checkpoint of step \d+, after 3 attempts: {message}\n$")
                run.send_signal(signal.SIGTERM)
                _, err = run.communicate(timeout=60)
                self.assertEqual(run.returncode, 4)
                self.assertRegex(err, rf"\nerror: no checkpoint could be saved of step [\d, ]+: {message}; .+\n\Z")
                self.assertEqual(list(other.iterdir()), [])
                self.assertEqual(folder.exists(), way in ("a link", "another one", "its lock removed"))
                self.assertEqual(list(folder.iterdir()) if way == "another one" else [], [])
                for place in (moved, other, folder):
                    (place.unlink if place.is_symlink() else lambda place=place: shutil.rmtree(place, ignore_errors=True))()
        # Back again, all goes on.
        run = self.start("--steps", "100000000", "--checkpoint", "c", "--every", "1")
        folder.rename(moved)
        for line in run.stderr:
            if line.startswith("warning: "):
                break
        moved.rename(folder)
        for line in run.stderr:
            if line.startswith("step "):
                break
        time.sleep(1)
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 130, err)
        self.assertEqual(len([name for name in self.checkpoints("c") if name.startswith("step-")]), 3)

    def test_a_name_that_disagrees_with_its_manifest_is_not_believed(self):
        self.train("p.json", "--steps", "2", "--checkpoint", "c", "--every", "1")
        (self.folder / "c/step-00000002").rename(self.folder / "c/step-00000009")
        code, out, err = self.run_program(*self.run_flags, "--steps", "12", "--checkpoint", "c", "--resume")
        self.assertEqual((code, out, err), (3, "", "error: c/step-00000009/manifest.json: got step 2, expected 9, as the folder's name "
                                            "says; the folder was renamed or copied; the newest good one is c/step-00000001; "
                                            "--resume-from 1 goes on from it\n"))
        for command in (("checkpoint", "inspect", "c"), ("eval", "p.json", "--checkpoint", "c", "--data", "random:8"),
                        ("checkpoint", "export", "c", "-o", "x.safetensors")):
            code, out, err = self.run_program(*command)
            self.assertEqual((code, out), (3, ""), command)
            self.assertIn("got step 2, expected 9, as the folder's name says", err)

    def test_no_part_of_an_old_checkpoint_is_seen_under_its_name(self):
        run = self.start("--steps", "100000000", "--checkpoint", "c", "--every", "1", "--keep", "1")
        folder, end, looks, torn = self.folder / "c", time.monotonic() + 3, 0, []
        while time.monotonic() < end:
            for name in os.listdir(folder):
                try:
                    files = os.listdir(folder / name) if name.startswith("step-") else ["manifest.json"]
                except FileNotFoundError:
                    continue
                looks += 1
                if "manifest.json" not in files and (folder / name).exists():
                    torn.append((name, files))
        self.assertEqual(torn, [])
        self.assertGreater(looks, 100)
        run.kill()

    def test_a_signal_may_end_all_at_once(self):
        run = self.start("--steps", "100000000", "--checkpoint", "c", "--no-save-on-signal")
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=60)
        self.assertEqual((run.returncode, self.checkpoints("c")), (130, []), err)
        # A second one does not wait for the step at hand.
        (self.folder / "wide.json").write_text(json.dumps(dict(TINY, n_embd=768, n_layer=6)))
        self.plan("w.json", 1, "--global-batch", "64", model="./wide.json")
        self.run_flags = ("run", "w.json", "--data", "random:100")
        run = self.start("--steps", "100000000", "--checkpoint", "w")
        run.send_signal(signal.SIGINT)
        time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
        self.assertEqual((run.returncode, [n for n in self.checkpoints("w") if n.startswith("step-")]), (130, []), err)

    def test_a_loss_that_is_no_number_ends_the_run(self):
        flags = (*self.run_flags, "--steps", "20", "--every", "1", "--checkpoint")
        options = self.options(optimizer={"learning_rate": 1e25})
        code, out, err = self.run_program(*flags, "c", *options)
        self.assertEqual((code, out), (5, ""), err)
        message = re.search(r"^error: step (\d+): the loss is (not a number|infinite); the newest checkpoint before is "
                            r"(c/step-\d{8}); --nan continue goes on in such a case\n\Z", err, re.MULTILINE)
        self.assertIsNotNone(message, err)
        self.assertEqual(self.checkpoints("c")[-1], message[3].removeprefix("c/"))
        self.assertTrue(all(math.isfinite(x) for x in self.weights("c")))
        self.assertLessEqual(int(message[1]), 19)
        self.assertEqual(self.run_program(*flags, "d", *options, "--nan", "continue")[0], 0)
        self.assertEqual(self.checkpoints("d")[-1], "step-00000020")
        # Weights may be none while the last loss is one; they take no good checkpoint's place.
        code, out, err = self.run_program(*flags, "e", *self.options(optimizer={"learning_rate": 1e39}))
        self.assertEqual((code, out), (5, ""))
        self.assertIn("error: step 1: weights are no finite numbers; no checkpoint was saved before; --nan continue", err)
        self.assertEqual(self.checkpoints("e"), [])

    def test_a_full_disk_does_not_end_the_run(self):
        def limit(size):
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        def start(*flags):
            return subprocess.Popen([shardwright_test_case.PROGRAM, *self.run_flags, *flags], stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE, text=True, cwd=self.folder, preexec_fn=limit(1000))

        run = start("--steps", "6", "--every", "3", "--checkpoint", "c")
        out, err = run.communicate(timeout=60)
        self.assertEqual((run.returncode, out), (4, ""), err)
        self.assertIn("step 6/6 ", err)
        for step in (3, 6):
            self.assertRegex(err, rf"warning: no checkpoint of step {step}, after 3 attempts: c/\.unfinished-step-0000000{step}-\d+/"
                                  r"rank-0000\d\.safetensors: cannot write: File too large\n")
        self.assertRegex(err, r"\nerror: no checkpoint could be saved of step 3, 6: c/.+: cannot write: File too large; there is "
                              r"none\n\Z")
        self.assertEqual(self.checkpoints("c"), [])
        # With room again before the second attempt all is saved, without a word.
        run = start("--steps", "4", "--every", "1", "--checkpoint", "d")
        for line in run.stderr:
            if line.startswith("step 1/"):
                break
        resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        _, err = run.communicate(timeout=60)
        self.assertEqual((run.returncode, "no checkpoint" in err), (0, False), err)
        self.assertEqual(self.checkpoints("d"), ["step-00000002", "step-00000003", "step-00000004"])

    def test_a_damaged_checkpoint_names_the_one_before(self):
        self.train("p.json", "--steps", "8", "--checkpoint", "c", "--every", "2", "--keep", "4")
        whole = self.export("c")
        for step in (6, 8):
            self.damage(f"c/step-0000000{step}/rank-00001.safetensors")
        offer = r"; the file is damaged; the newest good one is c/step-00000004"
        code, out, err = self.run_program(*self.run_flags, "--steps", "8", "--checkpoint", "c", "--resume")
        self.assertEqual((code, out), (3, ""))
        self.assertRegex(err, r"\Aerror: c/step-00000008/rank-00001.safetensors: got CRC-32 .+" + offer
                         + r"; --resume-from 4 goes on from it\n\Z")
        for command in (("checkpoint", "export", "c", "-o", "x.safetensors"),
                        ("eval", "p.json", "--checkpoint", "c", "--data", "random:8")):
            code, out, err = self.run_program(*command)
            self.assertEqual((code, out), (3, ""))
            self.assertRegex(err, offer + r"\n\Z")
        code, _, err = self.run_program(*self.run_flags, "--steps", "8", "--checkpoint", "c", "--every", "2", "--resume-from", "4",
                                        "--keep", "1")
        self.assertEqual(code, 0, err)
        self.assertIn("resumed from c/step-00000004\n", err)
        self.assertEqual(self.export("c"), whole)
        # What the run has left behind stays, under another name.
        self.assertEqual(self.checkpoints("c"), ["step-00000006-set-aside", "step-00000008", "step-00000008-set-aside"])
        self.assert_fails(3, "c/step-00000005: got no manifest.json, expected a finished checkpoint", *self.run_flags, "--checkpoint",
                          "c", "--resume-from", "5")

    def test_what_a_resumed_run_does_otherwise_is_said(self):
        (self.folder / "a.txt").write_text("abcdefghij" * 100)
        (self.folder / "b.txt").write_text("abcdefghij" * 99 + "abcdefghi!")
        run = ("run", "p.json", "--checkpoint", "c")
        first = (*self.options(optimizer={"learning_rate": 0.01}), "--data", "a.txt")
        self.assertEqual(self.run_program(*run, *first, "--steps", "2")[0], 0)
        _, _, err = self.run_program(*run, *first, "--steps", "3", "--resume")
        self.assertNotIn("resumed with", err)
        _, _, err = self.run_program(*run, *self.options(optimizer={"learning_rate": 0.02}, clip_norm=0.5,
                                                         schedule={"warmup": 3}), "--data", "b.txt", "--steps", "4", "--resume")
        said = re.findall(r"^resumed with (.+)\n", err, re.MULTILINE)
        self.assertRegex(said.pop(), r"^data\.crc32 \d+, was \d+$")
        self.assertEqual(said, ["optimizer.learning_rate 0.02, was 0.01", "schedule.warmup 3, was 0", "clip_norm 0.5, was 1.0",
                                "data b.txt, was a.txt"])

    def test_epochs_that_end_inside_a_batch(self):
        # Ten samples in batches of four: 4, 4, 2 + 2, 4, 4.
        code, out, err = self.run_program("run", "p.json", "--data", "random:10", "--epochs", "2", "--test-data", "random:7", "--json")
        self.assertEqual(code, 0, err)
        report = json.loads(out)
        a, b, c, d, e = (step["loss"] for step in report["steps"])
        self.assertEqual([epoch["epoch"] for epoch in report["epochs"]], [1, 2])
        for epoch, loss in zip(report["epochs"], ((4 * a + 4 * b + 2 * c) / 10, (2 * c + 4 * d + 4 * e) / 10)):
            self.assertAlmostEqual(epoch["train_loss"], loss, 12)
            self.assertEqual(epoch["test_count"], 7 * 16)
        # Epochs smaller than a batch end together.
        code, out, err = self.run_program("run", "p.json", "--data", "random:3", "--epochs", "4", "--json")
        self.assertEqual(code, 0, err)
        report = json.loads(out)
        self.assertEqual(([epoch["epoch"] for epoch in report["epochs"]], len(report["steps"])), ([1, 2, 3, 4], 3))

    def test_test_data_between_steps(self):
        code, out, err = self.run_program(*self.run_flags, "--steps", "5", "--test-data", "random:7", "--eval-every", "2",
                                          "--checkpoint", "c", "--every", "1", "--keep", "5", "--json")
        self.assertEqual(code, 0, err)
        tests = json.loads(out)["tests"]
        self.assertEqual([test["step"] for test in tests], [2, 4, 5])
        for test in tests:
            own = json.loads(self.succeed("eval", "p.json", "--checkpoint", f"c/step-0000000{test['step']}", "--data", "random:7",
                                          "--json"))
            self.assertEqual((test["test_loss"], test["test_correct"]), (own["mean_loss"], own["correct"]))
        code, out, _ = self.run_program(*self.run_flags, "--steps", "2", "--test-data", "random:7")
        self.assertRegex(out, r"\AStep 2\nTest set: Average loss: \d\.\d{4}, Accuracy: \d+/112 \(\d+\.\d\d%\)\n\n")
        self.assert_fails(2, "--eval-every needs --test-data SPEC", *self.run_flags, "--eval-every", "2")

    def test_what_a_step_says(self):
        options = self.options(optimizer={"learning_rate": 0.1}, schedule={"kind": "linear", "total": 4})
        code, out, err = self.run_program(*self.run_flags, "--steps", "4", *options, "--json")
        self.assertEqual(code, 0, err)
        steps = json.loads(out)["steps"]
        for step, rate in zip(steps, (0.1, 0.075, 0.05, 0.025)):
            self.assertAlmostEqual(step["learning_rate"], rate, 12)
            self.assertGreater(step["gradient_norm"], 0)
        self.assertRegex(err, r"(?m)^step 2/4  loss \d\.\d{4}  lr 0\.075  norm [\d.]+  .+  .+ tokens/s  .+ GFLOP/s  .+ left$")
        # Two ranks tell the norm of all gradients, as one does; without clipping there is none.
        self.plan("one.json", 1, "--global-batch", "4")
        for own, other in zip(self.train("one.json", "--steps", "3"), self.train("p.json", "--steps", "3")):
            self.assertAlmostEqual(own["gradient_norm"], other["gradient_norm"], 4)
        self.plan("free.json", 2, "--global-batch", "4", "--clip", "off")
        self.assertNotIn("gradient_norm", self.train("free.json", "--steps", "1")[0])


class PlansOfOthers(TrainingTestCase):

    def test_ddps_map_of_gradients_is_not_run(self):
        for flag in ("--find-unused-parameters", "--static-graph"):
            self.plan("ddp.json", 2, "--global-batch", "4", "--dialect", "ddp", "--replicate", "2", flag, "on")
            self.assert_fails(3, "plan: find_unused_parameters, static_graph: got DDP's map of parameters with a gradient, "
                                 "expected neither of the two, where no parameter is without one", "run", "ddp.json", "--steps", "1",
                              "--data", "random:100")


if __name__ == "__main__":
    main()
