"""The Python module answers as the program does: the same JSON, and the same words where something is wrong."""

import collections
import dataclasses
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

PROGRAM = os.path.abspath(sys.argv.pop(1))
FOLDER = sys.argv.pop(1)
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, FOLDER)

import shardwright
from shardwright import torchtitan

JOB = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 4, "seq": 256}
FLAGS = ("--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "4", "--seq", "256")


class Module(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def program(self, *arguments, stdin=None):
        return subprocess.run([PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False)

    def printed(self, *arguments, stdin=None):
        done = self.program(*arguments, "--json", stdin=stdin)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def test_plan_simulate_emit(self):
        planned = shardwright.plan(**JOB, recompute="full")
        self.assertEqual(planned.printed, self.printed("plan", *FLAGS, "--recompute", "full"))
        file = json.dumps(planned["plan_file"])
        self.assertEqual(shardwright.simulate(planned).printed, self.printed("simulate", "-", stdin=file))
        self.assertEqual(shardwright.simulate(planned["plan_file"], contention="off", exact=True, slow_rank=None).printed,
                         self.printed("simulate", "-", "--contention", "off", "--exact", stdin=file))
        emitted = shardwright.emit(planned, to="accelerate")
        self.assertEqual(emitted, self.printed("emit", "-", "--to", "accelerate", stdin=file))
        self.assertIn("fsdp_version", emitted["files"][0]["text"])

    def test_files(self):
        plan = self.folder / "plan.json"
        self.assertEqual(shardwright.plan(**JOB, output=plan)["file"], str(plan))
        self.assertEqual(shardwright.simulate(plan).printed, self.printed("simulate", plan))
        self.assertEqual(shardwright.emit(str(plan), to="fsdp2", output=self.folder / "run")["is_exact"], True)
        self.assertTrue((self.folder / "run" / "shardwright_fsdp2.py").is_file())

    def test_a_run_of_two_ranks(self):
        """Ranks are processes: copies of the program, not of the script that asks for them."""
        plan = self.folder / "plan.json"
        shardwright.plan(model=ROOT / "scripts" / "tiny-gpt.json", cluster="host", gpus=2, seq=32, precision="fp32", output=plan)
        script = (f"import shardwright; print('once'); done = shardwright.commands.run({str(plan)!r}, steps=2, "
                  f"data={str(ROOT / 'README.md')!r}); print(len(done['steps']))")
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": FOLDER}, capture_output=True, text=True,
                              check=False)
        self.assertEqual((done.returncode, done.stdout), (0, "once\n2\n"), done.stderr)
        self.assertIn("step 2/2", done.stderr)
        with self.assertRaisesRegex(shardwright.InputError, r"\Ano-such.json: got no such file, expected a file\Z"):
            shardwright.commands.run("no-such.json", steps=2)

    def test_interrupts(self):
        """Ctrl-C in the middle of anything: Python's exception within a second of the processor, whatever the command does then."""
        config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
                  "num_hidden_layers": 4_000}
        (self.folder / "config.json").write_text(json.dumps(config))
        job = {"model": str(self.folder / "config.json"), "cluster": "dgx-a100", "gpus": 4, "seq": 128}
        shardwright.plan(**job, output=self.folder / "layers.json")
        (self.folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
        many = shardwright.plan(**job)["plan_file"]
        many["plan"]["accumulation"], many["job"]["global_batch"] = 16_000, 4 * 16_000
        (self.folder / "steps.json").write_text(json.dumps(many))
        (self.folder / "config.json").write_text(json.dumps(config))
        calls = [("simulate('steps.json', exact=True)", (0.2, 1, 2, 4)), ("simulate('layers.json')", (0.2, 1, 2)),
                 (f"plan(**{ {**job, 'model': 'config.json'} !r}, recompute='full')", (0.3, 1)),
                 ("emit('layers.json', to='fsdp2')", (0.3, 1)), ("commands.report('layers.json', output='r.html')", (0.5, 2)),
                 ("commands.diff('layers.json', 'layers.json')", (0.3, 1)), ("commands.inspect('layers.json')", (0.3,)),
                 (f"plan(**{ {**JOB, 'global_batch': 64} !r})", (0.3, 1))]
        for call, moments in calls:
            for moment in moments:
                with self.subTest(call=call, moment=moment):
                    self.interrupt(call, moment)

    def interrupt(self, call, moment):
        """Sends the signal when the call has used `moment` seconds of the processor."""
        script = ("import os, shardwright\nprint(sum(os.times()[:2]), flush=True)\n"
                  f"try:\n    shardwright.{call}\nexcept KeyboardInterrupt:\n    print('interrupted')\nelse:\n    print('over')")
        with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": FOLDER}, stdout=subprocess.PIPE, text=True,
                              cwd=self.folder) as process:
            begin = float(process.stdout.readline())

            def used():
                try:
                    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
                except FileNotFoundError:  # it is over
                    return moment
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") - begin
            # Not reaped here: wait4 below asks what it used.
            while used() < moment and not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                time.sleep(0.01)
            at = used()
            os.kill(process.pid, signal.SIGINT)  # send_signal would reap it
            said = process.stdout.read()
            _, _, usage = os.wait4(process.pid, 0)
            process.returncode = 0
        seconds = usage.ru_utime + usage.ru_stime - begin - at
        print(f"{call[:50]} at {moment}: {said.strip()}, {seconds:.2f} s later", file=sys.stderr)
        self.assertIn(said, ("interrupted\n", "over\n"))
        self.assertLess(seconds, 2)  # 1 s, and a slow machine

    def test_without_threads(self):
        """A thread that the system does not give is an exception, and Python lives on."""
        script = ("import os, resource, shardwright\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
                  "if os.getuid() == 0:\n    os.setgroups([]); os.setresgid(*[300000 + os.getpid()] * 3); os.setresuid(*[300000 + os.getpid()] * 3)\n"
                  f"try:\n    shardwright.plan(**{JOB!r})\nexcept shardwright.MachineError as error:\n    print(error)")
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": FOLDER}, capture_output=True, text=True,
                              cwd="/", check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("cannot start a thread", done.stdout)

    def test_search(self):
        found = shardwright.plan(**JOB, global_batch=8)
        self.assertLessEqual(found["lower_bound_s"], found["step_time_s"])
        simulated = shardwright.simulate(found)
        self.assertEqual(simulated["step_time_s"], found["step_time_s"])
        nothing = shardwright.plan(**JOB, global_batch=8, mem="1 GiB")
        self.assertFalse(nothing["feasible"])
        self.assertNotIn("plan_file", nothing)

    def assert_raises_as(self, kind, call, *arguments):
        with self.assertRaises(kind) as caught:
            call()
        self.assertIsInstance(caught.exception, shardwright.Error)
        self.assertEqual(self.program(*arguments).stderr, f"error: {caught.exception}\n")

    def test_errors(self):
        self.assert_raises_as(shardwright.UsageError, lambda: shardwright.plan(**JOB, wrapp="block"), "plan", *FLAGS,
                              "--wrapp", "block")
        self.assert_raises_as(shardwright.InputError, lambda: shardwright.plan(model="gpt3", cluster="dgx-h100"), "plan",
                              "--model", "gpt3", "--cluster", "dgx-h100")
        self.assert_raises_as(shardwright.InputError, lambda: shardwright.simulate("absent.json"), "simulate", "absent.json")
        self.assert_raises_as(shardwright.UsageError, lambda: shardwright.emit("absent.json"), "emit", "absent.json")
        with self.assertRaisesRegex(shardwright.UsageError, "plan: these keywords print text"):
            shardwright.plan(help=True)

    def test_empty_values(self):
        """An empty value was none, and the next keyword became the value."""
        folder = pathlib.Path.cwd()
        os.chdir(self.folder)
        self.addCleanup(os.chdir, folder)
        self.assert_raises_as(shardwright.UsageError, lambda: shardwright.plan(**JOB, output="", recompute="full"), "plan", *FLAGS,
                              "--output=", "--recompute=full")
        self.assertEqual(os.listdir(self.folder), [])

    def test_texts_with_a_nul(self):
        for call in (lambda: shardwright.plan(model="gpt2\0.json", cluster="dgx-h100"), lambda: shardwright.plan(**{"mod\0el": "gpt2"}),
                     lambda: shardwright.simulate("plan.json\0")):
            with self.assertRaisesRegex(shardwright.UsageError, "got a text with a NUL character, expected one without"):
                call()

    def test_plans(self):
        planned = shardwright.plan(**JOB)
        expected = shardwright.simulate(planned).printed

        class Node(dict):
            pass

        def as_mappings(value):
            """Nothing in it is a dict."""
            if isinstance(value, dict):
                return types.MappingProxyType({key: as_mappings(item) for key, item in value.items()})
            return [as_mappings(item) for item in value] if isinstance(value, list) else value

        for plan in (as_mappings(planned), as_mappings(planned["plan_file"]), collections.UserDict(planned), Node(planned)):
            self.assertEqual(shardwright.simulate(plan).printed, expected)
        path = self.folder / "plan.json"
        path.write_text(json.dumps(planned["plan_file"]))
        for plan in (path, str(path), os.fsencode(path)):
            self.assertEqual(shardwright.simulate(plan).printed, expected)
        for plan in (None, 7, ["plan.json"], object()):
            with self.assertRaises(TypeError):
                shardwright.simulate(plan)
        with self.assertRaisesRegex(TypeError, "a plan holds a value of type set, expected what JSON has"):
            shardwright.simulate({"plan": {1}})
        with self.assertRaisesRegex(shardwright.InputError, "^the plan that was given: got no key \"format\", expected one"):
            shardwright.simulate({"schema": 7})

    def test_errors_are_pythons_too(self):
        for error, python in ((shardwright.UsageError, ValueError), (shardwright.InputError, ValueError),
                              (shardwright.MachineError, OSError), (shardwright.RunError, RuntimeError)):
            self.assertTrue(issubclass(error, python) and issubclass(error, shardwright.Error))
        self.assertFalse(hasattr(shardwright, "EnvironmentError"))
        with self.assertRaises(OSError) as caught:
            shardwright.plan(**JOB, output=self.folder / "no" / "plan.json")
        self.assertIsInstance(caught.exception, shardwright.MachineError)
        with self.assertRaises(shardwright.InputError) as caught:
            shardwright.plan(model="gpt\n2\x1b[31m\x9b\u202e", cluster="dgx-h100")
        self.assertIn(r"gpt\n2\u001b[31m\u009b\u202e", str(caught.exception))

    def test_what_it_says_of_itself(self):
        self.assertEqual(f"shardwright {shardwright.__version__}\n", self.program("--version").stdout)
        for keyword in ("global_batch", "output", "explain"):
            self.assertIn(f"\n  {keyword}: ", shardwright.plan.__doc__)
            self.assertIn(keyword, inspect.signature(shardwright.plan).parameters)
            self.assertIn(keyword, inspect.signature(shardwright.commands.plan).parameters)

    def test_every_command_is_a_function(self):
        listed = re.findall(r"^  ([a-z][\w-]*)  ", self.program("--help").stdout, re.MULTILINE)
        self.assertGreaterEqual(len(listed), 28)
        for name in listed:
            self.assertTrue(callable(getattr(shardwright.commands, name.replace("-", "_"))), name)
        self.assertEqual(shardwright.commands.list("models"), self.printed("list", "models"))
        self.assertEqual(shardwright.commands.sweep(model="gpt2", cluster="dgx-h100", nodes=[1, 2]),
                         self.printed("sweep", "--model", "gpt2", "--cluster", "dgx-h100", "--nodes", "1,2"))

    def test_plan_as_data(self):
        found = shardwright.plan(**JOB, global_batch=8)
        self.assertEqual((found.fits, found.step_time, found.ranks), (True, found["step_time_s"], 4))
        simulated = self.printed("simulate", "-", stdin=json.dumps(found.file))
        self.assertEqual(found.memory.at_peak, simulated["memory"]["at_peak"])
        self.assertEqual(sum(found.memory.at_peak.values()), found.memory.peak)
        self.assertIn(f"{found.step_time:.4g} s a step", found.why())
        found.save(self.folder / "found.json")
        self.assertEqual(shardwright.load(self.folder / "found.json").step_time, found.step_time)
        page = found.to_html(self.folder / "page.html")
        self.assertEqual((self.folder / "page.html").read_text(), page)
        self.assertEqual(page, self.program("report", self.folder / "found.json").stdout)
        self.assertIn("<iframe sandbox=", found._repr_html_())

    def test_no_plan_fits(self):
        nothing = shardwright.plan(**JOB, global_batch=8, mem="1 GiB")
        self.assertEqual((nothing.fits, nothing.file), (False, None))
        self.assertIn("fits into 1.0 GiB per GPU; the least memory found is", nothing.why())
        with self.assertRaisesRegex(shardwright.InputError, "^the plan: there is none that fits; why\\(\\) says what is missing$"):
            nothing.step_time

    def test_a_config_of_torchtitan(self):
        """Fields as those of torchtitan 0.3's Trainer.Config; emit_torchtitan_test.py takes the real classes."""
        space = types.SimpleNamespace
        full = type("Config", (), {"__qualname__": "FullAC.Config"})
        config = space(
            model_spec=space(name="llama3", flavor="8B"), activation_checkpoint=full(), compile=space(enable=True),
            optimizer=space(implementation="fused", param_groups=[space(optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-4})]),
            training=space(local_batch_size=2, global_batch_size=-1, seq_len=4096, max_norm=1.0, dtype="float32", mixed_precision_param="bfloat16",
                           mixed_precision_reduce="float32", enable_cpu_offload=False),
            parallelism=space(data_parallel_replicate_degree=2, data_parallel_shard_degree=-1, fsdp_reshard_after_forward="never",
                              tensor_parallel_degree=1, pipeline_parallel_degree=1, context_parallel_degree=1, expert_parallel_degree=1))
        file = self.folder / "run.toml"
        file.write_text(torchtitan.toml(config))
        plan = self.folder / "plan.json"
        self.assertEqual(self.program("import-run", file, "--cluster", "dgx-h100", "-o", plan).returncode, 0)
        read = json.loads(plan.read_text())
        self.assertEqual((read["plan"]["replicate_size"], read["plan"]["shard_size"], read["plan"]["micro_batch"]), (2, 4, 2))
        self.assertEqual((read["job"]["sequence_length"], read["kernel_set"]["name"], read["model"]["name"]), (4096, "torch-compile", "llama-3.1-8b"))
        self.assertEqual({region["kind"] for region in read["plan"]["recompute"]}, {"full"})
        config.parallelism.context_parallel_degree, config.parallelism.data_parallel_replicate_degree = 2, 1
        file.write_text(torchtitan.toml(config))
        self.assertEqual(self.program("import-run", file, "--cluster", "dgx-h100", "-o", plan).returncode, 0)
        cut = json.loads(plan.read_text())["plan"]
        self.assertEqual((cut["context_size"], cut.get("context_method", "gather")), (2, "gather"))
        config.parallelism.context_parallel_degree, config.parallelism.data_parallel_replicate_degree = 1, 2
        config.parallelism.pipeline_parallel_degree = 2
        with self.assertRaisesRegex(shardwright.InputError, "^parallelism.pipeline_parallel_degree: got 2, expected 1"):
            torchtitan.toml(config)
        config.parallelism.pipeline_parallel_degree = 1
        config.optimizer.param_groups.append(space(optimizer_name="Muon", optimizer_kwargs={}))
        with self.assertRaisesRegex(shardwright.InputError, r"^optimizer\.param_groups: got AdamW, Muon, expected one optimizer"):
            torchtitan.toml(config)
        config.optimizer.param_groups.pop()
        plain, converted = (dataclasses.make_dataclass(name, [("layers", list)], namespace={"__module__": module}) for name, module in
                            (("Layers", "torchtitan.models.common"), ("Float8Linear", "torchtitan.components.quantization.float8")))
        config.model_spec.model = plain([plain([])])
        torchtitan.toml(config)
        config.model_spec.model = plain([plain([]), converted([])])
        with self.assertRaisesRegex(shardwright.InputError, "^model_spec: got Float8Linear in the model, expected a model as it is before converters"):
            torchtitan.toml(config)
        (self.folder / "titan.py").write_text(
            "import types\nspace = types.SimpleNamespace\nFull = type('C', (), {'__qualname__': 'FullAC.Config'})\n"
            "def config():\n    return space(model_spec=space(name='llama3', flavor='8B'), activation_checkpoint=Full(), compile=space(enable=True),\n"
            "        optimizer=space(implementation='fused', param_groups=[space(optimizer_name='AdamW', optimizer_kwargs={})]),\n"
            f"        training=space(**{vars(config.training)!r}), parallelism=space(**{vars(config.parallelism)!r}))\n")
        for words, code, said in ((["os:nothing"], 3, "os:nothing: module 'os' has no attribute 'nothing'"),
                                  (["os:getcwd"], 3, "got str, expected a Trainer.Config of torchtitan 0.3"),
                                  (["titan:config", "-o", "nowhere/run.toml"], 4, "nowhere/run.toml: No such file or directory")):
            done = subprocess.run([sys.executable, "-m", "shardwright.torchtitan", *words], env=dict(os.environ, PYTHONPATH=FOLDER),
                                  cwd=self.folder, capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (code, "", f"error: {said}\n"))

    def test_here(self):
        """A GPU that is there is never taken for none."""
        tool = self.folder / "nvidia-smi"
        with unittest.mock.patch.dict(os.environ, PATH=f"{self.folder}:{os.environ['PATH']}"):
            for product, gpu in (("NVIDIA H200", "h200-141"), ("Tesla T4", "t4"), ("NVIDIA GeForce GTX 1080", None)):
                tool.write_text(f"#!/bin/sh\ncase $1 in topo) printf '\\tGPU0\\tCPU Affinity\\nGPU0\\t X \\t0-7\\n';; *) echo '{product}';; esac\n")
                tool.chmod(0o755)
                if gpu is None:
                    with self.assertRaisesRegex(shardwright.MachineError, r"^GPU NVIDIA GeForce GTX 1080 \(nvidia-smi\) is there, but not the "
                                                                          r"catalog's name of NVIDIA GeForce GTX 1080; see --gpu"):
                        shardwright.here()
                else:
                    self.assertEqual(shardwright.here()["gpu"]["name"], gpu)
            tool.write_text("#!/bin/sh\nexit 9\n")
            self.assertEqual(shardwright.here(), "host")

    def test_models_and_clusters_as_mappings(self):
        config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "max_position_embeddings": 256, "rms_norm_eps": 1e-5}
        (self.folder / "llama.json").write_text(json.dumps(config))
        made = shardwright.plan(types.MappingProxyType(config), cluster="dgx-h100", seq=64)
        asked = self.printed("plan", "--model", self.folder / "llama.json", "--cluster", "dgx-h100", "--seq", "64")
        self.assertEqual(made.file, asked["plan_file"])
        with self.assertRaisesRegex(shardwright.UsageError, "^plan: got a job and model=, expected one of them$"):
            shardwright.plan(config, model="gpt2", cluster="dgx-h100")


