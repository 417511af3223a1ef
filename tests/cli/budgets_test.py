"""Small files that would cost much: each is read or refused within seconds and a gigabyte (docs/security.md)."""

import gzip
import json
import os
import pathlib
import resource
import sqlite3
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

# The promise is 10 seconds and 1 GB. Seconds are those of the processor: the machine may have other work.
MOST_SECONDS = 10
MOST_BYTES = 1 << 30
# What may not be passed while a test fails, so that the machine lives on.
ADDRESS_SPACE = 4 << 30


def repeated(unit, count, head=b"", tail=b""):
    """gzip of head + unit * count + tail, made piece by piece."""
    times = max(1, (1 << 20) // len(unit))
    with tempfile.TemporaryFile() as file:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0) as stream:
            stream.write(head)
            for _ in range(count // times):
                stream.write(unit * times)
            stream.write(unit * (count % times) + tail)
        file.seek(0)
        return file.read()


class Budgets(ShardwrightTestCase):

    def cost(self, name, content, *words, code=3, error=None, address_space=ADDRESS_SPACE, most=MOST_SECONDS):
        """Runs the program on a file; checks its exit code, its error and what it took."""
        if content is not None:
            (self.folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        out = self.folder / "out.txt"
        with open(out, "w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [shardwright_test_case.PROGRAM, *words], stdout=stream, stderr=subprocess.STDOUT, cwd=self.folder,
                preexec_fn=lambda: (resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space)),
                                    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))))
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        text = out.read_text(encoding="utf-8", errors="replace")
        seconds = usage.ru_utime + usage.ru_stime
        print(f"{name}: exit {process.returncode}, {seconds:.2f} s, {usage.ru_maxrss >> 10} MiB: {text[:200]!r}", file=sys.stderr)
        self.assertEqual(process.returncode, code, text[:500])
        if error is not None:
            self.assertIn(error, text)
        self.assertLess(seconds, most)
        self.assertLess(usage.ru_maxrss << 10, MOST_BYTES)
        return text

    def settings(self, name, content, error):
        self.cost(name, content, "import-run", name, "--model", "gpt2", "--cluster", "dgx-a100", error=error)

    def trace(self, name, content, error, code=3, most=MOST_SECONDS):
        self.cost(name, content, "inspect-trace", name, error=error, code=code, most=most)

    def test_settings(self):
        deep = "deep.toml: got a value nested deeper than 50 levels, expected at most 50 levels"
        for letters in (30_000, 100_000):
            self.settings("deep.toml", "a." * letters + "a = 1\n", deep)
        self.settings("deep.toml", "[" + "a." * 100_000 + "a]\n", deep)
        self.settings("deep.toml", ("a = {" + "b." * 40) * 1_000, deep)
        self.settings("deep.toml", 'x = ["""a"""", {' + "a." * 100_000 + "a = 1}]\n", deep)
        self.settings("wide.yaml", "".join(f"k{i}: 1\n" for i in range(99_000)), "wide.yaml: got no key that tells the framework")
        self.settings("wide.toml", "".join(f"k{i}=1\n" for i in range(99_000)), "wide.toml")
        self.settings("wide.yaml", "".join(f"{i}:\n" for i in range(101_000)),
                      "wide.yaml: got more than 100,000 values, expected at most 100,000; --budget 2 allows twice as many")

    def test_pickles(self):
        limit = ": got more than 536,870,912 bytes of values, expected at most 536,870,912; --budget 2 allows twice as many"
        head = b"\x80\x04"
        self.trace("lists.gz", repeated(b"]", 40_000_000, head), "lists.gz" + limit)
        self.trace("numbers.gz", repeated(b"K\x01", 40_000_000, head), "numbers.gz" + limit)
        self.trace("texts.gz", repeated(b"X\x00\x00\x10\x00" + b"x" * (1 << 20), 1_000, head), "texts.gz" + limit)
        self.trace("memo.gz", repeated(b"\x94", 40_000_000, head + b"N"), "memo.gz" + limit)
        self.trace("items.gz", repeated(b"h\x00a", 60_000_000, head + b"Nq\x00]"), "items.gz" + limit)

    def test_models(self):
        modules = [{"name": "a" * 280_000 + "{i}", "class": "M", "repeat": 10_000}]
        model = {"format": "shardwright-model", "version": 1, "inputs": {}, "modules": modules, "ops": []}
        limit = "model.json: got more than 67,108,864 bytes of names when repeats are written out, expected at most "
        self.cost("model.json", json.dumps(model), "inspect", "model.json", error=limit)
        model["modules"] = [{"name": "a{i}", "class": "M", "repeat": 10_000,
                             "params": [{"name": "w", "shape": [1] * 90_000}]}]
        self.cost("model.json", json.dumps(model), "inspect", "model.json", error=limit)

    def test_repeated_launches(self):
        """One op with 4,000 launches is as much as a file may say; 9,000 times it is not."""
        launch = {"class": "elementwise", "read": 8, "written": 8}
        op = {"op": "other", "function": "f", "inputs": ["t{i}"], "outputs": ["t{i+1}"], "results": [{"shape": [8]}],
              "forward": [launch] * 4_000}
        ops = [{"op": "other", "function": "g", "inputs": ["x"], "outputs": ["t0"], "results": [{"shape": [8]}], "forward": [launch]},
               {"repeat": 9_000, "ops": [op]}]
        model = {"format": "shardwright-model", "version": 1, "inputs": {"x": {"ids": 8}}, "modules": [], "ops": ops}
        self.cost("model.json", json.dumps(model), "inspect", "model.json", error="model.json: got more than 1,000,000 launches and "
                  "kept tensors when repeats are written out, expected at most 1,000,000; --budget 2 allows twice as many")

    def test_profilers(self):
        database = sqlite3.connect(self.folder / "join.sqlite")
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId "
                         "INTEGER, correlationId INTEGER, shortName INTEGER)")
        database.executemany("INSERT INTO StringIds VALUES (7, ?)", [("k",)] * 20_000)
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, 0, 7)",
                             [(i, i + 1) for i in range(20_000)])
        database.commit()
        database.close()
        self.trace("join.sqlite", None, "20000", code=0)
        event = (b'{"ph":"X","cat":"kernel","name":"gemm","tid":7,"ts":1,"dur":5,"args":{"device":0,"stream":7,'
                 b'"correlation":7}},\n')
        self.trace("kernels.json.gz", repeated(event, 12_000_000, b'{"traceEvents":[\n'),
                   "kernels.json.gz: got more than 4,000,000 rows of work, expected at most 4,000,000; --budget 2")
        ranges = "".join(f'{{"ph":"X","cat":"user_annotation","name":"FSDP::pre_forward (u{i})","tid":1,"ts":{i},"dur":1}},\n'
                         for i in range(200_000))
        self.trace("units.json", '{"traceEvents":[' + ranges + event.decode() + "{}]}", "200001 units", code=0)
        calls = "".join(f'{{"ph":"X","cat":"cpu_op","name":"c10d::allgather_","tid":1,"ts":{i},"dur":0}},\n'
                        f'{{"ph":"X","cat":"user_annotation","name":"gloo:all_reduce","tid":2,"ts":{i},"dur":1}},\n'
                        for i in range(100_000))
        self.trace("calls.json", '{"traceEvents":[' + calls + "{}]}", "calls.json: got no compute work inside of steps")
        # 5 CPU seconds on an idle core, and up to 13 were seen on one that is shared with other machines' work.
        self.trace("nothing.json.gz", repeated(b" ", 3_300_000_000, b'{"traceEvents":['),
                   "nothing.json.gz: got more than 3,221,225,472 bytes of unpacked text", most=2 * MOST_SECONDS)

    def test_programs(self):
        plan = json.loads(self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128"))
        plan["plan"]["accumulation"] = 13_000
        plan["job"]["global_batch"] = 4 * 13_000
        self.cost("plan.json", json.dumps(plan), "simulate", "plan.json", "--exact", address_space=2 << 30,
                  error="plan: accumulation: got 13000, expected a step of at most ")

    def test_many_steps(self):
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "-o", "plan.json")
        events = []
        for step in range(30_000):
            at = 100 * step
            events.append(f'{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#{step}","tid":1,"ts":{at},"dur":100}}')
            events += [f'{{"ph":"X","cat":"kernel","name":"ncclDevKernel_AllGather","tid":9,"ts":{at + i},"dur":1,'
                       f'"args":{{"device":0,"stream":9,"correlation":-1}}}}' for i in range(10, 15)]
            events += [f'{{"ph":"X","cat":"kernel","name":"gemm","tid":7,"ts":{at + i},"dur":1,'
                       f'"args":{{"device":0,"stream":7,"correlation":-1}}}}' for i in (20, 30)]
        self.cost("steps.json", '{"traceEvents":[' + ",\n".join(events) + "]}", "compare", "plan.json", "steps.json", code=1)

    def test_many_layers(self):
        config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
                  "num_hidden_layers": 10_000}
        (self.folder / "config.json").write_text(json.dumps(config))
        job = ("--model", "config.json", "--cluster", "dgx-a100", "--seq", "128")
        self.cost("plan.json", None, "plan", *job, "--recompute", "full", "-o", "plan.json", code=0)
        self.cost("plan.json", None, "inspect", "plan.json", code=0)
        # More than 10 seconds beside other processes.
        self.cost("plan.json", None, "simulate", "plan.json", code=0, most=2 * MOST_SECONDS)
        self.cost("plan.json", None, "emit", "plan.json", "--to", "fsdp2", "-o", "emitted", code=0, most=2 * MOST_SECONDS)
        self.cost("plan.json", None, "plan", *job, "--search", "--global-batch", "64", "-o", "plan.json",
                  error="got more than 20,000 ops of a model to search plans for, expected at most 20,000; --budget 2")
        config["num_hidden_layers"] = 2_000
        (self.folder / "config.json").write_text(json.dumps(config))
        self.cost("plan.json", None, "plan", *job, "--recompute", "full", "-o", "plan.json", code=0)
        self.cost("plan.json", None, "simulate", "plan.json", code=0)
        # A type whose layers are copies of the first, and one whose layers a template writes out one by one.
        (self.folder / "config.json").write_text(json.dumps({"model_type": "qwen2_moe", "num_hidden_layers": 4_097}))
        self.cost("config.json", None, "inspect", "config.json", code=0)
        (self.folder / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 4_097}))
        self.cost("config.json", None, "inspect", "config.json", most=1,
                  error="config.json: got more than 20,000 modules and ops, expected at most 20,000; --budget 2 allows twice as many")


if __name__ == "__main__":
    main()
