"""Ranks in processes that torchrun or srun started, which the environment tells, on the host device: the bits of ranks that
are threads, their checkpoints, and what one rank meets told by all."""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, checkpoint_files, main

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 2000}  # several pieces


class Processes(ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        self.plan("p.json")
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]

    def plan(self, name, *flags):
        self.succeed("plan", "--model", "./config.json", "--cluster", "h100-80 x2, nvlink 450 GB/s", "--kernel-set",
                     "shardwright-host", "--precision", "fp32", "--seq", "16", "--micro-batch", "2", "--global-batch", "4",
                     "-o", name, *flags)

    def start(self, variables, arguments, folders=(".", ".")):
        """Two ranks with these variables by rank, in these folders."""
        return [subprocess.Popen([shardwright_test_case.PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True, cwd=self.folder / folder,
                                 env=dict(os.environ, OPENBLAS_NUM_THREADS="1", **variables(rank)))
                for rank, folder in enumerate(folders)]

    def ends(self, runs):
        """(exit code, output, errors) of each."""
        texts = [run.communicate(timeout=300) for run in runs]
        return [(run.returncode, *text) for run, text in zip(runs, texts)]

    def launch(self, variables, *flags):
        return self.ends(self.start(variables, ("run", "p.json", "--data", "random:100", *flags)))

    def torchrun(self, rank):
        return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port)}

    def srun(self, rank):
        return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "0",
                "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost,node[2-3]", "MASTER_PORT": str(self.port)}

    def test_processes_compute_the_bits_of_threads(self):
        code, out, err = self.run_program("run", "p.json", "--data", "random:100", "--steps", "3", "--json")
        self.assertEqual(code, 0, err)
        threads = [step["loss"] for step in json.loads(out)["steps"]]
        for launcher in (self.torchrun, self.srun):
            first, second = self.launch(launcher, "--steps", "3", "--json", "--trace", "t.json")
            self.assertEqual((first[0], second[0], second[1]), (0, 0, ""), first[2] + second[2])
            steps = json.loads(first[1])["steps"]
            self.assertEqual([step["loss"] for step in steps], threads)
            # A step ends with the last op of any rank.
            ends = [0.0] * 3
            for event in json.loads((self.folder / "t.json").read_text())["traceEvents"]:
                if "step" in event.get("args", {}):
                    step = event["args"]["step"]
                    ends[step] = max(ends[step], (event["ts"] + event["dur"]) * 1e-6)
            for step, end in zip(steps, ends):
                self.assertAlmostEqual(step["end_s"], end, delta=1e-8)
            found = json.loads(self.run_program("compare", "p.json", "t.json", "--json")[1])
            self.assertEqual((found["matched"], found["findings"]), (found["spans"], []))

    def test_refuses(self):
        three = self.start(lambda rank: dict(self.torchrun(rank), WORLD_SIZE="3"), ("run", "p.json"), (".", ".", "."))
        for code, out, err in self.ends(three):
            self.assertEqual((code, out), (2, ""))
            self.assertIn("error: the plan has 2 ranks, but torchrun started 3 processes\n", err)
        ends = self.launch(lambda rank: {} if rank == 0 else dict(self.torchrun(rank), RANK="x"))
        self.assertEqual(ends[1][0], 3)
        self.assertIn("environment: RANK: got x, expected a number from 0 to 1", ends[1][2])

    def test_ranks_of_another_mpi(self):
        """mpiexec of MPICH: each rank trained the whole plan, with exit 0."""
        def hydra(rank):
            return {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}

        for code, out, err in self.launch(hydra, "--steps", "1"):
            self.assertEqual((code, out), (3, ""))
            self.assertIn("error: environment: MASTER_ADDR: got nothing, expected the machine that rank 0 runs on; the ranks of mpiexec "
                          "meet there, at a free MASTER_PORT\n", err)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        first, second = self.launch(lambda rank: {**hydra(rank), **place}, "--steps", "2", "--json")
        self.assertEqual((first[0], second[0], second[1]), (0, 0, ""), first[2] + second[2])
        self.assertEqual(len(json.loads(first[1])["steps"]), 2)

    def test_a_folder_that_one_rank_may_not_write_into(self):
        """Found before step 0, not at the first checkpoint."""
        (self.folder / "c").mkdir()
        read_only = ("unshare", "-m", "sh", "-c", 'mount --bind c c && mount -o remount,bind,ro c && exec "$0" "$@"')
        if subprocess.run([*read_only, "true"], cwd=self.folder, capture_output=True, check=False).returncode != 0:
            print("no mounts of our own, not tested", file=sys.stderr)
            return
        command = (shardwright_test_case.PROGRAM, "run", "p.json", "--data", "random:100", "--steps", "1", "--checkpoint", "c")
        runs = [subprocess.Popen([*before, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
                                 env=dict(os.environ, OPENBLAS_NUM_THREADS="1", **self.torchrun(rank)))
                for rank, before in enumerate(((), read_only))]
        for code, out, err in self.ends(runs):
            self.assertEqual((code, out), (4, ""), err)
            self.assertIn("error: c: cannot write into: Read-only file system", err)

    def test_nobody_comes(self):
        ends = self.launch(lambda rank: self.torchrun(0) if rank == 0 else {}, "--timeout", "200 ms", "--steps", "1")
        self.assertEqual(ends[0][0], 5)
        self.assertIn(f"error: rank 0: waited 200 ms at port {self.port} for rank 1\n", ends[0][2])


    def contents(self, folder):
        return checkpoint_files(self.folder / folder)

    def checkpoints(self, folder):
        return sorted(p.name for p in (self.folder / folder).iterdir() if p.name != ".lock")

    def test_checkpoints(self):
        # Files and manifest are those of threads, also where two ranks hold the same and one saves it.
        for dialect, files in (("native", 3), ("ddp", 2)):
            with self.subTest(dialect=dialect):
                self.plan("p.json", "--dialect", dialect)
                code, _, err = self.run_program("run", "p.json", "--data", "random:100", "--steps", "5", "--checkpoint",
                                                f"{dialect}-threads")
                self.assertEqual(code, 0, err)
                flags = ("--checkpoint", f"{dialect}-processes")
                for more in (("--steps", "3", "--every", "2"), ("--steps", "5", "--resume")):
                    ends = self.launch(self.torchrun, *flags, *more)
                    self.assertEqual([end[0] for end in ends], [0, 0], ends)
                self.assertIn(f"resumed from {dialect}-processes/step-00000003\n", ends[0][2])
                self.assertEqual(ends[1][1:], ("", ""))
                self.assertEqual(self.checkpoints(f"{dialect}-processes"),
                                 ["step-00000002", "step-00000003", "step-00000005"])
                written = self.contents(f"{dialect}-processes/step-00000005")
                self.assertEqual(len(written), files)
                self.assertEqual(written, self.contents(f"{dialect}-threads/step-00000005"))

    def test_names_with_newlines(self):
        def linear(name):
            return {"name": name, "class": "Linear", "params": [{"name": "weight", "shape": [16, 16]}, {"name": "bias", "shape": [16]}]}

        net = {"format": "shardwright-model", "version": 1, "class": "Net",
               "inputs": {"x": {"shape": [16]}, "label": {"ids": 1}}, "modules": [linear("a\nb"), linear("c\n0 d\"")],
               "ops": [{"op": "linear", "inputs": ["x"], "output": "y", "module": "a\nb"},
                       {"op": "linear", "inputs": ["y"], "output": "logits", "module": "c\n0 d\""},
                       {"op": "cross_entropy", "inputs": ["logits", "label"], "output": "loss", "name": "loss"}]}
        (self.folder / "net.json").write_text(json.dumps(net))
        self.succeed("plan", "--model", "./net.json", "--cluster", "h100-80 x2, nvlink 450 GB/s", "--kernel-set", "shardwright-host",
                     "--precision", "fp32", "--dialect", "ddp", "--micro-batch", "2", "--global-batch", "4", "--no-search", "-o",
                     "p.json")
        code, _, err = self.run_program("run", "p.json", "--data", "random:100", "--steps", "4", "--checkpoint", "threads")
        self.assertEqual(code, 0, err)
        for steps in ("2", "4"):  # ranks hold the same, and one saves it
            ends = self.launch(self.torchrun, "--checkpoint", "c", "--resume", "--steps", steps)
            self.assertEqual([end[0] for end in ends], [0, 0], ends)
        self.assertEqual(self.contents("c/step-00000004"), self.contents("threads/step-00000004"))

    def test_test_data(self):
        data = ("--data", "random:16", "--test-data", "random:13")
        code, threads, err = self.run_program("run", "p.json", *data, "--epochs", "1", "--checkpoint", "c", "--json")
        self.assertEqual(code, 0, err)
        first, second = self.ends(self.start(self.torchrun, ("run", "p.json", *data, "--epochs", "1", "--json")))
        self.assertEqual((first[0], second[0], second[1]), (0, 0, ""), first[2] + second[2])
        self.assertEqual(json.loads(first[1])["epochs"], json.loads(threads)["epochs"])
        evaluate = ("eval", "p.json", "--checkpoint", "c", "--data", "random:13")
        self.assertEqual(self.ends(self.start(self.torchrun, evaluate)), [(0, self.succeed(*evaluate), ""), (0, "", "")])

    def test_one_ranks_problem_is_everybodys(self):
        flags = ("run", "p.json", "--data", "random:100", "--steps", "3", "--checkpoint", "c")
        # A damaged file is found by the one rank that reads it.
        self.assertEqual([end[0] for end in self.launch(self.torchrun, *flags[4:])], [0, 0])
        shard = self.folder / "c/step-00000003/rank-00001.safetensors"
        content = shard.read_bytes()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for code, out, err in self.launch(self.torchrun, *flags[4:], "--resume"):
            self.assertEqual((code, out), (3, ""))
            self.assertIn("error: c/step-00000003/rank-00001.safetensors: got CRC-32 ", err)

    def test_a_rank_that_stands_still_is_named(self):
        flags = ("run", "p.json", "--data", "random:100", "--steps", "100000000", "--every", "1", "--timeout", "4 s", "--checkpoint")
        moments = random.Random(3)
        for victim in (1, 0):  # without 0 no message gets through
            runs = self.start(self.torchrun, (*flags, f"c{victim}"))
            for line in runs[0].stderr:
                if line.startswith("step 2/"):
                    break
            time.sleep(moments.uniform(0.0, 0.3))  # also inside the writing of a checkpoint
            runs[victim].send_signal(signal.SIGSTOP)
            try:
                _, err = runs[1 - victim].communicate(timeout=300)
                self.assertEqual(runs[1 - victim].returncode, 5)
                self.assertRegex(err, rf"error: rank {1 - victim}, .+: waited 4000 ms for rank {victim}\n")
            finally:
                for run in runs:
                    run.kill()
                    run.communicate()

    def test_killed_at_any_moment_a_run_resumes_to_the_same_weights(self):
        whole = self.launch(self.torchrun, "--steps", "20", "--checkpoint", "whole")
        self.assertEqual([end[0] for end in whole], [0, 0], whole)
        moments = random.Random(7)
        flags = ("run", "p.json", "--data", "random:100", "--steps", "20", "--checkpoint", "c", "--every", "1", "--resume",
                 "--timeout", "60 s")  # one that is killed before they meet is waited for
        for victim in (0, 1, 1):
            runs = self.start(self.torchrun, flags)
            try:
                runs[victim].wait(moments.uniform(0.1, 0.6))  # also inside the writing of a checkpoint
            except subprocess.TimeoutExpired:
                runs[victim].kill()
            self.ends(runs)  # the other one ends by itself
        last = self.ends(self.start(self.torchrun, flags))
        self.assertEqual([end[0] for end in last], [0, 0], last)
        self.assertEqual([name for name in self.checkpoints("c") if not name.startswith("step-")], [])
        self.assertEqual(self.contents("c/step-00000020"), self.contents("whole/step-00000020"))


if __name__ == "__main__":
    main()
