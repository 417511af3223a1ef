"""Runs a module forward and backward on tensors without data and writes down every aten call: what it read, wrote and kept."""

import contextlib
import functools
import importlib
import inspect
import re
import sys
import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from . import rules
from .rules import Unsupported


class Ref:
    """A tensor of the trace: a place in a storage. `index` counts them in the order of their appearance. `learns`: did it need a gradient
    where an op with gradients read it? None: no such op did."""

    __slots__ = ("index", "shape", "stride", "offset", "dtype", "storage", "contiguous", "whole", "read", "learns")

    def __init__(self, index, tensor, storage):
        self.index, self.storage = index, storage
        self.shape, self.stride, self.dtype = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        self.contiguous, self.offset, self.learns = tensor.is_contiguous(), tensor.storage_offset(), None
        distinct = 1
        for size, stride in zip(self.shape, self.stride):
            distinct *= size if stride != 0 else 1
        self.read = distinct  # elements that a kernel reads
        self.whole = distinct * tensor.element_size() == storage.nbytes


class Storage:
    """`born` is the call that made it, `died` how many calls there were when it was given back in backward (or None). `is_on_host`: a
    number that the module computes beside the device; what the trace is of lies on the meta device. `learns`: some tensor in it needed
    a gradient when an op read it."""

    __slots__ = ("index", "nbytes", "dtype", "kind", "name", "born", "died", "is_on_host", "learns")

    def __init__(self, index, nbytes, dtype, born, is_on_host):
        self.index, self.nbytes, self.dtype, self.kind, self.name = index, nbytes, dtype, "made", ""
        self.born, self.died, self.is_on_host, self.learns = born, None, is_on_host, False


class Call:
    """`has_grad`: autograd makes a node of it. `is_stopped`: it does not, since the module turned gradients off (no_grad, inference_mode);
    otherwise an autograd function runs it, whose node stands for it."""

    __slots__ = ("index", "func", "name", "in_place", "args", "kwargs", "inputs", "outputs", "module", "sequence", "backward_of",
                 "saved", "flops", "has_grad", "frames", "is_idle", "is_stopped")


class Stop(Exception):
    pass


