"""FSDP2's own memory tracker and our allocated peak, by category, for small models.

    python3 tests/schedule/torch_fsdp2_memory.py SHARDWRIGHT

torch.distributed._tools.FSDPMemTracker follows real training steps of one rank on the CPU; a process group that moves nothing
stands for the other ranks. What it counts differently:
- it calls every tensor that backward makes Temp, until post-backward renames weight gradients; so our gradients of activations,
  of weights and workspaces are compared as one sum;
- it calls what the optimizer makes and frees in a step OptState, here temporary;
- with replicas, reduced gradients that wait for a cast are Temp there, of the category reduce_scatter here;
- the scalars "step" of AdamW (4 bytes per parameter), the loss and rotary frequencies are counted there only: hence the KiB;
- it hooks the modules of a grouped unit one by one, so that each frees and reduces by itself: no grouped units here;
- it has no allocator: reserved memory cannot be compared.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import warnings

try:
    import torch
    import transformers
    from torch import distributed
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

from fsdp2_networks import Case, Network, Unit, backward_settings, blocks, plan_json, root, shard_module

RANKS = 4
RELATIVE = 0.02
SCALARS = 1024
NET = Network(vocabulary=96, width=64, hidden=200, sequence=48, layers=4)
ENDS = [Unit(["embed"]), *blocks(4), Unit(["head"], reshard=False), root()]
ALL = tuple(f"blocks.{i}" for i in range(4))

NETS = [
    Case("default", [*blocks(4), root()], network=NET),
    Case("kept after forward", [*blocks(4, reshard=False), root()], network=NET),
    Case("ends apart, recomputed", ENDS, network=NET, micro_batch=8, recompute=ALL),
    Case("uneven shards, fp32", [*blocks(4), root()], network=Network(97, 61, 203, 4, 48), precision=("fp32",) * 3),
    Case("HSDP, bf16 reduction", ENDS, network=NET, micro_batch=16, shard=2, replicate=2,
         precision=("fp32", "bf16", "bf16")),
    Case("reduced in the last micro-batch", [*blocks(4), root()], network=NET, accumulation=2, sync="last"),
    Case("tied weights", [*blocks(4), root()], network=Network(96, 64, 200, 4, 48, tied=True)),
]

WIDTHS = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
DECODER = {**WIDTHS, "intermediate_size": 352, "num_key_value_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# config.json and where the blocks are.
CHECKPOINTS = {
    "gpt2": ({"vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128, **NO_DROPOUT},
             "transformer.h"),
    "llama": (DECODER, "model.layers"),
    "mistral": (DECODER, "model.layers"),
    "qwen2": (DECODER, "model.layers"),
    "qwen3": ({**DECODER, "head_dim": 32}, "model.layers"),
    "gpt_neox": ({**WIDTHS, "intermediate_size": 352, "hidden_dropout": 0.0, "attention_dropout": 0.0}, "gpt_neox.layers"),
    "opt": ({**WIDTHS, "ffn_dim": 352, "word_embed_proj_dim": 128, "dropout": 0.0}, "model.decoder.layers"),
}

# Our categories and the tracker's that mean the same.
GROUPS = {
    "parameter shards": (("parameter_shard",), ("Sharded Param",)),
    "gathered parameters": (("unsharded_parameter",), ("Unsharded Param",)),
    "all-gather buffers": (("all_gather",), ("All Gather",)),
    "sharded gradients": (("sharded_gradient",), ("Sharded Grad",)),
    "optimizer states": (("optimizer_state",), ("OptState",)),
    "activations, inputs": (("activation", "input", "model_buffer"), ("Activation", "Inputs", "Buffer")),
    "made in backward": (("unsharded_gradient", "activation_gradient", "temporary", "reduce_scatter"),
                         ("Unsharded Grad", "Temp", "Reduce Scatter")),
}


def tracked(model, parameters, inputs, step):
    """Peak bytes by category over two training steps; the second one has optimizer states."""
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(inputs)
    with tracker:
        for _ in range(2):
            step(tracker)
            optimizer.step()
            optimizer.zero_grad()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(key, "value", key): value for key, value in snapshot.items()}


def track_net(case, mesh):
    model = shard_module(case, mesh)
    shape = (case.accumulation, case.micro_batch, case.network.sequence)
    ids, labels = (torch.randint(case.network.vocabulary, shape) for _ in range(2))

    def step(tracker):
        for i in range(case.accumulation):
            tracker.reset_mod_stats()  # or else it refuses the next forward
            backward_settings(case, model, i)
            model(ids[i], labels[i]).backward()

    return tracked(model, [p for p in model.parameters() if p.requires_grad], (ids, labels), step)


def track_checkpoint(config, layers, mesh):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.get_submodule(layers):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    ids, labels = (torch.randint(512, (2, 128)) for _ in range(2))

    def step(tracker):
        tracker.reset_mod_stats()
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()  # `output` holds the logits until the step ends, as in a training loop

    return tracked(model, model.parameters(), (ids, labels), step)


def simulated(program, plan):
    result = subprocess.run([program, "simulate", str(plan), "--json"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    memory = json.loads(result.stdout)["memory"]
    return {**memory["at_peak"], "Total": memory["peak_allocated_bytes"], "place": memory["peak_place"]}


def plan_checkpoint(program, name, config, plan):
    model = plan.parent / "config.json"
    model.write_text(json.dumps({"model_type": name, **config}))
    subprocess.run([program, "plan", "--model", str(model), "--cluster", "dgx-a100", "--nodes", "1", "--gpus", str(RANKS),
                    "--seq", "128", "--micro-batch", "2", "--kernel-set", "hf-eager", "--clip", "off", "-o", str(plan)],
                   check=True, capture_output=True)


def agree(name, ours, theirs):
    distance = ours["Total"] / theirs["Total"] - 1
    good = abs(distance) <= RELATIVE
    print(f"{name}: peak {ours['Total']} bytes, the tracker {theirs['Total']} ({distance:+.2%}), {ours['place']}")
    if "optimizer_step" in ours["place"]:
        ours = {**ours, "optimizer_state": ours["optimizer_state"] + ours["temporary"], "temporary": 0}
    for group, (our_names, their_names) in GROUPS.items():
        a = sum(ours.get(key, 0) for key in our_names)
        b = sum(theirs.get(key, 0) for key in their_names)
        fits = abs(a - b) <= max(RELATIVE * b, SCALARS)
        good = good and fits
        if a or b:
            print(f"  {group:22} {a:9} {b:9}{'' if fits else '   <<<'}")
    print("" if good else f"FAILED {name}\n", end="")
    return good


def main(arguments):
    program = arguments[0]
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    meshes = {(4, 1): init_device_mesh("cpu", (4,)),
              (2, 2): init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    good = True
    with tempfile.TemporaryDirectory() as name:
        plan = pathlib.Path(name) / "plan.json"
        for case in NETS:
            plan.write_text(json.dumps(plan_json(case)))
            good &= agree(case.name, simulated(program, plan), track_net(case, meshes[case.shard, case.replicate]))
        for model, (keys, layers) in CHECKPOINTS.items():
            config = transformers.AutoConfig.for_model(model, **keys)
            config.use_cache = False
            plan_checkpoint(program, model, keys, plan)
            good &= agree(model, simulated(program, plan), track_checkpoint(config, layers, meshes[4, 1]))
    distributed.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
