// The canvas with the spans. Bars narrower than a pixel are drawn as one, so that what is drawn grows with the canvas and not with the bars.
"use strict";

const makeTimeline = (shardwright) => {
  const {data, ops, lanes, range, critical, firstAbove, formatTime} = shardwright;
  const canvas = document.getElementById("spans");
  const context = canvas.getContext("2d");
  const LEFT = 108, ROW = 22, BAR = 16, HEAD = 24, AXIS = 26;
  // Dark text on light bars and the other way round: the luminance of the web's guidelines (WCAG 2.1), of "#rrggbb".
  const textOn = (colour) => {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";  // there, both contrast alike
  };

  const state = {
    x: d3.scaleLinear().domain(range),
    width: 0, height: 0, colours: {}, text: [], hatch: null,
    found: null, matches: 0, selected: -1, cursor: null,
  };

  const layOut = () => {
    let y = 4, recording = null;
    for (const lane of lanes) {
      if (lane.recording !== recording) {
        recording = lane.recording;
        recording.y = y;
        y += HEAD;
      }
      lane.y = y;
      y += ROW;
    }
    state.height = y + AXIS;
  };

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const readColours = () => {
    state.colours = {op: data.colours.map((_, i) => css(`--op${i}`)), ink: css("--ink"), faint: css("--faint"),
      rule: css("--rule"), stripe: css("--stripe"), paper: css("--paper"), bad: css("--bad")};
    state.text = state.colours.op.map(textOn);
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.strokeStyle = state.colours.bad;
    pen.lineWidth = 1.2;
    pen.beginPath();
    pen.moveTo(-1, 7); pen.lineTo(7, -1); pen.moveTo(-1, 1); pen.lineTo(1, -1); pen.moveTo(5, 7); pen.lineTo(7, 5);
    pen.stroke();
    state.hatch = context.createPattern(tile, "repeat");
  };

  const resize = () => {
    const ratio = matchMedia("print").matches ? 4 : window.devicePixelRatio || 1;  // 4: paper has finer dots
    state.width = canvas.clientWidth;
    canvas.style.height = `${state.height}px`;
    canvas.width = Math.round(state.width * ratio);
    canvas.height = Math.round(state.height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    state.x.range([LEFT, state.width - 8]);
  };

  // Calls wide(x0, x1, bar, colour) for bars in view, and narrow(x, width, colour, share) for those below a pixel or so: what
  // shares a column of pixels comes as one, in the colour that takes most of it.
  const weights = new Float64Array(data.colours.length);
  const eachBar = (lane, accepts, wide, narrow) => {
    const [t0, t1] = state.x.domain();
    const right = state.width - 8;
    const scale = (right - LEFT) / (t1 - t0);
    let column = -1;
    const flush = () => {
      if (column >= 0) {
        let best = 0, sum = 0;
        for (let c = 0; c < weights.length; ++c) {
          sum += weights[c];
          best = weights[c] > weights[best] ? c : best;
        }
        narrow(column, best, Math.min(sum, 1));
        weights.fill(0);
        column = -1;
      }
    };
    for (let i = firstAbove(lane.reach, t0); i < lane.size && lane.start[i] < t1; ++i) {
      if (accepts !== null && !accepts(lane.op[i])) {
        continue;
      }
      const x0 = Math.max((lane.start[i] - t0) * scale + LEFT, LEFT);
      const x1 = Math.min((lane.end[i] - t0) * scale + LEFT, right);
      if (x1 - x0 >= 1.5) {
        flush();
        wide(x0, x1, i, lane.colour[i]);
        continue;
      }
      const at = Math.floor((x0 + x1) / 2);
      if (at !== column) {
        flush();
        column = at;
      }
      weights[lane.colour[i]] += Math.max(x1 - x0, 0.01);
    }
    flush();
  };

  // The most of a band's label that fits: "model.layers.3", "layers.3", "3", or nothing.
  const drawLabel = (label, x0, y, width, colour) => {
    for (let text = label; ; text = text.slice(text.search(/[ .]/) + 1)) {
      if (context.measureText(text).width < width - 3) {
        context.fillStyle = state.text[colour];
        context.textAlign = "center";
        context.fillText(text, x0 + width / 2, y + BAR / 2 + 0.5);
        context.textAlign = "left";
        return;
      }
      if (!/[ .]/.test(text)) {
        return;
      }
    }
  };

  const drawBars = (lane, accepts, alpha) => {
    const y = lane.y + (ROW - BAR) / 2;
    const marksCritical = lane.name !== "critical path" && lane.name !== "host" && lane.labels === null && lane.recording === data.recordings[0];
    context.globalAlpha = alpha;
    eachBar(lane, accepts, (x0, x1, bar, colour) => {
      const width = x1 - x0 - (x1 - x0 > 4 ? 0.7 : 0);
      context.fillStyle = state.colours.op[colour];
      context.fillRect(x0, y, width, BAR);
      if (marksCritical && critical[lane.op[bar]]) {
        context.fillStyle = state.colours.ink;
        context.fillRect(x0, y + BAR - 1, width, 2.5);
      }
      if (lane.labels !== null) {
        drawLabel(lane.labels[bar], x0, y, width, colour);
      } else if (width > 46) {
        context.save();
        context.beginPath();
        context.rect(x0, y, width - 2, BAR);
        context.clip();
        context.fillStyle = state.text[colour];
        const use = lane.use === null || lane.use[bar] === "run" ? "" : lane.use[bar] + ": ";
        context.fillText(use + shardwright.shortNameOf(lane.op[bar]), x0 + 3, y + BAR / 2 + 0.5);
        context.restore();
      }
    }, (x, colour, share) => {
      context.globalAlpha = alpha * Math.max(share, 0.35);
      context.fillStyle = state.colours.op[colour];
      context.fillRect(x, y, 1, BAR);
      context.globalAlpha = alpha;
    });
    context.globalAlpha = 1;
  };

  const drawWaits = (lane) => {
    const [t0, t1] = state.x.domain();
    const y = lane.y + (ROW - BAR) / 2;
    let last = -Infinity;
    context.strokeStyle = state.colours.bad;
    context.lineWidth = 1;
    for (const [begin, end] of lane.recording.waits) {
      if (end < t0 || begin > t1) {
        continue;
      }
      const x0 = Math.max(state.x(begin), LEFT), x1 = Math.min(state.x(end), state.width - 8);
      if (x1 < last + 0.5) {
        continue;
      }
      last = x1;
      context.fillStyle = state.hatch;
      context.fillRect(x0, y, Math.max(x1 - x0, 0.7), BAR);
      if (x1 - x0 > 3) {
        context.strokeRect(x0 + 0.5, y + 0.5, x1 - x0 - 1, BAR - 1);
      }
    }
  };

  const drawSelection = () => {
    if (state.selected < 0) {
      return;
    }
    context.strokeStyle = state.colours.ink;
    context.lineWidth = 2;
    for (const lane of lanes) {
      const i = lane.op.indexOf(state.selected);
      if (i < 0 || lane.name === "critical path" || lane.labels !== null) {
        continue;
      }
      const x0 = state.x(lane.start[i]), x1 = state.x(lane.end[i]);
      if (x1 >= LEFT && x0 <= state.width - 8) {
        const from = Math.max(x0, LEFT);
        context.strokeRect(from - 1, lane.y + 2, Math.max(Math.min(x1, state.width - 8) - from, 1) + 2, ROW - 4);
      }
    }
  };

  const drawAxis = () => {
    const y = state.height - AXIS + 4;
    const axis = state.x.ticks(Math.max(2, Math.floor((state.width - LEFT) / 110)));
    context.strokeStyle = state.colours.rule;
    context.lineWidth = 1;
    context.fillStyle = state.colours.faint;
    context.textAlign = "center";
    for (const tick of axis) {
      const x = Math.round(state.x(tick)) + 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, y);
      context.stroke();
      context.fillText(formatTime(tick), Math.min(x, state.width - 28), y + 11);
    }
    context.textAlign = "left";
    context.strokeStyle = state.colours.faint;
    for (const recording of data.recordings) {  // where the step begins and ends
      for (const time of [0, recording.period]) {
        const x = Math.round(state.x(time)) + 0.5;
        if (x >= LEFT && x <= state.width - 8) {
          context.setLineDash([4, 3]);
          context.beginPath();
          context.moveTo(x, recording.y + HEAD);
          context.lineTo(x, y);
          context.stroke();
          context.setLineDash([]);
        }
      }
    }
  };

  const drawNames = () => {
    context.fillStyle = state.colours.ink;
    for (const lane of lanes) {
      context.fillText(lane.name, 2, lane.y + ROW / 2);
    }
    context.font = "600 12px system-ui, sans-serif";
    for (const recording of data.recordings) {
      context.fillStyle = state.colours.paper;
      context.fillRect(0, recording.y, state.width, HEAD - 2);
      context.fillStyle = state.colours.ink;
      context.fillText(`${recording.name}: ${formatTime(recording.period)} (rank ${recording.rank}, step ${recording.step})`, 2, recording.y + HEAD / 2);
    }
  };

  const draw = () => {
    context.clearRect(0, 0, state.width, state.height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    lanes.forEach((lane, i) => {
      if (i % 2 === 0) {
        context.fillStyle = state.colours.stripe;
        context.fillRect(LEFT, lane.y, state.width - 8 - LEFT, ROW);
      }
    });
    drawAxis();
    const isSearching = state.found !== null;
    for (const lane of lanes) {
      drawBars(lane, null, isSearching && lane.labels === null ? 0.2 : 1);
      if (lane.name === "compute") {
        drawWaits(lane);
      }
      if (isSearching && lane.labels === null) {
        drawBars(lane, (op) => state.found[op] === 1, 1);
      }
    }
    drawSelection();
    drawNames();
  };

  // The lane and bar under a point of the canvas; wide of narrow bars by some pixels.
  const pick = (px, py) => {
    const lane = lanes.find((candidate) => py >= candidate.y && py < candidate.y + ROW);
    if (lane === undefined || px < LEFT) {
      return null;
    }
    const time = state.x.invert(px);
    const reach = state.x.invert(px + 4) - time;
    const after = firstAbove(lane.start, time);
    let best = null, distance = Infinity;
    for (const i of [after - 1, after]) {
      if (i >= 0 && i < lane.size) {
        const away = time < lane.start[i] ? lane.start[i] - time : Math.max(0, time - lane.end[i]);
        if (away <= reach && away < distance) {
          best = i;
          distance = away;
        }
      }
    }
    return best === null ? null : {lane, bar: best, op: lane.op[best]};
  };

  layOut();
  return {canvas, state, draw, pick, resize, readColours, LEFT};
};
