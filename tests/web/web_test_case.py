"""What the tests of the page share: the built page, the engine under Node, and the native program."""

import json
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILT = ROOT / "build/web"


def skip_without(condition, what):
    if not condition:
        print(f"{what}: skipped")
        sys.exit(77)


def skip_unbuilt():
    skip_without((BUILT / "shardwright_engine.wasm").exists() and (BUILT / "shardwright.html").exists(), "scripts/web.sh has not run")


class Engine:
    """The page's engine in a Node process of its own."""

    def __init__(self):
        self.process = subprocess.Popen(["node", str(pathlib.Path(__file__).parent / "engine_host.cjs"), str(BUILT)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *words, files=(), text=""):
        job = {"words": list(words), "input": text, "files": [{"name": name, "content": content} for name, content in files]}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def have_node():
    return shutil.which("node") is not None


def native(program, *words, text=""):
    """(exit code, standard output, standard error) of the program, on one thread as the page."""
    result = subprocess.run([program, *words], input=text, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr
