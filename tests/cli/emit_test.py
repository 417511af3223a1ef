"""emit: files that the formats' own parsers read, golden texts, what is lost, exit codes."""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import TESTS, ShardwrightTestCase, main

GOLDEN = TESTS / "data" / "emit"
PYTHON = TESTS.parent / "planner" / "emitters" / "python"

# Three plans that differ in dialect, mesh, units and every option that some target can hold.
PLANS = {
    "fsdp2": "--model gpt2 --cluster dgx-a100 --nodes 2 --gpus 4 --seq 128 --wrap torchtitan --shard 4 --reshard 2 "
             "--accumulation 2 --sync last --recompute full --optimizer adamw:fused",
    "fsdp1": "--model llama-3.2-1b --cluster dgx-h100 --nodes 2 --seq 512 --dialect fsdp1 --replicate 2 --reshard never "
             "--backward-prefetch post --forward-prefetch on --limit-all-gathers off --precision fp16-mixed --clip off",
    "zero3": "--model pythia-70m --cluster dgx-a100 --seq 256 --dialect zero3 --micro-batch 2 --prefetch-bucket 1e6 "
             "--offload parameters --optimizer sgd --weight-decay off",
}


class Emit(ShardwrightTestCase):

    def plan(self, words):
        self.succeed("plan", *shlex.split(words), "-o", "plan.json")

    def emit(self, target, *flags):
        return json.loads(self.succeed("emit", "plan.json", "--to", target, "--json", *flags))

    def targets(self):
        """The choices that the error message lists."""
        error = self.run_program("emit", "plan.json", "--to", "?")[2]
        listed = error.split("expected ")[1].strip().replace(" or ", ", ")
        return listed.split(", ")

    def test_golden(self):
        for name, words in PLANS.items():
            self.plan(words)
            for target in self.targets():
                with self.subTest(plan=name, target=target):
                    result = self.emit(target)
                    self.check_syntax(result["files"])
                    shipped = [file for file in result["files"] if (PYTHON / file["name"]).exists()]
                    for file in shipped:
                        self.assertEqual(file["text"], (PYTHON / file["name"]).read_text(encoding="utf-8"))
                    texts = {f"{target}.{file['name']}": file["text"] for file in result["files"] if file not in shipped}
                    losses = "".join(f"{loss['field']} of {loss['subject'] or '-'}: {loss['planned']} -> {loss['emitted']}\n"
                                     for loss in result["losses"])
                    texts[f"{target}.losses"] = losses
                    self.compare(GOLDEN / name, texts)

    def compare(self, folder, texts):
        if os.environ.get("SHARDWRIGHT_UPDATE_GOLDEN"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
        for name, text in texts.items():
            self.assertEqual(text, (folder / name).read_text(encoding="utf-8"), f"{folder.name}/{name}")

    def check_syntax(self, files):
        for file in files:
            name, text = file["name"], file["text"]
            if name.endswith(".json"):
                json.loads(text)
            elif name.endswith(".toml"):
                tomllib.loads(text)
            elif name.endswith(".py"):
                compile(text, name, "exec")
            elif name.endswith(".sh"):
                done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
                self.assertEqual((done.returncode, done.stderr), (0, ""), name)
            else:
                self.assertTrue(name.endswith(".yaml"), name)  # emit_formats_test.py reads it with PyYAML

    def test_outcomes(self):
        """What is printed of both plans is what simulate says of them."""
        self.plan(PLANS["fsdp1"])
        result = self.emit("accelerate", "--as-emitted", "emitted.json")
        self.assertFalse(result["is_exact"])
        for key, file in (("planned", "plan.json"), ("as_emitted", "emitted.json")):
            simulated = json.loads(self.succeed("simulate", file, "--json"))
            self.assertEqual(result[key]["step_time_s"], simulated["step_time_s"])
            self.assertEqual(result[key]["peak_allocated_bytes"], simulated["memory"]["peak_allocated_bytes"])
            self.assertEqual(result[key]["fits"], simulated["fits"])

    def test_release_of_torch(self):
        """A plan of another release than the default says so, also in a dialect that has one, too."""
        self.plan("--model llama-3.2-1b --cluster dgx-h100 --seq 512 --torch 2.8")
        duty = "run it with PyTorch 2.8, whose rules the plan follows"
        for target in ("fsdp2", "fsdp1"):
            result = self.emit(target, "--as-emitted", "emitted.json")
            self.assertIn(duty, result["by_hand"])
            self.assertEqual(json.loads((self.folder / "emitted.json").read_text())["plan"]["torch"], "2.8")
        self.plan("--model llama-3.2-1b --cluster dgx-h100 --seq 512")
        self.assertFalse(any("PyTorch 2" in text for text in self.emit("fsdp2")["by_hand"]))

    def test_settings_of_the_allocator(self):
        """Launchers export those of the plan and nothing else; torchtitan's own script has its own; others are told."""
        conf = "expandable_segments:True,max_split_size_mb:64"
        self.plan("--model llama-3.2-1b --cluster dgx-h100 --seq 512 --allocator " + conf)
        for target in ("torchrun", "slurm"):
            result = self.emit(target)
            self.assertIn(f"\nexport PYTORCH_ALLOC_CONF={conf}\n", result["files"][0]["text"])
            self.assertFalse(any("ALLOC_CONF" in text for text in result["by_hand"]))
        self.assertIn(f"export PYTORCH_ALLOC_CONF={conf} (before PyTorch 2.9: PYTORCH_CUDA_ALLOC_CONF)",
                      self.emit("accelerate")["by_hand"])
        loss = [loss for loss in self.emit("torchtitan")["losses"] if loss["field"] == "job.allocator"]
        self.assertEqual([(loss[0]["planned"], loss[0]["emitted"])], [(conf, "expandable_segments:True")])
        self.plan("--model llama-3.2-1b --cluster dgx-h100 --seq 512")
        self.assertNotIn("export PYTORCH", self.emit("torchrun")["files"][0]["text"])

    def test_the_allocator_of_a_plan_and_of_simulate(self):
        """The same settings in the plan's file and as a flag are the same; blocks that are never split reserve more."""
        flags = "--model llama-3.2-1b --cluster dgx-h100 --seq 2048"
        conf = "max_split_size_mb:21"
        self.plan(flags)
        plain = json.loads(self.succeed("simulate", "plan.json", "--json"))
        flagged = json.loads(self.succeed("simulate", "plan.json", "--allocator", conf, "--json"))
        self.plan(flags + " --allocator " + conf)
        filed = json.loads(self.succeed("simulate", "plan.json", "--json"))
        reserved = [run["memory"]["peak_reserved_bytes"] for run in (plain, flagged, filed)]
        self.assertEqual(reserved[1], reserved[2])
        self.assertGreater(reserved[1], reserved[0])
        self.assert_fails(2, '--allocator: got "roundup:4", expected settings of PyTorch\'s allocator that change what fits, '
                          "as PYTORCH_ALLOC_CONF has them: expandable_segments:True|False, max_split_size_mb:N, "
                          "garbage_collection_threshold:X, pinned_max_round_threshold_mb:N", "simulate", "plan.json", "--allocator", "roundup:4")
        native = "--model gpt2 --cluster dgx-h100 --seq 128 --global-batch 8 --allocator expandable_segments:True"
        self.assert_fails(2, "--allocator: native has one arena and no caching allocator", "plan", *shlex.split(native),
                          "--dialect", "native", "-o", "native.json")
        both = json.loads(self.succeed("plan", *shlex.split(native), "--dialect", "native,fsdp2", "-o", "b.json", "--json"))
        self.assertTrue(all(row["feasible"] for row in both["dialects"]), both["dialects"])
        self.assert_fails(2, '--allocator max_split_size_mb: got "20", expected an integer in [21, 1048576]',
                          "simulate", "plan.json", "--allocator", "max_split_size_mb:20")
        self.assert_fails(2, '--allocator expandable_segments: got "true", expected True or False',
                          "simulate", "plan.json", "--allocator", "expandable_segments:true")

    def test_attention_of_another_maker(self):
        plan = ("plan", "--model", "gpt2", "--seq", "128", "-o", "plan.json", "--cluster")
        for cluster, kernels, makers, gpu in (("dgx-h100", "ck", "AMD", "h100-80"), ("8xMI300X", "cudnn", "NVIDIA", "mi300x"),
                                              ("8xMI300X", "flash3", "NVIDIA", "mi300x"), ("host", "cudnn", "NVIDIA", "host-rank")):
            self.assert_fails(2, f"--attention: these kernels run on {makers}'s GPUs, and {gpu} is none", *plan, cluster,
                              "--attention", kernels)
        self.succeed(*plan, "8xMI300X", "--attention", "ck")
        self.succeed(*plan, "8xMI300X", "--attention", "triton")

    def test_a_lossless_emission_changes_nothing(self):
        """torchtitan and DeepSpeed hold plans that were made by their own rules."""
        for target, words in (
            ("torchtitan", "--model llama-3.2-1b --cluster dgx-h100 --seq 512 --wrap torchtitan --recompute selective "
             "--allocator expandable_segments:True"),
            ("deepspeed", "--model llama-3.2-1b --cluster dgx-h100 --seq 512 --dialect zero3 --overlap-comm off"),
            ("deepspeed", "--model llama-3.2-1b --cluster dgx-h100 --seq 512 --dialect zero3 --offload optimizer "
                          "--optimizer adamw:fused"),
            ("deepspeed", "--model llama-3.2-1b --cluster dgx-h100 --seq 512 --dialect zero3 --offload parameters "
                          "--optimizer adamw:fused"),
            ("accelerate", "--model llama-3.2-1b --cluster dgx-h100 --seq 512 --wrap accelerate --precision fp32/bf16/bf16"),
        ):
            with self.subTest(target=target):
                self.plan(words)
                result = self.emit(target, "--as-emitted", "emitted.json")
                self.assertEqual(result["losses"], [])
                self.assertEqual(result["planned"], result["as_emitted"])
                self.assertEqual(*(json.loads((self.folder / name).read_text())["job"]
                                   for name in ("plan.json", "emitted.json")))

    def test_what_no_setting_says_is_a_loss(self):
        for target, flags, field, expected in (
                ("trainer", "--dialect ddp --offload activations", "plan.offload.activations", ("true", "false")),):
            with self.subTest(target=target):
                self.plan("--model gpt2 --cluster dgx-a100 --seq 128 " + flags)
                losses = {loss["field"]: (loss["planned"], loss["emitted"]) for loss in self.emit(target)["losses"]}
                self.assertEqual(losses.get(field), expected)

    def test_a_leaf_of_zero3_holds_no_other_unit(self):
        # Blocks as units, and of the rest each module with parameters: the embeddings hold some and have a unit inside.
        self.plan("--model vit-b-16 --cluster dgx-a100 --dialect zero3 --wrap module --micro-batch 2")
        file = json.loads((self.folder / "plan.json").read_text())
        units = file["plan"]["units"]
        block = dict(units[0])
        rest = [unit for unit in units if ".layer." not in unit["name"]]
        self.assertEqual([unit["name"] for unit in rest], ["vit.embeddings", "vit.embeddings.patch_embeddings.projection",
                                                           "vit.layernorm", "classifier", "root"])
        names = [f"vit.encoder.layer.{i}" for i in range(12)]
        file["plan"]["units"] = [block | {"name": name, "modules": [name]} for name in names] + rest
        (self.folder / "plan.json").write_text(json.dumps(file))
        report = self.emit("deepspeed", "-o", "ds_config.json")
        self.assertEqual(report["losses"], [])
        settings = json.loads((self.folder / "ds_config.json").read_text())
        self.assertEqual(settings["zero_optimization"]["leaf_module"]["classes"], ["ViTLayer"])

    def test_names(self):
        """The dialects of names, against the frameworks' own tables: transformers 5, torchtitan 0.3, files on the hub."""
        config = {"model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "rms_norm_eps": 1e-6}
        (self.folder / "moe.json").write_text(json.dumps(config))
        llama = "--model llama-3.2-1b --cluster dgx-h100 --seq 128 --wrap torchtitan"
        gpt2 = "--model gpt2 --cluster dgx-a100 --seq 128"
        moe = "--model moe.json --cluster dgx-a100 --gpus 4 --seq 128"
        for words, dialect, expected in (
            (moe, "hf-v5", {"model.layers.0.mlp.experts.gate_up_proj": [4, 80, 32], "model.layers.0.mlp.gate.weight": [4, 32],
                            "model.layers.0.mlp.experts.down_proj": [4, 32, 40]}),
            (moe, "hf-v4", {"model.layers.0.block_sparse_moe.experts.3.w1.weight": [40, 32]}),
            (llama, "torchtitan", {"tok_embeddings.weight": [128256, 2048], "norm.weight": [2048],
                                   "layers.15.attention.qkv_linear.wk.weight": [512, 2048], "lm_head.weight": [128256, 2048],
                                   "layers.0.feed_forward.w2.weight": [2048, 8192], "layers.0.ffn_norm.weight": [2048]}),
            (gpt2, "checkpoint", {"wte.weight": [50257, 768], "h.11.attn.c_attn.weight": [768, 2304]}),
        ):
            with self.subTest(dialect=dialect):
                self.plan(words)
                files = {file["name"]: file["text"] for file in self.emit("fsdp2", "--fqns", dialect)["files"]}
                shapes = {p["fqn"]: p["shape"] for p in json.loads(files["fsdp2_plan.json"])["parameters"]}
                self.assertEqual(expected, {fqn: shapes.get(fqn) for fqn in expected})
        self.plan(gpt2)
        self.assert_fails(3, "--fqns: got torchtitan with a model of type gpt2, expected hf-v4, hf-v5 or checkpoint, or a model "
                          "of type llama qwen3 qwen3_moe",
                          "emit", "plan.json", "--to", "fsdp2", "--fqns", "torchtitan", "--json")

    def test_outputs(self):
        self.plan(PLANS["fsdp2"])
        report = self.succeed("emit", "plan.json", "--to", "torchtitan", "-o", "run/")
        self.assertTrue(report.endswith("Wrote run/torchtitan.toml\nWrote run/torchtitan_recipe.py\n"))
        self.assertEqual(sorted(os.listdir(self.folder / "run")), ["torchtitan.toml", "torchtitan_recipe.py"])
        self.succeed("emit", "plan.json", "--to", "accelerate", "-o", "mine.yaml")
        code, out, err = self.run_program("emit", "plan.json", "--to", "accelerate")
        self.assertEqual((code, out), (0, (self.folder / "mine.yaml").read_text()))
        self.assertIn("job.precision.reduce: fp32 -> bf16", err)
        before = sorted(os.listdir(self.folder))
        code, out, _ = self.run_program("emit", "plan.json", "--to", "accelerate", "-o", "no.yaml", "--exact")
        self.assertEqual(code, 1)
        self.assertIn("The framework will run differently:", out)
        self.assertEqual(sorted(os.listdir(self.folder)), before)

    def test_errors(self):
        self.plan(PLANS["fsdp2"])
        self.assert_fails(2, "--to is required; see shardwright emit --help", "emit", "plan.json")
        self.assert_fails(2, "--to torchtitan writes several files, so it needs -o FOLDER or --json",
                          "emit", "plan.json", "--to", "torchtitan")
        error = self.run_program("emit", "plan.json", "--to", "accelerat")[2]
        self.assertTrue(error.endswith('did you mean "accelerate"?\n'), error)


if __name__ == "__main__":
    main()
