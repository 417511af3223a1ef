"""Ops that model.json has a name for. What does not fit a name exactly is left to op "other", never bent."""

import math

from . import rules
from .rules import Unsupported
from .sizes import product

# Views that keep the order of elements.
IN_ORDER = rules.words("view _unsafe_view reshape _reshape_alias unsqueeze squeeze alias detach flatten lift_fresh")


class Pattern:
    """Several calls that are one op; it is written at the last one."""

    def __init__(self, calls, last, write):
        self.calls, self.last, self.write = calls, last, write


def find_patterns(g):
    found = {}
    g.makers = {}
    for call in g.forward_calls():
        if call.name not in rules.VIEWS and call.name not in rules.FREE:
            for ref in call.outputs:
                g.makers.setdefault(ref.storage.index, []).append(call)
    for call in g.forward_calls():
        for find in (cross_entropy, rms_norm, gated_gelu):
            pattern = find(g, call)
            if pattern is not None and not any(c.index in found for c in pattern.calls):
                found.update({c.index: pattern for c in pattern.calls})
    return found


def maker(g, ref):
    """The only call that wrote the tensor's storage."""
    made = g.makers.get(getattr(ref, "storage", None) and ref.storage.index, [])
    return made[0] if len(made) == 1 else None


def readers(g, ref):
    """Calls that read the storage, views left out."""
    return [c for c in g.consumers.get(ref.storage.index, []) if c.name not in rules.VIEWS]


def only_read_by(g, ref, calls):
    inside = {c.index for c in calls}
    return all(c.index in inside for c in readers(g, ref)) and not any(r.storage is ref.storage for r in g.t.base.outputs)


def is_ref(x):
    return hasattr(x, "storage")


def is_weight(ref, rank=None):
    return is_ref(ref) and ref.storage.kind == "parameter" and ref.whole and (rank is None or len(ref.shape) == rank)


# Where an operand lies.

def rows(g, ref, dims):
    """The name of the value with these sizes of a sample, or None where its elements lie in another order or are not all there."""
    if not is_ref(ref) or ref.dtype != g.dtype or g.kind(ref) != "value":
        return None
    part = g.of_ref.get(ref.index)
    if part is None and ref.index in g.lazy:
        g.value(ref)
        part = g.of_ref.get(ref.index)
    elements = product(dims, g.t.count)
    if part is not None and part[1] == g.version.get(ref.storage.index, 0):
        value, in_order = part[0], part[2]
        return renamed(g, value, dims) if in_order and product(value.dims, g.t.count) == elements else None
    value = g.value(ref)
    if product(value.dims, g.t.count) != elements or not ref.whole:
        return None
    if ref.contiguous:
        return renamed(g, value, dims)
    if getattr(value, "is_convolution", False) and len(ref.shape) == 3 and ref.stride[1:] == (1, ref.shape[1]) and len(dims) == 2:
        value.is_convolution = False
        name = f"t{len(g.ops)}"
        g.append({"op": "tokens", "inputs": [value.name], "output": name})
        value.name, value.dims, value.views = name, list(dims), {}
        return name
    return None


def renamed(g, value, dims):
    dims = list(dims)
    if value.dims == dims:
        return value.name
    key = tuple(tuple(d) for d in dims)
    if key not in value.views:
        value.views[key] = f"t{len(g.ops)}"
        g.append({"op": "view", "inputs": [value.name], "output": value.views[key], "shape": [g.size(d) for d in dims]})
    return value.views[key]


def elements_of(g, ref):
    return product(g.t.shape(ref), g.t.count)


def matrix(g, ref, features=None):
    """[rows per sample, features] of a tensor whose last dimension is the features'."""
    shape = g.t.shape(ref)
    total = elements_of(g, ref)
    per = total.over(g.t.points.batch) if g.t.is_per_sample(total) else None
    if per is None:
        return None
    last = features if features is not None else shape[-1]
    count = per.over(last)
    return None if count is None else [count, last]


def emit(g, call, op, inputs, output, dims, params=(), module=None, **keys):
    from .graph import Value
    value = Value(f"t{len(g.ops)}", dims)
    if call.is_stopped and (any(name in g.learning for name in inputs) or any(name in g.trainable for name in params)):
        keys["stops_gradient"] = True
    g.append({"op": op, "module": call.module if module is None else module, "name": f"{op}_{len(g.ops)}", "inputs": list(inputs),
              "output": value.name, "params": list(params), **keys})
    g.remember(output, value)
    for name in params:
        g.used_parameters.add(name)
    return value


