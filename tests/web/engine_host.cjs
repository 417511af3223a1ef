// The page's engine under Node: one job per line on standard input, one result per line on standard output, as JSON.
//   node engine_host.cjs FOLDER      FOLDER holds shardwright_engine.js and .wasm
"use strict";

const fs = require("fs");
const path = require("path");
const readline = require("readline");
const vm = require("vm");

const [folder] = process.argv.slice(2);
// Emscripten 3.1.6 would fetch a path where a global fetch exists.
delete globalThis.fetch;
const createShardwright = require(path.resolve(folder, "shardwright_engine.js"));
const source = fs.readFileSync(path.resolve(__dirname, "../../web/engine.js"), "utf8");
const startEngine = vm.runInThisContext(`${source}\nstartEngine;`);

(async () => {
  let progress = [];
  const wasm = fs.readFileSync(path.resolve(folder, "shardwright_engine.wasm"));
  const run = await startEngine(createShardwright, wasm, (told) => progress.push(told));
  for await (const line of readline.createInterface({input: process.stdin})) {
    progress = [];
    const begin = performance.now();
    let result;
    try {
      result = run(JSON.parse(line));
    } catch (error) {
      result = {broken: String(error)};
    }
    process.stdout.write(`${JSON.stringify({...result, progress, ms: performance.now() - begin})}\n`);
  }
})();
