// The spans of one step: lanes, names, searching. Nothing here touches the page. `data` is what `report --json` prints.
"use strict";

const readSpans = (data) => {
  const {formatTime, formatBytes} = units;
  const ops = data.ops;

  // What another profiler recorded has bars of its own, which are numbered behind the program's ops.
  for (const recording of data.recordings) {
    recording.first = 0;
    if (recording.bars !== undefined) {
      const bars = recording.bars;
      const subjects = ops.subjects.length, rests = ops.rests.length;
      recording.first = ops.lane.length;
      ops.subject = ops.subject.concat(bars.subject.map((i) => i + subjects));
      ops.rest = ops.rest.concat(bars.rest.map((i) => i + rests));
      for (const column of ["subjects", "rests", "lane", "micro_batch", "colour"]) {
        ops[column] = ops[column].concat(bars[column]);
      }
    }
  }
  const count = ops.lane.length;
  // Where an op stands in the columns of a recording; -1: it is not in it.
  const placeIn = (recording, op) => {
    const i = op - recording.first;
    return i >= 0 && i < recording.start.length ? i : -1;
  };

  const nameOf = (op) => (ops.micro_batch[op] < 0 ? "" : `mb${ops.micro_batch[op]}.`) +
    (ops.subjects[ops.subject[op]] === "" ? "" : ops.subjects[ops.subject[op]] + ".") + ops.rests[ops.rest[op]];

  // What fits on a bar: the subject without the parts that all share.
  const shortNameOf = (op) => {
    const subject = ops.subjects[ops.subject[op]].split(".");
    return subject.slice(-2).join(".") + " " + ops.rests[ops.rest[op]];
  };

  const HOST = data.lanes.indexOf("host");
  const HOST_COLOUR = data.colours.indexOf("host");

  const range = (() => {
    let begin = 0, end = 0;
    for (const recording of data.recordings) {
      end = Math.max(end, recording.period);
      for (let i = 0; i < recording.start.length; ++i) {
        if (ops.lane[recording.first + i] !== HOST) {
          begin = Math.min(begin, recording.start[i]);
          end = Math.max(end, recording.start[i] + recording.length[i]);
        }
      }
    }
    return [begin, Math.max(end, begin + 1)];
  })();

  // A lane with room for `size` bars, which are added in order of time. Columns, since there may be hundreds of thousands.
  const makeLane = (recording, name, size) => ({recording, name, size: 0, start: new Float64Array(size), end: new Float64Array(size),
    reach: new Float64Array(size), op: new Int32Array(size), colour: new Uint8Array(size), use: null, labels: null});
  const addBar = (lane, start, length, op, colour) => {
    const i = lane.size++;
    lane.start[i] = start;
    lane.end[i] = start + length;
    lane.reach[i] = i > 0 ? Math.max(lane.reach[i - 1], lane.end[i]) : lane.end[i];  // the last end so far
    lane.op[i] = op;
    lane.colour[i] = colour;
  };
  const trimmed = (lane) => {
    for (const column of ["start", "end", "reach", "op", "colour"]) {
      lane[column] = lane[column].subarray(0, lane.size);
    }
    return lane;
  };

  // The bands above the streams: what compute is at, in two grains. Recomputation belongs to the backward that wants it.
  const PASSES = ["forward", "recompute", "backward", "optimizer"];
  const passes = data.colours.map((name) => PASSES.includes(name) ? name.replace("recompute", "backward") : "");
  const passOf = (op) => passes[ops.colour[op]];
  const unitNames = new Set((data.plan_picture?.units ?? []).flatMap((unit) => unit.name.replace(/^\[|\]$/g, "").split(", ")));
  const unitsOfSubjects = ops.subjects.map((subject) => {
    for (let parts = subject.split("."); parts.length > 0; parts.pop()) {
      if (unitNames.has(parts.join("."))) {
        return parts.join(".");
      }
    }
    return "root";
  });
  const unitOf = (op) => unitsOfSubjects[ops.subject[op]];
  const hasMicroBatches = ops.micro_batch.some((i) => i > 0);
  const passLabel = (op) => `${hasMicroBatches && ops.micro_batch[op] >= 0 ? `micro-batch ${ops.micro_batch[op] + 1} ` : ""}${passOf(op)}`;
  const bandLane = (recording, compute, name, labelOf) => {
    const band = makeLane(recording, name, compute.size);
    band.labels = [];
    let key = null;
    for (let i = 0; i < compute.size; ++i) {
      const op = compute.op[i];
      if (passOf(op) === "") {
        continue;
      }
      const label = labelOf(op);
      if (`${passLabel(op)} ${label}` === key) {
        band.end[band.size - 1] = band.reach[band.size - 1] = compute.end[i];
      } else {
        addBar(band, compute.start[i], compute.end[i] - compute.start[i], op, data.colours.indexOf(passOf(op)));
        band.labels.push(label);
        key = `${passLabel(op)} ${label}`;
      }
    }
    return trimmed(band);
  };
  const bandsOf = (recording, streams) => {
    const compute = streams[data.lanes.indexOf("compute")];
    return recording.bars !== undefined || compute === undefined ? [] :
      [bandLane(recording, compute, "pass", passLabel), bandLane(recording, compute, "unit", unitOf)];
  };

  const criticalLane = (recording) => {
    const lane = makeLane(recording, "critical path", recording.critical.length);
    lane.use = [];
    for (const [begin, end, use, op] of recording.critical) {
      addBar(lane, begin, end - begin, op, use === "run" ? ops.colour[op] : HOST_COLOUR);
      lane.use.push(use);
    }
    return lane;
  };
  const hostLane = (recording) => {
    // The host is ahead of the device: in a steady state it issues the next steps meanwhile.
    const steps = recording.critical.length > 0 ? 3 : 1;
    const lane = makeLane(recording, "host", steps * recording.issue.length);
    const isShown = (i) => recording.bars === undefined || recording.issue_length[i] > 0;
    for (let ahead = 0; ahead < steps; ++ahead) {
      for (let i = 0; i < recording.issue.length; ++i) {
        const begin = recording.issue[i] + ahead * recording.period;
        if (begin < range[1] && isShown(i)) {
          addBar(lane, begin, recording.issue_length[i], recording.first + i, HOST_COLOUR);
        }
      }
    }
    return trimmed(lane);
  };
  const lanesOf = (recording) => {
    const streams = data.lanes.map((name) => makeLane(recording, name, recording.start.length));
    for (let i = 0; i < recording.start.length; ++i) {
      const op = recording.first + i;
      if (ops.lane[op] !== HOST) {
        addBar(streams[ops.lane[op]], recording.start[i], recording.length[i], op, ops.colour[op]);
      }
    }
    return [...bandsOf(recording, streams), ...(recording.critical.length > 0 ? [criticalLane(recording)] : []),
      ...streams.map(trimmed), hostLane(recording)].filter((lane) => lane.size > 0);
  };

  // Ops on the critical path, by op.
  const critical = new Uint8Array(count);
  for (const [, , use, op] of data.recordings[0].critical) {
    if (use === "run") {
      critical[op] = 1;
    }
  }

  // Per op: does its name contain all words of `text`?
  const search = (text) => {
    const words = text.toLowerCase().split(/\s+/).filter((word) => word !== "");
    const found = new Uint8Array(count);
    let matches = 0;
    if (words.length > 0) {
      for (let op = 0; op < count; ++op) {
        const name = nameOf(op).toLowerCase();
        if (words.every((word) => name.includes(word))) {
          found[op] = 1;
          ++matches;
        }
      }
    }
    return {found, matches};
  };

  // The first index whose value is above `limit`, in an ascending array.
  const firstAbove = (values, limit) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] > limit) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  };

  return {data, ops, count, placeIn, nameOf, shortNameOf, critical, search, firstAbove, range, formatTime, formatBytes,
    lanes: data.recordings.flatMap(lanesOf)};
};