SEARCH = """
import signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import shardwright

def search():
    return shardwright.plan(model="llama-3-70b", cluster="dgx-h100", nodes=64, seq=8192, global_batch=1024, objective="pareto")

def sleep_raises():
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(20)
    except KeyboardInterrupt:
        return True
    return False
"""


class Interrupts(unittest.TestCase):
    """Ctrl-C is Python's."""

    def script(self, text):
        done = subprocess.run([sys.executable, "-c", SEARCH + text, FOLDER], capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_a_search_is_interrupted(self):
        self.assertEqual(self.script("""
threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,)).start()
try:
    search()
    print("a result")
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler, sleep_raises())
"""), "interrupted True True\n")

    def test_searches_in_threads_leave_the_handler(self):
        self.assertEqual(self.script("""
def short():
    shardwright.plan(model="gpt2", cluster="dgx-h100", gpus=8, seq=1024, global_batch=64)
threads = [threading.Thread(target=short) for _ in range(4)]
for thread in threads:
    thread.start()
    time.sleep(0.05)
for thread in threads:
    thread.join()
print(sleep_raises())
"""), "True\n")

    def test_a_handler_of_the_user(self):
        self.assertEqual(self.script("""
class Stop(Exception):
    pass
def stop(number, frame):
    raise Stop
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    search()
except Stop:
    print("stopped")
"""), "stopped\n")


if __name__ == "__main__":
    unittest.main()
