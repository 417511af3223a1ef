// The figures and tables of a report, made from its data.
"use strict";

const showFigures = (data) => {
  const {formatBytes, formatSeconds, formatPercent} = units;
  const {element, table} = tables;
  const {figures, prediction, plan, comparison, plan_picture: picture} = data;
  const MOST_ROWS = 8;
  const put = (id, ...children) => document.getElementById(id).replaceChildren(...children);
  const tableOf = (caption, head, rows, numbers) => rows.length === 0 ? [] : [table(caption, head, rows, numbers)];
  const named = (name) => name.replaceAll("_", " ");

  // A run changes three of them: "step time", or "step time, simulated" with "step time, measured".
  const timesOf = (suffix, seconds, speed) => [[`step time${suffix}`, formatSeconds(seconds)],
    [`tokens/s per GPU${suffix}`, String(Math.round(figures.tokens_per_s_per_gpu * speed))], [`MFU${suffix}`, formatPercent(figures.mfu * speed)]];
  const measuredStep = comparison?.measured_step_s;
  const cards = [...timesOf(comparison === undefined ? "" : ", simulated", figures.step_time_s, 1),
    ...(comparison === undefined ? [] : timesOf(", measured", measuredStep, figures.step_time_s / measuredStep)),
    ["exposed communication", formatSeconds(figures.exposed_comm_s)], ["allocated at the peak", formatBytes(figures.peak_allocated_bytes)],
    ["reserved", formatBytes(figures.peak_reserved_bytes)], ["outside the allocator", formatBytes(figures.outside_allocator_bytes)],
    ["usable", formatBytes(figures.usable_device_bytes)]];
  put("figures", element("dl", null, ...cards.map(([name, value]) => element("div", null, element("dt", name), element("dd", value)))));

  // Other profilers record sums only.
  const hasCategories = !data.recordings.some((recording) => recording.bars !== undefined);
  const measuredPeak = comparison?.memory.measured_peak_bytes;
  const measured = (bytes, isKnown) => comparison === undefined ? [] : [isKnown ? formatBytes(bytes) : ""];
  const peaks = Object.entries(prediction.memory.at_peak).map(([name, bytes]) => [name, bytes, comparison?.memory.at_peak[name].measured_bytes]);
  put("memory-table", ...tableOf("At the peak of any step", ["category", "simulated", ...(comparison === undefined ? [] : ["measured"])], [
    ...peaks.filter(([, bytes, run]) => bytes > 0 || run > 0).map(([name, bytes, run]) => [named(name), formatBytes(bytes), ...measured(run, hasCategories)]),
    ["all", formatBytes(prediction.memory.peak_allocated_bytes), ...measured(measuredPeak, hasCategories || measuredPeak > 0)]], [1, 2]));

  drawUnits(document.getElementById("units-picture"), picture);
  put("unit-count", `${picture.units.length} units`);
  put("unit-table", ...tableOf("", ["unit", "parameters", "gathered", "resharded after forward", "recomputed"], picture.units.map((row) =>
    [row.name, String(row.parameters), formatBytes(row.gathered_bytes), row.reshard, row.recompute]), [1, 2]));

  const shares = (caption, rows) => tableOf(caption, ["what", "time", "of the step", "stretches"], rows.slice(0, MOST_ROWS).map((row) =>
    [`${row.op}${row.unit === "" ? "" : ` of ${row.unit}`} in ${row.phase}${row.use === "run" ? "" : `, ${row.use}`}`,
      formatSeconds(row.time_s), formatPercent(row.time_s / figures.step_time_s), String(row.count)]), [1, 2, 3]);
  put("time-tables", ...shares("The critical path: making anything else faster does not help", prediction.time.critical_path),
    ...shares("What the compute stream waited for, in the end", prediction.time.compute_waits_for));

  const plans = (caption, head, rows) => tableOf(caption, [head, "step time", "memory", ""], rows.map((row) =>
    [row.label, formatSeconds(row.step_time_s), formatBytes(row.memory_bytes), row.chosen ? "chosen" : ""]), [1, 2]);
  const showChoices = () => {
    document.getElementById("choices").hidden = false;
    put("rejected", ...tableOf("Not chosen", ["family", "reason", "plans", "best", "missing at least"], data.rejected.map((row) =>
      [row.family, row.reason, String(row.count), row.best_time_s > 0 ? formatSeconds(row.best_time_s) : "",
        row.least_deficit_bytes > 0 ? formatBytes(row.least_deficit_bytes) : ""]), [2, 3, 4]));
    put("choice-tables", ...plans("From fast to frugal", "plan", data.pareto), ...plans("What if", "change", data.what_if));
    if (data.pareto.length > 0) {
      drawPareto(document.getElementById("pareto"), data.pareto);
    }
  };
  if (data.pareto !== undefined) {
    showChoices();
  }

  const showComparison = (c) => {
    const pair = (row) => [formatSeconds(row.simulated_s), formatSeconds(row.measured_s)];
    const difference = (row) => (row.measured_s < row.simulated_s ? "-" : "+") + formatSeconds(Math.abs(row.measured_s - row.simulated_s));
    const sentences = [`${c.measured_steps} steps on ${c.ranks} ranks were measured, from ${formatSeconds(c.step_time.measured_shortest_s)} to ` +
      `${formatSeconds(c.step_time.measured_longest_s)}; ${c.matched} of ${c.spans} spans matched.`,
    ...c.findings.map((finding) => `Contradicts the program: ${finding}`), ...c.notes];
    document.getElementById("comparison").hidden = false;
    put("comparison-body", ...sentences.map((text) => element("p", text)),
      ...tableOf("The step, seen from the compute stream: largest difference first", ["part", "simulated", "measured", "difference"],
        c.parts.map((row) => [row.name, ...pair(row), difference(row)]), [1, 2, 3]),
      ...tableOf("Ops with the largest difference", ["op", "simulated", "measured"],
        c.ops.slice(0, MOST_ROWS).map((row) => [row.name, ...pair(row)]), [1, 2]),
      ...tableOf("Compute of a unit, kernel by kernel in other profilers: largest difference first",
        ["unit", "pass", "micro-batch", "simulated", "measured"], c.segments.slice(0, MOST_ROWS).map((row) =>
          [row.unit || "all", row.phase, row.phase === "opt" ? "" : String(row.micro_batch), ...pair(row)]), [2, 3, 4]));
  };
  if (comparison !== undefined) {
    showComparison(comparison);
  }

  const made = plan.plan;
  put("input-tables", table("The job", ["input", "value"], [["model", `${prediction.model} (${data.inputs.model_hash})`],
    ["cluster", `${prediction.nodes} x ${prediction.cluster}, ${prediction.ranks} x ${data.inputs.gpu}`], ["kernel set", prediction.kernel_set],
    ["profile", prediction.profile], ["sequence length", String(prediction.sequence_length)]], []),
  table("The plan", ["input", "value"], [["dialect", prediction.dialect], ["mesh", `${made.shard_size} shards x ${made.replicate_size} replicas`],
    ["batch", `${made.micro_batch} per micro-batch x ${made.accumulation} micro-batches`], ["plan file", data.inputs.plan_hash]], []));
};
