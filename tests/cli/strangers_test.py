"""What comes from strangers (docs/security.md): their folders, files and names do no more than they were given for."""

import json
import os
import pathlib
import resource
import signal
import subprocess
from unittest import mock

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase

PLAN = ("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "--wrap", "block")
ELSEWHERE = 'expected a flag that only chooses how something is computed or printed; give it on the command line, or in '


class Folders(ShardwrightTestCase):
    """A file shardwright.json of the current folder."""

    def setUp(self):
        super().setUp()
        home = mock.patch.dict(os.environ, {"XDG_CONFIG_HOME": str(self.folder / "home")})
        home.start()
        self.addCleanup(home.stop)
        self.user = self.folder / "home" / "shardwright" / "config.json"
        self.plan = self.folder / "plan.json"
        self.plan.write_text(self.succeed(*PLAN))
        self.file = self.folder / "shardwright.json"

    def configure(self, flags, mode=0o644):
        self.file.write_text(json.dumps(flags))
        self.file.chmod(mode)

    def test_flags_that_write_delete_or_run(self):
        victim = self.folder / "victim"
        victim.write_text("kept")
        for command, flag, arguments in (("simulate", "trace", ["plan.json"]), ("plan", "output", PLAN[1:]),
                                         ("emit", "output", ["plan.json", "--to", "fsdp2"]),
                                         ("emit", "script", ["plan.json", "--to", "torchrun"]),
                                         ("emit", "as-emitted", ["plan.json", "--to", "fsdp2"]),
                                         ("run", "checkpoint", ["plan.json"]), ("run", "keep", ["plan.json"]),
                                         ("run", "every", ["plan.json"]), ("run", "trace", ["plan.json"]),
                                         ("run", "device", ["plan.json"]), ("sweep", "csv", PLAN[1:]), ("report", "output", ["plan.json"]),
                                         ("calibrate", "output", ["run.json"]),
                                         ("eval", "checkpoint", ["plan.json"]), ("import-run", "output", ["run.json"]),
                                         ("topo", "output", ["import", "topo.txt"])):
            with self.subTest(command=command, flag=flag):
                self.configure({command: {flag: "victim"}})
                self.assert_fails(3, f"shardwright.json: {command}.{flag}: got --{flag}, {ELSEWHERE}{self.user}", command, *arguments)
                self.assertEqual(victim.read_text(), "kept")
                self.user.parent.mkdir(parents=True, exist_ok=True)

    def test_the_user_may(self):
        self.user.parent.mkdir(parents=True)
        self.user.write_text(json.dumps({"simulate": {"trace": "trace.json"}}))
        self.succeed("simulate", "plan.json")
        self.assertTrue((self.folder / "trace.json").is_file())
        with mock.patch.dict(os.environ, {"SHARDWRIGHT_SIMULATE_TRACE": "other.json"}):
            self.succeed("simulate", "plan.json")
        self.assertTrue((self.folder / "other.json").is_file())

    def test_what_was_taken_is_said(self):
        self.configure({"plan": {"seq": "96", "wrap": "root", "nodes": 1}, "simulate": {"contention": "off"}})
        code, out, err = self.run_program("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4")
        self.assertEqual((code, err), (0, "from shardwright.json: --nodes=1 --seq=96 --wrap=root\n"))
        self.assertEqual(json.loads(out)["job"]["sequence_length"], 96)
        self.assertEqual(self.run_program(*PLAN, "--nodes", "1")[2], "")
        self.assertEqual(self.run_program("inspect", "plan.json")[2], "")
        self.configure({"plan": {"frozen": "a\n\x1b[31mb"}})
        self.assertEqual(self.run_program(*PLAN)[2].splitlines()[0], r"from shardwright.json: --frozen=a\n\u001b[31mb")

    def test_files_that_others_write(self):
        self.configure({"plan": {"wrap": "root"}}, mode=0o666)
        error = ("shardwright.json: got a file that every user may write, expected one that only you may write; "
                 "chmod o-w shardwright.json if you trust what it says")
        self.assert_fails(3, error, "config")
        self.assert_fails(3, error, *PLAN)
        self.assertIn(b"gpt2", subprocess.run([shardwright_test_case.PROGRAM, "list", "models"], capture_output=True, check=True).stdout)

    def test_files_of_others(self):
        if os.geteuid() != 0:
            return  # nobody else can give files away
        self.configure({"plan": {"wrap": "root"}})
        os.chown(self.file, 12345, 12345)
        error = ("shardwright.json: got a file of user 12345, expected one of yours (user 0); remove it, or copy it if you trust it")
        self.assert_fails(3, error, *PLAN)
        # A link of theirs to a file of ours.
        ours = self.folder / "ours.json"
        self.file.rename(ours)
        os.chown(ours, 0, 0)
        self.file.symlink_to(ours)
        self.assertIn("--wrap root", self.succeed("config"))
        os.chown(self.file, 12345, 12345, follow_symlinks=False)
        self.assert_fails(3, error, *PLAN)

    def test_what_is_no_file(self):
        os.mkfifo(self.file, 0o600)
        self.assert_fails(3, "shardwright.json: got a pipe, socket or device, expected a readable file", "config")
        self.file.unlink()
        self.file.write_text('{"plan": "' + "a" * (2 << 20) + '"}')
        self.assert_fails(3, "shardwright.json: got more than 1 MiB, expected a few flags", "config")


class Outputs(ShardwrightTestCase):

    def test_a_limit_of_the_size_of_files(self):
        """SIGXFSZ ended the program, and the temporary file stayed."""
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        done = subprocess.run([shardwright_test_case.PROGRAM, *PLAN, "-o", "plan.json"], cwd=self.folder, preexec_fn=limit, text=True,
                              capture_output=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (4, "error: plan.json: cannot write: File too large\n"))
        self.assertEqual(os.listdir(self.folder), [])

    def test_the_temporary_file_cannot_be_made_before(self):
        """Under sh the program has the process id that sh had."""
        script = 'echo mine > plan.json.tmp.$$; echo plan.json.tmp.$$ > name; exec "$@"'
        subprocess.run(["sh", "-c", script, "sh", shardwright_test_case.PROGRAM, *PLAN, "-o", "plan.json"], cwd=self.folder, check=True,
                       capture_output=True)
        made = pathlib.Path(self.folder / (self.folder / "name").read_text().strip())
        self.assertEqual(made.read_text(), "mine\n")
        self.assertEqual(json.loads((self.folder / "plan.json").read_text())["format"], "shardwright-plan")
        self.assertEqual(len(os.listdir(self.folder)), 3)

    def test_links_in_an_output_folder(self):
        """The user has named the folder only. Links out of an archive are the user's own, and were followed."""
        self.succeed(*PLAN, "-o", "plan.json")
        victim = self.folder / "precious"
        victim.write_text("mine\n")
        out = self.folder / "out"
        out.mkdir()
        link = out / "fsdp2_plan.json"
        refused = "out/fsdp2_plan.json: cannot write: it is a link, folder or device, expected a file or nothing; remove it, or name another folder"
        for make in (lambda: link.symlink_to(victim), lambda: link.symlink_to(self.folder / "new"), lambda: os.mkfifo(link)):
            make()
            self.assert_fails(4, refused, "emit", "plan.json", "--to", "fsdp2", "-o", "out")
            link.unlink()
        self.assertEqual(victim.read_text(), "mine\n")
        self.assertEqual(sorted(os.listdir(self.folder)), ["out", "plan.json", "precious"])
        self.assertEqual(os.listdir(out), [])
        # A link that the user names is the user's; a file may be written again.
        (self.folder / "link").symlink_to(victim)
        self.succeed(*PLAN, "-o", "link")
        self.assertEqual(json.loads(victim.read_text())["format"], "shardwright-plan")
        for _ in range(2):
            self.succeed("emit", "plan.json", "--to", "fsdp2", "-o", "out")


class Texts(ShardwrightTestCase):

    def test_values_of_megabytes(self):
        """Errors showed all of them."""
        text = self.succeed(*PLAN)
        for old, new, shown in (('"sequence_length": 128', '"sequence_length": ' + "1" * 3_000_000, "number overflow parsing '11"),
                                ('"dialect": "fsdp2"', '"dialect": "' + "a" * 3_000_000 + '"', 'plan.dialect: got "aa'),
                                ('"accumulation": 1', '"' + "k" * 3_000_000 + '": 1', 'unknown key "kk'),
                                ('"accumulation": 1', ('"' + "k" * 3_000_000 + '": 1,') * 2 + '"accumulation": 1', 'the key "kk')):
            self.assertEqual(text.count(old), 1)
            (self.folder / "long.json").write_text(text.replace(old, new))
            code, _, err = self.run_program("simulate", "long.json")
            self.assertEqual(code, 3)
            self.assertIn(shown, err)
            self.assertLess(len(err), 10_000)


if __name__ == "__main__":
    shardwright_test_case.main()
