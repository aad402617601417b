r"""Reads mathematical answers in the spellings of people and models, before math-verify does.

math-verify drops what it takes for a unit, and all that follows: ``2 \text{ hours } 30 \text{ minutes}`` is 2
to it. Here an answer is taken apart first: a relation in front, parts of formulas and words, a unit at the
end. Two answers are equal if all their parts are, so that what is not read whole is equal to nothing but
itself. Everything takes time linear in the text, which may be hostile.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

from gym_serve.grading.answers import (
    COLOR,
    LINE_MARK,
    answer_lines,
    is_denied,
    last_boxes,
    plain_answer,
    undecorated,
    visible,
)
from gym_serve.grading.math_pairs import pairs_of

MAX_ANSWER = 10_000  # characters of an answer that are read; a longer one is equal to nothing

_BOX = r"\boxed{"
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
_DIGIT = re.compile(r"[^\D0-9]")
_SPACE = r"(?:[ \u00a0\u2009\u202f]|\{?\\[ ,;:]\}?|~)"
_BOXED_NUMERAL = re.compile(
    rf"\\boxed\{{\s{{0,9}}([+-]?)([0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+|[0-9]+)(?:\.([0-9]*))?\s{{0,9}}\}}"
)


class Question(NamedTuple):
    """What there is to compare: pairs of a formula of the gold and a text that has to be equal to it; the
    answer as it is ``written``, if that is clear; a ``difference`` that decides whatever the formulas are.
    """

    pairs: list[tuple[str, str]]
    written: str | None
    difference: str | None


class Reading(NamedTuple):
    """An answer taken apart."""

    relation: str  # in front: ``\\ne``, ``\\le``, ...; empty for none and for "="
    parts: tuple[str, ...]  # formulas in LaTeX and words in turn; words are in lower case behind a ``"``
    unit: str  # at the end, in its canonical spelling; empty if there is none


def boxed_gold(expected_answer: str) -> str:
    r"""``expected_answer`` as math-verify expects it: without math delimiters around it, in ``\boxed{}``."""
    gold = expected_answer.strip()
    for left, right in _DELIMITERS:
        if len(gold) > len(left + right) and gold.startswith(left) and gold.endswith(right):
            inner = gold[len(left) : -len(right)]
            if left not in inner:  # else several formulas: "$1$ and $2$"
                gold = inner.strip()
                break
    return plain_numerals(f"{_BOX}{gold}}}")


def plain_numerals(text: str) -> str:
    r"""``text`` with its numerals spelled as math-verify reads them: decimal digits of any script become 0 to
    9, and in ``\boxed{1 000 000}``, ``\boxed{32.}`` the spaces and the full stop are removed.
    """
    if not text.isascii():
        text = _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit.group())), text)
    return _BOXED_NUMERAL.sub(_plain, text)


def _plain(numeral: re.Match[str]) -> str:
    sign, whole, fraction = numeral.groups()
    digits = re.sub("[^0-9]", "", whole)
    return f"{_BOX}{sign}{digits}{'.' + fraction if fraction else ''}}}"


_FORMULA = re.compile(
    r"\$\$(?P<a>[^$]{1,500})\$\$|\\\[(?P<b>(?:[^\\]|\\(?!\])){1,500})\\\]"
    r"|\\\((?P<c>(?:[^\\\n]|\\(?!\))){1,500})\\\)|(?<![\\\d$])\$(?P<d>[^$\n]{1,500})\$"
)
_EXPLICIT = re.compile(r"final answer is:?\s{0,9}\$([^$\n]{1,300})\$\.?\s?I hope", re.IGNORECASE)
_ANSWER_WORD = re.compile(r"answer", re.IGNORECASE)
_IS_A_NUMBER = re.compile(r"[^.$\n]{0,60}\b(?:is|are|equals)\s+[-+$\\({]{0,4}\d")
_PROSE = re.compile(r"\b(?:it|is|we)\b", re.IGNORECASE)
_NEAR = 100
_MAX_FORMULA = 300


def written_answer(text: str) -> str | None:
    r"""The answer of a text as it is written, or None if no part of it is clearly the answer.

    That is: what stands in "The final answer is $4$. I hope it is correct.", which some prompts ask for;
    else the content of the last box (of several with nothing but commas, "and" or "or" between them, all);
    else what stands after the last ``Answer:``, or the whole text, if it is a formula; else the formula after
    the last "answer", or the last formula if no number follows.
    """
    if explicit := _EXPLICIT.findall(text):
        return str(explicit[-1]).strip()
    if boxes := last_boxes(text):
        return ", ".join(boxes)
    line = next(answer_lines(text), None)
    for candidate, longest_word in ((line, 2), (_stated(text), 2), (LINE_MARK.sub("", undecorated(text)), 1)):
        if candidate is not None and _is_formula(candidate, longest_word):
            return candidate.strip()
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return None
    answers = [match.end() for match in _ANSWER_WORD.finditer(text)]
    if answers:
        following = (f for f in formulas if answers[-1] <= f.start() <= answers[-1] + _NEAR)
        chosen = next(following, None)
        if chosen is not None and (
            re.search(r"\d", text[answers[-1] : chosen.start()])
            or (not re.search(r"\d", chosen[0]) and _IS_A_NUMBER.match(text, chosen.end()))
        ):
            chosen = None
    else:
        chosen = None if re.search(r"\d", text[formulas[-1].end() :]) else formulas[-1]
    if chosen is None or _connected(text, chosen) or is_denied(text, chosen.start()):
        return None
    written = next(group for group in chosen.groups() if group is not None).strip()
    return None if _BOX in written else written  # a box that is denied


_STATEMENT = re.compile(
    r"\banswer\b(?:[ \t]{1,9}\w{1,15}){0,4}?[ \t]{1,9}"
    r"(?:is|equals|(?:would|must|will|could|may|might|can|should) be)\b:?"
    r"(?:[ \t]equal[ \t]to)?[ \t]*([^\n]{1,300})",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?][*_]{0,3}(?:\s|$)")
_BOUND = re.compile(
    r"(?:\b(?:at (?:least|most)|(?:less|more|greater|fewer|smaller|larger|lower|higher|bigger) than|up to"
    r"|between|below|above|under|over|either)\b|[<>≤≥≠±]|\\(?:[lg]eq?|[lg]t|pm)(?![A-Za-z]))"
    r"(?:\W{1,4}\w{1,12}){0,3}\W{0,4}$",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(
    r"(?:[^\w.]*\sto|(?:\s?[A-Za-z]{1,12})?[^\w.]*\s(?:or|maybe|perhaps|possibly))\b[\w\s,]{0,30}[^\w]{0,4}(?=\d)",
    re.IGNORECASE,
)
_RANGE = re.compile(r"\bbetween\s\S{1,40}\s{1,9}and\s{1,9}\W{0,4}$", re.IGNORECASE)
_REFUSED = re.compile(r"[^\w.]*\sis(?:n['’]t| not| wrong| false| incorrect)\b", re.IGNORECASE)
_NUMERAL = re.compile(r"\d[\d.,/]*")


def _stated(text: str) -> str | None:
    """What the last "the answer is" of a text says, up to the end of the sentence."""
    statements = _STATEMENT.findall(text)
    return undecorated(_SENTENCE_END.split(statements[-1], maxsplit=1)[0]) if statements else None


def _is_hedged(text: str) -> bool:
    """Whether the number that prose ends with, or states as the answer, is denied or not the only one."""
    stated = next(answer_lines(text), None) or _stated(text)
    lines = [line for line in text.splitlines() if _NUMERAL.search(line)]
    clause = stated or (lines[-1][-1000:] if lines else "")
    numerals = list(_NUMERAL.finditer(clause))
    if not numerals:
        return False
    if stated:
        first = numerals[0]
        if is_denied(clause, first.start()) or _BOUND.search(clause[: first.start()]):
            return True
    else:
        first = numerals[-1]
        before = clause[: first.start()]
        bound = _BOUND.search(before)
        if is_denied(clause, first.start()) or _RANGE.search(before):
            return True
        if bound and re.search(r"\b[A-Za-z]\W{0,2}\s(?:is|are)\s$", before[: bound.start()]):
            return True  # "so x is at most"
        between = _ALTERNATIVE.match(clause, numerals[-2].end()) if len(numerals) > 1 else None
        if between and between.end() == first.start():
            return True
    return bool(_ALTERNATIVE.match(clause, first.end()) or _REFUSED.match(clause, first.end()))


def _is_formula(text: str, longest_word: int) -> bool:
    """Whether a line is an answer without prose around it: it has no long words but units."""
    if not 0 < len(text.strip()) <= _MAX_FORMULA or "\n" in text.strip() or _BOX in text:
        return False
    bare = re.sub(r"\\[A-Za-z]+", " ", _TEXT_COMMAND.sub(" ", text))
    words = re.findall(rf"[A-Za-z]{{{longest_word + 1},}}", bare)
    are_known = (word in _UNITS or word.lower() in _UNITS or word in ("and", "or", "pi") for word in words)
    return not _PROSE.search(bare) and all(are_known)


def _connected(text: str, formula: re.Match[str]) -> bool:
    """Whether the formula is one of a list: "$1$, $2$ and $3$". math-verify reads those."""
    before = text[max(0, formula.start() - 8) : formula.start()]
    after = text[formula.end() : formula.end() + 8]
    gap = r"\s*(?:,?\s*and|,?\s*or|,)\s*"
    return bool(re.search(rf"(?:\$|\\[)\]]){gap}$", before) or re.match(rf"{gap}(?:\$|\\[(\[])", after))


_TEXT_COMMAND = re.compile(
    r"\\(text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|operatorname\*?|boldsymbol|bm)"
    r"\s*\{((?:[^{}\\]|\^\{[-\d]{1,3}\}|\\[^A-Za-z]|\\(?:pi|circ|frac|sqrt|cdot|times)(?![A-Za-z]))*)\}"
)
_SWITCHED = re.compile(r"\{\s*\\(rm|bf|it|sf|tt)(?![A-Za-z])\s*([^{}\\]*)\}")
_OPERATOR_NAMES = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp det gcd lcm max min lim sup inf arg
tr rank dim ker deg mod re im sgn floor ceil sqrt frac pi theta alpha beta gamma infty pmod
"""
_OPERATORS = frozenset(_OPERATOR_NAMES.split())
_FONT_OF_VARIABLES = frozenset(("mathbf", "mathit", "mathsf", "boldsymbol", "bm", "mathnormal"))
_WORD = re.compile("\0(\\d+)\0")
_NAMED = {
    **{"thousand": r"\times 10^{3}", "million": r"\times 10^{6}", "billion": r"\times 10^{9}"},
    **{"trillion": r"\times 10^{12}", "infinity": r"\infty", "pi": r"\pi"},
    **{"minus": "-", "exactly": ""},
    **{"percent": r"\%", "percentage": r"\%", "pct": r"\%", "per cent": r"\%"},
}

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−‐‒–", "-"),
        **dict.fromkeys("÷⁄∕", "/"),
        **dict.fromkeys("·⋅∙", r"\cdot "),
        **dict.fromkeys("≤⩽", r"\le "),
        **dict.fromkeys("≥⩾", r"\ge "),
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
        **{"×": r"\times ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∞": r"\infty ", "∪": r"\cup "},
        **{"∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ", "∅": r"\emptyset ", "ⅈ": "i", "ⅇ": "e", "µ": "u"},
        "μ": r"\mu ",
        "º": r"^\circ ",
        **{chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)},  # of full width
    }
)
_VULGAR = re.compile("(\\d?)\\s?([¼-¾⅐-⅞])")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPT = re.compile("[₀-₉]+")