# Ops that torch writes out differently for every device, or not at all without data: they are one call in the trace.
@torch.library.custom_op("shardwright_export::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, p: float,
              scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError


@attention.register_fake
def _(q, k, v, mask, causal, p, scale):
    # As FlashAttention does it: tokens before heads where the queries have them so.
    out = torch.empty_like(q.transpose(1, 2)) if v.shape[-1] == q.shape[-1] else \
        q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
    return out.transpose(1, 2), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("shardwright_export::attention_backward", mutates_args=())
def attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                       sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError


@attention_backward.register_fake
def _(grad, q, k, v, out, sums):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_attention(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # nobody has a gradient of the sums
    ctx.save_for_backward(*inputs[:3], *output)


def _attention_gradient(ctx, grad, _):
    q, k, v, out, sums = ctx.saved_tensors
    return (*torch.ops.shardwright_export.attention_backward(grad, q, k, v, out, sums), None, None, None, None)


attention.register_autograd(_attention_gradient, setup_context=_keep_attention)


# With a mask that is learned: no flash kernel takes one, but the memory-efficient one does. It keeps the mask, and its gradient comes
# for every sample and head.
@torch.library.custom_op("shardwright_export::attention_biased", mutates_args=())
def attention_biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, causal: bool, p: float,
                     scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError


@attention_biased.register_fake
def _(q, k, v, mask, causal, p, scale):
    # Tokens before heads, whatever the queries are; sums of whole tiles of 32 queries.
    b, heads, tokens = q.shape[:3]
    out = q.new_empty(b, tokens, heads, v.shape[-1])
    return out.transpose(1, 2), q.new_empty(b, heads, -(-tokens // 32) * 32, dtype=torch.float32)


@torch.library.custom_op("shardwright_export::attention_biased_backward", mutates_args=())
def attention_biased_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, out: torch.Tensor,
                              sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError


@attention_biased_backward.register_fake
def _(grad, q, k, v, mask, out, sums):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), mask.new_empty(mask.shape)


def _keep_biased(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output)


def _biased_gradient(ctx, grad, _):
    return (*torch.ops.shardwright_export.attention_biased_backward(grad, *ctx.saved_tensors), None, None, None)


attention_biased.register_autograd(_biased_gradient, setup_context=_keep_biased)


def _stand_in(name, count):
    """A call that reads `count` tensors and the gradients of which are as large as those."""
    arguments = ", ".join(f"Tensor t{i}" for i in range(count))
    library.define(f"{name}({arguments}, int[] shape) -> Tensor")
    library.define(f"{name}_backward(Tensor grad, {arguments}) -> ({', '.join(['Tensor'] * count)})")
    library.impl(name, lambda *a: a[0].new_empty(a[-1]), "Meta")
    library.impl(name + "_backward", lambda _, *a: tuple(torch.empty_like(t) for t in a), "Meta")

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:-1])

    def gradient(ctx, grad):
        return (*getattr(torch.ops.shardwright_export, name + "_backward")(grad, *ctx.saved_tensors), None)

    torch.library.register_autograd(f"shardwright_export::{name}", gradient, setup_context=keep, lib=library)


library = torch.library.Library("shardwright_export", "FRAGMENT")
_stand_in("router", 2)
_stand_in("experts", 4)

# The gated delta rule as flash-linear-attention's chunk_gated_delta_rule has it (fla/ops/gated_delta_rule/chunk.py, 0.4): queries and
# keys of unit length with their factors, sums of the decays, and the inverse of each chunk's triangle are kept beside values and betas.
library.define("delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int chunk) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
library.define("delta_rule_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor qs, Tensor ks, Tensor g, Tensor inverse) -> "
               "(Tensor, Tensor, Tensor, Tensor, Tensor)")


def _delta_rule(q, k, v, g, beta, chunk):
    sums = [t.new_empty(t.shape[:3], dtype=torch.float32) for t in (q, k)]
    return torch.empty_like(v), torch.empty_like(q), torch.empty_like(k), *sums, g.new_empty(g.shape, dtype=torch.float32), k.new_empty(*g.shape, chunk)


library.impl("delta_rule", _delta_rule, "Meta")
library.impl("delta_rule_backward", lambda grad, q, k, v, beta, qs, ks, g, inverse: tuple(torch.empty_like(t) for t in (q, k, v, g, beta)), "Meta")


def _keep_delta_rule(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:3], inputs[2], inputs[4], *output[3:])


def _delta_rule_gradient(ctx, grad, *_):
    return (*torch.ops.shardwright_export.delta_rule_backward(grad, *ctx.saved_tensors), None)


torch.library.register_autograd("shardwright_export::delta_rule", _delta_rule_gradient, setup_context=_keep_delta_rule, lib=library)


def delta_rule(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **_):
    if initial_state is not None or output_final_state or not use_qk_l2norm_in_kernel:
        raise Unsupported("a gated delta rule with states, or without the norms of queries and keys")
    return torch.ops.shardwright_export.delta_rule(query, key, value, g, beta, chunk_size)[0], None


ATTENTION, DROPOUT = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.dropout


def fused_attention(*args, **kwargs):
    return AsOnDevices.attention(*args, **kwargs) if AsOnDevices.is_fused(*args, **kwargs) else ATTENTION(*args, **kwargs)


def fused_dropout(original, *args, **kwargs):
    bound = dict(zip(("input", "p", "training", "inplace"), args)) | kwargs
    p = bound.get("p", 0.5)
    if bound.get("training", bound.get("train", True)) and 0 < p < 1:
        return torch.native_dropout(bound["input"], p, True)[0]
    return original(*args, **kwargs)


class AsOnDevices(TorchFunctionMode):
    """Functions that the CPU and the meta device write out and GPUs do not."""

    takes_learned_masks = True  # False: attention with one is written out, as on a CPU
    gradients_are_on = True  # as the module's code said last

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            self.gradients_are_on = bool(args[0])
        if func is ATTENTION:
            return fused_attention(*args, **kwargs)
        if func in (DROPOUT, torch.dropout):
            return fused_dropout(func, *args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def is_fused(query, key, value, attn_mask=None, *_, **__):
        """Is there one kernel for it? More dimensions are written out."""
        is_learned = attn_mask is not None and attn_mask.requires_grad
        return query.dim() in (3, 4) and (AsOnDevices.takes_learned_masks or not is_learned)

    @staticmethod
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.dim() == 3:
            unflat = AsOnDevices.attention(query[:, None], key[:, None], value[:, None],
                                           None if attn_mask is None or attn_mask.dim() < 3 else attn_mask[:, None], dropout_p, is_causal, scale)
            return unflat[:, 0]
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        if attn_mask is not None and attn_mask.requires_grad:
            if enable_gqa and key.shape[1] < query.shape[1]:  # the kernel knows no groups
                key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            return torch.ops.shardwright_export.attention_biased(query, key, value, attn_mask, is_causal, dropout_p,
                                                                 0.0 if scale is None else float(scale))[0]
        out, _ = torch.ops.shardwright_export.attention(query, key, value, attn_mask, is_causal, dropout_p, 0.0 if scale is None else float(scale))
        return out


class Recorder(TorchDispatchMode):
    def __init__(self, model, functions, draw=0.99):
        super().__init__()
        self.draw, self.has_drawn = draw, False  # what random numbers of the host are in this trace, and whether there were any
        self.functions = functions  # the AsOnDevices around the trace
        self.calls, self.refs, self.storages = [], [], []
        self.alive, self.watched, self.of_tensor, self.of_storage = [], {}, {}, {}
        self.frames = [("", 0)]  # what is being called: names, each with the number of the call
        self.given = []  # per frame below the root: what it was given, and how many calls there were
        self.stands_for = {}  # tensor that a module returned -> the tensor that it was given and returned
        self.returned = []  # of those modules: name, number of the call, and whether a gradient came back
        self.backward = False
        self.called, self.names, self.entered = {}, {}, set()  # calls by id, names by id, names under which something was called
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(id(module), []).append(name)
        self.containers = {name for name, module in model.named_modules(remove_duplicate=False)
                           if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))}
        self.pending = {}  # sequence number -> tensors kept by the node before its call
        self.by_sequence = {}
        self.in_place = []
        self.outputs = []
        for name, parameter in model.named_parameters():
            self.known(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self.known(buffer, "buffer", name)

    def known(self, tensor, kind, name):
        storage = self.ref(tensor).storage
        if storage.kind == "made":
            storage.kind, storage.name = kind, name

    def ref(self, tensor):
        found = self.of_tensor.get(id(tensor))
        if found is not None:
            return found
        memory = tensor.untyped_storage()
        storage = self.of_storage.get(memory._cdata)
        if storage is None:
            storage = Storage(len(self.storages), memory.nbytes(), tensor.dtype, len(self.calls), tensor.device.type == "cpu")
            self.of_storage[memory._cdata] = storage
            self.storages.append(storage)
            self.hold(memory, memory._cdata, self.of_storage)
        ref = Ref(len(self.refs), tensor, storage)
        self.refs.append(ref)
        self.of_tensor[id(tensor)] = ref
        self.hold(tensor, id(tensor), self.of_tensor)
        return ref

    def hold(self, thing, key, table):
        """Keeps what forward makes, so that its key stays its own; in backward, when tensors go tells what the peak is of."""
        if not self.backward:
            self.alive.append(thing)
            return

        def gone(_):
            del self.watched[key, id(table)]
            found = table.pop(key)
            if isinstance(found, Storage):
                found.died = len(self.calls)

        self.watched[key, id(table)] = weakref.ref(thing, gone)

    def pack(self, tensor):
        sequence = torch._C._autograd._get_sequence_nr()
        owner = self.by_sequence.get(sequence)
        ref = self.ref(tensor)
        if owner is None:
            self.pending.setdefault(sequence, []).append(ref)
        else:
            owner.saved.append(ref)
        return tensor

    def owner(self, sequence):
        """The forward call of a node. Nodes that autograd adds when a view is changed in place belong to the change."""
        found = self.by_sequence.get(sequence + 1)
        return found or next((call for call in reversed(self.in_place) if call.sequence <= sequence), None)

    def enter(self, module, args):
        """A module has the name under which its caller holds it, or else its first. Of several names below the caller that one counts
        with the fewest modules between, which would have been called before; lists are not called."""
        if self.backward:
            raise Unsupported(f"{self.names[id(module)][0] or 'the root module'} runs again in backward, by an autograd function that "
                              f"recomputes; {WITHOUT_CHECKPOINTS}")
        caller, names = self.frames[-1][0], self.names[id(module)]
        below = [n for n in names if not caller or n.startswith(caller + ".")]
        name = min(below, key=lambda n: self.modules_between(caller, n)) if below else names[0]
        self.called[id(module)] = self.called.get(id(module), 0) + 1
        self.frames.append((name, self.called[id(module)]))
        self.entered.add(name)
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        self.given.append(({id(t): t._version for t in tensors}, len(self.calls)))

    def modules_between(self, caller, name):
        parts = name.split(".")
        inner = (".".join(parts[:i]) for i in range(caller.count(".") + 2 if caller else 1, len(parts)))
        return sum(between not in self.containers for between in inner)

    def leave(self, module, args, output):
        """Where a module with calls returns what it was given, unchanged, the caller gets another tensor for it, so that a gradient
        that comes back through the module shows."""
        given, calls = self.given.pop()
        if len(self.calls) == calls and isinstance(output, torch.Tensor) and id(output) in given and any(True for _ in module.parameters()):
            output.clone()  # a call of a module is seen by what it runs, and hooks see one that runs nothing
            self.calls[-1].is_idle = True
        name, number = self.frames.pop()
        if not isinstance(output, torch.Tensor) or len(self.calls) == calls or not output.requires_grad or not torch.is_grad_enabled():
            return None
        source = output
        while id(source) not in given and id(source) in self.stands_for:
            source = self.stands_for[id(source)]
        if given.get(id(source)) != output._version:
            return None
        entry = [name, number, False]
        self.returned.append(entry)
        alias = output.view_as(output)
        alias.register_hook(lambda gradient: entry.__setitem__(2, True))
        self.alive.append(alias)
        self.stands_for[id(alias)] = output
        return alias

    def note_learning(self, *arguments):
        for tensor in pytree.tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor):
                ref = self.ref(tensor)
                ref.learns = bool(ref.learns) or tensor.requires_grad
                ref.storage.learns |= tensor.requires_grad

    @property
    def module(self):
        return self.frames[-1][0]

    def place(self):
        return self.module or "the root module"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not rules.known(func):
            shapes = [str(list(t.shape)) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            raise Unsupported(f"{self.place()}: no rule for {func.name().replace('::', '.')} of {' and '.join(shapes) or 'no tensor'}"
                              f"{' in backward' if self.backward else ''}")
        sequence = torch._C._autograd._get_sequence_nr()
        out = func(*args, **kwargs)
        call = Call()
        call.index, call.func = len(self.calls), func
        call.name, call.in_place = rules.packet(func)
        if call.name in ("rand", "rand_like", "uniform") and out.device.type == "cpu":
            out.fill_(self.draw)
            self.has_drawn = True
        to_ref = lambda x: self.ref(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        call.args, call.kwargs = pytree.tree_map(to_ref, (args, kwargs))
        call.inputs = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Ref)]
        call.outputs = [self.ref(t) for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        call.module, call.frames, call.sequence, call.saved = self.module, dict(self.frames), sequence, []
        call.flops = rules.multiplications(func, args, kwargs, out)
        call.is_idle = False
        call.backward_of, call.has_grad = None, torch.is_grad_enabled()
        if call.has_grad:
            self.functions.gradients_are_on = True  # also behind an autograd function that changed it inside
        call.is_stopped = not call.has_grad and (not self.functions.gradients_are_on or torch.is_inference_mode_enabled())
        if call.has_grad and not self.backward:
            self.note_learning(args, kwargs)
        if self.backward:
            node = torch._C._current_autograd_node()
            # Gradients of parameters are copied here where something holds them; elsewhere they are handed on.
            has_forward = node is not None and "AccumulateGrad" not in node.name()
            call.backward_of = self.owner(node._sequence_nr()) if has_forward else None
            if has_forward and call.backward_of is None and call.name not in rules.VIEWS | rules.FREE:
                raise Unsupported(f"{node.name()} runs {call.name} in backward, of which forward shows no op")
        else:
            # Of a custom autograd function, whose calls run without gradients, the last call stands for its node.
            first = self.by_sequence.get(sequence)
            if first is None or not call.has_grad and not first.has_grad:
                self.by_sequence[sequence] = call
            if call.in_place:
                self.in_place.append(call)
            if call.in_place and sequence - 1 not in self.by_sequence:  # its node came before a copy of what it overwrites
                self.by_sequence[sequence - 1] = call
            if sequence in self.pending:
                call.saved += self.pending.pop(sequence)
                self.by_sequence[sequence] = call
        self.calls.append(call)
        return out


def unwrap(model):
    """The module that torch.compile holds, here and below, and without what module.compile() left."""
    model = getattr(model, "_orig_mod", model)
    if getattr(model, "_compiled_call_impl", None) is not None:
        model._compiled_call_impl = None
    for name, child in list(model.named_children()):
        inner = unwrap(child)
        if inner is not child:
            setattr(model, name, inner)
    return model


def own_parameters(module):
    return list(module.parameters(recurse=False))


def is_experts(module):
    """Two 3-D weights: (experts, in and gate, features) and back. (ViT's embeddings have two with a first size of 1.)"""
    own = own_parameters(module)
    return len(own) == 2 and all(p.dim() == 3 for p in own) and own[0].shape[0] == own[1].shape[0] > 1 and \
        hasattr(module, "act_fn")


def is_router(module):
    own = own_parameters(module)
    return "Router" in type(module).__name__ and len(own) == 1 and own[0].dim() == 2


def stub(model):
    """Which rows go to which expert is decided by values, which are not there: routers and experts become one call each."""
    stubbed = []
    has_router = any(is_router(module) for module in model.modules())
    for module in model.modules():
        if is_router(module):
            original = module.forward

            def route(hidden, *args, _original=original, _module=module, **kwargs):
                with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
                    outputs = _original(hidden.detach(), *args, **kwargs)
                several = isinstance(outputs, (tuple, list))
                tensors = list(outputs) if several else [outputs]
                weight = own_parameters(_module)[0]
                scores = torch.ops.shardwright_export.router(hidden.reshape(-1, hidden.shape[-1]), weight,
                                                             [hidden.numel() // hidden.shape[-1], weight.shape[0]])
                chosen = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_floating_point()]
                if not chosen:
                    raise Unsupported("a router that does not choose experts")
                _module.chosen_per_token = chosen[0].shape[-1]
                results = []
                for t in tensors:
                    per_token = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 0 and \
                        t.shape[-1] <= scores.shape[-1] and t.numel() == scores.shape[0] * t.shape[-1]
                    results.append(scores[:, :t.shape[-1]].view(t.shape) if per_token else
                                   torch.empty(t.shape, dtype=t.dtype, device=t.device) if isinstance(t, torch.Tensor) else t)
                return type(outputs)(results) if several else results[0]

            module.forward = route
            stubbed.append(module)
        elif is_experts(module):
            def run(hidden, *args, _module=module, **kwargs):
                weights = own_parameters(_module)
                floats = [t for t in [*args, *kwargs.values()] if isinstance(t, torch.Tensor) and t.is_floating_point()]
                chosen = [t for t in [*args, *kwargs.values()] if isinstance(t, torch.Tensor) and not t.is_floating_point()]
                if not floats:
                    raise Unsupported("experts whose routing weights are not among their arguments")
                _module.chosen_per_token = (chosen or floats)[0].shape[-1]
                scores, count = floats[0], weights[0].shape[0]
                if not has_router and scores.shape[-1] < count:  # of a router that is no module of one weight: its choices alone
                    scores = torch.nn.functional.pad(scores.reshape(-1, scores.shape[-1]), (0, count - scores.shape[-1]))
                return torch.ops.shardwright_export.experts(hidden, scores, *weights, list(hidden.shape))

            module.forward = run
            stubbed.append(module)
    return stubbed


def backward_of(outputs):
    """The loss of a Transformers output, or all results that have gradients."""
    loss = getattr(outputs, "loss", None)
    tensors = [loss] if isinstance(loss, torch.Tensor) else \
        [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    tensors = [t for t in tensors if t.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.empty_like(t) for t in tensors])


@contextlib.contextmanager
def for_device(device_type):
    """Traces inside are of a model that runs on such devices."""
    before = AsOnDevices.takes_learned_masks
    AsOnDevices.takes_learned_masks = device_type != "cpu"
    try:
        yield
    finally:
        AsOnDevices.takes_learned_masks = before


# Wrappers of a trained module, by class; export takes the module itself.
SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel", "DataParallel", "DeepSpeedEngine")
WITHOUT_CHECKPOINTS = ('describe the module without it, and let the plan say what is recomputed (recompute="full" recomputes every '
                       "block)")


def check_wrappers(model):
    for name, module in model.named_modules():
        kind = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in SHARDED), None)
        if kind:
            raise Unsupported(f"{name or 'the root module'} is wrapped by {kind}; describe the module before it is wrapped")
        if isinstance(module, torch.jit.ScriptModule):
            raise Unsupported(f"{name or 'the root module'} is TorchScript, whose parameters no wrapper can shard; describe the module as "
                              "it was before torch.jit")
        for function in _composable(module):
            if function != "checkpoint":  # which forward meets
                raise Unsupported(f"{name or 'the root module'} is wrapped by the function {function}; describe the module before it is")


