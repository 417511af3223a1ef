"""What can only be checked on a machine with an NVIDIA GPU, in four calls that are each worth a short visit.

    scripts/gpu_check.sh build          compiles what the calls need into build-gpu/ (nvcc, cmake and the packages of install-deps.sh;
                                        SHARDWRIGHT_HEADERS=FOLDER: headers and libraries that lie elsewhere)
    scripts/gpu_check.sh pack           copies it, with the libraries that a bare machine lacks, into build-carry/ (about 40 MB)
    scripts/gpu_check.sh A|B|C|D [...]  the calls, each within its time (360, 570, 570 and 400 seconds)
    scripts/gpu_check.sh PART [...]     one of: offload gelu fp8 long gpus hostid

    A  what works: doctor, NCCL on one rank, GPT-2 untraced and traced, every kernel and the loopback ranks against the host's
       arithmetic, a process per case (who fails runs again under compute-sanitizer), the speed of the kernels
    B  how fast: the largest model of a list that fits this card, untraced, in turns with PyTorch's FSDP2, eager and compiled; then
       calibrate, the prediction with that profile, a traced run and its comparison
    C  the rest: 2, 4 and 8 loopback ranks, native against fsdp2 and fsdp1, 8,192 tokens, CUDA graphs, the sanitizers
    D  real NCCL (2.30 or newer) with 2 to 4 processes on one GPU: dialects, windows, 3 ranks, a trace, the network path, HSDP, a killed rank

Flags: --out FOLDER (default gpu-results/; of pack: build-carry/), --emulated (GPUs of the test build in build/: tiny models, no figures), --resume (what
results.json has is not done again), --limit SECONDS (of every call).

FOLDER gets results.json (rewritten after every row, so a call that is cut off at any second leaves what it had), table.txt, log.txt with
the output of every command, and the profile and traces that were made. It needs Python, the driver, and the CUDA libraries that a PyTorch
installation brings. Exit code 0: every row is ok or skipped; 1: some row is not; 2: wrong usage; 4: this machine lacks something.
bench/log/h200.md says what each row means and what to do about it.
"""

import argparse
import concurrent.futures
import ctypes
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = {"A": 360, "B": 570, "C": 570, "D": 400}
PART_LIMIT = 570
# Cards by their names' words and the catalog's GPU; the first whose words are all there.
CARDS = (("H200", "h200-141"), ("H100", "h100-80"), ("A100 80GB", "a100-80"), ("A100", "a100-40"), ("B200", "b200-180"),
         ("emulated", "h200-141"))
# Parameters stay gathered within a micro-batch and gradients are stored once per step: on one GPU there is nothing to gain by less.
KEEPS = "--reshard never --sync last"
# What B trains, largest first: the first that fits the card, ours and PyTorch's.
SPEED_JOBS = (("llama-3.1-8b", f"--seq 2048 --global-batch 32 --micro-batch 4 --precision bf16 {KEEPS}"),
              ("llama-3.1-8b", f"--seq 2048 --global-batch 16 --micro-batch 2 --precision bf16 {KEEPS}"),
              ("llama-3.1-8b", "--seq 2048 --global-batch 16 --micro-batch 1 --precision bf16"),
              ("llama-3.2-3b", "--seq 2048 --global-batch 16 --micro-batch 4"),
              ("llama-3.2-3b", "--seq 2048 --global-batch 16 --micro-batch 2"),
              ("llama-3.2-3b", "--seq 2048 --global-batch 16 --micro-batch 4 --precision bf16"),
              ("qwen2.5-1.5b", f"--seq 2048 --global-batch 16 --micro-batch 4 {KEEPS}"),
              ("qwen2.5-0.5b", "--seq 2048 --global-batch 32 --micro-batch 2"))
LONG_JOBS = (("llama-3.2-3b", "--seq 8192 --global-batch 4 --micro-batch 1"),
             ("llama-3.2-3b", "--seq 8192 --global-batch 4 --micro-batch 1 --precision bf16"),
             ("qwen2.5-1.5b", "--seq 8192 --global-batch 8 --micro-batch 1"),
             ("qwen2.5-0.5b", "--seq 8192 --global-batch 4 --micro-batch 1"))
