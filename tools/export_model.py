#!/usr/bin/env python3
"""Writes any torch.nn.Module as a model.json (docs/model_json.md): module tree, parameters, ties, ops in execution order.

    python3 tools/export_model.py my_package.my_models:build --seq 2048 -o model.json
    python3 tools/export_model.py torchvision.models:resnet50 --image 224 -o model.json
    python3 tools/export_model.py --config path/to/config.json --seq 2048 -o model.json
    python3 tools/export_model.py my_package:Net --input audio=1x16000 --input tokens=seq:int64 --seq 512 -o model.json

`build()` returns the module; it is called on the meta device, so that no weights exist. --config takes a Transformers
configuration, a folder with one, or a name of the hub. Inputs are input_ids and labels of --seq tokens, or pixel_values and labels
of --image pixels, as far as forward takes them; a module that knows none of these names gets the first by position. Other inputs:
--input, or export(model, inputs) from Python. Needs torch; --config needs transformers.

The module runs forward and backward on tensors without data, at several batches and lengths, and every aten op is written down with
what it multiplies, moves and keeps (tools/model_export). What no rule knows is an error that names op, module and shapes; so is a
size that is no polynomial of batch and length. Routers and experts (3-D weights) of a mixture, as Transformers 5 writes them, are one
op each.
"""

import argparse
import importlib.util
import inspect
import json
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from model_export import outside  # noqa: E402

if sys.flags.isolated and __name__ == "__main__":  # as `shardwright export` starts it
    outside.search_packages()
    if sys.argv[1:] == ["--find-torch"]:
        sys.exit(importlib.util.find_spec("torch") is None)

try:
    import torch
except ImportError as missing:
    print(f"error: {missing}: the export needs Python with torch", file=sys.stderr)
    sys.exit(4)

from model_export import trace  # noqa: E402
from model_export.graph import Graph, Traces, differing  # noqa: E402
from model_export.rules import Unsupported  # noqa: E402
from model_export.sizes import Points  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TASKS = {"causal-lm": "AutoModelForCausalLM", "masked-lm": "AutoModelForMaskedLM", "seq2seq-lm": "AutoModelForSeq2SeqLM",
         "image-classification": "AutoModelForImageClassification", "sequence-classification": "AutoModelForSequenceClassification",
         "base": "AutoModel"}


