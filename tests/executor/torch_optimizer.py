"""PyTorch's own optimizer steps, bitsandbytes' Lion and Transformers' Adafactor, as numbers that optimizer_test.cc compares with.

    python3 tests/executor/torch_optimizer.py --write   # rewrites tests/data/executor/torch_optimizer.json
    python3 tests/executor/torch_optimizer.py           # checks that file against the installed torch
    python3 tests/executor/torch_optimizer.py --libraries  # and against bitsandbytes and Transformers, too

What differs between PyTorch's own devices is kept out: the scalars of add() have few bits, because the CPU rounds them to
the tensor's dtype and CUDA does not.
"""

import json
import pathlib
import struct
import sys

LIBRARIES = {"--write", "--libraries"} & set(sys.argv[1:])
try:
    import torch
    if LIBRARIES:
        import bitsandbytes
        from transformers.optimization import Adafactor
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

FILE = pathlib.Path(__file__).resolve().parent.parent / "data" / "executor" / "torch_optimizer.json"
STEPS, LIBRARY_STEPS = 3, 20
ELEMENTS = 64  # whole vector registers: PyTorch's loops over the rest round 16-bit numbers more often

# name, our optimizer kind, torch class, arguments
CASES = [
    ("sgd", "sgd", torch.optim.SGD, {"lr": 0.125}),
    ("sgd with decay", "sgd", torch.optim.SGD, {"lr": 0.125, "weight_decay": 0.0234375}),
    ("momentum", "momentum", torch.optim.SGD, {"lr": 0.0625, "momentum": 0.9}),
    ("momentum, all options", "momentum", torch.optim.SGD,
     {"lr": 0.0625, "momentum": 0.8, "dampening": 0.25, "weight_decay": 0.0234375}),
    ("nesterov", "momentum", torch.optim.SGD,
     {"lr": 0.0625, "momentum": 0.875, "nesterov": True, "weight_decay": 0.125}),
    ("adam", "adam", torch.optim.Adam, {"lr": 1e-3}),
    ("adam with decay", "adam", torch.optim.Adam,
     {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.125}),
    ("adam, small beta1", "adam", torch.optim.Adam, {"lr": 3e-3, "betas": (0.3, 0.95)}),
    ("adamw", "adamw", torch.optim.AdamW, {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("adadelta", "adadelta", torch.optim.Adadelta, {"lr": 1.0, "eps": 2 ** -20}),
    ("adadelta with decay", "adadelta", torch.optim.Adadelta,
     {"lr": 0.5, "rho": 0.95, "eps": 2 ** -17, "weight_decay": 0.015625}),
]
SHAPE = (4, 16)
AS_TRAINER = {"scale_parameter": False, "relative_step": False, "warmup_init": False}  # transformers, trainer_optimizer.py
LIBRARY_CASES = LIBRARIES and [
    ("lion", "lion", bitsandbytes.optim.Lion32bit, {"lr": 1e-4}),
    ("lion with decay", "lion", bitsandbytes.optim.Lion32bit, {"lr": 1e-3, "betas": (0.95, 0.98), "weight_decay": 0.5}),
    ("adafactor, vector", "adafactor", Adafactor, {"lr": 1e-3}),
    ("adafactor, matrix", "adafactor", Adafactor, {"lr": 1e-2}),
    ("adafactor, matrix with decay", "adafactor", Adafactor, {"lr": 1e-2, "weight_decay": 0.25}),
]
STATES = {"sgd": [], "momentum": ["momentum_buffer"], "adam": ["exp_avg", "exp_avg_sq"],
          "adamw": ["exp_avg", "exp_avg_sq"], "adadelta": ["square_avg", "acc_delta"]}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def bits(tensor):
    """The elements' bits as hexadecimal digits, eight or four per element."""
    width = tensor.element_size()
    integers = tensor.detach().view({4: torch.int32, 2: torch.int16}[width])
    return "".join(f"{int(x) & (2 ** (8 * width) - 1):0{2 * width}x}" for x in integers)


def run_case(name, kind, optimizer_class, arguments, dtype_name):
    generator = torch.Generator().manual_seed(7)
    dtype = DTYPES[dtype_name]
    param = torch.nn.Parameter(torch.randn(ELEMENTS, generator=generator).to(dtype))
    case = {"name": name, "kind": kind, "dtype": dtype_name, "arguments": {}, "param": bits(param), "steps": []}
    for key, value in arguments.items():
        if key == "betas":
            case["arguments"]["beta1"], case["arguments"]["beta2"] = value
        else:
            case["arguments"][{"lr": "learning_rate", "eps": "epsilon"}.get(key, key)] = value
    optimizer = optimizer_class([param], foreach=False, **arguments)
    for _ in range(STEPS):
        param.grad = torch.randn(ELEMENTS, generator=generator).to(dtype)
        optimizer.step()
        case["steps"].append({"grad": bits(param.grad), "param": bits(param)})
    case["states"] = [bits(optimizer.state[param][s]) for s in STATES[kind]]
    return case


def run_library(name, kind, optimizer_class, arguments):
    generator = torch.Generator().manual_seed(8)
    shape = SHAPE if "matrix" in name else (ELEMENTS,)
    param = torch.nn.Parameter(torch.randn(shape, generator=generator))
    case = {"name": name, "kind": kind, "dtype": "fp32", "arguments": {"learning_rate": arguments["lr"]}, "param": bits(param.view(-1)), "steps": []}
    if "matrix" in name:
        case["columns"] = SHAPE[1]
    case["arguments"] |= {"weight_decay": arguments["weight_decay"]} if "weight_decay" in arguments else {}
    if kind == "lion":
        case["arguments"] |= dict(zip(("beta1", "beta2"), arguments.get("betas", (0.9, 0.99))))
    optimizer = optimizer_class([param], **arguments, **(AS_TRAINER if kind == "adafactor" else {}))
    for _ in range(LIBRARY_STEPS):
        param.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        case["steps"].append({"grad": bits(param.grad.view(-1)), "param": bits(param.view(-1))})
    state = optimizer.state[param]
    names = ["state1"] if kind == "lion" else ["exp_avg_sq_row", "exp_avg_sq_col"] if "matrix" in name else ["exp_avg_sq"]
    case["states"] = ["".join(bits(state[s].view(-1)) for s in names)]
    return case


def numbers(text):
    """fp32 numbers of what `bits` writes."""
    return torch.tensor([struct.unpack(">f", bytes.fromhex(text[i:i + 8]))[0] for i in range(0, len(text), 8)])


def main():
    cases = [run_case(*case, dtype) for case in CASES for dtype in DTYPES]
    cases += [run_library(*case) for case in LIBRARY_CASES] if LIBRARIES else []
    document = {"source": "tests/executor/torch_optimizer.py, torch 2.13", "cases": cases}
    text = json.dumps(document, indent=None, separators=(", ", ": ")).replace('{"name"', '\n{"name"') + "\n"
    if "--write" in sys.argv[1:]:
        FILE.write_text(text)
        return 0
    # fp32 square roots are MKL's and may differ between CPUs in the last bit: the C++ test has the bound for them.
    exact = [[c for c in json.loads(t)["cases"][:len(cases)] if c["dtype"] != "fp32" or not c["kind"].startswith("ada")]
             for t in (FILE.read_text(), text)]
    for held, theirs in zip(json.loads(FILE.read_text())["cases"], cases):
        if theirs["kind"] == "adafactor" and not all(torch.allclose(numbers(a["param"]), numbers(b["param"]), rtol=1e-5, atol=1e-6)
                                                     for a, b in zip(held["steps"], theirs["steps"], strict=True)):
            print(f"{theirs['name']}: other numbers than {FILE.name} holds")
            return 1
    if exact[0] != exact[1]:
        print(f"torch {torch.__version__} computes other numbers than {FILE.name} holds")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
