"""From the calls of a trace to the ops of a model.json: which values flow, what each op costs and what it keeps.

An op that model.json has a name for (named.py) is written by its name. All others are written as op "other", which says itself
what it launches and keeps, as the trace has it.
"""

import torch

from . import named, pairs, rules
from .rules import Unsupported
from .sizes import Vec, product

DTYPES = {torch.bfloat16: "compute", torch.float16: "compute", torch.float32: "fp32", torch.int64: "int64", torch.int32: "int64",
          torch.bool: "bool", torch.uint8: "bool", torch.int8: "bool", torch.int16: "compute"}


class Value:
    """A tensor of model.json: `dims` per sample, or in all where it is shared."""

    def __init__(self, name, dims, shared=False):
        self.name, self.dims, self.shared = name, list(dims), shared
        self.views = {}


class Traces:
    """Several traces of one module, call by call the same; sizes are vectors over them."""

    def __init__(self, runs, points):
        self.runs, self.points = runs, points
        self.base = runs[0]
        self.count = len(runs)
        self.one = Vec([1] * self.count)

    def vec(self, f):
        return Vec(f(run) for run in self.runs)

    def shape(self, ref):
        return [self.vec(lambda run, d=d: run.refs[ref.index].shape[d]) for d in range(len(ref.shape))]

    def read(self, ref):
        return self.vec(lambda run: run.refs[ref.index].read)

    def bytes(self, storage):
        return self.vec(lambda run: run.storages[storage.index].nbytes)

    def flops(self, call):
        return self.vec(lambda run: run.calls[call.index].flops)

    def is_shared(self, size):
        return self.points.batch.constant() or size.constant() or not self.is_per_sample(size)

    def is_per_sample(self, size):
        quotient = size.over(self.points.batch)
        if quotient is None:
            return False
        by_length = {}
        for (_, s), q in zip(self.points.points, quotient):
            if by_length.setdefault(s, q) != q:
                return False
        return True


def differing(a, b):
    """Where two traces are not the same calls; None if they are."""
    for x, y in zip(a.calls, b.calls):
        both_views = x.name in rules.VIEWS and y.name in rules.VIEWS  # the whole length, or a part of it
        if x.name != y.name and not both_views or x.module != y.module or [r.index for r in x.inputs] != [r.index for r in y.inputs] or \
                len(x.outputs) != len(y.outputs):
            other = x.name if x.name != y.name else "one with other operands"
            return f"{y.module or 'the root module'} runs {y.name} in the place of {other}"
    if len(a.calls) != len(b.calls):
        return f"{len(b.calls)} ops in the place of {len(a.calls)}"
    return None