def module_tree(model, used, norms, run):
    """The entry of the root as model.json lists it; a storage belongs to the first name it has. `used`: ids of the parameters that ops
    read; `norms`: those of the modules that are ops "batch_norm". A module of which nothing but what it holds is called in the `run` is a
    ModuleList, whatever its class: nothing can be hooked into it."""
    owner, first = {}, {}

    def class_of(module, name):
        only_holds = id(module) not in run.called and any(called.startswith(name + ".") for called in run.entered)
        return "ModuleList" if only_holds else type(module).__name__

    def parameters(module, prefix):
        entries = []
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{prefix}{name}"
            if id(param) in owner:
                entries.append({"name": name, "tied_to": owner[id(param)]})
                continue
            owner[id(param)] = full
            row = {"name": name, "shape": list(param.shape) or [1]}
            if not param.requires_grad:
                row["frozen"] = True
            if id(param) not in used:
                row["unused"] = True
            entries.append(row)
        return entries

    def entry(module, prefix):
        row = {}
        if first.setdefault(id(module), prefix[:-1]) != prefix[:-1]:
            row["same_as"] = first[id(module)]
        params = parameters(module, prefix)
        children = [{"name": child, "class": class_of(m, f"{prefix}{child}"), **entry(m, f"{prefix}{child}.")} for child, m in module._modules.items()
                    if m is not None]
        elements = sum(b.numel() if b.is_floating_point() else -(-b.numel() * b.element_size() // 4) for b in module.buffers(recurse=False))
        if params:
            row["params"] = params
            if id(module) in norms:
                row["full_precision"] = True
        if children:
            row["modules"] = children
        if elements and "same_as" not in row:
            row["buffers"] = elements
        return row

    root = entry(model, "")
    root.pop("full_precision", None)  # of the root itself it cannot be said
    root.setdefault("modules", [])
    return root


def block_class(model, called):
    """The class of the layers, or a list of them: those that Transformers says are never split, as far as they stand in lists; else
    the class of the longest list, or dictionary, of equal modules. A module that only holds others is no layer."""
    lists = [[child for child in m.children() if id(child) in called] for m in model.modules()
             if isinstance(m, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential))]
    whole = set(getattr(model, "_no_split_modules", None) or ())
    names = list(dict.fromkeys(type(child).__name__ for one in lists for child in one if {type(c).__name__ for c in one} <= whole))
    if names:
        return names if len(names) > 1 else names[0]
    longest = max((one for one in lists if len({type(child) for child in one}) == 1), key=len, default=None)
    return type(longest[0]).__name__ if longest is not None else ""


def resized(inputs, length, batch, new_length, dtype):
    """The inputs of one sample, for another batch and length."""
    made = {}
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor):
            made[name] = tensor
            continue
        if tensor.dim() == 0 or tensor.shape[0] != 1:
            raise Unsupported(f"input {name} of shape {list(tensor.shape)}: the first dimension must be the batch, of 1 sample")
        shape = [batch, *(new_length if length and size == length else size for size in tensor.shape[1:])]
        made[name] = torch.empty(shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta")
    return made


def lengths_beside(length):
    """Three more lengths; multiples of powers of two where the length is one."""
    for quarter in (4, 1):
        if length % 4 == 0 and length // 4 > 1 and quarter == 4:
            return [length // 2, length // 4, length // 4 * 3]
    return [n for n in (length - 1, length - 2, length - 3) if n > 0]


def positional(model, inputs):
    """Does forward know none of the names? Then the first input is given by position."""
    names = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()) and next(iter(inputs), "") in names:
        return False, inputs
    taken = {name: tensor for name, tensor in inputs.items() if name in names}
    if taken and next(iter(inputs)) in taken:
        return False, taken
    needed = [p for p in names.values() if p.default is inspect.Parameter.empty and
              p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    return True, dict(list(inputs.items())[:max(len(needed), 1)])


def take_traces(model, inputs, length, dtype):
    """Traces at several batches and lengths, their points, and why other lengths are not possible (or None)."""
    by_position, inputs = positional(model, inputs)

    def at(batch, tokens, **draw):
        return trace.run(model, resized(inputs, length, batch, tokens, dtype), by_position, **draw)

    runs, points = [at(2, length), at(3, length)], [(2, length), (3, length)]
    unlike = differing(*runs)
    if unlike:
        raise Unsupported(f"what runs depends on the batch: {unlike}")
    unlike = runs[0].has_drawn and differing(runs[0], at(2, length, draw=0.0))
    if unlike:
        raise Unsupported(f"what runs depends on a number drawn at random, as of layers that are dropped: {unlike}")
    if not length or not any(length in t.shape[1:] for t in inputs.values() if isinstance(t, torch.Tensor)):
        runs.append(at(5, length))
        return runs, points + [(5, length)], None
    reason = None
    more, places = [], []
    try:
        others = lengths_beside(length)
        wanted = [(b, n) for n in others[:2] for b in (2, 3)] + [(5, n) for n in others[2:]]
        if len(wanted) < 5:
            raise Unsupported(f"too short a length, {length}, to tell what depends on it")
        for batch, tokens in wanted:
            more.append(at(batch, tokens))
            places.append((batch, tokens))
            unlike = differing(runs[0], more[-1])
            if unlike:
                raise Unsupported(f"at length {tokens} {unlike}")
    except Unsupported as error:
        reason = str(error)
    if reason:
        runs.append(at(5, length))
        return runs, points + [(5, length)], reason
    return runs + more, points + places, None


def without_data(model, dtype):
    """The module on the meta device. Module.to() makes a parameter of its own for every module that shares one."""
    places = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module._parameters, name))
    model = model.to(device="meta", **({"dtype": dtype} if dtype is not None else {}))
    for (first, name), *others in places.values():
        for parameters, other in others:
            parameters[other] = first[name]
    return model


