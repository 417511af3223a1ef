// Small pictures of plans beside others. What each choice costs: the nearest other plans that `plan --explain` tried, a small picture for each choice, all with one scale.
"use strict";

// `search` is what `plan --search --explain --json` prints.
const drawCosts = (place, search) => {
  const {formatBytes, formatTime} = units;
  const WIDTH = 340, ROW = 21, TOP = 4, VALUE = 110, BARS = 90;
  const rows = search.explanation.alternatives;
  const changeOf = (row) => row.step_time_s / search.step_time_s - 1;
  const isDrawn = (row) => row.simulated && row.fits;
  // A choice that costs many times the step would press all others flat.
  const changes = rows.filter(isDrawn).map(changeOf);
  const x = d3.scaleLinear().domain([Math.min(0, ...changes), Math.min(1, Math.max(0.01, ...changes))]).range([0, BARS]).clamp(true);
  const signed = (number, text) => `${number < 0 ? "−" : "+"}${text}`;
  const shareText = (change) => signed(change, `${(100 * Math.abs(change)).toFixed(1)} %`);
  const bytesText = (row) => {
    const change = row.memory_bytes - search.memory_bytes;
    return signed(change, formatBytes(Math.abs(change)));
  };
  // Of what was not simulated only a bound is known.
  const textOf = (row) => !row.simulated ? `${shareText(changeOf(row))} or more` : !row.fits ? "does not fit" :
    `${shareText(changeOf(row))}, ${bytesText(row)}`;
  const spoken = (row) => `${row.value}: ` + (isDrawn(row) ? `step time ${formatTime(row.step_time_s * 1e9)}, ` : "") + textOf(row);

  const drawOne = ([choice, list]) => {
    const figure = d3.select(place).append("figure");
    figure.append("figcaption").text(choice + (list.some((row) => row.refitted) ? ", the rest chosen anew" : ""));
    const svg = figure.append("svg").attr("viewBox", `0 0 ${WIDTH} ${TOP + ROW * list.length}`).attr("role", "img")
      .attr("aria-label", `${choice}: ${list.map(spoken).join("; ")}`);
    const lines = svg.selectAll("g").data(list).enter().append("g").attr("transform", (_, i) => `translate(0,${TOP + ROW * i})`);
    lines.append("title").text(spoken);
    lines.append("text").attr("y", ROW / 2 + 4).text((row) => row.value.length > 17 ? `${row.value.slice(0, 16)}…` : row.value);
    const drawn = lines.filter(isDrawn);
    drawn.append("rect").attr("y", 4).attr("height", ROW - 8).attr("class", (row) => changeOf(row) < 0 ? "gain" : "loss")
      .attr("x", (row) => VALUE + Math.min(x(0), x(changeOf(row)))).attr("width", (row) => Math.max(1, Math.abs(x(changeOf(row)) - x(0))));
    lines.append("text").attr("class", (row) => isDrawn(row) ? "" : "faint").attr("x", VALUE + BARS + 6).attr("y", ROW / 2 + 4).text(textOf);
    svg.append("path").attr("class", "axis").attr("d", `M${VALUE + x(0)},0V${TOP + ROW * list.length}`);
  };
  const byChoice = new Map();
  for (const row of rows) {
    byChoice.set(row.choice, [...(byChoice.get(row.choice) ?? []), row]);
  }
  place.replaceChildren();
  [...byChoice].forEach(drawOne);
};

// Two plans: for each of `rows`, {name, kept, shown, format}, two bars, the longer of which is full.
const drawSides = (place, rows) => {
  const WIDTH = 340, NAME = 148, BARS = 110, ROW = 34;
  const svg = d3.select(place).append("svg").attr("viewBox", `0 0 ${WIDTH} ${ROW * rows.length}`).attr("role", "img")
    .attr("aria-label", `Kept and this plan: ${rows.map(({name, kept, shown, format}) => `${name} ${format(kept)} and ${format(shown)}`).join("; ")}`);
  const lines = svg.selectAll("g").data(rows).enter().append("g").attr("transform", (_, i) => `translate(0,${ROW * i})`);
  lines.append("text").attr("y", 17).text((row) => row.name);
  for (const [key, style, y] of [["kept", "kept", 3], ["shown", "loss", 16]]) {
    lines.append("rect").attr("class", style).attr("x", NAME).attr("y", y).attr("height", 11)
      .attr("width", (row) => BARS * row[key] / (Math.max(row.kept, row.shown) || 1));
    lines.append("text").attr("x", (row) => NAME + 4 + BARS * row[key] / (Math.max(row.kept, row.shown) || 1)).attr("y", y + 9.5)
      .text((row) => row.format(row[key]));
  }
};
