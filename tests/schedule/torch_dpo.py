"""Answers under TRL's own trainers, DPO, KTO, rewards and GRPO: their collectives are those of the plans that import-run makes.

    python3 tests/schedule/torch_dpo.py SHARDWRIGHT [--only NAME]

Tiny Llamas train in gloo processes, by TRL and Accelerate under FSDP2 and by the same calls under FSDP1: whole beside a reference of
their own, and by adapters above a base that is the reference. Compared are order, kind, elements and dtype of all collectives, and
the bytes of gathered parameters at each. What the metrics and the counts of tokens gather is left out, KTO's mean of the
mismatched answers with it. Ours come from the files of such a run.

GRPO's trainer generates before its steps. The generation is a phase of its own: completions are given in its place. So are rewards
and metrics that ranks tell each other. A generation of several micro-batches runs all
their forwards for log-probabilities before the first update; the plan has those of each micro-batch before its own. These cases
compare what is communicated without its order.

Not equal yet: with adapters and recomputation the Trainer makes the embedding's output ask for a gradient
(enable_input_require_grads). The last units are then freed behind the first block's reduction, ours before: that case compares no
bytes.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import sys
import warnings

try:
    import accelerate
    import datasets
    import peft
    import tokenizers
    import torch
    import transformers
    import trl
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from random_cases import Shardwright, Tally, attempt, compare  # noqa: E402
from torch_fsdp1_random import gathered_bytes  # noqa: E402
from torch_ddp_random import AllReduces as ReducerNotes  # noqa: E402
from torch_pool import Pools, Recorder  # noqa: E402

LAYER = "LlamaDecoderLayer"
CONFIG = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
TOKENS = 12
CASES = {
    "fsdp2 full": {"ranks": 2, "version": 2, "rank": 0, "recompute": False},
    "fsdp2 full, bf16, recomputed": {"ranks": 2, "version": 2, "rank": 0, "recompute": True, "bf16": True},
    "fsdp2 adapters": {"ranks": 2, "version": 2, "rank": 4, "recompute": False},
    "fsdp2 adapters, bf16, recomputed": {"ranks": 2, "version": 2, "rank": 4, "recompute": True, "bf16": True, "bytes": False},
    "fsdp2 kto full": {"ranks": 2, "version": 2, "rank": 0, "recompute": False, "by": "kto"},
    "fsdp2 kto full, bf16, recomputed": {"ranks": 2, "version": 2, "rank": 0, "recompute": True, "bf16": True, "by": "kto"},
    "fsdp2 kto adapters": {"ranks": 2, "version": 2, "rank": 4, "recompute": False, "by": "kto"},
    "fsdp2 reward full": {"ranks": 2, "version": 2, "rank": 0, "recompute": False, "by": "reward"},
    "fsdp2 reward full, bf16, recomputed": {"ranks": 2, "version": 2, "rank": 0, "recompute": True, "bf16": True, "by": "reward"},
    "fsdp2 reward adapters": {"ranks": 2, "version": 2, "rank": 4, "recompute": False, "by": "reward"},
    "grpo fsdp2": {"ranks": 2, "version": 2, "rank": 0, "recompute": False, "by": "grpo"},
    "grpo fsdp2, reference": {"ranks": 2, "version": 2, "rank": 0, "recompute": False, "by": "grpo", "beta": 0.1},
    "grpo fsdp2, updates, bf16, recomputed": {"ranks": 2, "version": 2, "rank": 0, "recompute": True, "bf16": True, "by": "grpo", "updates": 2},
    "grpo fsdp2, updates, reference": {"ranks": 2, "version": 2, "rank": 0, "recompute": False, "by": "grpo", "updates": 2, "beta": 0.1},
    "grpo fsdp2 adapters, updates, reference": {"ranks": 2, "version": 2, "rank": 4, "recompute": False, "by": "grpo", "updates": 2, "beta": 0.1},
    "grpo fsdp2, micro-batches": {"ranks": 2, "version": 2, "rank": 0, "recompute": False, "by": "grpo", "micro_batches": 2},
    "grpo fsdp2, micro-batches, reference": {"ranks": 2, "version": 2, "rank": 0, "recompute": False, "by": "grpo", "micro_batches": 2,
                                             "beta": 0.1, "ordered": False},
    "grpo ddp": {"ranks": 2, "version": 0, "rank": 0, "recompute": False, "by": "grpo"},
    "grpo ddp, updates, reference": {"ranks": 2, "version": 0, "rank": 0, "recompute": False, "by": "grpo", "updates": 2, "beta": 0.1},
    "fsdp1 full": {"ranks": 2, "version": 1, "rank": 0, "recompute": False},
    "fsdp1 adapters": {"ranks": 2, "version": 1, "rank": 4, "recompute": False},
    "fsdp1 kto full": {"ranks": 2, "version": 1, "rank": 0, "recompute": False, "by": "kto"},
    "fsdp1 kto adapters": {"ranks": 2, "version": 1, "rank": 4, "recompute": False, "by": "kto"},
}


def config_of(case):
    """Adapters: of a model with tied ends. TRL 1.16's head takes the weight of a head of its own without its unit's hooks."""
    return {**CONFIG, "tie_word_embeddings": case["rank"] > 0}


def write_model(where, case):
    """Weights and a tokenizer of one word a token."""
    keys = config_of(case)
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(where)
    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="w1", pad_token="w2", unk_token="w0").save_pretrained(where)


class Steps(transformers.TrainerCallback):
    def __init__(self, recorder):
        self.recorder, self.steps = recorder, []

    def on_step_begin(self, *_, **__):
        self.recorder.take()

    def on_step_end(self, *_, **__):
        self.steps.append(self.recorder.take())


def wrapped_v1(model):
    """As Accelerate and TRL's prepare_fsdp do, whose plugin for version 1 asks for a GPU."""
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    if hasattr(model, "peft_config"):
        model.base_model.model._no_split_modules = [LAYER]
        policy = fsdp_auto_wrap_policy(model)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


