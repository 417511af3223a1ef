"""The server for assistants (shardwright/mcp.py), asked by the SDK's own client over standard input and output.

    python tests/python/mcp_test.py SHARDWRIGHT PACKAGE
"""

import asyncio
import contextlib
import io
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import unittest

try:
    import jsonschema
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

PROGRAM, PACKAGE = map(os.path.abspath, sys.argv[1:3])
sys.path.insert(0, PACKAGE)
from shardwright import mcp as served

PLAN = {"model": "gpt2", "cluster": "dgx-a100", "seq": 128, "micro_batch": 2}
BUDGET = '[job.small]\nflags = ["--model", "gpt2", "--cluster", "dgx-a100", "--seq", "128", "--micro-batch", "2"]\n'
TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\t0-7\t0\nGPU1\tNV18\t X \t0-7\t0\n"
SNAPSHOT = {
    "segments": [{"device": 0, "address": 4096, "total_size": 1 << 21, "stream": 0, "segment_type": "small",
                  "blocks": [{"size": 1 << 21, "requested_size": 1 << 20, "state": "active_allocated", "frames": []}]}],
    "device_traces": [[{"action": "alloc", "addr": 1, "size": 1 << 20, "stream": 0, "time_us": 1001, "frames": []}]],
    "allocator_settings": {},
}
# A call of each tool, in an order in which files are there when they are read. hang's dumps are missing: the error is the program's.
CALLS = [
    ("estimate", {"model": "gpt2", "cluster": "8xA100-80", "seq": 512}),
    ("plan", {**PLAN, "output": "plan.json"}),
    ("plan", {**PLAN, "recompute": "full", "output": "made/there.json"}),
    ("simulate", {"plan": "plan.json", "trace": "trace.json.gz"}),
    ("sweep", {**PLAN, "micro_batch": "1..2"}),
    ("goodput", {"plan": "plan.json", "tokens": "1e9", "mtbf": "20000 h", "checkpoint_time": "60 s"}),
    ("baselines", {"model": "gpt2", "cluster": "dgx-a100", "seq": 128, "global_batch": 16}),
    ("diff", {"plan": "plan.json", "other": "made/there.json"}),
    ("check", {"budget": "budget.toml", "save": "record.json"}),
    ("judge", {"log": "40000 tokens/s/GPU", "plan": "plan.json"}),
    ("compare", {"sim": "plan.json", "measured": ["trace.json.gz"]}),
    ("advise", {"trace": ["trace.json.gz"], "plan": "plan.json"}),
    ("hang", {"dump": ["dump_0"]}),
    ("emit", {"plan": "plan.json", "to": "accelerate", "output": "accelerate.yaml"}),
    ("import-run", {"file": ["accelerate.yaml"], "model": "gpt2", "cluster": "dgx-a100", "seq": 128}),
    ("report", {"plan": "plan.json", "output": "report.html"}),
    ("inspect", {"target": "gpt2"}),
    ("inspect-trace", {"file": "snapshot.pickle"}),
    ("topo", {"action": "import", "file": "topo.txt", "gpu": "h100-80", "output": "mine.json"}),
    ("list", {"what": "models"}),
    ("doctor", {}),
]
# Their answers hold seconds, or what the machine has free.
UNSTEADY = ("plan", "doctor", "baselines", "estimate", "advise")


