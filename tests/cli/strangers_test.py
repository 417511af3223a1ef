"""What comes from strangers (docs/security.md): their folders, files and names do no more than they were given for."""

import json
import os
import pathlib
import resource
import signal
import subprocess

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase

PLAN = ("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "--wrap", "block")


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