def parameter(g, ref, call):
    name = g.parameter(ref, call.module)
    g.late_weights.pop(ref.storage.index, None)
    return name


# One call, one op.

def write(g, call):
    writer = WRITERS.get(call.name)
    return bool(writer and writer(g, call))


def linear(g, call):
    bias, a, b = call.args[:3] if call.name == "addmm" else (None, *call.args[:2])
    if call.kwargs or not is_weight(b, 2) or bias is not None and not is_weight(bias, 1):
        return False
    own = g.module_shape(b.storage.name)
    if own == b.shape[::-1] and b.stride == (1, b.shape[0]) and (own != b.shape or not b.contiguous):
        transposed = False  # t() of the weight
    elif own == b.shape and b.contiguous:
        transposed = True
    else:
        return False
    dims = matrix(g, a)
    x = dims and rows(g, a, dims)
    if x is None:
        return False
    out = g.t.shape(call.outputs[0])[-1]
    params = [parameter(g, b, call)] + ([parameter(g, bias, call)] if bias is not None else [])
    emit(g, call, "linear", [x], call.outputs[0], [dims[0], out], params, **({"transposed": True} if transposed else {}))
    return True


def embedding(g, call):
    table, ids = call.args[:2]
    if not is_weight(table, 2) or g.kind(ids) != "constant" or call.outputs[0].dtype != g.dtype:
        return False
    padding = call.args[2] if len(call.args) > 2 else -1
    name = g.index_name(ids)
    value = emit(g, call, "embedding", [name.name], call.outputs[0], [name.dims[0], g.t.shape(table)[1]], [parameter(g, table, call)],
                 **({"padding_row": padding} if padding >= 0 else {}))
    value.shared = name.shared
    return True


def layer_norm(g, call):
    x, shape, weight, bias, epsilon = call.args[:5]
    if len(shape) != 1 or not is_weight(weight, 1) or bias is not None and not is_weight(bias, 1):
        return False
    dims = matrix(g, x)
    name = dims and rows(g, x, dims)
    if name is None:
        return False
    params = [parameter(g, w, call) for w in (weight, bias) if w is not None]
    emit(g, call, "layer_norm", [name], call.outputs[0], dims, params, epsilon=epsilon)
    return True


def fused_rms_norm(g, call):
    x, shape, weight, epsilon = call.args[:4]
    if len(shape) != 1 or not is_weight(weight, 1):
        return False
    dims = matrix(g, x)
    name = dims and rows(g, x, dims)
    if name is None:
        return False
    emit(g, call, "rms_norm", [name], call.outputs[0], dims, [parameter(g, weight, call)], **({"epsilon": epsilon} if epsilon else {}))
    return True


def same_place(g, *refs):
    """All whole, of the compute dtype, of one shape and in one order of elements."""
    first = refs[0]
    return all(is_ref(r) and r.whole and r.dtype == g.dtype and r.shape == first.shape and r.stride == first.stride and 0 not in r.stride
               for r in refs)


def common(g, refs):
    """Names of the operands with sizes of one form, and these sizes."""
    values = [g.value(r) for r in refs if g.kind(r) == "value"]
    if len(values) != len(refs):
        return None
    if any(r.index in g.of_ref or r.index in g.lazy for r in refs):
        dims = g.per_sample(g.t.shape(refs[0]))[0]
        dims = dims if len(dims) > 1 else [g.t.one, *dims]
        names = [rows(g, r, dims) for r in refs]
        return (names, dims) if None not in names else None
    dims = values[0].dims if len(values[0].dims) > 1 else [g.t.one, *values[0].dims]
    if any(product(v.dims, g.t.count) != product(dims, g.t.count) or v.shared != values[0].shared for v in values) or values[0].shared:
        return None
    return [renamed(g, v, dims) for v in values], dims


def activation(g, call):
    x = call.args[0]
    if not same_place(g, x, call.outputs[0]):
        return False
    found = common(g, [x])
    if found is None:
        return False
    function = rules.ACTIVATIONS.get(call.name) or ("gelu_tanh" if call.kwargs.get("approximate") == "tanh" else "gelu")
    emit(g, call, "activation", found[0], call.outputs[0], found[1], function=function)
    return True


