"""Ranks as processes under Open MPI's mpirun: the bits of ranks that are threads, one trace, and faults that end the run."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, checkpoint_files, main
from training_test_case import Patience

TINY = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
# Runs on what a remote shell would: another network and host name on this machine. `mpirun` calls it as AGENT HOST COMMAND.
HOSTS = f"swtest{os.getpid()}"
AGENT = f"""#!/bin/sh
host=$1; shift
exec ip netns exec {HOSTS}-$host unshare --uts sh -c "hostname {HOSTS}-$host; $*"
"""
# No queue of shared memory between processes that are killed, and time to share a core.
FLAGS = ("--oversubscribe", "--allow-run-as-root", "--mca", "mpi_yield_when_idle", "1")


def children(pid):
    """Processes that were started by this one."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Mpi(ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        (self.folder / "config.json").write_text(json.dumps(TINY))
        self.environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", TMPDIR=str(self.folder))

    def plan(self, ranks, *flags):
        self.succeed("plan", "--model", "./config.json", "--cluster", f"h100-80 x{ranks}, nvlink 450 GB/s",
                     "--kernel-set", "shardwright-host", "-o", "p.json", "--precision", "fp32", "--seq", "16",
                     "--micro-batch", "2", "--global-batch", str(2 * ranks), *flags)
        return "p.json"

    def command(self, ranks, *flags):
        return ["mpirun", *FLAGS, "-np", str(ranks), shardwright_test_case.PROGRAM, "run", *flags]

    def mpirun(self, ranks, *flags):
        done = subprocess.run(self.command(ranks, *flags), capture_output=True, text=True, cwd=self.folder,
                              env=self.environment, timeout=300, check=False)
        return done.returncode, done.stdout, done.stderr

    def losses_of_threads(self, plan, *flags):
        code, out, err = self.run_program("run", plan, "--json", *flags)
        self.assertEqual(code, 0, err)
        return [step["loss"] for step in json.loads(out)["steps"]]

    def test_processes_compute_the_bits_of_threads(self):
        # A loss depends on every weight, so equal losses of later steps mean equal updates before them.
        for ranks, flags in ((2, ("--dialect", "native")), (4, ("--dialect", "fsdp2")), (4, ("--dialect", "zero1")),
                             (3, ("--dialect", "ddp", "--clip", "off"))):
            with self.subTest(ranks=ranks, flags=flags):
                plan = self.plan(ranks, *flags)
                steps = ("--steps", "5", "--data", "random:100")
                code, out, err = self.mpirun(ranks, plan, *steps, "--json", "--trace", "t.json")
                self.assertEqual(code, 0, err)
                self.assertEqual([s["loss"] for s in json.loads(out)["steps"]], self.losses_of_threads(plan, *steps))
                found = json.loads(self.run_program("compare", plan, "t.json", "--json")[1])
                self.assertEqual((found["matched"], found["findings"]), (found["spans"], []))
                trace = json.loads((self.folder / "t.json").read_text())
                pids = {event["pid"] for event in trace["traceEvents"] if event.get("ph") == "X"}
                self.assertGreaterEqual(len(pids), ranks)

    def start(self, ranks, *flags):
        """A long run whose first step is over, and its ranks' process ids."""
        plan = self.plan(ranks)
        run = subprocess.Popen(self.command(ranks, plan, "--steps", "100000000", "--data", "random:100", *flags),
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.folder,
                               env=self.environment)
        self.addCleanup(run.stderr.close)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        line = run.stderr.readline()
        while line and not line.startswith("step 2/"):
            line = run.stderr.readline()
        self.assertTrue(line, "the run ended early")
        ranks_found = [pid for pid in children(run.pid)
                       if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == "shardwright"]
        self.assertEqual(len(ranks_found), ranks)
        return run, ranks_found

    def wait_for_end(self, run, pids):
        """What the run says behind its steps."""
        _, err = run.communicate(timeout=300)
        deadline = time.monotonic() + 120
        while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual([pid for pid in pids if is_alive(pid)], [])
        self.assertNotEqual(run.returncode, 0)
        return "".join(line for line in err.splitlines(True) if not line.startswith("step "))

    def test_a_killed_rank_ends_the_run(self):
        run, pids = self.start(4)
        os.kill(pids[2], signal.SIGKILL)
        self.assertIn("signal 9", self.wait_for_end(run, pids))

    def test_a_rank_that_stands_still_is_named(self):
        patience, cases, too_slow = Patience(2), [(2, 1), (4, 2), (4, 0)], 0
        begin = time.monotonic()
        code, _, err = self.mpirun(4, self.plan(4), "--steps", "2", "--data", "random:100")
        self.assertEqual(code, 0, err)
        patience.learn((time.monotonic() - begin) / 10)  # as long as a whole run
        while cases:
            ranks, victim = cases.pop()
            waited = round(patience.seconds) * 1000
            run, pids = self.start(ranks, *patience.flag, "--checkpoint", f"c{len(cases)}{too_slow}", "--every", "1")
            os.kill(pids[victim], signal.SIGSTOP)
            try:
                deadline = time.monotonic() + 120
                while all(is_alive(pid) for pid in pids if pid != pids[victim]) and time.monotonic() < deadline:
                    time.sleep(0.05)
            finally:
                if is_alive(pids[victim]):
                    os.kill(pids[victim], signal.SIGCONT)
            said = self.wait_for_end(run, pids)
            if "twice the time-out" in said and too_slow < 2:  # the machine is so full that ranks that are well do not answer in time
                too_slow += 1
                patience.learn(patience.seconds / 3)
                cases.append((ranks, victim))
                continue
            self.assertRegex(said, rf"error: rank \d, .+: waited {waited} ms for rank {victim}\n")

    def test_ranks_that_were_given_different_things_do_not_start(self):
        plan = self.plan(3)
        command = ["mpirun", *FLAGS]
        for rank, flags in enumerate(((), ("--threads", "1"), ("--seed", "7"))):
            command += [*((":",) if rank else ()), "-np", "1", shardwright_test_case.PROGRAM, "run", plan, "--data", "random:9", *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, env=self.environment, timeout=300, check=False)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("error: rank 2: --seed 7, rank 0 has none; give all ranks the same\n", done.stderr)
        self.assertNotIn("step 1/", done.stderr)

    def test_checkpoints_and_test_data(self):
        plan = self.plan(2)
        flags = (plan, "--data", "random:8", "--test-data", "random:5", "--json", "--epochs")
        code, out, err = self.run_program("run", *flags, "3", "--checkpoint", "threads")
        self.assertEqual(code, 0, err)
        whole = json.loads(out)["epochs"]
        for epochs, more in ((2, ()), (3, ("--resume",))):
            code, out, err = self.mpirun(2, *flags, str(epochs), "--checkpoint", "c", "--every", "1", *more)
            self.assertEqual(code, 0, err)
        self.assertEqual(json.loads(out)["epochs"], whole[2:])
        step = "step-00000006"
        files = checkpoint_files(self.folder / "c" / step)
        self.assertEqual(sorted(files), ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"])
        self.assertEqual(files, checkpoint_files(self.folder / "threads" / step))

    def test_refuses(self):
        plan = self.plan(2)
        code, _, err = self.mpirun(3, plan, "--steps", "1")
        self.assertEqual(code, 2)
        self.assertIn("error: the plan has 2 ranks, but mpirun started 3 processes\n", err)

    def test_a_program_without_the_module_says_so(self):
        alone = self.folder / "alone"
        alone.mkdir()
        shutil.copy(shardwright_test_case.PROGRAM, alone / "shardwright")
        plan = self.plan(2)
        done = subprocess.run([alone / "shardwright", "run", plan], capture_output=True, text=True, cwd=self.folder,
                              env=dict(self.environment, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0"), timeout=300, check=False)
        self.assertEqual(done.returncode, 4)
        self.assertRegex(done.stderr, r"^error: started by mpirun, but MPI cannot be used: .*shardwright_mpi.so: ")
        done = subprocess.run([alone / "shardwright", "run", plan, "--steps", "1"], capture_output=True, text=True,
                              cwd=self.folder, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def make_networks(self):
        """Two hosts, but for their processors: networks of their own, joined by a cable. None, or why there are none."""
        if shutil.which("ip") is None or shutil.which("unshare") is None:
            return "ip and unshare are not installed"
        commands = [["netns", "add", f"{HOSTS}-10.77.0.1"], ["netns", "add", f"{HOSTS}-10.77.0.2"],
                    ["-n", f"{HOSTS}-10.77.0.1", "link", "add", "swa", "type", "veth", "peer", "name", "swb", "netns",
                     f"{HOSTS}-10.77.0.2"]]
        for end, address in (("swa", "10.77.0.1"), ("swb", "10.77.0.2")):
            space = f"{HOSTS}-{address}"
            commands += [["-n", space, "addr", "add", f"{address}/24", "dev", end],
                         ["-n", space, "link", "set", end, "up"], ["-n", space, "link", "set", "lo", "up"]]
        for address in ("10.77.0.1", "10.77.0.2"):
            self.addCleanup(subprocess.run, ["ip", "netns", "del", f"{HOSTS}-{address}"], stderr=subprocess.DEVNULL,
                            check=False)
        for command in commands:
            done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"ip {' '.join(command)}: {done.stderr.strip()}"
        return None

    def test_two_hosts(self):
        problem = self.make_networks()
        if problem is not None:
            print(f"no networks of our own, not tested: {problem}", file=sys.stderr)
            return
        agent = self.folder / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        plan = self.plan(2)
        steps = ("--steps", "3", "--data", "random:100")
        done = subprocess.run(
            [str(agent), "10.77.0.1", "mpirun", *FLAGS, "--mca", "btl", "self,tcp", "--mca", "plm_rsh_agent", str(agent),
             "-H", "10.77.0.1:1,10.77.0.2:1", "-np", "2", shardwright_test_case.PROGRAM, "run", plan, *steps, "--json"],
            capture_output=True, text=True, cwd=self.folder, env=self.environment, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([s["loss"] for s in json.loads(done.stdout)["steps"]], self.losses_of_threads(plan, *steps))


if __name__ == "__main__":
    if shutil.which("mpirun") is None or not pathlib.Path(sys.argv[1]).with_name("shardwright_mpi.so").exists():
        print("skipped: no mpirun, or a build without MPI", file=sys.stderr)
        sys.exit(77)
    main()
