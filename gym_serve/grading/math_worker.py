r"""What a worker of `MathVerifyPool` does: compare an answer with the right one, by math-verify.

SymPy's time and memory have no bound on hostile input, and neither a thread nor a signal can stop it
inside C code. A process can be killed. Hence math-verify's own time limits are off here (they would
turn a slow machine into wrong answers), and the worker's limit of CPU time is the only clock.

Nothing of gym_serve is imported, so that a worker starts quickly and stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

_MAX_TEXT = 10_000


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
    r"""Compare the answer in a text with the right one.

    Args:
        gold: the right answer, in ``\boxed{}``.
        answer: text with the answer in it, ideally in ``\boxed{}``.
    """
    library = _library()
    latex, plain = library.LatexExtractionConfig(), library.ExprExtractionConfig()
    golds = library.parse(gold, (latex,), parsing_timeout=None)
    answers = library.parse(answer, (plain, latex), parsing_timeout=None)
    # A set may be given by the inequality that describes it, whichever side the gold is on.
    equal = library.verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None)
    # Both lists hold a SymPy form and the text that it was read from; show the form that agrees.
    gold_texts, texts = _texts(golds), _texts(answers)
    extracted = next((text for text in texts if text in gold_texts), texts[0] if texts else None)
    written = next((form[:_MAX_TEXT] for form in answers if isinstance(form, str)), extracted)
    return Comparison(bool(equal), extracted, written)


@cache
def _library() -> Any:
    """math-verify, with its LaTeX parser in two stages."""
    # Not at the top: the parent imports `Comparison` from here, and needs no SymPy.
    import math_verify  # type: ignore[import-untyped]
    from latex2sympy2_extended import latex2sympy2  # type: ignore[import-untyped]

    converter: Any = getattr(latex2sympy2, "_Latex2Sympy", None)
    if hasattr(converter, "create_parser"):  # private; a version without it is only slower
        converter.create_parser = in_two_stages(converter.create_parser)
    return math_verify


def in_two_stages(create: Callable[..., Any]) -> Callable[..., Any]:
    """The function that makes math-verify's LaTeX parser, for one that is three times as fast.

    Most of a comparison's time goes to ANTLR's predictions with the full context of a token, which it never
    caches. Without them ("SLL") it finds the same tree or a syntax error, as the documentation of its
    `PredictionMode` guarantees; so on an error, and only then, the text is parsed again with them. The parser
    raises on the first error, so that no half-repaired tree ever comes back.
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


def work(request: list[str]) -> dict[str, Any]:
    """`compare` of ``[gold, answer]``, as JSON."""
    gold, answer = request
    return compare(gold, answer)._asdict()