TINY_JOBS = ((str(ROOT / "scripts/tiny-gpt.json"), "--seq 16 --global-batch 8 --micro-batch 2"),)
OWN_KERNEL = re.compile(r"by our own kernel|^warning: no cu|by our own, slower", re.MULTILINE)


def write_whole(path, text):
    """Write, then rename: whoever reads finds the old text or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def copy_whole(source, target):
    new = target.with_name(target.name + ".new")
    shutil.copy(source, new)
    new.replace(target)


def end_with_parent():
    """In a child, before it becomes the program: whatever ends this script, nothing stays behind on the card."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


class Results:
    """The rows so far, on the screen and in files that are whole at any moment."""

    def __init__(self, folder, resumes):
        self.folder = folder
        self.rows, self.done, self.machine = [], [], {}
        folder.mkdir(parents=True, exist_ok=True)
        if resumes and (folder / "results.json").exists():
            old = json.loads((folder / "results.json").read_text())
            self.done, self.machine = old["done"], old["machine"]
            self.rows = [row for row in old["rows"] if row["step"] in self.done]
        else:
            (folder / "log.txt").unlink(missing_ok=True)
        self.step = None
        self.logging = threading.Lock()

    def begin(self, step):
        self.step = step
        self.rows = [row for row in self.rows if row["step"] != step]

    def end(self):
        self.done.append(self.step)
        self.write()

    def row(self, name, verdict, note="", **figures):
        self.rows.append({"step": self.step, "name": name, "verdict": verdict, "note": note, **figures})
        print(self.line(self.rows[-1]), flush=True)
        self.write()

    @staticmethod
    def line(row):
        return f"{row['step']:<14} {row['name']:<44} {row['verdict']:<10} {row['note'][:140]}".rstrip()

    def write(self):
        everything = {"schema": "shardwright-gpu-check", "schema_version": 1, "machine": self.machine, "done": self.done,
                      "rows": self.rows}
        write_whole(self.folder / "results.json", json.dumps(everything, indent=1) + "\n")
        lines = [f"{key}: {value}" for key, value in self.machine.items()] + [self.line(row) for row in self.rows]
        write_whole(self.folder / "table.txt", "\n".join(lines) + "\n")

    def log(self, words, output, code):
        with self.logging, open(self.folder / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"\n=== {' '.join(map(str, words))}\n{output}\n=== exit {code}\n")

    def failed(self):
        return any(row["verdict"] not in ("ok", "skipped") for row in self.rows)


class Done:
    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds
        self.text = out + err

    def verdict(self):
        return {0: "ok", 77: "skipped", None: "cut off"}.get(self.code, f"FAILED {self.code}")

    def last(self):
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else ""


