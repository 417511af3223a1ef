"""Chakra execution traces: simulate --chakra writes what the real protocol buffers read, with the deps, sizes and groups of the program;
what these write as Chakra's converter of PyTorch's traces does is read.

    python3 tests/traces/chakra_test.py SHARDWRIGHT

The part of mlcommons/chakra's et_def.proto that is used is spelled out here.
"""

import gzip
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cli"))
try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

from shardwright_test_case import ShardwrightTestCase, main  # noqa: E402

F = descriptor_pb2.FieldDescriptorProto
ALL_REDUCE, REDUCE, ALL_GATHER, REDUCE_SCATTER = 0, 1, 2, 7
META, MEM_LOAD, MEM_STORE, COMP, COLLECTIVE = 1, 2, 3, 4, 7


def schema():
    """The messages AttributeProto, GlobalMetadata and Node."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    for name, number, kind in (("name", 1, F.TYPE_STRING), ("doc_string", 2, F.TYPE_STRING), ("int64_val", 9, F.TYPE_INT64),
                               ("uint64_val", 13, F.TYPE_UINT64), ("bool_val", 27, F.TYPE_BOOL), ("string_val", 29, F.TYPE_STRING)):
        field = attribute.field.add(name=name, number=number, type=kind, label=F.LABEL_OPTIONAL)
        if number > 2:
            field.oneof_index = 0
    metadata = file.message_type.add(name="GlobalMetadata")
    metadata.field.add(name="version", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    metadata.field.add(name="attr", number=2, type=F.TYPE_MESSAGE, label=3, type_name=".ChakraProtoMsg.AttributeProto")
    values = file.message_type.add(name="IOInfo")
    for name, number in (("values", 1), ("shapes", 2), ("types", 3)):
        values.field.add(name=name, number=number, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    node = file.message_type.add(name="Node")
    for name, number, kind, label in (("id", 1, F.TYPE_UINT64, 1), ("name", 2, F.TYPE_STRING, 1), ("type", 3, F.TYPE_INT32, 1),
                                      ("ctrl_deps", 4, F.TYPE_UINT64, 3), ("data_deps", 5, F.TYPE_UINT64, 3),
                                      ("start_time_micros", 6, F.TYPE_UINT64, 1), ("duration_micros", 7, F.TYPE_UINT64, 1)):
        node.field.add(name=name, number=number, type=kind, label=label)
    for name, number in (("inputs", 8), ("outputs", 9)):
        node.field.add(name=name, number=number, type=F.TYPE_MESSAGE, label=1, type_name=".ChakraProtoMsg.IOInfo")
    node.field.add(name="attr", number=10, type=F.TYPE_MESSAGE, label=3, type_name=".ChakraProtoMsg.AttributeProto")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in ("GlobalMetadata", "Node")]


METADATA, NODE = schema()


def messages(content):
    """Each behind its size, as a varint."""
    at = 0
    while at < len(content):
        size = shift = 0
        while True:
            byte = content[at]
            at += 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        yield content[at:at + size]
        at += size


def read(file):
    """(version, nodes with `attributes`)."""
    first, *rest = messages(file.read_bytes())
    nodes = []
    for content in rest:
        node = NODE.FromString(content)
        assert not list(unknown_fields.UnknownFieldSet(node))
        nodes.append((node, {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr}))
    return METADATA.FromString(first).version, nodes


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def attributes(message, values):
    for name, value in values.items():
        one = message.attr.add(name=name)
        setattr(one, "bool_val" if isinstance(value, bool) else "int64_val" if isinstance(value, int) else "string_val", value)


class Converted:
    """A file as src/converter/pytorch_converter.py of mlcommons/chakra writes it."""

    def __init__(self, schema="1.0.2-chakra.0.0.4"):
        metadata = METADATA()
        attributes(metadata, {"schema": schema, "pid": 7, "time": "2026-11-27 10:00:00"})
        self.messages = [metadata]

    def node(self, name, type_=COMP, start=0, duration=0, caller=None, needs=(), inputs="[]", **about):
        """Durations of the host's are without those of what they call."""
        number = len(self.messages)
        node = NODE(id=number, name=name, type=type_, start_time_micros=start, duration_micros=duration, data_deps=needs)
        node.ctrl_deps.extend([] if caller is None else [caller])
        node.inputs.values = inputs
        node.inputs.shapes, node.outputs.values = "[[2, 2]]", "[]"
        attributes(node, {"rf_id": number, "tid": 1, "op_schema": "", **about})
        self.messages.append(node)
        return number

    def host(self, name, start=0, duration=0, **more):
        return self.node(name, start=start, duration=duration, is_cpu_op=True, **more)

    def work(self, name, start, duration, caller, stream=7, **more):
        return self.node(name, start=start, duration=duration, caller=caller, is_cpu_op=False, stream=stream, **more)

    def content(self):
        return b"".join(varint(len(text)) + text for text in (message.SerializeToString() for message in self.messages))


