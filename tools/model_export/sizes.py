"""Sizes of several traces at once, and the expressions in batch and sequence length that they follow."""

from fractions import Fraction

from .rules import Unsupported


class Vec(tuple):
    """One number per trace; arithmetic is trace by trace."""

    def __add__(self, other):
        return Vec(a + b for a, b in zip(self, _vec(other, len(self))))

    __radd__ = __add__

    def __mul__(self, other):
        return Vec(a * b for a, b in zip(self, _vec(other, len(self))))

    __rmul__ = __mul__

    def over(self, other):
        """The quotient, or None where it leaves a rest in some trace."""
        other = _vec(other, len(self))
        return Vec(a // b for a, b in zip(self, other)) if all(b and a % b == 0 for a, b in zip(self, other)) else None

    def constant(self):
        return len(set(self)) == 1


def _vec(value, count):
    return value if isinstance(value, tuple) else Vec([value] * count)


def product(vectors, count):
    result = Vec([1] * count)
    for vector in vectors:
        result = result * vector
    return result


def solve(rows, values):
    """Exact solution of a square system by elimination."""
    n = len(rows)
    m = [[Fraction(x) for x in row] + [Fraction(v)] for row, v in zip(rows, values)]
    for i in range(n):
        pivot = next((r for r in range(i, n) if m[r][i] != 0), None)
        if pivot is None:
            return None
        m[i], m[pivot] = m[pivot], m[i]
        m[i] = [x / m[i][i] for x in m[i]]
        for r in range(n):
            if r != i and m[r][i] != 0:
                m[r] = [x - m[r][i] * y for x, y in zip(m[r], m[i])]
    return [row[-1] for row in m]


class Points:
    """Where the traces were taken: (batch, length) each; expressions go through all of them."""

    def __init__(self, points, varies_length):
        self.points = points
        self.varies_length = varies_length
        self.batch = Vec(b for b, _ in points)
        self.cache = {}

    def expression(self, value, with_batch=True):
        """`value` as an integer or a text for model.json. Raises Unsupported when no polynomial fits."""
        if not isinstance(value, tuple):
            return value
        if value.constant():
            return value[0]
        key = (tuple(value), with_batch)
        if key not in self.cache:
            self.cache[key] = self.fit(value, with_batch)
        return self.cache[key]

    def fit(self, value, with_batch):
        monomials = [(b, s) for b in ((0, 1) if with_batch else (0,)) for s in ((0, 1, 2) if self.varies_length else (0,))]
        factors = self.factors(value, monomials)
        if factors is None and with_batch:  # a size per pair of samples
            monomials = [(0, 0), (1, 0), (2, 0), *([(0, 1), (1, 1)] if self.varies_length else [])]
            factors = self.factors(value, monomials) if len(self.points) > len(monomials) else None
        if factors is None:
            raise Unsupported(f"a size that is {', '.join(f'{v} at batch {b} and length {s}' for v, (b, s) in zip(value, self.points))}")
        return self.text(factors, monomials)

    def factors(self, value, monomials):
        """Of the sum of the monomials that goes through all points; None if none does."""
        rows = [[p[0] ** b * p[1] ** s for b, s in monomials] for p in self.points]
        chosen = self.independent(rows, len(monomials))
        factors = solve([rows[i] for i in chosen], [value[i] for i in chosen])
        if factors is None or any(sum(f * x for f, x in zip(factors, row)) != v for row, v in zip(rows, value)):
            return None
        return factors

    @staticmethod
    def independent(rows, count):
        chosen = []
        basis = []
        for i, row in enumerate(rows):
            rest = [Fraction(x) for x in row]
            for lead, other in basis:
                if rest[lead] != 0:
                    rest = [x - rest[lead] * y for x, y in zip(rest, other)]
            lead = next((k for k, x in enumerate(rest) if x != 0), None)
            if lead is not None:
                basis.append((lead, [x / rest[lead] for x in rest]))
                chosen.append(i)
            if len(chosen) == count:
                break
        return chosen

    @staticmethod
    def text(factors, monomials):
        terms = []
        for factor, (b, s) in zip(factors, monomials):
            if factor == 0:
                continue
            parts = ["batch"] * b + ["sequence_length"] * s
            if abs(factor.numerator) != 1 or not parts:
                parts.append(str(abs(factor.numerator)))
            text = " * ".join(parts) + (f" / {factor.denominator}" if factor.denominator != 1 else "")
            terms.append(("- " if factor < 0 else "+ ") + text)
        joined = " ".join(terms)
        return joined[2:] if joined.startswith("+ ") else joined
