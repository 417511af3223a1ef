"""Checkpoints of run and of torch.distributed.checkpoint (DCP): each is loaded by the other, bit for bit, by other numbers of ranks.

    python tests/python/checkpoint_test.py SHARDWRIGHT PACKAGE
"""

import json
import os
import pathlib
import socket
import struct
import sys
import traceback
import unittest
import zlib

try:
    import safetensors.torch
    import torch
    import torch._dynamo  # noqa: F401  # FSDP2 imports it: once here, not in every process
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                         set_optimizer_state_dict)
    from torch.distributed.fsdp import fully_shard
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

PROGRAM, PACKAGE = sys.argv[1:3]
sys.path[:0] = [PACKAGE, str(pathlib.Path(__file__).resolve().parent.parent / "cli")]
import shardwright
import shardwright_test_case
from training_test_case import TINY, TrainingTestCase

shardwright_test_case.PROGRAM = PROGRAM
STATES = ("exp_avg", "exp_avg_sq")


def sharded():
    """GPT-2 with tied embeddings under FSDP2, and AdamW; shapes that 3 and 4 ranks cut unevenly."""
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{k: v for k, v in TINY.items() if k != "model_type"}))
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        ids = torch.randint(256, (2, 16), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    """{name: tensor} of all ranks' shards; states and the number of updates as ours are called."""
    tensors = {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for state, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{state}.{name}"] = value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
    return tensors


def state_of(model, optimizer, flat):
    return {"model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))}


def load_ours(folder, flat, out):
    model, optimizer = sharded()
    train(model, optimizer, 1)  # other values than those of the checkpoint
    state = state_of(model, optimizer, flat)
    dcp.load(state, storage_reader=shardwright.CheckpointReader(folder))
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=StateDictOptions(flatten_optimizer_state_dict=flat))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    tensors = whole(model, optimizer)
    if dist.get_rank() == 0:
        safetensors.torch.save_file(tensors, out)


def save_theirs(folder, flat, out):
    model, optimizer = sharded()
    train(model, optimizer, 3)
    dcp.save(state_of(model, optimizer, flat), checkpoint_id=folder)
    tensors = whole(model, optimizer)
    if dist.get_rank() == 0:
        safetensors.torch.save_file(tensors, out)


def child(rank, ranks, port, function, arguments):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        function(*arguments)
        dist.barrier()
        os._exit(0)
    except BaseException:  # pylint: disable=broad-except
        traceback.print_exc()
        os._exit(1)


def run_ranks(ranks, function, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            child(rank, ranks, port, function, arguments)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks, function.__name__


def saved(folder):
    """All tensors of a checkpoint of ours, put together from its files by docs/training.md."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {file["name"]: safetensors.torch.load_file(folder / file["name"]) for file in manifest["files"]}
    tensors = {}
    for tensor in manifest["tensors"]:
        parts = [(part["begin"], files[file["name"]][tensor["name"]].flatten()) for file in manifest["files"]
                 for part in file["stretches"] if part["tensor"] == tensor["name"]]
        tensors[tensor["name"]] = torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])]).reshape(tensor["shape"])
    return tensors


class Checkpoints(TrainingTestCase):

    def assert_same(self, ours, theirs, names):
        self.assertGreater(len(names), 20)
        for name in names:
            self.assertEqual((ours[name].dtype, ours[name].shape), (theirs[name].dtype, theirs[name].shape), name)
            self.assertTrue(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)), name)

    def plan_of(self, ranks):
        return self.plan(f"p{ranks}.json", ranks, "--global-batch", "12", "--dialect", "fsdp2")

    def test_torch_loads_ours(self):
        self.train(self.plan_of(3), "--steps", "2", "--checkpoint", "ours")
        expected = saved(self.folder / "ours" / "step-00000002")
        for ranks, flat in ((1, False), (2, False), (4, True)):
            with self.subTest(ranks=ranks):
                out = self.folder / f"torch{ranks}.safetensors"
                run_ranks(ranks, load_ours, self.folder / "ours", flat, out)
                found = safetensors.torch.load_file(out)
                self.assert_same(expected, found, list(expected))
                steps = {float(value) for name, value in found.items() if name.startswith("optimizer.step.")}
                self.assertEqual(steps, {2.0})
        self.assertNotIn("lm_head.weight", expected)  # tied: torch's state dict has it, too, and it was loaded

    def test_to_dcp(self):
        self.train(self.plan_of(2), "--steps", "2", "--checkpoint", "ours")
        expected = saved(self.folder / "ours" / "step-00000002")
        shardwright.to_dcp(self.folder / "ours", self.folder / "dcp")
        state = {"model": {n: torch.full_like(t, 7) for n, t in expected.items() if not n.startswith("optimizer.")},
                 "optimizer": {"state": {n.split(".", 2)[2]: {s: torch.full_like(t, 7) for s in STATES}
                                         for n, t in expected.items() if n.startswith("optimizer.exp_avg.")}}}
        dcp.load(state, checkpoint_id=self.folder / "dcp", no_dist=True)
        found = dict(state["model"])
        for name, states in state["optimizer"]["state"].items():
            found.update({f"optimizer.{s}.{name}": value for s, value in states.items()})
        self.assert_same(expected, found, list(expected))

    def test_we_load_torchs(self):
        options = {"format": "shardwright-training", "version": 1, "clip_norm": 1e-30,
                   "optimizer": {"learning_rate": 0.0, "weight_decay": 0.0}}
        (self.folder / "still.json").write_text(json.dumps(options))
        (self.folder / "config.json").write_text(json.dumps(TINY))
        for saving, flat, ranks in ((2, False, 3), (2, False, 1), (3, True, 4)):
            with self.subTest(saving=saving, ranks=ranks):
                name = f"{saving}to{ranks}"
                theirs, out = self.folder / f"dcp{saving}", self.folder / f"torch{saving}.safetensors"
                if not out.exists():
                    run_ranks(saving, save_theirs, theirs, flat, out)
                expected = safetensors.torch.load_file(out)
                step = shardwright.from_dcp(theirs, self.folder / name, self.folder / "config.json" if ranks != 1 else TINY)
                self.assertEqual(pathlib.Path(step).name, "step-00000003")
                tensors = saved(pathlib.Path(step))
                self.assert_same(tensors, expected, list(tensors))
                self.assertEqual(len(tensors), 3 * (len(tensors) // 3))  # each with its two states

                # A step without learning rate and with next to no gradients shows what the executor loaded.
                steps = self.train(self.plan_of(ranks), "--training", "still.json", "--steps", "4", "--checkpoint", name, "--resume")
                self.assertEqual([s["step"] for s in steps], [3], steps)
                after = saved(self.folder / name / "step-00000004")
                zero = torch.zeros(())
                for key, value in expected.items():
                    if key.startswith("optimizer.step."):
                        continue
                    want = (torch.lerp(value, zero, 0.1) if ".exp_avg." in key else value * 0.999 if ".exp_avg_sq." in key else value)
                    there = value.abs() > 1e-12 if ".exp_avg_sq." not in key else value > 1e-25
                    self.assertGreater(int(there.sum()), 0.5 * value.numel(), key)
                    self.assertTrue(torch.equal(after[key][there], want[there]), key)

    def test_what_is_refused(self):
        (self.folder / "config.json").write_text(json.dumps(TINY))
        run_ranks(1, save_theirs, self.folder / "dcp", False, self.folder / "out.safetensors")
        for arguments, options, error in (
                ((self.folder, self.folder / "x", TINY), {},
                 "got no file .metadata, expected a folder that torch.distributed.checkpoint.save wrote"),
                ((self.folder / "dcp", self.folder / "x", TINY), {"prefix": "net"},
                 'got no tensor whose key begins with "net.", expected those of a model; keys begin with model, optimizer'),
                ((self.folder / "dcp", self.folder / "x", dict(TINY, n_embd=32)), {}, r"got shape \[256, 16\], expected \[256, 32\]"),
                ((self.folder / "dcp", self.folder / "x", dict(TINY, n_layer=3)), {}, 'got no tensor "transformer.h.2')):
            with self.assertRaisesRegex(shardwright.InputError, error):
                shardwright.from_dcp(*arguments, **options)
        with self.assertRaisesRegex(shardwright.InputError, "got no finished checkpoint"):
            shardwright.CheckpointReader(self.folder)
        for metadata, error in (
                ({"shardwright.optimizer": "lamb"}, 'shardwright.optimizer: got "lamb", expected the name of an optimizer, such as "adamw"'),
                ({"shardwright.optimizer": "adam", "shardwright.updates": "-1"},
                 'shardwright.updates: got "-1", expected the number of updates that were done')):
            safetensors.torch.save_file({"x": torch.zeros(1)}, self.folder / "w.safetensors", metadata)
            self.assert_fails(3, f"w.safetensors: metadata {error}", "checkpoint", "import", "w.safetensors", "-o", "y", "--model",
                              "./config.json")
        # The weights alone begin at step 0.
        step = shardwright.from_dcp(self.folder / "dcp", self.folder / "alone", TINY, optimizer=None)
        self.assertEqual(pathlib.Path(step).name, "step-00000000")

    def test_folders_of_strangers(self):
        """Stretches that overlap gave bytes of elsewhere; a pipe in the place of a file was waited on for ever."""
        good = self.folder / "step-00000001"
        good.mkdir()

        def make(stretches, shape=(20,), name="rank-{}.safetensors", offset=0):
            """A checkpoint whose tensor "a" lies in one file per (begin, count)."""
            for file in good.iterdir():
                file.unlink()
            files = []
            for i, (begin, count) in enumerate(stretches):
                header = json.dumps({"a": {"dtype": "F32", "shape": [count], "data_offsets": [offset, offset + 4 * count]}}).encode()
                content = struct.pack("<Q", len(header)) + header + struct.pack(f"<{count}f", *range(begin, begin + count))
                (good / f"rank-{i}.safetensors").write_bytes(content)
                files.append({"name": name.format(i), "size_bytes": len(content), "crc32": f"{zlib.crc32(content):08x}",
                              "stretches": [{"tensor": "a", "begin": begin, "count": count}]})
            write({"tensors": [{"name": "a", "kind": "parameter", "dtype": "F32", "shape": list(shape)}], "aliases": [], "files": files,
                   "optimizer": "adamw", "update": 0})

        def write(manifest):
            text = json.dumps(manifest, indent=1)[:-2].encode()
            (good / "manifest.json").write_bytes(text + b',\n "manifest_crc32": "%08x"\n}\n' % zlib.crc32(text))

        make([(0, 8), (8, 0), (8, 12)])
        reader = shardwright.CheckpointReader(good)
        self.assertEqual(reader._block("a", torch.Size([0]), torch.Size([20])).tolist(), list(range(20)))
        for stretches in ([(0, 20), (5, 5), (16, 4)], [(0, 8), (9, 11)], [(0, 8), (8, 11)], [(0, 8), (7, 13)], [(0, 21)], []):
            make(stretches)
            with self.assertRaisesRegex(shardwright.InputError, "expected stretches that cover all 20 once"):
                shardwright.CheckpointReader(good)
        for options, error in (({"shape": (1 << 50,)}, "cover all"), ({"name": "../rank-{}.safetensors"}, "the file name"),
                               ({"name": ".."}, "the file name"), ({"offset": 8}, "bytes 8 to"), ({"offset": -8}, "bytes -8 to")):
            make([(0, 20)], **options)
            with self.assertRaisesRegex(shardwright.InputError, error):
                shardwright.CheckpointReader(good)
        for text in (b"[" * 100_000, b"{}", b"[]", b"\xff", b""):
            (good / "manifest.json").write_bytes(text)
            with self.assertRaises(shardwright.InputError):
                shardwright.CheckpointReader(good)
        for manifest in ({}, {"tensors": 1}, {"tensors": [{}]}, {"tensors": [], "files": [{}]}, {"tensors": [], "files": [1]},
                         {"tensors": [{"name": [], "dtype": "F32", "shape": []}], "files": []}):
            write(manifest)
            with self.assertRaises(shardwright.InputError):
                shardwright.CheckpointReader(good)
        for place in ("manifest.json", "rank-0.safetensors"):
            for plant in (os.mkfifo, lambda file: os.symlink("/dev/zero", file), lambda file: os.symlink(good / place, file), os.mkdir):
                make([(0, 20)])
                (good / place).unlink()
                plant(good / place)
                with self.assertRaises(shardwright.InputError):
                    shardwright.CheckpointReader(good)
                (good / place).rmdir() if (good / place).is_dir() else (good / place).unlink()
        # A file that becomes a pipe between the two readings.
        make([(0, 20)])
        reader = shardwright.CheckpointReader(good)
        (good / "rank-0.safetensors").unlink()
        os.mkfifo(good / "rank-0.safetensors")
        with self.assertRaisesRegex(shardwright.InputError, "no regular file"):
            reader._block("a", torch.Size([0]), torch.Size([20]))
        os.mkfifo(self.folder / ".metadata")
        with self.assertRaisesRegex(shardwright.InputError, "got no file .metadata"):
            shardwright.from_dcp(self.folder, self.folder / "x", TINY)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