def plain_alpha(call):
    return call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else 1) == 1


def add(g, call):
    a, b = call.args[:2]
    out = call.outputs[0]
    if not plain_alpha(call) or not is_ref(a) or not is_ref(b):
        return False
    for x, w in ((a, b), (b, a)):
        if is_weight(w) and w.contiguous and w.dtype == g.dtype and is_ref(x) and g.kind(x) == "value":
            dims = matrix(g, x)
            if dims and elements_of(g, w) == product(dims, g.t.count) and same_place(g, x, out):
                name = rows(g, x, dims)
                if name is not None:
                    emit(g, call, "add", [name], out, dims, [parameter(g, w, call)])
                    return True
            return False
    if same_place(g, a, b, out) and a.storage is not b.storage:
        found = common(g, [a, b])
        if found is not None:
            emit(g, call, "add", found[0], out, found[1])
            return True
    # A table that the samples share.
    for x, y in ((a, b), (b, a)):
        if g.kind(x) == "value" and g.kind(y) == "value" and same_place(g, x, out) and y.whole and y.contiguous and \
                y.dtype == g.dtype and g.value(y).shared and not g.value(x).shared:
            dims = matrix(g, x)
            if dims and elements_of(g, y) == product(dims, g.t.count):
                names = [rows(g, x, dims), rows(g, y, dims)]
                if None not in names:
                    emit(g, call, "add", names, out, dims)
                    return True
    return False


def mul(g, call):
    a, b = call.args[:2]
    out = call.outputs[0]
    if not is_ref(b):
        return scale(g, call, b)
    if same_place(g, a, b, out) and a.storage is not b.storage:
        found = common(g, [a, b])
        if found is not None:
            emit(g, call, "mul", found[0], out, found[1])
            return True
    for x, y in ((a, b), (b, a)):
        if is_ref(x) and len(x.shape) == 4 and y.shape == (*x.shape[:2], 1, 1) and same_place(g, x, out) and x.contiguous and \
                y.dtype == g.dtype and g.kind(x) == g.kind(y) == "value":
            dims = g.t.shape(x)[1:]
            names = [rows(g, x, dims), rows(g, y, [dims[0], g.t.one, g.t.one])]
            if None not in names:
                emit(g, call, "mul", names, out, dims)
                return True
    return False


def scale(g, call, factor):
    out = call.outputs[0]
    if not isinstance(factor, (int, float)) or not 0 < factor < 1e18 or not same_place(g, call.args[0], out):
        return False
    found = common(g, [call.args[0]])
    if found is None:
        return False
    emit(g, call, "scale", found[0], out, found[1], factor=float(factor))
    return True


def div(g, call):
    factor = call.args[1]
    return len(call.args) == 2 and not call.kwargs and isinstance(factor, (int, float)) and factor > 0 and scale(g, call, 1.0 / factor)


def dropout(g, call):
    x, p = call.args[:2]
    if not same_place(g, x, call.outputs[0]):
        return False
    found = common(g, [x])
    if found is None:
        return False
    emit(g, call, "dropout", found[0], call.outputs[0], found[1], p=p)
    return True


def write_idle(g, call):
    """Of a module that runs nothing and returns what it is given: an op without a cost, whose result nobody reads."""
    value = g.value(call.inputs[0])
    g.append({"op": "dropout", "module": call.module, "inputs": [value.name], "output": f"t{len(g.ops)}", "p": 0.0})


def one(values):
    """The number that all are, or None."""
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    return values[0] if values and all(v == values[0] for v in values) else None


def image(g, ref):
    return g.t.shape(ref)[1:] if is_ref(ref) and len(ref.shape) == 4 and ref.contiguous else None


def convolution(g, call):
    x, w, bias, stride, padding, dilation, transposed, _, groups = call.args[:9]
    dims = image(g, x)
    if dims is None or not is_weight(w, 4) or w.shape[2] != w.shape[3] or transposed or bias is not None and not is_weight(bias, 1) or \
            one(stride) is None or one(padding) is None or one(dilation) != 1 or not call.outputs[0].contiguous:
        return False
    name = rows(g, x, dims)
    if name is None:
        return False
    params = [parameter(g, p, call) for p in (w, bias) if p is not None]
    value = emit(g, call, "conv2d", [name], call.outputs[0], g.t.shape(call.outputs[0])[1:], params, stride=one(stride), padding=one(padding),
                 groups=groups)
    value.is_convolution = True
    return True