def _composable(module):
    """The names of PyTorch's functions, such as replicate and checkpoint, that were applied to the module in place."""
    try:
        from torch.distributed._composable.contract import _get_registry
        return list(_get_registry(module) or ())
    except ImportError:
        return []


@contextlib.contextmanager
def refusing_contexts(recorder):
    """Refuses by its name what changes which tensors autograd keeps, in which dtype ops compute, or when backward runs."""
    def refuse(what, then):
        raise Unsupported(f"{recorder.place()}: {what}; {then}")

    def enter(hooks):
        if type(hooks).__name__ == "_checkpoint_hook":
            refuse("checkpointing of the module's own (torch.utils.checkpoint, checkpoint_wrapper or gradient_checkpointing_enable())",
                   WITHOUT_CHECKPOINTS)
        refuse(f"hooks on tensors that autograd keeps ({type(hooks).__name__})",
               "describe the module without them; the plan says what is offloaded")

    class Reentrant:
        @staticmethod
        def apply(*_):
            refuse("reentrant checkpointing of the module's own (torch.utils.checkpoint with use_reentrant=True)", WITHOUT_CHECKPOINTS)

    def infer(mode):
        if mode.mode:
            refuse("inference_mode in forward, whose tensors no training step can keep", "use torch.no_grad()")

    def asked(mode, *arguments, **options):
        created(mode, *arguments, **options)
        # torch turns it off where it has no such device, which is where modules are described.
        mode.asked = inspect.signature(created).bind(mode, *arguments, **options).arguments.get("enabled", True)

    def cast(mode):
        if getattr(mode, "asked", mode._enabled):
            refuse("autocast in forward, which casts some ops and not others", "describe the module without it; the plan's precision says "
                   "the dtype in which all ops compute")
        return autocast(mode)

    def differentiate(*_, **__):
        refuse("a gradient taken in forward (autograd.grad or backward)", "no plan runs backward inside of forward")

    autocast, engine = torch.amp.autocast_mode.autocast.__enter__, torch.autograd._engine_run_backward
    created = torch.amp.autocast_mode.autocast.__init__
    torch.amp.autocast_mode.autocast.__enter__, torch.autograd._engine_run_backward = cast, differentiate
    torch.amp.autocast_mode.autocast.__init__ = asked
    inference, entered = torch.inference_mode, torch.inference_mode.__enter__
    hooks, checkpoint = torch.autograd.graph.saved_tensors_hooks, importlib.import_module("torch.utils.checkpoint")
    before, function = hooks.__enter__, checkpoint.CheckpointFunction
    hooks.__enter__, checkpoint.CheckpointFunction, inference.__enter__ = enter, Reentrant, infer
    try:
        yield
    finally:
        hooks.__enter__, checkpoint.CheckpointFunction, inference.__enter__ = before, function, entered
        torch.amp.autocast_mode.autocast.__enter__, torch.autograd._engine_run_backward = autocast, engine
        torch.amp.autocast_mode.autocast.__init__ = created


