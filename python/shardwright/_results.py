"""Plans, predictions and comparisons as plain data, and the functions that make them."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Optional, Union

from . import commands
from ._errors import InputError, MachineError, UsageError
from ._export.model_export import outside
from ._run import PlanLike, Value, as_dictionary, plan_words, printed_json, run

ClusterLike = Union[str, "os.PathLike[str]", "Mapping[str, Any]"]
"""A name of the catalog, a text such as "8xH100", a file, or a cluster as a mapping: what here() returns."""


def table(rows: list[dict[str, Any]]) -> Any:
    """`rows` as a pandas.DataFrame."""
    import pandas
    return pandas.DataFrame(rows)


class _Printed(Mapping[str, Any]):
    """Everything that --json prints of it, by its key (docs/cli.md), beside the attributes."""

    printed: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.printed[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.printed)

    def __len__(self) -> int:
        return len(self.printed)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of one GPU, in bytes."""

    peak: int  # in buffers at one moment
    reserved: int  # what PyTorch's caching allocator holds
    outside: int  # CUDA context and communicators
    usable: int  # what the device has, less the margin
    at_peak: dict[str, int]  # `peak` by category
    place: str  # when the peak is
    largest: list[dict[str, Any]]  # its largest buffers
    host_per_node: int

    def table(self) -> Any:
        return table([{"category": name, "bytes": size} for name, size in self.at_peak.items()])


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction(_Printed):
    """What `simulate` says of a plan. Times are in seconds."""

    step_time: float
    first_step_time: float
    tokens_per_s_per_gpu: float
    mfu: float
    exposed_communication: float
    fits: bool
    misfits: list[str]
    memory: Memory
    printed: dict[str, Any] = dataclasses.field(repr=False)

    def waits(self) -> list[dict[str, Any]]:
        """What the compute stream waits for, longest first."""
        return list(self.printed["time"]["compute_waits_for"])

    def table(self) -> Any:
        return table(self.waits())


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(_Printed):
    """A plan and what is predicted of it. Without a plan that fits, `file` and `prediction` are None and why() says what would help."""

    model: str
    cluster: str
    ranks: int
    fits: bool
    file: Optional[dict[str, Any]] = dataclasses.field(repr=False)  # the plan file (docs/plan_file.md)
    prediction: Optional[Prediction] = dataclasses.field(repr=False)
    printed: dict[str, Any] = dataclasses.field(repr=False)  # what `plan --json` says

    def _predicted(self) -> Prediction:
        if self.prediction is None:
            raise InputError("the plan: there is none that fits; why() says what is missing")
        return self.prediction

    @property
    def step_time(self) -> float:
        return self._predicted().step_time

    @property
    def memory(self) -> Memory:
        return self._predicted().memory

    def why(self) -> str:
        """What bounds the step and the memory; of a search, what was not chosen and why; without a plan, what would make it fit."""
        return why(self)

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        self._predicted()
        outside.write(path, json.dumps(self.file, indent=2) + "\n")

    def to_html(self, path: Union[None, str, "os.PathLike[str]"] = None) -> str:
        """The page of `report`, which needs no network; written to `path`, too, if one is given."""
        self._predicted()
        words, stdin = plan_words(self)
        page = run(["report", *words, "--output=-"], stdin).text.decode()
        if path is not None:
            outside.write(path, page)
        return page

    def _repr_html_(self) -> str:
        if self.prediction is None:
            return f"<pre>{html.escape(self.why())}</pre>"
        # The page's scripts run in a frame without rights to the notebook.
        return (f'<iframe sandbox="allow-scripts" width="100%" height="720" style="border:0" '
                f'srcdoc="{html.escape(self.to_html(), quote=True)}"></iframe>')

    def table(self) -> Any:
        """Time against memory: the plans that a search would have chosen with other limits."""
        return table(self.printed.get("pareto", []))


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison(_Printed):
    """A measured run beside the prediction of its plan (docs/compare.md)."""

    predicted_step_time: float
    measured_step_time: float
    gap: float  # measured over predicted, less 1
    findings: list[str]  # where the run contradicts the plan's program
    parts: list[dict[str, Any]] = dataclasses.field(repr=False)
    printed: dict[str, Any] = dataclasses.field(repr=False)

    def table(self) -> Any:
        return table(self.parts)


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing that a job should change, as a trace of it shows. Gains are parts of a step."""

    topic: str  # sync, reshard, prefetch, offload, recompute, units, batch, mesh, data loader, small kernels, graph breaks, stragglers
    what: str
    seen: str  # in the trace
    how: str  # the line that says it; empty where none is known
    effort: str
    gain: float
    band: Optional[float]  # half-width of the gain; None: without a plan, when `gain` is what it could be at most
    more_memory: Optional[int]  # bytes per GPU


@dataclasses.dataclass(frozen=True, eq=False)
class AdviceReport(_Printed):
    """What a trace says of its job (docs/advise.md)."""

    step_time: float
    exposed_communication: float
    has_fsdp_problem: bool
    advice: list[Advice]  # the first one first
    better: Optional[Plan]  # None: without a plan, and where no other is better by more than a percent
    gain: float  # of `better`, as a part of the step
    band: float  # half-width of the gain
    patch: str  # from the job's settings to those of `better`
    text: str = dataclasses.field(repr=False)  # what the command prints for people
    printed: dict[str, Any] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text

    def table(self) -> Any:
        return table([dataclasses.asdict(one) for one in self.advice])


def _prediction(printed: dict[str, Any]) -> Prediction:
    memory = printed["memory"]
    return Prediction(
        step_time=printed["step_time_s"], first_step_time=printed["first_step_time_s"],
        tokens_per_s_per_gpu=printed["tokens_per_s_per_gpu"], mfu=printed["mfu"],
        exposed_communication=printed["exposed_comm_s"], fits=printed["fits"], misfits=printed["misfits"],
        memory=Memory(peak=memory["peak_allocated_bytes"], reserved=memory["peak_reserved_bytes"],
                      outside=memory["outside_allocator_bytes"], usable=memory["usable_device_bytes"], at_peak=memory["at_peak"],
                      place=memory["peak_place"], largest=memory["largest_at_peak"],
                      host_per_node=memory["host_peak_bytes_per_node"]),
        printed=printed)


def simulate(plan: PlanLike, **flags: Value) -> Prediction:
    """What a step of the plan takes; keywords are the flags of `shardwright simulate`."""
    words, stdin = plan_words(plan)
    return _prediction(printed_json("simulate", words, flags, stdin))


def emit(plan: PlanLike, **flags: Value) -> dict[str, Any]:
    """The plan as settings of a framework: to="fsdp2", and output=FOLDER to write files; what `shardwright emit --json` prints."""
    words, stdin = plan_words(plan)
    return printed_json("emit", words, flags, stdin)


def _in_file(folder: str, name: str, document: Mapping[str, Any]) -> str:
    path = os.path.join(folder, "".join(c if c.isalnum() or c in "-_." else "_" for c in name) + ".json")
    outside.write(path, json.dumps(document, default=as_dictionary))
    return path


def plan(job: Any = None, *, model: Any = None, cluster: Optional[ClusterLike] = None, **flags: Value) -> Plan:
    """The best plan that fits, or the one that the keywords describe; those are the flags of `shardwright plan`.

    job: what describe() returned, or what `model` takes: a name of the zoo, a file, or a config.json as a mapping. With a job the
    search is on unless a keyword says a choice of the plan (micro_batch, wrap, ...), as on the command line with --global-batch.
    """
    described: dict[str, Any] = {}
    if job is not None:
        if model is not None:
            raise UsageError("plan: got a job and model=, expected one of them")
        described = dict(getattr(job, "flags", {}))
        model = getattr(job, "model", job)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        if isinstance(model, Mapping):
            model = _in_file(folder, getattr(job, "name", None) or model.get("model_type") or "model", model)
        if isinstance(cluster, Mapping):
            cluster = _in_file(folder, "cluster", cluster)
        printed = printed_json("plan", [], {**described, "model": model, "cluster": cluster, **flags})
    return _planned(printed)


def _planned(printed: dict[str, Any]) -> Plan:
    file = printed.get("plan_file")
    if file is None and printed.get("file"):
        with open(printed["file"], encoding="utf-8") as written:
            file = json.load(written)
    prediction = simulate(file) if file is not None else None
    return Plan(model=printed["model"], cluster=printed["cluster"], ranks=printed["ranks"],
                fits=prediction is not None and prediction.fits, file=file, prediction=prediction, printed=printed)


def load(path: Union[str, "os.PathLike[str]"]) -> Plan:
    """A plan file, with what is predicted of it."""
    with open(path, encoding="utf-8") as written:
        return _of_file(json.load(written), path)


def _of_file(file: dict[str, Any], path: Optional[PlanLike] = None) -> Plan:
    prediction = simulate(file if path is None else path)
    return Plan(model=prediction["model"], cluster=prediction["cluster"], ranks=prediction["ranks"], fits=prediction.fits, file=file,
                prediction=prediction, printed={**prediction.printed, "plan_file": file})


def compare(plan: PlanLike, *traces: Union[str, "os.PathLike[str]"], **flags: Value) -> Comparison:
    """A run's traces, ours or PyTorch's, beside the prediction of its plan; keywords are the flags of `shardwright compare`."""
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        if isinstance(plan, Mapping):  # compare reads no plan from standard input
            plan = _in_file(folder, "plan", plan.get("plan_file", plan))
        printed = printed_json("compare", [*plan_words(plan)[0], *map(os.fsdecode, traces)], flags)
    if "step_time" not in printed:
        raise InputError("; ".join(printed["findings"]))
    times = printed["step_time"]
    return Comparison(predicted_step_time=times["simulated_s"], measured_step_time=times["measured_s"], gap=times["gap"],
                      findings=printed["findings"], parts=printed["parts"], printed=printed)


def advise(*traces: Union[str, "os.PathLike[str]"], plan: Optional[PlanLike] = None, **flags: Value) -> AdviceReport:
    """What the job that was traced should change; keywords are the flags of `shardwright advise`.

    traces: of PyTorch's profiler (one file per rank, or their folder), or one of `shardwright run`, which carries its plan. With the
    plan of the job each change and the best plan are simulated.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        if isinstance(plan, Mapping):
            plan = _in_file(folder, "plan", plan.get("plan_file", plan))
        printed = printed_json("advise", [os.fsdecode(trace) for trace in traces], {"plan": plan, **flags})
    if "advice" not in printed:
        raise InputError("; ".join(printed["notes"]))
    better = printed["better"]
    return AdviceReport(
        step_time=printed["costs"]["step_s"], exposed_communication=printed["costs"]["exposed_comm_s"],
        has_fsdp_problem=printed["has_fsdp_problem"],
        advice=[Advice(topic=one["topic"], what=one["what"], seen=one["seen"], how=one["how"], effort=one["effort"], gain=one["gain"],
                       band=one["band"], more_memory=one["more_memory_bytes"]) for one in printed["advice"]],
        better=None if better is None else _of_file(better["plan_file"]), gain=better["gain"] if better else 0.0,
        band=better["band"] if better else 0.0, patch=better["patch"] if better else "", text=printed["text"], printed=printed)


