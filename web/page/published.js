// Predicted against published runs: those that the profile of the shown plan predicts.
"use strict";

const drawPublished = (place, profile) => {
  const {formatTime} = units;
  const WIDTH = 700, HEIGHT = 240, LEFT = 60, RIGHT = 20, TOP = 24, BOTTOM = 44;
  const rows = JSON.parse(document.getElementById("published-runs").textContent)[profile] ?? [];
  const errorOf = ([, measured, predicted]) => predicted / measured - 1;
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const signed = (value) => `${value < 0 ? "−" : "+"}${percent(Math.abs(value))}`;
  const said = document.createElement("p");
  place.replaceChildren(said);
  if (rows.length === 0) {
    said.textContent = `No published run is known that the profile ${profile} predicts.`;
    return;
  }
  const off = rows.map((row) => Math.abs(errorOf(row)));
  said.textContent = `Step times of ${rows.length} published run${rows.length === 1 ? "" : "s"} by the profile ${profile}: ` +
    `median error ${percent(d3.median(off))}, greatest ${percent(d3.max(off))}.`;
  const x = d3.scaleLog().domain([d3.min(rows, (row) => row[1]) / 1.2, d3.max(rows, (row) => row[1]) * 1.2]).range([LEFT, WIDTH - RIGHT]);
  const most = Math.max(0.1, d3.max(off));
  const y = d3.scaleLinear().domain([-most, most]).nice().range([HEIGHT - BOTTOM, TOP]);
  const isRound = (value) => [1, 2, 5].includes(Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9)));
  const svg = d3.select(place).append("svg").attr("viewBox", `0 0 ${WIDTH} ${HEIGHT}`).attr("role", "img")
    .attr("aria-label", `Errors of predicted step times: ${rows.map((row) => `${row[0]} ${signed(errorOf(row))}`).join(", ")}`);
  svg.append("g").attr("transform", `translate(0,${HEIGHT - BOTTOM})`)
    .call(d3.axisBottom(x).tickValues(x.ticks().filter(isRound)).tickFormat((seconds) => formatTime(seconds * 1e9)));
  svg.append("g").attr("transform", `translate(${LEFT},0)`).call(d3.axisLeft(y).ticks(5).tickFormat((value) => `${Math.round(100 * value)} %`));
  svg.append("path").attr("class", "axis").attr("d", `M${LEFT},${y(0)}H${WIDTH - RIGHT}`);
  svg.append("text").attr("x", WIDTH - RIGHT).attr("y", HEIGHT - 6).attr("class", "end").text("measured step time");
  svg.append("text").attr("x", 4).attr("y", 12).text("error of the prediction");
  svg.selectAll("circle").data(rows).enter().append("circle").attr("class", "dot").attr("r", 4)
    .attr("cx", (row) => x(row[1])).attr("cy", (row) => y(errorOf(row)))
    .append("title").text((row) => `${row[0]}: ${formatTime(row[1] * 1e9)} measured, ${formatTime(row[2] * 1e9)} predicted, ${signed(errorOf(row))}`);
};
