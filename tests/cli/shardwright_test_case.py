"""Runs the program under test. Every test file here is started with the program's path as its first argument."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

PROGRAM = ""
TESTS = pathlib.Path(__file__).resolve().parent.parent


def checkpoint_files(folder):
    """{name: content} of a checkpoint; the manifest without what tells one run from another."""
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    manifest = json.loads(files["manifest.json"])
    files["manifest.json"] = {name: manifest[name] for name in manifest if name not in ("run", "manifest_crc32")}
    return files


def run_list(step_time_s=1.0):
    """A list of runs of one stack, as validate, fit and calibrate read it."""
    runs = [{"id": f"run-{n}", "step_time_s": n * step_time_s,
             "flags": {"--model": "gpt2", "--cluster": "dgx-a100", "--seq": "128", "--micro-batch": str(n)}} for n in range(1, 5)]
    return json.dumps({"format": "shardwright-runs", "version": 1, "runs": runs})


class ShardwrightTestCase(unittest.TestCase):
    """A test with a folder of its own, in which the program runs."""

    maxDiff = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def line(self, *arguments):
        return [PROGRAM, *arguments]

    def run_program(self, *arguments, stdin="", stdout=subprocess.PIPE):
        """(exit code, standard output, standard error)."""
        done = subprocess.run(self.line(*arguments), input=stdin, stdout=stdout, stderr=subprocess.PIPE, text=True,
                              cwd=self.folder, timeout=500, check=False)
        return done.returncode, done.stdout, done.stderr

    def succeed(self, *arguments, stdin=""):
        """Standard output of a run that must succeed in silence, but for what long searches say every ten seconds."""
        code, out, err = self.run_program(*arguments, stdin=stdin)
        lines = [line for line in err.splitlines() if not line.startswith("searching for ")]
        self.assertEqual((code, lines), (0, []))
        return out

    def assert_fails(self, code, error, *arguments, stdin=""):
        """One line on standard error, nothing on standard output, no file left behind."""
        before = sorted(os.listdir(self.folder))
        self.assertEqual(self.run_program(*arguments, stdin=stdin), (code, "", f"error: {error}\n"))
        self.assertEqual(sorted(os.listdir(self.folder)), before)


class BenchTestCase(ShardwrightTestCase):
    """A test of the scripts in bench/ that know the published tables, which are called as if they were commands."""

    SCRIPTS = ("validate", "validate-nccl", "validate-kernels", "fit", "fit-nccl", "jobs")

    def line(self, *arguments):
        if arguments[0] not in self.SCRIPTS:
            return [PROGRAM, *arguments]
        script = TESTS.parent / "bench" / (arguments[0].replace("-", "_") + ".py")
        return [sys.executable, "-B", str(script), "--program", PROGRAM, *arguments[1:]]


def interrupted(arguments, folder):
    """(exit code, standard output, standard error) of a run that waits for its input when Ctrl-C comes."""
    process = subprocess.Popen([PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, cwd=folder)
    # More than a pipe holds: once this returns the program has begun to read, so its handler stands.
    process.stdin.write(" " * 200_000)
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=60)
    out, err = process.stdout.read(), process.stderr.read()
    for stream in (process.stdout, process.stderr):
        stream.close()
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
    return code, out, err


def main():
    """To be called by each test file."""
    global PROGRAM
    PROGRAM = sys.argv.pop(1)
    # The module was also imported by name; both copies must know the program.
    sys.modules["shardwright_test_case"].PROGRAM = PROGRAM
    unittest.main(module="__main__")
