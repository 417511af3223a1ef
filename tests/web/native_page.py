"""The page with the native program where its engine would be: what the page does with answers can be tested without Emscripten."""

import functools
import http.server
import json
import pathlib
import sys
import tempfile
import threading

import web_test_case

sys.path.insert(0, str(web_test_case.ROOT / "web"))
import assemble  # noqa: E402

SCRIPT = """"use strict";
const createShardwright = null;
const startEngine = async () => (job) => {
  const request = new XMLHttpRequest();
  request.open("POST", "%s", false);
  request.send(JSON.stringify(job, (key, value) => value instanceof Uint8Array ? Array.from(value) : value));
  return JSON.parse(request.responseText);
};
"""


def answer(program, job):
    """What the engine gives for {words, input, files}."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for file in job.get("files", []):
            name = file["name"].replace("/", "_")
            path = pathlib.Path(folder) / name.removesuffix(".json") / name
            path.parent.mkdir()
            content = file["content"]
            path.write_bytes(content.encode() if isinstance(content, str) else bytes(content))
            paths[f"@{file['name']}"] = str(path)
        words = [paths.get(word, word) for word in job["words"]]
        code, output, errors = web_test_case.native(program, *words, text=job.get("input", ""))
    told = [line for line in errors.splitlines(True) if not line.startswith("searching ")]  # how far it is
    return {"code": code, "output": output, "errors": "".join(told)}


class Handler(http.server.BaseHTTPRequestHandler):

    def __init__(self, program, *arguments):
        self.program = program
        super().__init__(*arguments)

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(answer(self.program, job)).encode()
        self.send_response(200)
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            pass  # the worker was ended meanwhile

    def log_message(self, *arguments):
        pass


def write(program, d3, output):
    """Writes the page; returns the server that answers it, which the caller shuts down."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, program))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    worker = assemble.read(web_test_case.ROOT / "web/worker.js")
    text = assemble.page({"loader": "", "script": SCRIPT % f"{address}/run", "worker": worker, "wasm": assemble.packed(b"")}, d3, address)
    output.write_text(text, encoding="utf-8")
    return server
