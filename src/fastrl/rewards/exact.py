r"""Exact numbers as geometry answers write them: sums of rational x sqrt(integer) x pi^k. No float, no sympy.

`read_number` is a parser of its own: it knows arithmetic, roots, pi and fractions in their usual spellings, and nothing
else, so that nothing a model wrote is ever evaluated. What it does not know it refuses; a slower engine may look then.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 200
_MAX_DEPTH, _MAX_DIGITS, _MAX_EXPONENT, _MAX_TERMS, _MAX_RADICAND = 20, 30, 12, 16, 10**10
_TOKEN = re.compile(
    r"\s+|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2}(?!\d))?)|(?P<frac>\\[dtc]?frac)|(?P<root>\\sqrt|√|sqrt)|(?P<pi>\\pi|π|pi)"
    r"|(?P<times>\\cdot|\\times|\*(?!\*)|[×·⋅])|(?P<over>\\div|[/÷])|(?P<power>\*\*|\^)|(?P<sign>[+\-−–])"
    r"|(?P<open>[({\[])|(?P<close>[)}\]])"
)
_CLOSES = {"(": ")", "{": "}", "[": "]"}
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")


class Unreadable(Exception):
    """This is no number that we know how to read."""


@dataclass(frozen=True)
class Exact:
    """A sum of coefficient x sqrt(radicand) x pi^power.

    Args:
        terms: (square-free radicand, power of pi) -> coefficient that is not 0.
    """

    terms: Mapping[tuple[int, int], Fraction]

    @classmethod
    def of(cls, value: Fraction | int) -> "Exact":
        return cls({(1, 0): Fraction(value)} if value else {})

    @property
    def rational(self) -> Fraction | None:
        """The value if it is rational, else None."""
        if not self.terms:
            return Fraction(0)
        return self.terms.get((1, 0)) if len(self.terms) == 1 else None

    def __float__(self) -> float:
        return math.fsum(float(c) * math.sqrt(r) * math.pi**k for (r, k), c in self.terms.items())

    def __add__(self, other: "Exact") -> "Exact":
        terms = dict(self.terms)
        for key, coefficient in other.terms.items():
            terms[key] = terms.get(key, Fraction(0)) + coefficient
        return _exact(terms)

    def __neg__(self) -> "Exact":
        return Exact({key: -coefficient for key, coefficient in self.terms.items()})

    def __mul__(self, other: "Exact") -> "Exact":
        terms: dict[tuple[int, int], Fraction] = {}
        for (r, k), c in self.terms.items():
            for (s, m), d in other.terms.items():
                factor, radicand = _square_free(r * s)
                key = radicand, k + m
                terms[key] = terms.get(key, Fraction(0)) + c * d * factor
        return _exact(terms)

    def inverse(self) -> "Exact":
        """1 / self, for one term, or two whose product with their conjugate is rational."""
        if len(self.terms) == 1:
            (((radicand, power), coefficient),) = self.terms.items()
            return Exact({(radicand, -power): 1 / (coefficient * radicand)})
        if len(self.terms) == 2:
            (a, b) = self.terms.items()
            conjugate = Exact(dict([a, (b[0], -b[1])]))
            norm = (self * conjugate).rational
            if norm:
                return conjugate * Exact.of(1 / norm)
        raise Unreadable("a denominator of this kind")

    def power(self, exponent: int) -> "Exact":
        base = self.inverse() if exponent < 0 else self
        result = Exact.of(1)
        for _ in range(abs(exponent)):
            result = result * base
        return result

    def root(self) -> "Exact":
        value = self.rational
        if value is None or value < 0:
            raise Unreadable("a root of this kind")
        factor, radicand = _square_free(value.numerator * value.denominator)
        return _exact({(radicand, 0): Fraction(factor, value.denominator)})


def read_number(text: str) -> Exact:
    """Read an expression of numbers.

    Raises:
        Unreadable: it is something else, too long or too large.
    """
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    return _Parser(_tokens(_MIXED.sub(r"(\1+\2/\3)", text))).whole()


def _exact(terms: Mapping[tuple[int, int], Fraction]) -> Exact:
    kept = {key: coefficient for key, coefficient in terms.items() if coefficient}
    too_long = any(max(c.numerator.bit_length(), c.denominator.bit_length()) > 400 for c in kept.values())
    if len(kept) > _MAX_TERMS or too_long:
        raise Unreadable("too large")
    return Exact(kept)


def _square_free(number: int) -> tuple[int, int]:
    """Return (f, r) with number = f^2 r and r square-free."""
    if number > _MAX_RADICAND:
        raise Unreadable("a root of a large number")
    if number == 0:
        return 0, 1
    factor, rest, divisor = 1, number, 2
    while divisor * divisor <= rest:
        while rest % (divisor * divisor) == 0:
            rest //= divisor * divisor
            factor *= divisor
        divisor += 1
    return factor, rest


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"{text[at]!r}")
        if match.lastgroup:
            tokens.append((match.lastgroup, match[0]))
        at = match.end()
    return tokens


class _Parser:
    """Recursive descent over tokens: sums of products of powers, with implicit products such as 2√3."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    def whole(self) -> Exact:
        value = self.sum()
        if self.at < len(self.tokens):
            raise Unreadable(self.tokens[self.at][1])
        return value

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, kind: str) -> str:
        if self.peek() != kind:
            raise Unreadable(f"no {kind}")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def sum(self) -> Exact:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise Unreadable("too deep")
        value = self.product()
        while self.peek() == "sign":
            sign = self.take("sign")
            term = self.product()
            value = value + (term if sign == "+" else -term)
        self.depth -= 1
        return value

    def product(self) -> Exact:
        value, was_number = self.signed(), self.tokens[self.at - 1][0] == "number"
        while True:
            kind = self.peek()
            if kind == "times":
                self.take("times")
                value = value * self.signed()
            elif kind == "over":
                self.take("over")
                value = value * self.signed().inverse()
            elif self.begins_factor(kind) or (kind == "frac" and not was_number):
                value = value * self.factor()
            elif kind == "frac":  # 1\frac{1}{2} is a mixed number
                value = value + self.factor()
            else:
                return value
            was_number = False

    def begins_factor(self, kind: str) -> bool:
        """Whether a product goes on without a sign: 2√3, 2π, 2(1+√3); not 2{3}."""
        return kind in ("root", "pi") or (kind == "open" and self.tokens[self.at][1] != "{")

    def signed(self) -> Exact:
        if self.peek() == "sign":
            sign = self.take("sign")
            value = self.factor()
            return value if sign == "+" else -value
        return self.factor()

    def factor(self) -> Exact:
        value = self.base()
        if self.peek() == "power":
            self.take("power")
            exponent = self.signed().rational
            if exponent is None or abs(exponent) > _MAX_EXPONENT:
                raise Unreadable("an exponent of this kind")
            if exponent.denominator == 1:
                return value.power(int(exponent))
            if exponent == Fraction(1, 2):
                return value.root()
            raise Unreadable("an exponent of this kind")
        return value

    def base(self) -> Exact:
        kind = self.peek()
        if kind == "number":
            return Exact.of(_fraction(self.take("number")))
        if kind == "pi":
            self.take("pi")
            return Exact({(1, 1): Fraction(1)})
        if kind == "root":
            self.take("root")
            return self.argument().root()
        if kind == "frac":
            self.take("frac")
            numerator, denominator = self.fraction()
            return numerator * denominator.inverse()
        return self.group()

    def argument(self) -> Exact:
        """What a root is of: a group, or the number or sign of pi that follows."""
        if self.tokens[self.at : self.at + 1] == [("open", "[")]:
            raise Unreadable("a root of another order")
        if self.peek() in ("number", "open"):
            return self.base()
        raise Unreadable("a root of nothing")

    def fraction(self) -> tuple[Exact, Exact]:
        r"""The two parts of \frac{a}{b}, or of \frac12: two digits."""
        if self.peek() != "number":
            return self.argument(), self.argument()
        digits = self.take("number")
        if len(digits) == 1:
            return Exact.of(int(digits)), self.argument()
        if len(digits) == 2 and digits.isdigit():
            return Exact.of(int(digits[0])), Exact.of(int(digits[1]))
        raise Unreadable("a fraction without braces")

    def group(self) -> Exact:
        opening = self.take("open")
        value = self.sum()
        if self.take("close") != _CLOSES[opening]:
            raise Unreadable("brackets that do not match")
        return value


def _fraction(digits: str) -> Fraction:
    if len(digits) > _MAX_DIGITS:
        raise Unreadable("too many digits")
    return Fraction(digits.rstrip(".") or digits)