class Graph:
    def __init__(self, traces, model, modules):
        self.t, self.model, self.modules = traces, model, modules
        self.calls = traces.base.calls
        self.ops, self.inputs = [], {}
        self.places = []  # per op, the call at whose place it stands
        self.now = 0
        self.made_at = {}  # name of a tensor -> place of the op that makes it
        self.of_storage = {}  # storage index -> Value
        self.of_ref = {}  # ref index -> (Value, version of the storage), for parts of a storage
        self.version = {}
        self.lazy = {}  # ref index -> the call that makes a part of a storage and has kernels in backward
        self.source = {}  # storage index of integers -> the input they come from
        self.pending_constants = {}  # storage index -> calls that make it
        self.trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self.learning = set()  # names of the tensors that need a gradient
        self.stopped = {}  # (name of a tensor, version of its storage) -> the same without a gradient
        self.late_weights = {}  # parameter storage -> kernels of its views' backward
        self.parameter_names = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.parameter_names.setdefault(id(parameter), []).append(name)
        self.tied = {}
        for name, parameter in model.named_parameters():
            self.tied[name] = self.parameter_names[id(parameter)]
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.used_parameters = set()
        self.backward = {}  # forward call index -> [(call, "data" or "weight")]
        self.consumers = {}
        self.find_consumers()
        self.find_backward()

    # What reads what.

    def find_consumers(self):
        for call in self.calls:
            if call.backward_of is None and not self.is_backward(call):
                for ref in call.inputs:
                    self.consumers.setdefault(ref.storage.index, []).append(call)

    def is_backward(self, call):
        return call.index >= self.first_backward

    @property
    def first_backward(self):
        if not hasattr(self, "_first"):
            self._first = next((c.index for c in self.calls if c.backward_of is not None), len(self.calls))
        return self._first

    def forward_calls(self):
        return self.calls[:self.first_backward]

    def views_parameter(self, call):
        return call.name in rules.VIEWS and bool(call.inputs) and call.inputs[0].storage.kind == "parameter"

    def find_backward(self):
        """A call of backward is of the weights where nothing but gradients of parameters comes of it."""
        wanted, owner_of = set(), {}
        self.backward_calls = {}  # forward call index -> all calls of its nodes, in their order
        for call in self.calls[self.first_backward:]:
            # Sums of gradients of one tensor are autograd's own: the lowering knows them.
            makers = {id(owner_of[r.storage.index]) for r in call.inputs if r.storage.index in owner_of}
            if call.name == "add" and len(call.inputs) == 2 and len(makers) == 2:
                call.backward_of = None
            if call.backward_of is not None:
                self.backward_calls.setdefault(call.backward_of.index, []).append(call)
            for ref in call.outputs:
                owner_of.setdefault(ref.storage.index, call.backward_of)
        for call in reversed(self.calls[self.first_backward:]):
            owner = call.backward_of
            is_data = any(ref.storage.index in wanted for ref in call.outputs)
            if owner is None or self.views_parameter(owner):
                if is_data:
                    wanted.update(ref.storage.index for ref in call.inputs)
            else:
                for ref in call.inputs:
                    made_by = owner_of.get(ref.storage.index)
                    if made_by is not owner or is_data:
                        wanted.add(ref.storage.index)
            if owner is not None and call.name not in rules.VIEWS and call.name not in rules.FREE:
                self.backward.setdefault(owner.index, []).insert(0, (call, "data" if is_data else "weight"))

    # Values.

    def per_sample(self, sizes):
        """Sizes of one sample: the batch is the first dimension, or a factor of some dimension."""
        sizes = [s for s in sizes]
        total = product(sizes, self.t.count)
        if not self.t.is_per_sample(total):
            if not self.no_batch(total):
                raise Unsupported(f"a tensor of {list(total)} elements at batches {[b for b, _ in self.t.points.points]}, which is not "
                                  "so many per sample")
            return [s for s in sizes if s != self.t.one] or [self.t.one], True
        for i, size in enumerate(sizes):
            if self.t.is_per_sample(size):
                quotient = size.over(self.t.points.batch)
                rest = sizes[:i] + ([quotient] if quotient != self.t.one else []) + sizes[i + 1:]
                return rest or [self.t.one], False
        return [total.over(self.t.points.batch)], False

    def no_batch(self, total):
        by_length = {}
        return all(by_length.setdefault(s, v) == v for (_, s), v in zip(self.t.points.points, total))

    def remember(self, ref, value):
        index = ref.storage.index
        self.version[index] = self.version.get(index, 0) + 1
        self.of_storage[index] = value

    def kind(self, ref):
        """"value", "parameter", "constant" or "index" (integers)."""
        if ref.storage.index in self.of_storage:
            return "value"
        if ref.storage.kind == "parameter":
            return "parameter"
        if ref.storage.kind == "input" and ref.dtype.is_floating_point:
            return "value"
        return "constant"

    def value(self, ref):
        """The value that holds the tensor; its maker is written first where that has not happened yet. Of one that needs a gradient and
        is read without (detach(), .data), a view that hands none on."""
        found = self.value_with_gradient(ref)
        return self.without_gradient(ref, found) if ref.learns is False and found.name in self.learning else found

    def without_gradient(self, ref, value):
        key = value.name, self.version.get(ref.storage.index, 0)
        if key not in self.stopped:
            made = next((c for c in reversed(self.calls[:self.now + 1]) if c.name == "detach" and c.inputs[0].storage is ref.storage), None)
            view = Value(f"t{len(self.ops)}", value.dims, value.shared)
            place, self.now = self.now, made.index if made is not None else self.now
            self.append({"op": "other", "module": self.calls[self.now].module, "function": "detach", "inputs": [value.name],
                         "outputs": [view.name], "results": [self.result(ref, view, 0)], "stops_gradient": True})
            self.now = place
            self.stopped[key] = view
        return self.stopped[key]

    def value_with_gradient(self, ref):
        part = self.of_ref.get(ref.index)
        index = ref.storage.index
        if part is not None and part[1] == self.version.get(index, 0):
            return part[0]
        if ref.index in self.lazy:
            self.write_view(self.lazy[ref.index])
            part = self.of_ref.get(ref.index)
            return part[0] if part is not None else self.of_storage[index]
        if index in self.of_storage:
            return self.of_storage[index]
        if ref.storage.kind == "input":
            return self.input_value(ref) if ref.dtype.is_floating_point else self.index_name(ref)
        return self.constant(ref)

    def input_value(self, ref):
        name = ref.storage.name
        whole = next(r for r in self.t.base.refs if r.storage is ref.storage)
        sizes, shared = self.per_sample(self.t.shape(whole))
        if shared:
            raise Unsupported(f"input {name} has no batch dimension")
        self.inputs[name] = {"shape": [self.size(s) for s in sizes]}
        value = Value(name, sizes if len(sizes) > 1 else [self.t.one, *sizes])
        self.of_storage[ref.storage.index] = value
        return value

    def index_name(self, ref):
        """The input that integers come from; those that the module makes itself are positions (or ids, one per sample)."""
        storage = self.source.get(ref.storage.index, ref.storage)
        key = ("index", storage.index)
        if key in self.of_storage:
            return self.of_storage[key]
        total = product(self.t.shape(ref), self.t.count) if storage is ref.storage else self.storage_elements(storage)
        per_sample = self.t.is_per_sample(total)
        name = storage.name if storage.kind == "input" else f"{'ids' if per_sample else 'positions'}{len(self.inputs)}"
        self.inputs[name] = {"ids": self.size(total.over(self.t.points.batch))} if per_sample else {"positions": self.size(total)}
        value = Value(name, [total.over(self.t.points.batch) if per_sample else total], not per_sample)
        self.of_storage[key] = value
        return value

    def storage_elements(self, storage):
        ref = next(r for r in self.t.base.refs if r.storage is storage)
        item = torch.empty((), dtype=ref.dtype).element_size()
        return self.t.bytes(storage).over(item)

    def constant(self, ref):
        """What depends on neither weights nor inputs of numbers: masks, tables of angles. One op makes it, on its first use."""
        calls = self.ancestors(ref.storage.index)
        place, self.now = self.now, calls[-1].index if calls else self.now
        forward = [k for call in calls for k in self.kernels(call)]
        storage_total = self.storage_elements(ref.storage)
        if not forward:  # a buffer of the module, brought to the compute dtype
            forward = [{"class": "elementwise", "read": self.amount(storage_total), "written": self.amount(storage_total)}]
        sizes, shared = self.per_sample([storage_total])
        value = Value(f"t{len(self.ops)}", sizes, shared)
        # One that nothing computes, as a list of indices, belongs to the module that reads it.
        self.append({"op": "other", "module": (calls[-1] if calls else self.calls[self.now]).module, "function": "constant", "inputs": [],
                     "outputs": [value.name], "results": [self.result(ref, value)], "forward": forward})
        self.now = place
        self.of_storage[ref.storage.index] = value
        return value

    def ancestors(self, index):
        order, seen = [], set()

        def visit(i):
            for call in self.pending_constants.pop(i, []):
                if call.index in seen:
                    continue
                seen.add(call.index)
                for ref in call.inputs:
                    visit(ref.storage.index)
                order.append(call)

        visit(index)
        return sorted(order, key=lambda c: c.index)

    def parameter(self, ref, module):
        names = self.tied[ref.storage.name]
        if ref.learns is False and names[0] in self.trainable:
            raise Unsupported(f"parameter {names[0]}, which is trained, is read here without a gradient (detach(), .data)")
        self.used_parameters.update(names)
        return next((n for n in names if n.rpartition(".")[0] == module), names[0])

    # Sizes and kernels.

    def size(self, vec):
        return self.t.points.expression(vec, with_batch=False)

    def amount(self, vec):
        return self.t.points.expression(vec)

    def data(self, refs, key, entry):
        elements, raw = Vec([0] * self.t.count), Vec([0] * self.t.count)
        for ref in refs:
            if DTYPES.get(ref.dtype, "") == "compute" or ref.dtype == self.dtype:
                elements = elements + self.t.read(ref)
            else:
                raw = raw + self.t.read(ref) * torch.empty((), dtype=ref.dtype).element_size()
        if any(elements):
            entry[key] = self.amount(elements)
        if any(raw):
            entry[key + "_bytes"] = self.amount(raw)

    dtype = torch.float32

    def kernels(self, call):
        """What one call launches."""
        if call.name in rules.VIEWS or call.name in rules.FREE or call.outputs and call.outputs[0].storage.is_on_host:
            return []
        if call.name not in rules.CLASSES:
            raise Unsupported(f"{call.name}, whose cost no rule knows")
        group = rules.CLASSES[call.name]
        if group == "conv":
            return self.convolutions(call)
        entry = {"class": group}
        inputs = list({(r.storage.index, r.index): r for r in call.inputs}.values())
        if call.in_place and call.name in ("copy", "fill", "zero", "uniform", "normal", "bernoulli", "exponential", "random"):
            inputs = inputs[1:]
        self.data(inputs, "read", entry)
        self.data([o for o in call.outputs], "written", entry)
        if group in ("gemm", "attention", "attention_backward"):
            self.product_sizes(call, entry)
        elif any(self.t.flops(call)):
            raise Unsupported(f"the products of {call.name}")
        return self.flash_backward(call, entry) if group == "attention_backward" else [entry]

    def flash_backward(self, call, entry):
        """The fused kernel sums gradients of queries in fp32: one launch before it makes the sums of rows, one behind it casts."""
        grad, q, out, sums = call.inputs[0], call.inputs[1], call.inputs[-2], call.inputs[-1]
        wide = self.t.read(q) * 4
        rows, cast = {"class": "elementwise"}, {"class": "copy", "read_bytes": self.amount(wide)}
        self.data([grad, out], "read", rows)
        self.data([sums], "written", rows)
        self.data([q], "written", cast)
        self.data([*call.inputs[1:], sums], "read", entry)
        entry.pop("written", None)
        self.data(call.outputs[1:], "written", entry)
        entry["written_bytes"] = self.amount(wide)
        return [rows, entry, cast]

    def product_sizes(self, call, entry):
        operands = [r for r in call.inputs if len(r.shape) >= 1][-2:]
        a, b = (self.t.shape(r) for r in operands)
        if call.name.startswith("attention"):
            q, k = (self.t.shape(r) for r in call.inputs[1 if call.name.endswith("_backward") else 0:][:2])
            entry |= {"batch": self.amount(q[0] * q[1]), "m": self.amount(q[2]), "n": self.amount(k[2]), "k": self.amount(q[3])}
        elif call.name.startswith("delta_rule"):  # its largest products: the states of a head, over all tokens
            k, v = (self.t.shape(r) for r in call.inputs[2 if call.name.endswith("_backward") else 1:][:2])
            entry |= {"batch": self.amount(v[0] * v[2]), "m": self.amount(k[3]), "n": self.amount(v[3]), "k": self.amount(k[1])}
        elif call.name in ("bmm", "baddbmm"):
            entry |= {"batch": self.amount(a[0]), "m": self.amount(a[1]), "n": self.amount(b[2]), "k": self.amount(a[2])}
        else:
            one = self.t.one
            entry |= {"m": self.amount(a[0] if len(a) > 1 else one), "n": self.amount(b[1] if len(b) > 1 else one),
                      "k": self.amount(a[-1])}
        flops = self.t.flops(call)
        if not any(flops):  # products that the counter leaves out
            flops = product([*a, b[-1] if len(b) > 1 else self.t.one], self.t.count) * 2
        entry["flops"] = self.amount(flops)

    def convolutions(self, call):
        backward = call.name == "convolution_backward"
        x, w = (call.inputs[1], call.inputs[2]) if backward else (call.inputs[0], call.inputs[1])
        y = call.inputs[0] if backward else call.outputs[0]
        weight = self.t.shape(w)
        groups = call.args[9 if backward else 8]
        wide = call.args[7 if backward else 6]  # transposed: the input is what the kernel slides over
        image = self.t.shape(x if wide else y)
        pixels = product([image[0], *image[2:]], self.t.count)
        taps = product(weight[1:], self.t.count)
        sizes = {"batch": groups, "m": self.amount(pixels), "n": self.amount(weight[0].over(groups)), "k": self.amount(taps)}
        if not backward:
            entry = {"class": "conv", **sizes, "flops": self.amount(self.t.flops(call))}
            self.data([x, w], "read", entry)
            self.data([y], "written", entry)
            extra = []
            if isinstance(call.args[2], type(y)):
                bias = {"class": "elementwise"}
                self.data([y, call.args[2]], "read", bias)
                self.data([y], "written", bias)
                extra = [bias]
            return [entry, *extra]
        made = list(call.outputs)
        flops = self.t.flops(call).over(max(sum(call.args[10][:2]), 1))
        kernels = []
        for place, (reads, of) in enumerate((((y, w), x), ((x, y), w))):
            if not call.args[10][place]:
                continue
            entry = {"class": "conv", **sizes, "flops": self.amount(flops)}
            self.data(reads, "read", entry)
            self.data([of], "written", entry)
            kernels.append(entry | {"half": place})
        if call.args[10][2]:
            entry = {"class": "elementwise", "half": 1}
            self.data([y], "read", entry)
            self.data([made[-1]], "written", entry)
            kernels.append(entry)
        return kernels

    def backward_kernels(self, call, has_params, has_inputs):
        """(of the inputs, of the weights)"""
        lists = {"data": [], "weight": []}
        for late, part in self.backward.get(call.index, []):
            for kernel in self.kernels(late):
                half = kernel.pop("half", None)
                to = part if half is None else ("data", "weight")[half]
                if not has_params:
                    to = "data"
                if not has_inputs:
                    to = "weight"
                lists[to].append(kernel)
        return lists["data"], lists["weight"]

    def backward_workspace(self, calls):
        """What is alive at the peak of the op's backward beside the gradients that it is given and those that it makes."""
        most, worst = 0, None
        for nodes in self.windows(calls):
            end = nodes[-1].index + 1
            made = [s for s in self.t.base.storages if nodes[0].index <= s.born < end]
            temporary = [s for s in made if s.died is not None and s.died <= end]
            for late in nodes:
                alive = [s for s in temporary if s.born <= late.index < s.died]
                to_come = [s for s in made if s.born > late.index and s not in temporary]
                size = sum(s.nbytes for s in alive) - sum(s.nbytes for s in to_come)
                if size > most:
                    most, worst = size, (alive, to_come)
        if worst is None:
            return {}
        elements, raw = Vec([0] * self.t.count), Vec([0] * self.t.count)
        for sign, storages in zip((1, -1), worst):
            for storage in storages:
                size = self.t.bytes(storage)
                if storage.dtype == self.dtype:
                    elements = elements + size.over(torch.empty((), dtype=self.dtype).element_size()) * sign
                else:
                    raw = raw + size * sign
        if min(*elements, *raw) < 0:
            return {}
        return {name: self.amount(vec) for name, vec in (("elements", elements), ("bytes", raw)) if any(vec)}

    def windows(self, calls):
        """Runs of calls of the op's nodes in backward."""
        runs = []
        for late in sorted((late for call in calls for late in self.backward_calls.get(call.index, [])), key=lambda late: late.index):
            if runs and runs[-1][-1].index + 1 == late.index:
                runs[-1].append(late)
            else:
                runs.append([late])
        return runs

    # Writing.

    def append(self, op):
        op = {k: v for k, v in op.items() if v not in ([], None, "") or k in ("inputs",)}
        op.setdefault("name", f"{op.get('function', op['op'])}_{len(self.ops)}")
        learns = any(name in self.learning for name in op["inputs"]) or any(name in self.trainable for name in op.get("params", ()))
        if learns and "stops_gradient" not in op:
            kinds = op.get("results", [{}])
            self.learning.update(name for name, kind in zip(op.get("outputs", [op.get("output")]), kinds * 2)
                                 if kind.get("dtype") not in ("int64", "bool"))
        # What is written on its first use stands where it was made, or behind its operands.
        place = max([self.now, *(self.made_at.get(name, 0) for name in op["inputs"])])
        if place > self.now and "module" in op:
            op["module"] = self.calls[place].module
        self.ops.append(op)
        self.places.append(place)
        self.made_at |= dict.fromkeys(op.get("outputs", [op.get("output")]), place)

    def result(self, ref, value, view_of=None):
        if ref.dtype not in DTYPES and ref.dtype != self.dtype:
            raise Unsupported(f"a tensor of {ref.dtype}")
        kind = "compute" if ref.dtype == self.dtype else DTYPES[ref.dtype]
        return {"shape": [self.size(d) for d in value.dims], **({"dtype": kind} if kind != "compute" else {}),
                **({"shared": True} if value.shared else {}), **({"view_of": view_of} if view_of is not None else {})}

    def write(self):
        self.patterns = named.find_patterns(self) | pairs.find(self)
        for call in self.forward_calls():
            pattern = self.patterns.get(call.index)
            self.now = call.index
            try:
                if pattern is not None:
                    if pattern.last == call.index:
                        pattern.write(self)
                    continue
                self.write_call(call)
            except Unsupported as error:
                if str(error).startswith(f"{call.module or 'the root module'}: "):
                    raise
                raise Unsupported(f"{call.module or 'the root module'}: {call.name}: {error}") from error
        for storage, kernels in self.late_weights.items():
            if kernels:
                raise Unsupported(f"{self.t.base.storages[storage].name}: gradients of a view of it that no op reads")
        order = sorted(range(len(self.ops)), key=lambda i: self.places[i])
        self.ops, self.places = [self.ops[i] for i in order], [self.places[i] for i in order]
        self.mark_calls()
        self.mark_returns()

    def mark_calls(self):
        """Says of an op in the module of the op before it whether a further call of that module, or of one around it, has begun."""
        before = None
        for op, place in zip(self.ops, self.places):
            if op["op"] in ("view", "flatten", "tokens"):  # no op is made of them
                continue
            here = op.get("module", ""), self.calls[place].frames
            if before is not None:
                parts = here[0].split(".")
                around = [".".join(parts[:i + 1]) for i in range(len(parts))]
                again = next((m for m in around if f"{before[0]}.".startswith(f"{m}.") and m in before[1] and m in here[1] and
                              before[1][m] != here[1][m]), None)
                if again:
                    op["called_again"] = again
            before = here

    def mark_returns(self):
        """Says of the last op of a call whose module returned what it was given that it did so."""
        for name, number, has_gradient in self.t.base.returned:
            inside = [op for op, place in zip(self.ops, self.places) if op["op"] not in ("view", "flatten", "tokens") and
                      self.calls[place].frames.get(name) == number and f"{op.get('module', '')}.".startswith(f"{name}.")]
            if has_gradient and inside and name:
                inside[-1].setdefault("returns_input", []).append(name)

    def is_active(self, call):
        return any(self.kind(ref) in ("value", "parameter") for ref in call.inputs)

    def write_call(self, call):
        self.now = call.index
        if call.is_idle:
            named.write_idle(self, call)
        elif call.name in rules.VIEWS:
            self.follow_view(call)
        elif call.name in rules.FREE:
            for ref in call.outputs:
                self.pending_constants.setdefault(ref.storage.index, [])
        elif not self.is_active(call):
            self.follow_constant(call)
        elif self.is_copy_to_keep(call):
            self.carried = call
        else:
            if not (call.has_grad or call.func.namespace == "shardwright_export") or not named.write(self, call):
                self.write_other(call)
            self.carried = None

    carried = None

    def is_copy_to_keep(self, call):
        """What an op in place makes before it overwrites its operand: autograd keeps it, nothing reads it."""
        return call.name == "clone" and not self.consumers.get(call.outputs[0].storage.index) and self.is_kept(call, call.outputs[0])

    def follow_view(self, call):
        source = call.inputs[0]
        if self.views_parameter(call):
            kernels = [k for late, _ in self.backward.get(call.index, []) for k in self.kernels(late)]
            self.late_weights.setdefault(source.storage.index, []).extend(kernels)
            return
        if self.backward.get(call.index) or source.index in self.of_ref or source.index in self.lazy:
            for ref in call.outputs:
                if ref.index != source.index:
                    self.lazy[ref.index] = call

    def write_view(self, call):
        """A view of a part, or one whose gradient is copied into that of the whole: an op that launches nothing forward."""
        place, self.now = self.now, call.index
        self.write_view_here(call)
        self.now = place

    def write_view_here(self, call):
        source = call.inputs[0]
        base = self.value(source)
        version = self.version.get(source.storage.index, 0)
        if not self.backward.get(call.index):
            part = self.of_ref.get(source.index)
            for ref in call.outputs:
                self.lazy.pop(ref.index, None)
                if part is not None and part[1] == version:
                    self.of_ref[ref.index] = (part[0], version, part[2] and call.name in named.IN_ORDER)
            return
        if named.write_select(self, call, base):
            return
        refs = [r for r in call.outputs if self.is_read(r) and 0 not in r.shape] if len(call.outputs) > 1 else call.outputs
        values, results = [], []
        for i, ref in enumerate(refs):
            sizes, shared = self.per_sample(self.t.shape(ref))
            value = Value(f"t{len(self.ops)}_{i}" if len(refs) > 1 else f"t{len(self.ops)}", sizes, shared)
            values.append(value)
            results.append(self.result(ref, value, 0))
        data, _ = self.backward_kernels(call, False, True)
        self.append({"op": "other", "module": call.module, "function": call.name, "inputs": [base.name],
                     "outputs": [v.name for v in values], "results": results, "backward_data": data})
        for ref in call.outputs:
            self.lazy.pop(ref.index, None)
        for ref, value in zip(refs, values):
            self.of_ref[ref.index] = (value, version, True)

    def module_shape(self, name):
        return self.shapes[name]

    def is_read(self, ref):
        return any(r.index == ref.index for call in self.consumers.get(ref.storage.index, []) for r in call.inputs) or \
            any(r.index == ref.index for r in self.t.base.outputs)

    def follow_constant(self, call):
        for ref in call.outputs:
            self.pending_constants.setdefault(ref.storage.index, []).append(call)
            if call.in_place:
                self.of_storage.pop(("index", ref.storage.index), None)
            if not ref.dtype.is_floating_point and ref.dtype != torch.bool:
                for source in call.inputs:
                    from_input = self.source.get(source.storage.index, source.storage)
                    if from_input.kind == "input" and self.is_same_size(source, ref):
                        self.source[ref.storage.index] = from_input

    def is_same_size(self, a, b):
        return product(self.t.shape(a), self.t.count) == product(self.t.shape(b), self.t.count)

    def check_change(self, call):
        """What an op in place changes must be what backward knows of."""
        first = call.inputs[0]
        if first.storage.kind == "parameter" and call.has_grad | call.is_stopped:
            raise Unsupported(f"changes parameter {first.storage.name} in forward, which sharded training loses; change it in the training "
                              "loop, after the optimizer's step")
        # A mask that is made of zeros and filled in place is as large as a value, and needs no gradient itself.
        if self.kind(first) == "value" and (call.is_stopped or first.learns is False and first.storage.learns) and \
                self.value_with_gradient(first).name in self.learning:
            raise Unsupported("changes a tensor that needs a gradient in place and without one; write it out of place")

    def write_other(self, call, function=None):
        params, inputs, seen = [], [], {}
        if call.in_place and call.inputs:
            self.check_change(call)
        for ref in call.inputs:
            kind = self.kind(ref)
            if 0 in ref.shape or kind == "constant" and ref.storage.is_on_host:
                continue
            if kind == "parameter":
                name = self.parameter(ref, call.module)
                if name not in params:
                    params.append(name)
                continue
            if kind == "constant" and not self.is_kept(call, ref) and not self.has_flops(ref):
                continue
            if ref.storage.index in seen and ref.index not in self.of_ref and ref.index not in self.lazy:
                continue
            if call.in_place and ref is call.inputs[0] and kind == "constant":
                continue
            value = self.value(ref)
            seen.setdefault(ref.storage.index, value)
            if value.name not in [v.name for v, _ in inputs]:
                inputs.append((value, ref))
        saved, saves_inputs, saves_outputs = self.kept(call, inputs)
        if len(inputs) > 32:
            raise Unsupported(f"{len(inputs)} tensors in one op; model.json takes 32")
        values, results, storages = [], [], []
        for ref in call.outputs:
            if ref.storage.index in storages or not self.is_result(call, ref) or 0 in ref.shape:
                continue
            storages.append(ref.storage.index)
            view_of = next((i for i, (v, r) in enumerate(inputs) if r.storage.index == ref.storage.index), None)
            sizes, shared = self.per_sample(self.t.shape(ref) if ref.whole else [self.storage_elements(ref.storage)])
            value = Value(f"t{len(self.ops)}_{len(values)}" if len(call.outputs) > 1 else f"t{len(self.ops)}", sizes, shared)
            values.append((ref, value))
            results.append(self.result(ref, value, view_of))
        for place, storage in enumerate(storages):
            if storage in saves_outputs:
                saves_outputs[storage] = place
        data, weight = self.backward_kernels(call, bool(params), any(v for v, _ in inputs))
        for ref in call.inputs:
            if self.kind(ref) == "parameter":
                weight += self.late_weights.pop(ref.storage.index, [])
        forward = self.kernels(call)
        workspace = self.backward_workspace([call])
        if self.carried is not None:
            forward = self.kernels(self.carried) + forward
            saved = self.kept(self.carried, [])[0] + saved
        self.append({"op": "other", "module": call.module, "function": function or f"aten.{call.name}", "inputs": [v.name for v, _ in inputs],
                     "params": params, "outputs": [v.name for _, v in values], "results": results, "forward": forward,
                     "backward_data": data, "backward_weight": weight, "saves_inputs": saves_inputs,
                     "saves_outputs": [p for p in saves_outputs.values() if p is not None], "saved": saved,
                     **({"backward_workspace": workspace} if workspace else {}), **self.cast(call, inputs),
                     **({"stops_gradient": True} if call.is_stopped and self.would_learn(inputs, params) else {})})
        for ref, value in values:
            self.remember(ref, value)

    def would_learn(self, inputs, params):
        return any(v.name in self.learning for v, _ in inputs) or any(name in self.trainable for name in params)

    def cast(self, call, inputs):
        is_cast = call.name == "_to_copy" and len(inputs) == 1 and call.inputs[0].dtype == self.dtype and \
            call.outputs[0].dtype == torch.float32 and self.dtype != torch.float32
        return {"cast": True} if is_cast else {}

    def has_flops(self, ref):
        return any(call.flops for call in self.pending_constants.get(ref.storage.index, []))

    def is_kept(self, call, ref):
        return any(kept.storage.index == ref.storage.index for kept in call.saved)

    def is_result(self, call, ref):
        """Is the output read later (or given back)? The other outputs are what the op keeps for itself."""
        if any(c.index > call.index for c in self.consumers.get(ref.storage.index, [])):
            return True
        return ref is call.outputs[0] or any(r.storage is ref.storage for r in self.t.base.outputs)

    def kept(self, call, inputs):
        saved, saves_inputs, saves_outputs, done = [], [], {}, set()
        for ref in call.saved:
            index = ref.storage.index
            if index in done or ref.storage.kind in ("parameter", "buffer"):
                continue
            done.add(index)
            place = [i for i, (_, r) in enumerate(inputs) if r.storage.index == index]
            output = next((o for o in call.outputs if o.storage.index == index), None)
            if output is not None and self.is_result(call, output) and call is not self.carried:
                saves_outputs[index] = None
            elif place:
                saves_inputs += place
            elif output is None and not ref.storage.is_on_host and (index in self.of_storage or index in self.pending_constants or ref.storage.kind == "input"):
                if ref.storage.kind == "input" and not ref.dtype.is_floating_point:
                    inputs.append((self.index_name(ref), ref))
                else:
                    inputs.append((self.value(ref), ref))
                saves_inputs.append(len(inputs) - 1)
            else:
                size = self.t.bytes(ref.storage)
                if ref.storage.dtype == self.dtype:
                    saved.append({"elements": self.amount(size.over(torch.empty((), dtype=self.dtype).element_size()))})
                else:
                    saved.append({"bytes": self.amount(size)})
        return saved, saves_inputs, saves_outputs
