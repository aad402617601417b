"""Mathematical expressions that a model wrote, read without evaluating any code.

`read` takes ASCII text of bounded size, parses it (`ast.parse` runs nothing), and rebuilds it from what is
allowed: numbers, ``+ - * / **``, the names and functions that the caller gives. What it is worth is computed
here, with exact fractions, polynomials, or 50 digits; no symbolic library sees the text.
"""

from __future__ import annotations

import ast
import hashlib
import operator
import random
import re
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar

import mpmath

V = TypeVar("V")

MAX_CHARS = 2_000  # length of an expression
MAX_DEPTH = 250  # levels of an expression; a sum of n terms has n
MAX_BRACKETS = 40  # levels of brackets
MAX_BITS = 4_096  # bits of a numerator or denominator
MAX_EXPONENT = 200  # largest exponent of an exact power
MAX_TERMS = 500  # terms of a polynomial

_CHARACTERS = re.compile(r"[0-9A-Za-z_.,+\-*/^() \t\n]*")
_SIGNS = re.compile(r"[+\-\s]{20,}")


class NotAnExpression(ValueError):
    """The text is no expression of the allowed kind, or too large; says why."""


_ALL: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def read(
    text: str,
    constant: Callable[[Fraction], V],
    names: Mapping[str, V],
    functions: Mapping[str, Callable[[V], V]] | None = None,
) -> V:
    """The value of an expression, in which ``^`` is ``**``. ``constant`` makes a value of a number; values
    have those operators that are allowed. Raises NotAnExpression: anything else is in it, or it is too large.
    """
    callables = functions or {}

    def value(node: ast.AST, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotAnExpression(f"it nests more than {MAX_DEPTH} levels")
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() | float() as number):
                return constant(_number(number))
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.UnaryOp(op=ast.UAdd(), operand=inner):
                return value(inner, depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner, depth + 1)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ALL:
                return _ALL[type(op)](value(left, depth + 1), value(right, depth + 1))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in callables:
                return callables[name](value(argument, depth + 1))
        what = node.id if isinstance(node, ast.Name) else type(node).__name__
        raise NotAnExpression(f"{what[:40]} is not allowed in it")

    try:
        result: V = value(_tree(text), 0)
        return result
    except NotAnExpression:
        raise
    except TypeError:
        raise NotAnExpression("an operator that is not allowed is in it") from None
    except (ArithmeticError, ValueError, RecursionError, MemoryError) as error:
        raise NotAnExpression(f"it has no value: {str(error)[:100]}") from None


