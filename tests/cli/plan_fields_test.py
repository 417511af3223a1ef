"""Plans whose fields were changed one by one, through the commands that read plans: each ends with an exit code of its own, in
10 seconds of the processor and 1 GB. SHARDWRIGHT_DEEP=1: 20,000 plans instead of 60.

The deep run calls the package in a child for each plan, which costs a tenth of a new program; `run` is always the program."""

import json
import os
import pathlib
import random
import resource
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import main
from training_test_case import TINY, TrainingTestCase

DEEP = "SHARDWRIGHT_DEEP" in os.environ
PLANS = int(os.environ.get("SHARDWRIGHT_PLANS", 20_000 if DEEP else 60))
SECONDS, BYTES = 10, 10**9
MOE = {"model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
       "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
# Flags of `plan`, on four ranks of one machine unless they say otherwise.
JOBS = {"fsdp2": ("--accumulation", "2", "--recompute", "full"),
        "fsdp1": ("--dialect", "fsdp1", "--precision", "bf16", "--shard", "2", "--replicate", "2"),
        "ddp": ("--dialect", "ddp", "--optimizer", "sgd"),
        "zero3": ("--dialect", "zero3", "--offload", "optimizer"),
        "zero1": ("--dialect", "zero1", "--accumulation", "2"),
        "moe": ("--model", "./moe-config.json", "--kernel-set", "torch-eager", "--recompute", "selective"),
        "large": ("--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "2048", "--kernel-set", "torch-eager")}
TINY_JOBS = ("fsdp2", "fsdp1", "ddp", "zero3", "zero1")  # which `run` trains
# By this mark a place is found again in the text, so that it holds what json.dumps cannot write.
MARK = "@@here@@"
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "01", "1e-400", "9" * 400, '"\\u0000"', '"a\\u0000b"', '"\\ud800"', '"\\u202e"',
       "[" * 199 + "]" * 199, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "0" + "}" * 100_000, "nul", "", "/**/", '"' + "x" * 60_000 + '"')
VALUES = (None, True, False, 0, -1, 1, 2, 3, 7, 1000, 10**6, 2**31, 2**53, 2**63 - 1, 2**63, -2**63, 2**64, 0.5, -0.5, 1e-300, 1e300, "",
          "x", "none", "auto", "always", "../x", "0 B", "-1 B", "1 B", "9223372036854775807 B", "1e30 GiB", "nan GiB", "inf GB/s", "0 GB/s",
          [], {}, [[]], [{}], [None], ["x"], [0], {"x": 0}, ["x"] * 1000, {"json": {}}, {"name": "gpt2"}, [{"name": "x", "modules": ["x"]}])


def places(value, path=()):
    """The paths to all fields, items, objects and lists below."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(document, path):
    for key in path:
        document = document[key]
    return document


class Mutator:
    """Makes plans out of plans."""

    def __init__(self, plans, seed):
        self.plans = plans
        self.rng = random.Random(seed)
        self.places = {name: list(places(plan)) for name, plan in plans.items()}
        for found in self.places.values():
            self.rng.shuffle(found)
        self.sets = {name: set(found) for name, found in self.places.items()}
        texts = {at(plan, path) for name, plan in plans.items() for path in self.places[name] if isinstance(at(plan, path), str)}
        self.texts = sorted(text for text in texts if len(text) < 100)  # words, sizes and modules of other fields

    def near(self, value):
        """A value like the one that is there."""
        rng = self.rng
        if isinstance(value, bool):
            return not value
        if isinstance(value, (int, float)):
            return rng.choice((value + 1, value - 1, value * 2, value * 1000, -value, value / 3, str(value)))
        if isinstance(value, str):
            cut = rng.randrange(len(value) + 1)
            return rng.choice((value[:cut] + value[cut + 1:], value + rng.choice(("x", " ", "0", ".0", "\0", "é")), value.upper(),
                               rng.choice(self.texts), rng.choice(self.texts)))
        if isinstance(value, list) and value:
            return rng.choice((value + value, value[::-1], value[1:], value[:1], value * 20, [*value, rng.choice(self.texts)],
                               rng.sample(value, len(value)), value[0]))
        if isinstance(value, dict) and value:
            key = rng.choice(sorted(value))
            return rng.choice(({k: v for k, v in value.items() if k != key}, {**value, "x" + key: value[key]}, {**value, key: value},
                               list(value.values()), {k: value[key] for k in value}))
        return rng.choice(VALUES)

    def plan(self, number):
        """(the name of the plan that it was, what was changed, the text)"""
        rng = self.rng
        name = sorted(self.plans)[number % len(self.plans)]
        plan = json.loads(json.dumps(self.plans[name]))
        raw, changes = None, []
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
            # Every field in turn, then any.
            path = self.places[name][number // len(self.plans) % len(self.places[name])] if not changes else rng.choice(list(places(plan)))
            *above, key = path
            parent = at(plan, above)
            kind = rng.choice(("near", "near", "near", "same", "same", "value", "value", "raw", "missing", "other", "twice"))
            if kind == "same":  # what another plan has there
                found = [at(other, path) for known, other in self.plans.items() if path in self.sets[known] and at(other, path) != parent[key]]
                parent[key] = json.loads(json.dumps(rng.choice(found))) if found else self.near(parent[key])
            elif kind == "missing":
                del parent[key]
            elif kind == "twice" and isinstance(parent, list):
                parent.insert(key, json.loads(json.dumps(parent[key])))
            elif kind == "other":
                parent[key] = json.loads(json.dumps(at(plan, rng.choice(list(places(plan))))))
            elif kind in ("raw", "twice") and raw is None:
                # A key that is there twice, or what JSON may or may not hold.
                raw = json.dumps(parent[key]) + f', "{key}": ' + json.dumps(self.near(parent[key])) if kind == "twice" else rng.choice(RAW)
                parent[key] = MARK
            else:
                parent[key] = self.near(parent[key]) if kind != "value" else rng.choice(VALUES)
            changes.append((".".join(map(str, path)), kind))
        return name, changes, json.dumps(plan).replace(json.dumps(MARK), raw or "0")


class PlanFields(TrainingTestCase):

    def make_plans(self):
        (self.folder / "config.json").write_text(json.dumps(TINY))
        (self.folder / "moe-config.json").write_text(json.dumps(MOE))
        plans = {}
        for name, flags in JOBS.items():
            given = {"--model": "./config.json", "--cluster": "h100-80 x4, nvlink 450 GB/s", "--seq": "16",
                     "--kernel-set": "shardwright-host", **dict(zip(flags[::2], flags[1::2]))}
            self.succeed("plan", "--no-search", "-o", f"{name}.json", *(word for pair in given.items() for word in pair))
            plans[name] = json.loads((self.folder / f"{name}.json").read_text())
            for part in ("model", "cluster", "profile"):  # a changed one is refused by its hash, and not read
                plans[name][part].pop("hash", None)
        return plans

    def is_small(self, text):
        """Whether a step of training is little work, so that its time says something of the reader."""
        try:
            plan = json.loads(text)
            tokens = abs(plan["job"]["global_batch"] * plan["job"]["sequence_length"])
            return tokens <= 1000 and all(not isinstance(at(plan["model"], path), (int, float)) or abs(at(plan["model"], path)) <= 300
                                          for path in places(plan["model"]))
        except (KeyError, TypeError, ValueError):
            return False

    def calls(self, name, number, text):
        """What comes behind `simulate`."""
        rest = [("emit", "x.json", "--to", random.Random(number).choice(("fsdp2", "fsdp1", "accelerate", "deepspeed", "torchtitan")), "--json"),
                ("report", "x.json", "-o", "r.html"), ("diff", f"{name}.json", "x.json")]
        if name in TINY_JOBS and self.is_small(text):
            rest.append(("run", "x.json", "--steps", "1", "--data", "random:9", "--timeout", "100 s"))
        return rest

    def call(self, words):
        """The exit code of one command, in this process if it can be."""
        if self.native is not None and words[0] != "run":
            code, _, _ = self.native.run([os.fsencode(word) for word in ("shardwright", *words)], b"", b"")
            return code
        child = os.posix_spawn(shardwright_test_case.PROGRAM, ["shardwright", *words], os.environ,
                               file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                                             (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)])
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def try_plan(self, name, number, text):
        """In a child of its own: the exit codes, then the processor's seconds and the bytes of the costliest call."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.chdir(self.folder)
                pathlib.Path("x.json").write_text(text, encoding="utf-8", errors="surrogatepass")
                signal.alarm(600)
                told = []

                def call(words):
                    begin = sum(os.times()[:4])
                    told.append((words[0], self.call(words), sum(os.times()[:4]) - begin))
                call(("simulate", "x.json"))
                rest = self.calls(name, number, text)
                # They share a reader: where it refuses a plan, one of them does for all.
                for words in [rest[number % len(rest)]] if told[0][1] == 3 else rest:
                    call(words)
                peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
                os.write(writer, json.dumps([told, peak]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            said = file.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told, peak = json.loads(said or "[[], 0]")
        return status if not said else 0, told, peak

    def test_fields(self):
        plans = self.make_plans()
        self.native = None
        if DEEP:
            sys.path.insert(0, str(pathlib.Path(shardwright_test_case.PROGRAM).parent / "python"))
            from shardwright import _native
            self.native = _native
        mutator = Mutator(plans, int(os.environ.get("SHARDWRIGHT_SEED", 47)))
        kept, codes, bad, begin = pathlib.Path(os.environ.get("SHARDWRIGHT_KEEP", self.folder)), {}, 0, time.monotonic()
        for number in range(PLANS):
            name, changes, text = mutator.plan(number)
            status, told, peak = self.try_plan(name, number, text)
            for command, code, _ in told:
                codes[command, code] = codes.get((command, code), 0) + 1
            is_good = (status == 0 and all(code in (0, 1, 2, 3, 4, 5) and seconds <= SECONDS for _, code, seconds in told) and peak <= BYTES)
            if not is_good:
                bad += 1
                (kept / f"bad-{name}-{number}.json").write_text(text, encoding="utf-8", errors="surrogatepass")
            with self.subTest(number=number, name=name, changes=changes):
                self.assertTrue(is_good, (status, told, peak))
            if number % 1000 == 999:
                print(f"{number + 1} plans, {bad} bad, {time.monotonic() - begin:.0f} s", dict(sorted(codes.items())), file=sys.stderr, flush=True)
        print(f"{PLANS} plans of {sum(map(len, mutator.places.values()))} fields:", dict(sorted(codes.items())), file=sys.stderr)
        # Both what is refused and what is answered has been tried.
        for command in ("simulate", "emit", "report", "diff", "run"):
            self.assertTrue(codes.get((command, 0), 0) >= PLANS / 50 and codes.get((command, 3), 0) >= PLANS / 50, codes)


if __name__ == "__main__":
    main()
