"""A Trainer.Config of torchtitan 0.3 as the TOML of its earlier versions, which `shardwright import-run` reads.

    python -m shardwright.torchtitan torchtitan.models.llama3.config_registry:llama3_8b -o run.toml
    shardwright import-run run.toml --cluster dgx-h100 -o plan.json

Read are the settings that a plan has; the way back is `shardwright emit plan.json --to torchtitan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from ._errors import Error, InputError
from ._export.model_export import outside

_TRAINING = ("local_batch_size", "global_batch_size", "seq_len", "max_norm", "dtype", "mixed_precision_param", "mixed_precision_reduce",
             "enable_cpu_offload")
_PARALLELISM = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "tensor_parallel_degree",
                "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
_CHECKPOINTING = {"NoneType": {"mode": "none"}, "FullAC.Config": {"mode": "full"},
                  "SelectiveAC.Config": {"mode": "selective", "selective_ac_option": "op"}}


def settings(config: Any) -> dict[str, dict[str, Any]]:
    """By section. Raises InputError for what no plan says: converters, several optimizers, another way of checkpointing."""
    if not hasattr(config, "model_spec"):
        raise InputError(f"got {type(config).__name__}, expected a Trainer.Config of torchtitan 0.3")
    spec = config.model_spec
    if spec is None:
        raise InputError("model_spec: got none, expected the model of a registry")
    for part in _parts(getattr(spec, "model", None)):
        if type(part).__module__.startswith("torchtitan.components."):  # where converters have theirs: fp8, fp4, LoRA
            raise InputError(f"model_spec: got {type(part).__qualname__} in the model, expected a model as it is before converters")
    checkpointing = type(config.activation_checkpoint).__qualname__
    if checkpointing not in _CHECKPOINTING:
        raise InputError(f"activation_checkpoint: got {checkpointing}, expected FullAC.Config, SelectiveAC.Config or None")
    if config.parallelism.pipeline_parallel_degree != 1:
        raise InputError(f"parallelism.pipeline_parallel_degree: got {config.parallelism.pipeline_parallel_degree}, expected 1, since the "
                         "micro-batches of stages are known in the words of 0.2's TOML alone")
    return {"model": {"name": spec.name, "flavor": spec.flavor}, "optimizer": _optimizer(config.optimizer),
            "training": {name: getattr(config.training, name) for name in _TRAINING},
            "parallelism": {name: getattr(config.parallelism, name) for name in _PARALLELISM} | _rotation(config.parallelism),
            "activation_checkpoint": _CHECKPOINTING[checkpointing], "compile": {"enable": config.compile.enable}}


def _rotation(parallelism: Any) -> dict[str, str]:
    """0.3 gathers keys and values; in the TOML of 0.2 no word means a ring."""
    return {"context_parallel_rotate_method": "none"} if parallelism.context_parallel_degree > 1 else {}


def _parts(config: Any) -> Iterator[Any]:
    """It and all the configurations inside of it."""
    if dataclasses.is_dataclass(config):
        yield config
        for field in dataclasses.fields(config):
            yield from _parts(getattr(config, field.name, None))
    elif isinstance(config, (list, tuple)):
        for entry in config:
            yield from _parts(entry)
    elif isinstance(config, dict):
        yield from _parts(list(config.values()))


def _optimizer(config: Any) -> dict[str, Any]:
    groups = config.param_groups
    names = sorted({group.optimizer_name for group in groups})
    if len(names) != 1:
        raise InputError(f"optimizer.param_groups: got {', '.join(names) or 'none'}, expected one optimizer for all parameters")
    first = groups[0].optimizer_kwargs
    known = {"lr": float, "weight_decay": float}
    return {"name": names[0], "implementation": config.implementation,
            **{key: convert(first[key]) for key, convert in known.items() if key in first}}


def toml(config: Any) -> str:
    """The text of that file."""
    sections = [f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
                for section, values in settings(config).items()]
    return "# Written by shardwright.torchtitan.\n\n" + "\n".join(sections)


def _config_of(name: str) -> Any:
    module, _, function = name.partition(":")
    if not function:
        raise InputError(f'got "{name}", expected MODULE:FUNCTION')
    try:
        return getattr(outside.named_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name}: {error}") from None


def main(words: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwright.torchtitan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="MODULE:FUNCTION", help="which returns the Trainer.Config; it is imported and called")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    arguments = parser.parse_args(words)
    try:
        text = toml(_config_of(arguments.config))
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    try:
        outside.write(arguments.output, text)
    except OSError as error:
        print(f"error: {arguments.output}: {error.strerror}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
