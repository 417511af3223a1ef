"""The table of FSDP2's settings in docs/emit.md: PyTorch has none that it does not name, and each is what the table says.

    python3 tests/python/fsdp2_settings_test.py SHARDWRIGHT PACKAGE_FOLDER
"""

import dataclasses
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

PROGRAM, PACKAGE = sys.argv[1:3]
sys.path.insert(0, str(pathlib.Path(PACKAGE).resolve()))
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

try:
    import torch
    import torch.distributed as dist
    from torch.distributed import fsdp
    from torch.distributed._composable.checkpoint_activation import checkpoint
    from torch.distributed._composable.replicate import replicate
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

import shardwright  # noqa: E402
from shardwright._live import _fsdp2  # noqa: E402

changed_settings = _fsdp2.changed_settings  # which record() asks at each step (live_test.py)

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "emit.md"
ROWS = [re.findall(r"`?([^|`]+)`? \| `(\w+)` \| (\w+) \| (.+) \|", line)[0] for line in PAGE.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| (`\w+`|function) \| `\w+` \| (plan|fixed|noticed|call) \|", line)]
TABLE = {(owner.strip(), name): kind for owner, name, kind, _ in ROWS}


def settings_of_torch():
    """(owner, name) of what the release that runs lets a user set."""
    is_new = lambda value: "_fully_shard" in getattr(value, "__module__", "")  # noqa: E731
    exported = {name: getattr(fsdp, name) for name in fsdp.__all__}
    found = {("fully_shard", name) for name in inspect.signature(fsdp.fully_shard).parameters}
    found |= {("FSDPModule", name) for name, value in vars(fsdp.FSDPModule).items() if inspect.isfunction(value) and not name.startswith("_")}
    for name, value in exported.items():
        if is_new(value) and dataclasses.is_dataclass(value):
            found |= {(name, field.name) for field in dataclasses.fields(value)}
        elif is_new(value) and inspect.isfunction(value) and name != "fully_shard":
            found.add(("function", name))
    return found | {("function", "replicate"), ("function", "checkpoint")}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.sum()


class Gather(fsdp._fully_shard._fsdp_api.AllGather):
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter(fsdp._fully_shard._fsdp_api.ReduceScatter):
    allocate = Gather.allocate

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def calls_of(model, other):
    """How each setting that is noticed is set on the first block."""
    block = model.blocks[0]
    return {
        "set_reshard_after_forward": lambda: block.set_reshard_after_forward(False),
        "set_reshard_after_backward": lambda: block.set_reshard_after_backward(False),
        "set_unshard_in_backward": lambda: block.set_unshard_in_backward(False),
        "set_is_last_backward": lambda: block.set_is_last_backward(False),
        "set_reduce_scatter_unused_params": lambda: block.set_reduce_scatter_unused_params(True),
        "set_reduce_scatter_max_input_buffers": lambda: block.set_reduce_scatter_max_input_buffers(2),
        "set_separate_reduce_scatter_group": block.set_separate_reduce_scatter_group,
        "set_gradient_divide_factor": lambda: block.set_gradient_divide_factor(3.0),
        "set_reduce_scatter_divide_factor": lambda: block.set_reduce_scatter_divide_factor(5.0),
        "set_force_sum_reduction_for_comms": lambda: block.set_force_sum_reduction_for_comms(True),
        "set_all_reduce_hook": lambda: block.set_all_reduce_hook(lambda tensor: None),
        "set_custom_all_gather": lambda: block.set_custom_all_gather(Gather()),
        "set_custom_reduce_scatter": lambda: block.set_custom_reduce_scatter(Scatter()),
        "set_allocate_memory_from_process_group_for_comm": lambda: block.set_allocate_memory_from_process_group_for_comm(True),
        "set_symm_mem_for_comm": block.set_symm_mem_for_comm,
        "set_post_optim_event": lambda: block.set_post_optim_event(torch.Event("cpu") if hasattr(torch, "Event") else object()),
        "register_fsdp_forward_method": lambda: fsdp.register_fsdp_forward_method(block, "extra_repr"),
        "share_comm_ctx": lambda: fsdp.share_comm_ctx([other, model]),
        "replicate": lambda: replicate(model.blocks),
        "checkpoint": lambda: checkpoint(block),
    }


class Settings(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        cls.job = shardwright.describe(Net(), torch.ones(2, 8), dtype=torch.float32, device_type="cpu")
        cls.plan = shardwright.plan(cls.job, cluster="host", gpus=1, dialect="fsdp2", wrap="block", precision="fp32", micro_batch=1,
                                    optimizer="sgd", clip="off", kernel_set="torch-eager")

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def test_the_table_names_all(self):
        self.assertEqual(sorted(settings_of_torch() - set(TABLE)), [], "docs/emit.md does not say what becomes of these")

    def test_what_plans_have(self):
        """The fields that the table names are fields of a plan file, as its page has them."""
        page = (PAGE.parent / "plan_file.md").read_text(encoding="utf-8")
        for _, name, kind, how in ROWS:
            if kind == "plan":
                field = re.findall(r"`([^`]+)`", how)[0]
                with self.subTest(name, field=field):
                    self.assertRegex(page, rf"`[^`]*\b{re.findall(r'[a-z_]+', field)[-1]}\b[^`]*`")

    def test_what_is_fixed(self):
        """Other values come in by no door: keys of settings files, arguments of apply, wrapped modules."""
        with tempfile.TemporaryDirectory() as folder:
            for (owner, name), kind in TABLE.items():
                if kind != "fixed":
                    continue
                with self.subTest(name):
                    settings = pathlib.Path(folder) / "arguments.json"
                    settings.write_text(json.dumps({"output_dir": "o", "per_device_train_batch_size": 1, "fsdp": True, "bf16": True,
                                                    "fsdp_config": {"version": 2, name: "x"}}), encoding="utf-8")
                    answer = subprocess.run([PROGRAM, "import-run", str(settings), "--model", "gpt2", "--cluster", "dgx-a100"],
                                            capture_output=True, text=True, check=False)
                    self.assertEqual(answer.returncode, 3)
                    self.assertIn(f"fsdp_config.{name}: got ", answer.stderr)
                    with self.assertRaisesRegex(TypeError, name):
                        shardwright.apply(Net(), self.plan, device_type="cpu", **{name: None})
        for arguments in ({"ignored_params": set()}, {"shard_placement_fn": lambda parameter: None},
                          {"mp_policy": fsdp.MixedPrecisionPolicy(output_dtype=torch.float32, cast_forward_inputs=False)},
                          {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}):
            model = Net()
            fsdp.fully_shard(model.blocks[0], mesh=dist.init_device_mesh("cpu", (1,)), **arguments)
            with self.subTest(str(list(arguments))):
                with self.assertRaisesRegex(shardwright.InputError, "blocks.0 is wrapped by FSDPModule"):
                    shardwright.describe(model, torch.ones(2, 8), device_type="cpu")
                with self.assertRaisesRegex(shardwright.InputError, 'module "blocks.0" is a FSDPLinear'):
                    shardwright.apply(model, self.plan, device_type="cpu")

    def test_functions_before(self):
        for function, shown in ((replicate, "replicate"), (checkpoint, "checkpoint")):
            model = Net()
            function(model.blocks[0])
            with self.subTest(shown):
                with self.assertRaisesRegex(shardwright.InputError, shown):
                    shardwright.describe(model, torch.ones(2, 8), device_type="cpu")
                with self.assertRaisesRegex(shardwright.InputError, f'module "blocks.0" is wrapped by {shown}'):
                    shardwright.apply(model, self.plan, device_type="cpu")

    def test_what_is_noticed(self):
        noticed = {name for (_, name), kind in TABLE.items() if kind == "noticed"} | {"set_reshard_after_backward"}  # under plans without
        self.assertEqual(noticed, set(calls_of(shardwright.apply(Net(), self.plan, device_type="cpu"), None)))
        for name in sorted(noticed):
            model, other = (shardwright.apply(Net(), self.plan, device_type="cpu") for _ in range(2))
            with self.subTest(name):
                if ("FSDPModule", name) in TABLE and not hasattr(fsdp.FSDPModule, name):
                    continue  # of a later release
                self.assertEqual(changed_settings(model), [])
                try:
                    calls_of(model, other)[name]()
                except (RuntimeError, AssertionError, ValueError) as error:
                    print(f"{name}: PyTorch refuses it here: {str(error).splitlines()[0]}")
                    continue
                shown = name.replace("reduce_scatter_divide", "gradient_divide")  # which it is since 2.7
                self.assertTrue(any(shown in line for line in changed_settings(model)), changed_settings(model))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
