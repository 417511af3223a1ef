// The plans that a search considered: step time against memory. The page has them as a table, too.
"use strict";

(() => {
  const {data, formatBytes, formatTime} = shardwright;
  const WIDTH = 700, HEIGHT = 320, LEFT = 80, RIGHT = 20, TOP = 28, BOTTOM = 44, GIB = 2 ** 30;

  const drawPareto = (points) => {
    const x = d3.scaleLinear().domain(d3.extent(points, (point) => point.step_time_s)).nice().range([LEFT, WIDTH - RIGHT]);
    const gib = d3.scaleLinear().domain([0, d3.max(points, (point) => point.memory_bytes) / GIB]).nice();
    const y = d3.scaleLinear().domain(gib.domain().map((n) => n * GIB)).range([HEIGHT - BOTTOM, TOP]);
    const svg = d3.select("#pareto").append("svg").attr("viewBox", `0 0 ${WIDTH} ${HEIGHT}`).attr("role", "img")
      .attr("aria-label", "Step time and memory of the plans that were considered");
    svg.append("g").attr("transform", `translate(0,${HEIGHT - BOTTOM})`)
      .call(d3.axisBottom(x).ticks(6).tickFormat((seconds) => formatTime(seconds * 1e9)));
    svg.append("g").attr("transform", `translate(${LEFT},0)`).call(d3.axisLeft(y).tickValues(gib.ticks(5).map((n) => n * GIB))
      .tickFormat(formatBytes));
    svg.append("text").attr("x", WIDTH - RIGHT).attr("y", HEIGHT - 6).attr("class", "end").text("step time");
    svg.append("text").attr("x", 4).attr("y", 12).text("memory of a device");
    svg.selectAll("circle").data(points).enter().append("circle")
      .attr("class", (point) => point.chosen ? "dot chosen" : "dot")
      .attr("r", (point) => point.chosen ? 7 : 5)
      .attr("cx", (point) => x(point.step_time_s)).attr("cy", (point) => y(point.memory_bytes))
      .append("title").text((point) => `${point.label}: ${formatTime(point.step_time_s * 1e9)}, ${formatBytes(point.memory_bytes)}`);
    svg.selectAll("text.chosen").data(points.filter((point) => point.chosen)).enter().append("text").text("chosen")
      .attr("x", (point) => x(point.step_time_s) + 12).attr("y", (point) => y(point.memory_bytes) + 4);
  };

  if ((data.pareto || []).length > 0) {
    drawPareto(data.pareto);
  }
})();