_STYLES = re.compile(
    r"\\(?:(?:display|text|script)style|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|bfseries|[bB]igg?[lrm]?|limits"
    r"|nolimits)(?![A-Za-z])\s*"
)
_NEGATIVE_SPACE = re.compile(r"(?<!\\)\\!\s*")
_FORMULA_AND_UNIT = re.compile(r"\$(\S|\S[^$]*\S)\$(\s+[A-Za-z][A-Za-z /^0-9]*\.?)")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:> ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~")
_LONG_EXPONENT = re.compile(r"\^\s?(-\d+|\d{2,})")
_SCIENTIFIC = re.compile(r"(?<![\w.\\}])(\d{1,400}(?:\.\d{0,400})?)[eE]([+-]?\d{1,3})(?![\w.]*\w)")
_FUNCTIONS = "a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|csc|ln|log|exp"
_UNIT_TEXT = r"\\(?:text|mathrm)\s?\{\s?([A-Za-z]{1,9})\s?\}\s?"
_SYNONYMS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"\\varnothing(?![A-Za-z])": r"\\emptyset ",
    r"\\([lr])brace(?![A-Za-z])": lambda m: r"\{" if m[1] == "l" else r"\}",
    r"\\mathbb\s?([A-Z])(?![A-Za-z])": r"\\mathbb{\1}",
    r"\\(?:nicefrac|sfrac|xfrac)(?![A-Za-z])": r"\\frac",
    r"\\colon(?![A-Za-z])": ":",
    r"(?:\{|^)\s?([^{}\\]{1,80}?)\s?\\choose(?![A-Za-z])\s?([^{}\\]{1,80}?)\s?(?:\}|$)": (r"\\binom{\1}{\2}"),
    r"(?<=[\d})])\s?\\([dt]?binom)(?![A-Za-z])": r"\\cdot \\\1",  # else a digit before it is added
    r"(?<=\d|\))\s?\\deg(?:ree)?(?![A-Za-z])|\^\s?\{?\s?\\(?:text|mathrm)\s?\{o\}\s?\}?": r"^\\circ ",
    r"\*\*": "^",
    r"(?<![A-Za-z\\])pi(?![A-Za-z])": r"\\pi ",
    r"(?<=\d)\s(thousand|million|billion|trillion)(?![A-Za-z])": lambda m: _NAMED[m[1]],
    r"(?<![\w.\\}])\.(?=\d)": "0.",
    r"\\log_\s?\{?e\}?(?![A-Za-z])": r"\\ln ",
    r"\\lg(?![A-Za-z])": r"\\log_{10}",
    rf"(?<![A-Za-z\\{{])({_FUNCTIONS})(?=\s?[({{\d\\]|\s[A-Za-z])": r"\\\1 ",
    r"(?<![A-Za-z\\])[Ii]nfinity(?![A-Za-z])": r"\\infty ",
    r"(?:US|USD)\s?(?=\\?\$)|^(?:USD|US\\?\$)\s(?=\d)": "",
    r"¢": r"\\text{ cents}",
    r"(?<!\\)%|(?<=\d)\s?(?:percent|per cent|pct)(?![A-Za-z])": r"\\%",
    r"\\\\\[\d{1,3}(?:pt|ex|em|mm)\]": r"\\\\",
    r"\\([dt]?frac)\s?(\d)\s?(\d)": r"\\\1{\2}{\3}",
    rf"{_UNIT_TEXT}/\s?{_UNIT_TEXT}": r"\\text{\1/\2}",
    rf"{_UNIT_TEXT}\\cdot(?![A-Za-z])\s?{_UNIT_TEXT}": r"\\text{\1 \2}",
    rf"\\[dt]?frac\s?\{{\s?{_UNIT_TEXT}\}}\s?\{{\s?{_UNIT_TEXT}((?:\^\d)?)\s?\}}": r"\\text{\1/\2}\3",
    r"\\ce\s?\{([^{}]{1,80})\}": lambda m: re.sub(r"(?<=[A-Za-z)])(\d+)", r"_{\1}", m[1]),
    r"\\([dt]?frac)\s?(\\(?![dt]?frac|sqrt|text|left)[a-z]{2,8})(?![A-Za-z])\s?(?=[\w{\\])": r"\\\1{\2}",
    r"(\\[dt]?frac\{\\[a-z]{2,8}\})(\d|[A-Za-z])": r"\1{\2}",
}  # spellings, and those that math-verify reads
_SPELLINGS = [(re.compile(pattern), spelling) for pattern, spelling in _SYNONYMS.items()]
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_LIST_WORDS = re.compile(r"\s*,?\s+(?:and|or)\s+(?=[-+\\(\[$\d])|\s*,(?:\s*,)+")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])\s*")
_GROUPS = re.compile(
    r"(?<![\w.,(\[{])(?:\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?:['’_]\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?![\w.(]|,\d{3})"
)
_COMMA = re.compile(
    r"(?<![\w.,(\[{])(\d+)(?:,|\{[,.]\})(\d{1,2}|\d{4,}|(?<=^0,)\d+|(?<=^0\{,\})\d+)(?![\w.,)\]])"
)
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*10\s*\^")
_MIXED = re.compile(r"(?<![\w.,/^}])(\d{1,30})\s+(\d{1,30})\s*/\s*(\d{1,30})(?![\w/]|[.,]\d)")
_COEFFICIENT = re.compile(
    r"(?<![\w.}])(\d{1,30})\s?\\[dt]?frac\s?(?:\{(\d{1,30})\}|(\d))\s?(?:\{(\d{1,30})\}|(\d))"
)
_RECURRING = re.compile(
    r"(?<![\w.\\}])(\d{0,30})\.(?:(\d{0,30})(?:\\(?:overline|bar|dot)\s?(?:\{(\d{1,30})\}|(\d))|\((\d{1,9})\))(?!\w)"
    r"|(\d{0,30}?)(\d)\7{2,30}\s?(?:\\[lc]?dots(?![A-Za-z])|\.{3}|…))"
)
_BASED = re.compile(
    r"(?<![\w.}\\])(\((?=\w+\)))?(\d[0-9A-Fa-f]*)(?(1)\))\s?"
    r"(_\s?(?:\{(?:[^{}]|\{[^{}]{1,12}\}){1,40}\}|\d{1,3})"
    r"|\s?(?:\\text\s?\{\s?)?(?:in\s)?base\s?\}?\s?\{?\w{1,7}\}?)(?![\w^])"
)
_BASE_NAMES = "two three four five six seven eight nine ten eleven twelve"
_BASES = {name: base for base, name in enumerate(re.findall(r"\w+", _BASE_NAMES), 2)} | {"sixteen": 16}
_MODULUS = re.compile(r"\(?\\b?mod(?![a-z])\s?\{?(\w{1,9})\}?\)?")
_RELATION = re.compile(
    r"(\\(?:neq?|le|leq|leqslant|ge|geq|geqslant|lt|gt|not\s?=|approx|sim|simeq|equiv|gtrsim|lesssim)(?![A-Za-z])|!=|[<>]=?|=)\s*"
)
_RELATIONS = {
    r"\neq": r"\ne", "!=": r"\ne", r"\not=": r"\ne", r"\not =": r"\ne", r"\leq": r"\le", r"\leqslant": r"\le",
    "<=": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", ">=": r"\ge", r"\lt": "<", r"\gt": ">", "=": "",
    r"\approx": "", r"\sim": "", r"\simeq": "",
}  # fmt: skip