def batch_norm(g, call):
    x, weight, bias = call.args[:3]
    dims = image(g, x)
    if dims is None or not is_weight(weight, 1) or not is_weight(bias, 1) or call.args[5] is not True:
        return False
    name = rows(g, x, dims)
    if name is None:
        return False
    synchronized = type(g.modules.get(call.module)).__name__ == "SyncBatchNorm"
    emit(g, call, "batch_norm", [name], call.outputs[0], dims, [parameter(g, weight, call), parameter(g, bias, call)],
         **({"epsilon": call.args[7]} if call.args[7] != 1e-5 else {}), **({"synchronized": True} if synchronized else {}))
    return True


def pool(g, call, op, sizes, **keys):
    dims = image(g, call.args[0])
    name = dims and rows(g, call.args[0], dims)
    if name is None:
        return False
    emit(g, call, op, [name], call.outputs[0], sizes, **keys)
    return True


def max_pool(g, call):
    x, kernel, stride, padding, dilation, ceil = (*call.args, *[None] * 6)[:6]
    stride = stride or kernel
    if one(kernel) is None or one(stride) is None or one(padding or 0) is None or one(dilation or 1) != 1 or ceil or \
            any(c.index > call.index for c in g.consumers.get(call.outputs[1].storage.index, [])):
        return False
    return pool(g, call, "max_pool", g.t.shape(call.outputs[0])[1:], kernel=one(kernel), stride=one(stride), padding=one(padding or 0))


def avg_pool(g, call):
    x, kernel, stride, padding, ceil, _, divisor = (*call.args, *[None] * 7)[:7]
    stride = stride or kernel
    if one(kernel) is None or one(stride) is None or one(padding or 0) != 0 or ceil or divisor:
        return False
    return pool(g, call, "avg_pool", g.t.shape(call.outputs[0])[1:], kernel=one(kernel), stride=one(stride))


def mean(g, call):
    x, axes = call.args[0], call.args[1] if len(call.args) > 1 else None
    if not is_ref(x) or len(x.shape) != 4 or axes is None or sorted(a % 4 for a in axes) != [2, 3] or call.kwargs or x.shape[2] != x.shape[3]:
        return False
    return pool(g, call, "avg_pool", [g.t.shape(x)[1], g.t.one, g.t.one], **{"global": True})


def concat(g, call):
    parts = call.args[0]
    axis = call.args[1] if len(call.args) > 1 else 0
    out = call.outputs[0]
    if len(out.shape) != 3 or axis != 1 or len(parts) > 32 or not out.contiguous or out.dtype != g.dtype:
        return False
    if any(not is_ref(p) or len(p.shape) != 3 for p in parts):
        return False
    features = g.t.shape(out)[2]
    tokens = [p for p in parts if g.kind(p) == "parameter"]
    if tokens != parts[:len(tokens)] or any(p.read * p.shape[0] != math.prod(p.shape) for p in tokens) or len(tokens) == len(parts):
        return False
    names = [rows(g, p, g.t.shape(p)[1:]) for p in parts[len(tokens):]]
    if None in names:
        return False
    emit(g, call, "concat", names, out, [g.t.shape(out)[1], features], [parameter(g, p, call) for p in tokens])
    return True


def write_select(g, call, base):
    """The first rows: a class token's."""
    source, out = call.inputs[0], call.outputs[0]
    is_first = call.name == "select" and call.args[1:] == (1, 0) or \
        call.name == "slice" and len(call.args) == 4 and call.args[1] == 1 and call.args[2] == 0
    if not is_first or len(source.shape) != 3 or not source.contiguous or not source.whole or source.index in g.of_ref:
        return False
    from .graph import Value
    dims = g.t.shape(source)[1:]
    name = rows(g, source, dims)
    count = g.t.one if call.name == "select" else g.t.shape(out)[1]
    if name is None:
        return False
    value = Value(f"t{len(g.ops)}", [count, dims[1]])
    g.append({"op": "select", "module": call.module, "inputs": [name], "output": value.name, "rows": g.size(count)})
    g.of_ref[out.index] = (value, g.version.get(out.storage.index, 0), True)
    g.lazy.pop(out.index, None)
    return True


