#!/usr/bin/env python3
"""Writes any torch.nn.Module as a model.json (docs/model_json.md): module tree, parameters, ties, ops in execution order.

    python3 tools/export_model.py my_package.my_models:build --seq 2048 -o model.json
    python3 tools/export_model.py --config path/to/config.json --seq 2048 -o model.json

`build()` returns the module; it is called with fake tensors (torch._subclasses), so that no weights exist. --config takes a Transformers
configuration instead. The module is called once with one sample: input_ids and labels of --seq tokens, or pixel_values of
--image pixels. Other inputs: call export(model, inputs) from Python. Needs torch; --config needs transformers.

Transformers' encoder-decoders get --seq tokens on both sides.

How it works: calls of torch functions are recorded while the module runs on tensors without data. Views, casts, rotary embeddings and
constants are followed but make no op; norms written out in Python become one op, and so do the routers and experts (3-D weights) of a
mixture, as Transformers 5 writes them. What has no op in model.json (scans, fft, ...) is an error that names function and module,
rather than a model that lacks a part.
"""

import argparse
import importlib
import json
import os
import pathlib
import sys
import tempfile

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

ACTIVATIONS = {"relu": "relu", "relu_": "relu", "gelu": "gelu", "silu": "silu", "tanh": "tanh", "sigmoid": "sigmoid"}
SUMS = {"add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__"}
PRODUCTS = {"mul", "__mul__", "__rmul__", "mul_", "__imul__"}
# They make numbers without weights: masks, positions, means for metrics. Never part of the op graph.
WEIGHTLESS = {"softmax", "masked_fill", "pow", "rsqrt", "mean", "neg", "__neg__", "div", "__truediv__", "sqrt", "where",
              "exp", "sin", "cos", "clamp", "square", "erf"}
ACTIVATION_CLASSES = {"SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "ReLU": "relu",
                      "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh"}


class Unsupported(Exception):
    """A module that model.json has no words for."""


class Value:
    """What a traced tensor holds: an output of an op (or an input), as a whole or in part."""

    def __init__(self, name, rows, features, image=None, scores=None, bias=None, half=None, function=None):
        self.name, self.rows, self.features, self.image = name, rows, features, image
        self.half, self.function = half, function  # which half of the features (0, 1); the first one's activation
        self.scores, self.bias = scores, bias  # of scores: queries and keys; the position bias that was added

    def elements(self):
        return self.rows * self.features


