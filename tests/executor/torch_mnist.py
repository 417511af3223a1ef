"""The network of PyTorch's MNIST and FSDP examples, on the digits in tests/data/digits.

    python3 tests/executor/torch_mnist.py SHARDWRIGHT             # the test: PyTorch judges a model trained by shardwright
    python3 tests/executor/torch_mnist.py train EPOCHS [SEED]     # trains as the example does; prints its test lines
    python3 tests/executor/torch_mnist.py test FILE.safetensors   # accuracy of a model that shardwright has exported
"""

import gzip
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy
    import torch
    from safetensors.torch import load_file
    from torch import nn
    from torch.nn import functional
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tools"))
import export_model  # noqa: E402

DIGITS = pathlib.Path(__file__).resolve().parent.parent / "data" / "digits"
BATCH = 60


class Net(nn.Module):
    """pytorch/examples, mnist/main.py."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout1(functional.max_pool2d(x, 2))
        x = self.dropout2(functional.relu(self.fc1(torch.flatten(x, 1))))
        return functional.log_softmax(self.fc2(x), dim=1)


class NormNet(nn.Module):
    """A small network with batch norms that take the statistics of all ranks. Without ranks they are PyTorch's plain ones."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, bias=False)
        self.norm1 = nn.SyncBatchNorm(8)
        self.conv2 = nn.Conv2d(8, 12, 3, bias=False)
        self.norm2 = nn.SyncBatchNorm(12, eps=1e-3)
        self.fc = nn.Linear(300, 10)

    def forward(self, x, labels):
        x = functional.max_pool2d(functional.relu(self.norm1(self.conv1(x))), 2)
        x = functional.max_pool2d(functional.relu(self.norm2(self.conv2(x))), 2)
        return functional.nll_loss(functional.log_softmax(self.fc(torch.flatten(x, 1)), dim=1), labels)


def load(name):
    with gzip.open(DIGITS / f"{name}-images-idx3-ubyte.gz") as file:
        images = numpy.frombuffer(file.read()[16:], numpy.uint8).reshape(-1, 1, 28, 28)
    with gzip.open(DIGITS / f"{name}-labels-idx1-ubyte.gz") as file:
        labels = numpy.frombuffer(file.read()[8:], numpy.uint8)
    return (torch.from_numpy(images.astype(numpy.float32)) / 255 - 0.1307) / 0.3081, torch.from_numpy(labels.astype("i8"))


def test(model):
    """(mean loss, right ones, all) of the test set."""
    images, labels = load("t10k")
    model.eval()
    with torch.no_grad():
        scores = model(images)
    loss = functional.nll_loss(scores, labels, reduction="sum").item() / len(labels)
    return loss, int((scores.argmax(1) == labels).sum()), len(labels)


def print_test(model):
    loss, right, count = test(model)
    print(f"Test set: Average loss: {loss:.4f}, Accuracy: {right}/{count} ({100 * right / count:.2f}%)")


def train(epochs, seed):
    torch.manual_seed(seed)
    images, labels = load("train")
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(epochs):
        model.train()
        order = torch.randperm(len(labels))
        for begin in range(0, len(labels), BATCH):
            batch = order[begin:begin + BATCH]
            optimizer.zero_grad()
            functional.nll_loss(model(images[batch]), labels[batch], reduction="sum").backward()
            optimizer.step()
        print_test(model)
        schedule.step()


