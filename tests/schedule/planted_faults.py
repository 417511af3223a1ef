"""Planted faults: each of these changes of the lowering rules is found by a test that `ci` runs.

    python3 tests/schedule/planted_faults.py [--only 3,7] [--folder FOLDER] [--check]

A copy of the tree gets all faults at once, each behind a switch: SHARDWRIGHT_PLANTED in the environment says which one is on, so one
build serves them all. Without any, the tests pass; with one, they run until one fails. Prints a table of which test found what.
--check only looks for the place of each.
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "mutation"))
import switched_tree  # noqa: E402
Fault = collections.namedtuple("Fault", "name file old new")
GATHERS, REDUCTIONS, HOOKS = (f"schedule/lower/fsdp2{part}.cc" for part in ("_gathers", "_reductions", ""))
FSDP1, FLAT = "schedule/lower/fsdp1.cc", "schedule/lower/flat_rules.cc"


def dropped(name, file, statement):
    return Fault(name, file, statement, f"if (!IsPlanted()) {{ {statement} }}")


def instead(name, file, old, new, around="{}"):
    """An expression in place of another, with what stands around it."""
    return Fault(name, file, around.format(old), around.format(f"(IsPlanted() ? ({new}) : ({old}))"))


FAULTS = [
    dropped("fsdp2: the copy-out does not wait for its gather", GATHERS, "e_.After(c.gathered);"),
    dropped("fsdp2: a unit stays gathered after forward", HOOKS, "ReshardUnit(u, phase);"),
    dropped("fsdp2: no forward prefetch", HOOKS, "Prefetch(PlanOf(u).forward_prefetch, phase);"),
    instead("fsdp2: backward prefetches the unit that left last", HOOKS, "position - 1", "order_.size() - 1", "order_[{}]"),
    instead("fsdp2: of units that end together the outer one gathers first", HOOKS, "i", "hooked_.size() - 1 - i",
            "BeginBackward(hooked_[{}]);"),
    dropped("fsdp2: a unit stays gathered after its backward", REDUCTIONS, "FreeUnsharded(u);"),
    dropped("fsdp2: two reduce-scatters in flight", REDUCTIONS,
            "e_.AddWait(Stream::kCompute, {reduce_done_}, Phase::kBackward, u.value);"),
    instead("fsdp2: replicas reduce in every micro-batch", REDUCTIONS, "last_micro_batch_", "true",
            "(plan_.sync != SyncMode::kReplicateLast || {})"),
    instead("fsdp2: units without a hook reduce in the order of the list", HOOKS,
            "spans.first_module[u.value]", "u.value", "ends_with(kSecondRoot) ? 0 : {};"),
    dropped("fsdp2: each call of a unit gathers another one ahead", HOOKS, "c.state = State::kPreBackward;"),
    instead("fsdp2: what was gathered goes before the next gather", GATHERS, "phase != Phase::kBackward", "false",
            "if ({}) {{\n    parked_ = c.gather_out;"),
    instead("fsdp1: three frees may be outstanding", FSDP1, "kLimit", "kLimit + 1", "free_events_.size() >= {}"),
    instead("fsdp1: no prefetch in backward", FSDP1, "plan_.backward_prefetch == BackwardPrefetch::kPre", "false", "if ({})"),
    instead("fsdp1: a second call takes the place of the first", FSDP1, "handle.place == 0", "true", "if ({})"),
    instead("fsdp1: without a reduction all units are freed", FSDP1, "Syncs()", "true", "return {} || IsFullShard(u)"),
    instead("fsdp1: a unit stays gathered after forward", FSDP1, "Reshards(u)", "false",
            "if ({}) {{\n      FreeUnsharded(u);\n    }}\n    const Call& call"),
    dropped("fsdp1: a selective checkpoint sees no gathers", FSDP1, "hooks_.See(u, HookCall::kAllGather);"),
    dropped("fsdp1: frozen units end with the whole backward", FSDP1, "frozen_ends_[first].push_back(u);"),
    instead("recomputation: before the hooks of the units inside", "schedule/lower/walker_backward.cc",
            "StopsEarly()", "false", "const bool hooks_first = {};"),
    instead("recomputation: begins at the first op with a backward", "schedule/lower/walker.cc", "keeps", "facts.has_backward",
            "  return {};\n}}\n\n// For each region, from its end: the first op that starts it"),
    dropped("ddp: buckets in the order of forward", "schedule/lower/ddp_buckets.cc", "std::reverse(order.begin(), order.end());"),
    instead("zero: a bucket is sent before it is full", "schedule/lower/zero12.cc", "plan_.zero.reduce_bucket",
            "plan_.zero.reduce_bucket / 2", "elements_ + elements > {}"),
    instead("gradients flow on through what stops them", "models/totals.cc", "!model.SpecOf(op).other.stops_gradient", "true",
            "reaches[i] = reaches[i] && {};"),
    dropped("zero: what runs again beneath a module is not kept for it", "schedule/lower/zero3_calls.cc",
            "backward_.push_back({module, {}});"),
]
SWITCH = """#pragma once

