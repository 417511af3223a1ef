"""Four times as many of anything that a file counts take no more than n log n: CPU seconds and memory of each command.

A case writes its files for a count and names the command. It runs with a count and with four times as many; the bound
is two doublings at 2.6 each, plus what a busy machine adds to a short run. A count that is refused by its budget
(docs/security.md) has to be refused as cheaply."""

import json
import os
import pathlib
import pickle
import resource
import shutil
import sqlite3
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

DOUBLING = 2.6
# Of CPU seconds and bytes: a run this cheap says nothing about its growth.
SECONDS = 0.35
BYTES = 48 << 20
ADDRESS_SPACE = 4 << 30
JOB = ("--cluster", "dgx-a100", "--gpus", "4", "--seq", "128")


def llama(layers, **keys):
    return {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": layers, **keys}


class Growth(ShardwrightTestCase):

    def write(self, name, content):
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    def plan(self, config, *flags):
        """A plan's document."""
        self.write("config.json", config)
        self.succeed("plan", "--model", "config.json", *JOB, *flags, "-o", "made.json")
        return json.loads((self.folder / "made.json").read_text())

    def cost(self, words):
        """(CPU seconds, bytes, exit code, output) of a command."""
        with open(self.folder / "said.txt", "w", encoding="utf-8") as out:
            process = subprocess.Popen(
                [shardwright_test_case.PROGRAM, *words], stdout=out, stderr=subprocess.STDOUT, cwd=self.folder,
                preexec_fn=lambda: (resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE)),
                                    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))))
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        text = (self.folder / "said.txt").read_text(encoding="utf-8", errors="replace")
        return usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10, process.returncode, text

    def grows(self, name, count, make, codes=(0,)):
        """`make(n)` writes the files and returns the words of the command."""
        with self.subTest(name):
            few = self.cost(make(count))
            many = self.cost(make(4 * count))
            print(f"{name}: {count}: {few[0]:.2f} s, {few[1] >> 20} MiB; {4 * count}: {many[0]:.2f} s, {many[1] >> 20} MiB, "
                  f"exit {many[2]} {many[3][-160:]!r}", file=sys.stderr, flush=True)
            self.assertIn(few[2], codes, few[3][:500])
            if many[2] == 3 and 3 not in codes:
                self.assertIn("--budget", many[3])
            else:
                self.assertIn(many[2], codes, many[3][:500])
            self.assertLess(many[0], DOUBLING * DOUBLING * few[0] + SECONDS)
            self.assertLess(many[1], DOUBLING * DOUBLING * few[1] + BYTES)

    def test_layers(self):
        """One unit of many modules, many units, and units of many parameters, in every dialect."""
        for dialect, wraps in {"fsdp2": ("block", "module", "root"), "fsdp1": ("block", "module", "root"), "ddp": ("root",),
                               "native": ("block", "module"), "zero1": ("root",), "zero2": ("root",),
                               "zero3": ("block", "module", "root")}.items():
            for wrap in wraps:
                def make(n, dialect=dialect, wrap=wrap):
                    self.plan(llama(n), "--dialect", dialect, "--wrap", wrap)
                    return "simulate", "made.json"
                self.grows(f"layers of {dialect} {wrap}", 150, make)
        for flags in (("--recompute", "full"), ("--recompute", "selective"), ("--offload", "parameters"),
                      ("--dialect", "zero3", "--recompute", "full"), ("--dialect", "fsdp1", "--recompute", "full"),
                      ("--dialect", "zero3", "--offload", "parameters")):
            self.grows(f"layers with {' '.join(flags)}", 150,
                       lambda n, flags=flags: self.plan(llama(n), *flags) and ("simulate", "made.json"))
        self.grows("layers of shared weights", 150, lambda n: self.plan(
            {"model_type": "albert", "vocab_size": 64, "embedding_size": 32, "hidden_size": 32, "intermediate_size": 64,
             "num_attention_heads": 4, "num_hidden_layers": n}, "--dialect", "zero3") and ("simulate", "made.json"))

    def test_commands_on_layers(self):
        for command in (("inspect",), ("emit", "--to", "fsdp2", "-o", "emitted"), ("report", "-o", "r.html"),
                        ("simulate", "--exact", "--trace", "t.json.gz")):
            self.grows(f"layers in {command[0]}", 150, lambda n, command=command: self.plan(llama(n), "--wrap", "module")
                       and (command[0], "made.json", *command[1:]))
        self.grows("layers in diff", 150, lambda n: self.plan(llama(n), "--wrap", "module") and (
            self.succeed("plan", "--model", "config.json", *JOB, "--wrap", "block", "-o", "other.json"),
            ("diff", "made.json", "other.json"))[1], codes=(0, 1))
        self.grows("layers in plan", 150, lambda n: self.write("config.json", llama(n)) and (
            "plan", "--model", "config.json", *JOB, "--dialect", "zero3", "--wrap", "root"))

    def changed(self, config, change, *flags):
        plan = self.plan(config, *flags)
        change(plan["plan"], plan["job"])
        return self.write("plan.json", plan)

    def test_plan(self):
        """The lists and counts of a plan file."""
        def micro_batches(n):
            def change(plan, job):
                plan["accumulation"] = n
                job["global_batch"] = 4 * n
            return self.changed(llama(1), change)
        for command in (("simulate", "--exact"), ("report", "-o", "r.html"), ("inspect",), ("emit", "--to", "fsdp2", "-o", "e")):
            self.grows(f"micro-batches in {command[0]}", 1_000, lambda n, c=command: (c[0], micro_batches(n), *c[1:]))

        def one_unit(n, dialect):
            def change(plan, job):
                units = [unit for unit in plan["units"] if unit["name"] != "root"]
                units[0]["modules"] = [module for unit in units for module in unit["modules"]]
                plan["units"] = [units[0], plan["units"][-1]]
            return "simulate", self.changed(llama(n), change, "--dialect", dialect, "--wrap", "block")
        for dialect in ("fsdp2", "native", "zero3"):
            self.grows(f"modules of one unit of {dialect}", 150, lambda n, d=dialect: one_unit(n, d))

        def prefetches(n):
            def change(plan, job):
                names = [unit["name"] for unit in plan["units"]]
                for unit in plan["units"]:
                    unit["forward_prefetch"] = [name for name in names[:20] if name != unit["name"]]
            return "simulate", self.changed(llama(n), change, "--wrap", "block")
        self.grows("prefetches of units", 200, prefetches)

        def recomputed(n):
            def change(plan, job):
                plan["recompute"] = [{"module": f"model.layers.{i}", "kind": "full"} for i in range(n)]
            return "simulate", self.changed(llama(n), change)
        self.grows("recomputed modules", 200, recomputed)

        def frozen(n):
            def change(plan, job):
                job["frozen"] = [f"model.layers.{i}.mlp.*" for i in range(n)]
            return "simulate", self.changed(llama(n), change)
        self.grows("frozen patterns", 150, frozen, codes=(0, 3))
        for field in ("reduce_bucket", "sub_group", "prefetch_bucket", "persistence_threshold", "max_reuse_distance"):
            def small(n, field=field):
                def change(plan, job):
                    plan["zero"][field] = 1
                return "simulate", self.changed(llama(n), change, "--dialect", "zero3")
            self.grows(f"layers with zero.{field} of 1", 100, small, codes=(0, 3))

    def test_configuration(self):
        """Keys that no reader knows, and the file's nesting."""
        self.grows("keys of a config", 20_000, lambda n: self.write("config.json", llama(1, **{f"k{i}": i for i in range(n)}))
                   and ("plan", "--model", "config.json", *JOB, "-o", "made.json"))
        self.grows("keys of a config in inspect", 20_000, lambda n: self.plan(llama(1, **{f"k{i}": i for i in range(n)}))
                   and ("inspect", "made.json", "--json"))
        self.grows("objects of a config", 10_000, lambda n: self.plan(llama(1, more=[{"a": [i]} for i in range(n)]))
                   and ("diff", "made.json", "made.json"))

    def test_model(self):
        """model.json: modules, ops, parameters, names of one storage."""
        def model(modules, ops=(), **keys):
            ids = {"op": "embedding", "module": "emb", "inputs": ["x"], "outputs": ["t0"], "params": ["emb.weight"]}
            del ids
            return {"format": "shardwright-model", "version": 1, "inputs": {"x": {"ids": 8}}, "modules": modules,
                    "ops": list(ops), **keys}
        launch = {"class": "elementwise", "read": 8, "written": 8}

        def chain(n):
            ops = [{"op": "other", "function": "f", "inputs": ["x" if i == 0 else f"t{i}"], "outputs": [f"t{i + 1}"],
                    "results": [{"shape": [8]}], "forward": [launch]} for i in range(n)]
            return self.write("model.json", model([], ops))
        self.grows("ops of model.json", 2_000, lambda n: ("inspect", chain(n)), codes=(0, 3))

        def modules(n):
            return self.write("model.json", model([{"name": f"m{i}", "class": "M", "params": [{"name": "w", "shape": [4]}]}
                                                   for i in range(n)]))
        self.grows("modules of model.json", 5_000, lambda n: ("inspect", modules(n)), codes=(0, 3))

    def test_settings(self):
        for name, line in (("w.yaml", "k{}: 1\n"), ("w.toml", "k{} = 1\n"), ("t.toml", "[a{}]\nb = 1\n"), ("l.yaml", "- a: {}\n")):
            self.grows(f"lines of {name}", 8_000, lambda n, name=name, line=line: (
                "import-run", self.write(name, "".join(line.format(i) for i in range(n))), "--model", "gpt2", "--cluster", "dgx-a100"),
                codes=(3,))
        self.grows("keys of DeepSpeed's JSON", 8_000, lambda n: (
            "import-run", self.write("ds.json", {"zero_optimization": {"stage": 3}, **{f"k{i}": i for i in range(n)}}),
            "--model", "gpt2", "--cluster", "dgx-a100", "-o", "made.json"), codes=(0, 3))
        self.grows("words of a command line", 8_000, lambda n: (
            "import-run", self.write("run.sh", "torchrun --nproc_per_node 4 train.py " + " ".join(f"--k{i} {i}" for i in range(n)) + "\n"),
            "--model", "gpt2", "--cluster", "dgx-a100", "-o", "made.json"), codes=(0, 3))

    def test_jobs(self):
        """Tables of a budget.toml, and of its record."""
        def jobs(n):
            self.plan(llama(1))
            return self.write("budget.toml", "".join(f'[job.j{i}]\nplan = "made.json"\nmemory = "72 GiB"\n' for i in range(n)))
        self.grows("jobs of budget.toml", 20, lambda n: ("check", jobs(n)))
        self.grows("keys of a record", 20_000, lambda n: ("check", jobs(1), "--last", self.write(
            "last.json", {"schema": "shardwright-check-record", "schema_version": 1, "jobs": {f"j{i}": 0 for i in range(n)}})),
            codes=(3,))

    def test_clusters(self):
        self.grows("nodes", 1_000, lambda n: self.write("config.json", llama(2)) and (
            "plan", "--model", "config.json", "--cluster", "dgx-a100", "--nodes", str(n), "--seq", "128", "--global-batch", str(8 * n)))

        def exact(n):
            self.write("config.json", llama(2))
            self.succeed("plan", "--model", "config.json", "--cluster", "dgx-a100", "--nodes", str(n), "--seq", "128",
                         "--global-batch", str(8 * n), "--no-search", "-o", "made.json")
            return "simulate", "made.json", "--exact"
        self.grows("nodes in simulate --exact", 500, exact)

        def links(n):
            return self.write("cluster.json", {
                "format": "shardwright-cluster", "version": 1, "name": "c", "description": "c", "gpu": "a100-80", "network": "roce",
                "node": {"kind": "spec", "source": "s", "date": "2026-11-21",
                         "components": [{"name": "gpu", "type": "gpu", "count": 4}, {"name": "cpu", "type": "cpu"}] +
                                       [{"name": f"s{i}", "type": "pcie_switch"} for i in range(n)],
                         "links": [{"from": "gpu", "to": "cpu", "type": "pcie", "bandwidth": "31 GB/s"}] +
                                  [{"from": f"s{i}", "to": "cpu", "type": "pcie", "bandwidth": "31 GB/s"} for i in range(n)]}})
        self.grows("components of a node", 500, lambda n: ("inspect", links(n)), codes=(0, 3))

    def tables(self):
        """A model to train, and its weights."""
        self.write("config.json", {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2})
        self.succeed("plan", "--model", "./config.json", "--cluster", "h100-80 x1, nvlink 450 GB/s", "--kernel-set", "shardwright-host",
                     "--precision", "fp32", "--no-search", "--seq", "16", "--global-batch", "1", "-o", "made.json")

    def test_weights(self):
        """Tensors that an index names."""
        def index(n, command):
            self.tables()
            names = [f"t{i}" for i in range(n)]
            header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
            self.write("hub/a.safetensors", struct.pack("<Q", len(header)) + header)
            self.write("hub/model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "a.safetensors")})
            self.write("hub/config.json", (self.folder / "config.json").read_text())
            return {"run": ("run", "made.json", "--steps", "1", "--init", "hub"),
                    "inspect": ("inspect", "hub")}[command]
        self.grows("tensors of an index in run", 15_000, lambda n: index(n, "run"), codes=(3,))
        self.grows("tensors of an index in inspect", 15_000, lambda n: index(n, "inspect"), codes=(0, 3))

    def test_data(self):
        """Files in the list of --data."""
        def files(n):
            self.tables()
            for i in range(n):
                (self.folder / f"d{i}.txt").write_bytes(b"a" * 40)
            return "run", "made.json", "--steps", "1", "--data", ",".join(f"text:d{i}.txt" for i in range(n))
        self.grows("files of --data", 1_500, files)

    def test_traces(self):
        def kineto(n):
            events = [f'{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#{i}","tid":1,"ts":{i * 10},"dur":10}},\n'
                      f'{{"ph":"X","cat":"kernel","name":"k{i}","tid":7,"ts":{i * 10 + 1},"dur":5,'
                      f'"args":{{"device":0,"stream":7,"correlation":{i}}}}}' for i in range(n)]
            return self.write("kineto.json", '{"traceEvents":[' + ",\n".join(events) + "]}")
        self.grows("rows of a profiler's trace", 10_000, lambda n: ("inspect-trace", kineto(n)), codes=(0, 1, 3))

        def streams(n):
            events = [f'{{"ph":"X","cat":"kernel","name":"gemm","tid":{i},"ts":{i * 10},"dur":5,"args":{{"device":0,"stream":{i},'
                      f'"correlation":{i}}}}}' for i in range(n)]
            return self.write("streams.json", '{"traceEvents":[' + ",\n".join(events) + "]}")
        self.grows("streams of a profiler's trace", 5_000, lambda n: ("inspect-trace", streams(n)), codes=(0, 1, 3))

        def nested(n):
            events = [f'{{"ph":"X","cat":"cpu_op","name":"aten::op","tid":1,"ts":{i},"dur":{2 * (n - i)}}}' for i in range(n)]
            events.append('{"ph":"X","cat":"kernel","name":"gemm","tid":7,"ts":1,"dur":5,"args":{"device":0,"stream":7,"correlation":1}}')
            return self.write("nested.json", '{"traceEvents":[' + ",\n".join(events) + "]}")
        self.grows("nested ranges of a trace", 5_000, lambda n: ("inspect-trace", nested(n)), codes=(0, 1, 3))

        def nsight(n):
            (self.folder / "n.sqlite").unlink(missing_ok=True)
            base = sqlite3.connect(self.folder / "n.sqlite")
            base.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
            base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                         "correlationId INTEGER, shortName INTEGER)")
            base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, f"k{i}") for i in range(n)])
            base.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, 0, ?)", [(2 * i, 2 * i + 1, i) for i in range(n)])
            base.commit()
            base.close()
            return "inspect-trace", "n.sqlite"
        self.grows("rows of Nsight's tables", 10_000, nsight, codes=(0, 1, 3))

        def snapshot(n):
            trace = [{"action": "alloc" if i % 2 == 0 else "free_completed", "addr": 512 * (i // 2), "size": 512, "stream": 0, "frames": [],
                      "time_us": i} for i in range(n)]
            segments = [{"device": 0, "address": 4096 * i, "total_size": 4096, "stream": 0, "segment_type": "large", "allocated_size": 512,
                         "active_size": 512, "requested_size": 512, "is_expandable": False,
                         "blocks": [{"address": 4096 * i, "size": 512, "requested_size": 512, "state": "active_allocated", "frames": []}]}
                        for i in range(n // 4)]
            return self.write("snap.pickle", pickle.dumps({"segments": segments, "device_traces": [trace]}, protocol=2))
        self.grows("events of a memory snapshot", 8_000, lambda n: ("inspect-trace", snapshot(n)), codes=(0, 1, 3))

    def test_dumps(self):
        """Collectives, ranks and groups of Flight Recorder dumps."""
        def dump(rank, n, ranks, groups):
            entries = [{"record_id": i, "pg_id": i % groups, "process_group": [str(i % groups), f"g{i % groups}"],
                        "collective_seq_id": i // groups + 1, "p2p_seq_id": 0, "op_id": i, "profiling_name": "nccl:all_reduce",
                        "time_created_ns": 10 ** 18 + i, "input_sizes": [[8]], "output_sizes": [[8]], "input_dtypes": ["Float"],
                        "output_dtypes": ["Float"], "state": "completed" if i + 1 < n else "scheduled", "time_discovered_started_ns": None,
                        "time_discovered_completed_ns": None, "retired": True, "timeout_ms": 600000, "is_p2p": False, "frames": []}
                       for i in range(n)]
            self.write(f"dumps/trace_{rank}", pickle.dumps(
                {"version": "2.4", "pg_config": {str(g): {"name": str(g), "desc": f"g{g}", "ranks": str(list(range(ranks)))}
                                                 for g in range(groups)}, "pg_status": {}, "entries": entries}, protocol=2))

        def dumps(n, ranks=2, groups=1):
            shutil.rmtree(self.folder / "dumps", ignore_errors=True)
            for rank in range(ranks):
                dump(rank, n, ranks, groups)
            return "hang", "dumps"
        self.grows("collectives of dumps", 3_000, dumps, codes=(0, 1))
        self.grows("ranks of dumps", 60, lambda n: dumps(20, ranks=n), codes=(0, 1))
        self.grows("groups of dumps", 500, lambda n: dumps(2 * n, groups=n), codes=(0, 1))

    def test_measurements(self):
        header = "#                                                              out-of-place                       in-place\n"
        line = "{0:12d} {1:12d}     float    none      -1    {2:7.2f}    1.0    1.0      0    {2:7.2f}    1.0    1.0      0\n"
        self.grows("lines of nccl-tests", 5_000, lambda n: ("inspect-trace", self.write(
            "all_gather.txt", "# nThread 1 nGpus 4\n" + header + "".join(line.format(4 * i + 4, i + 1, 5 + i / 1000) for i in range(n)))),
            codes=(0, 1, 2, 3))
        place = {"cluster": "h100-80 x8", "nodes": 1, "gpus_per_node": 8, "gpus": 8}
        self.grows("rows of price", 2_000, lambda n: ("price", self.write("questions.json", json.dumps(
            {"places": [place], "collectives": [{"place": 0, "op": "all_gather", "bytes": 1024 + i} for i in range(n)]}))))
        self.grows("topo -m", 60, lambda n: ("topo", "import", self.write(
            "m.txt", "\t" + "\t".join(f"GPU{i}" for i in range(n)) + "\tCPU Affinity\n" + "".join(
                f"GPU{i}\t" + "\t".join("X" if i == k else "NV4" for k in range(n)) + "\t0-7\n" for i in range(n)))), codes=(0, 2, 3))


if __name__ == "__main__":
    main()