class Answers(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.outside = pathlib.Path(cls.scratch.name).resolve()
        cls.folder = cls.outside / "given"
        (cls.folder / "made").mkdir(parents=True)
        (cls.outside / "other").mkdir()
        (cls.outside / "other" / "kept.json").write_text("{}")
        (cls.folder / "budget.toml").write_text(BUDGET)
        (cls.folder / "greedy.toml").write_text(BUDGET.replace('"2"]', '"2", "-o", "../out.json"]'))
        (cls.folder / "topo.txt").write_text(TOPOLOGY)
        (cls.folder / "snapshot.pickle").write_bytes(pickle.dumps(SNAPSHOT, protocol=4))
        (cls.folder / "link").symlink_to(cls.outside / "other")
        (cls.folder / "link.json").symlink_to(cls.outside / "other" / "kept.json")
        cls.before, cls.table = cls.tree_outside(), served.commands()
        cls.tools, cls.answers = asyncio.run(cls.ask())

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    @classmethod
    def tree_outside(cls):
        return {path: path.read_bytes() if path.is_file() else None for path in cls.outside.rglob("*") if not path.is_relative_to(cls.folder)}

    @classmethod
    def writes(cls):
        """Calls that name an output elsewhere: each flag that writes, of each tool."""
        calls = dict(CALLS)
        for name, command in cls.table.items():
            for row in command["flags"]:
                if name in served.ANSWERS and row["file"] == "write":
                    for place in (str(cls.outside / "out.json"), "../out.json", "link/out.json", "link.json", "made/../../out.json"):
                        yield name, {**calls[name], served.key_of(row): place}, row["name"], place

    @classmethod
    def wrong(cls):
        """Calls that the program refuses, with the command line that it refuses."""
        yield "plan", {"modle": "gpt2"}, ["plan", "--modle=1"]
        yield "plan", {**PLAN, "micro_batch": "two"}, ["plan", "--json", "--model=gpt2", "--cluster=dgx-a100", "--seq=128", "--micro-batch=two"]
        yield "simulate", {"plan": "missing.json"}, ["simulate", "--json", "missing.json"]
        yield "estimate", {"model": "gpt2"}, ["estimate", "--json", "gpt2"]

    @classmethod
    def refused(cls):
        """Calls that this server refuses, with its words."""
        yield "simulate", {"plan": "--trace=../out.json"}, 'error: PLAN: got "--trace=../out.json", expected '
        yield "compare", {"sim": "plan.json", "measured": ["--plan", "x"]}, 'error: MEASURED: got "--plan", expected '
        yield "plan", {**PLAN, "search": "yes"}, 'error: --search: got "yes", expected true or false'
        yield "plan", {**PLAN, "model": {"a": 1}}, 'error: --model: got {"a": 1}, expected a text or a number'
        yield "plan", {**PLAN, "model": "a\0b"}, "error: --model: got a text with a NUL character"
        yield "plan", {**PLAN, "a b": 1}, 'error: plan: got an argument "a b", expected one of '
        yield "run", {"plan": "plan.json"}, "error: run is no tool here: it trains; tools: estimate, "
        yield "rm", {}, "error: rm is no tool here; tools: estimate, "

    @classmethod
    async def ask(cls):
        environment = {**os.environ, "PYTHONPATH": PACKAGE, "PATH": f"{pathlib.Path(PROGRAM).resolve().parent}:{os.environ['PATH']}"}
        parameters = StdioServerParameters(command=sys.executable, args=["-P", "-m", "shardwright.mcp", str(cls.folder)], env=environment)
        async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            tools = (await session.list_tools()).tools
            calls = [*CALLS, *(c[:2] for c in cls.writes()), *(c[:2] for c in cls.wrong()), *(c[:2] for c in cls.refused()),
                     ("check", {"budget": "greedy.toml"})]
            return tools, [await session.call_tool(name, arguments) for name, arguments in calls]

    @classmethod
    def alone(cls, *words):
        return subprocess.run([PROGRAM, *words], cwd=cls.folder, stdin=subprocess.DEVNULL, text=True, capture_output=True)

    def text(self, number):
        return "".join(part.text for part in self.answers[number].content)

    def test_every_command_is_a_tool_or_withheld(self):
        self.assertEqual(sorted([*served.ANSWERS, *served.WITHHELD]), sorted(self.table))

    def test_tools_are_the_table(self):
        self.assertEqual([tool.name for tool in self.tools], list(served.ANSWERS))
        for tool in self.tools:
            command = self.table[tool.name]
            jsonschema.Draft202012Validator.check_schema(tool.input_schema)
            rows = [*command["positionals"], *command["flags"], *command["switches"]]
            self.assertEqual(list(tool.input_schema["properties"]), [served.key_of(row) for row in rows])
            self.assertEqual(tool.description, command["about"])
        for name, arguments in CALLS:
            jsonschema.validate(arguments, next(tool.input_schema for tool in self.tools if tool.name == name))

    def test_each_tool_is_called(self):
        self.assertEqual({name for name, _ in CALLS}, set(served.ANSWERS))
        for number, (name, arguments) in enumerate(CALLS):
            with self.subTest(name):
                missing = name == "hang"
                self.assertEqual(self.answers[number].is_error, missing, self.text(number))
                text = self.answers[number].content[0].text
                if name in UNSTEADY:
                    self.assertIsInstance(json.loads(text), dict)
                else:
                    alone = self.alone(*served.words_of(self.table[name], arguments, self.folder))
                    self.assertEqual(text, alone.stderr.strip() if missing else alone.stdout)
        self.assertTrue((self.folder / "made" / "there.json").is_file())

    def test_nothing_is_written_outside(self):
        first = len(CALLS)
        cases = list(self.writes())
        self.assertGreater(len(cases), 40)
        for number, (name, _, flag, place) in enumerate(cases, first):
            with self.subTest(name=name, flag=flag, place=place):
                self.assertTrue(self.answers[number].is_error)
                self.assertEqual(self.text(number), f'error: {flag}: got "{place}", expected a path inside {self.folder}, '
                                 "the folder that this server may write to")
        self.assertEqual(self.tree_outside(), self.before)

    def test_wrong_arguments_get_the_programs_words(self):
        first = len(CALLS) + len(list(self.writes()))
        for number, (_, _, words) in enumerate(self.wrong(), first):
            alone = self.alone(*words)
            self.assertIn(alone.returncode, (2, 3))
            self.assertTrue(self.answers[number].is_error)
            self.assertEqual(self.text(number).removeprefix("error: "), alone.stderr.strip().removeprefix("error: "))

    def test_refused_here(self):
        first = len(CALLS) + len(list(self.writes())) + len(list(self.wrong()))
        for number, (_, _, words) in enumerate(self.refused(), first):
            self.assertTrue(self.answers[number].is_error)
            self.assertTrue(self.text(number).startswith(words), self.text(number))
        self.assertTrue(self.answers[-1].is_error, "a budget's flags name an output")

    def test_command_line(self):
        for words, code in (([], 2), (["--help"], 2), (["a", "b"], 2), ([str(self.folder / "none")], 4)):
            with contextlib.redirect_stderr(io.StringIO()) as err:
                self.assertEqual(served.main(words), code)
            self.assertEqual(err.getvalue().count("\n"), 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