def export(model, inputs, sequence_length=0, dtype=None):
    """model.json as a dictionary. `inputs` are the arguments of one sample by name; the batch comes first."""
    trace.check_wrappers(model)
    model = trace.unwrap(model)
    if any(isinstance(m, torch.nn.RNNBase) for m in model.modules()):
        name, module = next((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.RNNBase))
        raise Unsupported(f"{name or 'the root module'}: {type(module).__name__}, a loop over the tokens")
    model = without_data(model, dtype)
    computes = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    runs, points, reason = take_traces(model, inputs, sequence_length, computes)
    try:
        graph = write_graph(model, runs, points, reason, computes)
    except Unsupported as error:
        if reason or len(runs) == 3:
            raise
        reason = str(error)
        kept = [i for i, (_, s) in enumerate(points) if s == sequence_length]
        graph = write_graph(model, [runs[i] for i in kept], [points[i] for i in kept], reason, computes)
    used = {name for op in graph.ops for name in op["inputs"]}
    document = {"format": "shardwright-model", "version": 1, "_source": "tools/export_model.py, torch " + torch.__version__,
                "class": type(model).__name__}
    called = runs[0].called
    if block_class(model, called):
        document["block_class"] = block_class(model, called)
    if sequence_length:
        document["sequence_length"] = sequence_length
    if reason:
        document["fixed_length"] = reason
    document["inputs"] = {name: spec for name, spec in graph.inputs.items() if name in used}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    document |= module_tree(model, {id(parameters[name]) for name in graph.used_parameters},
                            {id(graph.modules[op["module"]]) for op in graph.ops if op["op"] == "batch_norm" and "module" in op}, runs[0])
    document["ops"] = graph.ops
    export.traces, export.points = runs, points
    return document


def write_graph(model, runs, points, reason, dtype):
    graph = Graph(Traces(runs, Points(points, varies_length=len({s for _, s in points}) > 1)), model, dict(model.named_modules(remove_duplicate=False)))
    graph.dtype = dtype
    graph.write()
    return graph


