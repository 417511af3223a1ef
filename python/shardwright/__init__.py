"""Plans, simulates and runs Fully Sharded Data Parallel training (docs/library.md).

    plan = shardwright.plan(model="qwen3-8b", cluster="8xH100", seq=4096, global_batch=64)
    plan.fits, plan.step_time, plan.memory.at_peak, plan.why()

    job = shardwright.describe(model, sample, optimizer=optimizer)     # any torch.nn.Module
    plan = shardwright.plan(job, cluster="8xH100")
    shardwright.apply(model, plan)                                     # FSDP2, under torchrun

Every command of the program is a function of shardwright.commands.
"""

from __future__ import annotations

import inspect as _inspect
from typing import TYPE_CHECKING, Any

from . import commands
from ._errors import Error, InputError, InternalError, MachineError, RunError, UsageError
from ._native import __version__
from ._results import Advice, AdviceReport, Comparison, Memory, Plan, Prediction, advise, compare, emit, here, load, plan, simulate

if TYPE_CHECKING:
    from ._checkpoint import CheckpointReader, from_dcp, to_dcp
    from ._live import Job, apply, describe, set_micro_batch
    from ._record import Recording, record, trainer_callback

__all__ = [
    "Advice", "AdviceReport", "CheckpointReader", "Comparison", "Error", "InputError", "InternalError", "Job", "MachineError", "Memory",
    "Plan", "Prediction", "Recording", "RunError", "UsageError", "__version__", "advise", "apply", "commands", "compare", "describe",
    "emit", "from_dcp", "here", "load", "plan", "record", "set_micro_batch", "simulate", "to_dcp", "trainer_callback",
]

_LIVE = {"Job": "_live", "apply": "_live", "describe": "_live", "set_micro_batch": "_live", "Recording": "_record", "record": "_record",
         "trainer_callback": "_record", "CheckpointReader": "_checkpoint", "from_dcp": "_checkpoint", "to_dcp": "_checkpoint"}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for."""
    if name not in _LIVE:
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    import importlib
    value = getattr(importlib.import_module(f".{_LIVE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _tell_keywords(function: Any, skipped: int) -> None:
    """Signature and documentation of a function that takes a command's flags: the command's own, from the one table."""
    command = getattr(commands, function.__name__)
    own = [p for p in _inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in own}
    flags = [p for p in list(_inspect.signature(command).parameters.values())[skipped:] if p.name not in names]
    function.__signature__ = _inspect.Signature([*own, *flags])
    _, _, keywords = (_inspect.getdoc(command) or "").partition("\n\nKeywords:\n")
    function.__doc__ = f"{_inspect.getdoc(function)}\n\nKeywords:\n{keywords}"


_tell_keywords(advise, 1)
_tell_keywords(plan, 0)
_tell_keywords(simulate, 1)
_tell_keywords(emit, 1)
_tell_keywords(compare, 2)