class Recorder(TorchFunctionMode):
    """Turns calls of torch functions into ops."""

    def __init__(self, model, inputs):
        super().__init__()
        for name, module in model.named_modules():
            if hasattr(module, "kv_lora_rank"):
                raise Unsupported(f"{name}: latent attention (shardwright reads the config.json of such models itself)")
        self.ops, self.inputs, self.alive = [], {}, []
        self.values = {}  # id of a tensor -> Value
        self.modules_by_name = dict(model.named_modules())
        self.synchronized = {name for name, module in model.named_modules() if isinstance(module, torch.nn.SyncBatchNorm)}
        self.parameters = {}  # id -> all names, of a tied weight several
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(id(parameter), []).append(name)
        self.stack = [""]
        self.atomic = 0  # inside a module that is one op
        self.handles, self.stubs = [], []
        for name, module in model.named_modules():
            if self.is_experts(module):
                # Which rows go where is decided by values, which are not there.
                self.stubs.append(module)
                module.forward = lambda hidden, *_, **__: torch.empty_like(hidden)
            self.handles.append(module.register_forward_pre_hook(self.enter(name, module)))
            self.handles.append(module.register_forward_hook(self.leave(name, module)))
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                self.inputs[name] = {"shape": list(tensor.shape[1:])}
                self.remember(tensor, self.image_or_rows(name, tensor.shape[1:]))
            else:
                self.inputs[name] = {"ids": tensor.numel()}
                self.remember(tensor, Value(name, tensor.numel(), 1))

    @staticmethod
    def image_or_rows(name, shape):
        if len(shape) == 3:
            return Value(name, shape[1] * shape[2], shape[0], image=tuple(shape))
        return Value(name, shape[0] if len(shape) > 1 else 1, shape[-1])

    # A norm that is written out in Python is one op: a leaf module with "Norm" in its name and a vector as its weight.
    def is_norm(self, module):
        own = list(module.parameters(recurse=False))
        return "Norm" in type(module).__name__ and not list(module.children()) and 0 < len(own) < 3 and \
            not isinstance(module, (torch.nn.modules.batchnorm._BatchNorm, torch.nn.LayerNorm))

    @staticmethod
    def is_experts(module):
        """Two 3-D weights: (experts, in and gate, features) and back. (ViT's embeddings have two with a first size of 1.)"""
        own = list(module.parameters(recurse=False))
        return len(own) == 2 and all(p.dim() == 3 for p in own) and own[0].shape[0] == own[1].shape[0] > 1

    @staticmethod
    def is_router(module):
        own = list(module.parameters(recurse=False))
        return "Router" in type(module).__name__ and len(own) == 1 and own[0].dim() == 2

    def is_atomic(self, module):
        return self.is_norm(module) or self.is_router(module)

    def enter(self, name, module):
        def hook(_, args):
            self.stack.append(name)
            if self.is_atomic(module):
                self.atomic += 1
        return hook

    def router(self, name, module, source, output):
        if source is None:
            raise Unsupported(f"{name}: a router of something that is not followed")
        outputs = [t for t in (output if isinstance(output, (list, tuple)) else [output]) if isinstance(t, torch.Tensor)]
        chosen = [t for t in outputs if not t.is_floating_point()]
        if not chosen:
            raise Unsupported(f"{name}: a router that does not choose experts")
        extra = {"factor": module.routed_scaling_factor} if getattr(module, "routed_scaling_factor", 1) != 1 else {}
        if not getattr(module, "norm_topk_prob", True):
            extra["unnormalized"] = True
        self.emit(outputs[0], "router", [source], source.rows, module.weight.shape[0], params=[f"{name}.weight"],
                  experts_per_token=chosen[0].shape[-1], **extra)
        for tensor in outputs[1:]:
            self.remember(tensor, self.values[id(outputs[0])])

    def experts(self, name, module, args, output):
        source, routing = self.value(args[0]), next(filter(None, map(self.value, args[1:])), None)
        function = ACTIVATION_CLASSES.get(type(getattr(module, "act_fn", None)).__name__)
        if source is None or routing is None or function is None:
            raise Unsupported(f"{name}: experts whose rows, router or activation are not known")
        (first, up), (second, down) = list(module.named_parameters(recurse=False))
        chosen = next(t for t in args[1:] if isinstance(t, torch.Tensor) and not t.is_floating_point())
        gated = up.numel() == 2 * down.numel()
        if not gated and up.numel() != down.numel():
            raise Unsupported(f"{name}: weights {list(up.shape)} and {list(down.shape)}")
        self.emit(output, "experts", [source, routing], source.rows, source.features,
                  params=[f"{name}.{first}", f"{name}.{second}"], function=function, gated=gated,
                  experts_per_token=chosen.shape[-1])

    def leave(self, name, module):
        def hook(_, args, output):
            if self.is_atomic(module):
                self.atomic -= 1
            if module in self.stubs:
                self.experts(name, module, args, output)
            elif self.is_router(module):
                self.router(name, module, self.value(args[0]), output)
            elif self.is_norm(module):
                source = self.value(args[0])
                if source is None:
                    raise Unsupported(f"{name}: a norm of something that is not followed")
                params = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
                epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))
                self.emit(output, "rms_norm", [source], source.rows, source.features, params=params, epsilon=epsilon)
            self.stack.pop()
        return hook

    def remember(self, tensor, value):
        self.alive.append(tensor)  # its id stays its own
        self.values[id(tensor)] = value

    def value(self, tensor):
        return self.values.get(id(tensor)) if isinstance(tensor, torch.Tensor) else None

    def parameter(self, tensor):
        """The parameter's name in the running module, if it has one there; also of a view of it."""
        while isinstance(tensor, torch.Tensor):
            names = self.parameters.get(id(tensor), [])
            if names:
                return next((n for n in names if n.rpartition(".")[0] == self.stack[-1]), names[0])
            tensor = tensor._base
        return None

    def emit(self, output, op, inputs, rows, features, image=None, params=(), **extra):
        name = f"t{len(self.ops)}"
        entry = {"op": op, "module": self.stack[-1], "name": f"{op}_{len(self.ops)}",
                 "inputs": [v if isinstance(v, str) else v.name for v in inputs], "output": name}
        if params:
            entry["params"] = list(params)
        entry.update(extra)
        self.ops.append(entry)
        self.remember(output, Value(name, rows, features, image))

    def index_input(self, tensor):
        """The name of an input of integers; those that the module makes itself are positions."""
        known = self.value(tensor)
        if known is not None:
            return known.name
        name = f"positions{len(self.inputs)}"
        self.inputs[name] = {"positions": tensor.numel()}
        self.remember(tensor, Value(name, tensor.numel(), 1))
        return name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.atomic:
            self.record(getattr(func, "__name__", str(func)), args, kwargs, result)
        return result

    def record(self, name, args, kwargs, result):
        handler = getattr(self, "on_" + name, None)
        if handler is not None:
            handler(args, kwargs, result)
        elif name in ACTIVATIONS and self.value(args[0]) and not self.value(args[0]).scores:
            source = self.value(args[0])
            function = "gelu_tanh" if name == "gelu" and kwargs.get("approximate") == "tanh" else ACTIVATIONS[name]
            if source.half == 0 and source.function is None:
                self.remember(result, Value(source.name, source.rows, source.features, half=0, function=function))
                return
            self.emit(result, "activation", [source], source.rows, source.features, source.image, function=function)
        elif name in SUMS or name in PRODUCTS:
            self.binary("add" if name in SUMS else "mul", args, result)
        else:
            self.follow(name, args, kwargs, result)

    def tensors_of(self, args, kwargs):
        found = []
        for arg in list(args) + list(kwargs.values()):
            found += [t for t in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(t, torch.Tensor)]
        return found

    def follow(self, name, args, kwargs, result):
        """Views, casts, slices and whatever has no weights: the result stands for the same value."""
        sources = [self.value(t) for t in self.tensors_of(args, kwargs)]
        sources = [s for s in sources if s is not None]
        weights = [self.parameter(t) for t in self.tensors_of(args, kwargs)]
        outputs = [t for t in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(t, torch.Tensor)]
        if not outputs or all(not t.is_floating_point() for t in outputs) and not sources:
            return
        # Stacked in rows: a class token and the patches.
        names = {s.name for s in sources}
        if name in ("cat", "concat") and len(sources) + sum(w is not None for w in weights) > 1 and \
                (len(names) > 1 or any(weights)):
            rows = outputs[0].numel() // outputs[0].shape[-1]
            self.emit(outputs[0], "concat", sources, rows, outputs[0].shape[-1], params=[w for w in weights if w])
            return
        if len(names) > 1 and any(t.is_floating_point() for t in outputs):
            raise Unsupported(f"{self.stack[-1] or 'the root'}: {name} of several values")
        for tensor in outputs:
            if sources and self.values.get(id(tensor)) is None:
                self.remember(tensor, sources[0])

    def binary(self, op, args, result):
        a, b = self.value(args[0]), self.value(args[1])
        if op == "mul" and a and b and a.name == b.name and {a.half, b.half} == {0, 1}:
            gate = a if a.half == 0 else b  # side by side with up in one tensor
            if gate.function:
                self.emit(result, "gated_activation", [gate], gate.rows, gate.features, function=gate.function)
                return
        param = self.parameter(args[0]) or self.parameter(args[1])
        source = a or b
        if source is None or not isinstance(result, torch.Tensor):
            return
        if a and b and a.scores and op == "add" and b.rows == result.shape[-3]:  # heads
            self.remember(result, Value(a.name, a.rows, a.features, scores=a.scores, bias=b.name))
            return
        if param and not (a and b):
            self.emit(result, op, [source], source.rows, source.features, source.image, params=[param])
        elif a and b and a.name != b.name and a.elements() == b.elements():
            self.emit(result, op, [a, b], a.rows, a.features, a.image)
        elif source.scores or a is b or a is None or b is None or a.name == b.name:
            self.remember(result, source)  # constants, rotary embeddings, masks
        else:
            larger = a if a.elements() >= b.elements() else b
            self.emit(result, op, [larger, b if larger is a else a], larger.rows, larger.features, larger.image)

    def matrix_product(self, x, weight, bias, result, transposed):
        source, name = self.value(x), self.parameter(weight)
        if source is None or name is None:
            raise Unsupported(f"{self.stack[-1] or 'the root'}: a linear layer of what is no parameter or not followed")
        params = [name] + ([self.parameter(bias)] if bias is not None else [])
        extra = {"transposed": True} if transposed else {}
        features = result.shape[-1]
        inner = weight.shape[0 if transposed else 1]
        rows = result.numel() // features
        if source.elements() != rows * inner:  # a slice: the first rows, such as a class token's
            self.emit(x, "select", [source], rows, inner)
            self.ops[-1]["rows"] = rows
            source = self.value(x)
        self.emit(result, "linear", [source], rows, features, params=params, **extra)

    def on_chunk(self, args, kwargs, result):
        source = self.value(args[0])
        axis = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if source is None or source.image or source.scores or len(result) != 2 or axis not in (-1, args[0].dim() - 1) or \
                args[0].shape[-1] != source.features:
            self.follow("chunk", args, kwargs, result)
            return
        for half, tensor in enumerate(result):
            self.remember(tensor, Value(source.name, source.rows, source.features // 2, half=half))

    def on_linear(self, args, kwargs, result):
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        self.matrix_product(args[0], args[1], bias, result, transposed=False)

    def on_addmm(self, args, kwargs, result):
        self.matrix_product(args[1], args[2], args[0], result, transposed=True)

    def on_embedding(self, args, kwargs, result):
        ids, weight = args[0], args[1]
        owner = self.modules_by_name.get(self.stack[-1].rpartition(".")[0])
        if hasattr(owner, "relative_attention_max_distance") and self.value(ids) is None:
            self.emit(result, "position_bias", [], weight.shape[1], ids.numel(), params=[self.parameter(weight)],
                      causal=bool(owner.is_decoder), max_distance=owner.relative_attention_max_distance)
            return
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        more = {} if padding is None else {"padding_row": padding % weight.shape[0]}
        self.emit(result, "embedding", [self.index_input(ids)], ids.numel(), weight.shape[1],
                  params=[self.parameter(weight)], **more)

    def on_layer_norm(self, args, kwargs, result):
        source = self.value(args[0])
        params = [self.parameter(t) for t in self.tensors_of(args[1:], kwargs)]
        self.emit(result, "layer_norm", [source], source.rows, source.features, params=params)

    def on_rms_norm(self, args, kwargs, result):
        source = self.value(args[0])
        params = [self.parameter(t) for t in self.tensors_of(args[1:], kwargs)]
        self.emit(result, "rms_norm", [source], source.rows, source.features, params=params)

    def attention(self, q, k, v, result, causal, bias=None):
        values = [self.value(t) for t in (q, k, v)]
        if any(value is None for value in values):
            raise Unsupported(f"{self.stack[-1] or 'the root'}: attention of what is not followed")
        heads, dim, value_dim = q.shape[-3], q.shape[-1], v.shape[-1]
        extra = {"heads": heads, "head_dim": dim, "causal": bool(causal)}
        rows, features = q.shape[-2], heads * value_dim
        if values[0].name == values[1].name == values[2].name:
            kv_heads = (values[0].features // dim - heads) // 2  # of the packed tensor; k and v may be repeated
            self.emit(result, "attention", values[:1], rows, features, kv_heads=kv_heads, **extra)
            return
        extra["kv_heads"] = values[1].features // dim
        if value_dim != dim:
            extra["value_dim"] = value_dim
        if getattr(self.modules_by_name.get(self.stack[-1]), "scaling", None) == 1.0:
            extra["factor"] = 1
        self.emit(result, "attention", values + ([bias] if bias else []), rows, features, **extra)

    def on_scaled_dot_product_attention(self, args, kwargs, result):
        bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | kwargs
        mask = self.value(bound.get("attn_mask"))
        self.attention(bound["query"], bound["key"], bound["value"], result, bound.get("is_causal", False),
                       mask.name if mask else None)

    def on_matmul(self, args, kwargs, result):
        a, b = self.value(args[0]), self.value(args[1])
        if a is None or b is None:
            if self.parameter(args[0]) or self.parameter(args[1]):
                raise Unsupported(f"{self.stack[-1] or 'the root'}: a product with a parameter outside a linear layer")
            if a or b:
                self.remember(result, a or b)
        elif a.scores:
            q, k = a.scores
            owner = self.modules_by_name.get(self.stack[-1])
            self.attention(q, k, args[1], result, hasattr(owner, "relative_attention_max_distance") and owner.is_causal, a.bias)
        else:
            # q k^T: rows of scores, until the product with v.
            self.remember(result, Value(a.name, a.rows, a.features, scores=(args[0], args[1].transpose(-1, -2))))
            self.remember(self.values[id(result)].scores[1], b)

    def on_conv2d(self, args, kwargs, result):
        bound = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args)) | kwargs
        source = self.value(bound["input"])
        first = lambda v: v[0] if isinstance(v, (tuple, list)) else v  # noqa: E731
        params = [self.parameter(bound["weight"])] + ([self.parameter(bound["bias"])] if bound.get("bias") is not None else [])
        _, channels, height, width = result.shape
        self.emit(result, "conv2d", [source], height * width, channels, image=(channels, height, width), params=params,
                  stride=first(bound.get("stride", 1)), padding=first(bound.get("padding", 0)), groups=bound.get("groups", 1))

    def on_batch_norm(self, args, kwargs, result):
        source = self.value(args[0])
        params = [p for p in (self.parameter(t) for t in self.tensors_of(args[3:5], kwargs)) if p]
        extra = {}
        epsilon = kwargs.get("eps", args[7] if len(args) > 7 else 1e-5)
        if epsilon != 1e-5:
            extra["epsilon"] = epsilon
        if self.stack[-1] in self.synchronized:
            extra["synchronized"] = True
        self.emit(result, "batch_norm", [source], source.rows, source.features, source.image, params=params, **extra)

    def pool(self, op, args, kwargs, result, **extra):
        source = self.value(args[0])
        _, channels, height, width = result.shape
        self.emit(result, op, [source], height * width, channels, (channels, height, width), **extra)

    def on_boolean_dispatch(self, args, kwargs, result):
        kernel = kwargs.get("kernel_size", args[1] if len(args) > 1 else 1)
        stride = kwargs.get("stride", args[2] if len(args) > 2 else None) or kernel
        self.pool("max_pool", args, kwargs, result, kernel=kernel, stride=stride)

    on_max_pool2d = on_boolean_dispatch

    def on_adaptive_avg_pool2d(self, args, kwargs, result):
        self.pool("avg_pool", args, kwargs, result, **{"global": True})

    def on_flatten(self, args, kwargs, result):
        source = self.value(args[0])
        if source is None:
            return
        if source.image is None:
            self.remember(result, source)
            return
        tokens = result.dim() == 3  # (1, channels, pixels)
        self.emit(result, "tokens" if tokens else "flatten", [source], source.rows if tokens else 1,
                  source.features if tokens else source.elements())

    def on_dropout(self, args, kwargs, result):
        source = self.value(args[0])
        if source is None:
            return
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if source.scores or not p or not kwargs.get("training", args[2] if len(args) > 2 else True):
            self.remember(result, source)
        else:
            self.emit(result, "dropout", [source], source.rows, source.features, source.image, p=p)

    def on_log_softmax(self, args, kwargs, result):
        source = self.value(args[0])
        self.emit(result, "log_softmax", [source], source.rows, source.features)

    def loss(self, op, args, result):
        labels = args[1]
        name = self.index_input(labels)
        self.emit(result, op, [self.value(args[0]), name], 1, 1)

    def on_cross_entropy(self, args, kwargs, result):
        self.loss("cross_entropy", args, result)

    def on_nll_loss(self, args, kwargs, result):
        self.loss("nll_loss", args, result)


def module_tree(model):
    """The children of the root as model.json lists them; a storage belongs to the first name it has."""
    owner = {}

    def parameters(module, prefix):
        rows = []
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{prefix}{name}"
            if id(param) in owner:
                rows.append({"name": name, "tied_to": owner[id(param)]})
                continue
            owner[id(param)] = full
            row = {"name": name, "shape": list(param.shape)}
            if not param.requires_grad:
                row["frozen"] = True
            rows.append(row)
        return rows

    def entry(name, module, prefix):
        row = {"name": name, "class": type(module).__name__}
        path = f"{prefix}{name}."
        params = parameters(module, path)
        children = [entry(child, m, path) for child, m in module.named_children()]
        elements = sum(b.numel() for b in module.buffers(recurse=False) if b.is_floating_point())
        if params:
            row["params"] = params
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                row["full_precision"] = True
        if children:
            row["modules"] = children
        if elements:
            row["buffers"] = elements
        return row

    if list(model.named_parameters(recurse=False)):
        raise Unsupported("parameters of the root module itself: wrap it into another module")
    return [entry(name, module, "") for name, module in model.named_children()]


def block_class(model):
    """The class of the longest list of equal modules."""
    lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) > 0 and
             len({type(child) for child in m}) == 1]
    longest = max(lists, key=len, default=None)
    return type(longest[0]).__name__ if longest is not None else ""