class AllReduces(ReducerNotes):
    """What DDP's reducer sends, taken step by step."""

    def take(self):
        found, self.found = self.found, []
        return found


def repeated(given, ranks):
    """As if all ranks had told this."""
    return torch.cat([given.reshape(1) if given.dim() == 0 else given] * ranks)


def completed(prompt_ids, *_, **__):
    """What GRPO's trainer would generate."""
    return [[3 + i for i in range(TOKENS - TOKENS // 2)]] * len(prompt_ids), None


def batch_of(case):
    """KTO shifts answers within a batch: 2 at least."""
    return 2 if case.get("by") in ("kto", "grpo") else 1


def has_bytes(case):
    return case.get("bytes", True) and case["version"] > 0 and case.get("ordered", True)


def gathered_bytes_v2(model):
    """What the units of fully_shard have gathered."""
    groups = (module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule))
    units = {id(group): group for group in groups}.values()  # modules may share one
    return sum(tensor.untyped_storage().size() for unit in units if unit for param in unit.fsdp_params for tensor in param.all_gather_outputs)


def run_by_hand(case, where):
    """FSDP1: the forwards of TRL's DPOTrainer or KTOTrainer, and a loss of two answers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(where).train()
    if case["rank"]:
        model = peft.get_peft_model(model, peft.LoraConfig(r=case["rank"], target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model = wrapped_v1(model)
    reference = wrapped_v1(transformers.AutoModelForCausalLM.from_pretrained(where).eval()) if not case["rank"] else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.arange(3, 3 + TOKENS).repeat(2, 1)
    steps = []

    def scores(of):
        return of(input_ids=ids, use_cache=False).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).sum((1, 2))

    models = {id(m): m for m in (model, reference)}.values()
    with Recorder({tuple(range(case["ranks"])): "shard"}, lambda: (sum(map(gathered_bytes, models)),)) as recorder:
        for _ in range(3):
            if case.get("by") == "kto":
                with torch.no_grad():
                    scores(model)
            chosen, rejected = scores(model)
            with torch.no_grad(), model.module.disable_adapter() if case["rank"] else contextlib.nullcontext():
                for _ in range(1 + (case.get("by") == "kto")):
                    other = scores(reference)
            (-torch.nn.functional.logsigmoid(chosen - rejected - other[0] + other[1])).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(recorder.take())
    return steps


def run_case(rank, argument):
    """Three steps of TRL's trainer in this process."""
    case, folder = argument
    warnings.simplefilter("ignore")
    if case["version"] == 1:
        return run_by_hand(case, pathlib.Path(folder) / "model")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["ranks"]), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:  # of the case before
        del os.environ[name]
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    where = pathlib.Path(folder) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    words = [f"w{i + 3}" for i in range(TOKENS - 1)]  # and the end of the text
    half = TOKENS // 2
    answer = " " + " ".join(words[half:])
    by = case.get("by", "dpo")
    answers = {"completion": answer, "label": True} if by == "kto" else {"chosen": answer, "rejected": answer}
    rows = [{"prompt": " ".join(words[:half]), **answers}] * 24
    fsdp = {"version": case["version"], "transformer_layer_cls_to_wrap": [LAYER], "reshard_after_forward": True}
    if by == "grpo":
        rows = [{"prompt": " ".join(words[:half])}] * 24
        others = {"num_generations": 2, "max_completion_length": TOKENS - half, "beta": case.get("beta", 0.0),
                  "num_iterations": case.get("updates", 1), "gradient_accumulation_steps": case.get("micro_batches", 1)}
    config, kind = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "dpo": (trl.DPOConfig, trl.DPOTrainer), "kto": (trl.KTOConfig, trl.KTOTrainer),
                    "reward": (trl.RewardConfig, trl.RewardTrainer)}[by]
    more = others if by == "grpo" else {"train_sampling_strategy": "sequential"} if by == "kto" else {}
    if case["version"]:
        more |= {"fsdp": True, "fsdp_config": fsdp}
    options = config(output_dir=str(where.parent / f"out{rank}"), per_device_train_batch_size=batch_of(case), max_steps=3, report_to=[],
                            logging_strategy="no", save_strategy="no", bf16=case.get("bf16", False), gradient_checkpointing=case["recompute"], use_cpu=True,
                            gradient_checkpointing_kwargs={"use_reentrant": False}, max_grad_norm=1.0, disable_tqdm=True, **more)
    # Accelerate has FSDP on a CPU for one process alone.
    if case["version"]:
        accelerate.PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
    lora = peft.LoraConfig(r=case["rank"], target_modules=["q_proj", "v_proj"],
                           task_type="SEQ_CLS" if by == "reward" else "CAUSAL_LM") if case["rank"] else None
    rewards = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]} if by == "grpo" else {}
    trainer = kind(str(where), args=options, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
                             peft_config=lora, **rewards)
    for name in ("gather", "gather_for_metrics"):
        setattr(trainer.accelerator, name, (lambda given: repeated(given, case["ranks"])) if by == "grpo" else lambda given: given)
    if by == "grpo":
        trl.trainer.grpo_trainer.gather = lambda given: repeated(given, case["ranks"])
        trl.trainer.grpo_trainer.gather_object = lambda given: given * case["ranks"]
        trainer.accelerator.reduce = lambda given, *_, **__: given
    models = [m for m in (trainer.model, getattr(trainer, "ref_model", None)) if m is not None]
    noted = AllReduces() if case["version"] == 0 else contextlib.nullcontext()
    with noted, Recorder({tuple(range(case["ranks"])): "shard"}, lambda: (sum(map(gathered_bytes_v2, models)),) if has_bytes(case) else ()) as recorder:
        recorder = noted if case["version"] == 0 else recorder
        steps = Steps(recorder)
        if by == "grpo":
            trainer._generate_single_turn = completed
        trainer.add_callback(steps)
        trainer.train()
    return steps.steps