def log_softmax(g, call):
    x, axis = call.args[0], call.args[1]
    if axis % len(x.shape) != len(x.shape) - 1 or call.args[2] or not same_place(g, x, call.outputs[0]):
        return False
    dims = matrix(g, x)
    name = dims and rows(g, x, dims)
    if name is None:
        return False
    emit(g, call, "log_softmax", [name], call.outputs[0], dims)
    return True


def loss(g, call, op, x, target):
    dims = matrix(g, x)
    if len(x.shape) != 2 or call.args[2] is not None or call.args[3] != 1 or g.kind(target) != "constant":
        return False
    labels = g.index_name(target)
    name = rows(g, x, dims) if labels.dims == [dims[0]] else None
    if name is None:
        return False
    emit(g, call, op, [name, labels.name], call.outputs[0], [g.t.one, g.t.one])
    return True


def nll_loss(g, call):
    return loss(g, call, "nll_loss", *call.args[:2])


def attention(g, call):
    q, k, v, mask, causal, p, factor = call.args[:7]
    b, heads, tokens, size = g.t.shape(q)
    if mask is not None or b != g.t.points.batch:  # a mask of the module's own; several windows in a sample
        return False
    kv_heads, value_size = g.t.shape(k)[1], g.t.shape(v)[3]
    if not all(x.constant() for x in (heads, kv_heads, size, value_size)):
        return False
    keys = {"heads": heads[0], "kv_heads": kv_heads[0], "head_dim": size[0], "causal": bool(causal)}
    if value_size != size:
        keys["value_dim"] = value_size[0]
    if p:
        keys["p"] = p
    if factor and not math.isclose(factor, size[0] ** -0.5, rel_tol=1e-6):
        keys["factor"] = factor
    if kv_heads != heads:
        keys["native_groups"] = True
    packed = packed_operands(q, k, v)
    if packed is not None and g.kind(q) == "value" and q.storage.index in g.of_storage and q.dtype == g.dtype:
        width = (heads + kv_heads * 2) * size
        names = [renamed(g, g.of_storage[q.storage.index], [tokens, width])]
        keys |= {"packed_by_head": True} if packed == "head" else {}
    else:
        names = [tokens_first(g, r, call) for r in (q, k, v)]
    out = call.outputs[0]
    value = emit(g, call, "attention", names, out, [tokens, heads * value_size], **keys)
    if out.stride != heads_last(out.shape):
        permuted(g, value, out, call)
    return True


def heads_last(shape):
    """Strides of (batch, heads, tokens, size) that lie as (batch, tokens, heads, size)."""
    _, heads, tokens, size = shape
    return (tokens * heads * size, size, heads * size, 1)


def packed_operands(q, k, v):
    """"part" or "head" where queries, keys and values lie side by side in one tensor: [q, k, v][head] or [head][q, k, v]."""
    if not (q.storage is k.storage is v.storage) or q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3] or q.offset != 0:
        return None
    heads, kv, size, tokens = q.shape[1], k.shape[1], q.shape[3], q.shape[2]
    width = (heads + 2 * kv) * size
    if q.storage.nbytes != q.shape[0] * tokens * width * rules.ITEM.get(q.dtype, 4):
        return None
    for by_head, stride, offsets in ((False, size, (0, heads * size, (heads + kv) * size)), (True, 3 * size, (0, size, 2 * size))):
        if (not by_head or heads == kv) and all(r.stride == (tokens * width, stride, width, 1) and r.offset == o
                                                for r, o in zip((q, k, v), offsets)):
            return "head" if by_head else "part"
    return None


def tokens_first(g, ref, call):
    """The operand as (tokens, heads * size)."""
    _, heads, tokens, size = g.t.shape(ref)
    dims = [tokens, heads * size]
    value = g.value(ref)
    part = g.of_ref.get(ref.index)
    whole = part is None and ref.whole and ref.stride == heads_last(ref.shape)
    if whole and product(value.dims, g.t.count) == product(dims, g.t.count) and ref.dtype == g.dtype:
        return renamed(g, value, dims)
    from .graph import Value
    other = Value(f"t{len(g.ops)}", dims)
    g.append({"op": "other", "module": call.module, "function": "permute", "inputs": [value.name], "outputs": [other.name],
              "results": [g.result(ref, other, 0)]})
    return other.name


