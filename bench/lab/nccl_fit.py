"""Network numbers of profiles, fitted to published collectives."""

import json
import math

from lab.base import ROOT, InputError, data, statistics
from lab.nccl import GATHERS, LARGE, Sweep, read_sweep

FABRICS = {fabric["name"]: fabric for fabric in data("machines.json")["fabrics"]}
BETWEEN_NODES = "between nodes"
# What host TCP reaches of the wire where it was not measured: large messages over 32 and 100 Gbit/s never passed 60 %
# (github.com/NVIDIA/nccl/issues/209, read 2026-11-21).
HOST_TCP_EFFICIENCY = 0.6
# What RDMA networks reach of their adapters' rate: from 0.77 (two B200 nodes, half of whose adapters are slow) to 0.94 (two
# a3-mega nodes), as published.
RDMA_EFFICIENCY, RDMA_EFFICIENCY_WIDTH = 0.85, 0.08


def factor(fabric, transport, protocol, field, lower, upper, **more):
    """A number of a profile; `fabric` is whose rows it explains, empty: shared by all."""
    return {"fabric": fabric, "architecture": "", "profile": "", "transport": transport, "protocol": protocol, "field": field,
            "lower": lower, "upper": upper, "expected": 0, "expected_width": 0, "value": 0, "is_time": False, **more}


def time(fabric, transport, protocol, field, upper_us, **more):
    return factor(fabric, transport, protocol, field, 0, upper_us * 1e-6, is_time=True, **more)


def name_of(number):
    """"roce: LL128 hop_latency"."""
    parts = [number["profile"] or number["fabric"] or "shared"]
    return parts[0] + ":" + "".join(" " + part for part in (number["protocol"], number["field"]) if part)


def for_program(numbers):
    return [{key: value for key, value in number.items() if key not in ("fabric", "is_time")} for number in numbers]


def numbers_of_fabric(fabric, transports):
    """Inside a node the efficiency alone, since latencies are NCCL's own or shared. Between nodes: efficiency, one latency per protocol,
    and the cost of split messages."""
    name, transport = fabric["name"], fabric["transport"]
    efficiency = factor(name, transport, "", "efficiency", 0.3, 1, architecture=fabric["architecture"])
    if fabric["kind"] == "rdma":  # where NVLink is the slower part, the rows do not tell the network's efficiency
        efficiency.update(expected=RDMA_EFFICIENCY, expected_width=RDMA_EFFICIENCY_WIDTH)
    if fabric["kind"] == "nvlink":
        return [efficiency]
    found = [efficiency]
    row = transports[transport]
    for protocol in sorted(row["protocols"]):
        is_simple = protocol == "Simple"
        found.append(time(name, transport, protocol, "base_latency" if is_simple else "hop_latency", 2000 if is_simple else 200))
    if "split_above" in row:
        found.append(time(name, transport, "", "split_latency", 200))
    return found


def numbers_for(fabrics, sweep):
    """Every number that rows of these fabrics can tell."""
    transports = json.loads((ROOT / "topologies/profiles/generic.json").read_text(encoding="utf-8"))["transports"]
    found = [number for name, fabric in FABRICS.items() if name in fabrics for number in numbers_of_fabric(fabric, transports)]
    kinds = {FABRICS[name]["kind"] for name in fabrics if name in FABRICS}
    if "nvlink" in kinds:
        found += [time("", "nvlink", "LL", "base_latency", 50), factor("", "nvlink", "LL", "reduce_bandwidth", 0.3, 1)]
    if kinds - {"nvlink"}:
        found.append(factor("", BETWEEN_NODES, "", "overlap", 1, 4))
    return found + [time("", "", "", "library_call", 200, profile=name)
                    for name, profile in sorted(sweep.profiles.items()) if profile["library_call_s"] > 0]


def run_fit(sweep, parts):
    """Fits (rows, numbers) one after the other; gives the numbers their values and returns how often prices were asked."""
    steps = [{"rows": sweep.numbers_of(rows), "numbers": for_program(numbers)} for rows, numbers in parts]
    found = sweep.predict(steps)
    for (_, numbers), step in zip(parts, found):
        for number, value in zip(numbers, step["values"]):
            number["value"] = value
    return sum(step["evaluations"] for step in found)


