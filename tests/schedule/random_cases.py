"""Random cases against a framework: what our side says of them, how they compare, how a difference is shrunk and reported.

A case is JSON with at least "network" (random_networks.py) and "shard" and "replicate". A test of one framework gives functions:
plan_of(case) -> plan file, and torch_of(case) -> list of steps, each a list of collectives, or raises torch_pool.Failure.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import torch

import random_networks
from program_collectives import collectives_of, first_difference
from torch_pool import Failure, Pools

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tools"))
import export_model  # noqa: E402

# Whose rules our programs follow: by the release of torch that runs here.
RELEASE = {"2.8": "2.8", "2.6": "2.6", "2.4": "2.6"}.get(".".join(torch.__version__.split(".")[:2]), "2.13")


class Refused(Exception):
    """Our program or our applier says that this cannot be done."""


@functools.lru_cache(maxsize=64)
def _model_json(network):
    spec = json.loads(network)
    try:
        return export_model.export(random_networks.make(spec), random_networks.sample(spec, 1), spec["sequence"])
    except export_model.Unsupported as error:
        raise Refused(str(error)) from None


def model_json(network):
    """What tools/export_model.py says of the network."""
    return _model_json(json.dumps(network))


class Shardwright:
    def __init__(self, program):
        self.program = program
        self.folder = tempfile.TemporaryDirectory()

    def call(self, *arguments):
        """Standard output. Raises Refused when the input is refused; anything else but success is our bug."""
        result = subprocess.run([self.program, *arguments], capture_output=True, text=True, check=False)
        if result.returncode == 3:
            raise Refused(result.stderr.strip().splitlines()[-1])
        if result.returncode not in (0, 1):
            raise AssertionError(f"shardwright {' '.join(arguments)}: {result.returncode}: {result.stderr}")
        return result.stdout

    def write(self, plan):
        path = pathlib.Path(self.folder.name) / "plan.json"
        path.write_text(json.dumps(plan), encoding="utf-8")
        return str(path)

    def collectives(self, plan, categories=(), beside_update=False):
        """Per step: (kind, group, elements in, elements out, dtype) in the order of issue; the first and a steady step. And the bytes
        of these categories that are allocated then. `beside_update`: of the steady step only what is not the update's."""
        trace = pathlib.Path(self.folder.name) / "trace.json"
        self.call("simulate", self.write(plan), "--json", "--exact", "--trace", str(trace))
        return collectives_of(trace, categories, beside_update)

    def emitted(self, plan, target):
        """The plan data that `emit` writes for the applier."""
        answer = json.loads(self.call("emit", self.write(plan), "--to", target, "--json"))
        if not answer["is_exact"]:
            raise AssertionError(f"emit changes the plan: {answer['losses']}")
        return json.loads(answer["files"][0]["text"])


@dataclasses.dataclass
class Outcome:
    kind: str  # "equal", "refused", "refused by us only", "accepted, fails in torch", "different", "broken"
    text: str = ""

    @property
    def is_good(self):
        return self.kind in ("equal", "refused")


def compare(ours, theirs):
    """`ours`: the first and a steady step, or Refused; `theirs`: all steps, or Failure."""
    if isinstance(ours, Refused):
        fails = isinstance(theirs, Failure) and not str(theirs).startswith("PlanError")  # which would be our applier
        return Outcome("refused" if fails else "refused by us only",
                       f"{ours}\n    torch: {theirs if isinstance(theirs, Failure) else 'runs'}")
    if isinstance(theirs, Failure):
        return Outcome("accepted, fails in torch", str(theirs))
    for name, a, b in (("first step", ours[0], theirs[0]), ("last step", ours[1], theirs[-1])):
        text = first_difference(a, b)
        if text:
            return Outcome("different", f"{name}: {text}")
    return Outcome("equal")


def attempt(function, *arguments):
    try:
        return function(*arguments)
    except (Refused, Failure) as error:
        return error


def shrink(case, judge, smaller, most=150):
    """The simplest case found whose outcome is of the same kind."""
    wanted = judge(case).kind
    tried = 0
    while tried < most:
        for candidate in smaller(case):
            tried += 1
            try:
                same = judge(candidate).kind == wanted
            except Exception:  # pylint: disable=broad-except
                same = False  # not a case any more
            if same:
                case = candidate
                break
            if tried >= most:
                break
        else:
            break
    return case


def smaller_networks(case):
    for network in random_networks.smaller(case["network"]):
        yield {**case, "network": network}


def reason_of(text):
    """A refusal without the names and numbers of this case."""
    text = re.sub(r'"[^"]*"', "...", re.sub(r"^error: |\S*plan\.json: ", "", text))
    return re.sub(r"true with \d+ micro", "true with N micro", re.sub(r"\[\d+\]", "[N]", text)).replace("|", "/")