def export(model, inputs, sequence_length=0, call=None):
    """model.json as a dictionary. `inputs` are the keyword arguments of one sample; the batch comes first."""
    recorder = Recorder(model, inputs)
    run = call or (lambda: model(**inputs))
    try:
        with recorder:
            run()
    finally:
        for handle in recorder.handles:
            handle.remove()
        for module in recorder.stubs:
            del module.forward
    used = {name for op in recorder.ops for name in op["inputs"]}
    document = {"format": "shardwright-model", "version": 1, "_source": "tools/export_model.py, torch " + torch.__version__,
                "class": type(model).__name__}
    if block_class(model):
        document["block_class"] = block_class(model)
    if sequence_length:
        document["sequence_length"] = sequence_length
    document["inputs"] = {name: spec for name, spec in recorder.inputs.items() if name in used}
    document["modules"] = module_tree(model)
    document["ops"] = recorder.ops
    return document


def build(arguments):
    if arguments.config:
        import transformers
        config = transformers.AutoConfig.from_pretrained(arguments.config)
        config.use_cache = False
        kind = transformers.AutoModelForImageClassification if arguments.image else \
            transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        try:
            model = kind.from_config(config, attn_implementation="sdpa")
        except ValueError:  # capped scores, ALiBi
            model = kind.from_config(config, attn_implementation="eager")
    else:
        module, _, function = arguments.builder.partition(":")
        sys.path.insert(0, os.getcwd())
        model = getattr(importlib.import_module(module), function)()
    if arguments.image:
        return model, {"pixel_values": torch.zeros(1, 3, arguments.image, arguments.image),
                       "labels": torch.zeros(1, dtype=torch.long)}
    ids = torch.zeros(1, arguments.seq, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids.clone()
    return model, inputs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builder", nargs="?", help="package.module:function that returns the module")
    parser.add_argument("--config", help="config.json of Transformers, or a folder with one")
    parser.add_argument("--seq", type=int, default=0, help="tokens per sample")
    parser.add_argument("--image", type=int, default=0, help="height and width of images in pixels")
    parser.add_argument("-o", "--output", default="model.json")
    arguments = parser.parse_args()
    if bool(arguments.builder) == bool(arguments.config) or not (arguments.seq or arguments.image):
        parser.error("give a builder or --config, and --seq or --image")
    try:
        # Some vision models' initialisation looks at values, which only meta tensors let pass.
        with torch.device("meta") if arguments.image else FakeTensorMode():
            model, inputs = build(arguments)
            text = json.dumps(export(model.train(), inputs, arguments.seq), indent=1) + "\n"
    except Unsupported as error:
        print(f"error: {error}: no op of model.json does this", file=sys.stderr)
        return 3
    output = pathlib.Path(arguments.output)
    with tempfile.NamedTemporaryFile("w", dir=output.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