_RESIDUE = re.compile(r"^[A-Za-z]\\equiv(?=-?\d+\\pmod)")
_UNREAD = re.compile(
    r"\\(?:not(?!\s?=)|neg|lnot|notin|n(?:less|gtr|[lg]eq(?:q|slant)?|cong|sim|prec|succ|mid|parallel|sub|sup)[a-z]*"
    r"|[lg]neqq?|[lg]nsim|ll|gg|lll|ggg|(?:prec|succ)[a-z]*|(?:sub|sup)set[a-z]*|propto|perp|cong|mod"
    r"|(?:over|under|stack)(?:set|rel))(?![A-Za-z])|^\\(?:in|ni)(?![A-Za-z])|[≪≫∉∝≺≻≮≯≰≱≢]"
    r"|^\\(?:min|max|sup|inf|lim|arg|dim|deg)\s?\d|'$|^-?\d+\s?\\[lc]?dots$|^-?[\d.]+\s?=\s?-?[\d.]+$|\\pmod(?![A-Za-z])|(?<![\w^.])\d+\)?\s?_"
)  # what math-verify drops, though it changes the answer

_UNIT_NAMES = """
mm millimeter millimetre; cm centimeter centimetre; dm decimeter decimetre; m meter metre;
km kilometer kilometre; in inch inches; ft foot feet; yd yard; mi mile; mg milligram; g gram gm;
kg kilogram; lb pound lbs; oz ounce; ton tonne; ml milliliter millilitre mL; l liter litre L;
gal gallon; ms millisecond; s second sec secs; min minute mins; h hour hr hrs; day; week; month;
year yr yrs; degree deg degrees; radian rad; mph; kmh; hz hertz Hz; n newton N; j joule J;
kj kilojoule kJ; w watt W; kw kilowatt kW; v volt V; a ampere amp A; k kelvin K; pa pascal Pa;
mol mole; $ dollar usd USD; cent; € euro eur EUR; £ gbp GBP; ¥ yen; unit; am; pm;
square unit sq unit; cubic unit
"""
_LINES = _UNIT_NAMES.replace("\n", " ").split(";")
_UNITS = {
    spelling + plural: names[0]
    for names in (re.findall(r"(?:square |cubic |sq )?\S+", line) for line in _LINES)
    for spelling in names
    for plural in ("", "s")
}
_ONE_LETTER_UNITS = frozenset("mgslhLNJWVAK")
_PLAIN_UNIT = re.compile(
    r"(?<=[\d)}.])(\s*)((?:[A-Za-z]{1,20}\.?(?:\s[A-Za-z]{1,20}){0,3})(?:\s?/\s?[A-Za-z]{1,12})?)"
    r"((?:\^\{?[-\d]{1,3}\}?)?)\.?$"
)
_SIZES = """
s 1 min 60 h 3600 day 86400 week 604800; mm 1 cm 10 dm 100 m 1000 km 1000000; in 1 ft 12 yd 36 mi 63360;
mg 1 g 1000 kg 1000000; oz 1 lb 16; ml 1 l 1000; cent 1 $ 100; j 1 kj 1000; w 1 kw 1000
"""
_SCALES = {
    unit: (group.split()[0], int(size))
    for group in _SIZES.split(";")
    for unit, size in re.findall(r"(\S+) (\d+)", group)
}  # of a unit: the smallest one of its kind, and how many of those it is
_AMOUNT = r"\d{1,20}(?:\.\d{1,20})?\s?[A-Za-z]{1,12}\b"
_NUMBER_END = re.compile(r"\d$|\\[dt]?frac\{\d{1,30}\}\{\d{1,30}\}$")
_COMPOUND = re.compile(rf"{_AMOUNT}(?:,?\s(?:and\s)?{_AMOUNT}){{1,4}}")
_QUANTITY = re.compile(
    rf"(?<![^\s(*])(?<![-+*/^]\s)-?(?:{_COMPOUND.pattern}|\d{{1,20}}(?:\.\d{{1,20}})?\s?[A-Za-z]{{3,12}}\b"
    r"|\d{1,2}(?::\d\d)?\s?[AaPp]\.?\s?[Mm]\b)(?!\s?[/^]|\s(?:per|squared|cubed|an?|each|every)\b)"
)
_HALF_DAY = re.compile(r"\s*\b([ap])\.?\s?m\b\.?$", re.IGNORECASE)
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\}|\\degree)\s*(?:\\?\s*([CFK]))?$|\s*\\degree\s*$")
_CURRENCY = re.compile(r"^(-?)\s*(\\\$|[$€£¥])\s*(?=[\d.])")
# Words of comparison, denial, arithmetic and number: what they stand behind is another answer.
_NO_UNIT_WORDS = """
and or if for where when with the not no non is are be was to then than but either neither nor only at least
most more less fewer greater smaller above below over under between up exactly about approximately roughly
around almost nearly minus plus times divided squared cubed factorial base larger modulo half twice double
triple one two three four five six seven eight nine ten dozen hundred hundreds thousands millions billions
score odd even positive negative prime wrong false incorrect impossible invalid extraneous rejected never
cannot except without higher lower bigger maybe perhaps possibly
"""
_NO_UNITS = _OPERATORS | frozenset(_NO_UNIT_WORDS.split())
_WORDS_ONLY = re.compile(r"[A-Za-z][A-Za-z'’\-]*(?:[ ,]+[A-Za-z'’\-]+)*[.!]?")
_LABEL_END = re.compile(r"(?:\b(?:is|are|equals|be|answer|result|solution)|[:=])$")
_LABEL_IN_FRONT = re.compile(
    r"(?:(?:the|final|my)\s)*(?:answer|result|solution)(?:\sis)?\s?[:=]\s?", re.IGNORECASE
)
_IS_WORD = re.compile("[A-Za-z]{4}|^(?:yes|no|odd|dne|all|any)$", re.IGNORECASE)
_SYMBOL = r"\psi_{{{}}}"


