// The worker of the page: takes {start: bytes} once, then {id, job}, one after another.
"use strict";

(() => {
  let run = null, id = 0, last = 0;
  self.onmessage = async ({data}) => {
    if (data.start !== undefined) {
      try {
        run = await startEngine(createShardwright, data.start, (progress) => {
          const now = performance.now();
          if (now - last > 50) {
            last = now;
            self.postMessage({id, progress});
          }
        });
        self.postMessage({ready: true});
      } catch (error) {
        self.postMessage({broken: String(error)});
      }
      return;
    }
    id = data.id;
    try {
      self.postMessage({id, result: run(data.job)});
    } catch (error) {
      // The engine cannot be used again: the page starts another one.
      self.postMessage({id, broken: String(error)});
    }
  };
})();
