r"""One spelling for mathematics that people and models write in many: signs, fractions, numbers, intervals.

math-verify reads LaTeX as textbooks have it. Everything takes time linear in the text, which may be hostile.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Callable
from decimal import Decimal

from gym_serve.grading.answers import COLOR

NAMED = {
    **{"thousand": r"\times 10^{3}", "million": r"\times 10^{6}", "billion": r"\times 10^{9}"},
    **{"trillion": r"\times 10^{12}", "infinity": r"\infty", "pi": r"\pi"},
    **{"minus": "-", "exactly": ""},
    **{"percent": r"\%", "percentage": r"\%", "pct": r"\%", "per cent": r"\%"},
}
SIGNS = str.maketrans(
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
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:> ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~")
_LONG_EXPONENT = re.compile(r"\^\s?(-\d+|\d{2,})")
SCIENTIFIC = re.compile(r"(?<![\w.\\}])(\d{1,400}(?:\.\d{0,400})?)[eE]([+-]?\d{1,3})(?![\w.]*\w)")
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
    r"(?<=\d)\s(thousand|million|billion|trillion)(?![A-Za-z])": lambda m: NAMED[m[1]],
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
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*10\s*\^")
MIXED = re.compile(r"(?<![\w.,/^}])(\d{1,30})\s+(\d{1,30})\s*/\s*(\d{1,30})(?![\w/]|[.,]\d)")
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
SYMBOL = r"\psi_{{{}}}"
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
    return SYMBOL.format(code_of(f"{kind} {points}"))


def spelled(text: str) -> str:
    """Signs of Unicode as LaTeX, without commands of style, numbers spelled in full."""
    if not text.isascii():
        text = _VULGAR.sub(lambda m: f"{m[1]} {unicodedata.normalize('NFKC', m[2])}".translate(SIGNS), text)
        text = _SUPERSCRIPT.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
        text = _SUBSCRIPT.sub(lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
        text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text).translate(SIGNS)
    text = COLOR.sub("", _STYLES.sub("", text))
    text = _NEGATIVE_SPACE.sub("", text)
    text = _SPACES.sub(" ", text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _in_usual_form(text)
    text = SCIENTIFIC.sub(decimal, text)
    text = _TIMES_TEN.sub(r"\\times 10^", text)
    text = _LONG_EXPONENT.sub(r"^{\1}", text)
    text = _COEFFICIENT.sub(_product, MIXED.sub(improper, text))
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
    return SYMBOL.format(code_of(f"{digits} in base {base}")) if fits else number[0]


def decimal(number: re.Match[str]) -> str:
    """A match of `SCIENTIFIC`, as `1.5e-4`, with all of its digits."""
    return format(Decimal(f"{number[1]}e{number[2]}"), "f")


def improper(number: re.Match[str]) -> str:
    """A match of `MIXED`, as `1 1/4`, as one fraction."""
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


def code_of(word: str) -> int:
    """The number of a word within a formula, where math-verify would drop the word itself."""
    return zlib.crc32(word.encode())