def read(content: str, *, single: bool = False) -> Reading:
    r"""An answer taken apart, its formulas spelled as math-verify reads them.

    Args:
        content: the answer alone, without ``\boxed{}``; at most `MAX_ANSWER` characters are sensible.
        single: no list is expected, so that a comma may stand in a number: ``12,5`` and ``1.234.567``.
    """
    content = plain_answer(visible(content).replace("\0", ""))
    if one := _FORMULA_AND_UNIT.fullmatch(content):
        content = one[1] + one[2]
    if single:
        content = _COMMA.sub(r"\1.\2", _GROUPS.sub(lambda m: re.sub(r"\D", "", m[0]), content))
    text = _spelled(plain_numerals(_boxed(content))[len(_BOX) : -1])
    flat = " ".join(_TEXT_COMMAND.sub(r" \2 ", text).split())
    if total := _total(flat):
        return total
    bare = re.sub(r",|\band ", "", flat)
    if _COMPOUND.fullmatch(flat) and all(unit in _UNITS for unit in re.findall("[A-Za-z]+", bare)):
        text = re.sub("([A-Za-z]+)", r"\\text{\1}", bare)
    text, words = _marked(text)
    text = _LIST_WORDS.sub(", ", " ".join(text.split())).rstrip("\\ ")
    text = text[label.end() :] if (label := _LABEL_IN_FRONT.match(text)) else text
    relation = ""
    while not _UNREAD.match(text) and (match := _RELATION.match(text)):
        relation += _RELATIONS.get(match[1], match[1])
        text = text[match.end() :]
    text = _WHOLE_SETS.get(re.sub(r"\0(\d+)\0", lambda m: words[int(m[1])], text).lower().strip(" ."), text)
    if _WORDS_ONLY.fullmatch(text) and _IS_WORD.search(text) and text.lower() not in _NAMED:
        return Reading(relation, ('"' + _folded(text),), "")
    if _UNREAD.search(text):
        whole = _WORD.sub(lambda m: f" {words[int(m[1])]} ", text)
        whole = _RESIDUE.sub("", re.sub(r"(?<!\\)\{(\w+)\}", r"\1", "".join(whole.split())))
        return Reading(relation, (f'"{_code(whole)}',), "")
    text, unit = _without_unit(text, words)
    if unit in ("am", "pm"):
        text = re.sub(r"^\s*(\d{1,2})\s*$", r"\1:00", text)
    if _TRIGONOMETRY.search(text):
        text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    if _PLUS_MINUS.match(text):
        text = ", ".join(map(_both_signs, text.split(",")))
    text = _both_values(text)
    return Reading(relation, _parts(text, words), unit)


