"""What exists per pair of samples: the scores that a contrastive loss makes of every text with every image.

A tensor of model.json has a size per sample, or one in all. So all that makes or reads such tensors is one op "other", whose costs may
be sums with "batch * batch", and none of them goes in or out of it.
"""

from . import rules
from .named import Pattern
from .rules import Unsupported


def find(g):
    """The calls of each group of tensors that hang together: index of the call -> its pattern."""
    if g.t.points.batch.constant():
        return {}
    groups = []  # (storages, calls)
    for call in g.forward_calls():
        touched = {ref.storage.index for ref in [*call.inputs, *call.outputs] if is_of_pairs(g, ref)}
        if not touched:
            continue
        beside = [group for group in groups if group[0] & touched]
        groups = [group for group in groups if group not in beside]
        groups.append((touched.union(*(storages for storages, _ in beside)), [c for _, calls in beside for c in calls] + [call]))
    return {call.index: pattern for _, calls in groups for pattern in [pattern_of(g, calls)] for call in calls}


def is_of_pairs(g, ref):
    total = g.storage_elements(ref.storage) if ref.storage.kind == "made" else g.t.one
    return total is not None and not g.t.is_per_sample(total) and not g.no_batch(total) and is_square(g, total)


def is_square(g, total):
    """Batch times batch times what may depend on the length."""
    once = total.over(g.t.points.batch)
    return once is not None and g.t.is_per_sample(once)


def pattern_of(g, calls):
    calls = sorted(calls, key=lambda call: call.index)
    return Pattern(calls, calls[-1].index, lambda g: write(g, calls))


def write(g, calls):
    """One op of all the calls, in the place of the last one."""
    inside = {call.index for call in calls}
    made = {ref.storage.index for call in calls for ref in call.outputs}
    check_order(g, calls, inside, made)
    inputs, params = operands(g, calls, made)
    saved, saves_inputs = kept(g, calls, inputs, made)
    values, results = read_later(g, calls, inside)
    data, weight = [], []
    for call in reversed(calls):
        of_inputs, of_weights = g.backward_kernels(call, bool(params), bool(inputs))
        data, weight = data + of_inputs, weight + of_weights
    workspace = g.backward_workspace(calls)
    g.append({"op": "other", "module": calls[-1].module, "function": "pairs_of_samples", "inputs": [value.name for value, _ in inputs],
              "params": params, "outputs": [value.name for _, value in values], "results": results,
              "forward": [k for call in calls for k in g.kernels(call)], "backward_data": data + sums(g, calls), "backward_weight": weight,
              "saves_inputs": saves_inputs, "saved": saved, **({"backward_workspace": workspace} if workspace else {})})
    for ref, value in values:
        g.remember(ref, value)


def check_order(g, calls, inside, made):
    """Nothing between the first and the last call may need what the op gives."""
    for call in g.forward_calls()[calls[0].index:calls[-1].index]:
        if call.index not in inside and call.name not in rules.VIEWS and any(ref.storage.index in made for ref in call.inputs):
            raise Unsupported(f"{call.name} between ops on pairs of samples")
    for call in calls:
        if call.in_place and call.inputs[0].storage.index not in made:
            raise Unsupported(f"{call.name}_ of a tensor that is not of pairs of samples")


def operands(g, calls, made):
    """Values and names of parameters that come from outside."""
    inputs, params = [], []
    for ref in (ref for call in calls for ref in call.inputs):
        kind = g.kind(ref)
        if ref.storage.index in made or kind == "constant" and not any(g.is_kept(call, ref) for call in calls):
            continue
        if kind == "parameter":
            name = g.parameter(ref, calls[-1].module)
            params += [name] if name not in params else []
            continue
        value = g.value(ref)
        if value.name not in [v.name for v, _ in inputs]:
            inputs.append((value, ref))
    return inputs, params


def kept(g, calls, inputs, made):
    """What the calls keep of their own, and which of the inputs."""
    saved, saves_inputs, done = [], [], set()
    for ref in (ref for call in calls for ref in call.saved):
        storage = ref.storage
        if storage.index in done or storage.kind in ("parameter", "buffer"):
            continue
        done.add(storage.index)
        place = next((i for i, (_, r) in enumerate(inputs) if r.storage is storage), None)
        if place is not None and storage.index not in made:
            saves_inputs.append(place)
        elif storage.dtype == g.dtype:
            saved.append({"elements": g.amount(g.t.bytes(storage).over(rules.ITEM[g.dtype]))})
        else:
            saved.append({"bytes": g.amount(g.t.bytes(storage))})
    return saved, sorted(saves_inputs)


def read_later(g, calls, inside):
    """(tensor, value) and results of what leaves the op. Scores of pairs that the module returns are nobody's input."""
    from .graph import Value
    values, results, done = [], [], set()
    for ref in (ref for call in calls for ref in call.outputs):
        index = ref.storage.index
        is_read = any(c.index not in inside and c.index > calls[-1].index for c in g.consumers.get(index, []))
        is_returned = any(r.storage is ref.storage for r in g.t.base.outputs)
        if index in done or is_of_pairs(g, ref) or not (is_read or is_returned):
            continue
        done.add(index)
        sizes, shared = g.per_sample(g.t.shape(ref))
        value = Value(f"t{len(g.ops)}_{len(values)}", sizes, shared)
        values.append((ref, value))
        results.append(g.result(ref, value))
    return values, results


def sums(g, calls):
    """Sums of gradients of such tensors, which nothing outside this op knows of."""
    found, late = [], [c.index for call in calls for c in g.backward_calls.get(call.index, [])]
    for call in g.calls[min(late, default=0):max(late, default=0)]:
        if call.name == "add" and call.backward_of is None and all(is_of_pairs(g, ref) for ref in call.outputs):
            found += g.kernels(call)
    return found
