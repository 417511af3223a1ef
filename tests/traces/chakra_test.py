"""Chakra execution traces: simulate --chakra writes what the real protocol buffers read, with the deps, sizes and groups of the program.

    python3 tests/traces/chakra_test.py SHARDWRIGHT

The part of mlcommons/chakra's et_def.proto that is used is spelled out here.
"""

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

    def test_files_are_not_read(self):
        """Neither our own nor a converter's: what they come from says more. A folder of traces has none in them."""
        self.write("--gpus", "2")
        (self.folder / "x.et").write_bytes(b"\x07\x0a\x050.0.4")
        for name in ("et/step.0.et", "x.et"):
            for command in ("inspect-trace", "advise"):
                self.assert_fails(3, f"{name}: got a Chakra execution trace, expected a trace of Shardwright or PyTorch's profiler, an SQLite "
                                  "export of Nsight Systems, a CUDA memory snapshot, or what nccl-tests print; give the profiler's trace that "
                                  "it was converted from", command, name)
        self.assert_fails(3, "et: got a folder without traces, expected files that end in .json, .json.gz or .sqlite", "advise", "et")

    def test_errors(self):
        plan = self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-h100", "--nodes", "256", "--seq", "1024", "--micro-batch", "1")
        self.assert_fails(3, "--chakra: got 2048 ranks, expected at most 1024, a file each", "simulate", "-", "--chakra", "et", stdin=plan)


if __name__ == "__main__":
    main()
