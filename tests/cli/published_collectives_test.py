"""bench/validate_nccl.py and bench/fit_nccl.py as a user types them."""

import csv
import json
import pathlib
import sys

import shardwright_test_case
from shardwright_test_case import TESTS, BenchTestCase, main

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

from lab import base, jobs, nccl  # noqa: E402

PUBLISHED = TESTS.parent / "bench" / "published"
SWEEP = str(PUBLISHED / "nccl_measured.csv")
HEADER = "source,system,gpu,gpus,nodes,gpus_per_node,network,op,bytes,time_us\n"


class ValidateNccl(BenchTestCase):

    def test_every_row_is_predicted_or_skipped_with_a_reason(self):
        report = json.loads(self.succeed("validate-nccl", SWEEP, "--json"))
        self.assertEqual((report["schema"], report["schema_version"]), ("shardwright-collective-validation", 1))
        skipped = sum(group["rows"] for group in report["skipped"])
        with open(SWEEP, encoding="utf-8") as file:
            rows = sum(1 for _ in file) - 1
        self.assertEqual(len(report["rows"]) + skipped, rows)
        self.assertEqual(sum(group["rows"] for group in report["groups"]), len(report["rows"]))
        for row in report["rows"]:
            self.assertAlmostEqual(row["predicted_s"] / row["measured_s"] - 1, row["error"])

    def test_statistics_are_those_of_the_rows(self):
        report = json.loads(self.succeed("validate-nccl", SWEEP, "--json"))
        errors = sorted(abs(row["error"]) for row in report["rows"]
                        if row["op"] in ("all_gather", "reduce_scatter") and 2**16 <= row["bytes"] <= 2**34)
        pooled = report["pooled"]
        self.assertEqual(pooled["count"], len(errors))
        self.assertAlmostEqual(pooled["mean"], sum(errors) / len(errors))
        self.assertAlmostEqual(pooled["max"], errors[-1])
        half = len(errors) // 2
        self.assertAlmostEqual(pooled["median"], (errors[half - 1] + errors[half]) / 2)  # an even count

    def test_two_runs_give_the_same_bytes(self):
        scale = str(PUBLISHED / "nccl_simai_ratio.csv")
        first = self.succeed("validate-nccl", SWEEP, "--left-out", "--scale", scale)
        self.assertEqual(first, self.succeed("validate-nccl", SWEEP, "--left-out", "--scale", scale))
        self.assertIn("Each fabric left out of the fit", first)
        self.assertIn("128 nodes", first)

    def test_bad_tables(self):
        (self.folder / "s.csv").write_text("source,system\n")
        self.assert_fails(3, "s.csv: line 1: got no column gpu, expected a table of collective measurements",
                          "validate-nccl", "s.csv")
        for fields, error in (("8,1,8,n,all_gather,1024,x", 'time_us: got "x", expected a positive number or nothing'),
                              ("8,1,8,n,all_gather,12,-1", 'time_us: got "-1", expected a positive number or nothing'),
                              ("8.5,1,8,n,all_gather,12,1", 'gpus: got "8.5", expected a positive whole number or nothing')):
            (self.folder / "s.csv").write_text(HEADER + "a,b,H100," + fields + "\n")
            self.assert_fails(3, "s.csv: line 2: " + error, "validate-nccl", "s.csv")


