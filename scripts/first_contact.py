"""What import-run makes of settings files as people have them: a table of counts, one row a corpus.

    python3 scripts/first_contact.py build/shardwright FOLDER... [--cluster 8xH100] [--list]

Each FOLDER is a checkout of a public repository. Files of settings are found by their top keys. A file whose model is not
here is read once more with a stand-in (--model llama-3-8b), so that its settings are looked at all the same. --list prints
each file with what was said of it. Nothing of the folders is kept.
"""

import argparse
import collections
import concurrent.futures
import pathlib
import re
import subprocess

# A file with one of these at its top is of a run; others (workflows, models, data) are passed over.
MARKS = """per_device_train_batch_size model_name_or_path compute_environment distributed_type num_machines zero_optimization
train_micro_batch_size_per_gpu train_batch_size base_model output_dir num_train_epochs distributed_training optimization
parallelism training activation_checkpoint dist_config model_class step_scheduler recipe""".split()
FEATURE = re.compile(r"since (.+?) (?:cannot be predicted|(?:is|are) not (?:read|simulated))|expected 1: (experts with .*a bias)", re.DOTALL)
MODEL = re.compile(r"looks like a hub id|a zoo name|expected (?:a model|one of)|model_type|these files do not name a model")
# Names the layers of the file's own model, which the stand-in has not.
OWN_LAYERS = re.compile(r"a class of|linear modules of|--lora-targets: got|has no experts")
COLUMNS = ["files", "read", "read, another model", "refused by feature", "refused otherwise"]


def is_settings(path):
    """Whether a file says a run's settings, by its top keys."""
    if path.suffix not in (".yaml", ".yml", ".toml", ".json") or ".github" in path.parts or path.stat().st_size > 1 << 20:
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".json":
        return bool(re.search(r'^\s{0,4}"(zero_optimization|train_micro_batch_size_per_gpu|per_device_train_batch_size)"', text, re.M))
    pattern = r"^\[?({})\b\s*[\]:=]".format("|".join(MARKS))
    return bool(re.search(pattern, text, re.M))


def ask(program, folder, path, *flags):
    """The exit code and the last line of what was said, in the folder from which people start runs."""
    done = subprocess.run([program, "import-run", path.relative_to(folder), *flags, "--json"], cwd=folder, capture_output=True,
                          text=True, check=False, timeout=300)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    return done.returncode, " ".join(lines[-1:])


def judge(program, folder, path, cluster):
    """The column of a file, and why."""
    flags = ["--cluster", cluster]
    code, said = ask(program, folder, path, *flags)
    column = "read"
    if code and not FEATURE.search(said) and MODEL.search(said):
        column = "read, another model"
        code, said = ask(program, folder, path, *flags, "--model", "llama-3-8b", "--seq", "2048")
        if code and OWN_LAYERS.search(said):
            return column, said
        if code and "--seq" in said:
            code, said = ask(program, folder, path, *flags, "--model", "llama-3-8b")
    # A run says for how many GPUs it is.
    count = re.search(r"expected the (\d+) GPUs|got (\d+), expected (?:the|a divisor of the) \d+ GPUs of|(?:product|multiple) of (?:the )?\d+ (?:ranks|GPUs)", said)
    if code and count:
        for nodes in (1, 2, 4, 8, 16, 32, 64):
            again, words = ask(program, folder, path, *flags[:1], f"{cluster}, nodes {nodes}", *(["--model", "llama-3-8b"] if column != "read" else []))
            if again == 0 or not re.search("GPUs of|ranks", words):
                code, said = again, words
                break
    if code == 0 or (column != "read" and OWN_LAYERS.search(said)):
        return column, said
    feature = FEATURE.search(said)
    if feature:
        return "refused by feature", "experts with biases that ranks share out" if feature.group(2) else re.sub(r".*: ", "", feature.group(1))
    return "refused otherwise", said


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--cluster", default="8xH100, nic 8x400 Gbit/s")
    parser.add_argument("--list", action="store_true", help="also each file")
    arguments = parser.parse_args()
    program = arguments.program.resolve()
    table, features, others = {}, collections.Counter(), collections.Counter()
    for folder in map(pathlib.Path.resolve, arguments.folders):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and is_settings(path))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda path: judge(program, folder, path, arguments.cluster), files))
        table[folder.name] = collections.Counter(column for column, _ in answers)
        features.update(why for column, why in answers if column == "refused by feature")
        others.update(re.sub(r"^error: [^:]*: ", "", why)[:160] for column, why in answers if column == "refused otherwise")
        for path, (column, why) in zip(files, answers):
            if arguments.list:
                print(f"{column} | {path.relative_to(folder.parent)} | {why}")
    print("| corpus | " + " | ".join(COLUMNS) + " |\n|---|" + "---:|" * len(COLUMNS))
    for name, counts in [*table.items(), ("all", sum(table.values(), collections.Counter()))]:
        print(f"| {name} | {sum(counts.values())} | " + " | ".join(str(counts[column]) for column in COLUMNS[1:]) + " |")
    for title, counter in (("Refused by feature", features), ("Refused otherwise", others)):
        print(f"\n{title}:")
        for why, count in counter.most_common():
            print(f"{count:5}  {why}")


if __name__ == "__main__":
    main()
