"""The emitted appliers on real transformers models: what they wrap trains as the unwrapped model does.

Plans come from shardwright, for the same configurations that transformers builds its models from. Processes are forked
after the imports, two and then four of them, and run all cases in one gloo group.
"""

import copy
import importlib
import json
import os
import pathlib
import shlex
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "OFF")

try:
    import torch
    import torch.distributed as dist
    import transformers
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from gloo_ranks import run_ranks
from shardwright_test_case import ShardwrightTestCase, main

STEPS = 3
SEQUENCE = 16
# Sums in another order: fp32 has 1.2e-7 per operation, a few thousand of them, relative to losses of about 4.
TOLERANCE = 2e-5
# One step in bf16 against fp32: 2^-8 per operation.
LOW_PRECISION = 2e-2

LLAMA = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
         "tie_word_embeddings": False}
MODELS = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {"model_type": "gpt2", "vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2,
                                 "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "t5": ("T5ForConditionalGeneration", {"model_type": "t5", "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 44,
                                          "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
                                          "decoder_start_token_id": 0}),
    "mixtral": ("MixtralForCausalLM", {"model_type": "mixtral", "vocab_size": 61, "hidden_size": 32,
                                       "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
                                       "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
                                       "max_position_embeddings": 64, "rms_norm_eps": 1e-6}),
}

# Units inside units, a group of modules, and prefetch lists.
NESTED = [{"modules": [f"model.layers.{i}.self_attn"]} for i in range(3)] + [
    {"modules": ["model.layers.0"], "forward_prefetch": ["model.layers.1", "model.layers.2"]},
    {"modules": ["model.layers.1"], "backward_prefetch": ["model.layers.0"]},
    {"modules": ["model.layers.2"], "reshard": "never"},
    {"name": "ends", "modules": ["model.norm", "lm_head"], "reshard": "never"},
    {"modules": [""], "reshard": "always"}]
EXPERTS = [{"modules": ["model.layers.0.block_sparse_moe.experts"]}, {"modules": ["model.layers.0"]},
           {"modules": ["model.layers.1"]}]

# (target, model, flags of plan), by number of ranks. Without --precision everything is fp32.
CASES = {
    2: [
        ("fsdp2", "llama", "--wrap block"),
        ("fsdp2", "llama", "--wrap nested.json"),
        ("fsdp2", "llama", "--wrap torchtitan --reshard always --recompute selective"),
        ("fsdp2", "llama", "--wrap torchtitan --precision bf16-mixed"),
        ("fsdp2", "gpt2", "--wrap torchtitan --recompute full --micro-batch 2"),
        ("fsdp2", "t5", "--wrap torchtitan --accumulation 2 --sync last"),
        ("fsdp2", "llama", "--wrap block --frozen model.layers.0.*"),
        ("fsdp1", "llama", "--dialect fsdp1 --recompute full"),
        ("fsdp1", "gpt2", "--dialect fsdp1 --backward-prefetch post --reshard never --use-orig-params off"),
        ("fsdp1", "t5", "--dialect fsdp1 --accumulation 2 --sync last --forward-prefetch on"),
    ],
    4: [
        ("fsdp2", "tied", "--wrap torchtitan --reshard 2"),
        ("fsdp2", "llama", "--wrap block --shard 2 --accumulation 2 --sync replicate_last"),
        ("fsdp2", "mixtral", "--wrap experts.json --shard 2"),
        ("fsdp2", "gpt2", "--wrap root"),
        ("fsdp2", "llama", "--wrap block --reshard step --accumulation 3"),
        ("fsdp2", "t5", "--wrap block --recompute full"),
        ("fsdp1", "mixtral", "--dialect fsdp1 --shard 2"),
        ("fsdp1", "tied", "--dialect fsdp1 --limit-all-gathers off --backward-prefetch none"),
    ],
}


def build(name, seed=0):
    cls, config = MODELS[name]
    torch.manual_seed(seed)
    settings = {key: value for key, value in config.items() if key != "model_type"}
    return getattr(transformers, cls)(transformers.CONFIG_MAPPING[config["model_type"]](**settings))


