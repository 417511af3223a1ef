// The answer in words and tables. All texts are set as text, never as markup.
"use strict";

const answer = (() => {
  const byId = (id) => document.getElementById(id);
  const {formatTime, formatBytes} = units;
  const {element, table} = tables;
  const seconds = (value) => formatTime(value * 1e9);
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const count = (value) => Math.round(value).toLocaleString("en");

  // [name, value] or [name, value, how sure that is].
  const showFigures = (figures) => byId("figures").replaceChildren(...figures.map(([name, value, note = ""]) =>
    element("div", null, element("dt", name), element("dd", value, ...(note === "" ? [] : [element("small", note)])))));

  // "1.2 days", "3.4 h"
  const duration = (value) => value >= 172800 ? `${(value / 86400).toFixed(1)} days` : value >= 7200 ? `${(value / 3600).toFixed(1)} h` :
    `${(value / 60).toFixed(1)} min`;
  const numberIn = (id) => {
    const value = Number(byId(id).value);
    return byId(id).value.trim() !== "" && Number.isFinite(value) && value > 0 ? value : null;
  };
  const costOf = (simulation) => {
    const tokens = numberIn("tokens"), price = numberIn("price");
    if (tokens === null) {
      return [];
    }
    const time = tokens / (simulation.tokens_per_s_per_gpu * simulation.ranks);
    const hours = time / 3600 * simulation.ranks;
    return [[`for ${tokens.toExponential().replace("e+", "e")} tokens`, `${duration(time)}, ${count(hours)} GPU-hours`],
      ...(price === null ? [] : [["cost", count(hours * price)]])];
  };

  // `search` is null where the plan was chosen by hand.
  const show = (search, simulation, report) => {
    const memory = simulation.memory;
    const band = search !== null && search.step_time_band !== undefined ? search.step_time_band : null;
    byId("title").textContent = report.title;
    byId("verdict").textContent = report.verdict;
    byId("verdict").className = simulation.fits ? "yes" : "no";
    const per = simulation.tokens_per_s_per_gpu;
    showFigures([
      ["step time", seconds(simulation.step_time_s), band === null ? "" : `± ${percent(band)}`],
      ["tokens/s per GPU", count(per), band === null ? "" : `${count(per / (1 + band))} to ${count(per / (1 - band))}`],
      ["tokens/s", count(per * simulation.ranks)],
      ["MFU", percent(simulation.mfu)],
      ["exposed communication", seconds(simulation.exposed_comm_s)],
      ["allocated at the peak", formatBytes(memory.peak_allocated_bytes)],
      ["reserved + outside", formatBytes(memory.peak_reserved_bytes + memory.outside_allocator_bytes)],
      ["usable", formatBytes(memory.usable_device_bytes)],
      ...(search !== null && search.proven_gap !== undefined ? [["proven gap to the best", percent(search.proven_gap)]] : []),
      ...costOf(simulation),
    ]);
    byId("confidence").textContent = `How sure: ${simulation.confidence}.`;
    const parts = Object.entries(memory.at_peak).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1])
      .map(([name, bytes]) => [name.replaceAll("_", " "), formatBytes(bytes)]);
    const tables = [table(`Memory at its peak (${memory.peak_place})`, ["what", "bytes"], parts, [1])];
    const waits = simulation.time.compute_waits_for.slice(0, 6).map((row) => [[row.op, row.unit === "" ? "" : `of ${row.unit}`,
      `in ${row.phase}`].filter((text) => text !== "").join(" "), seconds(row.time_s)]);
    if (waits.length > 0) {
      tables.push(table("What compute waits for", ["op", "time"], waits, [1]));
    }
    byId("advice-body").replaceChildren(...advice(search, simulation), ...tables);
    showUsual(search);
  };

  const advice = (search, simulation) => {
    const list = [];
    if (!simulation.fits) {
      list.push(...simulation.misfits);
    }
    for (const wait of simulation.time.critical_path.slice(0, 2)) {
      list.push(`${wait.op}${wait.unit === "" ? "" : ` of ${wait.unit}`} in ${wait.phase} takes ${seconds(wait.time_s)} of the critical path.`);
    }
    if (search !== null && search.explanation !== undefined) {
      list.push(...search.explanation.notes);
      list.push(...search.explanation.binds.filter((row) => row.gain_of_a_tenth >= 0.0005).map((row) => `A tenth more ${row.what}: ${percent(row.gain_of_a_tenth)} faster.`));
    }
    if (search !== null && search.native_step_time_s < simulation.step_time_s) {
      list.push(`Shardwright's own schedule would take ${seconds(search.native_step_time_s)} with the same choices.`);
    }
    const made = element("ul", null, ...list.map((text) => element("li", text)));
    made.className = "plain";
    return list.length > 0 ? [made] : [];
  };

  const showUsual = (search) => {
    const rows = search === null ? [] : (search.baselines || []).map((row) => [row.name,
      row.step_time_s === undefined ? "" : seconds(row.step_time_s), row.memory_bytes === undefined ? "" : formatBytes(row.memory_bytes),
      row.fits ? "fits" : row.reason]);
    byId("usual").hidden = rows.length === 0;
    byId("usual-body").replaceChildren(table("", ["settings", "step time", "memory", ""], rows, [1, 2]));
  };

  const fixesTable = (fixes) => fixes.length === 0 ? element("p", "No single change that was tried makes it fit.") :
    table("Each of these alone makes it fit", ["change", "step time", "memory", "plan"],
      fixes.map((fix) => [fix.change, seconds(fix.step_time_s), formatBytes(fix.memory_bytes), fix.label]), [1, 2]);

  // No plan fits: why, and what would do.
  const showMisfit = (search) => {
    byId("title").textContent = `${search.model} on ${count(search.ranks)} GPUs of ${search.cluster}`;
    const floor = search.floor;
    const isOverHost = floor.status === "over host memory";
    byId("verdict").className = "no";
    byId("verdict").textContent = `Does not fit: no plan fits into ${formatBytes(search.memory_limit_bytes)} per GPU` +
      (isOverHost ? " and the nodes' host memory." : ".") +
      (floor.label === "" ? "" : ` The least memory found is ${formatBytes(floor.memory_bytes)}: ${floor.family}, ${floor.label}.`) +
      (isOverHost ? ` It takes ${formatBytes(floor.host_memory_bytes)} of page-locked host memory per node, ` +
        `${formatBytes(floor.deficit_bytes)} too much.`
        : floor.host_deficit_bytes > 0
          ? ` Plans that offload take at least ${formatBytes(floor.host_deficit_bytes)} of page-locked host memory per node too much.` : "");
    byId("confidence").textContent = "";
    showFigures([["memory of a GPU", formatBytes(search.memory_limit_bytes)], ["least that was found", formatBytes(floor.memory_bytes)]]);
    const parts = Object.entries(floor.memory).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => [name.replaceAll("_", " "), formatBytes(bytes)]);
    byId("advice-body").replaceChildren(fixesTable(search.fixes), table("The least memory, by category", ["what", "bytes"], parts, [1]));
    showUsual(search);
  };

  // The same of `estimate`, which looked for the largest batch.
  const showEstimatedMisfit = (estimate) => {
    byId("title").textContent = `${estimate.model} on ${count(estimate.ranks)} ${estimate.gpu}`;
    byId("verdict").className = "no";
    byId("verdict").textContent = `Does not fit: ${formatBytes(estimate.deficit_bytes)} too much of ` +
      `${formatBytes(estimate.memory_limit_bytes)} even with the least memory found.`;
    byId("confidence").textContent = "";
    showFigures([["memory of a GPU", formatBytes(estimate.memory_limit_bytes)], ["least that was found", formatBytes(estimate.least_memory_bytes)]]);
    byId("advice-body").replaceChildren(fixesTable(estimate.fixes));
    showUsual(null);
  };

  const showSide = (diff) => {
    const changes = diff.changes.map((row) => [row.field + (row.alike > 1 ? ` and ${row.alike - 1} alike` : ""),
      row.before, row.after]);
    const {before, after} = diff;
    const row = (name, key, format) => ({name, kept: before[key], shown: after[key], format});
    const rows = [row("step time", "step_time_s", seconds), row("exposed communication", "exposed_comm_s", seconds),
      row("allocated at the peak", "peak_allocated_bytes", formatBytes), row("reserved", "peak_reserved_bytes", formatBytes)];
    const picture = element("figure", null);
    drawSides(picture, rows);
    byId("side-body").replaceChildren(
      table("Kept and this plan", ["", "kept", "this"],
        [...rows, row("fits", "fits", (fits) => fits ? "yes" : "no")].map(({name, kept, shown, format}) => [name, format(kept), format(shown)]), [1, 2]),
      picture,
      table("What differs", ["field", "kept", "this"], changes, []));
  };

  // A run's step beside the simulated one, and where the gap is.
  const showComparison = (file, report) => {
    const {simulated_step_s: simulated, measured_step_s: measured, parts} = report.comparison;
    const difference = (a, b) => `${b < a ? "−" : "+"}${seconds(Math.abs(b - a))}`;
    const row = ([name, a, b]) => [name, seconds(a), seconds(b), difference(a, b)];
    byId("measured-body").replaceChildren(element("p", report.verdict),
      table(`${file} against this plan`, ["", "simulated", "measured", "difference"],
        [["a step", simulated, measured], ...parts.slice(0, 10).map((part) => [part.name, part.simulated_s, part.measured_s])].map(row), [1, 2, 3]),
      element("p", "The pictures below show the simulated step and the measured one."));
  };
  // What PyTorch's allocator recorded, beside what it is predicted to hold.
  const showSnapshot = (file, snapshot, simulation) => {
    const device = snapshot.devices.reduce((most, one) => one.peak_allocated_bytes > most.peak_allocated_bytes ? one : most);
    const memory = simulation.memory;
    const row = (name, simulated, recorded) => [name, formatBytes(simulated), formatBytes(recorded),
      `${recorded < simulated ? "−" : "+"}${percent(Math.abs(recorded / simulated - 1))}`];
    const held = (title, sites) => sites.length === 0 ? [] :
      [table(title, ["what", "bytes"], sites.slice(0, 12).map((site) => [site.name, formatBytes(site.bytes)]), [1])];
    byId("measured-body").replaceChildren(
      table(`${file}, device ${device.device}, against this plan`, ["at the peak", "simulated", "recorded", "difference"],
        [row("allocated", memory.peak_allocated_bytes, device.peak_allocated_bytes),
          row("reserved", memory.peak_reserved_bytes, device.peak_reserved_bytes)], [1, 2, 3]),
      ...(device.out_of_memory > 0 ? [element("p", `It ran out of memory ${count(device.out_of_memory)} times.`)] : []),
      ...snapshot.notes.map((note) => element("p", note)),
      ...held("Recorded at the peak, by category", device.categories_at_peak), ...held("Its largest call sites", device.sites_at_peak));
  };

  const showEmission = (emission) => {
    const parts = [];
    const losses = emission.losses.map((loss) => `${loss.field}${loss.subject === "" ? "" : ` of ${loss.subject}`}: ${loss.planned} → ` +
      `${loss.emitted} (${loss.why})`);
    const lists = [["The framework will run differently:", losses], ["Left to you:", emission.by_hand]];
    for (const [title, texts] of lists) {
      if (texts.length > 0) {
        const list = element("ul", null, ...texts.map((text) => element("li", text)));
        list.className = "plain";
        parts.push(element("p", title), list);
      }
    }
    for (const file of emission.files) {
      const text = element("pre", file.text);
      text.tabIndex = 0;
      text.setAttribute("aria-label", file.name);
      const copy = element("button", `Copy ${file.name}`);
      copy.type = "button";
      copy.addEventListener("click", () => navigator.clipboard.writeText(file.text).then(() => { copy.textContent = "Copied"; },
        () => { getSelection().selectAllChildren(text); }));
      const fold = element("details", null, element("summary", file.name), text);
      parts.push(element("div", null, copy, fold));
    }
    byId("emitted").replaceChildren(...parts);
  };
  return {show, showMisfit, showEstimatedMisfit, showSide, showEmission, showComparison, showSnapshot, seconds, count};
})();