def mean_of_kind(wanted, kind, left_out, numbers):
    """The geometric mean of what other fabrics of one kind have in this place; 0 if none."""
    total, count = 0.0, 0
    for number in numbers:
        fabric = FABRICS.get(number["fabric"])
        if (fabric and fabric["kind"] == kind and number["fabric"] != left_out and number["protocol"] == wanted["protocol"]
                and number["field"] == wanted["field"] and number["value"] > 0):
            total += math.log(number["value"])
            count += 1
    return math.exp(total / count) if count else 0


def value_without(number, name, numbers):
    """What a fabric's number is taken to be by those of its kind."""
    kind = FABRICS[name]["kind"]
    value = mean_of_kind(number, kind, name, numbers)
    if value == 0 and kind == "host tcp" and number["field"] == "efficiency":
        value = HOST_TCP_EFFICIENCY
    return mean_of_kind(number, "rdma", name, numbers) if value == 0 and kind != "nvlink" else value


def leave_out(program, file, name, everything):
    """A fabric fitted on the others and predicted from its link rates."""
    sweep = Sweep(program, read_sweep(file))
    scored = [row for row in sweep.predicted if row.is_scored()]
    kept = [row for row in scored if row.fabric != name]
    numbers = numbers_for({row.fabric for row in kept}, sweep)
    run_fit(sweep, [(kept, numbers)])
    own = [{**number, "value": value_without(number, name, numbers)} for number in everything if number["fabric"] == name]
    sweep.predict([{"numbers": for_program(numbers + own)}])
    out = [row for row in scored if row.fabric == name]
    kind = FABRICS[name]["kind"]
    near = {kind, "rdma"} if kind == "host tcp" else {kind}
    sources = sorted({number["fabric"] for number in numbers if number["fabric"] in FABRICS and FABRICS[number["fabric"]]["kind"] in near})
    return {"fabric": name, "from": ", ".join(sources), "above_64_mib": statistics([row.error() for row in out if row.bytes > LARGE]),
            "all": statistics([row.error() for row in out])}


def fit_network(program, file, with_left_out):
    """All numbers to the rows that are scored; with `with_left_out`, every fabric in turn is left out as well."""
    sweep = Sweep(program, read_sweep(file))
    scored = [row for row in sweep.predicted if row.is_scored() and row.fabric in FABRICS]
    if not scored:
        raise InputError("sweep", "no all-gather or reduce-scatter of 64 KiB to 16 GiB on a known fabric", "some to fit to")
    fabrics = {row.fabric for row in scored}
    numbers = numbers_for(fabrics, sweep)
    evaluations = run_fit(sweep, [(scored, numbers)])
    fit = {"numbers": numbers, "evaluations": evaluations, "errors": statistics([row.error() for row in scored]), "left_out": []}
    if with_left_out and len(fabrics) > 1:
        fit["left_out"] = [leave_out(program, file, name, numbers) for name in sorted(fabrics)]
    return fit


# What all-reduces and all-to-alls add


def inside_numbers(fabric):
    """Numbers of one fabric of NVLink or the like."""
    if fabric in ("ampere nvlink", "cdna3 nvlink"):
        of = {"architecture": fabric.split()[0]}
        found = [time(fabric, "nvlink", "LL", "turn_latency", 200, **of), time(fabric, "nvlink", "LL128", "turn_latency", 200, **of),
                 time(fabric, "nvlink", "Simple", "turn_latency", 400, **of), factor(fabric, "nvlink", "LL", "reduce_bandwidth", 0.02, 1, **of)]
        if fabric == "cdna3 nvlink":
            found.append(factor(fabric, "nvlink", "", "all_reduce_gain", 0.5, 1.5, **of))
        return found
    if fabric in ("hopper nvlink", "blackwell nvlink"):
        of = {"architecture": fabric.split()[0]}
        latency = "base_latency" if fabric == "hopper nvlink" else "turn_latency"
        return [time(fabric, "nvlink", "NVLS", "base_latency", 200, **of), factor(fabric, "nvlink", "NVLS", "bandwidth", 0.5, 1, **of),
                time(fabric, "nvlink", "LL", latency, 50, **of)]
    return []


