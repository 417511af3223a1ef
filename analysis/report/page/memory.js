// Bytes over time under the spans, with the same scale of time.
"use strict";

const makeMemory = (shardwright) => {
  const {data, formatBytes, formatTime, firstAbove, timeline} = shardwright;
  const canvas = document.getElementById("bytes");
  const context = canvas.getContext("2d");
  const HEIGHT = 240, TOP = 10, BOTTOM = 216;
  const CATEGORIES = data.category_names;
  const limit = data.figures.usable_device_bytes - data.figures.outside_allocator_bytes;

  // Cumulative sums per category, in the order of the stack.
  const stackOf = (memory) => {
    const below = new Float64Array(memory.time.length);
    return Object.entries(memory.categories).map(([name, bytes]) => {
      const low = Float64Array.from(below);
      bytes.forEach((value, i) => { below[i] += value; });
      return {name, index: CATEGORIES.indexOf(name), low, high: Float64Array.from(below)};
    });
  };
  const stacks = data.recordings.map((recording) => stackOf(recording.memory));
  const topOf = (stack) => stack.length === 0 ? new Float64Array(0) : stack[stack.length - 1].high;
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
  // Where a plan does not fit, what is reserved was cut at what the device has, and is no answer.
  const reservedOf = (k) => {
    const {reserved} = data.recordings[k].memory, top = topOf(stacks[k]);
    return reserved !== undefined && reserved.every((bytes, i) => bytes >= top[i]) ? reserved : [];
  };
  const reserved = reservedOf(0);
  const peak = Math.max(1, ...stacks.map((stack) => largest(topOf(stack))),
    ...data.recordings.map((_, k) => largest(reservedOf(k))));
  // A limit far above everything would press the picture flat.
  const isFar = limit > 2.5 * peak;
  const most = isFar ? peak : Math.max(peak, limit);
  const y = d3.scaleLinear().domain([0, most * 1.05]).range([BOTTOM, TOP]);
  // Ticks at whole powers of two read better than at powers of ten.
  const step = (() => {
    let size = 2 ** Math.floor(Math.log2(most / 4));
    return size > 0 ? size : 1;
  })();

  let colours = {}, width = 0;
  const readColours = () => {
    const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    colours = {of: CATEGORIES.map((_, i) => css(`--memory${i}`)), ink: css("--ink"), faint: css("--faint"), rule: css("--rule"),
      bad: css("--bad"), paper: css("--paper")};
  };
  const resize = () => {
    const ratio = matchMedia("print").matches ? 4 : window.devicePixelRatio || 1;  // 4: paper has finer dots
    width = canvas.clientWidth;
    canvas.style.height = `${HEIGHT}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(HEIGHT * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
  };

  // Samples in view, and one on either side. The last value stands to the end of the picture.
  const visible = (time) => {
    const [t0, t1] = timeline.state.x.domain();
    const list = [];
    for (let i = Math.max(firstAbove(time, t0) - 1, 0); i < time.length; ++i) {
      list.push(i);
      if (time[i] > t1) {
        return list;
      }
    }
    list.push(-1);
    return list;
  };
  const xOf = (time, i) => i < 0 ? width - 8 : timeline.state.x(time[i]);
  const at = (values, i) => i < 0 ? values[values.length - 1] : values[i];

  const drawLimit = () => {
    context.strokeStyle = context.fillStyle = colours.bad;
    if (isFar) {
      context.textAlign = "right";
      context.fillText(`limit ${formatBytes(limit)}, above this picture`, width - 12, TOP);
      context.textAlign = "left";
      return;
    }
    context.lineWidth = 2;
    context.setLineDash([8, 4]);
    context.beginPath();
    context.moveTo(timeline.LEFT, y(limit));
    context.lineTo(width - 8, y(limit));
    context.stroke();
    context.setLineDash([]);
    context.textAlign = "right";
    context.fillText(`limit ${formatBytes(limit)}`, width - 12, y(limit) + 12);
    context.textAlign = "left";
  };

  const drawGrid = () => {
    context.strokeStyle = colours.rule;
    context.fillStyle = colours.faint;
    context.lineWidth = 1;
    context.textAlign = "right";
    for (let bytes = 0; bytes <= most * 1.05; bytes += step) {
      const row = Math.round(y(bytes)) + 0.5;
      context.beginPath();
      context.moveTo(timeline.LEFT, row);
      context.lineTo(width - 8, row);
      context.stroke();
      context.fillText(formatBytes(bytes), timeline.LEFT - 6, row);
    }
    context.textAlign = "left";
  };

  const drawLine = (recording, values, dash) => {
    const time = recording.memory.time;
    if (values.length === 0) {
      return;
    }
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.6;
    context.setLineDash(dash);
    context.beginPath();
    d3.line().curve(d3.curveStepAfter).x((i) => xOf(time, i)).y((i) => y(at(values, i))).context(context)(visible(time));
    context.stroke();
    context.setLineDash([]);
  };

  const draw = () => {
    context.clearRect(0, 0, width, HEIGHT);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    drawGrid();
    context.save();
    context.beginPath();
    context.rect(timeline.LEFT, 0, width - 8 - timeline.LEFT, BOTTOM);
    context.clip();
    const simulated = data.recordings[0].memory;
    const shown = visible(simulated.time);
    for (const layer of stacks[0]) {
      context.beginPath();
      d3.area().curve(d3.curveStepAfter).x((i) => xOf(simulated.time, i)).y0((i) => y(at(layer.low, i)))
        .y1((i) => y(at(layer.high, i))).context(context)(shown);
      context.fillStyle = colours.of[layer.index];
      context.fill();
      context.strokeStyle = colours.paper;
      context.lineWidth = 0.5;
      context.stroke();
    }
    drawLine(data.recordings[0], reserved, [1, 3]);
    data.recordings.slice(1).forEach((recording, i) => drawLine(recording, topOf(stacks[i + 1]), [6, 3]));
    if (timeline.state.cursor !== null) {
      const x = Math.round(timeline.state.x(timeline.state.cursor)) + 0.5;
      context.strokeStyle = colours.ink;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, BOTTOM);
      context.stroke();
    }
    context.restore();
    drawLimit();
  };

  document.getElementById("bytes-lines").textContent = [
    isFar ? "" : "Brown dashes: the limit.", reserved.length > 0 ? "Dotted: reserved by the caching allocator." : "",
    data.recordings.length > 1 ? "Black dashes: measured." : ""].filter((text) => text !== "").join(" ");

  // What exists at a moment, in words.
  const textAt = (moment) => data.recordings.map((recording, k) => {
    const i = firstAbove(recording.memory.time, moment) - 1;
    if (i < 0 || stacks[k].length === 0) {
      return "";
    }
    const parts = k > 0 ? [] : stacks[k].filter((layer) => layer.high[i] > layer.low[i])
      .sort((a, b) => (b.high[i] - b.low[i]) - (a.high[i] - a.low[i])).slice(0, 4)
      .map((layer) => `${layer.name.replaceAll("_", " ")} ${formatBytes(layer.high[i] - layer.low[i])}`);
    return `${recording.name} at ${formatTime(moment)}: ${formatBytes(topOf(stacks[k])[i])}` + (parts.length > 0 ? ` (${parts.join(", ")})` : "");
  }).filter((text) => text !== "").join("; ");

  return {canvas, draw, resize, readColours, textAt};
};