def judge(program):
    """Trains one epoch on two ranks, exports, and compares shardwright's own evaluation with PyTorch's."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def run(*arguments):
            return subprocess.run([program, *arguments], cwd=folder, check=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True).stdout

        run("plan", "--model", "mnist-convnet", "--cluster", "h100-80 x2, nvlink 450 GB/s", "--kernel-set",
            "shardwright-host", "--dialect", "fsdp1", "--wrap", "size:100", "--optimizer", "adadelta", "--weight-decay",
            "off", "--clip", "off", "--precision", "fp32", "--micro-batch", "30", "-o", "plan.json")
        run("run", "plan.json", "--epochs", "1", "--data", str(DIGITS / "train-images-idx3-ubyte.gz"), "--checkpoint", "c")
        run("checkpoint", "export", "c", "-o", "net.safetensors")
        own = json.loads(run("eval", "plan.json", "--checkpoint", "c", "--data",
                             str(DIGITS / "t10k-images-idx3-ubyte.gz"), "--json"))
        model = Net()
        model.load_state_dict(load_file(folder / "net.safetensors"))
        loss, right, count = test(model)
    print(f"shardwright {own['correct']}/{own['counted']} loss {own['mean_loss']:.6f}, torch {right}/{count} loss {loss:.6f}")
    # The losses are sums of 297 fp32 numbers whose relative errors are a few units of 2^-24.
    return 0 if (own["correct"], own["counted"]) == (right, count) and abs(own["mean_loss"] - loss) <= 1e-5 * loss else 1


NORM_STEPS = 6
NORM_RATE = 0.05
# Both sides compute in fp32 and sum in different orders: a loss has a relative error of a few units of 2^-24 = 6e-8 in the first
# step (measured: 1e-6 over six), and the gradient of a weight before a norm is a sum over 60 x 26 x 26 elements that nearly cancel.
LOSS_BOUND = 1e-5
WEIGHT_BOUND = 60 * 26 * 26 * 2 ** -24


def distance(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def judge_norms(program):
    """Batch norm over three ranks against PyTorch's on the whole batch: the loss of each step, weights, running statistics."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def run(*arguments):
            return subprocess.run([program, *arguments], cwd=folder, check=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True).stdout

        def train(steps, rate, out):
            options = {"format": "shardwright-training", "version": 1, "shuffle": False, "optimizer": {"learning_rate": rate}}
            (folder / "options.json").write_text(json.dumps(options))
            report = run("run", "plan.json", "--steps", str(steps), "--data", str(DIGITS / "train-images-idx3-ubyte.gz"),
                         "--training", "options.json", "--checkpoint", out, "--json")
            run("checkpoint", "export", out, "-o", out + ".safetensors")
            return [step["loss"] for step in json.loads(report)["steps"]], load_file(folder / (out + ".safetensors"))

        inputs = {"x": torch.zeros(1, 1, 28, 28), "labels": torch.zeros(1, dtype=torch.int64)}
        (folder / "net.json").write_text(json.dumps(export_model.export(NormNet(), inputs)))
        run("plan", "--model", "./net.json", "--cluster", "h100-80 x3, nvlink 450 GB/s", "--kernel-set", "shardwright-host",
            "--dialect", "fsdp2", "--wrap", "size:100", "--optimizer", "sgd", "--weight-decay", "off", "--clip", "off",
            "--precision", "fp32", "--micro-batch", str(BATCH // 3), "-o", "plan.json")
        _, first = train(1, 0.0, "first")  # a step without learning rate leaves the weights where they begin
        ours, last = train(NORM_STEPS, NORM_RATE, "last")
    model = NormNet()  # the exporter's call has moved the running statistics of its own
    model.load_state_dict({k: v for k, v in first.items() if "running" not in k}, strict=False)
    images, labels = load("train")
    theirs = []
    for step in range(NORM_STEPS):
        model.zero_grad()
        batch = slice(step * BATCH, (step + 1) * BATCH)
        loss = model(images[batch], labels[batch])
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= NORM_RATE * param.grad
        theirs.append(loss.item())
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs))
    state = {k: v for k, v in model.state_dict().items() if v.is_floating_point()}
    assert set(state) == set(last), set(state) ^ set(last)
    off = {k: distance(last[k], v) for k, v in state.items()}
    print(f"batch norm over 3 ranks: losses {ours[0]:.6f} .. {ours[-1]:.6f}, torch {theirs[0]:.6f} .. {theirs[-1]:.6f}, largest relative "
          f"distance {worst:.1e}; of weights {max(off.values()):.1e} ({max(off, key=off.get)})")
    falls = theirs[-1] < 0.9 * theirs[0]
    return 0 if worst <= LOSS_BOUND and max(off.values()) <= WEIGHT_BOUND and falls and len(ours) == NORM_STEPS else 1


def main(arguments):
    torch.set_num_threads(1)
    if arguments[0] not in ("train", "test"):
        program = str(pathlib.Path(arguments[0]).resolve())
        return judge(program) or judge_norms(program)
    if arguments[0] == "train":
        train(int(arguments[1]), int(arguments[2]) if len(arguments) > 2 else 1)
        return 0
    model = Net()
    model.load_state_dict(load_file(arguments[1]))
    print_test(model)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
