// Plans that a search considered: step time against memory. The page has them as a table, too.
"use strict";

// `points` have label, step_time_s, memory_bytes and whether they are chosen. With `open` a point can be clicked.
const drawPareto = (place, points, open) => {
  const {formatBytes, formatTime} = units;
  const WIDTH = 700, HEIGHT = 320, LEFT = 80, RIGHT = 20, TOP = 28, BOTTOM = 44, GIB = 2 ** 30;
  const x = d3.scaleLinear().domain(d3.extent(points, (point) => point.step_time_s)).nice().range([LEFT, WIDTH - RIGHT]);
  const gib = d3.scaleLinear().domain([0, d3.max(points, (point) => point.memory_bytes) / GIB]).nice();
  const y = d3.scaleLinear().domain(gib.domain().map((n) => n * GIB)).range([HEIGHT - BOTTOM, TOP]);
  const svg = d3.select(place).append("svg").attr("viewBox", `0 0 ${WIDTH} ${HEIGHT}`).attr("role", open ? "group" : "img")
    .attr("aria-label", "Step time and memory of the plans that were considered");
  svg.append("g").attr("transform", `translate(0,${HEIGHT - BOTTOM})`)
    .call(d3.axisBottom(x).ticks(6).tickFormat((seconds) => formatTime(seconds * 1e9)));
  svg.append("g").attr("transform", `translate(${LEFT},0)`).call(d3.axisLeft(y).tickValues(gib.ticks(5).map((n) => n * GIB))
    .tickFormat(formatBytes));
  svg.append("text").attr("x", WIDTH - RIGHT).attr("y", HEIGHT - 6).attr("class", "end").text("step time");
  svg.append("text").attr("x", 4).attr("y", 12).text("memory of a device");
  const text = (point) => `${point.label}: ${formatTime(point.step_time_s * 1e9)}, ${formatBytes(point.memory_bytes)}`;
  const dots = svg.selectAll("circle").data(points).enter().append("circle")
    .attr("class", (point) => point.chosen ? "dot chosen" : "dot")
    .attr("r", (point) => point.chosen ? 7 : 5)
    .attr("cx", (point) => x(point.step_time_s)).attr("cy", (point) => y(point.memory_bytes));
  dots.append("title").text(text);
  if (open) {
    dots.attr("tabindex", 0).attr("role", "button").attr("aria-label", text)
      .on("click", (point) => open(point))
      .on("keydown", (point) => {
        if (d3.event.key === "Enter" || d3.event.key === " ") {
          d3.event.preventDefault();
          open(point);
        }
      });
  }
  svg.selectAll("text.chosen").data(points.filter((point) => point.chosen)).enter().append("text").text("chosen")
    .attr("x", (point) => x(point.step_time_s) + 12).attr("y", (point) => y(point.memory_bytes) + 4);
};