def write_section(path, name, text):
    """Puts the text between the two markers of that name in a page."""
    page = path.read_text(encoding="utf-8")
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    head, rest = page.split(begin)
    path.write_text(head + begin + text + end + rest.split(end)[1], encoding="utf-8")


class Tally:
    """Counts outcomes; prints what is not good, with a command that shows it again."""

    def __init__(self, script):
        self.script, self.counts, self.bad, self.refusals = script, collections.Counter(), [], collections.Counter()

    def add(self, name, outcome, case):
        self.counts[outcome.kind] += 1
        if outcome.kind == "refused":
            self.refusals[reason_of(outcome.text.splitlines()[0])] += 1
        if outcome.is_good:
            return
        self.bad.append((name, outcome, case))
        print(f"{name}: {outcome.kind}: {outcome.text}\n    python3 {self.script} SHARDWRIGHT --case '{json.dumps(case)}'",
              flush=True)

    def page(self, framework, seeds):
        """A section of docs/conformance.md."""
        total = sum(self.counts.values())
        lines = [f"{framework}, {total} random cases ({seeds}): {self.summary()}.", ""]
        if self.refusals:
            lines += ["| refused by both, because | cases |", "|---|---|"]
            lines += [f"| {text} | {count} |" for text, count in sorted(self.refusals.items(), key=lambda r: (-r[1], r[0]))]
            lines.append("")
        if self.bad:
            lines += ["| not equal | outcome |", "|---|---|"]
            lines += [f"| {name} | {outcome.kind}: {outcome.text.splitlines()[0]} |" for name, outcome, _ in self.bad]
            lines.append("")
        return "\n".join(lines)

    def summary(self):
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))


def seeds_of(text):
    """Numbers of "0:10,13,20:25"."""
    found = []
    for part in text.split(","):
        first, _, end = part.partition(":")
        found += range(int(first), int(end) if end else int(first) + 1)
    return found


def outcomes_in(log):
    """Outcomes by the name of the case."""
    lines = log.read_text(encoding="utf-8").splitlines() if log and log.exists() else []
    return {name: Outcome(**outcome) for name, outcome in map(json.loads, lines)}


def main_of(arguments, module, framework, ci, deep, fixed=None, plain=None):
    """What the torch_*_random.py do: judge cases and shrink those that are not good. `module` has random_case(seed), judge(ours,
    pools, case) and smaller_cases(case); `ci` and `deep` are seeds, of which SHARDWRIGHT_DEEP takes the latter; `fixed` are cases by
    name, which run first; `plain` is what a case given as JSON may leave out. 0 when all cases are good."""
    name = pathlib.Path(module.__file__).name
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--seeds", default=deep if os.environ.get("SHARDWRIGHT_DEEP") else ci, help="such as 0:10,13,20:25")
    parser.add_argument("--case", help="one case as JSON")
    parser.add_argument("--fixed", choices=list(fixed or {}), help="one of the fixed cases")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--page", action="store_true", help="write the section of docs/conformance.md")
    parser.add_argument("--fake", action="store_true", help="rank 0 alone, with collectives that move nothing: for tests that compare no values")
    parser.add_argument("--log", type=pathlib.Path, help="a file of outcomes, a JSON line each, that grows; what is in it is not run again")
    options = parser.parse_args(arguments)
    cases = [*(fixed or {}).items(), *((f"seed {seed}", module.random_case(seed)) for seed in seeds_of(options.seeds))]
    if options.case:
        cases = [("case", {**(plain or {}), **json.loads(options.case)})]
    elif options.fixed:
        cases = [(options.fixed, fixed[options.fixed])]
    ours, tally = Shardwright(options.program), Tally(f"tests/schedule/{name}")
    known = outcomes_in(options.log)
    with Pools("fake" if options.fake else "gloo") as pools:
        for case_name, case in cases:
            if case_name in known:
                tally.add(case_name, known[case_name], case)
                continue
            outcome = module.judge(ours, pools, case)
            if not outcome.is_good and not options.no_shrink and not (fixed and case_name in fixed):
                case = shrink(case, lambda c: module.judge(ours, pools, c), module.smaller_cases)
                outcome = module.judge(ours, pools, case)
            tally.add(case_name, outcome, case)
            if options.log:
                with options.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps([case_name, dataclasses.asdict(outcome)]) + "\n")
    if options.page:
        about = f"{len(fixed)} fixed and the seeds {options.seeds}" if fixed else f"seeds {options.seeds}"
        write_section(pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "conformance.md", framework.split()[-1].lower(),
                      tally.page(framework, about))
    print(tally.summary())
    return 1 if tally.bad else 0
