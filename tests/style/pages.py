"""Checks the pages that people read: how many words, how long the sentences, that links and named files are there.

pages.txt holds three numbers that only fall: words of docs/, sentences above 35 words, and sentences that open with a riddle ("What is ...").
Tables that a command writes and blocks of code do not count as words; no table and no block of code has sentences. A count above its limit
fails, and so does one that has fallen well below: then the limit falls, too. `pages.py ROOT --long PAGE` prints a page's long sentences.
"""

import pathlib
import re
import sys
from collections.abc import Iterator

LONGEST = 35
WORD = re.compile(r"\S*\w\S*")  # a bar of a table is none
# A sentence that begins so has a clause for its subject: the reader must find out what the noun is. Questions are none.
RIDDLE = re.compile(r"^(What|Whatever|Whoever|Who|That which|Those that|Those who|Others|So much|So many)\b")
# Tables between such marks, and the rows of these pages, are written by a command.
MADE = re.compile(r"<!-- (?:begin [\w ]+|[\w ]+: begin) -->.*?<!-- (?:end [\w ]+|[\w ]+: end) -->", re.DOTALL)
MADE_TABLES = ("docs/models.md",)
FENCE = re.compile(r"^([ \t]*)(```|~~~).*?^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w/.])(?<!'s )(?:docs|bench/log)/[\w/]+\.md\b")
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "AGENTS.md", "SKILL.md", "llms.txt")


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """The pages of docs/, in their order."""
    return sorted((root / "docs").glob("*.md"))


def prose(page: str) -> str:
    """The page without blocks of code and tables that a command wrote."""
    return FENCE.sub("", MADE.sub("", page))


def words(name: str, page: str) -> int:
    lines = prose(page).splitlines()
    return sum(len(WORD.findall(line)) for line in lines if name not in MADE_TABLES or not line.startswith("|"))


def sentences(page: str) -> Iterator[str]:
    """Sentences of paragraphs and list items. An inline piece of code is one word; lines indented by four blanks are code."""
    text = "\n".join("" if line.lstrip().startswith(("|", "#", "<", "!")) else line for line in prose(page).splitlines())
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", re.sub(r"(?<=\n\n)(?: {4}[^\n]*\n)+", "", text)):
        flat = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", "_").replace(".", "_"), " ".join(block.split()))
        yield from re.split(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`\[]*[A-Z0-9`])", re.sub(r"^([-*]|\d+\.) ", "", flat))


def too_long(page: str) -> list[str]:
    return [sentence for sentence in sentences(page) if sum(any(map(str.isalnum, word)) for word in sentence.split()) > LONGEST]


def riddles(page: str) -> list[str]:
    return [sentence for sentence in sentences(page) if RIDDLE.match(sentence.lstrip("\"'(*")) and not re.search(r"\?\W*$", sentence)]


def anchors(page: str) -> set[str]:
    """What a heading is called in a link, as GitHub and mkdocs call it."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def dead(root: pathlib.Path) -> list[str]:
    """Links and names of pages that lead nowhere."""
    findings = []
    for path in (*pages(root), *sorted((root / "bench" / "log").glob("*.md")), *(root / name for name in TOP)):
        if not path.is_file():
            continue
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        for link in LINK.findall(FENCE.sub("", text)):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or target.startswith("reference/"):  # scripts/site.py writes reference/
                continue
            file = path.parent / target if target else path
            if not file.exists():
                findings.append(f"{name}: links {link}, which is not there")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
                findings.append(f"{name}: links {link}, but the page has no such heading")
        findings += [f"{name}: names {file}, which is not there" for file in NAMED.findall(text) if not (root / file).exists()]
    return findings


def counts(root: pathlib.Path) -> dict[str, int]:
    found = {"words": 0, "long sentences": 0, "riddles": 0}
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        found["words"] += words(path.relative_to(root).as_posix(), text)
        found["long sentences"] += len(too_long(text))
        found["riddles"] += len(riddles(text))
    return found


def read_limits(text: str) -> dict[str, int]:
    rows = (line.split("#")[0].rpartition(":") for line in text.splitlines() if ":" in line.split("#")[0])
    return {name.strip(): int(limit) for name, _, limit in rows}


def check(root: pathlib.Path, limits: dict[str, int]) -> list[str]:
    findings = dead(root)
    for name, count in counts(root).items():
        limit = limits[name]
        if count > limit:
            findings.append(f"docs/: {count} {name}, expected at most {limit} (pages.txt)")
        elif count < limit - max(5, limit // 20):
            findings.append(f"pages.txt: {name} have fallen to {count}; lower the limit of {limit}")
    return findings


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    if "--long" in sys.argv:
        text = (root / sys.argv[-1]).read_text(encoding="utf-8")
        print("\n\n".join([*too_long(text), *riddles(text)]))
        return 0
    findings = check(root, read_limits(pathlib.Path(__file__).with_name("pages.txt").read_text(encoding="utf-8")))
    print("\n".join(findings) if findings else f"pages: ok, {counts(root)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