def _total(text: str) -> Reading | None:
    """Amounts in ever smaller units of one kind as one amount: 2 hours 30 minutes."""
    amounts = re.findall(r"([\d.]+)\s?([A-Za-z]+)", text) if _COMPOUND.fullmatch(text) else []
    scales = [_SCALES.get(_UNITS.get(unit, ""), ("", 0)) for _, unit in amounts]
    kinds, sizes = {kind for kind, _ in scales}, [size for _, size in scales]
    if len(kinds) != 1 or "" in kinds or sizes != sorted(set(sizes), reverse=True):
        return None
    total = sum(Decimal(number) * size for (number, _), size in zip(amounts, sizes, strict=True))
    return Reading("", (format(total, "f"),), scales[0][0])


def _in_one_unit(gold: Reading, answer: Reading) -> tuple[Reading, Reading]:
    """Two amounts in the smallest unit of their kind, if they are in two units of it."""
    (kind, size), (other, scale) = (_SCALES.get(reading.unit, ("", 1)) for reading in (gold, answer))
    parts = "".join(gold.parts + answer.parts)
    if gold.unit == "degree" and _is_in_radians(answer):
        return _in_radians(gold), answer._replace(unit="")
    if answer.unit == "degree" and _is_in_radians(gold):
        return gold._replace(unit=""), _in_radians(answer)
    if size == scale or kind != other or re.search(r"[,;=<>&\"]", parts):
        return gold, answer
    return tuple(  # type: ignore[return-value]
        reading._replace(parts=(rf"({''.join(reading.parts)}) \cdot {factor}",), unit=kind)
        for reading, factor in ((gold, size), (answer, scale))
    )


