"""shardwright hang on dumps that are written by hand: what is said about which fault, and what dumps of strangers may do."""

import json
import os
import pathlib
import pickle
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND  # 2023-11-14 22:13:20 UTC
FRAMES = {
    "forward": [("all_gather_into_tensor", "/lib/torch/distributed/distributed_c10d.py", 1),
                ("pre_forward", "/lib/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 2), ("forward", "/src/net.py", 15)],
    "backward": [("reduce_scatter_tensor", "/lib/torch/distributed/distributed_c10d.py", 3),
                 ("post_backward", "/lib/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 4), ("main", "/src/train.py", 20)],
    "": [("main", "/src/train.py", 30)],
}


def gather(elements, phase="forward", **more):
    return {"name": "nccl:_all_gather_base", "in": [[elements // 4]], "out": [[elements]], "phase": phase, **more}


def reduce(elements, **more):
    return {"name": "nccl:_reduce_scatter_base", "in": [[elements]], "out": [[elements // 4]], "phase": "backward", **more}


def sum_of(elements, **more):
    return {"name": "nccl:all_reduce", "in": [[elements]], "out": [[elements]], "phase": "", **more}


STEP = [gather(400), gather(80), gather(160), reduce(160), reduce(80), reduce(400)]


class HangTestCase(ShardwrightTestCase):

    def dump(self, rank, calls, ranks=(0, 1, 2, 3), done=None, started=0, first=1, form="pickle", at=100, version="2.4", **keys):
        """Writes one: calls a second apart, of which all but the last `done` have ended; written `at` seconds after the start."""
        entries, numbers = [], {}
        done = len(calls) - 1 if done is None else done
        for i, call in enumerate(calls):
            group = call.get("group", ("0", "default_pg"))
            numbers[group] = numbers.get(group, first - 1) + (0 if call.get("joined") else 1)
            created = START + int((call.get("time", i)) * SECOND)
            entries.append({
                "record_id": i, "pg_id": 0, "process_group": group, "collective_seq_id": numbers[group], "p2p_seq_id": 0, "op_id": i,
                "profiling_name": call["name"], "time_created_ns": created, "input_sizes": call["in"], "output_sizes": call["out"],
                "input_dtypes": [call.get("dtype", "BFloat16")], "output_dtypes": [call.get("dtype", "BFloat16")],
                "state": "completed" if i < done else "started" if i < started else "scheduled",
                "time_discovered_started_ns": created if i < max(done, started) else None,
                "time_discovered_completed_ns": created + SECOND // 2 if i < done else None,
                "retired": i < done, "timeout_ms": 600000, "is_p2p": False,
                "frames": [{"name": n, "filename": f, "line": l} for n, f, l in FRAMES[call["phase"]]]})
        content = {"version": version, "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(ranks))}},
                   "pg_status": {}, "entries": entries, **keys}
        file = self.folder / "dumps" / f"trace_{rank}{'.json' if form == 'json' else ''}"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(json.dumps(content).encode() if form == "json" else pickle.dumps(content, protocol=2))
        when = START / SECOND + at
        os.utime(file, (when, when))
        return file

    def hang(self, *flags):
        code, out, err = self.run_program("hang", "dumps", "--json", *flags)
        self.assertEqual(err, "")
        report = json.loads(out)
        self.assertEqual(code, 1 if report["findings"] else 0)
        return report["findings"]

    def four(self, *lists, **options):
        for rank, calls in enumerate(lists):
            self.dump(rank, calls, **options)


class Faults(HangTestCase):

    def test_healthy(self):
        self.four(STEP, STEP, STEP, STEP, done=6)
        self.assertEqual(self.succeed("hang", "dumps"), "no hang: ranks 0-3: 6 collectives of 1 process group are alike\n")

    def test_skipped(self):
        other = [*STEP[:2], *STEP[3:4]]
        self.four(STEP[:3], STEP[:3], STEP[:3], other)
        code, out, err = self.run_program("hang", "dumps")
        self.assertEqual((code, err), (1, ""))
        self.assertEqual(out, """\
rank 3 issued the reduce-scatter of 160 bf16 elements in backward (train.py:20 in main) in the place of the all-gather
  of 160 bf16 elements in forward (net.py:15 in forward); ranks 0-2 wait there since 2023-11-14 22:13:22.000 UTC

  process group  default_pg (0), 4 ranks, collective 3
  ranks 0-2      all-gather of 160 bf16 elements in forward (net.py:15 in forward), 2023-11-14 22:13:22.000 UTC
  rank 3         reduce-scatter of 160 bf16 elements in backward (train.py:20 in main), 2023-11-14 22:13:22.000 UTC
  before that    all-gather of 80 bf16 elements in forward (net.py:15 in forward), 2023-11-14 22:13:21.000 UTC

ranks 0-3: 2 collectives of 1 process group are alike
""")

    def test_skipped_after_a_step(self):
        # Now the first step tells what comes behind.
        good = [*STEP, *STEP[:3]]
        self.four(good, good, good, [*good[:8], STEP[3]])
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["collective"], finding["expected"]["elements"],
                          finding["expected"]["phase"], finding["skipped"]), ("skipped", [3], 9, 160, "forward", 1))

    def test_two_ranks_are_told_apart_by_the_step_before(self):
        good = [*STEP, *STEP[:3]]
        for guilty in (0, 1):
            lists = [good, good]
            lists[guilty] = [*good[:8], STEP[3]]
            self.four(*lists, ranks=(0, 1))
            finding, = self.hang()
            self.assertEqual((finding["kind"], finding["ranks"], finding["waiting"]), ("skipped", [guilty], [1 - guilty]))

    def test_undecided(self):
        self.four(STEP[:3], [*STEP[:2], STEP[3]], ranks=(0, 1))
        finding, = self.hang()
        self.assertEqual(finding["kind"], "undecided")
        self.assertTrue(finding["text"].endswith(", and nothing tells who is right"))

    def test_swapped(self):
        good = [*STEP, *STEP[:3]]
        self.four(good, [*good[:7], good[8], good[7]], good, good, done=7)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["expected"]["elements"], finding["found"]["elements"]),
                         ("swapped", [1], 80, 160))

    def test_extra(self):
        good = [*STEP, *STEP[:3]]
        self.four([*good[:7], sum_of(1)], good, good, good)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["found"]["op"], finding["found"]["site"], finding["waiting"]),
                         ("extra", [0], "all-reduce", "train.py:30 in main", [1, 2, 3]))

    def test_extra_at_the_end(self):
        self.four([*STEP, sum_of(1)], STEP, STEP, STEP, done=6)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["found"]["op"]), ("extra", [0], "all-reduce"))

    def test_other_size_dtype_and_op(self):
        good = [*STEP, *STEP[:2]]
        for call, kind in ((gather(84), "other_size"), (gather(80, dtype="Float"), "other_dtype"),
                           ({**gather(80), "name": "nccl:all_reduce"}, "other_op")):
            self.four(good, good, [*good[:7], call], good)
            finding, = self.hang()
            self.assertEqual((finding["kind"], finding["ranks"], finding["expected"]["elements"]), (kind, [2], 80))
        self.four(good, good, [*good[:7], gather(84)], good)
        self.assertIn("rank 2 issued the all-gather of 80 bf16 elements in forward (net.py:15 in forward) with 84 bf16 elements, the "
                      "others with 80 bf16 elements; ranks 0, 1 and 3 wait there since", self.hang()[0]["text"])

    def test_late(self):
        self.four(STEP[:3], STEP[:2], STEP[:3], STEP[:3], done=2)
        finding, = self.hang()
        self.assertEqual(finding["text"], "rank 1 has not come to the all-gather of 160 bf16 elements in forward (net.py:15 in "
                         "forward); ranks 0, 2 and 3 wait there since 2023-11-14 22:13:22.000 UTC")
        self.assertEqual(finding["last"]["issued"], "2023-11-14 22:13:21.000 UTC")
        # Its dump was written before the others came there: it may have come, too.
        self.dump(1, STEP[:2], done=2, at=1.9)
        self.assertEqual(self.hang(), [])
        self.dump(1, STEP[:2], done=2, at=5)
        self.assertEqual(self.hang(), [])
        self.assertEqual(self.hang("--patience", "2 s")[0]["ranks"], [1])

    def test_without_times(self):
        for rank, calls in enumerate((STEP[:3], STEP[:2])):
            file = self.dump(rank, calls, ranks=(0, 1), done=2)
            content = pickle.loads(file.read_bytes())
            for entry in content["entries"]:
                entry["time_created_ns"] = None
            file.write_bytes(pickle.dumps(content))
        finding, = self.hang()
        self.assertEqual(finding["text"], "rank 1 has not come to the all-gather of 160 bf16 elements in forward (net.py:15 in forward); "
                         "rank 0 waits there")
        self.assertIsNone(finding["since"])

    def test_a_dump_that_is_older_than_a_collective(self):
        self.four(STEP[:3], STEP[:2], STEP[:3], STEP[:3], done=3)  # with all ranks, or it would not have ended
        self.assertEqual(self.hang(), [])

    def test_a_rank_that_never_came(self):
        self.four(STEP[:1], [], STEP[:1], STEP[:1], done=0)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["collective"], finding["last"]), ("late", [1], 1, None))

    def test_no_dump(self):
        for rank in (0, 1, 3):
            self.dump(rank, STEP[:3])
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["waiting"]), ("no_dump", [2], [0, 1, 3]))
        self.assertEqual(finding["text"], "rank 2 left no dump: dead, or not among these files; the others are in the all-gather of 160 "
                         "bf16 elements in forward (net.py:15 in forward) since 2023-11-14 22:13:22.000 UTC")

    def test_no_dump_and_nobody_waits(self):
        for rank in (0, 1, 3):
            self.dump(rank, STEP, done=6)
        code, _, err = self.run_program("hang", "dumps")
        self.assertEqual((code, err), (0, "warning: some ranks left no dump, and nobody waits for them\n"))

    def test_all_wait(self):
        self.four(STEP[:3], STEP[:3], STEP[:3], STEP[:3])
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["waiting"]), ("all_wait", [0, 1, 2, 3]))
        self.assertTrue(finding["text"].startswith("ranks 0-3 all wait in the "), finding["text"])
        self.four(STEP[:3], STEP[:3], STEP[:3], STEP[:3], at=2.5)  # dumps of a job that goes on
        self.assertEqual(self.hang(), [])

    def test_the_first_that_does_not_end_of_a_queue(self):
        """NCCL's ranks queue collectives ahead: of four that nobody has ended the first is it."""
        self.four(STEP, STEP, STEP, STEP, done=2)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["collective"]), ("all_wait", 3))

    def test_a_gpu_that_has_not_started(self):
        """Rank 2 has queued it like the others, whose GPUs run it: its own GPU never came there."""
        self.four(STEP, STEP, STEP, STEP, done=2)
        for rank in (0, 1, 3):
            self.dump(rank, STEP, done=2, started=3)
        code, out, err = self.run_program("hang", "dumps")
        self.assertEqual((code, err), (1, ""))
        self.assertIn("rank 2 has issued the all-gather of 160 bf16 elements in forward", " ".join(out.split()))
        self.assertIn("but no GPU there has started it; ranks 0, 1 and 3 wait there", " ".join(out.split()))

    def test_a_skip_in_a_queue_is_no_swap(self):
        """AG RS AG RS against RS AG RS AG: what stands behind contradicts a swap."""
        pair = [gather(400), reduce(400)]
        self.four(pair * 3, pair * 3, [*pair, *(pair * 2)[1:], gather(400)], pair * 3, done=2)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"]), ("skipped", [2]))

    def test_who_is_held_in_another_group_is_not_late(self):
        # Shards (0, 1) and (2, 3), replicas (0, 2) and (1, 3). Rank 1 sleeps; 0 waits for it, 2 waits for 0, 3 for 1.
        mesh = {0: ("a", "d"), 1: ("a", "e"), 2: ("b", "d"), 3: ("b", "e")}
        config = {name: {"name": name, "desc": "mesh", "ranks": str(ranks)}
                  for name, ranks in (("a", [0, 1]), ("b", [2, 3]), ("d", [0, 2]), ("e", [1, 3]))}
        for rank, (shard, replicate) in mesh.items():
            calls = [gather(80, group=(shard, "mesh"))]
            if rank != 1:
                calls.append(reduce(80, group=(shard, "mesh")))
            if rank > 1:
                calls.append(sum_of(40, group=(replicate, "mesh")))
            self.dump(rank, calls, done={0: 1, 1: 1, 2: 2, 3: 2}[rank], pg_config=config)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["process_group"], finding["expected"]["op"]),
                         ("late", [1], "mesh (a)", "reduce-scatter"))

    def test_who_a_fault_has_ended_is_not_late(self):
        # The same groups. Rank 2 skips the second gather; what rank 3 got instead ended it and its gather, so rank 1 waits.
        mesh = {0: ("a", "d"), 1: ("a", "e"), 2: ("b", "d"), 3: ("b", "e")}
        config = {name: {"name": name, "desc": "mesh", "ranks": str(ranks)}
                  for name, ranks in (("a", [0, 1]), ("b", [2, 3]), ("d", [0, 2]), ("e", [1, 3]))}
        for rank, (shard, replicate) in mesh.items():
            step = [gather(80, group=(shard, "mesh")), gather(400, group=(shard, "mesh")), reduce(160, group=(shard, "mesh"))]
            calls = [*step, step[0], step[2] if rank == 2 else step[1]]
            if rank < 2:
                calls.append(sum_of(40, group=(replicate, "mesh")))
            self.dump(rank, calls, done={0: 5, 1: 5, 2: 4, 3: 5}[rank], pg_config=config)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["process_group"], finding["expected"]["op"], finding["waiting"]),
                         ("skipped", [2], "mesh (b)", "all-gather", [3]))

    def test_who_waits_first_does_not_hide_what_was_done(self):
        # Rank 0 issues another size, which ends it; rank 2, which was faster than rank 1, waits for it in the other group.
        mesh = {0: ("a", "d"), 1: ("a", "e"), 2: ("b", "d"), 3: ("b", "e")}
        config = {name: {"name": name, "desc": "mesh", "ranks": str(ranks)}
                  for name, ranks in (("a", [0, 1]), ("b", [2, 3]), ("d", [0, 2]), ("e", [1, 3]))}
        for rank, (shard, replicate) in mesh.items():
            step = [gather(80, group=(shard, "mesh")), gather(400, group=(shard, "mesh")), reduce(160, group=(shard, "mesh"))]
            calls = [*step, step[0], gather(404 if rank == 0 else 400, group=(shard, "mesh"), time=3.5 if rank > 1 else 4)]
            if rank > 1:
                calls.append(sum_of(40, group=(replicate, "mesh"), time=3.7))
            self.dump(rank, calls, done={0: 5, 1: 4, 2: 5, 3: 5}[rank], pg_config=config)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["process_group"], finding["waiting"]),
                         ("other_size", [0], "mesh (a)", [1]))

    def test_swapped_over_the_end_of_a_step(self):
        # The reduction is made up for in the next forward, so its stack says that.
        steps = [*STEP, *STEP, *STEP]
        self.four(*[[*steps, *STEP]] * 3, [*steps, *STEP[:5], STEP[0], reduce(400, phase="forward")])
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["collective"], finding["expected"]["op"]),
                         ("swapped", [3], 24, "reduce-scatter"))

    def test_old_entries_are_overwritten(self):
        for rank in range(4):
            self.dump(rank, STEP[rank:4] if rank != 2 else STEP[2:3], first=7 + rank, done=1 if rank == 2 else None)
        finding, = self.hang()
        self.assertEqual((finding["kind"], finding["ranks"], finding["collective"]), ("late", [2], 10))

    def test_calls_of_one_launch(self):
        calls = [*STEP[:2], gather(40), gather(40, joined=True), {**gather(0), "name": "nccl:coalesced", "joined": True}]
        self.four(calls, calls, calls, calls, done=5)
        self.assertEqual(self.hang(), [])

    def test_json(self):
        good = [*STEP, *STEP[:3]]
        other = [*good[:8], STEP[3]]
        self.four(good, good, good, other)
        expected = self.hang()
        for file in (self.folder / "dumps").iterdir():
            file.unlink()
        self.four(good, good, good, other, form="json")
        self.assertEqual(self.hang(), expected)


