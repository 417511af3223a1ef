"""Fits the numbers of profiles to measured steps.

Runs on one chip (A100 of 40 and of 80 GB are one) by one framework are fitted together. A stack is a GPU type with a kernel set; stacks
share all numbers but a few. The search works on logarithms of numbers and sees log(predicted / measured) of every row: Gauss-Newton with
a trust region first, since these errors are nearly linear in the numbers, then NLopt's Subplex on the simulator itself. A fit without
some rows starts from the base profiles like the one with all: nothing of the rows left out gets into it.
"""

import ctypes
import ctypes.util
import json
import math
import subprocess
import sys

import numpy

from lab import base

# What a number may become, and what is expected of one that profiles leave at 0 (0: what the base profile says). The greatest slowdown
# of a product beside a gather that was published is 1.4 (H100, arXiv 2507.03114): compute_sensitivity 2.2.
BOUNDS = (("compute.gemm.", 0.3, 0.95, 0), ("compute.attention_", 0.08, 0.9, 0), ("compute.triton_attention_", 0.08, 0.9, 0),
          ("compute.fp8_rowwise", 0.5, 1, 0.9), ("compute.elementwise", 0.2, 0.95, 0), ("compute.reduction", 0.2, 0.95, 0),
          ("compute.optimizer", 0.05, 0.95, 0), ("compute.rank_spread", 0.0005, 0.03, 0.01), ("host.step", 1e-4, 0.1, 5e-3),
          ("overlap.compute_sensitivity", 0.1, 2.2, 0))
OTHER_FACTOR = 10  # any other number may be up to this factor away from what the base profile says
DEFAULT_NUMBERS = ("compute.gemm.bf16", "compute.elementwise", "compute.attention_forward", "compute.attention_backward",
                   "compute.reduction", "overlap.compute_sensitivity", "compute.rank_spread", "host.step")
FEWEST_ROWS = 4
ERROR_SCALE = 0.01  # errors of about this size are expected; larger ones count linearly, not squared
# A number that is this factor away from what was expected counts like one row with an error of ERROR_SCALE: where rows do not tell,
# numbers stay what they were. FOLLOW_WIDTH is the same for the difference of a number's deviation to that of those that it follows.
PRIOR_WIDTH, FOLLOW_WIDTH = math.log(2.0), math.log(1.25)
REACH = 0.5  # neither a step nor the search after them goes further than this from where it began


# NLopt


def nlopt():
    name = ctypes.util.find_library("nlopt") or ctypes.util.find_library("nlopt_cxx")
    if not name:
        raise base.UsageError("fits need the library NLopt (Debian: libnlopt0)")
    library = ctypes.CDLL(name)
    library.nlopt_create.restype = ctypes.c_void_p
    return library


OBJECTIVE = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_uint, ctypes.POINTER(ctypes.c_double), ctypes.c_void_p, ctypes.c_void_p)
ROUNDOFF_LIMITED = -4


class Search:
    """Minimises a function within bounds by Subplex, again and again from the best point, until nothing is gained."""

    def __init__(self, objective, lower, upper, start, most):
        self.objective, self.lower, self.upper, self.most = objective, lower, upper, most
        self.values = [min(max(value, low), high) for value, low, high in zip(start, lower, upper)]
        self.best = objective(self.values)
        self.evaluations = 1
        while self.evaluations < most:
            before = self.best
            self.once()
            if not self.best < before * (1 - 1e-6):
                break

    def once(self):
        library, count = nlopt(), len(self.values)
        array = ctypes.c_double * count
        optimizer = ctypes.c_void_p(library.nlopt_create(library.nlopt_algorithm_from_string(b"LN_SBPLX"), ctypes.c_uint(count)))
        failures = []

        def call(_count, values, _gradient, _data):
            self.evaluations += 1
            try:
                return self.objective(values[:count])
            except BaseException as error:  # must not pass through the library
                failures.append(error)
                library.nlopt_force_stop(optimizer)
                return 0.0
        function = OBJECTIVE(call)
        library.nlopt_set_lower_bounds(optimizer, array(*self.lower))
        library.nlopt_set_upper_bounds(optimizer, array(*self.upper))
        # Steps of a tenth of the range; a search that starts on a bound goes inwards by itself.
        library.nlopt_set_initial_step(optimizer, array(*((high - low) / 10 for low, high in zip(self.lower, self.upper))))
        library.nlopt_set_min_objective(optimizer, function, None)
        library.nlopt_set_xtol_rel(optimizer, ctypes.c_double(1e-6))
        library.nlopt_set_maxeval(optimizer, self.most - self.evaluations)
        values, found = array(*self.values), ctypes.c_double(0)
        result = library.nlopt_optimize(optimizer, values, ctypes.byref(found))
        library.nlopt_destroy(optimizer)
        if failures:
            raise failures[0]
        if result <= 0 and result != ROUNDOFF_LIMITED:
            raise RuntimeError(f"NLopt failed with {result}")
        if found.value < self.best:
            self.best, self.values = found.value, list(values)


