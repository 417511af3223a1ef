"""PyTorch's tracker of tensors under fully_shard, and the peak that it counts of two steps of one rank."""

import contextlib
import gc
import sys

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

HELD = 4  # references to a tensor that only a mode of dispatch, its call and one gradient's buffer hold


class Tracker(FSDPMemTracker):
    """Under a mode of dispatch, as the tracker is one, autograd adds up the gradients of a branch out of place: the mode holds them. Without
    one it adds in place, and so they are counted here."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_sum_of_engine = func is torch.ops.aten.add.Tensor and sys._getframe(3).f_code.co_name == "_engine_run_backward"
        if is_sum_of_engine and args[0]._use_count() <= HELD and args[0].is_contiguous() and args[0].shape == args[1].shape:
            func = torch.ops.aten.add_.Tensor
        return super().__torch_dispatch__(func, types, args, kwargs)


def collect(*_):
    gc.collect()


def peak_of(model, optimizer, batch, after_step=lambda: None):
    """Bytes of all tensors at the peak of two steps of a sharded model, by category and as "Total"."""
    tracker = Tracker(model, optimizer)
    tracker.track_inputs(tuple(batch.values()))
    # The tracker's hooks hold graphs of detached results, which are freed at once without them. What there is already is frozen, or each
    # collection would look at it.
    gc.freeze()
    collecting = torch.nn.modules.module.register_module_forward_pre_hook(collect)
    with tracker, contextlib.ExitStack() as stack:
        stack.callback(collecting.remove)
        stack.callback(gc.unfreeze)
        for _ in range(2):
            tracker.reset_mod_stats()  # or else it refuses the next forward
            output = model(**batch)  # which holds the logits until the step ends, as in a training loop
            gc.collect()
            (output if isinstance(output, torch.Tensor) else output.loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step()
    return {getattr(kind, "value", kind): size for kind, size in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()}
