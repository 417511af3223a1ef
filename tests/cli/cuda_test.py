"""run --device cuda on a machine without a GPU: what is wrong with the plan comes first, then what the machine lacks."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 100}


class Cuda(ShardwrightTestCase):

    def plan(self, kernel_set, gpus, *flags):
        """The name of a plan file for a small transformer."""
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        name = f"{kernel_set}-{gpus}{''.join(flags)}.json"
        self.succeed("plan", "--model", "config.json", "--cluster", f"h200-141 x{gpus}, nvlink 450 GB/s", "--kernel-set",
                     kernel_set, "--dialect", "native", "--seq", "16", *flags, "-o", name)
        return name

    def test_flags(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        self.assert_fails(2, "--graphs needs --device cuda", "run", plan, "--graphs", "on")
        self.assert_fails(2, "--loopback needs --device cuda", "run", plan, "--loopback", "2")
        self.assert_fails(3, "--loopback: got 3, expected 2, the ranks of the plan", "run", plan, "--device", "cuda",
                          "--loopback", "3")
        self.assert_fails(3, "--reduce: got ordered, expected any: NCCL sums in an order of its own; --device host and "
                          "--loopback keep the order of the ranks", "run", plan, "--device", "cuda", "--reduce", "ordered")
        self.assert_fails(2, "--device cuda needs --cluster, the GPUs of this machine and what joins them",
                          "calibrate", "--device", "cuda", "-o", "mine.json")
        for flag in (("--delays", "1"), ("--emulate-network",)):
            self.assert_fails(2, f"{flag[0]} is of --device host: a GPU's streams cannot be told to be late", "run", plan,
                              "--device", "cuda", *flag)
        self.assert_fails(2, "--threads is of --device host: a GPU computes by itself", "run", plan, "--device", "cuda",
                          "--threads", "2")
        self.assert_fails(2, "--loopback needs --device cuda", "eval", plan, "--checkpoint", "c", "--data", "random",
                          "--loopback", "2")

    def test_wrong_kernel_set(self):
        self.assert_fails(3, 'plan: kernel_set: got "torch-eager", expected "shardwright-cuda-plain", the kernels that '
                          "the CUDA device has; make the plan with --kernel-set shardwright-cuda-plain",
                          "run", self.plan("torch-eager", 1), "--device", "cuda", "--data", "random:8")

    @unittest.skipIf(shutil.which("nvidia-smi"), "this machine may have a GPU")
    def test_no_gpu(self):
        code, out, err = self.run_program("run", self.plan("shardwright-cuda-plain", 1), "--device", "cuda", "--data",
                                          "random:8")
        self.assertEqual((code, out), (4, ""))
        self.assertRegex(err, "error: device cuda: (this machine has no NVIDIA driver|.*this build has no CUDA module)")


class Emulated(Cuda):
    """The program beside a module whose GPUs are emulated, and an NCCL that passes everything through files."""

    test_wrong_kernel_set = test_no_gpu = test_flags = None

    def setUp(self):
        super().setUp()
        modules = pathlib.Path(shardwright_test_case.PROGRAM).with_name("emulated")
        if not modules.exists():
            self.skipTest("built without tests of the CUDA device")
        self.nccl = str(modules / "libnccl.so")
        self.program = self.folder / "shardwright"
        shutil.copy(shardwright_test_case.PROGRAM, self.program)
        shutil.copy(modules / "libshardwright_cuda.so", self.folder)

    def run_command(self, *words, **variables):
        environment = dict(os.environ, SHARDWRIGHT_NCCL=self.nccl, TMPDIR=str(self.folder), **variables)
        done = subprocess.run([self.program, *words], capture_output=True, text=True, cwd=self.folder, env=environment,
                              timeout=500, check=False)
        return done.returncode, done.stdout, done.stderr

    def run_emulated(self, *flags, **variables):
        return self.run_command("run", *flags, "--device", "cuda", "--data", "random:8", **variables)

    def losses(self, *flags, steps=2):
        code, out, err = self.run_emulated(*flags, "--steps", str(steps), "--json")
        self.assertEqual(code, 0, err)
        return [step["loss"] for step in json.loads(out)["steps"]]

    def test_one_process_per_gpu(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        together = self.losses(plan, "--loopback", "2")
        apart = self.losses(plan, "--trace", "t.json")
        for one, other in zip(together, apart):
            self.assertAlmostEqual(one, other, places=2)  # bf16: sums in another order
        found = json.loads(self.run_program("compare", plan, "t.json", "--json")[1])
        self.assertEqual((found["matched"], found["findings"]), (found["spans"], []))
        self.assertEqual(list(self.folder.glob("fake-nccl-*")), [])
        # The trace of a run on GPUs is a measurement like any other.
        # What other tests leave of the cores decides how evenly its emulated GPUs run, and so whether the fit is better.
        self.succeed("calibrate", "t.json", "--name", "mine", "-o", "mine.json", "--even-if-worse")
        self.succeed("plan", "--model", "config.json", "--cluster", "h200-141 x2, nvlink 450 GB/s", "--kernel-set",
                     "shardwright-cuda-plain", "--dialect", "native", "--seq", "16", "--profile", "mine.json", "-o", "p.json")

    def test_products_in_fp8(self):
        def losses_of(precision, kernel_set, *flags):
            plan = self.plan(kernel_set, 2, "--no-search", "--precision", precision)
            code, out, err = self.run_command("run", plan, *flags, "--data", "random:8", "--steps", "16", "--json")
            self.assertEqual(code, 0, err)
            return [step["loss"] for step in json.loads(out)["steps"]]

        gpu = ("shardwright-cuda-plain", "--device", "cuda", "--loopback", "2")
        half = losses_of("bf16-mixed", "shardwright-host")
        half_on_gpu = losses_of("bf16-mixed", *gpu)
        for precision in ("fp8", "bf16-mixed+fp8-rowwise"):
            host, on_gpu = losses_of(precision, "shardwright-host"), losses_of(precision, *gpu)
            self.assertNotEqual(host, half)
            self.assertNotEqual(on_gpu, half_on_gpu)
            self.assertLess(host[-1], host[0] - 0.2)
            for one, other, without in zip(host, on_gpu, half):
                self.assertAlmostEqual(one, other, delta=0.005)
                self.assertAlmostEqual(one, without, delta=0.005)

    def start_ranks(self, plan, given, **variables):
        """A process for each rank, as a launcher would start it, with these flags of its own, in these variables."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        runs = [subprocess.Popen(
            [self.program, "run", plan, "--device", "cuda", "--data", "random:8", *flags], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, cwd=self.folder,
            env={**os.environ, "SHARDWRIGHT_NCCL": self.nccl, "TMPDIR": str(self.folder), "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "WORLD_SIZE": str(len(given)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables})
            for rank, flags in enumerate(given)]
        self.addCleanup(lambda: [(run.kill(), run.communicate()) for run in runs if run.poll() is None])
        return runs

    def test_ranks_that_were_given_different_things_do_not_start(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        for run in self.start_ranks(plan, ((), ("--seed", "7"))):
            out, err = run.communicate(timeout=300)
            self.assertEqual((run.returncode, out, err), (3, "", "error: rank 1: --seed 7, rank 0 has none; give all ranks the same\n"))

    def test_a_gpu_is_not_taken_by_chance(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        for run in self.start_ranks(plan, [("--steps", "1")] * 2, LOCAL_RANK=""):
            out, err = run.communicate(timeout=300)
            self.assertEqual((run.returncode, out), (3, ""), err)
            self.assertIn("error: environment: LOCAL_RANK: got nothing, expected the number of this process's GPU on its machine, "
                          "from 0; or CUDA_VISIBLE_DEVICES with one GPU per process\n", err)
        for run in self.start_ranks(plan, [("--steps", "1")] * 2, LOCAL_RANK="", CUDA_VISIBLE_DEVICES="1"):
            _, err = run.communicate(timeout=300)
            self.assertEqual(run.returncode, 0, err)

    def test_one_error_is_one_line(self):
        plan = self.plan("shardwright-cuda-plain", 4)
        code, _, err = self.run_emulated(plan, "--steps", "3", SHARDWRIGHT_FAKE_NCCL="fail 2 2")
        self.assertEqual(code, 5, err)
        self.assertEqual(err.count("error: rank 2, op "), 1, err)
        self.assertEqual(err.count("error: "), 1, err)
        # Each rank says where it runs.
        self.assertRegex(err, r"rank 2: local rank 2 of \S+, emulated GPU; `dmesg \| grep Xid` there shows")

    def test_a_rank_that_stands_still_is_named(self):
        plan = self.plan("shardwright-cuda-plain", 4)
        for victim in (2, 0):
            runs = self.start_ranks(plan, [("--steps", "100000000", "--timeout", "3 s")] * 4)
            for line in runs[0].stderr:
                if line.startswith("step 2/"):
                    break
            runs[victim].send_signal(signal.SIGSTOP)
            for rank, run in enumerate(runs):
                if rank != victim:
                    _, err = run.communicate(timeout=300)
                    self.assertEqual(run.returncode, 5, err)
                    self.assertRegex(err, rf"error: rank \d, .+: waited 3000 ms for rank {victim}( \(collective .+)?\n")
            runs[victim].kill()
            runs[victim].communicate()

    def test_processes_meet_on_loopback_by_a_key(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        seen, keys = set(), set()
        for _ in range(10):  # on full cores a look may come when they have met
            self.watch_meeting(plan, seen, keys)
            if seen and keys:
                break
        self.assertEqual(seen, {"0100007F"})  # 127.0.0.1
        self.assertEqual({len(key) for key in keys}, {64})

    def watch_meeting(self, plan, seen, keys):
        """Adds the addresses on which a run's processes listen, and the keys that they know each other by."""
        environment = dict(os.environ, SHARDWRIGHT_NCCL=self.nccl, TMPDIR=str(self.folder))
        run = subprocess.Popen([self.program, "run", plan, "--device", "cuda", "--data", "random:8", "--steps", "2"],
                               cwd=self.folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found_keys = set()
        while run.poll() is None:
            children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children")
            try:
                pids = [run.pid, *map(int, children.read_text().split())]
                sockets = {os.readlink(file) for pid in pids for file in pathlib.Path(f"/proc/{pid}/fd").iterdir()}
                for table in ("tcp", "tcp6"):
                    for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                        _, local, _, state, *rest = line.split()
                        if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                            seen.add(local.split(":")[0])
                for pid in pids[1:]:
                    variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    found = [entry.partition(b"=")[2] for entry in variables if entry.startswith(b"SHARDWRIGHT_KEY=")]
                    found_keys.update(found)
                    for key in found:
                        self.assertNotIn(key, pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
            except OSError:  # one of them has just ended
                pass
        self.assertEqual(run.returncode, 0)
        self.assertLessEqual(len(found_keys), 1)  # one for all
        keys.update(found_keys)

    def test_calibrate(self):
        cluster = "h200-141 x2, nvlink 450 GB/s"
        code, out, err = self.run_command("calibrate", "--device", "cuda", "--cluster", cluster, "--name", "mine", "-o",
                                           "mine.json", "--json")
        self.assertEqual(code, 0, err)
        report = json.loads(out)
        # Which of a part's numbers an emulated GPU's times decide varies.
        parts = {number["field"].split(".")[0] for number in report["numbers"]}
        self.assertEqual(parts, {"compute", "transports", "copy", "host"})
        names = [run["name"] for run in report["runs"]]
        self.assertEqual(names[:2] + names[-1:], ["transformer-32 on 2 ranks", "transformer-128 on 2 ranks",
                                                  "transformer-64 on 1 rank, offloading"])
        self.assertIn("; H200-SXM-141GB", (self.folder / "mine.json").read_text())
        self.succeed("plan", "--model", "gpt2", "--cluster", cluster, "--kernel-set", "shardwright-cuda-plain", "--dialect",
                     "native", "--profile", "mine.json", "-o", "p.json")

    def test_checkpoints(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        # All ranks on one GPU, and a process for each.
        for where in (("--loopback", "2"), ()):
            whole = self.losses(plan, *where, steps=4)
            checkpoint = (*where, "--checkpoint", f"c{len(where)}")
            self.assertEqual(self.losses(plan, *checkpoint, steps=2), whole[:2])
            self.assertEqual(self.losses(plan, *checkpoint, "--resume", steps=4), whole[2:])

    def test_evaluation(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        code, out, err = self.run_emulated(plan, "--loopback", "2", "--epochs", "1", "--test-data", "random:5", "--json",
                                           "--checkpoint", "c")
        self.assertEqual(code, 0, err)
        epoch = json.loads(out)["epochs"][0]
        evaluate = ("--checkpoint", "c", "--data", "random:5", "--json")
        for where in (("--loopback", "2"), ()):  # nothing is summed over ranks: the same bits
            code, out, err = self.run_command("eval", plan, *evaluate, "--device", "cuda", *where)
            self.assertEqual(code, 0, err)
            found = json.loads(out)
            self.assertEqual((found["mean_loss"], found["correct"], found["counted"]),
                             (epoch["test_loss"], epoch["test_correct"], epoch["test_count"]))
        host = json.loads(self.succeed("eval", self.plan("shardwright-host", 2), *evaluate))
        self.assertEqual((host["counted"], found["counted"]), (5 * 16, 5 * 16))
        self.assertAlmostEqual(host["mean_loss"], found["mean_loss"], places=2)
        # A process per GPU, beside the ranks that train.
        code, out, err = self.run_emulated(plan, "--epochs", "1", "--test-data", "random:5", "--json")
        self.assertEqual(code, 0, err)
        self.assertAlmostEqual(json.loads(out)["epochs"][0]["test_loss"], epoch["test_loss"], places=2)

    def test_graphs(self):
        # GPT-2's dropout draws another mask in every step, and the clipping is on.
        for precision in ("bf16-mixed", "fp16-mixed"):
            plan = self.plan("shardwright-cuda-plain", 2, "--precision", precision)
            for where in (("--loopback", "2"), ()):
                plain = self.losses(plan, *where, steps=4)
                code, out, err = self.run_emulated(plan, *where, "--steps", "4", "--graphs", "on", "--json")
                self.assertEqual(code, 0, err)
                self.assertEqual([step["loss"] for step in json.loads(out)["steps"]], plain)
                self.assertRegex(err, r"graphs: [1-9]\d* graphs of [1-9]\d* ops, 0 refused\n")
        code, out, err = self.run_emulated(plan, "--loopback", "2", "--graphs", "on", "--trace", "t.json", "--steps", "2")
        self.assertEqual(code, 0, err)
        self.assertIn("warning: a traced run times every op by itself: no graphs\n", err)
        code, out, err = self.run_emulated(plan, "--loopback", "2", "--graphs", "auto", "--steps", "4")
        self.assertRegex(err, r"a step takes .*, predicted; .* if launches took no time\n")

    def test_fused_kernels(self):
        plain = self.losses(self.plan("shardwright-cuda-plain", 2), "--loopback", "2")
        for name in ("shardwright-cuda-fused", "shardwright-cuda-chunked"):
            for one, other in zip(plain, self.losses(self.plan(name, 2), "--loopback", "2")):
                self.assertAlmostEqual(one, other, places=2)

    def test_forward_plans(self):
        forward = ("--mode", "forward")
        found = self.losses(self.plan("shardwright-cuda-plain", 2, *forward), "--loopback", "2")
        host = json.loads(self.run_program("run", self.plan("shardwright-host", 2, *forward), "--data", "random:8", "--steps",
                                           "2", "--json")[1])
        for one, other in zip(found, host["steps"]):
            self.assertAlmostEqual(one, other["loss"], places=2)

    def test_memory_limit(self):
        code, out, err = self.run_emulated(self.plan("shardwright-cuda-plain", 1), "--memory-limit", "1 KiB")
        self.assertEqual((code, out), (5, ""))
        self.assertRegex(err, r"error: rank 0: out of memory: the plan needs \d+ bytes of device memory, the limit is 1024\n")

    def test_doctor(self):
        checks = {check["name"]: check for check in json.loads(self.run_command("doctor", "--json")[1])["checks"]}
        self.assertTrue(checks["CUDA device"]["works"])
        self.assertRegex(checks["CUDA device"]["found"], r"^emulated GPU, [0-9.]+ GiB$")
        self.assertEqual((checks["NCCL"]["works"], checks["NCCL"]["found"]), (True, self.nccl))
        missing = {"SHARDWRIGHT_" + name: "/nonexistent" for name in ("CUBLASLT", "CUDNN", "CUPTI")}
        checks = {check["name"]: check for check in
                  json.loads(self.run_command("doctor", "--json", **missing)[1])["checks"]}
        for name in ("cuBLASLt", "cuDNN", "CUPTI"):
            self.assertEqual((checks[name]["works"], checks[name]["found"]),
                             (False, "/nonexistent: cannot open shared object file: No such file or directory"))

    def test_faults(self):
        plan = self.plan("shardwright-cuda-plain", 2)
        code, out, err = self.run_emulated(plan, SHARDWRIGHT_FAKE_NCCL="fail 1 1")
        self.assertEqual((code, out), (5, ""))
        self.assertRegex(err, r"error: rank 1, op \S+: (NCCL|ncclAllGather): unhandled system error \(2\): planted by a test")
        for rank in "01":  # what every process was in
            self.assertRegex(err, rf"rank {rank}: (under way: .+ behind it|nothing under way); issued \d+ ops")
        self.nccl = "/nonexistent"
        code, out, err = self.run_emulated(plan)
        self.assertEqual((code, out), (4, ""))
        self.assertIn("error: device cuda: /nonexistent: cannot open shared object file: No such file or directory; several "
                      "GPUs need NCCL: install libnccl2 or set SHARDWRIGHT_NCCL to its path\n", err)


if __name__ == "__main__":
    main()
