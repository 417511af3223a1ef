#!/usr/bin/env python3
"""How fast traces of PyTorch's profiler are read, and in how much memory: `shardwright inspect-trace` of a generated one.

    bench/kineto.py 64 1024           # MiB of text, in $TMPDIR
    bench/kineto.py 64 --gzip

The trace is that of steps of an FSDP2 run on a GPU, as the profiler records them with shapes, stacks and memory. Seconds are CPU time
of the whole program, start included; memory is its largest resident set. Exits with 1 where events or steps were lost.
"""

import argparse
import gzip
import json
import os
import pathlib
import subprocess
import tempfile

from lab.base import ROOT

LAYERS = 32
STEP_TIME = 49_900  # microseconds; steps begin 49,925 apart
OP = ('"External id": 12345, "Record function id": 0, "Concrete Inputs": ["", "", ""], "Input type": ["c10::BFloat16", "c10::BFloat16", ""], '
      '"Input Strides": [[4194304, 4096, 1], [4096, 1], []], "Input Dims": [[1, 4096, 4096], [14336, 4096], []], "Ev Idx": 777')
KERNEL = ('"External id": 12345, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": %d, "registers per thread": 168, '
          '"shared memory": 213504, "blocks per SM": 3.878788, "warps per SM": 46.545456, "grid": [2, 256, 1], "block": [384, 1, 1], '
          '"est. achieved occupancy %%": 19')
COLLECTIVE = ('"device": 0, "stream": 20, "correlation": %d, "Collective name": "%s", "In msg nelems": 27262976, "Out msg nelems": 218103808, '
              '"Group size": 8, "dtype": "BFloat16", "Process Group Name": "0", "Process Group Description": "default_pg"')


class Generator:
    """Events of layers, forward and backward, one after the other: per layer 64 host ops, 16 Python frames, 8 changes of memory, 16 kernels
    with their launches and arrows, and an all-gather or reduce-scatter."""

    def __init__(self):
        self.time, self.layer, self.correlation, self.changes, self.steps, self.events = 4449914237498, 0, 0, 0, 0, 0

    def event(self, category, name, duration, args):
        """A duration below 0 makes an instant."""
        self.time += 5
        self.events += 1
        end = f'"dur": {duration}.456' if duration >= 0 else '"s": "t"'
        return (f'  {{\n    "ph": "{"X" if duration >= 0 else "i"}", "cat": "{category}", "name": "{name}", "pid": 18484, "tid": 18484,\n'
                f'    "ts": {self.time}.123, {end},\n    "args": {{\n      {args}\n    }}\n  }}')

    def arrow(self, end):
        self.time += 5
        self.events += 1
        return (f'  {{"ph": "{end}", "id": {self.correlation}, "pid": 18484, "tid": 18484, "ts": {self.time}.123, "cat": "ac2g", '
                '"name": "ac2g"}')

    def launched(self, call, kernel, duration, args):
        self.correlation += 1
        yield self.event("cuda_runtime", call, 4, f'"External id": 12345, "cbid": 211, "correlation": {self.correlation}')
        yield self.event("kernel", kernel, duration, args(self.correlation))

    def next_layer(self):
        at = self.layer % LAYERS
        is_forward = self.layer % (2 * LAYERS) < LAYERS
        if self.layer % (2 * LAYERS) == 0:
            self.steps += 1
            yield self.event("user_annotation", f"ProfilerStep#{self.steps}", STEP_TIME, '"External id": 1')
        for name in ("FSDP::all_gather", "FSDP::pre_forward"):
            unit = f"layers.{at if is_forward else LAYERS - 1 - at}"
            yield self.event("user_annotation", f"{name if is_forward else 'FSDP::post_backward'} ({unit})", 2, '"External id": 1')
        for _ in range(16):
            yield self.event("python_function", "torch/nn/modules/linear.py(130): forward", 9,
                             '"Python id": 81723, "Python parent id": 81722, "Ev Idx": 90211')
            for _ in range(4):
                yield self.event("cpu_op", "aten::linear", 3, OP)
            self.changes += 1
            if self.changes % 2 == 0:
                yield self.event("cpu_instant_event", "[memory]", -1,
                                 f'"Total Reserved": 8589934592, "Total Allocated": {self.changes % 1024 * 1048576}, "Bytes": 1048576, '
                                 '"Addr": 140078912, "Device Id": 0, "Device Type": 1, "Ev Idx": 778')
            yield from self.launched("cudaLaunchKernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 90, lambda i: KERNEL % i)
            yield from map(self.arrow, "sf")
        name = ("AllGather", "_allgather_base") if is_forward else ("ReduceScatter", "_reduce_scatter_base")
        yield from self.launched("cudaLaunchKernelExC", f"ncclDevKernel_{name[0]}_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 900,
                                 lambda i: COLLECTIVE % (i, name[1]))
        self.layer += 1


def write(path, mebibytes, is_gzip):
    """The generator and the bytes of the text."""
    generator, size = Generator(), 0
    with (gzip.open if is_gzip else open)(path, "wt", encoding="utf-8") as file:
        text = '{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 8},\n"traceEvents": [\n'
        while size < mebibytes << 20:
            text += ",\n".join(generator.next_layer())
            size += file.write(text)
            text = ",\n"
        size += file.write("]}")
    return generator, size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mebibytes", nargs="+", type=int)
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--program", default=ROOT / "build/shardwright", help="default: build/shardwright")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for mebibytes in arguments.mebibytes:
            trace = pathlib.Path(folder) / ("trace.json.gz" if arguments.gzip else "trace.json")
            generator, size = write(trace, mebibytes, arguments.gzip)
            process = subprocess.Popen([arguments.program, "inspect-trace", trace, "--json"], stdout=subprocess.PIPE, text=True)
            found = json.loads(process.stdout.read())
            _, status, usage = os.wait4(process.pid, 0)
            counts = (found["steps"][-1]["name"], found["events"])
            if status or counts != (f"ProfilerStep#{generator.steps}", generator.events):
                raise SystemExit(f"got {counts}, expected step {generator.steps} and {generator.events} events")
            seconds = usage.ru_utime + usage.ru_stime
            print(f"{size / 2**20:.0f} MiB, {generator.events} events: {seconds:.2f} s of CPU, {size / 2**20 / seconds:.0f} MiB/s, "
                  f"{usage.ru_maxrss / 1024:.0f} MiB")


main()
