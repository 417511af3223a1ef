"""Training runs that others measured and published: rows of tables such as bench/published/measured_runs.csv."""

import math
import re

from lab.base import InputError, number_in, read_table

# Columns that every table must have. The others (gpu_class, tier, measured values, ...) are optional; more are ignored.
REQUIRED = ("id", "model_name", "n_params", "n_layers", "hidden", "n_heads", "n_kv_heads", "ffn_hidden", "vocab", "ffn_kind", "seq_len",
            "gpu", "gpus", "gpus_per_node", "internode_network", "parallelism", "sharding_strategy", "param_dtype", "optimizer",
            "activation_checkpointing", "cpu_offload", "microbatch_per_gpu", "grad_accum", "compiled", "attention_kernel", "framework", "date")
# Attributes of a run by column.
TEXTS = {"id": "id", "tier": "tier", "model_name": "model_name", "ffn_kind": "ffn_kind", "tied_embedding": "tied_embeddings", "gpu": "gpu",
         "gpu_class": "gpu_class", "network": "internode_network", "parallelism": "parallelism", "sharding": "sharding_strategy",
         "param_dtype": "param_dtype", "compute_dtype": "compute_dtype", "optimizer": "optimizer", "checkpointing": "activation_checkpointing",
         "offload": "cpu_offload", "compiled": "compiled", "attention_kernel": "attention_kernel", "framework": "framework", "date": "date"}
COUNTS = {"parameters": "n_params", "layers": "n_layers", "hidden": "hidden", "heads": "n_heads", "kv_heads": "n_kv_heads",
          "ffn_hidden": "ffn_hidden", "vocabulary": "vocab", "sequence_length": "seq_len", "gpus": "gpus", "gpus_per_node": "gpus_per_node",
          "micro_batch": "microbatch_per_gpu", "accumulation": "grad_accum", "global_batch": "global_batch_sequences"}
NUMBERS = {"step_time_s": "step_time_s", "tokens_per_s_per_gpu": "tokens_per_s_per_gpu", "mfu_percent": "mfu_pct", "hfu_percent": "hfu_pct",
           "peak_memory_gib": "peak_mem_GiB"}
OUTCOMES = ("", "fits", "fits_max", "oom", "failed_presumed_oom")
# What a prediction may depend on.
CONFIGURATION = ("model_name", "ffn_kind", "tied_embedding", "gpu_class", "network", "parallelism", "sharding", "param_dtype",
                 "compute_dtype", "optimizer", "checkpointing", "offload", "compiled", "attention_kernel", "framework", "date", *COUNTS)
MOST = 1 << 50


class Run:
    """One row. Numbers that are not published are 0, texts empty."""

    def __init__(self, row):
        self.line = row.line
        for name, column in TEXTS.items():
            setattr(self, name, row.get(column, ""))
        for name in (*COUNTS, *NUMBERS):
            setattr(self, name, 0)
        self.gpu_class = self.gpu_class or self.gpu
        # Beside whole logits, which no plan says; so do its notes alone.
        self.chunks_its_loss = "chunked" in row.get("notes", "")
        self.data_parallel_only = row.get("dp_only", "") != "n"
        self.memory_kind = ""  # what the published number of bytes counts
        self.outcome = ""
        if not self.id:
            raise InputError(row.where("id"), "nothing", "a name for the row")
        # A field that is no number where one is needed, as one error line: such rows cannot be used, but the others of their table can.
        self.problem = ""
        try:
            self.read_numbers(row)
        except InputError as error:
            self.problem = str(error)

    def read_numbers(self, row):
        for name, column in COUNTS.items():
            text = row.get(column, "")
            if text and not (re.fullmatch(r"\d+", text) and int(text) <= MOST):
                raise InputError(row.where(column), f'"{text}"', "a count or nothing")
            setattr(self, name, int(text or 0))
        for name, column in NUMBERS.items():
            text = row.get(column, "")
            value = number_in(text) if text else 0
            if not 0 <= value < math.inf:
                raise InputError(row.where(column), f'"{text}"', "a number or nothing")
            setattr(self, name, value)
        if self.peak_memory_gib > 0:
            self.memory_kind = memory_kind(row.get("peak_mem_kind", ""))
        text = row.get("outcome", "")
        if text not in OUTCOMES:
            raise InputError(row.where("outcome"), f'"{text}"', "fits, fits_max, oom, failed_presumed_oom or nothing")
        self.outcome = text

    def source(self):
        """The id up to its first '-'; of "oom-<source>-7" the part behind "oom-"."""
        return self.id.removeprefix("oom-").split("-")[0]

    def configuration(self, without=()):
        """Every column that a prediction may depend on: equal for twins."""
        return tuple(getattr(self, name) for name in CONFIGURATION if name not in without)

    def tokens_per_step(self):
        """Per GPU, as measured."""
        return self.step_time_s * self.tokens_per_s_per_gpu


def memory_kind(text):
    """Kinds are sentences; their first words tell them apart. "active" counts blocks in use like "allocated" does; "32 - gb_free" is
    fairseq's name for 32 GB less max_memory_allocated."""
    if not text:
        return ""
    if "reserved" in text:
        return "reserved"
    if any(word in text for word in ("allocated", "active", "gb_free")):
        return "allocated"
    return "device" if "nvidia-smi" in text else "allocated"


def runs_of(rows):
    runs, ids = [], set()
    for row in rows:
        runs.append(Run(row))
        if runs[-1].id in ids:
            raise InputError(row.where("id"), f'a second "{runs[-1].id}"', "a different name for each row")
        ids.add(runs[-1].id)
    return runs


def read_runs(file):
    """Raises InputError for missing columns, all of them at once, and rows without an id or with the same one."""
    rows = read_table(file)
    columns = rows.columns
    if missing := [name for name in REQUIRED if name not in columns]:
        raise InputError(f"{file}: line 1", "no column " + ", ".join(missing), "a table of measured runs")
    return runs_of(rows)
