"""`calibrate` without a plan, over real traces of PyTorch's profiler of models that Shardwright was not told of.

Expected calls are counted by hand from the models; times are this machine's, so only their sums are checked.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from torch.profiler import profile
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    print("torch or transformers is not installed: skipped")
    sys.exit(77)

PROGRAM = sys.argv[1]
LAYERS = 4
PASSES = [(2, 128), (2, 256), (4, 256)]
DEVICE = '"deviceProperties": [{"id": 0, "name": "%s"}],'


def calibrate(folder, *arguments, codes=(0, 1)):
    done = subprocess.run([PROGRAM, "calibrate", *arguments, "-o", f"{folder}/new.json"], capture_output=True, text=True,
                          check=False)
    assert done.returncode in codes, (done.returncode, done.stdout, done.stderr)
    return done


def check_training(folder):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=LAYERS, n_head=4, vocab_size=2048, n_positions=512,
                                       attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
    with profile(record_shapes=True) as profiler:
        for batch, tokens in PASSES:
            for _ in range(2):
                x = torch.randint(0, 2048, (batch, tokens))
                model(input_ids=x, labels=x).loss.backward()
    profiler.export_chrome_trace(f"{folder}/train.json")
    report = json.loads(calibrate(folder, f"{folder}/train.json", "--json").stdout)
    kinds = {row["kind"]: row for row in report["coverage"]}
    passes = 2 * len(PASSES)
    # Four linear layers a block and the head, each once forward and twice backward; three sizes of batch and sequence.
    assert kinds["products in fp32"]["calls"] == passes * 3 * (4 * LAYERS + 1), kinds
    assert kinds["attention, forward"]["calls"] == passes * LAYERS, kinds
    assert kinds["attention, backward"]["calls"] == passes * LAYERS, kinds
    assert kinds["attention, forward"]["shapes"] == len(PASSES), kinds
    assert kinds["norms"]["calls"] == passes * 2 * (2 * LAYERS + 1), kinds
    told = sum(row["time_s"] for row in report["coverage"])
    untold = sum(row["time_s"] for row in report["not_covered"])
    assert abs(told + untold - report["kernels_s"]) < 0.01 * report["kernels_s"], (told, untold, report["kernels_s"])
    assert told > 0.5 * report["kernels_s"], (told, report["kernels_s"])
    products = [row for row in report["numbers"] if row["field"] == "compute.gemm.fp32"][0]
    assert products["op_shapes"] > 5, products


def check_refusals(folder):
    text = pathlib.Path(f"{folder}/train.json").read_text()
    with profile() as profiler:  # without shapes
        torch.nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
    profiler.export_chrome_trace(f"{folder}/bare.json")
    done = calibrate(folder, f"{folder}/bare.json", codes=(3,))
    assert "no call with a shape that is known, expected a trace of PyTorch's profiler with record_shapes=True" in done.stderr, \
        done.stderr
    kernel = ('{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":1,"args":{"correlation":1,"stream":7}},')
    on_device = text.replace('"traceEvents": [', DEVICE % "Fancy 9000" + '"traceEvents": [' + kernel, 1)
    assert on_device != text
    pathlib.Path(f"{folder}/fancy.json").write_text(on_device)
    done = calibrate(folder, f"{folder}/fancy.json", codes=(2,))
    assert "--cluster: " in done.stderr and 'does not say on which GPU of the catalog it ran ("Fancy 9000")' in done.stderr, \
        done.stderr
    known = on_device.replace("Fancy 9000", "NVIDIA H100 80GB HBM3")
    pathlib.Path(f"{folder}/known.json").write_text(known)
    done = calibrate(folder, f"{folder}/known.json", f"{folder}/train.json", codes=(3,))
    assert "a run on host, expected one on h100-80, as the files before" in done.stderr, done.stderr

    done = calibrate(folder, f"{folder}/train.json", "--profile", "h100-torch-eager", codes=(3,))
    assert "--profile: got h100-torch-eager, which is of hopper GPUs, expected one of host-rank (host)" in done.stderr, done.stderr
    for flag in (("--op", "all_gather"), ("--nodes", "2"), ("--even-if-worse",)):
        assert f"error: {flag[0]}" in calibrate(folder, f"{folder}/train.json", *flag, codes=(2,)).stderr, flag


with tempfile.TemporaryDirectory() as scratch:
    check_training(scratch)
    check_refusals(scratch)
