"""Units, as answers have them at their end: which words are units, and which of them are the same."""

from __future__ import annotations

import re

_OPERATOR_NAMES = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp det gcd lcm max min lim sup inf arg
tr rank dim ker deg mod re im sgn floor ceil sqrt frac pi theta alpha beta gamma infty pmod
"""
OPERATORS = frozenset(_OPERATOR_NAMES.split())
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
UNITS = {
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
_NUMBER_END = re.compile(r"\d$|\\[dt]?frac\{\d{1,30}\}\{\d{1,30}\}$")
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
_NO_UNITS = OPERATORS | frozenset(_NO_UNIT_WORDS.split())


def folded(words: str) -> str:
    """Words in lower case, units among them in their canonical spelling."""
    spellings = (UNITS.get(word, word) for word in words.lower().lstrip('"').split())
    return " ".join(spellings).strip(" .,:;!")


def without_unit(text: str, words: list[str]) -> tuple[str, str]:
    """A part of an answer without its unit, and the unit in its canonical spelling, empty if it has none.
    ``words`` are those that stand as marks in the text.
    """
    if currency := _CURRENCY.match(text):
        sign = currency[2].lstrip("\\")
        return currency[1] + text[currency.end() :], sign
    if match := _HALF_DAY.search(text):
        return text[: match.start()], f"{match[1].lower()}m"
    marked = re.search(r"\s*\0(\d+)\0\s*((?:\^\{?[-\d]{1,3}\}?)?)\.?$", text)
    if marked is not None:
        head = text[: marked.start()]
        if degrees := _DEGREES.search(head):
            return head[: degrees.start()], f"°{folded(words[int(marked[1])])}"
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
    is_unit = all(u in UNITS or u.lower() in UNITS for u in re.split(r"\s?/\s?|\sper\s", name))
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
    words = [UNITS.get(word, UNITS.get(word.lower(), word.lower())) for word in names]
    return "/".join(words) + power.strip("^{}").join(("^", "")).rstrip("^")