def build(arguments):
    """The module, not yet on the meta device where it does not let itself be built there."""
    if arguments.config:
        return build_transformers(arguments)
    module, _, function = arguments.builder.partition(":")
    try:
        maker = getattr(outside.named_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unsupported(f"{arguments.builder}: {error}") from error
    return without_weights(maker)


def without_weights(maker):
    try:
        with torch.device("meta"):
            return maker()
    except Exception as error:  # noqa: BLE001  initialisation that looks at values
        print(f"building on the meta device fails ({type(error).__name__}); building with weights", file=sys.stderr)
    try:
        return maker()
    except Exception as error:
        raise Unsupported(f"the module cannot be built: {type(error).__name__}: {error}") from error


# Where a configuration has several: the first of these that knows it.
KINDS = ("Seq2SeqLM", "SpeechSeq2Seq", "MaskedLM", "CausalLM", "ImageTextToText", "ZeroShotImageClassification", "ImageClassification", "AudioClassification")


def auto_class(auto, config, is_image):
    """The Auto class whose model the file names under "architectures"; without that, the task that such a configuration is for."""
    def known(kind):
        return getattr(auto, f"AutoModelFor{kind}")._model_mapping._model_mapping

    asked = (getattr(config, "architectures", None) or [""])[0]
    kinds = ("ImageClassification", *KINDS) if is_image else KINDS
    for kind in (*kinds, "SequenceClassification", "TokenClassification", "QuestionAnswering"):
        if asked and asked == known(kind).get(config.model_type):
            return f"AutoModelFor{kind}"
    if asked and asked == auto.AutoModel._model_mapping._model_mapping.get(config.model_type):  # a body without a head
        return "AutoModel"
    if config.model_type in known("CausalLM") and getattr(config, "is_decoder", False):
        return "AutoModelForCausalLM"
    return next((f"AutoModelFor{kind}" for kind in kinds if config.model_type in known(kind)), "AutoModel")


def build_transformers(arguments):
    try:
        import transformers
    except ImportError as missing:
        raise Unsupported(f"{missing}: --config needs Python with transformers") from missing
    transformers.utils.logging.set_verbosity_error()
    trusted = {"trust_remote_code": True} if arguments.trust_remote_code else {"trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(arguments.config, **trusted)
    except Exception as error:
        raise Unsupported(f"{arguments.config}: {' '.join(str(error).split())[:300]}") from error
    config.use_cache = False
    name = TASKS[arguments.task] if arguments.task else auto_class(transformers.models.auto.modeling_auto, config, bool(arguments.image))
    kind = getattr(transformers, name)

    def make():
        try:
            return kind.from_config(config, attn_implementation="sdpa", **trusted)
        except ValueError as error:  # capped scores, ALiBi
            if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error):
                raise
            return kind.from_config(config, attn_implementation="eager", **trusted)

    return without_weights(make)


def parse_input(text, length):
    """NAME=3x224x224, NAME=seq:int64, NAME=seqx80:float"""
    name, _, rest = text.partition("=")
    shape, _, dtype = rest.partition(":")
    try:
        sizes = [length if part == "eq" or part == "seq" else int(part) for part in shape.replace("seq", "eq").split("x") if part]
        kind = {"": torch.float32, "float": torch.float32, "int64": torch.int64, "bool": torch.bool}[dtype]
        if not name or any(size < 1 for size in sizes):
            raise ValueError
    except (ValueError, KeyError):
        raise Unsupported(f"--input {text}: expected NAME=SHAPE or NAME=SHAPE:int64, such as x=3x224x224 or ids=seq:int64; seq is --seq") from None
    return name, torch.empty([1, *sizes], dtype=kind, device="meta")


def inputs_of(arguments, model):
    if arguments.input:
        return dict(parse_input(text, arguments.seq) for texts in arguments.input for text in texts.split(","))
    if arguments.image:
        channels = getattr(getattr(model, "config", None), "num_channels", 3)
        return {"pixel_values": torch.empty(1, channels, arguments.image, arguments.image, device="meta"),
                "labels": torch.empty(1, dtype=torch.long, device="meta")}
    ids = torch.empty(1, arguments.seq, dtype=torch.long, device="meta")
    if getattr(model, "main_input_name", "") == "input_features":  # of speech, whose length the encoder's positions fix
        frames = getattr(model.config, "max_source_positions", 1500) * 2
        return {"input_features": torch.empty(1, model.config.num_mel_bins, frames, device="meta"), "decoder_input_ids": ids,
                "labels": ids.clone()}
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids.clone()
    return inputs


def export_as_asked(arguments):
    model = build(arguments)
    if not isinstance(model, torch.nn.Module):
        raise Unsupported(f"{arguments.builder} returns {type(model).__name__}, no torch.nn.Module")
    inputs = inputs_of(arguments, model)
    dtype = DTYPES[arguments.dtype]
    try:
        return export(model.train(), inputs, arguments.seq, dtype)
    except Unsupported as error:
        if "dtype" not in str(error) or dtype is torch.float32:
            raise
        print(f"in {arguments.dtype}: {printable(error)}; in fp32 instead", file=sys.stderr)
        return export(model.train(), inputs, arguments.seq, torch.float32)


def program():
    """The shardwright that this tool was installed or built with, or one on the PATH."""
    beside = [HERE.parent.parent.parent / "bin" / "shardwright", HERE.parent / "build" / "shardwright"]
    return next((str(p) for p in beside if p.is_file()), shutil.which("shardwright"))


def write_whole(file, text):
    """Writes nothing that the program would refuse."""
    with outside.replacing(file) as path:
        path.write_text(text, encoding="utf-8")
        if program():
            read = subprocess.run([program(), "inspect", str(path), "--json"], capture_output=True, text=True, check=False)
            if read.returncode != 0:
                raise Unsupported(f"shardwright would not load the result: {read.stderr.strip()}")


def printable(error):
    """Names come from strangers: nothing of them reaches the terminal as a control character."""
    return "".join(c if c.isprintable() else "?" for c in str(error))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builder", nargs="?", help="package.module:function that returns the module")
    parser.add_argument("--config", help="config.json of Transformers, a folder with one, or a name of the hub")
    parser.add_argument("--seq", type=int, default=0, help="tokens per sample")
    parser.add_argument("--image", type=int, default=0, help="height and width of images in pixels")
    parser.add_argument("--input", action="append", metavar="NAME=SHAPE[:DTYPE]",
                        help="an input of one sample, or several with commas; may be repeated")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations in the trace (default: bf16)")
    parser.add_argument("--task", choices=TASKS, help="which Auto class of Transformers; default: by the configuration")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("-o", "--output", default="model.json", help="the file (default: model.json); - is standard output")
    arguments = parser.parse_args()
    if bool(arguments.builder) == bool(arguments.config) or not (arguments.seq > 0 or arguments.image > 0 or arguments.input):
        parser.error("give a builder or --config, and --seq, --image or --input")
    printed = None
    if arguments.output == "-":
        printed = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what the model prints is no part of the result
    try:
        text = json.dumps(export_as_asked(arguments), indent=1) + "\n"
        if printed is None:
            write_whole(arguments.output, text)
        else:
            printed.write(text)
            printed.close()
    except Unsupported as error:
        print("error: " + printable(error), file=sys.stderr)
        return 3
    except OSError as error:
        print(f"error: {arguments.output}: {error.strerror}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
