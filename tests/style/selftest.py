"""Plants violations in a scratch tree and expects the checks of this folder to find each, and nothing else."""

import pathlib
import sys
import tempfile
import unittest

import house
import files
import includes
import lengths
import links
import meshes
import outputs
import pages
import paths
import printing
import promises
import threads

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import check_skips  # noqa: E402


class Scratch(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)

    def plant(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class Includes(Scratch):
    def test_to_the_left_is_allowed(self) -> None:
        self.plant("schedule/a.cc", '#include "schedule/a.h"\n#include <vector>\n#include "core/units.h"\n')
        self.plant("tests/core/a_test.cc", '#include "cli/cli.h"\n#include "tests/skip.h"\n')
        self.plant("models/a.cc", "#include <nlohmann/json.hpp>\n")
        self.plant("executor/cuda/a.cc", "#include <cuda_runtime.h>\n")
        self.assertEqual(includes.check(self.root), [])

    def test_to_the_right_is_found(self) -> None:
        self.plant("core/a.cc", '\n#include "models/model.h"\n')
        self.assertEqual(
            includes.check(self.root),
            ["core/a.cc:2: folder core may not include models; it may include no other folder"],
        )

    def test_siblings_do_not_see_each_other(self) -> None:
        self.plant("models/a.cc", '#include "topologies/cluster.h"\n')
        self.plant("simulator/a.cc", '#  include "executor/runtime.h"\n')
        self.assertEqual(
            includes.check(self.root),
            [
                "models/a.cc:1: folder models may not include topologies; it may include core",
                "simulator/a.cc:1: folder simulator may not include executor; "
                "it may include core, models, topologies, schedule, traces",
            ],
        )

    def test_product_may_not_include_tests(self) -> None:
        self.plant("cli/main.cc", '#include "tests/skip.h"\n')
        self.assertEqual(len(includes.check(self.root)), 1)

    def test_other_rules(self) -> None:
        self.plant("core/a.h", "// no guard\n")
        self.plant("core/b.h", "#pragma once\n#include <nlohmann/json.hpp>\n")
        self.plant("core/c.cc", '#include "units.h"\n#include "../core/units.h"\n')
        self.plant("executor/d.h", "#pragma once\n#include <nccl.h>\n")
        self.assertEqual(
            includes.check(self.root),
            [
                "core/a.h:1: a header needs #pragma once",
                "core/b.h:2: nlohmann/json.hpp may be included by .cc files only, since it is slow to compile",
                'core/c.cc:1: "units.h" is not a path from the repository root',
                'core/c.cc:2: "../core/units.h" is not a path from the repository root',
                "executor/d.h:2: nccl.h: CUDA and NCCL headers may be included in executor/cuda/ and its tests only",
            ],
        )


class Files(Scratch):
    def test_what_goes_past_the_door(self) -> None:
        self.plant("core/files.cc", "int f = ::open(name, O_RDONLY); fs::directory_iterator it(a, error);\n")
        self.plant("models/a.cc", "#include <fstream>\nint f = ::open(name, 0);\nstd::ifstream in(name);\nFILE* g = fopen(name, \"r\");\n"
                                  "// ::open(\nSay(\"fopen(\");\nin.open();\nOpen(name);\n")
        self.plant("traces/b.cc", "#include <regex>\nstd::regex r;\nfor (auto& e : fs::directory_iterator(a, error)) {}\n")
        self.assertEqual([line.split(" ")[0] for line in files.check(self.root)],
                         ["models/a.cc:1:", "models/a.cc:2:", "models/a.cc:3:", "models/a.cc:4:", "traces/b.cc:1:", "traces/b.cc:2:",
                          "traces/b.cc:3:"])

    def test_what_throws(self) -> None:
        self.plant("cli/a.cc", "fs::exists(a);\nfs::exists(a, error);\nstd::filesystem::rename(a, b(c, error),\n    ignored);\n"
                               "fs::remove_all(\n    f(a, error));\nfs::path(a);\n")
        self.plant("cli/b.cc", "#include <nlohmann/json.hpp>\ndocument.at(key);\nkNames.at(i);\narguments.lists.at(name);\n"
                               "Parse(x).at(y);\n")
        self.plant("cli/c.cc", "map.at(key);\n")
        self.assertEqual([line.split(" ")[0] for line in files.check(self.root)],
                         ["cli/a.cc:1:", "cli/a.cc:5:", "cli/b.cc:2:", "cli/b.cc:5:"])


class Lengths(Scratch):
    def function(self, head: str, body_lines: int) -> str:
        return head + " {\n" + "  Call();\n" * body_lines + "}\n\n"

    def test_function_of_70_lines_is_the_longest(self) -> None:
        text = "namespace shardwright {\n\n" + self.function("int Exact(int a)", 70) + self.function("int Long()", 71)
        self.plant("core/a.cc", text)
        self.assertEqual(
            lengths.check(self.root, {}), ["core/a.cc:76: Long has 71 lines, expected at most 70"]
        )

    def test_broken_signatures_members_and_test_cases(self) -> None:
        self.plant("core/a.cc", self.function("std::vector<int> Thing::Member(\n    int a,\n    int b) const", 71))
        self.plant("tests/core/a_test.cc", self.function('TEST_CASE("a long one")', 72))
        self.assertEqual(
            lengths.check(self.root, {}),
            [
                "core/a.cc:1: Thing::Member has 71 lines, expected at most 70",
                'tests/core/a_test.cc:1: TEST_CASE("a long one") has 72 lines, expected at most 70',
            ],
        )

    def test_a_brace_in_a_raw_string_ends_nothing(self) -> None:
        text = "void F() {\n" + "  Call();\n" * 40 + '  Use(R"(\n{\n}\n)");\n' + "  Call();\n" * 40 + "}\n"
        self.plant("core/a.cc", text)
        self.assertEqual(lengths.check(self.root, {}), ["core/a.cc:1: F has 84 lines, expected at most 70"])

    def test_tables_and_types_are_no_functions(self) -> None:
        rows = "    {Name(1), 2},\n" * 100
        self.plant("core/a.cc", "constexpr Row kRows[Count()] = {\n" + rows + "};\n")
        self.plant("core/a.h", "struct alignas(8) Big {\n" + "  int a(int);\n" * 100 + "};\n")
        self.assertEqual(lengths.check(self.root, {}), [])

    def test_known_debt_may_only_shrink(self) -> None:
        self.plant("core/a.cc", self.function("int Long()", 80))
        self.assertEqual(lengths.check(self.root, {"core/a.cc: Long": 80}), [])
        self.assertEqual(
            lengths.check(self.root, {"core/a.cc: Long": 79}),
            ["core/a.cc:1: Long has 80 lines, expected at most 79"],
        )
        self.assertEqual(
            lengths.check(self.root, {"core/a.cc: Long": 81}),
            ["long_functions.txt: core/a.cc: Long has shrunk to 80 lines; lower the entry"],
        )
        self.assertEqual(
            lengths.check(self.root, {"core/a.cc: Long": 80, "core/a.cc: Gone": 90}),
            ["long_functions.txt: core/a.cc: Gone is no longer too long; remove the entry"],
        )

    def test_long_file(self) -> None:
        self.plant("core/a.h", "// x\n" * 1001)
        self.plant("core/b.h", "// x\n" * 1000)
        self.assertEqual(
            lengths.check(self.root, {}), ["core/a.h:1: 1001 lines in a file, expected at most 1000"]
        )


    def test_wide_lines_of_a_page(self) -> None:
        word = "x" * 101
        wide = "a " * 51
        self.plant("docs/a.md", f"# {wide}\n\n{wide.rstrip()}\n{wide}b\n| {wide} |\n{word}\n```text\n{wide}b\n```\n- {wide}\n    {wide}\n")
        self.assertEqual(lengths.check_pages(self.root), ["docs/a.md:3: 101 columns, expected at most 100",
                                                          "docs/a.md:4: 103 columns, expected at most 100",
                                                          "docs/a.md:10: 104 columns, expected at most 100"])


class House(Scratch):
    def test_code_lines(self) -> None:
        self.plant("core/a.cc", "// comment\n\nint a;  // code\n  // comment\n}\n")
        self.plant("tests/core/a_test.cc", "int a;\n")
        self.plant("web/a.js", "let a;\n")
        self.assertEqual(house.count(self.root), {"core": 2})
        self.assertEqual(house.check(self.root, {"core": 2}), [])

    def test_growth_is_found(self) -> None:
        self.plant("core/a.cc", "int a;\nint b;\n")
        self.plant("cli/a.cc", "int a;\n")
        self.assertEqual(house.check(self.root, house.read_limits("core 1  # why\nmodels 114164\n")),
                         ["house.txt: the limits add up to 114165, expected at most 114164",
                          "house.txt: no limit for cli, which has 1 code lines",
                          "core: 2 code lines, expected at most 1 (tests/style/house.txt)",
                          "house.txt: no C++ file in models; remove the entry"])


class Meshes(Scratch):
    def test_what_a_mesh_does_is_found_elsewhere(self) -> None:
        for line, what in (
            ("ranks = plan.shard_size * plan.replicate_size;", "multiplies sizes of a mesh"),
            ("ranks = *run->dp_shard_size *\n    run->dp_replicate_size;", "multiplies sizes of a mesh"),
            ("half = outer.shard_size % group;", "divides a size of a mesh"),
            ("replicate = row.ranks / shard;", "divides a rank or a number of ranks"),
            ("nodes = cluster.RankCount() / nodes;", "divides a rank or a number of ranks"),
            ("at = static_cast<int>(rank.value) % size;", "divides a rank or a number of ranks"),
            ("rest = experts % plan.shard_size;", "takes a remainder by a size of a mesh"),
            ("index = r / group.stride;", "divides by the stride of a group"),
            ("block = shape.size * shape.stride;", "multiplies size and stride of a group"),
            ('group = {"shard", plan.shard_size, 1};', "makes a group by hand"),
        ):
            with self.subTest(line):
                self.plant("schedule/a.cc", f"\n{line}\n")
                self.assertEqual(meshes.check(self.root), [f"schedule/a.cc:2: {what}, which topologies/mesh.h does for all"])

    def test_other_arithmetic_is_allowed(self) -> None:
        text = (
            "// ranks = shard_size * replicate_size\n"
            "share = bytes / plan.shard_size; gpu_seconds = seconds * ranks / 3600;\n"
            "each = tokens / ranks / seconds; steps = per_rank / micro_batch; full = chunk * shard_size;\n"
            'json["mesh"] = {{"replicate", plan.replicate_size}, {"shard", plan.shard_size}};\n'
        )
        self.plant("schedule/a.cc", text)
        self.plant("topologies/mesh.h", "#pragma once\nranks = shard_size * replicate_size;\n")
        self.plant("tests/a_test.cc", "ranks = shard_size * replicate_size;\n")
        self.assertEqual(meshes.check(self.root), [])

    def test_an_exception_holds_for_as_many_places_as_it_says(self) -> None:
        place = "gpus = device.ranks / device.nodes;\n"
        self.plant("cli/device_calibration.cc", place)
        self.assertEqual(meshes.check(self.root), [])
        self.plant("cli/device_calibration.cc", place + place)
        self.assertEqual(len(meshes.check(self.root)), 2)


class Links(Scratch):
    def test_a_library_that_is_not_linked(self) -> None:
        self.plant("core/a.h", "#include <nlohmann/json_fwd.hpp>\n")
        self.plant("core/a.cc", '#include "core/a.h"\n#include <zlib.h>\n')
        self.plant("core/CMakeLists.txt", "sw_library(sw_core\n  SOURCES\n    a.cc\n  HEADERS\n    a.h\n  DEPS\n    ZLIB::ZLIB\n"
                                          "  PRIVATE_DEPS\n    nlohmann_json::nlohmann_json\n)\n")
        self.plant("cli/main.cc", '#include "core/a.h"\n#include <zlib.h>\n')
        self.plant("cli/CMakeLists.txt", "sw_executable(main\n  SOURCES\n    main.cc\n  DEPS\n    sw_core  # json\n)\n")
        self.assertEqual(links.check(self.root),
                         ["cli/main.cc: target main includes nlohmann/json_fwd.hpp through core/a.h and does not link "
                          "nlohmann_json::nlohmann_json"])


class Pages(Scratch):
    LIMITS = {"words": 100, "long sentences": 0, "riddles": 0}

    def test_words_of_code_and_made_tables_do_not_count(self) -> None:
        made = "| made by hand |\n\n<!-- gains: begin -->\n| a | b |\n<!-- gains: end -->\n"
        self.assertEqual(pages.words("docs/a.md", f"One two.\n\n```sh\nthree four\n```\n{made}"), 2 + 3)  # bars are no words
        self.assertEqual(pages.words("docs/models.md", "One two.\n\n| three |\n"), 2)

    def test_long_sentences(self) -> None:
        word = "word " * 34
        self.assertEqual(pages.too_long(f"Thirty {word}`code of one. Word`. Short.\n\n| {word * 2} |\n"), [f"Thirty {word}`code_of_one__Word`."])
        self.assertEqual(pages.too_long(f"Thirty {word}.\n- {word}\n- {word}\n\n    {word}code\n    {word}\n"), [])

    def test_riddles(self) -> None:
        self.assertEqual(pages.riddles("A unit. What is one with it leaves the list. What is a unit? It is that. `x` is what it is."),
                         ["What is one with it leaves the list."])

    def test_links_and_names(self) -> None:
        self.plant("docs/b.md", "# The Planner's page\n")
        self.plant("docs/a.md", "# A\n\n[b](b.md#the-planners-page) [c](b.md#other) [d](d.md) [e](https://e) `bench/log/x.md`\n")
        self.assertEqual(pages.check(self.root, self.LIMITS | {"words": 9}),
                         ["docs/a.md: links b.md#other, but the page has no such heading", "docs/a.md: links d.md, which is not there",
                          "docs/a.md: names bench/log/x.md, which is not there"])

    def test_limits_fall(self) -> None:
        self.plant("docs/a.md", "word " * 90 + "\nWhat is there is there.\n")
        self.assertEqual(pages.check(self.root, self.LIMITS),
                         ["docs/: 1 long sentences, expected at most 0 (pages.txt)"])
        self.plant("docs/a.md", "What is there is there.\n")
        self.assertEqual(pages.check(self.root, self.LIMITS),
                         ["pages.txt: words have fallen to 5; lower the limit of 100", "docs/: 1 riddles, expected at most 0 (pages.txt)"])


class Paths(Scratch):
    def test_machine_paths(self) -> None:
        folder = "/tm" + "p"
        self.plant("docs/a.md", f"fine: build{folder}, ${{X}}{folder}, {folder}late\nsee {folder}/x\n")
        self.plant("tests/a.cc", f'Open("{folder}");\n')
        self.plant("build/a.txt", f"{folder}/x\n")
        self.assertEqual(
            paths.check(self.root),
            [f"docs/a.md:2: names the machine path {folder}", f"tests/a.cc:1: names the machine path {folder}"],
        )


class Printing(Scratch):
    def test_past_the_gate(self) -> None:
        self.plant("cli/a.cc", 'std::fprintf(stderr, "x");\nstd::cout << x;\nprintf("x");\nstd::puts(x);\n'
                               'std::snprintf(a, n, "stderr");  // to stdout\nSay("x");\nwrite(STDOUT_FILENO, x, n);\n')
        self.plant("core/printable.cc", "std::fwrite(a, 1, n, stderr);\n")
        self.plant("tests/core/a_test.cc", 'std::fprintf(stderr, "x");\n')
        self.assertEqual([finding.split(" ")[0:2] for finding in printing.check(self.root)],
                         [["cli/a.cc:1:", "stderr"], ["cli/a.cc:2:", "std::cout"], ["cli/a.cc:3:", "printf"], ["cli/a.cc:4:", "puts"],
                          ["cli/a.cc:7:", "STDOUT_FILENO"]])


class Outputs(Scratch):
    def test_past_the_writers(self) -> None:
        self.plant("cli/a.cc", 'std::ofstream out(name);\nstd::fopen(name, "wb");\n::open(name, O_WRONLY | O_CREAT);\nstd::ifstream in(name);\n'
                               '::popen(x, "r");  // popen(\nfopen(name, "rb");\n')
        self.plant("core/staged_file.cc", "::openat(folder, name, O_CREAT | O_EXCL);\n")
        self.plant("python/shardwright/a.py", 'with open(name, "w") as out:\npath.write_text(text)\nos.replace(a, b)\npickle.loads(data)\n'
                                              'with open(name, "rb") as file:\ntext.replace(a, b)\nsys.path.insert(0, os.getcwd())\n')
        self.plant("tests/cli/a_test.py", 'open(name, "w")\n')
        self.assertEqual([finding.split(" ")[0] for finding in outputs.check(self.root)],
                         [*(f"cli/a.cc:{line}:" for line in (1, 2, 3, 5)), *(f"python/shardwright/a.py:{line}:" for line in (1, 2, 3, 4, 7))])


class Threads(Scratch):
    def test_past_the_gate(self) -> None:
        self.plant("cli/a.cc", "auto f = std::async(g);\nstd::thread t([] {});\nstd::vector<std::jthread> all;\n"
                               "all.emplace_back(g);\nstd::thread::id none;\nstd::thread mine;\n"
                               "all.push_back(StartThread<std::jthread>(g));\nstd::thread([] {}).detach();\n")
        self.plant("core/threads.h", "return std::thread(work);\n")
        self.plant("tests/core/a_test.cc", "std::thread t([] {});\n")
        self.assertEqual([finding.split(" ")[0] for finding in threads.check(self.root)],
                         ["cli/a.cc:1:", "cli/a.cc:2:", "cli/a.cc:4:", "cli/a.cc:8:"])


class Promises(Scratch):
    def test_tests_and_files(self) -> None:
        self.plant("tests/cli/CMakeLists.txt", "sw_program_test(cli_wire wire_test.py ci)\nsw_program_test(cli_ends_deep ends_test.py deep)\n"
                                               "foreach(kind a b)\n  sw_package_test(cli_${kind} x.py LABELS fast PROGRAM)\nendforeach()\n")
        self.plant("core/files.h", "")
        self.plant("docs/security.md", "`cli_b`, `cli_c`\n| promise | how | test |\n|---|---|---|\n| a | `core/files.h` | `cli_wire` |\n"
                                       "| b | `cli_wire`, `core/none.h` | by hand |\n| c | | `cli_ends_deep` |\n\n| file |\n|---|\n| x |\n")
        held = "docs/security.md:{}: no test that CI runs holds this promise"
        self.assertEqual(promises.check(self.root), ["docs/security.md:1: there is no test cli_c", "docs/security.md:5: there is no file core/none.h",
                                                     held.format(5), held.format(6)])


class Skips(Scratch):
    def test_reading(self) -> None:
        # The status names are those of ctest 3.25: a skip and a missing program are both "notrun".
        cases = {"a": "run", "b": "fail", "c": "notrun", "d": "disabled"}
        text = "".join(f'<testcase name="{name}" status="{status}"/>' for name, status in cases.items())
        self.plant("ci.xml", f"<testsuite>{text}</testsuite>")
        self.plant("expected.txt", "# reason\n\nc  # no GPU\n")
        self.assertEqual(check_skips.read_skipped(self.root / "ci.xml"), ({"c", "d"}, 4))
        self.assertEqual(check_skips.read_expected(self.root / "expected.txt"), {"c"})

    def test_the_sets_must_be_equal(self) -> None:
        self.assertEqual(check_skips.differences({"a", "b"}, {"a", "b"}), [])
        self.assertEqual(
            check_skips.differences({"a", "b"}, {"b", "c"}),
            ["skipped, but not expected: c", "expected to be skipped, but it ran: a"],
        )


if __name__ == "__main__":
    unittest.main()
