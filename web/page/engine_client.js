// The page's side of the engine: commands as promises. Ending a command ends its worker; another one takes its place.
"use strict";

const engine = (() => {
  const textOf = (id) => document.getElementById(id).textContent;
  const bytesOf = (id) => Uint8Array.from(atob(textOf(id).trim()), (c) => c.charCodeAt(0));
  const unpack = (bytes) => new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();

  let wasm = null, source = null, worker = null, ready = null;
  let waiting = new Map(), counter = 0;

  const fail = (text) => {
    const all = [...waiting.values()];
    waiting = new Map();
    worker.terminate();
    worker = null;
    for (const {reject} of all) {
      reject(new Error(text));
    }
  };
  const start = () => {
    worker = new Worker(source);
    ready = new Promise((resolve, reject) => {
      worker.onmessage = ({data}) => {
        if (data.ready) {
          resolve();
        } else if (data.id === undefined) {
          reject(new Error(data.broken));
        } else if (data.broken !== undefined) {
          fail(data.broken);
        } else if (data.progress !== undefined) {
          waiting.get(data.id)?.progress(data.progress);
        } else {
          waiting.get(data.id)?.resolve(data.result);
          waiting.delete(data.id);
        }
      };
      worker.onerror = (event) => reject(new Error(event.message));
    });
    worker.postMessage({start: wasm});
    return ready;
  };

  // Rejects where the browser lacks what the engine needs.
  const load = async () => {
    if (typeof WebAssembly !== "object" || typeof DecompressionStream !== "function" || typeof Worker !== "function") {
      throw new Error("This browser lacks WebAssembly, workers or DecompressionStream, which the planner needs. Firefox 113, Chrome 95, " +
        "Safari 16.4 and later have them. The program shardwright answers the same questions in a terminal.");
    }
    wasm = await unpack(bytesOf("engine-wasm"));
    source = URL.createObjectURL(new Blob([textOf("engine-loader"), "\n", textOf("engine-script"), "\n", textOf("engine-worker")],
      {type: "text/javascript"}));
    await start();
  };
  let ended = 0;  // how often something was cancelled
  const run = async (job, progress = () => {}) => {
    if (worker === null) {
      start();
    }
    const before = ended;
    await ready;
    if (before !== ended) {
      throw new Error("cancelled");
    }
    return new Promise((resolve, reject) => {
      const id = ++counter;
      waiting.set(id, {resolve, reject, progress, isSearch: job.words.includes("--search") || job.words[0] === "estimate"});
      worker.postMessage({id, job});
    });
  };
  // Ends what runs, at once.
  const cancel = () => {
    ++ended;
    if (worker !== null && waiting.size > 0) {
      fail("cancelled");
    }
  };
  // The same where that is a search; anything else ends sooner than a worker starts.
  const cancelSearch = () => {
    if ([...waiting.values()].some(({isSearch}) => isSearch)) {
      cancel();
    }
  };
  return {load, run, cancel, cancelSearch, unpack};
})();
