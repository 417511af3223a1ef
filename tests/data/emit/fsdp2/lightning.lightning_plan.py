"""Written by shardwright emit for Lightning 2.6.

    class MyModule(PlannedModule):
        def build(self):
            return LlamaForCausalLM(config)

    Trainer(strategy=strategy(), **TRAINER).fit(MyModule(), data)
"""

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy

import shardwright_fsdp2

PLAN = "fsdp2_plan.json"
TRAINER = {
    "num_nodes": 2,
    "devices": 4,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 1.0,
}


def strategy():
    """The ranks as Lightning's mesh: it calls the data-parallel dimension data_parallel."""
    return ModelParallelStrategy(data_parallel_size=8, tensor_parallel_size=1, save_distributed_checkpoint=True)


class PlannedModule(LightningModule):
    """Builds a model and applies the plan to it where Lightning wants that: in configure_model."""

    def __init__(self):
        super().__init__()
        self.model = None

    def build(self):
        """The unwrapped torch.nn.Module."""
        raise NotImplementedError

    def configure_model(self):
        if self.model is None:
            self.model = shardwright_fsdp2.apply_plan(self.build(), PLAN, device_type=self.device_mesh.device_type)
