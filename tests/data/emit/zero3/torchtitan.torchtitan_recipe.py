"""Written by shardwright emit for torchtitan 0.3.

In the config_registry of a model:

    def planned() -> Trainer.Config:
        return apply_plan(llama3_8b())
"""

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: F401


def apply_plan(config):
    """Sets in a Trainer.Config what the plan says, and returns it."""
    config.training.local_batch_size = 2
    config.training.global_batch_size = 16
    config.training.seq_len = 256
    config.training.dtype = "float32"
    config.training.mixed_precision_param = "bfloat16"
    config.training.mixed_precision_reduce = "float32"
    config.training.enable_cpu_offload = True
    config.parallelism.data_parallel_replicate_degree = 1
    config.parallelism.data_parallel_shard_degree = 8
    config.parallelism.fsdp_reshard_after_forward = "default"
    config.activation_checkpoint = None
    config.compile.enable = False
    return config