#include <cstdlib>

namespace shardwright {

inline int PlantedFault() {
  static const int fault = [] {
    const char* text = std::getenv("SHARDWRIGHT_PLANTED");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  return fault;
}

}  // namespace shardwright
"""
# What ci runs, cheapest first.
PROGRAMS = ["sw_schedule_test", "sw_lower_random_test", "sw_schedule_verify_test"]
SCRIPTS = ["torch_fsdp2_order.py", "torch_fsdp2_random.py", "torch_fsdp1_random.py", "torch_ddp_random.py", "torch_zero_random.py"]


def misplaced():
    """Faults whose text the tree does not have exactly once."""
    counts = [(fault, (REPOSITORY / fault.file).read_text(encoding="utf-8").count(fault.old)) for fault in FAULTS]
    return [f"{fault.file}: {count} times instead of once: {fault.old}" for fault, count in counts if count != 1]


def plant(folder):
    """All faults, behind their switches."""
    (folder / "schedule" / "lower" / "planted_fault.h").write_text(SWITCH, encoding="utf-8")
    for number, fault in enumerate(FAULTS, 1):
        path = folder / fault.file
        text = path.read_text(encoding="utf-8").replace(fault.old, fault.new.replace("IsPlanted()", f"(PlantedFault() == {number})"))
        if "planted_fault.h" not in text:
            text = text.replace("#include \"", "#include \"schedule/lower/planted_fault.h\"\n#include \"", 1)
        path.write_text(text, encoding="utf-8")


def build(folder):
    switched_tree.configure(folder)
    subprocess.run(["cmake", "--build", "build", "-j2", "--target", "shardwright", *PROGRAMS], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)


def tests(folder):
    """Name and command of each."""
    for program in PROGRAMS:
        yield program, [str(folder / "build" / "tests" / "schedule" / program), "--abort-after=1"]
    for script in SCRIPTS:
        yield script, [sys.executable, str(folder / "tests" / "schedule" / script), str(folder / "build" / "shardwright")]


def finder(folder, number):
    """The test, and in it the case, that fails with this fault; empty: none."""
    for name, command in tests(folder):
        result = subprocess.run(command, cwd=folder / "tests", capture_output=True, text=True, check=False,
                                env={**os.environ, "SHARDWRIGHT_PLANTED": str(number)})
        if result.returncode not in (0, 77):
            output = result.stdout + result.stderr
            case = re.search(r"TEST CASE: *(.*)", output) or re.search(r"^(.*?): ", output, re.M)
            return f"{name}: {case.group(1).strip() if case else f'exit code {result.returncode}'}"
    return ""


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of faults, from 1")
    parser.add_argument("--folder", type=pathlib.Path, help="where the copy is made; default: a temporary one")
    parser.add_argument("--check", action="store_true", help="only look for the place of each fault")
    options = parser.parse_args(arguments)
    numbers = [int(n) for n in options.only.split(",")] if options.only else range(1, len(FAULTS) + 1)
    if lost := misplaced():
        sys.exit("\n".join(lost))
    if options.check:
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary)
        switched_tree.copy_tree(folder)
        plant(folder)
        build(folder)
        if clean := finder(folder, 0):
            sys.exit(f"fails without any fault: {clean}")
        print("| fault | found by |\n|---|---|")
        found = []
        for number in numbers:
            found.append(finder(folder, number))
            print(f"| {FAULTS[number - 1].name} | {found[-1] or 'none'} |", flush=True)
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