def here() -> ClusterLike:
    """The cluster of this machine: its GPUs as they are connected, or "host", its cores, where there is none.

    Raises MachineError for a GPU that the catalog does not have, or whose links cannot be seen."""
    probed = commands.topo("probe")
    gpus = [line for line in probed["seen"] if line.startswith("GPU ")]
    if probed["cluster"] is None and gpus:
        raise MachineError(f"{gpus[0]} is there, but not {probed['not_seen'][-1]}")
    return probed["cluster"] if probed["cluster"] is not None else "host"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def why(plan: Plan) -> str:
    lines = []
    if plan.prediction is None:
        floor = plan.printed["floor"]
        least = (f"the least memory found is {_size(floor['memory_bytes'])}: {floor['label']}" if floor["label"] else
                 "of no plan that was tried the memory is known")
        lines.append(f"No plan of {plan.model} on {plan.cluster} fits into {_size(plan.printed['memory_limit_bytes'])} per GPU; {least}.")
        for fix in plan.printed["fixes"]:
            lines.append(f"It fits with {fix['change']}: {fix['step_time_s']:.4g} s a step, {_size(fix['memory_bytes'])}.")
    else:
        p = plan.prediction
        lines.append(f"{plan.model} on {plan.cluster}, {plan.ranks} ranks: {p.step_time:.4g} s a step, of it "
                     f"{p.exposed_communication:.3g} s communication that nothing hides.")
        lines += [f"It does not fit: {misfit}" for misfit in p.misfits]
        memory = p.memory
        lines.append(f"Memory at the peak ({memory.place}): {_size(memory.peak)} in buffers, {_size(memory.reserved)} reserved, "
                     f"{_size(memory.outside)} outside, of {_size(memory.usable)}: " +
                     ", ".join(f"{name} {_size(size)}" for name, size in sorted(memory.at_peak.items(), key=lambda row: -row[1]) if size)
                     + ".")
        for name, seconds in sorted(p["time"]["compute_waits_for_s"].items(), key=lambda row: -row[1]):
            if seconds > 0:
                lines.append(f"Compute waits {seconds:.3g} s for {name}.")
    for row in plan.printed.get("rejected", []):
        best = f", best {row['best_time_s']:.4g} s" if row["best_time_s"] > 0 else ""
        missing = f", at least {_size(row['least_deficit_bytes'])} missing" if row["least_deficit_bytes"] > 0 else ""
        lines.append(f"Not chosen: {row['family']} ({row['reason']}, {row['count']} plans{best}{missing}).")
    return "\n".join(lines)