def _is_in_radians(angle: Reading) -> bool:
    return angle.unit in ("", "radian") and r"\pi" in "".join(angle.parts)


def _in_radians(angle: Reading) -> Reading:
    *before, value = angle.parts or ("",)
    label, equals, number = value.rpartition("=")
    return angle._replace(parts=(*before, rf"{label}{equals}\frac{{({number})\pi}}{{180}}"), unit="")


def _both_signs(term: str) -> str:
    r"""``\pm 2`` as ``2, -(2)``."""
    positive = _PLUS_MINUS.sub("", term.strip(), count=1)
    return f"{positive}, -({positive})" if _PLUS_MINUS.match(term.strip()) else term


def ask(gold: str, answer: str) -> Question:
    r"""What there is to compare, of the right answer in ``\boxed{}`` and a text with the answer in it."""
    wanted = read(written_answer(gold) or "")
    written = written_answer(answer)
    if written is None:
        if wanted.relation or len(wanted.parts) != 1 or wanted.parts[0].startswith('"'):
            return Question([], None, "no box, no line 'Answer: X' and no formula found")
        if _is_hedged(_COMPOUND.sub(lambda m: "0" if _total(m[0]) else m[0], answer)):
            return Question([], None, "it is denied, a bound, or one of several")
        prose = _MIXED.sub(_improper, plain_numerals(answer).translate(_SIGNS))
        prose = _SCIENTIFIC.sub(_decimal, prose)
        written = _last_quantity(prose)
        if written is None:
            return Question([(_boxed(wanted.parts[0]), prose)], None, None)
    if len(written) > MAX_ANSWER:
        return Question([], written, f"it is longer than {MAX_ANSWER} characters")
    single = not re.search("[,;]", "".join(wanted.parts))
    wanted, given = _in_one_unit(wanted, read(written, single=single))
    different = _difference(wanted, given)
    formulas: list[tuple[str, str]] = []
    for first, second in () if different else zip(wanted.parts, given.parts, strict=True):
        pairs = [] if '"' in (first[:1], second[:1]) else pairs_of(*_alike(first, second))
        if pairs is None:
            return Question([], written, "they are written alike and differ")
        formulas += [(_boxed(a), _boxed(b)) for a, b in pairs]
    return Question(formulas, written, different)


def _last_quantity(prose: str) -> str | None:
    """The number that prose ends with, if it is an amount in units that are read, or a time of day."""
    last = next(reversed(list(_QUANTITY.finditer(prose))), None)
    if last is None or re.search(r"\d", prose[last.end() :]):
        return None
    reading = read(last[0])
    is_unit = reading.unit in ("am", "pm") or reading.unit in _SCALES
    return last[0] if is_unit and len(reading.parts) == 1 else None


def _alike(gold: str, answer: str) -> tuple[str, str]:
    r"""Two formulas, without ``\%`` where only one of them has it and their numerals are the same."""
    first, second = (re.sub(r"\s*\\?%\s*$", "", text) for text in (gold, answer))
    both = first != gold and second != answer
    is_same = not both and first == second and re.fullmatch(r"-?[\d.]+", first)
    return (first, second) if is_same else (gold, answer)


def _boxed(formula: str) -> str:
    return f"{_BOX}{formula}}}"


def _difference(gold: Reading, answer: Reading) -> str | None:
    """Why two answers differ whatever their formulas are; None if only the formulas decide."""
    if gold.relation != answer.relation:
        return f"one is a relation: '{gold.relation or '='}' is expected, not '{answer.relation or '='}'"
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return f"the units differ: {gold.unit} is expected, not {answer.unit}"
    if {gold.unit, answer.unit} & {"am", "pm"} and _clock(gold) != _clock(answer):
        return "the times differ"
    if not gold.parts or len(gold.parts) != len(answer.parts):
        return "they have different parts"
    for first, second in zip(gold.parts, answer.parts, strict=True):
        if '"' in (first[:1], second[:1]) and _folded(first) != _folded(second):
            return "the words differ"
    return None


def _clock(reading: Reading) -> str:
    return re.sub(r"\s|(?:^|(?<=:))0(?=\d)", "", "".join(reading.parts))


def _folded(words: str) -> str:
    """Words in lower case, units among them in their canonical spelling."""
    folded = [_UNITS.get(word, word) for word in words.lower().lstrip('"').split()]
    return " ".join(folded).strip(" .,:;!")


_SET_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in\s?\\mathbb\{?R\}?\s*)?(?:\\mid(?![A-Za-z])|\\?\||:)\s*"
    r"([^{}:|<>]{1,80}(?:[<>]|\\[lg]e(?:q|qslant)?(?![A-Za-z]))[^{}:|]{1,80})\\\}"
)
_OUTWARD = re.compile(r"(^|\\cup|\\cap|\\in)\s*\](?=[^\[\]]{1,80}[,;])|\[(?=\s*(?:$|\\cup|\\cap))")
_SEMICOLON = re.compile(r"(?<=[(\[])([^,;()\[\]]{1,80});([^,;()\[\]]{1,80})(?=[)\]])")
_ANGLES = re.compile(
    r"\\langle(?![A-Za-z])|^<(?=[^<>]{1,200},[^<>]{1,200}>$)|\\rangle(?![A-Za-z])|(?<=[^<>])>$"
)
_CASES = re.compile(r"\\begin\{(cases|aligned|gathered)\}([^&]{1,400})\\end\{\1\}")
_DOWNWARD = re.compile(
    r"([^<>=,]{1,80})(>|\\geq?(?![A-Za-z]))([^<>=,]{1,80})(>|\\geq?(?![A-Za-z]))([^<>=,]{1,80})"
)
_GEOMETRY = re.compile(
    r"\\(angle|triangle|overline|vec|overrightarrow|widehat|overleftrightarrow)\s?\{?\s?([A-Z]{2,3})(?![A-Za-z_^])\s?\}?"
)
_WHOLE_SETS = {
    "all real numbers": r"\mathbb{R}", "all reals": r"\mathbb{R}", "real numbers": r"\mathbb{R}",
    "empty set": r"\emptyset", "the empty set": r"\emptyset", "does not exist": "dne",
}  # fmt: skip