def batches(training, ranks):
    """ids[step][micro-batch][rank]: (samples, tokens)."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, training["accumulation"], ranks, training["micro_batch"], SEQUENCE)
    return torch.randint(1, 61, shape, generator=generator)


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def train(model, training, ids, before):
    """The losses of this rank's samples ids[step][micro-batch], one mean per step; SGD in between."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for step in ids:
        total = 0.0
        for i, samples in enumerate(step):
            with before(i):
                loss = loss_of(model, samples)
                (loss / len(step)).backward()
            total += loss.item() / len(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


class Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def frozen(name, plan):
    """The model with what the plan does not train frozen, as the applier expects it."""
    model = build(name)
    for entry in plan["parameters"]:
        dict(model.named_parameters(remove_duplicate=False))[entry["fqn"]].requires_grad_(entry.get("trainable", True))
    return model


def reference(name, plan, ranks):
    """The unwrapped model on the samples of all ranks at once."""
    model = frozen(name, plan)
    ids = batches(plan["training"], ranks)
    whole = ids.flatten(2, 3)  # ranks and samples
    return train(model, plan["training"], whole, lambda _: Nothing())


def run_case(job, rank):
    target, name, plan = job
    ranks = dist.get_world_size()
    module = importlib.import_module(f"shardwright_{target}")
    model = module.apply_plan(frozen(name, plan), copy.deepcopy(plan), device_type="cpu",
                              **({"device_id": torch.device("cpu")} if target == "fsdp1" else {}))
    if target == "fsdp2":
        from torch.distributed.fsdp import FSDPModule
        expected = len({m for unit in plan["units"] for m in unit["modules"]})
        found = sum(isinstance(m, FSDPModule) for m in model.modules())
        assert found == expected, f"{found} modules are sharded, {expected} were planned"

        def before(i):
            module.set_micro_batch(model, i)
            return Nothing()
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel
        found = len(FullyShardedDataParallel.fsdp_modules(model))
        assert found == len(plan["units"]), f"{found} modules are sharded, {len(plan['units'])} were planned"
        before = lambda i: module.micro_batch(model, i)
    losses = torch.tensor(train(model, plan["training"], batches(plan["training"], ranks)[:, :, rank], before))
    dist.all_reduce(losses)
    return (losses / ranks).tolist()


class EmitToTorch(ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        for name, (_, config) in MODELS.items():
            (self.folder / f"{name}.json").write_text(json.dumps(config))
        (self.folder / "nested.json").write_text(json.dumps(NESTED))
        (self.folder / "experts.json").write_text(json.dumps(EXPERTS))

    def emit(self, target, model, flags, ranks):
        precision = "" if "--precision" in flags else "--precision fp32"
        self.succeed("plan", "--model", f"{model}.json", "--cluster", f"a100-80 x{ranks}, nvlink 300 GB/s",
                     "--seq", str(SEQUENCE), *shlex.split(f"{flags} {precision}"), "-o", "plan.json")
        self.succeed("emit", "plan.json", "--to", target, "-o", "emitted/")
        sys.path.insert(0, str(self.folder / "emitted"))
        self.addCleanup(sys.path.remove, str(self.folder / "emitted"))
        return json.loads((self.folder / "emitted" / f"{target}_plan.json").read_text())

    def check_ranks(self, ranks):
        jobs = [(target, name, self.emit(target, name, flags, ranks)) for target, name, flags in CASES[ranks]]
        for module in ("shardwright_plan", "shardwright_fsdp2", "shardwright_fsdp1"):
            importlib.import_module(module)
        expected = [reference(name, plan, ranks) for _, name, plan in jobs]
        results = run_ranks(ranks, jobs, run_case)
        for rank, of_rank in enumerate(results):
            for (target, name, flags), losses, wanted in zip(CASES[ranks], of_rank, expected):
                with self.subTest(ranks=ranks, rank=rank, target=target, model=name, flags=flags):
                    self.assertIsInstance(losses, list, losses)
                    tolerance = LOW_PRECISION if "bf16" in flags else TOLERANCE
                    for ours, theirs in zip(losses, wanted):
                        self.assertLess(abs(ours - theirs), tolerance * abs(theirs), f"{losses} instead of {wanted}")
            self.assertEqual(len(of_rank), len(jobs))
        # The steps do something: an update that never happened would leave the loss of the same samples alone.
        self.assertNotEqual(expected[0][0], expected[0][1])

    def test_two_ranks(self):
        self.check_ranks(2)

    def test_four_ranks(self):
        self.check_ranks(4)

    def test_checks_come_before_changes(self):
        """Each way in which a model can differ from the plan is named, and the model stays as it was."""
        plan = self.emit("fsdp2", "tied", "--wrap torchtitan", 2)
        check = importlib.import_module("shardwright_plan")

        def refused(model, text, changed=None):
            document = copy.deepcopy(plan)
            if changed:
                changed(document)
            names = [name for name, _ in model.named_modules()]
            with self.assertRaises(check.PlanError) as caught:
                check.check_model(model, document)
            self.assertIn(text, str(caught.exception))
            self.assertEqual(names, [name for name, _ in model.named_modules()])

        check.check_model(build("tied"), plan)
        untied = build("llama")
        refused(untied, 'parameters "model.embed_tokens.weight" and "lm_head.weight" are tied in the plan, not in the model')
        wide = build("tied")
        wide.model.norm.weight = torch.nn.Parameter(torch.ones(33))
        refused(wide, 'parameter "model.norm.weight" has shape [33], the plan expects [32]')
        extra = build("tied")
        extra.model.extra = torch.nn.Linear(2, 2)
        refused(extra, 'the plan has no parameter "model.extra.weight" of the model')
        renamed = build("tied")
        renamed.model.layers[0].self_attn.query = renamed.model.layers[0].self_attn.q_proj
        del renamed.model.layers[0].self_attn.q_proj
        refused(renamed, 'the model has no parameter "model.layers.0.self_attn.q_proj.weight"')
        refused(build("tied"), 'units[1]: the model has no module "model.layer.1"; did you mean "model.layers.1"?',
                lambda p: p["units"][1]["modules"].__setitem__(0, "model.layer.1"))
        refused(build("tied").to(torch.bfloat16), "call model.to(torch.float32)")
        half_frozen = build("tied")
        half_frozen.model.norm.requires_grad_(False)
        refused(half_frozen, 'parameter "model.norm.weight" has requires_grad False, the plan expects True')
        refused(build("tied"), 'parameter "model.norm.weight" has requires_grad True, the plan expects False',
                lambda p: [e.update(trainable=False) for e in p["parameters"] if e["fqn"] == "model.norm.weight"])
        self.assertTrue(build("tied").model.norm.weight.requires_grad)
        refused(build("gpt2"), "are not in this model, such as")
        refused(build("tied"), 'parameter "model.layers.0.mlp.up_proj.weight" falls into unit "model.layers.0", the plan expects',
                lambda p: [e.update(unit=1) for e in p["parameters"] if e["fqn"] == "model.layers.0.mlp.up_proj.weight"])
        with self.assertWarnsRegex(UserWarning, "the plan follows the rules of PyTorch 2.6, and"):
            check.check_model(build("tied"), {**plan, "torch": "2.6"})
        with self.assertRaisesRegex(check.PlanError, "format: got 'shardwright-fsdp2', expected 'shardwright-fsdp1'"):
            check.load_plan(plan, "fsdp1")

    def test_names_of_the_zoo(self):
        """hf-v5 names every parameter of every family as transformers does, with its shape and ties."""
        check = importlib.import_module("shardwright_plan") if self.emit("fsdp2", "llama", "", 2) else None
        families = {"llama-3.2-1b": "LlamaForCausalLM", "mistral-7b": "MistralForCausalLM", "qwen2-0.5b": "Qwen2ForCausalLM",
                    "phi-3-mini-4k": "Phi3ForCausalLM", "qwen3-0.6b": "Qwen3ForCausalLM", "gemma-2-2b": "Gemma2ForCausalLM", "gemma-3-1b": "Gemma3ForCausalLM",
                    "gpt2": "GPT2LMHeadModel", "pythia-70m": "GPTNeoXForCausalLM", "opt-125m": "OPTForCausalLM",
                    "t5-small": "T5ForConditionalGeneration", "bert-base-uncased": "BertForMaskedLM",
                    "vit-b-16": "ViTForImageClassification", "vit-b-16-model": "ViTModel",
                    "mixtral-8x7b": "MixtralForCausalLM", "qwen3-30b-a3b": "Qwen3MoeForCausalLM"}
        zoo = pathlib.Path(__file__).resolve().parents[2] / "models" / "zoo"
        for name, cls in families.items():
            with self.subTest(model=name):
                config = json.loads((zoo / f"{name}.json").read_text(encoding="utf-8"))
                layers = {key: 2 for key in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers") if key in config}
                config = {key: value for key, value in {**config, **layers, "layer_types": None}.items()
                          if not key.startswith("_") and key not in ("architectures", "transformers_version")}
                if "layer_types" in config:
                    del config["layer_types"]
                (self.folder / "model.json").write_text(json.dumps({**config, "architectures": [cls]}))
                self.succeed("plan", "--model", "model.json", "--cluster", "dgx-h100", "--precision", "fp32", "-o", "plan.json")
                self.succeed("emit", "plan.json", "--to", "fsdp2", "-o", "emitted/")
                plan = json.loads((self.folder / "emitted" / "fsdp2_plan.json").read_text())
                settings = {key: value for key, value in config.items() if key != "model_type"}
                with torch.device("meta"):
                    model = getattr(transformers, cls)(transformers.CONFIG_MAPPING[config["model_type"]](**settings))
                check.check_model(model.float(), plan)


if __name__ == "__main__":
    main()