def converted(times=True):
    """A gather of 4 ranks, a forward product, a backward one, a reduction, an update; a process group is initialized before."""
    file = Converted()
    at = (lambda start: start) if times else (lambda start: 0)
    file.node("## process_group:init ##", META, inputs=str(['[{"pg_name": "0", "pg_desc": "default_pg", "group_size": 4}]']), is_cpu_op=True)
    top = file.host("[pytorch|profiler|execution_trace|thread]")
    gather = file.host("c10d::_allgather_base_", at(1000), 10, caller=top, needs=[top])
    file.work("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", at(1010), 100, gather, 20, type_=COLLECTIVE, needs=[gather],
              comm_type=ALL_GATHER, comm_size=4096, pg_name="0")
    product = file.host("aten::mm", at(1010), 20, caller=top, needs=[gather])
    file.work("ampere_bf16_s16816gemm", at(1110), 50, product, needs=[product, product - 1])
    back = file.host("autograd::engine::evaluate_function: MmBackward0", at(1030), 5, caller=top, needs=[product])
    inner = file.host("aten::mm", at(1035), 15, caller=back, needs=[back])
    file.work("ampere_bf16_s16816gemm_tn", at(1160), 80, inner, needs=[inner, product + 1])
    reduction = file.host("c10d::_reduce_scatter_base_", at(1050), 10, caller=back, needs=[inner])
    file.work("ncclDevKernel_ReduceScatter_Sum_f32", at(1240), 120, reduction, 20, type_=COLLECTIVE, needs=[reduction, inner + 1],
              comm_type=REDUCE_SCATTER, comm_size=8192, pg_name="0")
    file.work("ncclDevKernel_Reduce", at(1360), 5, reduction, 20, type_=COLLECTIVE, needs=[reduction], comm_type=REDUCE, comm_size=8)
    update = file.host("Optimizer.step#AdamW.step", at(1060), 0, caller=top, needs=[reduction])
    adam = file.host("aten::_fused_adamw_", at(1060), 40, caller=update, needs=[update])
    file.work("multi_tensor_apply_kernel_adam", at(1360), 60, adam, needs=[adam, reduction + 1])
    return file