class Check:
    def __init__(self, flags):
        self.flags = flags
        self.results = Results(flags.out, flags.resume)
        self.emulated = flags.emulated
        self.deadline = time.monotonic() + 10**6
        self.programs = self.find_programs()
        self.work = self.programs / "work"
        self.work.mkdir(exist_ok=True)
        self.environment = dict(os.environ)
        wheels = [folder for path in sys.path for folder in sorted(glob.glob(path + "/nvidia/*/lib"))]
        # cuBLASLt, cuDNN, NCCL and libnvrtc may lie in Python's wheels only.
        paths = [str(self.programs), str(self.programs / "lib"), *wheels, os.environ.get("LD_LIBRARY_PATH", "")]
        self.environment["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
        if self.emulated:
            self.environment["SHARDWRIGHT_NCCL"] = str(self.flags.build / "emulated/libnccl.so")
        self.gpu, self.slowest = "h200-141", []

    def find_programs(self):
        if not self.emulated:
            for name in ("build-gpu", "build-carry"):
                if (ROOT / name / "shardwright").exists():
                    return ROOT / name
            sys.exit(complain("neither build-gpu/ nor build-carry/ has the program: scripts/gpu_check.sh build"))
        build = self.flags.build
        if not (build / "emulated").exists():
            sys.exit(complain(f"--emulated needs a build with its tests: {build} has no emulated/"))
        folder = self.flags.out / "emulated"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("shardwright", "emulated/libshardwright_cuda.so"):
            copy_whole(build / name, folder / pathlib.Path(name).name)
        copy_whole(next(build.rglob("sw_cuda_device_test")), folder / "sw_cuda_gpu_test")
        return folder

    # Running

    def left(self):
        return self.deadline - time.monotonic()

    def run(self, *words, limit=None, cwd=ROOT, program=None, **variables):
        """A command within what is left of the call; `words` begin with flags of shardwright unless `program` is given."""
        words = [str(program or self.programs / "shardwright"), *map(str, words)]
        limit = min(self.left(), limit or 10**6)
        if limit < 2:
            return Done(None, "", "no time was left", 0)
        begin = time.monotonic()
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd=cwd,
                                   env={**self.environment, **variables}, start_new_session=True, preexec_fn=end_with_parent)
        try:
            out, err = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            code = None
        finally:  # a signal to this script
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        done = Done(code, out, err, time.monotonic() - begin)
        self.results.log(words, done.text, code)
        return done

    def row(self, name, done, note=None, **figures):
        self.results.row(name, done.verdict(), f"{done.seconds:.1f} s  {done.last() if note is None else note}", **figures)
        return done.code == 0

    def libraries(self, name, done):
        """A fallback to our own kernels is a failed row: it hides what a library did not do."""
        lines = [line for line in done.err.splitlines() if OWN_KERNEL.search(line)]
        if self.emulated or done.code != 0:
            return
        self.results.row(f"{name}: by libraries", "FAILED" if lines else "ok", "; ".join(lines))

    # Jobs

    def cluster(self, ranks=1):
        return f"{self.gpu} x{ranks}" + (", nvlink 450 GB/s" if ranks > 1 else "")

    def plan(self, name, model, flags, *more, ranks=1, dialect="native", kernels="shardwright-cuda-fused"):
        """The path of a plan file, and what `plan` said."""
        path = self.work / f"{name}.json"
        path.unlink(missing_ok=True)
        done = self.run("plan", "--model", model, "--cluster", self.cluster(ranks), "--kernel-set", kernels, "--dialect", dialect,
                        "--optimizer", "adamw:fused", *flags.split(), *more, "-o", path)
        return path, done

    def fitting(self, name, jobs):
        """The first job of the list that fits this card, ours and as PyTorch runs it."""
        for model, flags in TINY_JOBS if self.emulated else jobs:
            path, done = self.plan(name, model, flags)
            theirs = done
            if done.code == 0 and not self.emulated:
                _, theirs = self.plan(name + "-pytorch", model, flags, dialect="fsdp2", kernels="hf-eager")
            label = f"{pathlib.Path(model).stem} {flags.replace('--', '')}"
            if done.code == 0 and theirs.code == 0:
                self.results.row(f"{name}: job", "ok", label)
                return path, model, flags
            if done.code not in (0, 1) or theirs.code not in (0, 1):
                self.row(f"{name}: plan", done if done.code not in (0, 1) else theirs)
                return None, None, None
        self.results.row(f"{name}: job", "FAILED", "none of the list fits")
        return None, None, None

    def small(self, ranks):
        model, flags = TINY_JOBS[0] if self.emulated else ("gpt2", "--seq 1024 --global-batch 8")
        return self.plan(f"gpt2-{ranks}", model, re.sub(r" --micro-batch \d+", "", flags), "--micro-batch", 8 // ranks,
                         "--precision", "bf16-mixed", ranks=ranks)

    def train(self, name, plan, *flags, steps=8, ranks=1, **variables):
        """Untraced, as JSON; tokens/s or None."""
        steps = min(steps, 3) if self.emulated else steps
        done = self.run("run", plan, "--device", "cuda", "--loopback", ranks, "--steps", steps, "--json", "--data", "random:64", *flags,
                        **variables)
        report = json.loads(done.out) if done.code == 0 else {}
        rate = report.get("tokens_per_s")
        losses = [step["loss"] for step in report.get("steps", [])]
        note = f"{rate:.0f} tokens/s, loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses and rate else None
        self.row(name, done, note, tokens_per_s=rate, losses=losses)
        self.libraries(name, done)
        return report if done.code == 0 else None

    def trace(self, name, plan, ranks=1, steps=3):
        """Traced and compared with the prediction."""
        path = self.results.folder / f"{name.replace(' ', '-').replace(',', '')}.json.gz"
        done = self.run("run", plan, "--device", "cuda", "--loopback", ranks, "--steps", steps, "--data", "random:64", "--trace", path)
        if self.row(f"{name}, traced", done, ""):
            self.row(f"{name}, compared", self.run("compare", plan, path))

    # Call A

    def doctor(self):
        done = self.run("doctor", "--json")
        if not self.row("doctor", done, ""):
            return
        checks = {check["name"]: check for check in json.loads(done.out)["checks"]}
        self.results.machine["gpu"] = checks["CUDA device"]["found"]
        for name in ("CUDA device", "cuBLASLt", "cuDNN", "NCCL", "CUPTI"):
            check = checks[name]
            missing = "skipped" if self.emulated else "FAILED"
            self.results.row(name, "ok" if check["works"] else missing, check["found"])
        smi = shutil.which("nvidia-smi")
        if smi:
            query = "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit"
            self.results.machine["nvidia-smi"] = self.run(query, "--format=csv,noheader", program=smi).out.strip()

    def nccl(self):
        self.case("CudaDevice.OneRankWithNcclTrainsAsLoopbackDoes", "NCCL's own library, one rank")

    def gpt2(self):
        plan, done = self.small(1)
        if self.row("GPT-2, plan", done, ""):
            self.train("GPT-2, 3 steps", plan, steps=3)
            self.trace("GPT-2", plan)

    def case(self, name, label=None, prefix=(), variables=None):
        test = self.programs / "sw_cuda_gpu_test"
        done = self.run(*prefix[1:], *([test] if prefix else []), f"--test-case={name.replace(',', '?')}", limit=90,
                        cwd=ROOT / "tests", program=prefix[0] if prefix else test, **(variables or {}))
        if label or done.code not in (0, 77):
            errors = [line for line in done.text.splitlines() if "ERROR" in line or "========= " in line]
            self.row(label or name, done, errors[0] if errors else None)
        return done

    def cases(self):
        done = self.run("--list-test-cases", "--no-skip", program=self.programs / "sw_cuda_gpu_test", cwd=ROOT / "tests")
        return [line for line in done.out.splitlines() if re.match(r"\w+\.\w+", line)]

    def kernel_tests(self):
        """A process each: a sticky error of one says nothing about the next. Several at a time, since they compute little and start long."""
        names = self.cases()
        names = names[:3] if self.emulated else names
        kept_for_others = 10  # and those that failed run again
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() // 2))) as pool:
            found = list(pool.map(lambda name: self.case(name) if self.left() > kept_for_others else None, names))
        failed = [name for name, done in zip(names, found) if done and done.code not in (0, 77)]
        not_run = found.count(None)
        skipped = sum(1 for done in found if done and done.code == 77)
        ran = len(names) - not_run - skipped
        verdict = "FAILED" if failed or not names else ("cut off" if not_run else ("skipped" if ran == 0 else "ok"))
        self.results.row("kernels and ranks", verdict, f"{ran - len(failed)} of {len(names)} cases hold; {not_run} not run",
                         failed=failed)
        sanitizer = shutil.which("compute-sanitizer")
        for name in failed if sanitizer else []:
            self.case(name, f"{name}, memcheck", (sanitizer, "--error-exitcode", "1"))

    def kernel_speed(self):
        bench = self.programs / "cuda_kernels_bench"
        if not bench.exists():
            self.results.row("kernel speed", "skipped", "no bench beside the program")
            return
        done = self.run(program=bench)
        self.row("kernel speed", done, "")
        for line in done.out.splitlines():
            found = re.match(r"(.{36}) (\w+) +([\d.]+) us +([\d.]+) %", line)
            if found:
                kernel, which, time_us, percent = found.groups()
                self.results.row(f"{kernel.strip()}, {which}", "ok", f"{time_us} us, {percent} % of the roofline",
                                 us=float(time_us), roofline=float(percent) / 100)

    # Call B

    def pytorch(self, mode, plan):
        if self.emulated:
            self.results.row(f"PyTorch {mode}", "skipped", "no GPU")
            return None
        done = self.run(ROOT / "bench/pytorch_fsdp2.py", plan, "--steps", "5", "--mode", mode, program=sys.executable)
        found = re.search(r"([\d.]+) tokens/s", done.out)
        rate = float(found.group(1)) if found else None
        self.row(f"PyTorch {mode}", done, tokens_per_s=rate)
        return rate

    def speed(self, name="speed", jobs=SPEED_JOBS):
        plan, model, flags = self.fitting(name, jobs)
        if plan is None:
            return
        ours, theirs = [], {}
        for turn, mode in enumerate(("eager", "compiled", None)):
            report = self.train(f"{name}, turn {turn + 1}", plan, steps=6)
            ours += [report["tokens_per_s"]] if report else []
            if mode:
                theirs[mode] = self.pytorch(mode, plan)
        for mode, rate in theirs.items():
            if ours and rate:
                self.results.row(f"{name}: ours to PyTorch {mode}", "ok", f"{statistics.median(ours) / rate:.3f}",
                                 ratio=statistics.median(ours) / rate)
        # Later steps need it, also in a call that goes on behind this one.
        rate = statistics.median(ours) if ours else None
        self.results.machine["speed"] = {"plan": str(plan), "model": model, "flags": flags, "tokens_per_s": rate}
        self.predicted(f"{name}: shipped profile", plan, rate)

    def predicted(self, name, plan, rate):
        done = self.run("simulate", plan, "--json")
        if done.code not in (0, 1) or rate is None:
            self.row(f"{name}: predicted", done)
            return
        report = json.loads(done.out)
        mfu = report["mfu"] * rate / report["tokens_per_s_per_gpu"]
        self.results.row(f"{name}: measured to predicted", "ok", f"{rate / report['tokens_per_s_per_gpu']:.3f}; MFU {100 * mfu:.1f} %",
                         ratio=rate / report["tokens_per_s_per_gpu"], mfu=mfu)

    def calibrate(self):
        profile = self.results.folder / "this-gpu.json"
        done = self.run("calibrate", "--device", "cuda", "--cluster", self.cluster(), "--name", "this-gpu", "-o", profile)
        speed = self.results.machine.get("speed")
        if self.row("calibrate", done, "") and speed:
            plan, done = self.plan("speed-calibrated", speed["model"], speed["flags"], "--profile", profile)
            self.row("plan with that profile", done, "")
            self.predicted("calibrated", plan, speed["tokens_per_s"])

    def speed_trace(self):
        if "speed" in self.results.machine:
            self.trace("speed", self.results.machine["speed"]["plan"])

    def products(self):
        """The first run times cuBLASLt's proposals, the second one uses what was found."""
        speed = self.results.machine.get("speed")
        if not speed:
            return
        file = str(self.results.folder / "products.txt")
        for turn in ("timed", "chosen"):
            report = self.train(f"products {turn}", speed["plan"], steps=6, SHARDWRIGHT_PRODUCTS=file)
        if report and speed["tokens_per_s"]:
            ratio = report["tokens_per_s"] / speed["tokens_per_s"]
            self.results.row("chosen products to the library's first", "ok", f"{ratio:.3f}", ratio=ratio)

    # Call C

    def loopback(self):
        for ranks in (2, 4, 8):
            plan, done = self.small(ranks)
            if self.row(f"{ranks} ranks, plan", done, ""):
                self.train(f"{ranks} ranks", plan, steps=4, ranks=ranks)

    def schedules(self):
        rates = {}
        model, flags = TINY_JOBS[0] if self.emulated else ("qwen2.5-0.5b", "--seq 2048 --global-batch 8 --micro-batch 2")
        for dialect in ("native", "fsdp2", "fsdp1"):
            plan, done = self.plan(f"schedule-{dialect}", model, flags, "--precision", "bf16-mixed", ranks=4, dialect=dialect)
            if self.row(f"4 ranks, {dialect}, plan", done, ""):
                report = self.train(f"4 ranks, {dialect}", plan, steps=6, ranks=4)
                rates[dialect] = report["tokens_per_s"] if report else None
        for dialect in ("fsdp2", "fsdp1"):
            if rates.get("native") and rates.get(dialect):
                self.results.row(f"native to {dialect}", "ok", f"{rates['native'] / rates[dialect]:.3f}")

    def long(self):
        self.speed("8,192 tokens", LONG_JOBS)

    def graphs(self):
        for ranks in (1, 4):
            plan, done = self.small(ranks)
            if not self.row(f"graphs, ranks {ranks}, plan", done, ""):
                continue
            found = [self.train(f"graphs {mode}, ranks {ranks}", plan, "--graphs", mode, steps=12, ranks=ranks)
                     for mode in ("off", "on")]
            if all(found):
                same = [[step["loss"] for step in report["steps"]] for report in found]
                self.results.row(f"graphs, ranks {ranks}, losses", "ok" if same[0] == same[1] else "FAILED", "the same bits"
                                 if same[0] == same[1] else "they differ")
                self.results.row(f"graphs on to off, ranks {ranks}", "ok",
                                 f"{found[1]['tokens_per_s'] / found[0]['tokens_per_s']:.3f}")

    def sanitizers(self):
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None or self.emulated:
            self.results.row("compute-sanitizer", "skipped", "not installed, or nothing to look at")
            return
        for tool in ("memcheck", "racecheck"):
            for name in [case for case in self.cases() if case.startswith("HostKernels.")]:
                if self.left() > 20:
                    # cuDNN's kernels wait for each other in ways that racecheck does not see: it looks at ours alone.
                    without = {"SHARDWRIGHT_CUDNN": "/none"} if tool == "racecheck" else {}
                    self.case(name, f"{tool} {name}", (sanitizer, "--tool", tool, "--error-exitcode", "1"), without)

    # For who has the machine longer

    def offload(self):
        free = int(re.search(r"MemAvailable: +(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1)) // 2**20
        if free < 104 or self.emulated:
            self.results.row("13B, moments on the host", "skipped", f"needs 104 GiB of free host memory; there are {free}")
            return
        plan, done = self.plan("offload", "llama-2-13b", "--seq 2048 --global-batch 8 --micro-batch 8 --recompute full --clip off",
                               "--offload", "moments")
        if self.row("13B, moments on the host, plan", done):
            self.train("13B, moments on the host", plan, steps=3)

    def gelu(self):
        """A model with GELU's tanh form, by three kernel sets."""
        for kernels in ("plain", "gelu", "fused"):
            model, flags = TINY_JOBS[0] if self.emulated else ("gpt2-xl", "--seq 1024 --global-batch 16 --micro-batch 8")
            plan, done = self.plan(f"xl-{kernels}", model, flags, kernels=f"shardwright-cuda-{kernels}")
            if self.row(f"GPT-2 XL, cuda-{kernels}, plan", done, ""):
                self.train(f"GPT-2 XL, cuda-{kernels}", plan)

    def fp8(self):
        """One model in bf16, and with products in fp8 by both recipes."""
        for name, precision in (("bf16", "bf16-mixed"), ("fp8", "fp8"), ("fp8-rowwise", "bf16-mixed+fp8-rowwise")):
            model, flags = TINY_JOBS[0] if self.emulated else ("qwen2.5-1.5b", f"--seq 2048 --global-batch 16 --micro-batch 4 {KEEPS}")
            plan, done = self.plan(f"precision-{name}", model, flags, "--precision", precision)
            if self.row(f"{pathlib.Path(model).stem} in {name}, plan", done, ""):
                self.train(f"{pathlib.Path(model).stem} in {name}", plan)

    def gpus(self):
        listed = self.run("-L", program=shutil.which("nvidia-smi") or "/bin/false").out
        count = listed.count("GPU ")
        if count < 2:
            self.results.row("training with NCCL", "skipped", f"{count} GPU")
        for ranks in (2, 4, 8):
            if ranks > count:
                break
            plan, done = self.small(ranks)
            for windows in ("1", "0"):
                done = self.run("run", plan, "--device", "cuda", "--steps", "10", "--data", "random:64", NCCL_WIN_ENABLE=windows)
                self.row(f"GPT-2 on {ranks} GPUs, windows {windows}", done)

    # Call D

    def together(self, name, plan, ranks, *words, hosts=0, kill=False, **variables):
        """A process per rank, all with GPU 0. NCCL takes them for ranks of `hosts` machines: between these all goes over the loopback
        interface. With `kill` the last one is killed in the middle of a step, and the others have to end by themselves."""
        script = """ranks=$1 hosts=$2 kill=$3; shift 3; pids=
            for rank in $(seq 0 $((ranks - 1))); do
              [ $hosts = 0 ] || export NCCL_HOSTID=host$((rank * hosts / ranks))
              RANK=$rank "$0" run "$@" & pids="$pids $!"; last=$!
            done
            [ $kill = 0 ] || { sleep $kill; kill -KILL $last; }
            code=0; for pid in $pids; do wait $pid || { [ $pid = $last ] && [ $kill != 0 ] || code=$?; }; done
            exit $code"""
        network = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if hosts else {}
        done = self.run("-c", script, self.programs / "shardwright", ranks, hosts, 6 if kill else 0, plan, "--device", "cuda", "--data",
                        "random:64", *words, program="/bin/sh", limit=150, WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=str(29531 + ranks), NCCL_MULTI_RANK_GPU_ENABLE="1", **network, **variables)
        if kill:
            ended = done.code not in (0, None) and "rank" in done.err
            self.results.row(name, "ok" if ended else "FAILED", f"{done.seconds:.1f} s  {done.last()}")
        else:
            self.row(name, done)
        return done

    def many(self, ranks, dialect="native", *more):
        model, flags = TINY_JOBS[0] if self.emulated else ("gpt2", "--seq 1024 --global-batch 24")
        flags = re.sub(r"--global-batch \d+", "--global-batch 24", re.sub(r" --micro-batch \d+", "", flags))
        return self.plan(f"many-{ranks}-{dialect}", model, flags, "--micro-batch", 24 // ranks // 2, "--precision", "bf16-mixed", *more,
                         ranks=ranks, dialect=dialect)

    def shared(self):
        """Ranks that share GPU 0, which NCCL allows from 2.30 on: copies between them stay on the card."""
        steps = ("--steps", "2" if self.emulated else "10")
        for dialect in ("native", "fsdp2", "fsdp1", "ddp", "zero3"):
            plan, done = self.many(2, dialect)
            if self.row(f"2 ranks, {dialect}, plan", done, ""):
                self.together(f"2 ranks on one GPU, {dialect}", plan, 2, *steps)
        for ranks, windows in ((4, "1"), (4, "0"), (3, "1")):
            plan, done = self.many(ranks)
            self.together(f"{ranks} ranks on one GPU, windows {windows}", plan, ranks, *steps, NCCL_WIN_ENABLE=windows)
        plan, done = self.many(2)
        path = self.results.folder / "2-ranks.json.gz"
        if self.together("2 ranks on one GPU, traced", plan, 2, "--steps", "3", "--trace", path).code == 0:
            self.row("2 ranks on one GPU, compared", self.run("compare", plan, path))

    def hostid(self):
        """Each process says that it is a machine of its own; then two machines of two ranks, in copies of shards."""
        steps = ("--steps", "2")
        plan, done = self.small(2)
        if self.row("two NCCL ranks on one GPU, plan", done, ""):
            self.together("two NCCL ranks on one GPU", plan, 2, *steps, hosts=2, NCCL_WIN_ENABLE="0")
        plan, done = self.many(4, "fsdp2", "--shard", "2")
        if self.row("two machines of two ranks, plan", done, ""):
            self.together("two machines of two ranks", plan, 4, *steps, hosts=2, NCCL_WIN_ENABLE="0")

    def drills(self):
        plan, done = self.many(2)
        self.together("a rank is killed", plan, 2, "--steps", "1000", kill=True)

    STEPS = {
        # Each with the seconds that are kept for it when those before it are slow.
        "A": (("doctor", 10), ("nccl", 20), ("gpt2", 40), ("kernel_tests", 90), ("kernel_speed", 45)),
        "B": (("speed", 300), ("calibrate", 120), ("speed_trace", 60), ("products", 60)),
        "C": (("loopback", 60), ("schedules", 90), ("graphs", 60), ("long", 150), ("sanitizers", 120)),
        "D": (("shared", 200), ("hostid", 60), ("drills", 60)),
    }

    def call(self, name):
        steps = self.STEPS.get(name, ((name, 0),))
        end = time.monotonic() + (self.flags.limit or LIMITS.get(name, PART_LIMIT))
        for i, (step, _) in enumerate(steps):
            label = f"{name}.{step}" if name in self.STEPS else step
            if label in self.results.done:
                continue
            self.results.begin(label)
            self.deadline = end - sum(kept for _, kept in steps[i + 1:])
            try:
                getattr(self, step)()
            except Exception as error:  # one step's surprise takes no other with it
                self.results.row(step, "FAILED", f"{type(error).__name__}: {error}")
            self.results.end()

    def find_card(self):
        """Which GPU of the catalog this card is."""
        done = self.run("doctor", "--json")
        checks = {check["name"]: check for check in json.loads(done.out)["checks"]} if done.code == 0 else {}
        card = checks.get("CUDA device", {"works": False, "found": done.last()})
        if not card["works"]:
            sys.exit(complain(f"no GPU here: {card['found']}; only build and pack can be done"))
        found = [gpu for words, gpu in CARDS if all(word in card["found"] for word in words.split())]
        if not found:
            known = ", ".join(words for words, _ in CARDS)
            sys.exit(complain(f"this card is {card['found']}; known are {known}: add it to CARDS"))
        self.gpu = found[0]
        self.results.machine.update(gpu=card["found"], plans_for=self.gpu, date=time.strftime("%Y-%m-%d"))


def complain(text):
    print(f"gpu_check: {text}", file=sys.stderr)
    return 4


def build():
    for tool in ("nvcc", "cmake"):
        if shutil.which(tool) is None:
            return complain(f"no {tool} on this machine")
    tree = ROOT / "build-gpu"
    # Products on the host are few and small here.
    flags = ["-S", ROOT, "-B", tree, "-DCMAKE_BUILD_TYPE=Release", "-DSHARDWRIGHT_CUDA=ON", "-DSHARDWRIGHT_BENCH=OFF",
             "-DSHARDWRIGHT_OPENBLAS=OFF"]
    flags += ["-G", "Ninja"] if shutil.which("ninja") else []
    headers = os.environ.get("SHARDWRIGHT_HEADERS")
    flags += [f"-DCMAKE_PREFIX_PATH={headers}"] if headers else []
    targets = ["shardwright_cuda", "shardwright", "sw_cuda_gpu_test", "cuda_kernels_bench"]
    for words in (["cmake", *flags], ["cmake", "--build", tree, "-j", str(os.cpu_count()), "--target", *targets]):
        if subprocess.run(list(map(str, words)), check=False).returncode != 0:
            return 1
    return 0


def pack(tree, carry):
    names = ("shardwright", "libshardwright_cuda.so", "sw_cuda_gpu_test", "cuda_kernels_bench")
    found = [next((path for path in tree.rglob(name) if path.is_file()), None) for name in names]
    if None in found:
        return complain(f"pack: no {names[found.index(None)]} in {tree}: scripts/gpu_check.sh build")
    shutil.rmtree(carry, ignore_errors=True)
    (carry / "lib").mkdir(parents=True)
    for path in found:
        shutil.copy(path, carry)
        subprocess.run(["strip", carry / path.name], check=True)
    listed = subprocess.run(["ldd", *(carry / name for name in names)], capture_output=True, text=True, check=True).stdout
    # Libraries of the compiler and of the C library are everywhere, in a version of their own.
    everywhere = r"/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so"
    for path in sorted({found for found in re.findall(r"=> (/\S+)", listed) if not re.search(everywhere, found)}):
        shutil.copy(path, carry / "lib")
    size = sum(path.stat().st_size for path in carry.rglob("*") if path.is_file())
    print(f"{carry}: {size / 1e6:.0f} MB")
    return 0


def main():
    parts = ("A", "B", "C", "D", "offload", "gelu", "fp8", "long", "gpus", "hostid", "build", "pack")
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--build", type=pathlib.Path, help="with --emulated or pack: another build folder")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--limit", type=int)
    flags = parser.parse_args()
    for name, function in (("build", build), ("pack", lambda: pack(flags.build or ROOT / "build-gpu", flags.out or ROOT / "build-carry"))):
        if name in flags.parts:
            code = function()
            if code != 0:
                return code
    flags.out = (flags.out or ROOT / "gpu-results").resolve()
    flags.build = (flags.build or ROOT / "build").resolve()
    calls = [part for part in flags.parts if part not in ("build", "pack")]
    if not calls:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    check = Check(flags)
    check.find_card()
    for call in calls:
        check.call(call)
    return 1 if check.results.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
