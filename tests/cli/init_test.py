"""Runs that start from weights of others: files as the hub has them, whole and in parts, in several dtypes, under old names and
new ones, and what is wrong with them. tests/executor/torch_finetune.py does it with files that Transformers has written."""

import json
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import main
from training_test_case import TINY, TrainingTestCase, tensors


def write(path, content):
    """A safetensors file of {name: (dtype, shape, bytes)}."""
    header, data = {}, b""
    for name, (dtype, shape, own) in content.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(own)]}
        data += own
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def as_bf16(data):
    """fp32 numbers cut off: what they are in bf16 when their lower halves are zero."""
    return b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))


class Init(TrainingTestCase):

    def setUp(self):
        super().setUp()
        self.plan("p.json", 2, "--global-batch", "4")
        still = {"format": "shardwright-training", "version": 1, "optimizer": {"learning_rate": 0.0, "weight_decay": 0.0}}
        (self.folder / "still.json").write_text(json.dumps(still))
        self.train("p.json", "--steps", "3", "--seed", "5", "--checkpoint", "trained")
        self.weights = self.export("trained", "trained.safetensors")
        self.kept = 0

    def start(self, init, plan="p.json"):
        """The weights of a run that starts from `init` and does not move, and what it says."""
        self.kept += 1
        code, _, err = self.run_program("run", plan, "--data", "random:100", "--steps", "1", "--training", "still.json", "--init",
                                        init, "--checkpoint", f"kept{self.kept}")
        self.assertEqual(code, 0, err)
        self.assertIn(f"first weights from {init}\n", err)
        return self.export(f"kept{self.kept}"), err

    def fails(self, text, init):
        self.assert_fails(3, text, "run", "p.json", "--steps", "1", "--init", init, "--checkpoint", "new")

    def test_a_file_under_any_plan(self):
        for ranks, flags in ((1, ()), (2, ("--dialect", "zero2")), (4, ("--dialect", "native", "--wrap", "root"))):
            self.plan("q.json", ranks, "--global-batch", "4", *flags)
            self.assertEqual(self.start("trained.safetensors", "q.json")[0], self.weights)
        # The same losses as the run that the weights are from: as it evaluates, so does what starts from them.
        own = self.succeed("eval", "p.json", "--checkpoint", "trained", "--data", "random:9", "--json")
        other = self.succeed("eval", "p.json", "--checkpoint", "kept1", "--data", "random:9", "--json")
        self.assertEqual(json.loads(own)["mean_loss"], json.loads(other)["mean_loss"])

    def test_a_folder_in_parts_without_prefix_in_bf16(self):
        # Numbers that bf16 holds, half of the tensors in it; names as GPT-2's hub files have them, and a causal mask.
        rounded = {name.removeprefix("transformer."): (dtype, shape, b"".join(b"\0\0" + data[i + 2:i + 4] for i in range(0, len(data), 4)))
                   for name, (dtype, shape, data) in self.weights.items()}
        names = sorted(rounded)
        parts = {"a.safetensors": {n: ("BF16", rounded[n][1], as_bf16(rounded[n][2])) for n in names[::2]},
                 "b.safetensors": {**{n: rounded[n] for n in names[1::2]}, "h.0.attn.bias": ("F32", [1], b"\0\0\0\0"),
                                   "head.weight": ("F32", [1], b"\0\0\0\0")}}
        hub = self.folder / "hub"
        hub.mkdir()
        for file, content in parts.items():
            write(hub / file, content)
        index = {"weight_map": {name: file for file, content in parts.items() for name in content}}
        (hub / "model.safetensors.index.json").write_text(json.dumps(index))
        started, err = self.start("hub")
        self.assertEqual(started, {f"transformer.{name}": entry for name, entry in rounded.items()})
        self.assertIn("warning: hub: the model has no parameter for head.weight\n", err)
        # Import is export's inverse, and a run may begin with what it has written, with any data.
        (hub / "config.json").write_text(json.dumps(TINY))
        code, out, err = self.run_program("checkpoint", "import", "hub", "-o", "imported")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"\Aimported/step-00000000\n")
        self.succeed("checkpoint", "export", "imported", "-o", "back.safetensors")
        back = tensors(self.folder / "back.safetensors")
        self.assertEqual(back, {f"transformer.{name}": entry for part in parts.values() for name, entry in part.items()
                                if name in rounded})
        steps = self.train("p.json", "--steps", "2", "--checkpoint", "imported", "--resume")
        self.assertEqual([s["step"] for s in steps], [0, 1])
        straight = self.train("p.json", "--steps", "2", "--init", "hub", "--checkpoint", "straight")
        self.assertEqual([s["loss"] for s in steps], [s["loss"] for s in straight])
        self.assertEqual(self.export("imported"), self.export("straight"))
        self.assert_fails(3, "imported: got checkpoints of an earlier run, the newest imported/step-00000002, expected a folder "
                             "without any; --resume goes on from there, another --checkpoint FOLDER begins anew",
                          "checkpoint", "import", "hub", "-o", "imported")
        # Nobody starts from random weights beside trained ones without a word.
        code, _, err = self.run_program("plan", "--model", "./hub", "--seq", "16", "--cluster", "h100-80 x2, nvlink 450 GB/s",
                                        "--kernel-set", "shardwright-host", "--precision", "fp32", "-o", "r.json", "--no-search")
        self.assertEqual(code, 0, err)
        self.assertIn("note: ./hub holds weights; run starts from them with --init ./hub\n", err)

    def test_what_is_wrong_is_said_before_anything_runs(self):
        write(self.folder / "w.safetensors", {n: w for n, w in self.weights.items() if n != "transformer.h.1.ln_1.weight"})
        self.fails('w.safetensors: got no tensor "transformer.h.1.ln_1.weight", expected every parameter of '
                   f"{self.folder.name}", "w.safetensors")
        write(self.folder / "w.safetensors", {**self.weights, "transformer.wpe.weight": ("F32", [8, 16], bytes(512))})
        self.fails('w.safetensors: tensor "transformer.wpe.weight": got shape [8, 16], expected [16, 16], as the model has',
                   "w.safetensors")
        write(self.folder / "w.safetensors", {**self.weights, "transformer.wpe.weight": ("I64", [16, 16], bytes(2048))})
        self.fails('w.safetensors: tensor "transformer.wpe.weight": got I64, expected F32, BF16 or F16', "w.safetensors")
        self.fails("none.safetensors: got no such file, expected a safetensors file", "none.safetensors")
        (self.folder / "empty").mkdir()
        self.fails("empty: got no weights, expected a folder with model.safetensors or model.safetensors.index.json", "empty")
        content = (self.folder / "trained.safetensors").read_bytes()
        (self.folder / "w.safetensors").write_bytes(content[:-4])
        self.fails(f"w.safetensors: got {len(content) - 4} bytes, expected {len(content)}, as its header says", "w.safetensors")
        self.assert_fails(2, "checkpoint import needs --output FOLDER", "checkpoint", "import", "w.safetensors")
        self.assert_fails(2, "--transformers is of checkpoint export", "checkpoint", "inspect", "trained", "--transformers", "4")


if __name__ == "__main__":
    main()
