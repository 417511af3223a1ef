// The units of a plan as boxes in the order of forward; arrows lead from a unit to the one that is gathered while it computes.
"use strict";

const drawUnits = (place, {units: rows, forward_order: runs, prefetch}) => {
  const WIDTH = 1000, TOP = 80, BASE = 220, NAMES = 20, HEIGHT = 300, CHARACTER = 6.5;
  const slot = (WIDTH - 20) / Math.max(runs.length, 1);
  const height = d3.scaleLinear().domain([0, d3.max(rows, (row) => row.gathered_bytes) || 1]).range([4, BASE - TOP]);
  const boxes = runs.map((unit, i) => ({unit, row: rows[unit], x: 10 + slot * i, width: slot * (slot > 4 ? 0.85 : 1),
    height: height(rows[unit].gathered_bytes)}));
  const middle = (box) => box.x + box.width / 2;
  const top = prefetch.some(({phase}) => phase === "fwd") ? 0 : TOP - 4;  // room for arrows above
  const svg = d3.select(place).append("svg").attr("viewBox", `0 ${top} ${WIDTH} ${HEIGHT - top}`).attr("role", "img")
    .attr("aria-label", "Units in the order of forward");
  const size = runs.length > 40 ? 3 : 5;
  const marks = svg.append("defs");
  marks.append("marker").attr("id", "head").attr("viewBox", "0 0 8 8").attr("refX", 7).attr("refY", 4).attr("markerWidth", size)
    .attr("markerHeight", size).attr("orient", "auto").append("path").attr("class", "head").attr("d", "M0 0L8 4L0 8z");
  marks.append("pattern").attr("id", "hatch").attr("width", 6).attr("height", 6).attr("patternUnits", "userSpaceOnUse")
    .attr("patternTransform", "rotate(45)").append("path").attr("class", "hatch").attr("d", "M0 0V6");

  const tipOf = (row) => `${row.name}: ${row.parameters} parameters, ${units.formatBytes(row.gathered_bytes)} gathered` +
    (row.reshard === "" ? "" : `, resharded after forward: ${row.reshard}`) + (row.recompute === "" ? "" : `, recomputed: ${row.recompute}`);
  const groups = svg.selectAll("g").data(boxes).enter().append("g");
  groups.append("title").text((box) => tipOf(box.row));
  const boxesIn = (selection) => selection.append("rect").attr("x", (box) => box.x).attr("y", (box) => BASE - box.height)
    .attr("width", (box) => box.width).attr("height", (box) => box.height);
  boxesIn(groups).attr("class", "unit");
  boxesIn(groups.filter((box) => box.row.reshard === "never")).attr("fill", "url(#hatch)");

  // Whole names where all have room for theirs, else last parts; as many as do not run into each other.
  const last = (name) => name.slice(name.lastIndexOf(".") + 1);
  const longest = (label) => CHARACTER * (1 + d3.max(boxes, (box) => label(box.row.name).length));
  const label = longest((name) => name) > slot ? last : (name) => name;
  const room = longest(label), every = Math.ceil(room / slot);
  svg.selectAll("text").data(boxes.filter((_, i) => i % every === 0)).enter().append("text").attr("class", "middle").attr("y", BASE + 14)
    .attr("x", (box) => Math.min(Math.max(middle(box), room / 2), WIDTH - room / 2)).text((box) => label(box.row.name));

  const placesOf = new Map(rows.map((_, unit) => [unit, []]));
  boxes.forEach((box, i) => placesOf.get(box.unit).push(i));
  for (const {during, gathered, phase} of prefetch) {
    // A unit may have several boxes: the two that are nearest to each other.
    const pairs = d3.cross(placesOf.get(during), placesOf.get(gathered));
    const [from, to] = pairs.reduce((best, pair) => Math.abs(pair[0] - pair[1]) < Math.abs(best[0] - best[1]) ? pair : best);
    const isForward = phase === "fwd", below = BASE + NAMES;
    const [a, b] = [from, to].map((i) => [middle(boxes[i]), isForward ? BASE - boxes[i].height : below]);
    const reach = Math.min(60, 14 + Math.abs(b[0] - a[0]) / 4);
    const bend = isForward ? Math.min(a[1], b[1]) - reach : below + reach;
    svg.append("path").attr("class", isForward ? "ahead" : "ahead backward").attr("marker-end", "url(#head)")
      .attr("d", `M${a}Q${(a[0] + b[0]) / 2} ${bend} ${b}`)
      .append("title").text(`${rows[gathered].name} is gathered while ${rows[during].name} computes ${phase}`);
  }
};
