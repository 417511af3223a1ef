"""inspect-trace, calibrate and topo on files of other programs, made here by Python's own pickle and sqlite3.

Expected values are read off the inputs; hostile inputs must end with one line of error and nothing written.
"""

import json
import os
import pickle
import sqlite3
import struct
import unittest
import unittest.mock
import zlib

from shardwright_test_case import ShardwrightTestCase, main

MIB = 1 << 20


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


USER = frame("/src/me/model.py", 17, "forward")
SNAPSHOT = {
    "segments": [{"device": 0, "address": 4096, "total_size": 40 * MIB, "stream": 0, "segment_type": "large",
                  "blocks": [{"size": 3 * MIB, "requested_size": 3 * MIB, "state": "active_allocated", "frames": []},
                             {"size": 4 * MIB, "requested_size": 4 * MIB, "state": "active_allocated", "frames": []},
                             {"size": 33 * MIB, "requested_size": 0, "state": "inactive", "frames": []}]}],
    "device_traces": [[
        {"action": "segment_alloc", "addr": 4096, "size": 20 * MIB, "stream": 0, "time_us": 1000, "frames": []},
        {"action": "alloc", "addr": 1, "size": 10 * MIB, "stream": 0, "time_us": 1001, "frames":
            [frame("/venv/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 9, "all_gather_inputs"), USER]},
        {"action": "alloc", "addr": 2, "size": 4 * MIB, "stream": 0, "time_us": 1005, "frames":
            [frame("??", 0, "torch::autograd"), frame("/venv/torch/optim/adamw.py", 99, "_init_group"),
             frame("/src/me/train.py", 3, "main")]},
        {"action": "free_requested", "addr": 1, "size": 10 * MIB, "stream": 0, "time_us": 1010, "frames": [USER]},
        {"action": "free_completed", "addr": 1, "size": 10 * MIB, "stream": 0, "time_us": 1011, "frames": [USER]},
    ], []],
    "allocator_settings": {"expandable_segments": False, "ratio": 0.5, "none": None, "pair": (1, -2), "big": 1 << 40},
}

KERNELS = [  # start, end, stream, correlation, name
    (1000, 2000, 7, 1, "sm90_xmma_gemm_bf16"),
    (1500, 3500, 20, 2, "ncclDevKernel_AllGather_RING_LL"),
    (4000, 4500, 7, 3, "flash_fwd_kernel"),
]


def nsight(path, leave_out=()):
    database = sqlite3.connect(path)
    tables = {
        "StringIds": "(id INTEGER, value TEXT)",
        "CUPTI_ACTIVITY_KIND_KERNEL": "(start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER,"
                                      " globalPid INTEGER, demangledName INTEGER, shortName INTEGER)",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "(start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER)",
        "CUPTI_ACTIVITY_KIND_MEMCPY": "(start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER,"
                                      " bytes INTEGER, copyKind INTEGER)",
        "NVTX_EVENTS": "(start INTEGER, end INTEGER, eventType INTEGER, globalTid INTEGER, text TEXT, textId INTEGER)",
    }
    for name, columns in tables.items():
        if name not in leave_out:
            database.execute(f"CREATE TABLE {name} {columns}")
    for i, (start, end, stream, correlation, name) in enumerate(KERNELS):
        if "StringIds" not in leave_out:
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (i, name))
        if "CUPTI_ACTIVITY_KIND_KERNEL" not in leave_out:
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,?,?,1,?,?)",
                             (start, end, stream, correlation, i, i))
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,5,?,0)",
                         (start - 500, start - 400, correlation))
    database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (4600, 4700, 0, 9, 77, 4096, 1)")
    for start, end, text in [(0, 9000, "ProfilerStep#1"), (100, 3000, "FSDP::root_pre_forward"),
                             (3100, 3200, "FSDP::pre_forward (layers.0), seq = 3")]:
        database.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,59,5,?,NULL)", (start, end, text))
    database.execute("INSERT INTO NVTX_EVENTS VALUES (100, NULL, 34, 5, 'a mark', NULL)")
    database.commit()
    database.close()


NCCL_TEXT = """noise of the launcher
# Collective test starting: all_gather_perf
#  Rank  0 Group  0 Pid   1 on  n1 device  0 [0x1] NVIDIA H100
#  Rank  1 Group  0 Pid   1 on  n1 device  1 [0x1] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float    none      -1     3.10    0.00    0.00       0     3.00    0.00    0.00       0
    67108864       2097152     float    none      -1   412.30  162.77  142.42       0   409.80  163.76  143.29       0
     1.2e+06        300000     bfloat16 none      -1   30.25   39.67   34.71     N/A    30.80   38.96   34.09     N/A
# Avg bus bandwidth    : 142.855
"""

MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tNV12\tNV12\tPXB\tSYS\t0-55,112-167\t0\t\tN/A
GPU1\tNV12\t X \tNV12\tNV12\tPXB\tSYS\t0-55,112-167 0N/A
GPU2\tNV12\tNV12\t X \tNV12\tSYS\tPIX\t56-111,168-2231   N/A
GPU3    NV12    NV12    NV12     X      SYS     PIX     56-111,168-223  1
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tPIX\tPIX\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)

NIC Legend:

  NIC0: mlx5_0
"""

NCCL_XML = """<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:17:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:05:00.0" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:19:00.0" class="0x020700" vendor="0x15b3" device="0x1021" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" latency="0" speed="400000" port="1" guid="0x5e7c" maxconn="131072" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" vendor="GenuineIntel">
    <pci busid="0000:97:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="16.0 GT/s PCIe" link_width="8">
      <gpu dev="1" sm="90" rank="1" gdr="1"><nvlink target="0000:05:00.0" count="18" tclass="0x068000"/></gpu>
    </pci>
  </cpu>
</system>
"""

HWLOC_XML = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0">
    <info name="CPUVendor" value="AuthenticAMD"/>
    <object type="Package" os_index="0">
      <object type="NUMANode" os_index="0" local_memory="274877906944"/>
      <object type="Bridge" bridge_type="0-1">
        <object type="Bridge" bridge_type="1-1" pci_link_speed="31.507692">
          <object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:20b2] [10de:147f] a1" pci_link_speed="31.507692"/>
          <object type="PCIDev" pci_busid="0000:02:00.0" pci_type="0207 [15b3:101b] [15b3:0006] 00" pci_link_speed="31.507692">
            <object type="OSDev" name="mlx5_0" osdev_type="3"/>
          </object>
        </object>
      </object>
      <object type="Bridge" bridge_type="0-1">
        <object type="PCIDev" pci_busid="0000:41:00.0" pci_type="0108 [144d:a808] [144d:a801] 00" pci_link_speed="3.938462"/>
      </object>
    </object>
  </object>
</topology>
"""


