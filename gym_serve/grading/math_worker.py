r"""What a worker of `MathVerifyPool` does: compare an answer with the right one, by math-verify.

math-verify's own time limits are off (they would turn a slow machine into wrong answers): the worker's limit
of CPU time is the only clock. And it is mended where it is wrong:

- A line of arithmetic went to SymPy's `parse_expr`, which is `eval`. Here `arithmetic` reads it.
- Numbers were compared to six decimals only. Here they have to agree relatively as well (`_far_apart`).
- Constants are compared by their values to 50 digits, and to all their digits if those agree. Whatever else
  has more than `_MAX_DIGITS` digits is equal to its own text alone.
- Its parser is run in two stages (`in_two_stages`), which is three times as fast.

Nothing of gym_serve is imported, so that a worker starts quickly and stays small.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from typing import Any, NamedTuple

_MAX_TEXT = 10_000
_MAX_DIGITS = 100_000.0
"""Digits of a number that are calculated with, and that a number may have whose value only is estimated."""
_MAX_EXPONENT = 1e10
_MAX_ARGUMENT, _MAX_DEGREE, _MAX_TERMS = 1_000.0, 1_000.0, 10_000.0
"""Digits of a function's argument, degree of a sum's power, and terms of a sum, that are calculated with."""
_DIGITS = 50
_SAME, _DIFFERENT = 1e-40, 1e-15
"""Relative distance of two exact numbers that may be equal (`_same_exactly` decides), and surely not."""
_NEAR = 1e-30  # relative distance of the parts of two complex numbers that are equal
_ROUNDED = 2e-6  # distance of a decimal from every number that agrees with it to six places
_STORED = 1e-14  # relative distance of a decimal from what is stored for it
_FRACTION, _EXACT, _NOTHING = 1e-4, 1e-12, 1e-9
"""Relative distance of two equal numbers, one of which is a decimal, or none; what a decimal 0 may be."""


class Comparison(NamedTuple):
    """What math-verify says about an answer.

    Attributes:
        equal: the answer has the gold's value.
        extracted: the answer found in the text, in SymPy's notation (its text if SymPy reads none).
        written: the same as the text has it; None if there is no answer.
        reason: why the answer cannot be compared, and so counts as wrong; None if it was compared.
    """

    equal: bool
    extracted: str | None
    written: str | None
    reason: str | None = None


def compare(gold: str, answer: str) -> Comparison:
    r"""Compare the answer in a text with the right one, in ``\boxed{}``."""
    library = _library()
    _treat_alike(gold, answer)
    formula = library.LatexExtractionConfig()
    # Units are read before, and not by dropping what follows.
    formula = replace(formula, normalization_config=replace(formula.normalization_config, units=False))
    golds = library.parse(gold, (formula,), parsing_timeout=None)
    plain = library.ExprExtractionConfig()
    answers = library.parse(answer, (plain, formula), parsing_timeout=None)
    golds, answers = _with_imaginary_unit(golds), _with_imaginary_unit(answers)
    # Both lists hold a SymPy form and the text that it was read from; show the form that agrees.
    texts = _texts(answers)
    shown = texts[0] if texts else None
    written = next((form[:_MAX_TEXT] for form in answers if isinstance(form, str)), shown)
    if gold == answer and golds:
        return Comparison(True, shown, written)
    equal = _equal_constants(golds, answers)
    if not equal and (reason := _too_large(golds) or _too_large(answers)):
        return Comparison(False, None, None, reason)
    if equal is None:
        # A set may be given by the inequality that describes it, whichever side the gold is on.
        equal = library.verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None)
    gold_texts = _texts(golds)
    extracted = next((text for text in texts if text in gold_texts), shown)
    return Comparison(bool(equal), extracted, written)


def arithmetic(text: str) -> Any:
    """A SymPy expression, not evaluated, of numbers, ``+ - * / **`` and brackets. Raises ValueError: there is
    anything else in it; SyntaxError: it is no expression.
    """
    import sympy  # type: ignore[import-untyped]

    add, mul, pow_ = (partial(kind, evaluate=False) for kind in (sympy.Add, sympy.Mul, sympy.Pow))

    def convert(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value) if type(value) in (int, float):
                return sympy.Integer(value) if type(value) is int else sympy.Float(str(value))
            case ast.UnaryOp(op=ast.UAdd(), operand=inner):
                return convert(inner)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return mul(-1, convert(inner))
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return add(convert(left), convert(right))
            case ast.BinOp(op=ast.Sub(), left=left, right=right):
                return add(convert(left), mul(-1, convert(right)))
            case ast.BinOp(op=ast.Mult(), left=left, right=right):
                return mul(convert(left), convert(right))
            case ast.BinOp(op=ast.Div(), left=left, right=right):
                return mul(convert(left), pow_(convert(right), -1))
            case ast.BinOp(op=ast.Pow(), left=left, right=right):
                return pow_(convert(left), convert(right))
        raise ValueError("no arithmetic")

    if not text.isascii() or any(letter.isalpha() or letter == "_" for letter in text):
        raise ValueError("no arithmetic")
    return convert(ast.parse(text.strip(), mode="eval").body)


@cache
def _library() -> Any:
    """math-verify, mended."""
    # Not at the top: the parent imports `Comparison` from here, and needs no SymPy.
    import math_verify  # type: ignore[import-untyped]
    from latex2sympy2_extended import latex2sympy2, symbols  # type: ignore[import-untyped]
    from math_verify import grader, parser

    parser.parse_expr = lambda text, **_: arithmetic(text)
    cases = latex2sympy2.ConversionConfig(lowercase_symbols=False)
    parser.latex2sympy = partial(latex2sympy2.latex2sympy, conversion_config=cases)
    symbols.sympy_singleton_map.pop("Gamma", None)  # else it is gamma, a number
    grader.sympy_numeric_eq = _compared_relatively(grader.sympy_numeric_eq)
    converter: Any = getattr(latex2sympy2, "_Latex2Sympy", None)
    if hasattr(converter, "create_parser"):  # private; a version without it is only slower
        converter.create_parser = in_two_stages(converter.create_parser)
    return math_verify


def _with_imaginary_unit(forms: list[Any]) -> list[Any]:
    """Forms in which ``i`` is the imaginary unit, and no variable; the index of a sum stays one."""
    from sympy import Expr, I, Integral, Product, Sum, Symbol

    units = {Symbol("i", real=real): I for real in (True, False)}
    return [
        form.xreplace(units) if isinstance(form, Expr) and not form.has(Sum, Product, Integral) else form
        for form in forms
    ]


def _treat_alike(*texts: str) -> None:
    """Take the variables of both texts for real ones, or those of both for complex ones."""
    from math_verify import grader, parser

    are_complex = any(map(grader.should_treat_as_complex, texts))
    parser.should_treat_as_complex = lambda _: are_complex
    parser.parse_latex_cached.cache_clear()


def _compared_relatively(equal: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(equal)
    def numeric_eq(a: Any, b: Any, *precision: Any, **options: Any) -> bool:
        return equal(a, b, *precision, **options) and not _far_apart(a, b)

    return numeric_eq


def _far_apart(a: Any, b: Any) -> bool:
    """Whether two expressions are surely different, although they agree to six decimals."""
    from sympy import Float, MatrixBase

    if isinstance(a, MatrixBase) or _is_percentage(a) != _is_percentage(b):
        return False
    try:
        a, b = (form.doit() if _is_percentage(form) else form for form in (a, b))
        loose = a.has(Float) or b.has(Float)
        first, second = _value(a), _value(b)
        if first is not None and second is not None:
            return _distant(first, second, loose) or not (loose or _same_exactly(a, b))
        terms, others = (form.expand().as_coefficients_dict() for form in (a, b))
        pairs = [(terms.get(key, 0), others.get(key, 0)) for key in {*terms, *others}]
        return any(_distant(complex(x), complex(y), loose) for x, y in pairs)
    except Exception:  # whatever SymPy cannot evaluate, math-verify has decided
        return False


def _distant(first: Any, second: Any, loose: bool) -> bool:
    size = max(abs(first), abs(second))
    if not first or not second:
        return bool(size > (_NOTHING if loose else 0))
    return bool(abs(first - second) > size * (_FRACTION if loose else _EXACT))


def _is_percentage(form: Any) -> bool:
    from sympy import Rational, UnevaluatedExpr

    return hasattr(form, "has") and form.has(UnevaluatedExpr(Rational(1, 100)))


def _value(form: Any, digits: int = 30) -> Any:
    """The value of a real constant, to so many digits; None if it has none, or SymPy does not find it."""
    from sympy import Expr

    if not isinstance(form, Expr) or form.free_symbols:
        return None
    value = form.evalf(digits)
    return value if value.is_Float and value._prec > digits else None


def _equal_constants(golds: list[Any], answers: list[Any]) -> bool | None:
    """Whether two constants are equal by their values; None if that does not decide."""
    from sympy import Expr, Float, I

    first_forms = ((form for form in side if not isinstance(form, str)) for side in (golds, answers))
    forms: list[Any] = [next(side, None) for side in first_forms]
    if any(not isinstance(form, Expr) or form.free_symbols or _is_percentage(form) for form in forms):
        return None
    if max(map(_digits, forms)) > _MAX_EXPONENT:
        return None
    if any(form.has(I) for form in forms):
        return _equal_complex(*forms)
    try:
        gold, answer = (_value(form, _DIGITS) for form in forms)
        if not gold or not answer:
            return None
        apart = abs(gold - answer)
        if any(form.has(Float) for form in forms):
            if abs(gold) > 1 and apart < _STORED * abs(gold):
                return True
            return False if apart > _ROUNDED else None
        near = apart / max(abs(gold), abs(answer))
    except Exception:
        return None
    return _same_exactly(*forms) if near < _SAME else False if near > _DIFFERENT else None


def _equal_complex(gold: Any, answer: Any) -> bool | None:
    """Whether the real and the imaginary parts of two constants agree; None if one has no value."""
    from sympy import Float

    digits = max(map(_digits, (gold, answer)))
    if digits > _MAX_DIGITS:
        return False
    precision = _DIGITS + math.ceil(digits)
    try:
        first, second = (form.evalf(precision).as_real_imag() for form in (gold, answer))
        nothing = max(map(abs, (*first, *second))) * Float(10, precision) ** (10 - precision)
        near = _ROUNDED if gold.has(Float) or answer.has(Float) else _NEAR
        return all(
            abs(a - b) <= max(near * max(abs(a), abs(b)), nothing) for a, b in zip(first, second, strict=True)
        )
    except Exception:
        return None


def _same_exactly(gold: Any, answer: Any) -> bool:
    """Whether two exact constants that agree to many digits agree to all that their numbers have."""
    from sympy import Float

    if gold == answer:
        return True
    digits = max(map(_digits, (gold, answer)))
    if digits > _MAX_DIGITS:
        return False
    precision = _DIGITS + 2 * math.ceil(digits)
    first, second = (_value(form, precision) for form in (gold, answer))
    if first is None or second is None:
        return True
    return bool(abs(first - second) <= abs(first) * Float(10, precision) ** (_DIGITS // 5 - precision))


def _too_large(forms: list[Any]) -> str | None:
    """Why forms cannot be compared: a number in them is too long, or a sum has too many terms."""
    if any(not isinstance(form, str) and _digits(form) > _MAX_DIGITS for form in forms):
        return f"it has a number of more than {_MAX_DIGITS:,.0f} digits or terms"
    return None


def _digits(form: Any) -> float:
    """An upper estimate of the digits of the longest number in an expression; found without evaluating it."""
    try:
        return _estimated(form)
    except (RecursionError, OverflowError):
        return math.inf


def _estimated(form: Any) -> float:
    import sympy

    if isinstance(form, sympy.Rational):
        return 0.302 * float(max(abs(form.p).bit_length(), form.q.bit_length()))
    arguments = getattr(form, "args", ())
    if isinstance(form, sympy.Float) and form.is_finite and form:
        return abs(math.log10(abs(form)))
    if not arguments or isinstance(form, sympy.Float):
        return 0.5
    if isinstance(form, sympy.Tuple) and not all(hasattr(part, "args") for part in arguments):
        return 0.5
    sizes = [_estimated(part) for part in arguments if hasattr(part, "args")]
    largest = max(sizes, default=0.5)
    if isinstance(form, sympy.Pow | sympy.exp):
        base = form.base if isinstance(form, sympy.Pow) else sympy.E
        exponent = _rough(form.exp, _estimated(form.exp))
        if base.free_symbols and not base.is_Symbol and exponent > _MAX_DEGREE:
            return math.inf
        return max(largest, exponent * (1.0 if base.free_symbols else max(_estimated(base), 0.5)))
    if isinstance(form, sympy.factorial | sympy.gamma | sympy.binomial | sympy.factorial2):
        number = _rough(arguments[0], sizes[0])
        return max(largest, number * (0.302 if isinstance(form, sympy.binomial) else math.log10(number + 10)))
    if isinstance(form, sympy.Sum | sympy.Product):
        terms = max(_rough(bound, _estimated(bound)) for limit in form.limits for bound in limit[1:] or (0,))
        return max(largest, terms * _MAX_DIGITS / _MAX_TERMS)
    if isinstance(form, sympy.Add):
        return largest + math.log10(len(sizes))
    if isinstance(form, sympy.Mul):
        return sum(sizes)
    if isinstance(form, sympy.Function) and largest > _MAX_ARGUMENT:
        return math.inf
    return largest


def _rough(form: Any, digits: float) -> float:
    """The size of a number of so many digits, as a float; infinite if it has too many, 1 if it is none."""
    from sympy import Expr

    if digits > 15:
        return math.inf
    if not isinstance(form, Expr) or form.free_symbols:
        return 1.0
    value = form.evalf(15)
    return abs(float(value)) if value.is_Float or value.is_Integer or value.is_Rational else 1.0


def in_two_stages(create: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of math-verify's LaTeX parser that is three times as fast.

    Without ANTLR's predictions with the full context of a token ("SLL"), it finds the same tree or a syntax
    error, as `PredictionMode` documents; so on an error, and only then, the text is parsed again with them.
    """
    from antlr4.atn.PredictionMode import PredictionMode  # type: ignore[import-untyped]

    @wraps(create)
    def create_parser(self: Any, text: str) -> Any:
        parser = create(self, text)
        parse = parser.math

        def math() -> Any:
            parser._interp.predictionMode = PredictionMode.SLL
            try:
                return parse()
            except Exception:
                return create(self, text).math()

        parser.math = math
        return parser

    return create_parser


def _texts(forms: list[Any]) -> list[str]:
    texts = []
    for form in forms:
        try:
            texts.append(str(form).strip()[:_MAX_TEXT])
        except Exception:  # printing fails on integers of over 4,300 digits, and on broken trees
            continue
    return texts


def warm_up() -> None:
    """Do what the first comparison does: import SymPy, compile expressions and the parser's tables."""
    compare(r"\boxed{\frac{1}{2}}", r"So $x = \frac{1}{2}$, that is \boxed{0.5}.")


def work(request: list[list[str]]) -> dict[str, Any]:
    """`compare` of each pair ``[gold, answer]`` up to the first that is not equal, as JSON of the last."""
    done = Comparison(False, None, None)
    for gold, answer in request:
        done = compare(gold, answer)
        if not done.equal:
            break
    return done._asdict()
