"""The PyTorch run of docs/tutorial.md: two gloo processes wrap a transformers model with the emitted plan and train."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError:
    print("torch or transformers is not installed: skipped")
    sys.exit(77)

PROGRAM = pathlib.Path(sys.argv[1])
# Threads of gloo that still hold tensors abort a process at Python's end, now and then: a trained script ends before it.
END = "\nimport os\nsys.stdout.flush()\nos._exit(0)\n"


def main():
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
    shell = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    # The configuration, and the commands that emit the plan for two ranks.
    blocks = [shell[0], next(block for block in shell if "--to fsdp2" in block)]
    environment = {**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks:
            subprocess.run(["bash", "-e", "-c", block], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        (pathlib.Path(folder) / "train.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1] + END)
        # To a file per process: torchrun's processes do not buffer, and would write into each other's lines.
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                               "--redirects", "3", "--log-dir", "logs", "train.py"],
                              cwd=folder, env=environment, text=True, capture_output=True, timeout=500, check=False)
        logs = {str(log): log.read_text() for log in pathlib.Path(folder).glob("logs/**/std*.log")}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    losses = [float(loss) for log in logs.values() for loss in re.findall(r"step \d loss (\S+)", log)]
    print(losses)
    assert len(losses) == 4
    # A fresh model knows nothing: its loss is near log(1024) = 6.93.
    assert all(abs(loss - 6.931) < 0.3 for loss in losses), losses


if __name__ == "__main__":
    main()
