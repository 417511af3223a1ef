"""200 jobs with one fault each, run by a small model of NCCL: hang names kind and rank, or says that it cannot tell.

Each rank's host queues collectives ahead of its GPU, whose one stream runs them in order. A collective ends when the GPUs of all its
group are at it with the same operation and size. A shard group is part of a mesh whose replicas add gradients up once a step.
"""

import collections
import json
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from hang_test import HangTestCase, gather, reduce, sum_of
from shardwright_test_case import main

FAULTS = ("skipped", "swapped", "other_op", "other_size", "late", "never_started", "no_dump")
JOBS = 200
# What hang calls each: a GPU that has not started is late.
NAMES = {"skipped": {"skipped"}, "swapped": {"swapped"}, "other_op": {"other_op"}, "other_size": {"other_size"}, "late": {"late"},
         "never_started": {"late"}, "no_dump": {"no_dump"}}


class Job:
    """The calls of each rank, with a fault in one, and how far hosts and GPUs come."""

    def __init__(self, rng, fault):
        self.shard = rng.choice((2, 4, 8, 16))
        self.replicas = rng.choice((1, 1, 2, 4)) if self.shard <= 16 else 1
        self.world = self.shard * self.replicas
        sizes = [rng.randrange(50, 5000) * self.shard for _ in range(rng.randint(2, 6))]
        step = [gather(n) for n in sizes]
        for n in reversed(sizes):
            step += [gather(n, "backward"), reduce(n)]
        self.groups = {f"s{i}": list(range(i * self.shard, (i + 1) * self.shard)) for i in range(self.replicas)}
        self.groups |= {f"r{i}": list(range(i, self.world, self.shard)) for i in range(self.shard) if self.replicas > 1}
        steps = rng.randint(2, 4)
        # Somewhere in the last step but its end, where calls of the shard group follow.
        self.guilty = rng.randrange(self.world)
        at = (steps - 1) * len(step) + rng.randint(1, len(step) - 3)
        self.calls = []
        for rank in range(self.world):
            mine = [dict(call, group=(f"s{rank // self.shard}", "mesh_shard")) for call in step]
            if self.replicas > 1:
                mine.append(dict(sum_of(sum(sizes)), group=(f"r{rank % self.shard}", "mesh_replicate")))
            # Changed below: each has its own list.
            self.calls.append([dict(call) for _ in range(steps) for call in mine])
        per_step = len(self.calls[0]) // steps
        at = (steps - 1) * per_step + at % len(step)
        self.stops = {}
        self.stuck = {}
        self.apply(fault, rng, self.calls[self.guilty], at)
        # How many calls a host is ahead: not beyond its step, since the loss is read there.
        self.ahead = {rank: rng.randint(4, 9) for rank in range(self.world)}
        self.run()

    def apply(self, fault, rng, mine, at):
        def same(a, b):
            return (a["name"], a["out"]) == (b["name"], b["out"])

        if fault in ("skipped", "swapped"):
            while same(mine[at], mine[at + 1]):  # two alike in a row: nothing differs there
                at -= 1
        if fault == "skipped":
            del mine[at]
        elif fault == "swapped":
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
        elif fault == "other_op":
            mine[at] = dict(mine[at], name="nccl:broadcast")
            mine[at]["in"] = mine[at]["out"]
        elif fault == "other_size":
            more = self.shard * rng.randint(1, 40)
            gives = "in" if "reduce_scatter" in mine[at]["name"] else "out"
            mine[at] = dict(mine[at], **{gives: [[mine[at][gives][0][0] + more]]})
        elif fault == "never_started":
            self.stuck[self.guilty] = at
        else:
            self.stops[self.guilty] = at

    def run(self):
        """Where each GPU stands in the end."""
        self.heads = [0] * self.world
        numbers = [collections.Counter() for _ in range(self.world)]
        moved = True
        while moved:
            moved = False
            for members in self.groups.values():
                fronts = [self.front(rank) for rank in members]
                if any(front is None for front in fronts):
                    continue
                names = {front["group"][0] for front in fronts}
                kinds = {(front["name"], str(front["out"]), str(front["in"])) for front in fronts}
                if names == {self.name_of(members)} and len(kinds) == 1 and len({numbers[r][next(iter(names))] for r in members}) == 1:
                    for rank in members:
                        numbers[rank][next(iter(names))] += 1
                        self.heads[rank] += 1
                    moved = True

    def name_of(self, members):
        return next(name for name, ranks in self.groups.items() if ranks == members)

    def front(self, rank):
        """The call that a rank's GPU is at; None: there is none, or it does not come there."""
        head = self.heads[rank]
        is_away = head >= len(self.calls[rank]) or head >= self.stops.get(rank, 1 << 30) or head >= self.stuck.get(rank, 1 << 30)
        return None if is_away else self.calls[rank][head]

    def issued(self, rank):
        return self.calls[rank][:min(self.heads[rank] + 1 + self.ahead[rank], self.stops.get(rank, 1 << 30))]


class Generated(HangTestCase):

    def test_each_fault(self):
        rng = random.Random(49)
        outcomes = collections.Counter()
        for number in range(JOBS):
            fault = FAULTS[number % len(FAULTS)]
            job = Job(rng, fault)
            config = {name: {"name": name, "desc": "mesh_shard" if name[0] == "s" else "mesh_replicate", "ranks": str(ranks)}
                      for name, ranks in job.groups.items()}
            for file in (self.folder / "dumps").glob("*"):
                file.unlink()
            for rank in range(job.world):
                if fault == "no_dump" and rank == job.guilty:
                    continue
                head = job.heads[rank]
                self.dump(rank, job.issued(rank), done=head, started=head + (0 if rank in job.stuck else 1), at=1000, pg_config=config)
            code, out, err = self.run_program("hang", "dumps", "--json")
            self.assertEqual((code, err), (1, ""), (number, fault))
            first = json.loads(out)["findings"][0]
            is_right = first["kind"] in NAMES[fault] and first["ranks"] == [job.guilty]
            outcome = "right" if is_right else "cannot tell" if first["kind"] == "undecided" else "wrong"
            outcomes[outcome] += 1
            if outcome == "wrong":
                print(number, fault, f"{job.shard} x {job.replicas}", job.guilty, first["kind"], first["ranks"], first["text"], file=sys.stderr)
        self.assertEqual(outcomes["wrong"], 0, outcomes)
        self.assertGreaterEqual(outcomes["right"], 0.95 * JOBS, outcomes)
        print(dict(outcomes))


if __name__ == "__main__":
    main()