def judge(ours, pools, case):
    folder = pathlib.Path(ours.folder.name)

    write_model(folder / "model", case)

    def program():
        (folder / "config.json").write_text(json.dumps(config_of(case)), encoding="utf-8")
        by = {"grpo": {"num_generations": 2, "max_completion_length": TOKENS - TOKENS // 2, "max_prompt_length": TOKENS // 2,
                       "num_iterations": case.get("updates", 1), "beta": case.get("beta", 0.0)},
              "dpo": {"beta": 0.1, "loss_type": "sigmoid"}, "kto": {"beta": 0.1, "loss_type": "kto"},
              "reward": {"center_rewards_coefficient": 0.01, "lora_task_type": "SEQ_CLS"}}[case.get("by", "dpo")]
        file = {**by, "model_name_or_path": "somewhere/model", "per_device_train_batch_size": batch_of(case),
                "gradient_checkpointing": case["recompute"], "bf16": case.get("bf16", False), "max_grad_norm": 1.0,
                "use_peft": case["rank"] > 0, "gradient_accumulation_steps": case.get("micro_batches", 1)}
        if case.get("by") != "grpo":
            file["max_length"] = TOKENS
        if case["version"]:
            file |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {
                    "fsdp_version": case["version"], "transformer_layer_cls_to_wrap": LAYER, "reshard_after_forward": True,
                    "backward_prefetch": "backward_pre", "use_orig_params": True}}
        if case["rank"]:
            file |= {"lora_r": case["rank"], "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
        if case["version"] == 2:
            for key in ("backward_prefetch", "use_orig_params"):
                del file["fsdp_config"][key]
        (folder / "run.json").write_text(json.dumps(file), encoding="utf-8")
        ours.call("import-run", str(folder / "run.json"), "--model", str(folder / "config.json"), "--cluster",
                  f"a100-80 x{case['ranks']}, nvlink 300 GB/s", "-o", str(folder / "made.json"))
        made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
        steps = ours.collectives(made, categories=["unsharded_parameter"] * has_bytes(case))
        if case.get("updates", 1) > 1:  # every second step learns from what the one before it generated
            made["job"]["rollout"] |= {"has_old": False, "has_reference": False}
            made["plan"]["units"] = [unit for unit in made["plan"]["units"] if not unit["modules"][0].startswith("reference")]
            steps = [steps[1], ours.collectives(made, categories=["unsharded_parameter"] * has_bytes(case))[1]]
        return steps

    theirs = attempt(lambda: pools.run(case["ranks"], "torch_dpo", "run_case", (case, str(folder)))[0])
    steps = attempt(program)
    if case.get("updates", 1) > 1 and isinstance(theirs, list):
        theirs = theirs[:2]
    if not case.get("ordered", True) and isinstance(theirs, list) and isinstance(steps, list):
        steps, theirs = [sorted(step) for step in steps], [sorted(step) for step in theirs]
    return compare(steps, theirs)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    ours, tally = Shardwright(options.program), Tally("tests/schedule/torch_dpo.py")
    with Pools() as pools:
        for name, case in CASES.items():
            if options.only in name:
                tally.add(name, judge(ours, pools, case), case)
    print(tally.summary())
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
