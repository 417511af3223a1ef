// Runs commands of the program. The same text serves a Web Worker of the page and Node: `createShardwright` is Emscripten's loader.
"use strict";

// `wasm`: the bytes of the engine. `tell` hears {simulated, best, bound} while a search runs.
const startEngine = async (createShardwright, wasm, tell) => {
  let errors = [];
  const engine = await createShardwright({
    wasmBinary: wasm,
    onProgress: (simulated, best, bound) => tell({simulated, best, bound}),
    preRun: [(module) => module.FS.init(() => null, () => {}, (byte) => {
      if (byte !== null) {
        errors.push(byte & 255);
      }
    })],
  });
  const encoder = new TextEncoder(), decoder = new TextDecoder();
  const give = (receive, text) => {
    const bytes = encoder.encode(text);
    const place = engine._malloc(bytes.length + 1);
    engine.HEAPU8.set(bytes, place);
    engine.HEAPU8[place + bytes.length] = 0;
    receive(place);
    engine._free(place);
  };
  // Only the file's own name comes from a stranger, and it is no path. A config.json has the name of its folder.
  const put = ({name, content}) => {
    const file = name.replaceAll("/", "_");
    const folder = `/files/${file.replace(/\.json$/, "").replace(/^\.*$/, "_")}`;
    const path = `${folder}/${file}`;
    engine.FS.mkdirTree(folder);
    engine.FS.writeFile(path, content);
    return path;
  };
  // {words, input, files: [{name, content}]} -> {code, output, errors}. A word "@name" is the file of that name.
  return ({words, input = "", files = []}) => {
    errors = [];
    const paths = new Map(files.map((file) => [`@${file.name}`, put(file)]));
    try {
      for (const word of words) {
        give(engine._shardwright_add_word, paths.get(word) ?? word);
      }
      give(engine._shardwright_set_input, input);
      const code = engine._shardwright_run();
      const begin = engine._shardwright_output();
      const output = decoder.decode(engine.HEAPU8.subarray(begin, begin + engine._shardwright_output_size()));
      return {code, output, errors: decoder.decode(new Uint8Array(errors))};
    } finally {
      for (const path of paths.values()) {
        engine.FS.unlink(path);
      }
    }
  };
};
