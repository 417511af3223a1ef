"""scripts/first_contact.py: what it counts as read, refused by a feature, and refused otherwise."""

import pathlib
import subprocess
import sys

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/first_contact.py"
FILES = {
    "read.yaml": "output_dir: o\nmodel_name_or_path: gpt2\nper_device_train_batch_size: 1\nbf16: true\nblock_size: 128\n",
    "sub/two-nodes.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 16\n",
    "adapter.yaml": "base_model: gpt2\nadapter: lora\nlora_r: 8\nloftq_config: {loftq_bits: 4}\n",
    "degree.yaml": "base_model: gpt2\ntensor_parallel_size: 2\n",
    "recipe.yaml": "recipe: TrainFinetuneRecipe\nmodel:\n  name: x\n",
    "typo.toml": "[training]\nlocal_batchsize = 1\n[parallelism]\n",
    "workflow.yaml": "on: push\njobs: {}\n",
    "notes.txt": "output_dir: o\n",
}


class FirstContact(ShardwrightTestCase):

    def test_counts(self):
        for name, text in FILES.items():
            path = self.folder / "corpus" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run([sys.executable, "-B", SCRIPT, shardwright_test_case.PROGRAM, self.folder / "corpus"],
                              capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], "| corpus | files | read | read, another model | refused by feature | refused otherwise |")
        self.assertEqual(lines[2:4], ["| corpus | 6 | 1 | 1 | 3 | 1 |", "| all | 6 | 1 | 1 | 3 | 1 |"])
        self.assertEqual([line for line in lines if line.startswith("    1 ")],
                         ["    1  LoftQ", "    1  tensor parallelism", "    1  a recipe of another kind of model or loss",
                          '    1  training.local_batchsize: got 1, expected a key of this file to be known; did you mean '
                          '"training.local_batch_size"?'])


if __name__ == "__main__":
    main()
