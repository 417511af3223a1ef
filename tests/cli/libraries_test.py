"""Commands that do not train load no OpenBLAS, and work where a user may have little memory, as on login nodes."""

import os
import resource
import subprocess

import shardwright_test_case

# `ulimit -v 4194304`
LEAST_MEMORY = 4 << 30
PLAN = ["plan", "--model", "model.json", "--cluster", "h100-80 x2, nvlink 450 GB/s", "--seq", "32", "--global-batch", "4", "--kernel-set", "shardwright-host",
        "--wrap", "block", "-o", "plan.json"]
MODEL = """{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64,
            "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}"""


class Libraries(shardwright_test_case.ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        (self.folder / "model.json").write_text(MODEL)

    def start(self, *arguments, **variables):
        """The finished process; its standard error says which libraries the loader looked for."""
        limit = resource.RLIMIT_AS, (LEAST_MEMORY, LEAST_MEMORY)
        return subprocess.run([shardwright_test_case.PROGRAM, *arguments], cwd=self.folder, text=True, capture_output=True, check=False,
                              env=dict(os.environ, LD_DEBUG="libs", **variables), preexec_fn=lambda: resource.setrlimit(*limit))

    def test_commands_that_do_not_train(self):
        for arguments in (["--version"], ["--help"], ["list", "models"], ["inspect", "gpt2"], PLAN, ["simulate", "plan.json"],
                          ["emit", "plan.json", "--to", "fsdp2", "-o", "out/"], ["report", "plan.json", "-o", "page.html"], ["doctor"]):
            with self.subTest(arguments=arguments):
                done = self.start(*arguments)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("find library=libc.so.6", done.stderr)  # the loader does tell
                self.assertNotIn("openblas", done.stderr)

    def test_run(self):
        self.succeed(*PLAN)
        done = self.start("run", "plan.json", "--steps", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("find library=libopenblas.so.0", done.stderr)

    def test_run_without_openblas(self):
        self.succeed(*PLAN)
        done = self.start("run", "plan.json", "--steps", "1", SHARDWRIGHT_OPENBLAS="/nowhere/libopenblas.so.0")
        self.assertEqual((done.returncode, done.stdout), (4, ""))
        self.assertEqual([line for line in done.stderr.splitlines() if line.startswith("error")],
                         ["error: matrix products need OpenBLAS: /nowhere/libopenblas.so.0: cannot open shared object file: "
                          "No such file or directory; install libopenblas0 or set SHARDWRIGHT_OPENBLAS to its path"])


if __name__ == "__main__":
    shardwright_test_case.main()
