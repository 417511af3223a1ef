// Zoom, search, selection and keys. What listens to the window ends with `signal`.
"use strict";

const connectControls = (shardwright, signal) => {
  const {data, ops, lanes, range, count, placeIn, timeline, memory, nameOf, formatTime, critical} = shardwright;
  const {state, canvas} = timeline;
  const byId = (id) => document.getElementById(id);

  let isScheduled = false;
  const schedule = () => {
    if (!isScheduled) {
      isScheduled = true;
      requestAnimationFrame(() => {
        isScheduled = false;
        timeline.draw();
        memory.draw();
      });
    }
  };

  const base = d3.scaleLinear().domain(range);
  // The host may be ahead of the step, so there is room to the left of its begin.
  const issued = data.recordings.reduce((least, recording) => Math.min(least, recording.issue[0]), range[0]);
  const zoom = d3.zoom()
    .scaleExtent([1, Math.max(1000, (range[1] - range[0]) / 1000)])
    .filter(() => d3.event.type !== "wheel" ? !d3.event.button : d3.event.ctrlKey || document.activeElement === canvas)
    .on("zoom", () => {
      state.x.domain(d3.event.transform.rescaleX(base).domain());
      schedule();
    });
  const selection = d3.select(canvas);
  const setExtent = () => {
    base.range([timeline.LEFT, state.width - 8]);
    zoom.extent([[timeline.LEFT, 0], [state.width - 8, state.height]]);
    zoom.translateExtent([[base(Math.max(issued, 2 * range[0] - range[1])), 0], [state.width - 8, state.height]]);
  };
  const show = (begin, end) => {
    const scale = (range[1] - range[0]) / Math.max(end - begin, 1);
    const transform = d3.zoomIdentity.translate(timeline.LEFT, 0).scale(scale).translate(-base(begin), 0);
    selection.call(zoom.transform, transform);
  };

  const addTerm = (list, name, text) => {
    for (const [tag, content] of [["dt", name], ["dd", text]]) {
      const element = document.createElement(tag);
      element.textContent = content;
      list.append(element);
    }
  };
  const waitText = (recording, i, op) => {
    const wait = recording.waits.find((row) => row[1] === recording.start[i]);
    return ops.lane[op] !== data.lanes.indexOf("compute") || wait === undefined ? "none" :
      `${formatTime(wait[1] - wait[0])} for ${wait[2]}` + (wait[3] >= 0 && wait[3] !== op ? `, ${nameOf(wait[3])}` : "");
  };
  const describe = (op) => {
    const panel = byId("details");
    panel.replaceChildren();
    if (op < 0) {
      panel.textContent = "Choose an op in the timeline to see its times.";
      return;
    }
    const title = document.createElement("h3");
    title.textContent = nameOf(op);
    const list = document.createElement("dl");
    addTerm(list, "stream", data.lanes[ops.lane[op]]);
    for (const recording of data.recordings) {
      const name = recording.name, i = placeIn(recording, op);
      if (i < 0) {
        continue;
      }
      addTerm(list, `${name}: runs`, `${formatTime(recording.length[i])}, from ${formatTime(recording.start[i])}`);
      addTerm(list, `${name}: issued`, `at ${formatTime(recording.issue[i])}, in ${formatTime(recording.issue_length[i])}`);
      if (recording.bars === undefined) {
        addTerm(list, `${name}: compute waited`, waitText(recording, i, op));
        addTerm(list, `${name}: last awaited op`, recording.awaited[i] < 0 ? "none" : nameOf(recording.awaited[i]));
      }
    }
    addTerm(list, "on the critical path", critical[op] ? "yes" : "no");
    panel.append(title, list);
  };
  const select = (op) => {
    state.selected = op;
    describe(op);
    schedule();
  };
  // Where the first recording that has it has it: begin and length.
  const spanOf = (op) => {
    const recording = data.recordings.find((candidate) => placeIn(candidate, op) >= 0);
    const i = placeIn(recording, op);
    return [recording.start[i], recording.length[i]];
  };
  const centre = (op) => {
    const [t0, t1] = state.x.domain();
    const [start, length] = spanOf(op), end = start + length;
    if (start < t0 || end > t1) {
      const shown = Math.max(t1 - t0, 4 * (end - start));
      show((start + end - shown) / 2, (start + end + shown) / 2);
    }
  };

  // From op to op: along the stream of the selected op, or of the first compute op.
  const next = (direction) => {
    const lane = lanes.find((candidate) => candidate.name !== "critical path" &&
      candidate.name === (state.selected < 0 ? "compute" : data.lanes[ops.lane[state.selected]]) &&
      (state.selected < 0 || candidate.op.includes(state.selected)));
    const from = state.selected < 0 ? (direction > 0 ? -1 : lane.size) : lane.op.indexOf(state.selected);
    const to = from + direction;
    if (to >= 0 && to < lane.size) {
      select(lane.op[to]);
      centre(lane.op[to]);
    }
  };
  const nextFound = () => {
    for (let i = 1; i <= count; ++i) {
      const op = (Math.max(state.selected, -1) + i) % count;
      if (state.found !== null && state.found[op]) {
        select(op);
        centre(op);
        return;
      }
    }
  };

  const pan = (share) => selection.call(zoom.translateBy,
    -share * (state.width - timeline.LEFT) / d3.zoomTransform(canvas).k, 0);
  const KEYS = {
    "+": () => selection.call(zoom.scaleBy, 1.5),
    "=": () => selection.call(zoom.scaleBy, 1.5),
    "-": () => selection.call(zoom.scaleBy, 1 / 1.5),
    "0": () => selection.call(zoom.transform, d3.zoomIdentity),
    ArrowLeft: (event) => event.shiftKey ? next(-1) : pan(-0.2),
    ArrowRight: (event) => event.shiftKey ? next(1) : pan(0.2),
    Escape: () => select(-1),
    Enter: () => {
      if (state.selected >= 0) {
        const [start, length] = spanOf(state.selected), unit = Math.max(length, 100);
        show(start - 2 * unit, start + 3 * unit);
      }
    },
  };

  const connect = () => {
    selection.call(zoom).on("dblclick.zoom", null);
    canvas.addEventListener("keydown", (event) => {
      if (KEYS[event.key] !== undefined && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        KEYS[event.key](event);
      }
    });
    canvas.addEventListener("click", (event) => {
      const hit = timeline.pick(event.offsetX, event.offsetY);
      select(hit === null ? -1 : hit.op);
    });
    for (const chart of [canvas, memory.canvas]) {
      chart.addEventListener("pointermove", (event) => {
        const hit = chart === canvas ? timeline.pick(event.offsetX, event.offsetY) : null;
        canvas.title = hit === null ? "" : `${nameOf(hit.op)}, ${formatTime(hit.lane.end[hit.bar] - hit.lane.start[hit.bar])}`;
        state.cursor = event.offsetX < timeline.LEFT ? null : state.x.invert(event.offsetX);
        byId("bytes-at").textContent = state.cursor === null ? "" : memory.textAt(state.cursor);
        schedule();
      });
    }
    byId("zoom-in").addEventListener("click", KEYS["+"]);
    byId("zoom-out").addEventListener("click", KEYS["-"]);
    byId("zoom-all").addEventListener("click", KEYS["0"]);
    byId("search").addEventListener("input", (event) => {
      const result = shardwright.search(event.target.value);
      const isEmpty = event.target.value.trim() === "";
      state.found = isEmpty ? null : result.found;
      byId("found").textContent = isEmpty ? "" : `${result.matches} of ${count} ops; Enter goes to the next`;
      schedule();
    });
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        nextFound();
      }
    });
  };

  const refresh = () => {
    const view = state.x.domain();
    for (const chart of [timeline, memory]) {
      chart.resize();
      chart.readColours();
    }
    setExtent();
    show(view[0], view[1]);
    timeline.draw();
    memory.draw();
  };
  connect();
  describe(-1);
  refresh();
  window.addEventListener("resize", refresh, {signal});
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh, {signal});
  window.matchMedia("print").addEventListener("change", refresh, {signal});
};

// Draws one step into the elements of the page.
const showStep = (data, signal) => {
  const shardwright = readSpans(data);
  tables.showLegends(data);
  shardwright.timeline = makeTimeline(shardwright);
  shardwright.memory = makeMemory(shardwright);
  connectControls(shardwright, signal);
  return shardwright;
};
