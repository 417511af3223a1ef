"""What published runs are taken to be (bench/lab): frameworks, libraries and dtypes that are not known are named, and priced by the nearest."""

import collections
import pathlib
import sys
import types
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lab import base, jobs, runs, validation  # noqa: E402

ROW = {"id": "somebody-1", "model_name": "m", "framework": "", "date": "2025-12", "gpu_class": "H100-80GB", "gpu": "H100", "gpus": "1",
       "parallelism": "single", "param_dtype": "bf16", "compute_dtype": "bf16", "attention_kernel": "", "compiled": "n"}


def run(**fields):
    return runs.Run(base.Row({**ROW, **fields}))


FLAGS = {"--optimizer": "adamw:fused:none", "--offload": "none"}


class Stacks(unittest.TestCase):
    def test_a_framework_that_nobody_knows_is_priced_by_the_nearest(self):
        for framework, compiled, date, wanted in (("somebody's trainer (CUDA C++, CUDA graphs)", "n", "2025-12", "shardwright-cuda"),
                                                  ("thing in JAX", "n", "2025-12", "jax-xla"), ("a loop of TRL", "n", "2025-12", "hf-trainer"),
                                                  ("unheard of", "y", "2025-12", "torch-compile"), ("unheard of", "n", "2024-05", "torch-2024"),
                                                  ("unheard of", "n", "2026-05", "torch-eager"), ("unheard of", "n", "2022-05", "torch-2022")):
            stack = jobs.stack_of(run(framework=framework, compiled=compiled, date=date))
            self.assertEqual((stack["kernel_set"], stack["is_known"]), (wanted, False), framework)

    def test_a_known_framework_is_not_unknown(self):
        for framework, wanted in (("DeepSpeed", "deepspeed"), ("DeepSpeed 0.19 + HF transformers + Liger", "hf-liger-full"), ("llm.c", "shardwright-cuda"),
                                  ("HF Trainer/SFTTrainer (LLaMA-Factory) + Liger", "hf-liger-full"), ("HF Trainer/SFTTrainer", "hf-trainer")):
            stack = jobs.stack_of(run(framework=framework))
            self.assertEqual((stack["kernel_set"], stack["is_known"]), (wanted, True), framework)
        self.assertEqual(jobs.stack_of(run(framework="DeepSpeed", date="2021-04"))["kernel_set"], "megatron-2021")
        self.assertFalse(jobs.stack_of(run(framework="DeepSpeed"), unknown=True)["is_known"])

    def job(self, **fields):
        """Of a framework that nobody knows, of a model with two layers on eight GPUs."""
        names = types.SimpleNamespace(unknown=True, zoo=(), attention=collections.defaultdict(lambda: "flash"))
        size = {"n_layers": "2", "hidden": "64", "n_heads": "4", "ffn_hidden": "256", "vocab": "512", "ffn_kind": "gelu", "seq_len": "128"}
        found = jobs.job_of(run(gpus="8", microbatch_per_gpu="1", **size, **fields), names)
        self.assertEqual(found.skipped, "")
        return found

    def test_stage_3_before_2022_has_deepspeeds_engine_whoever_made_the_model(self):
        for date, wanted in (("2021-04", True), ("2022-03", False)):
            found = self.job(framework="Megatron-LM of somebody", parallelism="zero3", date=date)
            self.assertEqual((found.has_tensor_lists, "--before-deepspeed-0-6" in found.flags), (wanted, wanted), date)

    def test_a_trainer_without_python_reduces_gradients_where_they_are(self):
        for framework, wanted in (("a trainer (CUDA C++)", "reduce_scatter"), ("a loop of TRL", None)):
            self.assertEqual(self.job(framework=framework, parallelism="ddp+zero1").flags.get("--gradient-reduction"), wanted, framework)

    def test_every_nearest_row_says_why(self):
        self.assertTrue(all(row["why"] for row in jobs.STACKS["nearest"]))

    def attention(self, name, gpu_class="H100-80GB"):
        notes = []
        stack = {"kernel_set": "torch-eager", "sdpa": "flash"}
        return jobs.attention_of(run(attention_kernel=name, gpu_class=gpu_class), stack, {"torch-eager": "flash"}, notes), len(notes)

    def test_libraries_are_read_as_they_are_called(self):
        for name in ("flash_attention_3", "flash-attn 3", "FlashAttention-3", "flash3", "FA3"):
            self.assertEqual(self.attention(name), ("flash3", 0), name)
        self.assertEqual(self.attention("flash_attention_4", "B200"), ("flash3", 0))
        self.assertEqual(self.attention("flash_attention_4"), ("flash3", 1))  # said: it is not its own price
        self.assertEqual(self.attention("flash_attention_2", "B200"), ("triton", 1))
        for name in ("cudnn", "flash (cudnn TE)", "cudnn_flash_te", "TE"):
            self.assertEqual(self.attention(name)[0], "cudnn", name)
        for name in ("flash_attention_2", "flash v2", "flash", "sdpa flash v2"):
            self.assertEqual(self.attention(name), ("", 0), name)
        self.assertEqual(self.attention("eager"), ("materialized", 0))
        self.assertEqual(self.attention("ring of rings"), ("", 1))  # not known, and said

    def test_chunks_of_ligers_loss(self):
        # 151,936 words are 170 times 896 features: 131,072 rows / 170 is 772, so 1,024 rows at a time.
        many = types.SimpleNamespace(micro_batch=128, sequence_length=1024, vocabulary=151936, hidden=896)
        self.assertEqual(jobs.liger_chunks(many), 128)
        # 128,256 / 4,096 is 32: 8,192 of 262,144 rows at a time.
        long = types.SimpleNamespace(micro_batch=1, sequence_length=262144, vocabulary=128256, hidden=4096)
        self.assertEqual(jobs.liger_chunks(long), 32)

    def test_a_trainer_that_allocates_once_has_no_caching_allocator(self):
        answer = {"profile": "p", "step_time_s": 1.0, "out_of_memory": True, "usable": 100, "outside": 10, "reserved": 0, "parameters": 1}
        for allocated, wanted in ((90, False), (91, True)):
            job = types.SimpleNamespace(run=run(), skipped="", notes=[], is_known=True, has_static_memory=True, count_note=0, flags=FLAGS)
            row = validation.Row(job)
            row.take({**answer, "allocated": allocated})
            self.assertEqual(row.out_of_memory, wanted)

    def test_dtypes_of_masters_are_read(self):
        stack = {"reduce": "fp32"}
        self.assertEqual(jobs.precision_of(run(param_dtype="bf16 params, bf16 masters and grads"), stack, []), "bf16/bf16/bf16")
        self.assertEqual(jobs.precision_of(run(param_dtype="bf16, fp32 master"), stack, []), "fp32/bf16/fp32")

    def test_products_that_are_not_known_are_said(self):
        for dtype, text, said in (("fp8", "fp8 tensorwise", 0), ("fp8", "mxfp8 linear", 1), ("fp8", "TE fp8", 1), ("fp4", "nvfp4", 1), ("bf16", "bf16", 0)):
            notes = []
            jobs.fp8_of(run(compute_dtype=dtype, param_dtype=text), notes)
            self.assertEqual(len(notes), said, text)

    def test_the_readme_says_what_to_expect_of_a_new_source(self):
        readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
        last = base.read_table(str(ROOT / "bench/first_contact.csv"))[-1]
        self.assertIn(f"left out of the fits are {base.percent(validation.BANDS['stack']['mean'])} off in the mean", readme)
        self.assertIn(f"{last['rows']} runs of sources that nobody here had looked at, as their authors name them, are "
                      f"{base.percent(last.number('mean'))} off, and {base.percent(last.number('inside_band'))} of them lie inside", readme)

    def test_the_band_of_an_unknown_framework_is_that_of_its_kind(self):
        answer = {"profile": "p", "step_time_s": 1.0, "out_of_memory": False, "usable": 0, "outside": 0, "allocated": 0, "reserved": 0,
                  "parameters": 1, "band": 0.01, "band_kind": "known"}
        measured = run(step_time_s="1")
        for is_known, wanted in ((True, 0.01), (False, validation.BANDS["stack"]["half_width"])):
            job = types.SimpleNamespace(run=measured, skipped="", notes=[], is_known=is_known, has_static_memory=False, count_note=0,
                                        flags=FLAGS)
            row = validation.Row(job)
            row.take(answer)
            self.assertEqual(row.band, wanted)


if __name__ == "__main__":
    unittest.main()
