"""Where a C++ source may be mutated, and how: simple token rules that rely on clang-format's spaces.

A binary operator stands between two spaces (or a space and a line's end), the `<` of a template does not. An operator is changed by
repeating the expression around it, up to the next bracket, comma or operator that binds less: `(Is(7) ? (a < b) : (a <= b))`.
Left out, because no test of behaviour should tell: SW_CHECK (a bug of ours), static_assert, what is thrown (messages), texts,
and, because a switch at run time cannot be there: preprocessor lines, `constexpr` objects, case labels, template arguments.
What is left and does not compile is drawn again.
"""

import bisect
import collections
import random
import re

# [start, end) of the text, what replaces it (`@` is the mutant's number), the place that names it, and a description.
Site = collections.namedtuple("Site", "start end text line what")
Token = collections.namedtuple("Token", "kind text start end")

SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\b\d[\w\'.]*|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
TOKEN = re.compile(r"(?P<name>[A-Za-z_]\w*)|(?P<number>\d(?:[eE][+-]|[\w'.])*)|(?P<text>\"[^\"\n]*\"|'[^'\n]*')|"
                   r"(?P<sign><=>|<<=|>>=|->|::|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[^\s\w])")
PRECEDENCE = {"*": 12, "/": 12, "%": 12, "+": 11, "-": 11, "<<": 10, ">>": 10, "<=>": 9.5, "<": 9, "<=": 9, ">": 9, ">=": 9,
              "==": 8, "!=": 8, "&": 7, "^": 6, "|": 5, "&&": 4, "||": 3, "?": 2, ":": 2, "=": 1, "+=": 1, "-=": 1, "*=": 1,
              "/=": 1, "%=": 1, "&=": 1, "|=": 1, "^=": 1, "<<=": 1, ">>=": 1}
CHANGED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*", "%": "*",
           "&&": "||", "||": "&&", "+=": "-=", "-=": "+=", "*=": "/="}
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}
STOPS = {"return", "throw", "case", "else", "do", "co_return", "co_yield"}
NO_STATEMENT = STOPS | {"if", "for", "while", "switch", "using", "namespace", "template", "struct", "class", "enum", "break",
                        "continue", "goto", "delete", "new", "default", "try", "catch", "public", "private", "protected", "static",
                        "const", "auto", "constexpr", "typedef", "friend", "explicit", "virtual", "inline", "extern", "operator",
                        "SW_CHECK", "static_assert"}
OPENERS = {"(": ")", "[": "]", "{": "}"}


def masked(text):
    """The same length, without comments, preprocessor lines and what texts say."""
    def blank(match):
        found = match[0]
        if found[0].isdigit():
            return found
        if found[0] in "\"'":
            return found[0] + "_" * (len(found) - 2) + found[0]
        if found[0] == "R":
            return '"' + "_" * (len(found) - 2) + '"'
        return re.sub(r"[^\n]", " ", found)
    text = SKIPPED.sub(blank, text)
    return PREPROCESSOR.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