def permuted(g, value, ref, call):
    from .graph import Value
    other = Value(f"t{len(g.ops)}", g.t.shape(ref)[1:])
    g.append({"op": "other", "module": call.module, "function": "permute", "inputs": [value.name], "outputs": [other.name],
              "results": [g.result(ref, other, 0)]})
    g.remember(ref, other)


def router(g, call):
    x, weight = call.args[:2]
    module = g.modules[call.module]
    dims = matrix(g, x)
    name = dims and rows(g, x, dims)
    if name is None or not is_weight(weight, 2):
        raise Unsupported("a router of something that is not followed")
    factor = getattr(module, "routed_scaling_factor", 1)
    keys = {"factor": factor} if factor != 1 else {}
    if not getattr(module, "norm_topk_prob", True):
        keys["unnormalized"] = True
    emit(g, call, "router", [name], call.outputs[0], [dims[0], g.t.shape(weight)[0]], [parameter(g, weight, call)],
         experts_per_token=module.chosen_per_token, **keys)
    return True


FUNCTIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "ReLU": "relu",
             "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_new", "AccurateGELUActivation": "gelu_new",
             "FastGELUActivation": "gelu_fast"}


def experts(g, call):
    x, routing, up, down = call.args[:4]
    module = g.modules[call.module]
    function = FUNCTIONS.get(type(getattr(module, "act_fn", None)).__name__)
    dims = matrix(g, x)
    name = dims and rows(g, x, dims)
    if name is None or function is None or g.kind(routing) != "value" or not is_weight(up, 3) or not is_weight(down, 3):
        raise Unsupported("experts whose rows, router or activation are not known")
    scores = g.of_storage[routing.storage.index]
    gated = math.prod(up.shape) == 2 * math.prod(down.shape)
    if not gated and math.prod(up.shape) != math.prod(down.shape):
        raise Unsupported(f"weights {list(up.shape)} and {list(down.shape)}")
    emit(g, call, "experts", [name, scores.name], call.outputs[0], dims, [parameter(g, up, call), parameter(g, down, call)],
         function=function, gated=gated, experts_per_token=module.chosen_per_token)
    return True


WRITERS = {"addmm": linear, "mm": linear, "embedding": embedding, "native_layer_norm": layer_norm, "_fused_rms_norm": fused_rms_norm,
           "gelu": activation, **dict.fromkeys(rules.ACTIVATIONS, activation), "add": add, "mul": mul, "div": div, "native_dropout": dropout,
           "convolution": convolution, "native_batch_norm": batch_norm, "cudnn_batch_norm": None, "max_pool2d_with_indices": max_pool,
           "avg_pool2d": avg_pool, "mean": mean, "cat": concat, "_log_softmax": log_softmax, "nll_loss_forward": nll_loss,
           "attention": attention, "router": router, "experts": experts}


# Several calls, one op.

def cross_entropy(g, call):
    if call.name != "nll_loss_forward":
        return None
    softmax = maker(g, call.args[0])
    if softmax is None or softmax.name != "_log_softmax" or call.args[2] is not None or call.args[3] != 1 or \
            not only_read_by(g, softmax.outputs[0], [call]):
        return None
    logits = softmax.args[0]
    cast = maker(g, logits)
    calls = [softmax, call]
    if cast is not None and cast.name == "_to_copy" and cast.args[0].dtype == g.dtype and only_read_by(g, cast.outputs[0], calls):
        calls.append(cast)
    elif logits.dtype != g.dtype or g.dtype != FP32:
        return None

    def write_loss(g):
        source = calls[2].args[0] if len(calls) == 3 else logits
        classes = g.t.shape(logits)[1]
        dims = matrix(g, source, classes)
        labels = g.index_name(call.args[1])
        name = rows(g, source, dims) if dims and labels.dims == [dims[0]] else None
        if name is None:
            for part in sorted(calls, key=lambda c: c.index):
                g.write_call(part)
        else:
            emit(g, call, "cross_entropy", [name, labels.name], call.outputs[0], [g.t.one, g.t.one])

    return Pattern(calls, call.index, write_loss)