class Places(BenchTestCase):
    """Where a row was measured."""

    def rows(self, *lines):
        (self.folder / "s.csv").write_text(HEADER + "".join(line + "\n" for line in lines))
        return json.loads(self.succeed("validate-nccl", "s.csv", "--json"))

    def test_systems_of_the_catalog_by_name_others_from_their_columns(self):
        fabrics = {"x,Vultr HGX B200,B200-SXM,16,2,8,IB NDR 8x400Gb/s (slow),reduce_scatter,1024,40": "ib",
                   "x,8x H200 SXM node,H200-SXM-141GB,6,1,6,NVLink4,all_reduce,8,9": "hopper nvlink",
                   "x,some cloud,A100-SXM4-80GB,32,4,8,EFA 4x100Gb/s,all_gather,1024,40": "efa",
                   "x,GB200 NVL72,GB200,72,18,4,NVLink5 NVL72 (one NVLink domain),all_reduce,1024,40": "blackwell nvlink",
                   'x,box,RTX 5090,8,1,8,"PCIe 5.0 x16, no NVLink",all_reduce,1024,40': "blackwell-rtx pcie"}
        report = self.rows(*fabrics)
        self.assertEqual([row["fabric"] for row in report["rows"]], list(fabrics.values()))

    def test_the_cluster_that_the_program_is_asked_for(self):
        def question(line):
            return nccl.SweepRow(base.parse_table(HEADER + line + "\n", "s.csv")[0]).question()
        self.assertEqual(question("x,Vultr HGX B200,B200-SXM,16,2,8,IB NDR 8x400Gb/s (slow),reduce_scatter,1024,40"),
                         {"cluster": "vultr-b200", "nodes": 2, "gpus_per_node": 8, "gpus": 16, "profile": ""})
        self.assertEqual(question("x,some cloud,A100-SXM4-80GB,32,4,8,EFA 4x100Gb/s,all_gather,1024,40")["cluster"],
                         "a100-80 x8, nic 4x100 Gbit/s, network efa")
        # A rate that is not given is that of the usual node.
        self.assertEqual(question("x,Nebius,H100-SXM5-80GB,16,2,8,InfiniBand (rate unstated),all_reduce,1024,40")["cluster"],
                         "h100-80 x8, nic 8x400 Gbit/s, network ib")
        # 18 trays in one NVLink domain are one node.
        self.assertEqual(question("x,GB200 NVL72,GB200,72,18,4,NVLink5 NVL72 (one NVLink domain),all_reduce,1024,40"),
                         {"cluster": "gb200-186 x72", "nodes": 1, "gpus_per_node": 72, "gpus": 72, "profile": ""})
        self.assertEqual(question("x,pair,A100-SXM4-80GB,8,1,8,no NVLink,all_reduce,1024,40")["cluster"], "a100-80 x8, nvlink none")
        self.assertEqual(question("x,SimuMax,H100,8,1,8,NVLink,all_reduce,1024,40")["profile"], "h100-slow-host")

    def test_what_cannot_be_predicted_says_why(self):
        reasons = {"x,s,H100,8,1,8,NVLink,sendrecv,1024,40": "no such operation in programs: sendrecv",
                   "x,s,H100,8,1,8,NVLink,all_reduce,,40": "no size or no time given",
                   "x,s,H100,,1,,NVLink,all_reduce,1024,40": "number of GPUs or nodes not given",
                   "x,s,RTX 5090,2,2,1,TCP socket loopback,all_gather,1024,40":
                       "ranks share one GPU and talk through the loopback interface: not a network",
                   "x,s,MI355X,8,1,8,xGMI,all_reduce,1024,40": "GPU not in the catalog: MI355X",
                   "x,s,H100,16,2,8,carrier pigeon,all_reduce,1024,40": "network not known: carrier pigeon"}
        report = self.rows(*reasons, "x,s,H100,8,1,8,NVLink,all_reduce,1024,40")
        self.assertEqual({row["reason"] for row in report["skipped"]}, set(reasons.values()))
        self.assertEqual(len(report["rows"]), 1)

    def test_sources_by_their_first_words(self):
        report = self.rows("github.com/a/b/file.md@123 L1,s,H100,8,1,8,NVLink,all_gather,1048576,79.74",
                           "page section 3,s,H100,8,1,8,NVLink,all_gather,1048576,79.74")
        self.assertEqual([group["source"] for group in report["groups"]], ["a/b", "page"])

    def predicted(self, *lines):
        return [row["predicted_s"] for row in self.rows(*lines)["rows"]]

    def test_no_call_is_shown_shorter_than_the_host_needs_to_issue_it(self):
        line = "x,{},H100,8,1,8,NVLink,{},1048576,40"
        plain, slow, to_all = self.predicted(line.format("8x H100 node", "all_gather"), line.format("SimuMax", "all_gather"),
                                             line.format("SimuMax", "alltoall"))
        host = json.loads((TESTS.parent / "topologies/profiles/h100-slow-host.json").read_text())["host"]
        call, peer = (float(host[key]["value"].split()[0]) * 1e-6 for key in ("library_call", "library_peer"))
        self.assertAlmostEqual(slow, call, delta=1e-12)
        self.assertLess(plain, slow)
        # An all-to-all has a send and a receive for each of the seven others.
        self.assertAlmostEqual(to_all, call + 7 * peer, delta=1e-12)

    def test_a_tool_that_times_each_call_counts_15_us_more(self):
        line = "x,8x H100 node{},H100,8,1,8,NVLink,all_reduce,1048576,40"
        plain, timed = self.predicted(line.format(""), line.format(" (all_reduce_bench.py)"))
        self.assertAlmostEqual(timed, plain + 15e-6, delta=1e-12)

    def test_hosts_of_azure_have_a_profile_of_their_own(self):
        report = self.rows("x,Azure ND H100 v5,H100,8,1,8,NVLink,all_reduce,1024,40", "x,Azure ND H200 v5,H200,8,1,8,NVLink,all_reduce,1024,40")
        self.assertEqual([row["profile"] for row in report["rows"]], ["h100-azure-host"] * 2)

    def test_a_prediction_depends_on_neither_the_source_nor_the_measured_time(self):
        with open(SWEEP, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        changed = [{**row, "source": rows[i - 1]["source"], "time_us": row["time_us"] and "1"} for i, row in enumerate(rows)]
        with open(self.folder / "s.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, reader.fieldnames)
            writer.writeheader()
            writer.writerows(changed)
        before, after = ([(row["line"], row["predicted_s"]) for row in json.loads(self.succeed("validate-nccl", table, "--json"))["rows"]]
                         for table in (SWEEP, "s.csv"))
        self.assertEqual([price for _, price in before], [price for _, price in after])


class Published(BenchTestCase):
    """How good the predictions are."""

    def test_errors_of_the_published_rows(self):
        report = json.loads(self.succeed("validate-nccl", SWEEP, "--left-out", "--json"))
        by_op = {row["op"]: row["errors"] for row in report["by_op"]}
        # Counted in the table by hand.
        self.assertEqual((by_op["all_reduce"]["count"], by_op["alltoall"]["count"], report["pooled"]["count"]), (303, 52, 126))
        self.assertLessEqual(by_op["all_reduce"]["median"], 0.05)
        self.assertLessEqual(by_op["alltoall"]["median"], 0.04)
        self.assertLessEqual(report["pooled"]["median"], 0.08)
        self.assertLessEqual(report["pooled"]["p90"], 0.20)
        self.assertEqual(len(report["left_out"]), 5)
        for fabric in report["left_out"]:
            self.assertGreater(fabric["above_64_mib"]["count"], 0)
            self.assertLessEqual(fabric["above_64_mib"]["median"], 0.20, fabric["fabric"])

    def test_groups_and_scores_by_hand(self):
        # What is predicted for a row is asked first, so that the errors can be chosen: +10 %, -20 %, and 0 for a row too small to count.
        line = "github.com/a/b/c,8x H100 node,H100,8,1,8,NVLink,{},{},{}\n"
        def report(*times):
            rows = [line.format("all_gather", size, time) for size, time in zip((1 << 20, 1 << 30, 1024), times)]
            (self.folder / "s.csv").write_text(HEADER + "".join(rows) + line.format("sendrecv", 1 << 20, 1))
            return json.loads(self.succeed("validate-nccl", "s.csv", "--json"))
        first = [row["predicted_s"] * 1e6 for row in report(1, 1, 1)["rows"]]
        answer = report(first[0] / 1.1, first[1] / 0.8, first[2])
        group, = answer["groups"]
        self.assertEqual((group["source"], group["fabric"], group["op"], group["rows"], group["errors"]["count"]),
                         ("a/b", "hopper nvlink", "all_gather", 3, 2))
        self.assertAlmostEqual(group["errors"]["mean"], 0.15)
        self.assertAlmostEqual(group["errors"]["max"], 0.2)
        self.assertAlmostEqual(group["errors"]["bias"], -0.05)
        self.assertEqual(answer["pooled"]["count"], 2)
        self.assertEqual(answer["skipped"], [{"source": "a/b", "reason": "no such operation in programs: sendrecv", "rows": 1}])

    def test_simai_from_2_to_128_nodes(self):
        """Only the slope of the step latency over nodes was taken from this table, nothing else."""
        scale = json.loads(self.succeed("validate-nccl", SWEEP, "--scale", str(PUBLISHED / "nccl_simai_ratio.csv"), "--json"))["scale"]
        self.assertEqual(len(scale["points"]), 77)  # 11 sizes on 7 numbers of nodes
        self.assertLessEqual(scale["errors"]["median"], 0.15)

    def test_fractions_of_the_adapters_rate_by_hand_and_bad_tables(self):
        header = "table,bytes,scope,fraction_of_link_rate\n"
        (self.folder / "s.csv").write_text(header + "nic_ratio,17179869184,nodes_2,0.9\nnic_ratio,1024,nodes_1,0.5\nother,1,nodes_2,1\n")
        point, = json.loads(self.succeed("validate-nccl", SWEEP, "--scale", "s.csv", "--json"))["scale"]["points"]
        # 16 GiB over two nodes go at NVLink's or the adapters' rate, whichever is lower.
        transports = jobs.whole_profile(TESTS.parent / "topologies/profiles", "h100-torch-eager")["transports"]
        rate = min(450e9 * transports["nvlink"]["efficiency"]["value"], 400e9 * transports["roce"]["efficiency"]["value"])
        self.assertAlmostEqual(point["predicted"], rate / (8 * 48.5e9), delta=0.001)
        for text, error in ((header.replace(",fraction_of_link_rate", "") + "a,1,b\n",
                             "s.csv: line 1: got no column fraction_of_link_rate, expected a table of efficiencies by size and nodes"),
                            (header + "nic_ratio,x,nodes_2,1\n", 's.csv: line 2: bytes: got "x", expected a positive number'),
                            (header, "s.csv: got no nic_ratio for two or more nodes, expected some")):
            (self.folder / "s.csv").write_text(text)
            self.assert_fails(3, error, "validate-nccl", SWEEP, "--scale", "s.csv")


class FitNccl(BenchTestCase):

    def test_the_written_profile_predicts_as_well(self):
        self.succeed("fit-nccl", SWEEP, "--extends", "h100-torch-eager", "--date", "2026-11-21", "-o", "mine.json")
        profile = json.loads((self.folder / "mine.json").read_text())
        efficiency = profile["transports"]["roce"]["efficiency"]
        self.assertEqual((efficiency["kind"], efficiency["date"]), ("fitted", "2026-11-21"))
        report = json.loads(self.succeed("validate-nccl", SWEEP, "--profile", "mine.json", "--json"))
        roce = next(g for g in report["groups"] if g["fabric"] == "roce" and g["op"] == "all_gather")
        self.assertLess(roce["errors"]["median"], 0.08)

    def test_all_reduces_are_fitted_over_the_gathers(self):
        numbers = json.loads(self.succeed("fit-nccl", SWEEP, "--all-reduce", "--json"))["numbers"]
        self.assertIn("tcpxo: all_reduce_gain", [number["name"] for number in numbers])
        self.assertNotIn("roce: efficiency", [number["name"] for number in numbers])

    def numbers_of(self, lines, numbers, *flags):
        """The numbers that are found in a sweep whose times were made with these, by name."""
        def table(times):
            (self.folder / "s.csv").write_text(HEADER + "".join(f"{line},{time!r}\n" for line, time in zip(lines, times)))
        table([1] * len(lines))
        sweep = nccl.Sweep(base.Program(shardwright_test_case.PROGRAM), nccl.read_sweep(str(self.folder / "s.csv")))
        sweep.predict([{"numbers": numbers}])
        table([row.predicted_s * 1e6 for row in sweep.rows])
        report = json.loads(self.succeed("fit-nccl", "s.csv", *flags, "--json"))
        self.assertLess(report["errors"]["max"], 0.02)
        return {number["name"]: number["value"] for number in report["numbers"]}

    def assert_near(self, found, expected):
        for name, (value, tolerance) in expected.items():
            self.assertLess(abs(found[name] / value - 1), tolerance, name)

    def test_numbers_that_made_a_sweep_are_found(self):
        # Two a3-ultra nodes and one node of H200s, with numbers far from the shipped ones.
        lines = [f"made,{system},H200,{gpus},{nodes},8,RoCE 8x400Gb/s,{op},{1 << power}"
                 for system, gpus, nodes in (("8x H200 node", 8, 1), ("GCP a3-ultragpu-8g", 16, 2))
                 for power in range(16, 33) for op in ("all_gather", "reduce_scatter")]
        def number(transport, protocol, field, value):
            return {"transport": transport, "protocol": protocol, "field": field, "value": value}
        found = self.numbers_of(lines, [
            number("between nodes", "", "overlap", 1.6), number("nvlink", "", "overlap", 1), number("nvlink", "", "efficiency", 0.9),
            number("nvlink", "LL", "base_latency", 20e-6), number("nvlink", "LL", "reduce_bandwidth", 0.6),
            number("roce", "", "efficiency", 0.7), number("roce", "LL", "hop_latency", 11e-6), number("roce", "LL128", "hop_latency", 52e-6),
            number("roce", "Simple", "base_latency", 300e-6)])
        # The rows are exact, the prior on efficiency pulls a little. How much hides is told by a few rows only.
        self.assert_near(found, {"hopper nvlink: efficiency": (0.9, 0.02), "roce: efficiency": (0.7, 0.02), "roce: LL hop_latency": (11e-6, 0.02),
                                 "roce: LL128 hop_latency": (52e-6, 0.02), "roce: Simple base_latency": (300e-6, 0.06),
                                 "shared: LL base_latency": (20e-6, 0.02), "shared: LL reduce_bandwidth": (0.6, 0.02),
                                 "shared: overlap": (1.6, 0.1)})

    def test_numbers_of_all_reduces_that_made_a_sweep_are_found(self):
        # A node of H200s, two a3-mega nodes and all-to-alls, with numbers far from the shipped ones.
        lines = [f"made,{system},H200,{8 * nodes},{nodes},8,NVLink,{op},{1 << power}"
                 for op, system, nodes in (("all_reduce", "8x H200 node", 1), ("all_reduce", "GCP a3-megagpu-8g", 2), ("alltoall", "8x H200 node", 1))
                 for power in range(10, 33)]
        def number(transport, protocol, field, value):
            return {"transport": transport, "protocol": protocol, "field": field, "value": value}
        found = self.numbers_of(lines, [
            number("nvlink", "", "p2p_latency", 25e-6), number("nvlink", "", "p2p_drift", 40e-6), number("nvlink", "NVLS", "base_latency", 30e-6),
            number("nvlink", "NVLS", "bandwidth", 0.8), number("nvlink", "NVLS", "fill", 1.2), number("nvlink", "LL", "base_latency", 15e-6),
            number("tcpxo", "", "all_reduce_gain", 0.7), number("tcpxo", "Simple", "tree_latency", 90e-6)], "--all-reduce")
        self.assert_near(found, {name: (value, 0.02) for name, value in {
            "hopper nvlink: NVLS base_latency": 30e-6, "hopper nvlink: NVLS bandwidth": 0.8, "hopper nvlink: LL base_latency": 15e-6,
            "shared: NVLS fill": 1.2, "tcpxo: all_reduce_gain": 0.7, "tcpxo: Simple tree_latency": 90e-6, "shared: p2p_latency": 25e-6,
            "shared: p2p_drift": 40e-6}.items()})

    def test_the_shipped_network_numbers_are_what_is_found(self):
        """To three digits, as the profiles give them."""
        numbers = json.loads(self.succeed("fit-nccl", SWEEP, "--json"))["numbers"]
        folder = TESTS.parent / "topologies/profiles"
        for name, fabric in (("h100-slow-host", "hopper nvlink"), ("b200-torch-eager", "blackwell nvlink")):
            shipped = jobs.whole_profile(folder, name)
            for number in numbers:
                is_own = number["fabric"] in (fabric, "") and "library" not in number["field"] and number["transport"] != "between nodes"
                if number["transport"] not in ("roce", "ib", "nvlink", "tcpxo", "tcpx") or (number["transport"] == "nvlink" and not is_own):
                    continue
                if name == "h100-slow-host" and number["name"] == "shared: LL base_latency":
                    continue  # told by all-reduces on faster hosts
                row = shipped["transports"][number["transport"]]
                row = row["protocols"][number["protocol"]] if number["protocol"] else row
                if number["field"] not in row:
                    continue
                value = row[number["field"]]["value"]
                self.assertAlmostEqual(number["value"] / (jobs.seconds(value) if isinstance(value, str) else value), 1, delta=0.006,
                                       msg=f"{name}: {number['name']}")

    def test_a_profile_needs_a_date(self):
        self.assert_fails(2, "--date is required with --output", "fit-nccl", SWEEP, "-o", "m.json")
        self.assert_fails(2, '--date: got "2026-13-01", expected a date such as "2026-11-21"',
                          "fit-nccl", SWEEP, "--date", "2026-13-01", "-o", "m.json")

    def test_nothing_to_fit(self):
        (self.folder / "s.csv").write_text(HEADER)
        self.assert_fails(3, "sweep: got no all-reduce or all-to-all on a known fabric, expected some to fit to", "fit-nccl", "s.csv",
                          "--all-reduce")
        (self.folder / "s.csv").write_text(HEADER + "a,b,H100,8,1,8,n,all_reduce,1048576,40\n")
        self.assert_fails(3, "sweep: got no all-gather or reduce-scatter of 64 KiB to 16 GiB on a known fabric, "
                          "expected some to fit to", "fit-nccl", "s.csv")


if __name__ == "__main__":
    main()