def _in_usual_form(text: str) -> str:
    r"""Intervals and tuples in round and square brackets with commas, sets of one condition as the condition,
    a system as a list, chains that ascend, points of geometry as symbols.
    """
    text = _CASES.sub(lambda m: ", ".join(filter(str.strip, re.split(r"\\\\", m[2]))), text)
    if not re.search(r"\\(?:begin|substack)", text):
        text = re.sub(r"\\\\(?:\s{1,9}(?=\S)|(?=[\d(-]))", ", ", text)
    text = re.sub(r"\\(?:lor|vee|land|wedge)(?![A-Za-z])", ",", text)
    if "," in text and (
        angles := _ANGLES.sub(lambda m: "(" if m[0] in ("<", r"\langle") else ")", text)
    ).count(")"):
        text = angles
    text = _OUTWARD.sub(lambda m: ")" if m[0][0] == "[" else f"{m[1]}(", text)
    text = _SEMICOLON.sub(r"\1,\2", text)
    text = _SET_BUILDER.sub(_condition, text)
    if down := _DOWNWARD.fullmatch(text):
        signs = ["<" if sign == ">" else r"\le " for sign in (down[4], down[2])]
        text = f"{down[5]} {signs[0]} {down[3]} {signs[1]} {down[1]}"
    return _GEOMETRY.sub(_points, text)


def _condition(built: re.Match[str]) -> str:
    """The condition of a set of numbers, about x: ``t > 0`` of ``\\{t: t > 0\\}``."""
    name, condition = built[1], built[2]
    letters = re.sub(r"\\[A-Za-z]+", "", condition)
    if name not in letters or re.search(r"\\in(?![A-Za-z])", condition):
        return built[0]
    if "x" in letters:
        return condition
    return re.sub(rf"(\\[A-Za-z]+)|{name}", lambda m: m[1] or "x", condition)


def _points(named: re.Match[str]) -> str:
    """Points in an order of their own: a segment and an angle may be read backwards, a vector may not."""
    kind, points = named[1], named[2]
    if kind in ("vec", "overrightarrow"):
        kind = "vec"
    elif kind == "triangle":
        points = "".join(sorted(points))
    elif kind == "angle" or len(points) == 2:
        points = min(points, points[::-1])
    return _SYMBOL.format(_code(f"{kind} {points}"))


_ONE_SIGN = re.compile(r"\\[pm][pm](?![A-Za-z])")


def _both_values(text: str) -> str:
    r"""``\frac{1 \pm a}{2}`` as two values, of signs that change together."""
    if not _ONE_SIGN.search(text) or "," in text:
        return text
    value = text.rpartition("=")[2]
    both = [value.replace(r"\pm", first).replace(r"\mp", second).strip() for first, second in ("+-", "-+")]
    return ", ".join(re.sub(r"(^|[({,])\s?\+", r"\1", value) for value in both)


def _spelled(text: str) -> str:
    """Signs of Unicode as LaTeX, without commands of style, numbers spelled in full."""
    if not text.isascii():
        text = _VULGAR.sub(lambda m: f"{m[1]} {unicodedata.normalize('NFKC', m[2])}".translate(_SIGNS), text)
        text = _SUPERSCRIPT.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
        text = _SUBSCRIPT.sub(lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
        text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text).translate(_SIGNS)
    text = COLOR.sub("", _STYLES.sub("", text))
    text = _NEGATIVE_SPACE.sub("", text)
    text = _SPACES.sub(" ", text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _in_usual_form(text)
    text = _SCIENTIFIC.sub(_decimal, text)
    text = _TIMES_TEN.sub(r"\\times 10^", text)
    text = _LONG_EXPONENT.sub(r"^{\1}", text)
    text = _COEFFICIENT.sub(_product, _MIXED.sub(_improper, text))
    text = _MODULUS.sub(r"\\pmod{\1}", _RECURRING.sub(_ratio, text))
    return _BASED.sub(_based, text)


def _ratio(number: re.Match[str]) -> str:
    """``0.1\\overline{6}`` as a fraction."""
    fraction = number[2] or number[6] or ""
    head, period = number[1] + fraction, next(filter(None, number.group(3, 4, 5, 7)))
    over = int(head + period) - int(head or 0)
    return rf"\frac{{{over}}}{{{10 ** len(fraction) * (10 ** len(period) - 1)}}}"


def _based(number: re.Match[str]) -> str:
    """A numeral with its base as a symbol; as it is if it is none of that base."""
    digits, name = number[2].lower(), re.sub(r"\\[a-z]+|\W|_|\bin\b|base", "", number[3]).lower()
    base = _BASES.get(name) or (int(name) if name.isdecimal() else 0)
    if base == 10 and digits.isdecimal():
        return digits
    fits = 1 < base <= 16 and int(max(digits), 16) < base
    return _SYMBOL.format(_code(f"{digits} in base {base}")) if fits else number[0]


def _decimal(number: re.Match[str]) -> str:
    return format(Decimal(f"{number[1]}e{number[2]}"), "f")


def _improper(number: re.Match[str]) -> str:
    whole, over, under = int(number[1]), int(number[2]), int(number[3])
    return rf"\frac{{{whole * under + over}}}{{{under}}}" if over < under else number[0]


def _product(number: re.Match[str]) -> str:
    """``2\\frac{10}{3}`` as a product: only a proper fraction makes a mixed number."""
    over, under = number[2] or number[3], number[4] or number[5]
    if int(over) < int(under):
        percent = (
            number.string[number.end() :].lstrip().startswith("\\%")
        )  # which would take the fraction alone
        return rf"\frac{{{int(number[1]) * int(under) + int(over)}}}{{{under}}}" if percent else number[0]
    return rf"{number[1]} \cdot \frac{{{over}}}{{{under}}}"


def _code(word: str) -> int:
    return zlib.crc32(word.encode())


def _marked(text: str) -> tuple[str, list[str]]:
    r"""``text`` with marks in place of the words in ``\text{}`` and the like, and these words."""
    words: list[str] = []

    def mark(match: re.Match[str]) -> str:
        command, inner = match[1], match[2].strip()
        name = inner.lower().strip(" .")
        if name in ("and", "or", "and/or"):
            return ", "
        if name in _NAMED:
            return f" {_NAMED[name]} "
        if name in _OPERATORS and command not in ("rm", "text"):
            return rf"\{name} " if inner.islower() else match[0]
        if not inner or not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", inner)):
            return f" {inner} "
        if inner in ("i", "e") or command in _FONT_OF_VARIABLES:
            return f" {inner} "
        if len(inner) == 1 and not _follows_number(match):
            return f" {inner} "
        words.append(inner)
        return f"\0{len(words) - 1}\0"

    text = _TEXT_COMMAND.sub(mark, text)
    return _SWITCHED.sub(mark, text), words


def _follows_number(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - 40) : match.start()].rstrip()
    return bool(before) and before[-1] in "0123456789})" and not re.search(r"_\s?(?:\d|\{\w{1,9}\})$", before)