def gated_gelu(g, call):
    """gelu(gate) * up, with tanh, in one op, as a config.json has it."""
    if call.name != "gelu" or call.kwargs.get("approximate") != "tanh":
        return None
    gate, out = call.args[0], call.outputs[0]
    users = readers(g, out)
    if len(users) != 1 or users[0].name != "mul" or users[0].in_place or not is_ref(users[0].args[1]) or \
            users[0].args[0].storage is not out.storage or not only_read_by(g, out, users):
        return None
    last = users[0]

    def write_gated(g):
        places = same_place(g, gate, out) and same_place(g, last.args[1], last.outputs[0]) and same_place(g, gate, last.outputs[0])
        found = common(g, [gate, last.args[1]]) if places else None
        if found is None:
            for part in (call, last):
                g.write_call(part)
        else:
            emit(g, last, "gated_activation", found[0], last.outputs[0], found[1], function="gelu_tanh")

    return Pattern([call, last], last.index, write_gated)


def plus_one(g, tensor):
    """Gemma's 1 + weight, of the weight in fp32: the weight and the calls that make it of that."""
    added = maker(g, tensor)
    if added is None or added.name != "add" or len(added.args) != 2 or 1.0 not in added.args[1:] or not is_ref(added.args[0]):
        return None, []
    weight, calls = added.args[0], [added]
    wide = maker(g, weight)
    if wide is not None and wide.name == "_to_copy":
        weight, calls = wide.args[0], [added, wide]
    return (weight, calls) if is_weight(weight, 1) else (None, [])


def rms_norm(g, call):
    """weight * (x / sqrt(mean(x * x) + epsilon)), written out, or Gemma's with 1 + weight."""
    if call.name != "rsqrt":
        return None
    added = maker(g, call.args[0])
    mean_call = maker(g, added.args[0]) if added is not None and added.name == "add" and len(added.args) == 2 and not is_ref(added.args[1]) else None
    if mean_call is None or mean_call.name != "mean" or list(mean_call.args[1]) != [-1] or len(mean_call.args) < 3 or not mean_call.args[2]:
        return None
    squared = maker(g, mean_call.args[0])
    if squared is None or squared.name != "pow" or squared.args[1] != 2:
        return None
    x = squared.args[0]
    users = readers(g, call.outputs[0])
    if len(users) != 1 or users[0].name != "mul" or x not in users[0].args or not is_ref(users[0].args[1]):
        return None
    calls = [squared, mean_call, added, call, users[0]]
    wide = maker(g, x)
    if wide is not None and wide.name == "_to_copy" and wide.args[0].dtype == g.dtype and only_read_by(g, x, calls):
        calls.append(wide)
        x = wide.args[0]
    last = users[0]
    users = readers(g, last.outputs[0])
    if len(users) == 1 and users[0].name == "_to_copy" and users[0].outputs[0].dtype == g.dtype:
        last = users[0]
        calls.append(last)
        users = readers(g, last.outputs[0])
    if len(users) != 1 or users[0].name != "mul":
        return None
    weight = next((r for r in users[0].args if is_weight(r, 1)), None)
    offset = {}
    if weight is None and is_ref(users[0].args[1]):
        weight, made = plus_one(g, users[0].args[1])
        calls += made
        offset = {"weight_offset": 1.0}
    last = users[0]
    calls.append(last)
    if offset and last.outputs[0].dtype != g.dtype:  # the product is cast, not what is normed
        users = readers(g, last.outputs[0])
        if len(users) != 1 or users[0].name != "_to_copy":
            return None
        last = users[0]
        calls.append(last)
    if weight is None or weight.shape[0] != x.shape[-1] or x.dtype != g.dtype or last.outputs[0].dtype != g.dtype:
        return None
    inside = [c for c in calls if c is not last]
    if any(not only_read_by(g, c.outputs[0], calls) for c in inside):
        return None

    def write_norm(g):
        dims = matrix(g, x)
        name = dims and rows(g, x, dims) if last.outputs[0].contiguous else None
        if name is None:
            for part in sorted(calls, key=lambda c: c.index):
                g.write_call(part)
        else:
            emit(g, last, "rms_norm", [name], last.outputs[0], dims, [parameter(g, weight, last)], epsilon=added.args[1],
                 **offset)

    return Pattern(calls, last.index, write_norm)


import torch  # noqa: E402

FP32 = torch.float32
