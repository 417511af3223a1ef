"""bench/validate_kernels.py as a user types it."""

import json

from shardwright_test_case import BenchTestCase, main

HEADER = ("gpu,stack,op,direction,dtype,batch,m,n,k,groups,sequence,kv_sequence,heads,kv_heads,head_dim,value_dim,causal,"
          "rows,features,time_us\n")
PRODUCT = "H100-80GB-SXM,cublas,gemm,forward,bf16,1,4096,4096,{},,,,,,,,,,,{}\n"


class ValidateKernels(BenchTestCase):

    def test_groups_are_those_of_the_rows(self):
        rows = "".join(PRODUCT.format(4096 * i, 250 * i) for i in range(1, 6))
        (self.folder / "k.csv").write_text(HEADER + rows + "TPU,cublas,gemm,forward,bf16,1,8,8,8,,,,,,,,,,,1\n")
        report = json.loads(self.succeed("validate-kernels", "k.csv", "--json"))
        self.assertEqual((report["schema"], report["schema_version"]), ("shardwright-kernel-validation", 1))
        self.assertEqual(report["skipped"], [{"reason": "GPU not in the catalog: TPU", "rows": 1}])
        self.assertEqual([row["line"] for row in report["rows"]], [2, 3, 4, 5, 6])
        for row in report["rows"]:
            self.assertAlmostEqual(row["predicted_s"] / row["measured_s"] - 1, row["error"])
        errors = [row["error"] for row in report["rows"]]
        group, = report["groups"]
        self.assertEqual((group["gpu"], group["stack"], group["op"], group["n"]), ("h100-80", "cublas", "gemm", 5))
        self.assertAlmostEqual(group["mean_abs"], sum(abs(e) for e in errors) / 5)
        self.assertAlmostEqual(group["median_abs"], sorted(abs(e) for e in errors)[2])
        self.assertAlmostEqual(group["bias"], sum(errors) / 5)
        text = self.succeed("validate-kernels", "k.csv")
        self.assertIn("GPU not in the catalog: TPU", text)
        self.assertLessEqual(max(len(line) for line in text.splitlines()), 120)

    def test_a_call_takes_as_long_as_python_needs_to_launch_it(self):
        small = "H100,{},layer_norm,backward,fp32,,,,,,,,,,,,,128,256,99\n"
        (self.folder / "k.csv").write_text(HEADER + small.format("liger-0.6.0") + small.format("torch-eager"))
        liger, torch = json.loads(self.succeed("validate-kernels", "k.csv", "--json"))["rows"]
        self.assertAlmostEqual(liger["predicted_s"], 99e-6)
        self.assertLess(torch["predicted_s"], 20e-6)

    def test_a_library_alone_has_its_own_numbers_and_its_benchmark_a_least_time(self):
        product = "MI300X,{},gemm,forward,fp8,1,{},{},{},,,,,,,,,,,10\n"
        rows = [(stack, size) for stack in ("hipblaslt", "torch") for size in (256, 8192)]
        (self.folder / "k.csv").write_text(HEADER + "".join(product.format(stack, size, size, size) for stack, size in rows))
        found = {row["line"]: row for row in json.loads(self.succeed("validate-kernels", "k.csv", "--json"))["rows"]}
        self.assertEqual([found[line]["profile"] for line in (2, 3, 4, 5)], ["cdna3-torch-eager"] * 2 + ["mi300x-torch"] * 2)
        self.assertAlmostEqual(found[2]["predicted_s"], 40e-6)
        self.assertLess(found[4]["predicted_s"], 30e-6)
        self.assertLess(found[3]["predicted_s"], 0.8 * found[5]["predicted_s"])  # fractions of 0.42 and 0.3 of the peak

    def test_a_faster_profile_is_faster(self):
        (self.folder / "k.csv").write_text(HEADER + PRODUCT.format(4096, 250))
        (self.folder / "fast.json").write_text(json.dumps({
            "format": "shardwright-profile", "version": 1, "name": "fast", "extends": "h100-80-torch",
            "compute": {"gemm": {"bf16": {"value": 0.9, "kind": "assumed", "source": "a test", "date": "2026-11-26"}}}}))
        row, = json.loads(self.succeed("validate-kernels", "k.csv", "--json"))["rows"]
        fast, = json.loads(self.succeed("validate-kernels", "k.csv", "--profile", "fast.json", "--json"))["rows"]
        self.assertEqual((row["profile"], fast["profile"]), ("h100-80-torch", "fast"))
        self.assertLess(fast["predicted_s"], row["predicted_s"])

    def test_bad_tables(self):
        (self.folder / "k.csv").write_text("gpu,stack\n")
        self.assert_fails(3, "k.csv: line 1: got no column op, expected a table of kernel times", "validate-kernels", "k.csv")
        (self.folder / "k.csv").write_text(HEADER + PRODUCT.format(4096, 250).replace(",1,4096,", ",x,4096,", 1))
        self.assert_fails(3, 'k.csv: line 2: batch: got "x", expected a positive number or nothing', "validate-kernels", "k.csv")
        (self.folder / "k.csv").write_text(HEADER + "H100,a,attention,forward,bf16,1,,,,,8,8,1,1,8,8,yes,,,10\n")
        self.assert_fails(3, 'k.csv: line 2: causal: got "yes", expected 0, 1 or nothing', "validate-kernels", "k.csv")
        self.assertEqual(self.run_program("validate-kernels")[0], 2)

    def test_rows_that_cannot_be_priced_do_not_keep_the_others(self):
        gemm = PRODUCT.format(4096, 250)
        odd = ["H100,triton,sort,forward,bf16,,,,,,,,,,,,,8,8,10\n", "TPU,cublas,gemm,forward,bf16,1,8,8,8,,,,,,,,,,,10\n",
               "H100,cublas,gemm,forward,int4,1,8,8,8,,,,,,,,,,,10\n", "H100,cublas,gemm,forward,bf16,1,8,,8,,,,,,,,,,,10\n",
               "H100,cublas,gemm,forward,bf16,1,8,8,8,,,,,,,,,,,\n"]
        (self.folder / "k.csv").write_text(HEADER + gemm + "".join(odd))
        report = json.loads(self.succeed("validate-kernels", "k.csv", "--json"))
        self.assertEqual([row["line"] for row in report["rows"]], [2])
        self.assertEqual(report["skipped"], [{"reason": reason, "rows": 1} for reason in (
            "GPU not in the catalog: TPU", "a size is missing", "dtype int4", "no such op: sort", "no time")])


if __name__ == "__main__":
    main()