@contextlib.contextmanager
def told_of_tracing(fused=True):
    """Transformers leaves out checks of values where it knows that it is traced; a sample is one sequence, not several packed."""
    changes = [("transformers.utils.import_utils", "is_fake_tensor", lambda tensor: True),
               ("transformers.masking_utils", "find_packed_sequence_indices", lambda positions: None),
               ("torch.nn.modules.transformer", "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal))]
    # Where flash-linear-attention is installed, Transformers calls it; what stands in its place loops over chunks.
    changes += [(home, "torch_chunk_gated_delta_rule", delta_rule) for home in sys.modules if home.startswith("transformers.models.")]
    if fused:  # a mode does not see what functions of torch.nn.functional call in their turn; their module does
        changes += [("torch.nn.functional", "scaled_dot_product_attention", fused_attention),
                    ("torch.nn.functional", "dropout", functools.partial(fused_dropout, DROPOUT))]
    undo = []
    for module, name, replacement in changes:
        module = sys.modules.get(module)
        if hasattr(module, name):
            undo.append((module, name, getattr(module, name)))
            setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name, original in undo:
            setattr(module, name, original)


def flat(outputs):
    try:
        return pytree.tree_leaves(dict(outputs) if hasattr(outputs, "items") else outputs)
    except Exception:  # noqa: BLE001
        return []


def explain(error, recorder):
    """One clear line instead of a traceback."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    if isinstance(error, Unsupported):
        return text
    place = recorder.place()
    if "item() cannot be called on meta" in text or "local_scalar_dense" in text or "data-dependent" in text or \
            "nonzero" in text and "meta" in text:
        return f"{place}: what runs there depends on values of tensors, which an export does not have ({type(error).__name__}: {text[:120]})"
    return f"{place}: {type(error).__name__}: {text[:300]}"


def run(model, inputs, positional=False, draw=0.99):
    """One trace. `inputs`: name -> tensor on the meta device. `draw`: what is drawn at random on the host, as by LayerDrop."""
    functions = AsOnDevices()
    recorder = Recorder(model, functions, draw)
    for name, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor):
            recorder.known(tensor, "input", name)
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(recorder.enter))
        handles.append(module.register_forward_hook(recorder.leave))
    stubbed = stub(model)
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(told_of_tracing())
            stack.enter_context(functions)
            stack.enter_context(recorder)
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda t: t), refusing_contexts(recorder):
                outputs = model(*inputs.values()) if positional else model(**inputs)
            recorder.outputs = [recorder.ref(t) for t in flat(outputs) if isinstance(t, torch.Tensor)]
            recorder.note_learning(flat(outputs))
            recorder.backward = True
            backward_of(outputs)
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword" in str(error) and not recorder.module:
            raise
        raise Unsupported(explain(error, recorder)) from error
    finally:
        for handle in handles:
            handle.remove()
        for module in stubbed:
            del module.forward
        for parameter in model.parameters():
            parameter.grad = None
    if recorder.pending:
        first = min(recorder.pending)
        call = next((call for call in reversed(recorder.in_place) if call.sequence <= first), None)
        where = f"{call.module or 'the root module'}: {call.name}_" if call is not None else "an op"
        raise Unsupported(f"{where} in place on a view of a tensor that has a gradient; write it out of place")
    return recorder


def totals(recorder):
    """(FLOPs forward, backward, bytes kept between them), as the counter and autograd have them."""
    forward = sum(c.flops for c in recorder.calls if c.backward_of is None)
    backward = sum(c.flops for c in recorder.calls if c.backward_of is not None)
    kept = {ref.storage.index: ref.storage.nbytes for call in recorder.calls for ref in call.saved
            if ref.storage.kind not in ("parameter", "buffer")}
    return forward, backward, sum(kept.values())