def network_numbers(fabric, generation):
    """Numbers of one network, on GPUs of one generation where those of other generations have others."""
    of = {"architecture": generation} if fabric == "efa" else {}
    gain = factor(fabric, fabric, "", "all_reduce_gain", 0.2, 2, **of)
    if (fabric, generation) == ("efa", "blackwell"):
        return [gain, time(fabric, fabric, "LL", "tree_latency", 400, **of), time(fabric, fabric, "Simple", "tree_latency", 400, **of),
                time(fabric, fabric, "LL", "turn_latency", 2000, **of), time(fabric, fabric, "LL128", "turn_latency", 2000, **of),
                time(fabric, fabric, "Simple", "turn_latency", 4000, **of)]
    if (fabric, generation) == ("efa", "ampere") or fabric in ("ib", "roce", "tcpxo"):
        found = [gain, time(fabric, fabric, "Simple", "tree_latency", 400, **of)]
        if fabric in ("ib", "efa"):
            found.append(time(fabric, fabric, "LL", "tree_latency", 200, **of))
        if fabric == "ib":
            found.append(time(fabric, fabric, "LL128", "tree_latency", 200, **of))
        return found
    return []


def point_to_point_numbers(fabrics, sweep):
    found = []
    if any(fabric.endswith("nvlink") for fabric in fabrics):
        found += [time("", "nvlink", "", "p2p_latency", 200), time("", "nvlink", "", "p2p_drift", 400)]
    if "ib" in fabrics:
        found += [factor("ib", "ib", "", "p2p_gain", 0.1, 2), time("ib", "ib", "", "p2p_latency", 200), time("ib", "ib", "", "p2p_drift", 400)]
    return found + [time("", "", "", "library_peer", 50, profile=name)
                    for name, profile in sorted(sweep.profiles.items()) if profile["library_peer_s"] > 0]


def generation_of(row):
    """AWS's networks differ by generation, and so do GPUs beside them."""
    return row.architecture if row.fabric == "efa" else ""


def fit_all_reduce(program, file):
    """What all-reduces and all-to-alls add to the numbers of gathers, which stay as shipped, fitted to all sizes: inside nodes, then
    per network, then all-to-alls."""
    sweep = Sweep(program, read_sweep(file))
    reduces = [row for row in sweep.predicted if row.op == "all_reduce"]
    to_all = [row for row in sweep.predicted if row.op == "alltoall"]
    if not reduces and not to_all:
        raise InputError("sweep", "no all-reduce or all-to-all on a known fabric", "some to fit to")
    places = sorted({(row.fabric, generation_of(row)) for row in reduces})
    # Inside nodes first: trees between nodes and what NVLS takes under them rest on that.
    inside = [number for fabric, _ in places for number in inside_numbers(fabric)]
    inside += [time("", "", "", "library_call", 200, profile=name)  # hosts of one machine, which gathers do not tell
               for name, profile in sorted(sweep.profiles.items()) if profile["library_call_s"] > 0 and profile["library_peer_s"] == 0]
    if any(fabric in ("hopper nvlink", "blackwell nvlink") for fabric, _ in places):
        inside += [factor("", "nvlink", "NVLS", "fill", 0, 4), factor("", "nvlink", "LL", "turn_overlap", 1, 4)]
    parts = [([row for row in reduces if row.is_inside], inside)]
    for fabric, generation in places:
        rows = [row for row in reduces if (row.fabric, generation_of(row)) == (fabric, generation)]
        parts.append((rows, network_numbers(fabric, generation)))
    parts.append((to_all, point_to_point_numbers({row.fabric for row in to_all}, sweep)))
    parts = [(rows, numbers) for rows, numbers in parts if rows and numbers]
    evaluations = run_fit(sweep, parts)
    return {"numbers": [number for _, numbers in parts for number in numbers], "evaluations": evaluations,
            "errors": statistics([row.error() for row in sweep.predicted if row.op not in GATHERS + ("broadcast",)]), "left_out": []}