class Plan(HangTestCase):

    def test_neighbours_of_equal_size(self):
        # GPT-2: 12 equal blocks. Rows of the root are padded to 4 ranks: 50,260 + 1,024 of 768, and the norm.
        (self.folder / "plan.json").write_text(self.succeed(
            "plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "--dialect", "fsdp2", "--wrap", "block",
            "--precision", "fp32", "--micro-batch", "1", "--global-batch", "4", "--recompute", "none"))
        root = gather((50_260 + 1_024 + 2) * 768, dtype="Float")
        block = 12 * 768 * 768 + 13 * 768
        forward = [root, *[gather(block, dtype="Float")] * 12]
        backward = [gather(block, "backward", dtype="Float"), gather(block, "backward", dtype="Float"), reduce(block, dtype="Float")]
        good = [*forward, *backward]
        self.four(good[:13], [*forward[:12], backward[0]], good[:13], good[:13])
        finding, = self.hang("--plan", "plan.json")
        self.assertEqual((finding["kind"], finding["ranks"], finding["expected"]["phase"], finding["expected"]["micro_batch"]),
                         ("skipped", [1], "forward", 0))
        self.assertEqual([unit.rsplit(".", 1)[-1] for unit in finding["expected"]["units"]], [str(i) for i in range(12)])
        # The first of backward's reductions is the last block's: no other can be meant.
        self.four(good, [*good[:15], backward[0]], good, good)
        finding, = self.hang("--plan", "plan.json")
        self.assertEqual(([unit.rsplit(".", 1)[-1] for unit in finding["expected"]["units"]], finding["expected"]["op"]),
                         (["11"], "reduce-scatter"))


    def test_who_died_in_front_of_two_groups(self):
        # Shards (0, 1) and (2, 3), replicas (0, 2) and (1, 3). Rank 0 dies at a gather that is prefetched before a reduction; rank 2,
        # which was faster, waits for it in the sum behind that reduction long before rank 1 comes to the gather.
        (self.folder / "plan.json").write_text(self.succeed(
            "plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--shard", "2", "--seq", "128", "--dialect", "fsdp2",
            "--wrap", "block", "--precision", "fp32", "--micro-batch", "1", "--global-batch", "4", "--recompute", "none"))
        mesh = {1: ("a", "e"), 2: ("b", "d"), 3: ("b", "e")}
        config = {name: {"name": name, "desc": "mesh", "ranks": str(ranks)}
                  for name, ranks in (("a", [0, 1]), ("b", [2, 3]), ("d", [0, 2]), ("e", [1, 3]))}
        block = 12 * 768 * 768 + 13 * 768
        for done in (0, 14):  # gloo does not tell what ended
            for rank, (shard, replicate) in mesh.items():
                of_shard = {"dtype": "Float", "group": (shard, "mesh"), "time": 20 if rank == 1 else 15}
                calls = [gather((50_258 + 1_024 + 2) * 768, **of_shard), *[gather(block, **of_shard)] * 12,
                         *[gather(block, "backward", **of_shard)] * 2]
                if rank > 1:
                    calls += [reduce(block, **of_shard), sum_of(block // 2, dtype="Float", group=(replicate, "mesh"), time=17)]
                elif done:
                    calls.append(reduce(block, **of_shard))  # NCCL's collectives are issued ahead
                self.dump(rank, calls, done=min(done + 2 * (rank > 1), done * 2), pg_config=config)
            code, out, _ = self.run_program("hang", "dumps", "--json", "--plan", "plan.json")
            finding, = json.loads(out)["findings"]
            call = finding["expected"]
            self.assertEqual((code, finding["kind"], finding["ranks"], finding["waiting"]), (1, "no_dump", [0], [1]))
            self.assertEqual((call["op"], call["phase"], [unit.rsplit(".", 1)[-1] for unit in call["units"]]),
                             ("all-gather", "backward", ["10"]))


class Strangers(HangTestCase):

    def test_code(self):
        class Evil:
            def __reduce__(self):
                return os.system, ("touch stolen",)

        file = self.dump(0, STEP)
        for protocol in (2, 4):
            file.write_bytes(pickle.dumps({"version": "2.4", "entries": [Evil()]}, protocol=protocol))
            code, out, err = self.run_program("hang", "dumps")
            self.assertEqual((code, out), (3, ""))
            self.assertIn("a pickle that runs code", err)
            self.assertIn("expected a dump of PyTorch's Flight Recorder, version 2; nothing of it was run\n", err)
        self.assertFalse((self.folder / "stolen").exists())

    def test_errors(self):
        file = self.dump(0, STEP)
        content = pickle.loads(file.read_bytes())
        rule = "expected a dump of PyTorch's Flight Recorder, version 2"
        entry = content["entries"][0]
        for change, error in (
                ({"version": "3.0"}, 'version: got "3.0"'), ({"version": 2}, "version: got a value of another type"),
                ({"entries": 1}, "entries: got a value of another type"), ({"entries": [1]}, "entries: got an entry that is no dictionary"),
                ({"entries": [{**entry, "process_group": ("0",)}]}, "process_group: got something else than a name and a description"),
                ({"entries": [{**entry, "collective_seq_id": "1"}]}, "collective_seq_id: got a value of another type"),
                ({"entries": [{**entry, "collective_seq_id": 1 << 62}]}, "collective_seq_id: got 4611686018427387904"),
                ({"entries": [{**entry, "input_sizes": [[1 << 40, 1 << 40]]}]}, "input_sizes: got sizes that no tensor has"),
                ({"entries": [{**entry, "frames": [1]}]}, "frames: got a frame that is no dictionary"),
                ({"pg_config": {"0": {"ranks": "[99999999999]"}}}, "pg_config: got a rank that is too large")):
            file.write_bytes(pickle.dumps({**content, **change}, protocol=4))
            self.assert_fails(3, f"dumps/trace_0: {error}, {rule}", "hang", "dumps/trace_0")
        for text, error in ((b"", f"dumps/trace_0: got an empty file, {rule}"), (b"hello", f"dumps/trace_0: got something else, {rule}")):
            file.write_bytes(text)
            self.assert_fails(3, error, "hang", "dumps/trace_0")
        (self.folder / "trace").write_bytes(b"")
        self.assert_fails(3, "trace: got a name without a rank, expected one that ends with its rank, such as nccl_trace_rank_0",
                          "hang", "trace")
        self.assert_fails(3, f"nowhere: got no file and no folder, {rule}", "hang", "nowhere")
        (self.folder / "none").mkdir()
        self.assert_fails(3, "none: got a folder without dumps, expected files whose names end with their rank, such as "
                          "nccl_trace_rank_0", "hang", "none")
        self.dump(1, STEP)
        other = self.dump(1, STEP, form="json")
        other.rename(other.with_name("other_1.json"))
        self.assert_fails(3, "dumps/trace_1: got rank 1, as dumps/other_1.json has, expected one dump per rank",
                          "hang", "dumps/trace_1", "dumps/other_1.json")

    def test_costs(self):
        file = self.dump(0, STEP)
        content = pickle.loads(file.read_bytes())
        shared = [1]
        for _ in range(40):
            shared = [shared, shared]
        lists = [[1] * 1000] * 1000
        for change in ({"entries": [{**content["entries"][0], "input_sizes": lists}] * 1000},
                       {"entries": [content["entries"][0]] * 2_000_000}):
            file.write_bytes(pickle.dumps({**content, **change, "x": shared}, protocol=4))
            begin = time.monotonic()
            code, out, err = self.run_program("hang", "dumps")
            self.assertEqual((code, out, err.count("\n")), (3, "", 1))
            self.assertLess(time.monotonic() - begin, 60)
        file.write_bytes(b"\x80\x02X" + struct.pack("<I", 0x7fffffff))
        self.assertIn("a text of 2147483647 bytes", self.run_program("hang", "dumps")[2])

    def test_names(self):
        evil = "\x1b[31m\r\n\u202egroup"
        good = [*STEP, *STEP[:2]]
        for rank in range(4):
            calls = [{**call, "group": (evil, evil), "name": "nccl:" + evil, "phase": ""} for call in good]
            if rank == 2:
                calls[-1]["name"] = "nccl:" + evil + "other"
            file = self.dump(rank, calls, pg_config={evil: {"name": evil, "desc": evil, "ranks": "[0, 1, 2, 3]"}})
            content = pickle.loads(file.read_bytes())
            for entry in content["entries"]:
                entry["frames"] = [{"name": evil, "filename": "/src/" + evil, "line": 1}]
            file.write_bytes(pickle.dumps(content, protocol=2))
        for flags in ((), ("--json",)):
            code, out, _ = self.run_program("hang", "dumps", *flags)
            self.assertEqual(code, 1)
            self.assertFalse({"\x1b", "\r", "\u202e"} & set(out))
            self.assertIn("u001b[31m", out)


class Logs(ShardwrightTestCase):
    """Lines of PyTorch's watchdog and of ncclras, where no dump was written. Forms of three public reports, with other numbers."""

    @staticmethod
    def timeout(rank, number, op, numel_in, numel_out, group="[PG 1 Rank {}]", queued=None):
        """What a rank prints as it gives up, in the form of 2024 and 2025."""
        name = group.format(rank)
        return (f"[rank{rank}]:[E321 02:07:08.408 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
                f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={numel_in}, NumelOut={numel_out}, Timeout(ms)=600000) ran for 600060 "
                "milliseconds before timing out.\n"
                f"[rank{rank}]:[E321 02:07:08.465 ProcessGroupNCCL.cpp:1664] {name} Exception (either an error or timeout) detected by "
                f"watchdog at work: {number}, last enqueued NCCL work: {queued or number + 2}, last completed NCCL work: {number - 1}.\n")

    def hang(self, text, *more):
        (self.folder / "job.log").write_text(text, encoding="utf-8")
        code, out, err = self.run_program("hang", "job.log", *more, "--json")
        self.assertIn(code, (0, 1), err)
        return json.loads(out)

    def test_all_ranks_in_one_all_reduce(self):
        """LlamaFactory 7396: every rank gives up in the same all-reduce, with two more queued behind."""
        found = self.hang("".join(self.timeout(r, 1580, "ALLREDUCE", 466119168, 466119168) for r in range(8)))["findings"]
        self.assertEqual([(f["kind"], f["ranks"], f["collective"]) for f in found], [("all_wait", list(range(8)), 1580)])
        self.assertIn("all-reduce of 466,119,168 elements", found[0]["text"])

    def test_a_silent_rank(self):
        """LlamaFactory 6269: a reduce-scatter of FSDP in which rank 2 says nothing, as its host never came there."""
        log = "".join(self.timeout(r, 7753, "_REDUCE_SCATTER_BASE", 544997376, 68124672) for r in range(8) if r != 2)
        found = self.hang("loading\n" + log)["findings"]
        self.assertEqual([(f["kind"], f["ranks"], f["waiting"]) for f in found], [("no_dump", [2], [0, 1, 3, 4, 5, 6, 7])])

    def test_ranks_that_are_not_in_the_log(self):
        """Sizes of input and output tell how many ranks a group has; those of an all-reduce do not, and that is said."""
        line = lambda rank: self.timeout(rank, 7753, "_REDUCE_SCATTER_BASE", 16 * 4096, 4096)
        found = self.hang("".join(line(r) for r in range(15)))["findings"]
        self.assertEqual([(f["kind"], f["ranks"]) for f in found], [("no_dump", [15])])
        found = self.hang(line(3))["findings"]
        self.assertEqual([(f["kind"], f["ranks"]) for f in found], [("no_dump", [r for r in range(16) if r != 3])])
        # Two groups of hybrid sharding: rank 12 is of the second one, and the first is whole.
        log = "".join(self.timeout(r, 9, "_REDUCE_SCATTER_BASE", 8 * 4096, 4096, f"[PG ID 1 PG GUID {3 + r // 8} Rank {{}}]")
                      for r in range(16) if r != 12)
        found = self.hang(log)["findings"]
        self.assertEqual([(f["process_group"], f["kind"], f["ranks"]) for f in found],
                         [("ID 1 PG GUID 4", "no_dump", [12]), ("ID 1 PG GUID 3", "all_wait", list(range(8)))])
        report = self.hang("".join(self.timeout(r, 9, "ALLREDUCE", 8, 8) for r in range(3)))
        self.assertEqual([f["text"].split(" wait in ")[0] for f in report["findings"]], ["ranks 0-2 all"])
        self.assertIn("a log does not say how many ranks the job has", report["notes"][0])

    def test_a_log_for_each_rank(self):
        """As torchrun writes them: the rank at fault has a log, which says nothing."""
        for rank in range(4):
            text = "step 8\n" + ("" if rank == 1 else self.timeout(rank, 9, "ALLREDUCE", 8, 8))
            (self.folder / f"{rank}.log").write_text(text, encoding="utf-8")
        code, out, err = self.run_program("hang", *(f"{rank}.log" for rank in range(4)), "--json")
        self.assertEqual(code, 1, err)
        self.assertEqual([(f["kind"], f["ranks"]) for f in json.loads(out)["findings"]], [("no_dump", [1])])

    def test_ranks_at_different_collectives(self):
        """PyTorch 118369, of a release without sizes: rank 7 is 32,000 collectives behind."""
        line = ("[E ProcessGroupNCCL.cpp:458] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, "
                "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800887 milliseconds before timing out.\n")
        log = "".join(line.format(r, 96117) for r in range(7)) + line.format(7, 64088) + line.format(0, 96120)
        found = self.hang(log)["findings"]
        self.assertEqual([(f["kind"], f["ranks"], f["collective"]) for f in found], [("late", [7], 96117)])

    def test_one_rank_with_another_size_and_one_with_another_collective(self):
        ranks = [self.timeout(r, 31, "_ALLGATHER_BASE", 100, 400) for r in (0, 1, 3)]
        found = self.hang("".join(ranks) + self.timeout(2, 31, "_ALLGATHER_BASE", 25, 100))["findings"]
        self.assertEqual([(f["kind"], f["ranks"]) for f in found], [("other_size", [2])])
        found = self.hang("".join(ranks) + self.timeout(2, 31, "ALLREDUCE", 1, 1))["findings"]
        self.assertEqual([(f["kind"], f["ranks"], f["found"]["op"]) for f in found], [("other_op", [2], "all-reduce")])

    def test_groups_apart(self):
        """A mesh's inner group differs, the outer one only waits: the first is told first."""
        log = "".join(self.timeout(r, 9, "ALLREDUCE", 64, 64, "[PG ID 0 PG GUID 0(default_pg) Rank {}]") for r in (0, 1, 2, 3))
        log += self.timeout(0, 5, "ALLREDUCE", 8, 8, "[PG ID 2 PG GUID 7(mesh_shard) Rank {}]")
        log += self.timeout(1, 5, "ALLREDUCE", 8, 8, "[PG ID 2 PG GUID 7(mesh_shard) Rank {}]")
        log += self.timeout(2, 5, "BROADCAST", 8, 8, "[PG ID 2 PG GUID 7(mesh_shard) Rank {}]")
        found = self.hang(log)["findings"]
        self.assertEqual([(f["kind"], f["process_group"]) for f in found],
                         [("other_op", "ID 2 PG GUID 7(mesh_shard)"), ("all_wait", "ID 0 PG GUID 0(default_pg)")])

    def test_a_plan_names_the_unit(self):
        """All blocks of GPT-2 have one size: any of them may be meant."""
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128", "--no-search", "-o", "plan.json")
        plan = json.loads((self.folder / "plan.json").read_text())
        self.assertEqual(plan["plan"]["units"][0]["name"], "transformer.h.0")
        # A block of GPT-2: 12 d^2 + 13 d of d = 768.
        block = 12 * 768 * 768 + 13 * 768
        log = "".join(self.timeout(r, 40, "_ALLGATHER_BASE", block // 4, block) for r in range(4))
        finding = self.hang(log, "--plan", "plan.json")["findings"][0]
        self.assertEqual(finding["expected"]["units"], [f"transformer.h.{i}" for i in range(12)])
        self.assertIn("ranks 0-3 all wait in the all-gather of transformer.h.0-11 ", finding["text"] + " ")
        log = "".join(self.timeout(r, 40, "ALLREDUCE", 8, 8) for r in range(8))
        self.assertIn("the plan has 4 ranks, the log 8: it is not the plan of this job", self.hang(log, "--plan", "plan.json")["notes"])

    def test_a_log_of_many_groups_is_told_in_part(self):
        """3,000 groups, of each of which 131,071 ranks are silent: told are 2^20 members, that is 9 groups."""
        log = "".join(self.timeout(131071, 1 << 52, "ALLREDUCE", 1, 1, f"[PG {group} Rank {{}}]") for group in range(3000))
        self.assertEqual(len(self.hang(log)["findings"]), 9)

    def test_lines_that_are_not_understood_are_no_all_clear(self):
        for text in ("WorkNCCL(SeqNum=x, OpType=ALLREDUCE\n", "[rank0]: WorkNCCL(OpType=ALLREDUCE)\n",
                     "7 ranks have launched up to operation 64\n", "Missing communicator data from 1 rank\n"):
            (self.folder / "job.log").write_text(text, encoding="utf-8")
            code, out, err = self.run_program("hang", "job.log")
            self.assertEqual((code, out), (3, ""))
            self.assertIn("error: job.log: got lines of a hang without their rank or number, expected those of PyTorch's watchdog", err)

    def test_ncclras(self):
        """Two counts of operations, and a communicator of which a rank is not there; in NCCL's form, with other numbers."""
        head = "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        late = head + ("#0-0 (27a0) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
                       "  7 ranks have launched up to operation 64\n"
                       "  Rank 5 has launched up to operation 60 -- GPU 3 managed by process 16 on node b\n")
        found = self.hang(late)["findings"]
        self.assertEqual([(f["kind"], f["ranks"], f["collective"], f["expected"]["op"]) for f in found], [("late", [5], 61, "all-reduce")])
        self.assertEqual(found[0]["waiting"], [0, 1, 2, 3, 4, 6, 7])
        two = head + ("#0-0 (27a0) MISMATCH\n  Communicator ranks have different collective operation counts\n"
                      "  6 ranks have launched up to operation 50\n  2 ranks have launched up to operation 49\n"
                      "  Rank 0 -- GPU 0 managed by process 48 on node a\n  Rank 3 -- GPU 3 managed by process 49 on node a\n")
        self.assertEqual([f["ranks"] for f in self.hang(two)["findings"]], [[0, 3]])
        gone = head + "#1-0 (27a1) INCOMPLETE\n  Missing communicator data from 1 rank\n  The missing rank: 21\n"
        self.assertEqual([(f["kind"], f["ranks"]) for f in self.hang(gone)["findings"]], [("no_dump", [21])])


if __name__ == "__main__":
    main()