# The program


class Simulations:
    """`shardwright validate` of a list with "repeat": step times at points."""

    def __init__(self, program, path, flags):
        self.process = subprocess.Popen([program, "validate", path, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(self.process.wait())
        self.about = json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def times(self, points, rows):
        self.process.stdin.write(json.dumps({"points": points, "rows": rows}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


# Groups and numbers


class Variable:
    """One number of one stack, or of all stacks of a group. Bounds and start are logarithms."""

    def __init__(self, path, stack, is_shared, bounds, is_time):
        self.path, self.stack, self.is_shared, self.is_time = path, stack, is_shared, is_time
        self.lower, self.upper, self.start = map(math.log, bounds)
        self.follows = []  # variables whose mean deviation this one shares
        # A shared number that stands, in each stack, as far from what the base profile says as the stack's own number at this path does,
        # besides its own deviation; None: it is one value.
        self.moves_with = None


class Group:
    """Rows of one chip and framework."""

    def __init__(self, simulations, family):
        self.simulations, self.family = simulations, family
        self.rows = []  # (index in the list, run, stack)
        self.stacks = []  # (GPU, kernel set)
        self.variables = []
        self.evaluations = 0  # simulations of all rows

    @property
    def gpus(self):
        return ", ".join(dict.fromkeys(gpu for gpu, _ in self.stacks))

    def profile(self, stack):
        return self.simulations.about["profiles"][self.stacks[stack][0]]

    def add(self, index, run, gpu, kernel_set):
        if (gpu, kernel_set) not in self.stacks:
            self.stacks.append((gpu, kernel_set))
        self.rows.append((index, run, self.stacks.index((gpu, kernel_set))))

    def add_variables(self, numbers, own):
        for path in numbers:
            for stack in range(len(self.stacks) if path in own else 1):
                self.add_variable(path, stack, path not in own)
        self.link()

    def add_variable(self, path, stack, is_shared):
        known = self.profile(stack)["numbers"]
        product = "compute.gemm.fp8" if path == "compute.fp8_rowwise" else path
        if is_gemm(product) and product not in known:
            return  # a dtype that these GPUs do not multiply
        if path not in known:
            raise base.InputError("--numbers", f'"{path}"', 'a number of a profile such as "compute.gemm.bf16"')
        value = known[path]["value"]
        lower, upper, expected = next((row[1:] for row in BOUNDS if path.startswith(row[0])), (value / OTHER_FACTOR, value * OTHER_FACTOR, 0))
        expected = expected or value
        if expected <= 0:
            raise base.InputError("--numbers", f'"{path}"', "a number that the base profile has")
        self.variables.append(Variable(path, stack, is_shared, (lower, upper, min(max(expected, lower), upper)), known[path]["is_time"]))

    def at(self, path):
        return [k for k, variable in enumerate(self.variables) if variable.path == path]

    def link(self):
        """Numbers with one cause move together. Stacks of one framework run the same kernels. What keeps matrix products below the peak
        (clocks under the power limit, heat) does so for all dtypes: the fractions of further dtypes follow those of the first one. Where
        the first one is each stack's own and the further one shared, what is shared is their ratio: a GPU with a lower power limit has
        slower products in both. Attention's two passes are one library."""
        first = next((variable.path for variable in self.variables if is_gemm(variable.path)), None)
        for variable in self.variables:
            if is_gemm(variable.path) and variable.path != first:
                if variable.is_shared and not self.variables[self.at(first)[0]].is_shared:
                    variable.moves_with = first
                else:
                    variable.follows = self.at(first)
            elif variable.path.endswith("attention_backward"):
                variable.follows = self.at(variable.path.removesuffix("backward") + "forward")
            elif not variable.is_shared:
                variable.follows = self.at(variable.path)

    def log_value(self, stack, point, k):
        value = point[k]
        for other, first in enumerate(self.variables):
            if first.path == self.variables[k].moves_with and first.stack == stack:
                value += point[other] - first.start
        return value

    def values(self, stack, point):
        return {variable.path: math.exp(self.log_value(stack, point, k)) for k, variable in enumerate(self.variables)
                if variable.is_shared or variable.stack == stack}

    def errors(self, questions):
        """For each (point, mask of rows): log(predicted / measured) by row, 0 outside the mask."""
        points, asked = [], []
        for point, mask in questions:
            begin = len(points)
            points += [self.values(stack, point) for stack in range(len(self.stacks))]
            asked += [(index, begin + stack) for (index, _, stack), wanted in zip(self.rows, mask) if wanted]
        times = iter(self.simulations.times(points, asked))
        return [numpy.array([math.log(next(times) / run["step_time_s"]) if wanted else 0.0 for (_, run, _), wanted in zip(self.rows, mask)])
                for _, mask in questions]


def is_gemm(path):
    """"compute.gemm.fp8", a dtype that exists but that some GPUs lack."""
    return path.removeprefix("compute.gemm.") in ("fp32", "tf32", "fp16", "bf16", "fp8") and path.count(".") == 2


# The search


def linearise(group, point, mask):
    """(point, errors there, slopes by variable): forward differences."""
    questions, steps = [(point, mask)], []
    for k, variable in enumerate(group.variables):
        steps.append(-0.03 if point[k] + 0.03 > variable.upper else 0.03)
        moved = list(point)
        moved[k] += steps[-1]
        rows = [wanted and (variable.is_shared or stack == variable.stack) for wanted, (_, _, stack) in zip(mask, group.rows)]
        questions.append((moved, rows))
    errors, *others = group.errors(questions)
    group.evaluations += len(questions)
    slopes = [numpy.where(rows, (other - errors) / step, 0) for (_, rows), other, step in zip(questions[1:], others, steps)]
    return point, errors, slopes


def prior(group, point):
    total = 0.0
    deviations = [value - variable.start for value, variable in zip(point, group.variables)]
    for variable, deviation in zip(group.variables, deviations):
        own = deviation / PRIOR_WIDTH
        total += own * own
        if variable.follows or variable.moves_with:
            followed = 0.0  # what moves with another number is its deviation from that one already
            for other in variable.follows:
                followed += deviations[other] / len(variable.follows)
            apart = (deviation - followed) / FOLLOW_WIDTH
            total += apart * apart
    return total


def objective(group, errors, point, mask):
    z = errors / ERROR_SCALE
    losses = 2 * (numpy.sqrt(1 + z * z) - 1)
    return float(numpy.add.accumulate(numpy.concatenate(([prior(group, point)], losses[mask])))[-1])


def search(group, function, point, reach, most):
    return Search(function, [max(v.lower, at - reach) for v, at in zip(group.variables, point)],
                  [min(v.upper, at + reach) for v, at in zip(group.variables, point)], point, most)


def step(group, linear, mask, reach):
    """The best point at most `reach` away if errors were straight lines."""
    at, errors, slopes = linear

    def there(point):
        moved = errors
        for value, before, slope in zip(point, at, slopes):
            moved = moved + (value - before) * slope
        return objective(group, moved, point, mask)
    return search(group, there, at, reach, 20000).values


def approach(group, mask):
    """Gauss-Newton with a trust region from where the base profiles are."""
    linear = linearise(group, [variable.start for variable in group.variables], mask)
    reach = REACH
    for _ in range(20):
        if reach < 0.01:
            break
        point = step(group, linear, mask, reach)
        errors, = group.errors([(point, mask)])
        group.evaluations += 1
        if objective(group, errors, point, mask) < (1 - 1e-3) * objective(group, linear[1], linear[0], mask):
            linear = linearise(group, point, mask)
            reach = min(2 * reach, REACH)
        else:
            reach /= 4
    return linear


def fit_rows(group, mask):
    """Errors have corners where another op becomes the critical path, at which straight lines stop: from there the simulator is asked."""
    near, *_ = approach(group, mask)
    found = search(group, lambda point: objective(group, group.errors([(point, mask)])[0], point, mask), near, REACH, 300)
    group.evaluations += found.evaluations
    return linearise(group, found.values, mask)


# What is left out


def folds_of(group, about, what):
    """What is left out together, by row; rows of "" never are."""
    runs = [run for _, run, _ in group.rows]
    if what == "model":
        gpus = [about[index]["gpus"] for index, _, _ in group.rows]
        kinds = ([run["model"] for run in runs], [f"{run['model']} on {count} GPUs" for run, count in zip(runs, gpus)])
        return next((names for names in kinds if len(set(names)) > 1), [run["variant"] for run in runs])
    models = {}
    for run in runs:
        models.setdefault(run["source"], set()).add(run["model"])
    if what == "source":
        return [run["source"] if len(models) > 1 else "" for run in runs]
    return [f"{run['source']}, {run['model']}" if len(models[run["source"]]) > 1 else "" for run in runs]


def spread_for(slopes, errors):
    """Half-width of all numbers that makes bands cover nine tenths of `errors`: the band of a row is spread * sqrt(sum of squared
    slopes)."""
    ratios = []
    for i, error in errors.items():
        squares = 0.0
        for slope in slopes:
            squares += float(slope[i]) * float(slope[i])
        ratios.append(abs(error) / math.sqrt(squares))
    return base.quantile(ratios, 0.9) if ratios else 0


def fit_group(group, leave_out, fit):
    everything = numpy.full(len(group.rows), True)
    best, errors, slopes = fit_rows(group, everything)
    name = f"{group.gpus}, {group.family}: "
    print(f"{name}{len(group.rows)} rows fitted", file=sys.stderr)
    folds = folds_of(group, group.simulations.about["runs"], leave_out) if leave_out != "none" else []
    left = {}
    for fold in sorted(set(folds) - {""}):
        mask = numpy.array([other != fold for other in folds])
        at, *_ = fit_rows(group, mask)
        there, = group.errors([(at, ~mask)])
        left.update({i: float(there[i]) for i in range(len(folds)) if not mask[i]})
        fit["left_out"].append({"gpu": group.gpus, "framework": group.family, "model": fold,
                                "errors": base.statistics([math.expm1(left[i]) for i in range(len(folds)) if not mask[i]], "rows")})
        print(f"{name}fitted without {fold}", file=sys.stderr)
    left = dict(sorted(left.items()))
    left_out_error = 0.0
    for i, error in left.items():
        row = group.rows[i][1]
        fit["left_out_rows"].append({"id": row["id"], "source": row["source"], "error": math.expm1(error)})
        left_out_error += abs(math.expm1(error)) / len(left)
    spread = spread_for(slopes, left)
    for stack in range(len(group.stacks)):
        fit["stacks"].append(fitted_stack(group, stack, best, errors, spread, left_out_error))
    fit["evaluations"] += group.evaluations


def fitted_stack(group, stack, best, errors, spread, left_out_error):
    gpu, kernel_set = group.stacks[stack]
    own = [math.expm1(error) for error, (_, _, of) in zip(errors, group.rows) if of == stack]
    counts = {}
    for index, _, of in group.rows:
        if of == stack:
            name = group.simulations.about["runs"][index]["kernel_set"]
            counts[name] = counts.get(name, 0) + 1
    numbers = [{"path": v.path, "value": math.exp(group.log_value(stack, best, k)), "lower": math.exp(v.lower), "upper": math.exp(v.upper),
                "expected": math.exp(v.start), "shared": v.is_shared, "is_time": v.is_time}
               for k, v in enumerate(group.variables) if v.is_shared or v.stack == stack]
    return {"gpu": gpu, "kernel_set": kernel_set, "base": group.profile(stack), "runs": counts, "spread": spread, "numbers": numbers,
            "sources": sorted({run["source"] for _, run, _ in group.rows}), "left_out_error": left_out_error,
            "errors": base.statistics(own, "rows")}


def fit_runs(simulations, runs, numbers, own, one_per_gpu=False, leave_out="model", skipped=0):
    """Fits every group of at least FEWEST_ROWS rows. Deterministic."""
    fit = {"stacks": [], "left_out": [], "left_out_rows": [], "skipped": skipped, "evaluations": 0}
    groups = {}
    for index, (run, about) in enumerate(zip(runs, simulations.about["runs"])):
        if not run["step_time_s"] > 0 or "error" in about:
            fit["skipped"] += 1
            continue
        family = about["kernel_set"].split("-")[0]
        group = groups.setdefault((about["chip"], family), Group(simulations, family))
        group.add(index, run, about["gpu"], family if one_per_gpu else about["kernel_set"])
    for _, group in sorted(groups.items()):
        if len(group.rows) < FEWEST_ROWS:
            fit["skipped"] += len(group.rows)
            continue
        group.add_variables(numbers, own)
        fit_group(group, leave_out, fit)
    if not fit["stacks"]:
        raise base.InputError("table", f"no chip and framework with {FEWEST_ROWS} rows that have a step time", "more rows")
    return fit


# Profiles


def to_three_digits(value):
    """More than the rows determine."""
    scale = 1.0
    while 0 < value * scale < 100:
        scale *= 10
    return math.floor(value * scale + 0.5) / scale if value > 0 else 0.0


def profile_of(stack, source, date):
    """A profile file for a fitted stack: what it extends and the numbers found. A profile's own list of matrix-product rates replaces that
    of the profile it extends, so the rates that were not fitted are repeated."""
    name = f"{stack['gpu']}-{stack['kernel_set']}"
    rows = sum(stack["runs"].values())
    root = {"format": "shardwright-profile", "version": 1, "name": name,
            "description": f"{stack['gpu']}, {stack['kernel_set']}, fitted to {rows} published runs", "extends": stack["base"]["name"],
            "architecture": stack["gpu"], "kernel_set": stack["kernel_set"]}
    if stack["spread"] > 0:  # models were left out
        root["fit"] = {"gpu": stack["gpu"], "runs": dict(sorted(stack["runs"].items())), "sources": stack["sources"],
                       "left_out_error": to_three_digits(stack["left_out_error"])}
    for number in stack["numbers"]:
        *parents, last = number["path"].split(".")
        at = root
        for key in parents:
            at = at.setdefault(key, {})
        value = base.seconds_text(number["value"]) if number["is_time"] else to_three_digits(number["value"])
        at[last] = {"value": value, "kind": "fitted", "source": source, "date": date}
        if stack["spread"] > 0:
            at[last]["spread"] = to_three_digits(stack["spread"])
    if rates := root.get("compute", {}).get("gemm"):
        rates.update({key: rate for key, rate in stack["base"]["gemm"].items() if key not in rates})
    return json.dumps(root, indent=2) + "\n"


# Reports


def by_source(fit):
    errors = {}
    for row in fit["left_out_rows"]:
        errors.setdefault(row["source"], []).append(row["error"])
    return {source: base.statistics(values, "rows") for source, values in sorted(errors.items())}


def report_of(fit):
    return base.report(
        "shardwright-fit",
        stacks=[{"gpu": stack["gpu"], "kernel_set": stack["kernel_set"], "spread": stack["spread"],
                 "numbers": [{key: number[key] for key in ("path", "value", "lower", "upper", "expected", "shared")}
                             for number in stack["numbers"]], "errors": stack["errors"]} for stack in fit["stacks"]],
        left_out=fit["left_out"], cross_validation=base.statistics([row["error"] for row in fit["left_out_rows"]], "rows"),
        cross_validation_by_source=by_source(fit), left_out_rows=[{"id": row["id"], "error": row["error"]} for row in fit["left_out_rows"]],
        skipped=fit["skipped"])


def text_of(fit):
    numbers = [["GPU", "kernel set", "number", "value", "expected", "from", "to", ""]]
    stacks = [["GPU", "kernel set", "spread", "rows", "mean", "median", "p90", "worst", "bias"]]
    for stack in fit["stacks"]:
        of = [stack["gpu"], stack["kernel_set"]]
        for number in stack["numbers"]:
            shown = base.seconds_text if number["is_time"] else "{:.3g}".format
            numbers.append([*of, number["path"], *(shown(number[key]) for key in ("value", "expected", "lower", "upper")),
                            "shared" if number["shared"] else ""])
        stacks.append([*of, base.percent(stack["spread"]), *base.error_cells(stack["errors"], "rows")])
    text = ("Numbers\n" + base.table("lllrrrrl", numbers) + "\nErrors of the rows that were fitted\n" + base.table("llrrrrrrr", stacks))
    if fit["left_out_rows"]:
        rows = [["GPU", "framework", "left out", *stacks[0][3:]]]
        rows += [[row["gpu"], row["framework"], row["model"], *base.error_cells(row["errors"], "rows")] for row in fit["left_out"]]
        rows += [["all", "of " + source, "each in turn", *base.error_cells(s, "rows")] for source, s in by_source(fit).items()]
        rows.append(["all", "all", "each in turn",
                     *base.error_cells(base.statistics([row["error"] for row in fit["left_out_rows"]], "rows"), "rows")])
        text += "\nErrors of rows that were left out\n" + base.table("lllrrrrrr", rows)
    return f"{text}\n{fit['evaluations']} simulations of all rows of a group, {fit['skipped']} rows skipped\n"