def _tree(text: str) -> ast.AST:
    text = text.strip()
    if not text:
        raise NotAnExpression("it is empty")
    if len(text) > MAX_CHARS:
        raise NotAnExpression(f"it has more than {MAX_CHARS:,} characters")
    if not _CHARACTERS.fullmatch(text):
        raise NotAnExpression("it has more than numbers, names and operators")
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_BRACKETS or _SIGNS.search(text):
        raise NotAnExpression("it nests too deep")
    try:
        # Brackets around it, so that it may go over several lines.
        return ast.parse(f"({text.replace('^', '**')})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotAnExpression("it cannot be parsed") from None


def _number(number: int | float) -> Fraction:
    try:
        return _bounded(Fraction(str(number)))  # of a decimal: as it is written, not as it is stored
    except (ValueError, OverflowError):  # infinite, or thousands of digits
        raise NotAnExpression("a number in it is too large") from None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotAnExpression("a number in it becomes too large")
    return value


@dataclass(frozen=True)
class Arithmetic:
    """The exact value of an expression of numbers with ``+ - * /``, and its numbers from left to right."""

    value: Fraction
    numbers: tuple[Fraction, ...]

    def __neg__(self) -> Arithmetic:
        return Arithmetic(-self.value, self.numbers)

    @staticmethod
    def _by(operation: Callable[[Fraction, Fraction], Fraction]) -> Callable[[Any, Any], Arithmetic]:
        return lambda one, other: Arithmetic(
            _bounded(operation(one.value, other.value)), one.numbers + other.numbers
        )

    __add__, __sub__ = _by(operator.add), _by(operator.sub)
    __mul__, __truediv__ = _by(operator.mul), _by(operator.truediv)


def arithmetic(text: str) -> Arithmetic:
    """Read an expression of numbers with ``+ - * /`` and brackets. Raises NotAnExpression: it is another one,
    or divides by zero.
    """
    return read(text, lambda number: Arithmetic(number, (number,)), {})


@dataclass(frozen=True)
class Polynomial:
    """A polynomial, multiplied out: coefficients, none of them 0, by the exponents of the variables."""

    terms: Mapping[tuple[int, ...], Fraction]

    def __neg__(self) -> Polynomial:
        return Polynomial({powers: -factor for powers, factor in self.terms.items()})

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for powers, factor in other.terms.items():
            terms[powers] = _bounded(terms.get(powers, Fraction(0)) + factor)
        if len(terms) > MAX_TERMS:
            raise NotAnExpression(f"it has more than {MAX_TERMS} terms")
        return Polynomial({powers: factor for powers, factor in terms.items() if factor})

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + -other

    def __mul__(self, other: Polynomial) -> Polynomial:
        fewer, more = sorted((self, other), key=lambda one: len(one.terms))
        if len(more.terms) > 1 and any(map(any, fewer.terms)):
            raise NotAnExpression("a product in it is not multiplied out")
        return Polynomial(
            {
                tuple(map(operator.add, powers, others)): _bounded(factor * scale)
                for others, scale in fewer.terms.items()
                for powers, factor in more.terms.items()
            }
        )

    def __truediv__(self, other: Polynomial) -> Polynomial:
        return self * Polynomial({powers: 1 / value for powers, value in other._constant().items()})

    def __pow__(self, other: Polynomial) -> Polynomial:
        exponent = sum(other._constant().values(), Fraction(0))
        if exponent.denominator != 1 or not 0 <= exponent <= MAX_EXPONENT:
            raise NotAnExpression("an exponent in it is no small natural number")
        if len(self.terms) > 1:
            raise NotAnExpression("a power in it is not multiplied out")
        times = int(exponent)
        return Polynomial(
            {tuple(p * times for p in powers): _power(value, times) for powers, value in self.terms.items()}
        )

    def _constant(self) -> Mapping[tuple[int, ...], Fraction]:
        if any(map(any, self.terms)):
            raise NotAnExpression("it divides by a variable, or has one in an exponent")
        if not self.terms:
            return {}
        return self.terms


def _power(base: Fraction, exponent: int) -> Fraction:
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * exponent > MAX_BITS:
        raise NotAnExpression("a power in it is too large")
    return base**exponent


def expanded(text: str, variables: Collection[str]) -> Polynomial:
    """Read a sum of terms. Raises NotAnExpression: it is none, or is to be multiplied out first."""
    order = sorted(variables)
    zero = (0,) * len(order)
    names = {name: Polynomial({tuple(int(other == name) for other in order): Fraction(1)}) for name in order}
    return read(text, lambda number: Polynomial({zero: number} if number else {}), names)


_DIGITS = 50
_TOLERANCE = "1e-20"
_POINTS = 6
_CANDIDATES = 400
_MAX_MAGNITUDE = 14  # functions take arguments below 2**14
_MAX_POWER = 20_000  # bits of a power's value
_CONSTANTS = ("C", "c", "K", "k")

_computing = threading.Lock()  # mpmath changes the precision of a context while it works


@cache
def _digits() -> Any:
    context = mpmath.MPContext()
    context.dps = _DIGITS
    return context


class _Number:
    """A number of mpmath, complex where a function makes it so, whose powers have a limit."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __neg__(self) -> _Number:
        return _Number(-self.value)

    @staticmethod
    def _by(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], _Number]:
        return lambda one, other: _Number(operation(one.value, other.value))

    __add__, __sub__ = _by(operator.add), _by(operator.sub)
    __mul__, __truediv__ = _by(operator.mul), _by(operator.truediv)

    def __pow__(self, other: _Number) -> _Number:
        base, exponent = self.value, other.value
        if not base:
            raise NotAnExpression("it has a power of 0")
        if (abs(_digits().mag(base)) + 1) * (abs(exponent) + 1) > _MAX_POWER:
            raise NotAnExpression("a power in it is too large")
        return _Number(base**exponent)


_FUNCTIONS = "exp log sqrt sin cos tan cot sec csc asin acos atan sinh cosh tanh"
_OTHER_NAMES = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}


def _functions() -> dict[str, Callable[[_Number], _Number]]:
    """The functions that may stand in an antiderivative, by their names in SymPy and in Python."""
    context = _digits()

    def bounded(function: Callable[[Any], Any]) -> Callable[[_Number], _Number]:
        def apply(number: _Number) -> _Number:
            if number.value and context.mag(number.value) > _MAX_MAGNITUDE:
                raise NotAnExpression("a function in it has too large an argument")
            return _Number(function(number.value))

        return apply

    own = {name: name for name in _FUNCTIONS.split()} | _OTHER_NAMES
    functions = {name: bounded(getattr(context, function)) for name, function in own.items()}
    return functions | dict.fromkeys(("Abs", "abs"), bounded(abs))


def is_antiderivative(text: str, integrand: str, variable: str) -> bool:
    """Whether the derivative of an expression is the integrand: at points of which the text decides, with 50
    digits, where the integrand is real; ``C`` is a constant. Raises NotAnExpression: ``text`` is none;
    ValueError: the integrand is none, or not real at enough points.
    """
    context, functions = _digits(), _functions()
    chance = random.Random(hashlib.sha256(f"{integrand}|{text}".encode()).digest())
    constants = {name: context.mpf(chance.randint(1, 99)) for name in _CONSTANTS}
    constants |= {"pi": context.pi, "E": context.e, "e": context.e}

    def at(expression: str, x: Any) -> Any:
        def constant(number: Fraction) -> _Number:
            return _Number(context.mpf(number.numerator) / number.denominator)

        names = {name: _Number(+value) for name, value in {**constants, variable: x}.items()}
        return read(expression, constant, names, functions).value

    def wanted(x: Any) -> Any | None:
        try:
            value = at(integrand, x)
        except NotAnExpression:
            return None
        return value if isinstance(value, context.mpf) and context.isfinite(value) else None

    with _computing:
        at(text, context.mpf(271) / 997)  # is it an expression at all?
        checked = 0
        for _ in range(_CANDIDATES):
            x = chance.choice((-1, 1)) * context.mpf(10) ** (context.mpf(chance.randint(-1000, 1200)) / 1000)
            value = wanted(x)
            if value is None:
                continue
            slope = context.diff(lambda near: at(text, near), x)
            if not context.isfinite(slope) or abs(slope - value) > context.mpf(_TOLERANCE) * (1 + abs(value)):
                return False
            checked += 1
            if checked == _POINTS:
                return True
    raise ValueError("the integrand is no expression that is real at enough points")