class Chakra(ShardwrightTestCase):

    def write(self, *flags):
        plan = self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--seq", "1024", "--dialect", "fsdp2", "--wrap", "block",
                            "--micro-batch", "8", *flags)
        predicted = json.loads(self.succeed("simulate", "-", "--chakra", "et", "--json", stdin=plan))
        ranks = sorted((self.folder / "et").glob("step.*.et"), key=lambda file: int(file.name.split(".")[1]))
        return predicted, [read(file) for file in ranks], json.loads((self.folder / "et" / "comm_groups.json").read_text())

    def test_nodes(self):
        predicted, traces, groups = self.write("--gpus", "4", "--shard", "2")
        self.assertEqual([version for version, _ in traces], ["0.0.4"] * 4)
        self.assertLessEqual({(0, 1), (2, 3), (0, 2), (1, 3)}, set(map(tuple, groups.values())))
        for rank, (_, nodes) in enumerate(traces):
            self.assertEqual([node.id for node, _ in nodes], list(range(len(nodes))))
            for node, about in nodes:
                self.assertTrue(all(need < node.id for need in (*node.ctrl_deps, *node.data_deps)))
                self.assertEqual(node.type == COLLECTIVE, "comm_type" in about)
                if node.type == COLLECTIVE:
                    self.assertIn(rank, groups[about["pg_name"]])
        collectives = [[(about["comm_type"], about["comm_size"]) for _, about in nodes if "comm_type" in about] for _, nodes in traces]
        self.assertTrue(all(row == collectives[0] for row in collectives))
        block = 12 * 768 * 768 + 13 * 768
        self.assertEqual(collectives[0].count((ALL_GATHER, block * 2 // 2)), 2 * 12)  # bf16, of a half; FSDP2 frees the last one, too
        self.assertEqual(collectives[0].count((REDUCE_SCATTER, block * 4)), 12)
        self.assertEqual(collectives[0].count((ALL_REDUCE, block * 4 // 2)), 12)
        self.assertAlmostEqual(max(node.start_time_micros + node.duration_micros for node, _ in traces[0][1]) / 1e6,
                               predicted["step_time_s"], delta=0.05 * predicted["step_time_s"])

    def test_the_graph_alone_gives_the_step(self):
        """Durations behind deps, as ASTRA-sim replays them: the step without what the host holds up."""
        predicted, traces, _ = self.write("--gpus", "8")
        ends = {}
        for node, _ in traces[0][1]:
            ends[node.id] = max((ends[need] for need in (*node.ctrl_deps, *node.data_deps)), default=0) + node.duration_micros
        self.assertLessEqual(max(ends.values()) / 1e6, 1.001 * predicted["step_time_s"])
        self.assertGreater(max(ends.values()) / 1e6, 0.9 * predicted["step_time_s"])
        flops = sum(about.get("num_ops", 0) for _, about in traces[0][1])
        self.assertGreater(flops, 8 * 1024 * 6 * 85e6)

    def test_offloaded(self):
        _, traces, _ = self.write("--gpus", "2", "--offload", "parameters")
        self.assertLessEqual({MEM_LOAD, MEM_STORE, COMP, COLLECTIVE}, {node.type for node, _ in traces[0][1]})

    def test_a_simulated_step_is_not_read_back(self):
        """Nothing in it was measured, and whole microseconds are less than a trace of `simulate --trace` says."""
        self.write("--gpus", "2")
        for words in (("inspect-trace", "et/step.0.et"), ("advise", "et")):
            self.assert_fails(3, "et/step.0.et: got a step that simulate --chakra wrote, expected what was measured; simulate --trace writes a "
                              "trace that is read back", *words)

    def inspected(self, file, name="rank.2.et"):
        (self.folder / name).write_bytes(file.content() if isinstance(file, Converted) else file)
        return json.loads(self.succeed("inspect-trace", name, "--json"))

    def check_converted(self, rows):
        self.assertEqual((rows["rank"], rows["kernels"], rows["collectives"]), (2, 3, 2))
        (step,) = rows["steps"]
        self.assertEqual({name: (row["pieces"], round(row["busy_s"] * 1e6)) for name, row in step["classes"].items()},
                         {"gemm": (2, 130), "all_gather": (1, 100), "reduce_scatter": (1, 120), "optimizer": (1, 60)})
        self.assertIn("work counts as issued by the op that called it", " ".join(rows["notes"]))
        self.assertIn("1 sends, receives and collectives of other kinds are left out", rows["notes"])
        return round(step["time_s"] * 1e6)

    def test_converted_with_start_times(self):
        rows = self.inspected(converted())
        self.assertEqual(self.check_converted(rows), 1420 - 1000)  # from the first call to the end of the update
        self.assertNotIn("no start times", " ".join(rows["notes"]))
        (self.folder / "packed.2.et").write_bytes(gzip.compress(converted().content()))
        self.assertEqual(json.loads(self.succeed("inspect-trace", "packed.2.et", "--json")), rows)

    def test_converted_without_start_times(self):
        """As the converter has it today: nodes begin as their dependencies allow. By hand: the gather is called at 0 and runs from 10
        to 110; products wait for it to 160 and 240; the reduction ends at 360, and the update at 420."""
        rows = self.inspected(converted(times=False))
        self.assertEqual(self.check_converted(rows), 420)
        self.assertIn("no start times: each node begins when what it depends on has ended", " ".join(rows["notes"]))

    def test_sizes_of_groups(self):
        """The full array of a gather is what each rank puts in, from each rank of the group; without its size it is not known."""
        file = converted()
        del file.messages[1]
        self.assertIn("1 all-gathers of groups whose size is not in the file: their bytes are not known", self.inspected(file)["notes"])
        self.assertNotIn("not known", " ".join(self.inspected(converted())["notes"]))

    def test_a_rank_needs_a_number(self):
        self.assertIn("no rank in the file's name (as in step.3.et): taken as rank 0", self.inspected(converted(), "mine.et")["notes"])

    def refused(self, message, content):
        (self.folder / "x.0.et").write_bytes(content.content() if isinstance(content, Converted) else content)
        code, out, error = self.run_program("inspect-trace", "x.0.et")
        self.assertEqual((code, out), (3, ""))
        self.assertIn(message, error)

    def test_errors(self):
        plan = self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-h100", "--nodes", "256", "--seq", "1024", "--micro-batch", "1")
        self.assert_fails(3, "--chakra: got 2048 ranks, expected at most 1024, a file each", "simulate", "-", "--chakra", "et", stdin=plan)
        self.refused("x.0.et: got an empty file, expected a Chakra execution trace", b"")
        self.refused("schema \"0.0.5\", expected schema 0.0.4", Converted("1.2.0-chakra.0.0.5"))
        self.refused("x.0.et: got no kernels, collectives or ops, expected a recording of training steps", Converted())
        whole = converted().content()
        self.refused(f"x.0.et: byte {len(whole) - 1}: got the end of the file, expected", whole[:-1])
        begin = len(Converted().content())
        # Message, field and byte by hand: a node of one field, each behind the metadata.
        damaged = {b"\x01\x0a": f"byte {begin + 2}: got node 0, field 1: a number that is cut off, expected a whole file",
                   b"\x03\x12\x05a": f"byte {begin + 3}: got node 0, field 2: 1 bytes, expected 5 bytes, as the field says",
                   b"\x02\x0a\x00": "node 0, field 1: no whole number, expected a whole number",
                   b"\x02\x10\x01": "node 0, field 2: a number, expected a text or message",
                   b"\x0b\x08" + b"\xff" * 9 + b"\x02": "node 0, field 1: a number of more than 64 bits",
                   b"\x02\x0b\x00": "node 0, field 1: wire type 3, expected a whole file",
                   b"\x02\x00\x00": "node 0, field 0: a field of number 0",
                   b"\xff\xff\xff\xff\x0f": "a message of more than 16 MiB",
                   b"\x80": f"byte {begin + 1}: got a size that is cut off",
                   b"\x09\x38" + varint(1 << 50): "node 0, field 7: 1125899906842624, expected at most 50 days",
                   b"\x02\x08\x05\x02\x08\x05": "node 1: got id 5, as an earlier node has, expected ids of their own"}
        for content, message in damaged.items():
            self.refused(message, Converted().content() + content)
        circle = Converted()
        circle.host("a", duration=1, needs=[2])
        circle.host("b", duration=1, needs=[1])
        self.refused("x.0.et: got dependencies that go round in a circle, expected a graph without circles", circle)


if __name__ == "__main__":
    main()