class MeasuredFilesTest(ShardwrightTestCase):

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    def inspect(self, name, *flags):
        return json.loads(self.succeed("inspect-trace", name, "--json", *flags))

    def test_snapshot_of_every_protocol(self):
        for protocol in (2, 3, 4, 5):
            name = self.write("snapshot.pickle", pickle.dumps(SNAPSHOT, protocol=protocol))
            device, = self.inspect(name)["devices"]
            # At the end 7 MiB are allocated; the events add 10 + 4 - 10, so 3 MiB were there before.
            self.assertEqual(device["allocated_bytes"], 7 * MIB)
            self.assertEqual(device["peak_allocated_bytes"], 17 * MIB)
            self.assertEqual(device["peak_reserved_bytes"], 40 * MIB)
            self.assertAlmostEqual(device["peak_time_s"], 5e-6)
            self.assertEqual([sample[1:] for sample in device["samples"]],
                             [[3 * MIB, 40 * MIB], [13 * MIB, 40 * MIB], [17 * MIB, 40 * MIB], [7 * MIB, 40 * MIB],
                              [7 * MIB, 40 * MIB]])
            self.assertEqual({row["name"]: row["bytes"] for row in device["categories_at_peak"]},
                             {"all_gather": 10 * MIB, "optimizer": 4 * MIB, "before the recording": 3 * MIB})
            self.assertEqual({row["name"]: row["bytes"] for row in device["sites_at_peak"]},
                             {"model.py:17 forward": 10 * MIB, "train.py:3 main": 4 * MIB,
                              "before the recording": 3 * MIB})
        self.assertIn("17 MiB allocated", self.succeed("inspect-trace", "snapshot.pickle"))

    def test_pickles_with_code_are_refused(self):
        class Evil:
            def __reduce__(self):
                return os.system, ("touch stolen",)

        for protocol in (2, 4):
            name = self.write("evil.pickle", pickle.dumps({"segments": [], "device_traces": [Evil()]}, protocol=protocol))
            code, out, error = self.run_program("inspect-trace", name)
            self.assertEqual((code, out), (3, ""))
            self.assertIn("a pickle that runs code", error)
            self.assertIn("nothing of it was run", error)
            self.assertFalse((self.folder / "stolen").exists())

    def test_hostile_pickles(self):
        good = pickle.dumps(SNAPSHOT, protocol=4)
        shared = []
        for _ in range(40):
            shared = [shared, shared]
        for content, part in [
            (good[:len(good) // 2], "the end of the file"),
            (b"\x80\x04X" + struct.pack("<I", 0x7fffffff), "a text of 2147483647 bytes"),
            (b"\x80\x04\x8d" + struct.pack("<Q", 10 << 30), "a text of 10737418240 bytes"),
            (b"\x80\x09.", "protocol 9"),
            (b"\x80\x04u.", "a mark missing"),
            (b"\x80\x04h\x07.", "a reference to what was not there"),
            (pickle.dumps([1, 2]), "root: got no dictionary"),
            (pickle.dumps({}), "segments: got nothing"),
            (pickle.dumps({"segments": 7, "device_traces": []}), "segments: got a value of another type"),
            (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": "big"}]]}), "size: got a value"),
            (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": -5}]]}), "size: got -5"),
            (pickle.dumps({"segments": shared, "device_traces": []}), "an entry that is no dictionary"),
        ]:
            name = self.write("bad.pickle", content)
            code, out, error = self.run_program("inspect-trace", name)
            self.assertEqual((code, out), (3, ""), (part, error))
            self.assertTrue(error.startswith("error: bad.pickle"), error)
            self.assertIn(part, error)
        self.assertIn("a zip file", self.run_program("inspect-trace", self.write("a.pt", b"PK\x03\x04"))[2])
        self.assertIn("a Chakra execution trace", self.run_program("inspect-trace", self.write("x.et", b"\x07\x0a\x050.0.4"))[2])

    def test_nsight(self):
        nsight(self.folder / "report.sqlite")
        report = self.inspect("report.sqlite")
        self.assertEqual((report["kind"], report["kernels"], report["collectives"]), ("nsight", 2, 1))
        step, = report["steps"]
        self.assertEqual(step["name"], "ProfilerStep#1")
        busy = {name: row["busy_s"] for name, row in step["classes"].items()}
        self.assertAlmostEqual(busy["gemm"], 1e-6)
        self.assertAlmostEqual(busy["all_gather"], 2e-6)
        self.assertAlmostEqual(busy["attention"], 0.5e-6)
        self.assertAlmostEqual(busy["host_copy"], 0.1e-6)
        self.assertIn("layers.0", report["units"])

    def test_report_of_a_recording(self):
        nsight(self.folder / "report.sqlite")
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--nodes", "1", "--gpus", "2", "--seq", "64",
                     "-o", "plan.json")
        comparison = json.loads(self.succeed("report", "plan.json", "report.sqlite", "--json"))["comparison"]
        # The only step begins at 0 and ends with its last kernel; two of them compute, for 1 and 0.5 us.
        self.assertAlmostEqual(comparison["measured_step_s"], 4.5e-6, places=12)
        self.assertAlmostEqual(sum(row["measured_s"] for row in comparison["segments"]), 1.5e-6, places=12)
        self.assertIn("reduce_scatter of the program are missing", " ".join(comparison["findings"]))
        self.succeed("report", "plan.json", "report.sqlite", "-o", "r.html")
        self.assertIn("Contradicts the program: ", (self.folder / "r.html").read_text())
        self.assert_fails(3, "report.sqlite: got rank 0, as report.sqlite has, expected one file per rank",
                          "report", "plan.json", "report.sqlite", "report.sqlite")

    def test_folders(self):
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--nodes", "1", "--gpus", "2", "--seq", "64",
                     "-o", "plan.json")
        (self.folder / "ranks").mkdir()
        for rank in range(2):
            self.write(f"ranks/rank{rank}.json", json.dumps({
                "distributedInfo": {"rank": rank, "world_size": 2},
                "traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1 + rank, "dur": 2,
                                 "args": {"device": 0, "stream": 7, "correlation": -1}}]}).encode())
        self.write("ranks/notes.txt", b"not a trace")
        self.write("ranks/.hidden.json", b"{}")
        one_by_one = self.run_program("compare", "plan.json", "ranks/rank0.json", "ranks/rank1.json", "--json")
        self.assertEqual(one_by_one[0], 1, one_by_one[2])  # one product is no run of a plan
        self.assertEqual(self.run_program("compare", "plan.json", "ranks", "--json"), one_by_one)
        self.assertEqual(self.run_program("compare", "plan.json", "ranks/", "--json"), one_by_one)
        (self.folder / "empty").mkdir()
        for command in (("compare", "plan.json", "empty"), ("report", "plan.json", "empty"),
                        ("calibrate", "empty", "--plan", "plan.json", "-o", "mine.json")):
            self.assert_fails(3, "empty: got a folder without traces, expected files that end in .json, .json.gz or .sqlite",
                              *command)
        self.write("ranks/rank1-again.json", (self.folder / "ranks" / "rank1.json").read_bytes())
        self.assert_fails(3, "ranks/rank1.json: got rank 1, as ranks/rank1-again.json has, expected one file per rank",
                          "compare", "plan.json", "ranks")

    def test_hostile_nsight(self):
        nsight(self.folder / "none.sqlite", leave_out=("StringIds", "CUPTI_ACTIVITY_KIND_KERNEL"))
        self.assert_fails(3, "none.sqlite: got no table CUPTI_ACTIVITY_KIND_KERNEL, StringIds, expected an export of Nsight "
                             "Systems (nsys export --type sqlite); were kernels recorded (nsys profile --trace cuda,nvtx)?",
                          "inspect-trace", "none.sqlite")
        nsight(self.folder / "good.sqlite")
        whole = (self.folder / "good.sqlite").read_bytes()
        self.write("cut.sqlite", whole[:5000])
        self.write("header.sqlite", whole[:100])
        for name in ("cut.sqlite", "header.sqlite"):
            code, out, error = self.run_program("inspect-trace", name)
            self.assertEqual((code, out), (3, ""), error)
        database = sqlite3.connect(self.folder / "good.sqlite")
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
        database.commit()
        database.close()
        self.assertIn("start: got no whole number", self.run_program("inspect-trace", "good.sqlite")[2])

    def test_nccl_tests(self):
        rows = [{"bytes": 67108864, "time_s": 412.30e-6}, {"bytes": 1200000, "time_s": 30.25e-6}]
        report = self.inspect(self.write("all.txt", NCCL_TEXT))
        self.assertEqual((report["op"], report["ranks"]), ("all_gather", 2))
        for row, expected in zip(report["rows"], rows, strict=True):
            self.assertEqual(row["bytes"], expected["bytes"])
            self.assertAlmostEqual(row["time_s"], expected["time_s"])
        # A log of the network says nothing of kernels: the band stays at least as wide.
        ask = ("estimate", "gpt2", "2xH100", "--seq", "512", "--micro-batch", "4", "--json")
        self.succeed("calibrate", "all.txt", "--cluster", "2xH100", "-o", "net.json")
        before, after = json.loads(self.succeed(*ask)), json.loads(self.succeed(*ask, "--profile", "net.json"))
        self.assertEqual((after["profile"], after["confidence"]), ("h100-80-torch-calibrated", before["confidence"]))
        self.assertGreaterEqual(after["band"], before["band"] - 1e-9)
        old = NCCL_TEXT.replace("# Collective test starting: all_gather_perf\n", "")
        self.assertIn("--op", self.run_program("inspect-trace", self.write("old.txt", old))[2])
        self.assertEqual(self.inspect("old.txt", "--op", "reduce_scatter")["op"], "reduce_scatter")
        results = [{"size": 67108864, "count": 1, "type": "float", "redop": "none", "root": -1,
                    "out_of_place": {"time": 412.3, "alg_bw": 162.77, "bus_bw": 142.42}, "in_place": {"time": 1}}]
        name = self.write("all.json", json.dumps({"config": {"test": "all_reduce_perf"}, "devices": [{}, {}, {}, {}],
                                                  "results": results, "average_bus_bandwidth": 142}))
        report = self.inspect(name)
        self.assertEqual((report["op"], report["ranks"], report["rows"][0]["bytes"]), ("all_reduce", 4, 67108864))
        profile = json.loads(self.succeed("calibrate", "all.txt", "--cluster", "h100-80 x2", "-o", "-"))
        self.assertEqual(profile["transports"]["nvlink"]["efficiency"]["kind"], "measured")
        self.assertIn("2 ranks, expected the 8", self.run_program("calibrate", "all.txt", "--cluster", "dgx-h100", "-o", "x")[2])

    def test_hostile_nccl_tests(self):
        for old, new, part in [("412.30", "fast", "line 8: got \"fast\""), ("412.30", "-1", "\"-1\""),
                               ("67108864 ", "1e300 ", "a size or time"),
                               (" float ", " floot ", "\"floot\"")]:
            error = self.run_program("inspect-trace", self.write("bad.txt", NCCL_TEXT.replace(old, new)))[2]
            self.assertIn(part, error)

    def import_topology(self, text, *flags):
        name = self.write("topology", text)
        out = json.loads(self.succeed("topo", "import", name, "--json", *flags))
        cluster = out["cluster"]
        parts = {}
        for component in cluster["node"]["components"]:
            parts.setdefault(component["type"], []).append(component)
        links = {frozenset((link["from"], link["to"])): link["bandwidth"] for link in cluster["node"]["links"]}
        return cluster, parts, links, out["notes"]

    def test_topo_matrix(self):
        cluster, parts, links, _ = self.import_topology(MATRIX, "--gpu", "a100-80", "--nic", "200 Gbit/s", "--nodes", "4")
        self.assertEqual({kind: len(list_) for kind, list_ in parts.items()},
                         {"gpu": 4, "nic": 2, "cpu": 2, "host_memory": 2, "pcie_switch": 2, "nvswitch": 1})
        self.assertEqual(cluster["nodes"], 4)
        # NV12 to every other GPU is more than a GPU has: the links go to a switch.
        for i in range(4):
            self.assertEqual(links[frozenset((f"gpu{i}", "nvswitch"))], "300 GB/s")
        # GPUs 0 and 1 are with NIC 0, the others with NIC 1.
        homes = {}
        for pair in links:
            for device in [end for end in pair if end.startswith(("gpu", "nic"))]:
                other, = pair - {device}
                if other.startswith("switch"):
                    homes[device] = other
        self.assertEqual({frozenset(d for d in homes if homes[d] == s) for s in set(homes.values())},
                         {frozenset(("gpu0", "gpu1", "nic0")), frozenset(("gpu2", "gpu3", "nic1"))})
        # Without columns behind the matrix, as old drivers print it, and as copied from a terminal.
        short = "\n".join("  ".join(line.replace("\x1b[4m", "").split()[:7]) for line in MATRIX.splitlines()[:7])
        short = short.replace("CPU", "").replace("GPU3  NIC0  NIC1  ", "GPU3  NIC0  NIC1")
        self.assertEqual(len(self.import_topology(short, "--gpu", "a100-80", "--nic", "200 Gbit/s")[1]["gpu"]), 4)
        # Pairwise links: NV1 and NV2 of a V100 stay what they are.
        mesh = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV1\tNV2\nGPU1\tNV1\tX\tNV2\nGPU2\tNV2\tNV2\tX\n"
        links = self.import_topology(mesh, "--gpu", "v100-16")[2]
        self.assertEqual(links[frozenset(("gpu0", "gpu1"))], "25 GB/s")
        self.assertEqual(links[frozenset(("gpu0", "gpu2"))], "50 GB/s")

    def test_xml(self):
        cluster, parts, links, _ = self.import_topology(NCCL_XML)
        self.assertEqual(cluster["gpu"]["name"] if isinstance(cluster["gpu"], dict) else cluster["gpu"], "h100-80")
        self.assertEqual(cluster["cpu_vendor"], "intel")
        self.assertEqual(len(parts["gpu"]), 2)
        self.assertEqual(parts["nic"][0]["bandwidth"], "400 Gbit/s" if "bit" in parts["nic"][0]["bandwidth"] else "50 GB/s")
        self.assertEqual(links[frozenset(("gpu0", "nvswitch"))], "450 GB/s")
        # 8 lanes of 16 GT/s: 8 * 16 / 8 * 128 / 130 GB/s.
        self.assertTrue(links[frozenset(("gpu1", "cpu1"))].startswith("15.75"), links)
        cluster, parts, links, notes = self.import_topology(HWLOC_XML, "--nic", "200 Gbit/s")
        self.assertEqual((len(parts["gpu"]), len(parts["nic"]), len(parts["cpu"]), len(parts["pcie_switch"])), (1, 1, 1, 1))
        self.assertEqual(parts["host_memory"][0]["capacity"], "256 GiB")
        self.assertIn("hwloc does not show NVLink", notes)

    def test_imported_clusters_plan(self):
        self.write("topo.txt", MATRIX)
        self.succeed("topo", "import", "topo.txt", "--gpu", "a100-80", "--nic", "200 Gbit/s", "--host", "1 TiB", "-o", "c.json")
        report = self.succeed("plan", "--model", "gpt2", "--cluster", "c.json", "--seq", "128", "-o", "plan.json")
        self.assertIn("shard 4", report)

    def test_hostile_topologies(self):
        bomb = '<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a "aaaa">' + "".join(
            f'<!ENTITY {chr(98 + i)} "{("&" + chr(97 + i) + ";") * 10}">' for i in range(9)) + \
            ']><system version="1"><cpu vendor="&j;"><pci busid="&j;"/></cpu></system>'
        deep = '<system version="1"><cpu>' + '<pci busid="x">' * 1000 + "</pci>" * 1000 + "</cpu></system>"
        for text, flags, part in [
            (bomb, (), "no GPU"), (deep, (), "nested deeper than 64"), (NCCL_XML[:500], (), "broken XML"),
            (NCCL_XML.replace('version="1"', 'version="7"'), (), 'version: got "7"'),
            (NCCL_XML.replace('count="18"', 'count="many"'), (), 'count: got "many"'),
            (NCCL_XML.replace('speed="400000"', 'speed="-3"'), (), 'speed: got "-3"'),
            (NCCL_XML.replace("0x2330", "0xffff"), (), "which GPU"), (MATRIX, (), "which GPU"),
            (MATRIX.replace("PIX", "PIG"), ("--gpu", "a100-80"), '"PIG"'),
            (MATRIX.replace("GPU2\t", "GPU9\t", 1), ("--gpu", "a100-80"), "the row of"),
            (MATRIX[:200], ("--gpu", "a100-80"), "got"), ("", (), "an empty file"), ("hello", (), "something else"),
            (MATRIX, ("--gpu", "a100-80"), "NICs without their rate"),
        ]:
            name = self.write("bad", text)
            code, out, error = self.run_program("topo", "import", name, "-o", "made.json", *flags)
            self.assertEqual((code, out), (3, ""), (part, out, error))
            self.assertIn(part, error)
            self.assertFalse((self.folder / "made.json").exists())

    def test_probe(self):
        seen = json.loads(self.succeed("topo", "probe", "--json"))
        self.assertTrue(any("host memory" in line for line in seen["seen"] + seen["not_seen"]))
        self.assertTrue(seen["cluster"] is not None or any("GPU" in line for line in seen["not_seen"]))

    def test_probe_names_the_gpu(self):
        """A machine's GPU as nvidia-smi calls it, alone and as one of several."""
        bin_folder = self.folder / "bin"
        bin_folder.mkdir()
        tool = bin_folder / "nvidia-smi"
        one = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"
        pair = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-7\nGPU1\tNV18\t X \t0-7\n"
        for product, matrix, gpu, count in (("NVIDIA H200", one, "h200-141", 1), ("NVIDIA B200", pair, "b200-180", 2),
                                            ("Tesla T4", one, "t4", 1), ("NVIDIA A10G", one, "a10g", 1), ("NVIDIA A10", one, "a10", 1),
                                            ("NVIDIA GeForce RTX 4090", one, "rtx-4090", 1),
                                            ("NVIDIA A100 80GB PCIe", one, "a100-pcie-80", 1),
                                            ("NVIDIA A100-SXM4-40GB", pair, "a100-40", 2)):
            tool.write_text(f"#!/bin/sh\ncase $1 in topo) printf '{matrix}';; *) echo '{product}';; esac\n")
            tool.chmod(0o755)
            with self.subTest(product=product), unittest.mock.patch.dict(os.environ, PATH=f"{bin_folder}:{os.environ['PATH']}"):
                seen = json.loads(self.succeed("topo", "probe", "--json"))
                self.assertIsNotNone(seen["cluster"], seen)
                self.assertEqual((seen["cluster"]["gpu"]["name"], seen["cluster"]["gpus_per_node"]), (gpu, count))

    def test_damaged_gzip(self):
        packer = zlib.compressobj(wbits=31)
        trace = b'{"traceEvents":[{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"args":{"stream":7}}]}'
        packed = packer.compress(trace) + packer.flush()
        self.assertEqual(self.inspect(self.write("a.json.gz", packed))["kernels"], 1)
        for content in (packed[:-9], packed[:20] + b"\xff\xff\xff" + packed[23:]):
            code, out, _ = self.run_program("inspect-trace", self.write("b.json.gz", content))
            self.assertEqual((code, out), (3, ""))


if __name__ == "__main__":
    main()
