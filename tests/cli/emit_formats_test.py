"""The emitted settings read by the frameworks themselves: Accelerate, the Trainer and DeepSpeed, with their own code."""

import importlib
import importlib.util
import json
import os
import pathlib
import shlex
import sys
import unittest
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", ACCELERATE_USE_CPU="true")

try:
    import accelerate
    import torch
    import transformers
    import yaml
    from accelerate.commands import launch
    from accelerate.utils import FullyShardedDataParallelPlugin
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

from shardwright_test_case import ShardwrightTestCase, main

LLAMA = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
         "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}


def build(config):
    cls = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[config["model_type"]]
    settings = {key: value for key, value in config.items() if key != "model_type"}
    return getattr(transformers, cls)(transformers.CONFIG_MAPPING[config["model_type"]](**settings))


class Formats(ShardwrightTestCase):

    def emit(self, target, config, flags, gpus=4):
        (self.folder / "model.json").write_text(json.dumps(config))
        self.succeed("plan", "--model", "model.json", "--cluster", f"a100-80 x{gpus}, nvlink 300 GB/s", "--seq", "32",
                     *shlex.split(flags), "-o", "plan.json")
        result = json.loads(self.succeed("emit", "plan.json", "--to", target, "--json", "-o", "out/", "--as-emitted",
                                         "emitted.json"))
        return [str(self.folder / file["path"]) for file in result["files"]]

    def emitted(self):
        return json.loads((self.folder / "emitted.json").read_text())

    def launch_environment(self, path):
        """What `accelerate launch --config_file` would give the processes."""
        args = launch.launch_command_parser().parse_args(["--config_file", path, "train.py"])
        args, _, _ = launch._validate_launch_command(args)
        return launch.prepare_multi_gpu_env(args), args

    def test_accelerate_version_2(self):
        path, = self.emit("accelerate", LLAMA, "--wrap accelerate --reshard never --recompute full --shard 2 --offload parameters")
        config = accelerate.commands.config.config_args.load_config_from_file(path)
        self.assertEqual(config.distributed_type, accelerate.utils.DistributedType.FSDP)
        self.assertEqual(config.num_processes, 4)
        environment, args = self.launch_environment(path)
        self.assertEqual((args.parallelism_config_dp_replicate_size, args.parallelism_config_dp_shard_size), (2, 2))
        with unittest.mock.patch.dict(os.environ, environment):
            plugin = FullyShardedDataParallelPlugin()
        self.assertEqual(environment["ACCELERATE_MIXED_PRECISION"], "bf16")
        self.assertEqual(plugin.fsdp_version, 2)
        self.assertIs(plugin.reshard_after_forward, False)
        self.assertEqual(plugin.transformer_cls_names_to_wrap, ["LlamaDecoderLayer"])
        self.assertTrue(plugin.activation_checkpointing)
        self.assertEqual(type(plugin.cpu_offload).__name__, "CPUOffloadPolicy")

    def test_accelerate_version_1(self):
        from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
        path, = self.emit("accelerate", GPT2, "--dialect fsdp1 --reshard never --backward-prefetch post --forward-prefetch on")
        environment, _ = self.launch_environment(path)
        # Its parameters are moved by a device of their own, which this machine need not have.
        environment["FSDP_SYNC_MODULE_STATES"] = "false"
        environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        with unittest.mock.patch.dict(os.environ, environment):
            plugin = FullyShardedDataParallelPlugin()
        self.assertEqual(plugin.fsdp_version, 1)
        self.assertEqual(plugin.sharding_strategy, ShardingStrategy.SHARD_GRAD_OP)
        self.assertEqual(plugin.backward_prefetch, BackwardPrefetch.BACKWARD_POST)
        self.assertTrue(plugin.forward_prefetch)
        self.assertTrue(plugin.use_orig_params)
        self.assertEqual(plugin.transformer_cls_names_to_wrap, ["GPT2Block"])

    def wrapped_by_accelerate(self, config, path):
        """(modules, reshard_after_forward) of every fully_shard that Accelerate makes with these settings."""
        import torch.distributed as dist
        import torch.distributed.fsdp as fsdp
        environment, _ = self.launch_environment(path)
        with unittest.mock.patch.dict(os.environ, environment):
            plugin = FullyShardedDataParallelPlugin()
        plugin.cpu_ram_efficient_loading = False
        model = build(config)
        names = {id(module): name for name, module in model.named_modules()}
        calls = []
        real = fsdp.fully_shard

        def record(modules, **options):
            listed = modules if isinstance(modules, (list, tuple)) else [modules]
            calls.append((sorted(names[id(module)] for module in listed), options.get("reshard_after_forward")))
            return real(modules, **options)

        accelerator = unittest.mock.Mock(torch_device_mesh=None, mixed_precision="bf16", is_main_process=False)
        accelerator.state.fsdp_plugin = plugin
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with unittest.mock.patch.object(fsdp, "fully_shard", record):
            accelerate.utils.fsdp_utils.fsdp2_prepare_model(accelerator, model)
        return calls

    def test_accelerate_wraps_as_predicted(self):
        """The units of the plan as emitted are those that Accelerate makes."""
        for config, flags in ((LLAMA, "--wrap block"), (LLAMA, "--wrap torchtitan --reshard never"),
                              (GPT2, "--wrap torchtitan"), ({**LLAMA, "tie_word_embeddings": True}, "--wrap accelerate"),
                              (LLAMA, "--wrap root")):
            with self.subTest(config=config["model_type"], flags=flags):
                path, = self.emit("accelerate", config, flags)
                calls = self.wrapped_by_accelerate(config, path)
                # None: FSDP2 decides, and keeps the root.
                found = sorted((modules, reshard is True) for modules, reshard in calls)
                units = self.emitted()["plan"]["units"]
                self.assertEqual(found, sorted((sorted(unit["modules"]), unit["reshard"] == "always") for unit in units))

    def test_attention_that_settings_cannot_say(self):
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "2", "--seq", "128", "--attention", "cudnn", "-o", "own.json")
        duty = "run the model inside torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION)"
        self.assertIn(duty, self.succeed("emit", "own.json", "--to", "fsdp2", "-o", "emitted"))
        self.succeed("plan", "--model", "gpt2", "--cluster", "nd-mi300x-v5", "--gpus", "2", "--seq", "128", "--attention", "ck", "-o", "ck.json")
        self.assertIn("torch.backends.cuda.preferred_rocm_fa_library(\"ck\")", self.succeed("emit", "ck.json", "--to", "fsdp2", "-o", "emitted"))
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "2", "--seq", "128", "-o", "usual.json")
        self.assertNotIn("sdpa_kernel", self.succeed("emit", "usual.json", "--to", "fsdp2", "-o", "emitted"))
        self.assertEqual(self.run_program("plan", "--model", "gpt2", "--cluster", "dgx-h100", "--attention", "cudn"),
                         (2, "", "error: --attention: got \"cudn\", expected flash, materialized, cudnn, flash3, triton or ck; did you mean "
                                 "\"cudnn\"?\n"))

    def test_kernels_of_the_trainer(self):
        parser = transformers.HfArgumentParser(transformers.TrainingArguments)
        for flags, key, duty in (("--kernel-set hf-liger", "use_liger_kernel", "run head and loss in 16 chunks"),
                                 ("--loss-chunks 4", "use_liger_kernel", "run head and loss in 4 chunks"),
                                 ("--kernel-set torch-compile", "torch_compile", "compile each block before the model is wrapped")):
            with self.subTest(flags=flags):
                path, = self.emit("trainer", LLAMA, flags)
                settings = json.loads(pathlib.Path(path).read_text())
                arguments, = parser.parse_dict({**settings, "bf16": False, "use_cpu": True}, allow_extra_keys=False)
                self.assertEqual([k for k in ("use_liger_kernel", "torch_compile") if getattr(arguments, k)], [key])
                self.assertNotIn(duty, self.succeed("emit", "plan.json", "--to", "trainer", "-o", "trainer.json"))
                self.assertIn(duty, self.succeed("emit", "plan.json", "--to", "fsdp2", "-o", "fsdp2"))
                self.assertIn("hf-liger" if key == "use_liger_kernel" else "torch-compile",
                              self.succeed("import-run", path, "--model", "model.json", "--cluster", "dgx-h100", "--seq", "128",
                                           "-o", "back.json"))

    def test_trainer(self):
        parser = transformers.HfArgumentParser(transformers.TrainingArguments)
        for config, flags, expected in (
            (LLAMA, "--wrap accelerate --accumulation 3 --recompute full --micro-batch 2 --optimizer adamw:fused",
             {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True,
              "transformer_cls_names_to_wrap": "LlamaDecoderLayer"}),
            (GPT2, "--dialect fsdp1 --reshard never --backward-prefetch post --limit-all-gathers off --precision fp16-mixed",
             {"fsdp_version": 1, "reshard_after_forward": "shard_grad_op", "backward_prefetch": "BACKWARD_POST",
              "limit_all_gathers": False, "transformer_cls_names_to_wrap": "GPT2Block"}),
        ):
            with self.subTest(flags=flags):
                path, = self.emit("trainer", config, flags)
                settings = json.loads(pathlib.Path(path).read_text())
                # This machine has no GPU for 16-bit training.
                dtypes = {key: settings.pop(key) for key in ("bf16", "fp16") if key in settings}
                self.assertEqual(dtypes, {"fp16": True} if "fp16" in flags else {"bf16": True})
                arguments, = parser.parse_dict({**settings, "use_cpu": True}, allow_extra_keys=False)
                plan = self.emitted()["plan"]
                self.assertEqual(arguments.per_device_train_batch_size, plan["micro_batch"])
                self.assertEqual(arguments.gradient_accumulation_steps, plan["accumulation"])
                self.assertEqual(expected, {key: arguments.fsdp_plugin_args[key] for key in expected})

    def test_deepspeed(self):
        if importlib.util.find_spec("deepspeed") is None:
            self.skipTest("deepspeed is not installed")
        from accelerate.utils.deepspeed import HfDeepSpeedConfig
        from deepspeed.runtime.config import DeepSpeedConfig
        ranks = unittest.mock.Mock()
        ranks.get_data_parallel_world_size.return_value = 4
        for flags, stage in (("--dialect zero1 --allgather-bucket 1000000", 1), ("--dialect zero2 --overlap-comm on", 2),
                             ("--dialect zero3 --prefetch-bucket 12345 --max-live-parameters 23456 --sub-group 34567 "
                              "--max-reuse-distance 45678 --persistence-threshold 56 --reduce-bucket 67890", 3),
                             ("--wrap block --reshard never --accumulation 2", 3),
                             ("--dialect zero3 --offload optimizer", 3), ("--wrap block --offload parameters", 3)):
            with self.subTest(flags=flags):
                path, = self.emit("deepspeed", LLAMA, flags)
                with unittest.mock.patch("deepspeed.runtime.config.dist.get_rank", return_value=0):
                    config = DeepSpeedConfig(json.loads(pathlib.Path(path).read_text()), ranks)
                emitted, zero = self.emitted(), config.zero_config
                on_host = [key for key in ("parameters", "optimizer") if emitted["plan"]["offload"][key]]
                self.assertEqual(on_host, [part for part in ("parameters", "optimizer") if f"--offload {part}" in flags])
                parts = {"parameters": [zero.offload_param, zero.offload_optimizer], "optimizer": [zero.offload_optimizer]}
                for part in parts[on_host[0]] if on_host else []:
                    self.assertEqual((part.device, part.pin_memory), ("cpu", True))
                self.assertEqual([zero.offload_param is None, zero.offload_optimizer is None],
                                 [on_host != ["parameters"], not on_host])
                self.assertEqual(HfDeepSpeedConfig(path).is_offload(), bool(on_host))
                self.assertEqual(zero.stage, stage)
                self.assertEqual(config.train_batch_size, emitted["job"]["global_batch"])
                self.assertEqual(config.communication_data_type, torch.float32)
                self.assertEqual(zero.reduce_bucket_size, emitted["plan"]["zero"]["reduce_bucket"])
                if stage == 3:
                    self.assertEqual(
                        [zero.prefetch_bucket_size, zero.max_live_parameters, zero.max_reuse_distance,
                         zero.param_persistence_threshold, zero.sub_group_size],
                        [emitted["plan"]["zero"][key] for key in ("prefetch_bucket", "max_live_parameters", "max_reuse_distance",
                                                                  "persistence_threshold", "sub_group")])
                if "block" in flags:
                    self.assertEqual(zero.leaf_module.classes, ["LlamaDecoderLayer"])


if __name__ == "__main__":
    main()