class Source:
    """A file's tokens, and the bracket that belongs to each bracket."""

    def __init__(self, text):
        self.text = text
        self.plain = masked(text)
        self.tokens = [Token(match.lastgroup, match[0], match.start(), match.end()) for match in TOKEN.finditer(self.plain)]
        self.breaks = [match.start() for match in re.finditer("\n", text)]
        self.partner = {}
        stack = []
        for i, token in enumerate(self.tokens):
            if token.kind != "sign":
                continue
            if token.text in OPENERS:
                stack.append(i)
            elif token.text in OPENERS.values() and stack:
                self.partner[i] = stack.pop()
                self.partner[self.partner[i]] = i
        self.excluded = self.find_excluded()

    def line(self, offset):
        return bisect.bisect_left(self.breaks, offset) + 1

    def word(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def end_of_statement(self, i):
        """The `;` that ends what begins at i, or the bracket that closes around it."""
        while i < len(self.tokens):
            if self.word(i) in OPENERS:
                i = self.partner.get(i, len(self.tokens))
            elif self.word(i) in (";", ")", "]", "}"):
                return i
            i += 1
        return len(self.tokens) - 1

    def find_excluded(self):
        """Ranges of offsets."""
        ranges = []
        for i, token in enumerate(self.tokens):
            last = None
            if token.text in ("SW_CHECK", "static_assert") and self.word(i + 1) == "(":
                last = self.partner.get(i + 1)
            elif token.text in ("throw", "using", "constexpr") and self.word(i - 1) != "if":
                last = self.end_of_statement(i)
            elif token.text == "case":
                last = next(j for j in range(i, len(self.tokens)) if self.word(j) == ":")
            elif token.text == "template" or (token.text in ("static_cast", "get") and self.word(i + 1) == "<"):
                last = next(j for j in range(i, len(self.tokens)) if self.word(j) in (">", ">>"))
            if last:
                ranges.append((token.start, self.tokens[last].end))
        return ranges

    def is_excluded(self, start, end):
        return any(start < b and a < end for a, b in self.excluded)


def is_binary(source, i):
    token = source.tokens[i]
    before, after = source.plain[token.start - 1], source.plain[token.end:token.end + 1]
    return before in " \n" and after in " \n"


def operand_range(source, i):
    """Tokens [first, last] of the expression around the operator at i."""
    rank = PRECEDENCE[source.word(i)]

    def ends(j):
        word = source.word(j)
        if word in STOPS or word in (",", ";"):
            return True
        if word in ("?", ":", "=") or (word in PRECEDENCE and is_binary(source, j)):
            return PRECEDENCE[word] < rank
        return False
    first = last = i
    while first > 0 and not ends(first - 1) and source.word(first - 1) not in OPENERS:
        first = source.partner.get(first - 1, first - 1)
    while last + 1 < len(source.tokens) and not ends(last + 1) and source.word(last + 1) not in OPENERS.values():
        last = source.partner.get(last + 1, last + 1)
    return first, last


def operators(source):
    for i, token in enumerate(source.tokens):
        if token.kind != "sign" or token.text not in CHANGED or not is_binary(source, i) or source.word(i - 1) == "operator":
            continue
        first, last = operand_range(source, i)
        if first == i or last == i:
            continue
        start, end = source.tokens[first].start, source.tokens[last].end
        if '"' in source.plain[start:end] and token.text in "+-":
            continue  # A text is put together.
        new = CHANGED[token.text]
        text = source.text[start:end]
        other = source.text[start:token.start] + new + source.text[token.end:end]
        yield Site(start, end, f"(::sw_mutant::Is(@) ? ({other}) : ({text}))", source.line(token.start),
                   f"`{token.text}` becomes `{new}` in `{text}`")


def conditions(source):
    for i, token in enumerate(source.tokens):
        if token.text not in ("if", "while") or source.word(i + 1) != "(":
            continue
        first, last = i + 2, source.partner[i + 1] - 1
        for j in range(first, last):
            if source.word(j) == ";":
                first = j + 1
        start, end = source.tokens[first].start, source.tokens[last].end
        text = source.text[start:end]
        yield Site(start, end, f"::sw_mutant::Is(@) != static_cast<bool>({text})", source.line(start), f"`{text}` is negated")


def constants(source, rng):
    for i, token in enumerate(source.tokens):
        if token.kind != "number" or not re.fullmatch(r"\d+[uUlL]*|\d+\.\d*(e-?\d+)?f?", token.text) or source.word(i - 1) == "::":
            continue
        digits, suffix = re.fullmatch(r"([\d.]+(?:e-?\d+)?)([uUlLf]*)", token.text).groups()
        if "." in digits:
            new = "1.0" if float(digits) == 0 else f"(2 * {digits}{suffix})"
            new += suffix if float(digits) == 0 else ""
        else:
            new = str(int(digits) + (1 if int(digits) == 0 or rng.random() < 0.5 else -1)) + suffix
        near = source.text[source.breaks[source.line(token.start) - 2] + 1:source.breaks[source.line(token.start) - 1]].strip()
        yield Site(token.start, token.end, f"(::sw_mutant::Is(@) ? {new} : {token.text})", source.line(token.start),
                   f"`{token.text}` becomes `{new}` in `{near}`")


def shape_of_statement(source, first, last):
    """Whether it assigns, and whether it declares: names side by side, or a reference's or pointer's sign, before that."""
    i, declares = first, False
    while i < last:
        word, follows_name = source.word(i), i > first and source.tokens[i - 1].kind == "name"
        if word in ASSIGNMENTS:
            return True, declares
        if word == ",":
            break
        if i > first and (word in ("&", "&&", "*") or (word in ("<", ">") and source.tokens[i + 1].kind == "name")):
            declares = True
        declares = declares or (source.tokens[i].kind == "name" and follows_name)
        i = (source.partner.get(i, last) if word in OPENERS else i) + 1
    return False, declares


def statements(source):
    """An assignment or a call that is left out."""
    for i, token in enumerate(source.tokens):
        before = source.word(i - 1)
        after_header = before == ")" and source.word(source.partner.get(i - 1, 0) - 1) in ("if", "for", "while")
        if not (before in (";", "{", "}", "else") or after_header):
            continue
        if (token.kind != "name" and token.text not in ("*", "++", "--")) or token.text in NO_STATEMENT:
            continue
        last = source.end_of_statement(i)
        if source.word(last) != ";":
            continue
        assigned, declares = shape_of_statement(source, i, last)
        called = source.word(last - 1) == ")" and not assigned
        counted = token.text in ("++", "--") or source.word(last - 1) in ("++", "--")
        if declares or not (assigned or called or counted):
            continue
        start, end = token.start, source.tokens[last].end
        text = source.text[start:end]
        yield Site(start, end, f"{{ if (!::sw_mutant::Is(@)) {{ {text} }} }}", source.line(start), f"`{text}` is left out")


def results(source):
    """Another value is returned."""
    for i, token in enumerate(source.tokens):
        if token.text != "return" or source.word(i + 1) in (";", "{", "nullptr") or source.tokens[i + 1].kind == "text":
            continue
        last = source.end_of_statement(i)
        if source.word(last) != ";":
            continue
        start, end = token.start, source.tokens[last].end
        value = source.text[token.end:source.tokens[last].start].strip()
        yield Site(start, end, f"{{ if (::sw_mutant::Is(@)) {{ return ::sw_mutant::Other({value}); }} {source.text[start:end]} }}",
                   source.line(start), f"another value than `{value}` is returned")


def find(text, seed):
    """All sites of a file."""
    source = Source(text)
    rng = random.Random(seed)
    found = [*operators(source), *conditions(source), *constants(source, rng), *statements(source), *results(source)]
    is_local = re.compile(r"^\S", re.MULTILINE)  # At the first column only declarations stand, whose defaults are constants.
    starts = {source.line(match.start()) for match in is_local.finditer(source.plain)}
    return [site for site in found if site.line not in starts and not source.is_excluded(site.start, site.end)]


def code_lines(text):
    return [number for number, line in enumerate(masked(text).split("\n"), 1) if line.strip()]