def _without_unit(text: str, words: list[str]) -> tuple[str, str]:
    if currency := _CURRENCY.match(text):
        sign = currency[2].lstrip("\\")
        return currency[1] + text[currency.end() :], sign
    if match := _HALF_DAY.search(text):
        return text[: match.start()], f"{match[1].lower()}m"
    marked = re.search(r"\s*\0(\d+)\0\s*((?:\^\{?[-\d]{1,3}\}?)?)\.?$", text)
    if marked is not None:
        head = text[: marked.start()]
        if degrees := _DEGREES.search(head):
            return head[: degrees.start()], f"°{_folded(words[int(marked[1])])}"
        name = words[int(marked[1])]
        may_be_unit = not any(word in _NO_UNITS for word in re.findall(r"(?<!\\)\b[a-z]+", name.lower()))
        has_number = "\0" not in head and re.search(r"\d|\\(?:pi|sqrt|frac)|[A-Za-z]", head)
        return (head, _canonical(name, marked[2])) if has_number and may_be_unit else (text, "")
    if (degrees := _DEGREES.search(text)) and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return text[: degrees.start()], f"°{degrees[1].lower()}" if degrees[1] else "degree"
    plain = _PLAIN_UNIT.search(text)
    if plain is None or "\0" in text:
        return text, ""
    space, name = plain[1], plain[2]
    is_unit = all(u in _UNITS or u.lower() in _UNITS for u in re.split(r"\s?/\s?|\sper\s", name))
    is_unit = is_unit and (bool(space) or name.isalpha() or " " in name)
    named = all(len(word) > 2 and word.lower() not in _NO_UNITS for word in re.findall("[A-Za-z]+", name))
    if is_unit and len(name) == 1:
        number = re.fullmatch(r"-?[\d.,]+", text[: plain.start()])
        is_unit = bool(space) and name in _ONE_LETTER_UNITS and number is not None
    if is_unit or (named and space and _NUMBER_END.search(text[: plain.start()])):
        return text[: plain.start()], _canonical(name, plain[3])
    return text, ""


def _canonical(unit: str, power: str) -> str:
    name = " ".join(unit.replace("\\", "").strip(" .").split())
    name = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}.get(name.lower(), name)
    if not power and (inner := re.fullmatch(r"(.+?)\s?(\^\s?\{?-?\d\}?)", name)):
        name, power = inner[1], inner[2].replace(" ", "")
    half = re.fullmatch(r"([ap])\.?\s?m", name, re.IGNORECASE)
    if half:
        return f"{half[1].lower()}m"
    if square := re.fullmatch(r"(square|sq\.?|cubic)\s+(.+)", name, re.IGNORECASE):
        name, power = square[2], "^3" if square[1].lower() == "cubic" else "^2"
    if power.startswith("^") and "-" in power and (product := re.fullmatch(r"(.+?)[\s.]?([smhLl])", name)):
        name, power = f"{product[1]}/{product[2]}", power.replace("-", "").replace("1", "")  # m s^{-1}
    names = re.split(r"\s*/\s*|\s+per\s+", name)
    words = [_UNITS.get(word, _UNITS.get(word.lower(), word.lower())) for word in names]
    return "/".join(words) + power.strip("^{}").join(("^", "")).rstrip("^")


def _parts(text: str, words: list[str]) -> tuple[str, ...]:
    """Formulas and words in turn. Words within braces, or before a "=", become symbols of formulas."""
    parts: list[str] = [""]
    depth, end = 0, 0
    for mark in _WORD.finditer(text):
        between = text[end : mark.start()]
        depth += between.count("{") - between.count("}")
        parts[-1] += between
        end = mark.end()
        word = _folded(words[int(mark[1])])
        if depth > 0 or text[end : end + 9].lstrip().startswith(("=", "_", "^")):
            parts[-1] += _SYMBOL.format(_code(word))
        else:
            parts += ['"' + word, ""]
    parts[-1] += text[end:]
    texts = [part.strip(" ,.;") if part[:1] != '"' else part for part in parts]
    texts = [part for part in texts if part]
    if len(texts) == 2 and texts[0][0] == '"' and _LABEL_END.search(texts[0]):
        del texts[0]  # "the area is", 5
    return tuple(texts)
