r"""Answers as people and models write them, and what they are equal to.

The kinds are those of public bug reports: upright constants, words and units, small numbers, boxes, mixed and
scientific numbers, bases, relations, times, numbers without end.
"""

import pytest

from gym_serve.grading import ask, boxed_gold
from gym_serve.grading.math_worker import arithmetic, work


def right(gold: str, *answers: str) -> list[tuple[str, str, bool]]:
    return [(gold, answer, True) for answer in answers]


def wrong(gold: str, *answers: str) -> list[tuple[str, str, bool]]:
    return [(gold, answer, False) for answer in answers]


BOXED: dict[str, list[tuple[str, str, bool]]] = {
    "a number before a binomial or a fraction": [
        *right("240", r"2\binom{10}{3}", r"2{10 \choose 3}", r"2\dbinom{10}{3}"),
        *right("120", r"{10 \choose 3}", r"\binom{10}{3}"),
        ("122", r"2\binom{10}{3}", False),
        (r"\binom{4}{2}\binom{3}{1}", "18", True),
        (r"\binom{n+1}{2}", r"{n+1 \choose 2}", True),
        (r"\binom{n}{2}", r"{n \choose 3}", False),
        *right(r"\frac{20}{3}", r"2\frac{10}{3}", r"2 \tfrac{10}3"),
        *wrong(r"\frac{16}{3}", r"2\frac{10}{3}", r"2\frac{1}{3}"),
        *right(r"\frac{7}{3}", r"2\frac{1}{3}", r"2\dfrac13"),
        ("5", r"2\frac52", True),
    ],
    "words behind a number": [
        *wrong("5", r"5\text{ or more}", r"5\text{ or less}", r"5\text{ at most}", r"5\text{ is wrong}"),
        *wrong("5", r"5\text{ is impossible}", r"5\text{ and above}", r"5\text{ hundred}"),
        *wrong("5", r"5\text{ squared}", r"5\text{ in base 6}", r"5\text{ plus}", r"5\text{ factorial}"),
        *wrong("5", r"5\text{ not}", r"5\text{ dozen}", r"5\text{ is extraneous}"),
        ("n", r"n\text{ even}", False),
        (r"n\text{ odd}", "n", False),
        ("x=3", r"x=3\text{ is extraneous}", False),
        *right("5", r"5\text{ students}", r"5\text{ square inches}"),
        (r"5\text{ or more}", r"5 \text{ or more}", True),
    ],
    "what is not read": [
        *wrong("5", r"\nless 5", r"\ngeq 5", r"\nleq 5", r"\gneq 5", r"\gg 5", r"\ll 5", r"x\gg 5"),
        *wrong("5", r"\not\le 5", r"\not\equiv 5", r"\not 5", r"\neg 5", r"\notin 5", r"\in 5", r"\subset 5"),
        *wrong("5", r"\propto 5", r"\prec 5", r"\succ 5", r"\perp 5", r"\ncong 5", r"\overset{!}{\neq} 5"),
        *wrong("5", r"5'", r"5''", r"5\ldots", r"5\mod 7", r"3=5"),
        ("f", "f'", False),
        (r"x\gg 5", r"x \gg 5", True),
        (r"x\gg N", r"x\gg n", False),
    ],
    "units of several words": [
        (r"2 \text{ hours } 30 \text{ minutes}", "2 hours 30 minutes", True),
        *right("2 hours 30 minutes", r"2 \text{ hours } 30 \text{ minutes}", "2 hours and 30 minutes"),
        ("2 hours 30 minutes", "2 hours 45 minutes", False),
        (r"5 \text{ feet } 6 \text{ inches}", "5 ft 6 in", True),
        (r"5\,\mathrm{m/s}", "5 m/s", True),
        (r"5\,\mathrm{m/s}", "5 km/h", False),
        (r"9.8\,\mathrm{m/s^2}", "9.8 m/s^2", True),
        (r"50\text{ mph}", r"50\text{ miles per hour}", True),
        ("-3", r"\text{minus }3", True),
        ("3", r"\text{minus }3", False),
        ("3", r"\text{exactly }3", True),
    ],
    "amounts in several units": [
        *right("2.5 hours", "2 hours 30 minutes", "150 min"),
        ("150 minutes", r"2\text{ hours }30\text{ minutes}", True),
        ("2 hours 30 minutes", "150 minutes", True),
        *wrong("2.5 hours", "2 hours 45 minutes", "2.5 minutes"),
        ("2.5", "2 hours 30 minutes", False),
        ("30", "2 hours 30 minutes", False),
        ("66 inches", "5 ft 6 in", True),
        ("5 m", "500 cm", True),
        ("5 m", "500 kg", False),
        (r"\$1.50", "150 cents", True),
        ("x = 2 hours", "120 minutes", False),
    ],
    "exact numbers": [
        (r"2^{2023}-1", r"2^{2023}", False),
        (r"10^{100}", r"10^{100}+1", False),
        (r"2020!", r"2020!+1", False),
        (r"2020!", r"2020 \cdot 2019!", True),
        (r"4^{1000}", r"2^{2000}", True),
        (r"\binom{200}{100}", r"\binom{200}{100}+1", False),
        (r"\frac{3^{200}-1}{2}", r"\frac{3^{200}}{2}", False),
        (r"2^{-200}", r"\frac{1}{4^{100}}", True),
        (r"(1,10^{100})", r"(1,10^{100}+1)", False),
        (r"\{1,50!\}", r"\{1,50!-1\}", False),
        (r"x=50!", r"x=50!-1", False),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", True),
        (r"0.0000123\%", r"0.0000119\%", False),
        (r"50\%", "0.5", True),
    ],
    "upright constants": [
        (r"3+4\mathrm{i}", "3+4i", True),
        (r"3+4\mathrm{i}", "7", False),
        (r"\frac{2}{\mathrm{e}^2}", r"\frac{2}{e^2}", True),
        (r"\frac{2}{\mathrm{e}^2}", r"\frac{2}{\mathrm{e}^3}", False),
        (r"\sqrt{\mathrm{e}+1}", r"\sqrt{e+1}", True),
        (r"\sqrt{\mathrm{e}+1}", r"\sqrt{\mathrm{e}+2}", False),
        (r"2\mathrm{e}", "2e", True),
        (r"2\mathrm{e}", "2", False),
        (r"\pi", r"\mathrm{\pi}", True),
    ],
    "words": [
        (r"2 \text{ hours } 30 \text{ minutes}", r"2 \text{ hrs } 30 \text{ minutes}", True),
        *wrong(r"2 \text{ hours } 30 \text{ minutes}", r"2 \text{ hours } 45 \text{ minutes}", "2"),
        (r"5 \text{ feet } 6 \text{ inches}", r"5 \text{ feet } 9 \text{ inches}", False),
        (r"n^2 \text{ if } n \text{ is odd}", r"n^{2}\text{ if }n\text{ is odd}", True),
        (r"n^2 \text{ if } n \text{ is odd}", r"n^2 \text{ if } n \text{ is even}", False),
        (r"\frac{3}{\text{speed}}", r"\frac{6}{2\text{speed}}", True),
        (r"\frac{3}{\text{speed}}", r"\frac{3}{\text{time}}", False),
        ("listen", "silent", False),
        ("True", "True", True),
        (r"\text{yes}", "Yes", True),
        (r"\text{Area}=5", "5", True),
        (r"2 \text{ and } 3", "3, 2", True),
        ("19, 46, 82", r"19, 46, \text{ and } 82", True),
        ("19, 46, 82", r"19, 46, \text{ and } 83", False),
        ("C", r"\text{C}", True),
    ],
    "units": [
        ("5", r"5\text{ cm}", True),
        ("$125$ miles", r"125\textnormal{ miles}", True),
        ("$125$ miles", r"125\text{ km}", False),
        (r"5\text{ cm}", "5", True),
        (r"10\text{ cm}", r"10\text{ m}", False),
        ("10 cm", "10 centimeters", True),
        ("5 apples", "5", True),
        ("2t", "2t", True),
        ("2t", "2", False),
        (r"\frac12 h", r"\frac12", False),
        *right(r"45^\circ", r"45 \text{ degrees}", "45°"),
        (r"5^\circ C", r"5^\circ F", False),
        (r"\$32", "32", True),
        (r"\$5.50", "€5.50", False),
        *right(r"\frac{5}{4}", "1 1/4 cups", r"1\frac{1}{4} cups"),
        ("1 1/4 cups", r"\frac54", True),
        (r"\frac{4}{3}", "2 2/3 cups", False),
        ("10:30 a.m.", "10:30 p.m.", False),
        ("3:00 p.m.", "3 p.m.", True),
        ("3 PM", r"3:00 \text{ p.m.}", True),
        ("3:00 p.m.", "3 a.m.", False),
        ("3:30 p.m.", "3 p.m.", False),
        (r"10:30 \text{ a.m.}", r"10:30\text{ AM}", True),
    ],
    "small numbers": [
        *right(r"6.63\times10^{-34}", "6.63e-34", r"6.63 \cdot 10^{-34} \text{ J s}"),
        (r"6.63\times10^{-34}", r"9.11\times10^{-31}", False),
        (r"1.6\times10^{-19}", r"-1.6\times10^{-19}", False),
        ("1/2^{97}", "1/2^{96}", False),
        ("e^{-100}", "e^{-200}", False),
        ("0.0000123", "0.0000119", False),
        ("10^{-30}", "0", False),
        (r"x=6.63\times10^{-34}", r"x=9.11\times10^{-31}", False),
        (r"6.63\times10^{-34}x", r"9.11\times10^{-31}x", False),
        (r"(1,1.6\times10^{-19})", r"(1,2.6\times10^{-19})", False),
        (r"\{1.6\times10^{-19},2\}", r"\{1.7\times10^{-19},2\}", False),
        (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}", False),
        ("[0,10^{-9}]", "[0,10^{-8}]", False),
        (r"\frac{1}{81}", "0.012346", True),
    ],
    "numerals": [
        (r"\frac{5}{4}", "1 1/4", True),
        (r"-\frac{5}{4}", "-1 1/4", True),
        (r"\frac{4}{3}", "2 2/3", False),
        ("1.5", "1½", True),
        ("0.00015", "1.5e-4", True),
        *right("10^{-34}", "10^-34", "10⁻³⁴"),
        ("x^2", "x²", True),
        (r"\sqrt{3}", "√3", True),
        *right("1010_2", "1010_{2}", "(1010)_2", r"1010_{\text{two}}", r"1010\text{ in base }2"),
        *wrong("1010_2", "1010_3", "1010", r"1010_{\text{three}}"),
        ("1010", r"1010_{\text{two}}", False),
        ("342_5", "342_{(5)}", True),
        *wrong("342", "342_{(5)}", "342_{b}", "342_{①}"),
        ("342_b", "342_{b}", True),
        ("97", "342_5", False),
        (r"2a_1", r"a_1 \cdot 2", True),
        (r"\frac13", r"0.\overline{3}", True),
        (r"0.\overline{3}", r"\frac13", True),
        (r"-\frac{7}{6}", r"-1.1\bar{6}", True),
        (r"\frac{41}{333}", r".\overline{123}", True),
        (r"\frac13", r"0.\overline{4}", False),
        ("0.3", r"0.\overline{3}", False),
        ("1,234.5", r"\frac{2469}{2}", True),
        (r"25\%", "25", True),
        ("0.4", ".4", True),
        ("-0.4", "-.4", True),
        *wrong("0.4", "4", "1.4"),
        ("(0.4,0.5)", "(.4, .5)", True),
        ("32349", r"32,\! 349", True),
    ],
    "numerals of other places": [
        *right("12.5", "12,5", "12{,}5", r"12.5\%"),
        ("12.5", "(12,5)", False),
        ("0.375", "0,375", True),
        ("1.25", "1,250", False),
        ("2,3", "2.3", False),
        (r"\frac34", ".75", True),
        *right("1234567", "1.234.567", "1’234’567", "12,34,567", r"1{\,}234{\,}567", "１，２３４，５６７"),
        ("1234567", "1.234567", False),
        *right("5000000", r"5\text{ million}", "5 million"),
        ("5000000", "5 billion", False),
        *right(r"6.02\times10^{23}", "6.02e23", r"602\times10^{21}"),
        (r"6.02\times10^{23}", "6.03e23", False),
        ("5", "\u200b5\u200f", True),
    ],
    "spellings of LaTeX and of programs": [
        ("10^6", "10**6", True),
        (r"4\pi", "4*pi", True),
        (r"\frac34", r"\nicefrac{3}{4}", True),
        *right("5", r"\textcolor{red}{5}", r"5 \\", r"\text{Answer: } 5", r"5\ \mathrm{m\,s^{-1}}"),
        (r"\emptyset", r"\varnothing", True),
        (r"x\in\mathbb{R}", r"x \in \mathbb R", True),
        (r"45^\circ", r"45^{\text{o}}", True),
        (r"\frac{\sqrt3}{2}", r"\sin 60^\circ", True),
        (r"\frac{\sqrt3}{2}", r"\sin 30^\circ", False),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", True),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", False),
        ("3:5", r"3\colon 5", True),
        ("Yes", "YES", True),
        ("Yes", "No", False),
    ],
    "both signs and lists": [
        ("2,-2", r"\pm 2", True),
        (r"\pm 2", r"2\text{ or }-2", True),
        (r"\pm 2", "2", False),
        *wrong("2", r"\pm 2", "2 or 3"),
        (r"\pm1,\pm2", "1,-1,2,-2", True),
        (r"\{1,2,3\}", r"1, 2, \text{ and } 3", True),
        ("2,3", "2 or 3", True),
        ("5", r"\gtrsim 5", False),
    ],
    "congruences": [
        *right(r"x\equiv 3\pmod 7", r"x \equiv 3 \pmod{7}", r"x \equiv 3 (\bmod 7)", r"3 \pmod 7"),
        *wrong(r"x\equiv 3\pmod 7", r"x\equiv 4\pmod 7", r"x\equiv 3\pmod 8", "x = 3"),
        ("3", r"x\equiv 3\pmod 7", False),
    ],
    "relations and tuples": [
        *wrong("5", r"\ne 5", r"\leq 5"),
        (r"\leq 5", r"\le 5", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2,3)", "(3,2,1)", False),
        (r"(\frac12,3)", r"\left(0.5, 3\right)", True),
        ("x=1,y=2", "x=1, y=2", True),
        ("x=1,y=2", "x=2, y=1", False),
        (r"\pm 2", "2, -2", True),
        (r"\{-2,2\}", r"\pm 2", True),
        *wrong(r"\pm 2", "2", "-2", r"\pm 3"),
        ("2", r"\pm 2", False),
        (r"\pm \sqrt{3}", r"\pm\sqrt 3", True),
    ],
    "letters in two cases": [
        *wrong("2r", "2R"),
        *wrong("R-r", "0", "r-R", "R-R"),
        *wrong(r"\gamma", r"\Gamma", "g"),
        *wrong(r"\omega", r"\Omega"),
        *wrong("e", "E"),
        *right("x^2+C", "x^2+c"),
        *right("A", "a", "(A)"),
    ],
    "numerals that are no arithmetic": [
        *wrong("2024-05-03", "2016", "2024-03-05"),
        *right("7:05", "07:05"),
        *wrong("7:05", "1.4", "14:10"),
        *wrong("10-20", "-10", "20-30"),
        *wrong("1:2:3", r"\frac16", "1:3:2"),
        *right("1:2:3", "2:4:6"),
        *wrong("5/3/2024", "5/6/1012"),
        *right("-10", "10-20"),
    ],
    "values with names": [
        *right("x=1, y=2", "y=2, x=1", "(1,2)", r"\begin{cases}x=1\\y=2\end{cases}", "(x,y)=(1,2)"),
        *wrong("x=1, y=2", "(2,1)", "y=1, x=2", r"\{2,1\}"),
        *wrong("(1,2)", "y=1, x=2"),
        *wrong("a=1,b=2,c=3", "(3,2,1)", "3,2,1"),
        *right("m=3, b=2", "(3,2)"),
        *right("x=2, x=3", "x_1=3, x_2=2", r"x=2 \lor x=3"),
        *right(r"\theta=\frac{\pi}{4}", r"\frac\pi4", r"45^\circ"),
        *right(r"P(A\cap B)=0.2", r"\frac15"),
        *wrong(r"P(A\cap B)=0.2", r"P(A\cup B)=0.2"),
        *right("f'(x)=2x", "2x", "y'=2x", r"\frac{dy}{dx}=2x"),
        *wrong("f'(x)=2x", "f(x)=2x", "f''(x)=2x"),
    ],
    "points of geometry": [
        *right(r"\angle ABC", r"\angle CBA"),
        *wrong(r"\angle ABC", r"\angle ACB"),
        *wrong(r"\vec{AB}", r"\overrightarrow{BA}"),
        *right(r"\overline{AB}", r"\overline{BA}"),
    ],
    "intervals in other notations": [
        *right(
            r"(-\infty,2]", r"]-\infty,2]", r"(-\infty;2]", r"\{x\mid x\le 2\}", r"\{t\in\mathbb{R}:t\le2\}"
        ),
        *wrong(r"(-\infty,2]", r"]-\infty,2[", r"\{x\mid x<2\}"),
        *right(r"(-\infty,-1)\cup(1,\infty)", r"x<-1\text{ or }x>1", r"]-\infty;-1[\cup]1;\infty["),
        *wrong(r"(-\infty,-1)\cup(1,\infty)", r"x\le-1\text{ or }x\ge1", r"-1<x<1"),
        *right("1<x<2", "2>x>1", r"1<x\text{ and }x<2"),
        *right(r"(1,2)", r"\langle 1,2\rangle", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        *wrong(r"(1,2)", r"\langle 2,1\rangle", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ],
    "complex numbers": [
        *right(r"1+\sqrt{3}i", r"2e^{i\pi/3}", r"2(\cos\frac\pi3+i\sin\frac\pi3)"),
        *wrong(r"1+\sqrt{3}i", r"2e^{-i\pi/3}", "2", r"1-i\sqrt3"),
        *right("-i", r"\frac{1}{i}", "i^3"),
        *right("2i", r"\sqrt{-4}"),
        (r"2^{200}+i", r"2^{200}+2i", False),
        *right(r"\sum_{k=1}^{n}k", r"\sum_{i=1}^{n} i"),
    ],
    "fractions of percent, angles, both values": [
        *right(r"33\frac13\%", r"\frac13", r"\frac{100}{3}\%", "33 1/3%"),
        *wrong(r"33\frac13\%", r"\frac13\%", r"33\%"),
        *right(r"\frac{3\pi}{4}", r"135^\circ"),
        *wrong(r"\frac{3\pi}{4}", "135", r"45^\circ"),
        *right(r"90^\circ", r"\frac\pi2", r"\frac\pi2\text{ rad}"),
        *right(
            r"\frac{1\pm\sqrt5}{2}", r"\frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}", r"\frac12\pm\frac{\sqrt5}2"
        ),
        *wrong(r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2}", r"\frac{1\pm\sqrt3}{2}"),
        *right(r"\frac13", "0.333...", r"0.\bar3", "0.(3)"),
        *right(r"\ln 2", "ln 2", r"\log_e 2"),
        *right(r"9.81\text{ m/s}^2", r"9.81\frac{\text{m}}{\text{s}^2}", r"9.81\,\mathrm{m\,s^{-2}}"),
        *wrong(r"9.81\text{ m/s}^2", r"9.81\,\mathrm{m\,s^{-1}}"),
        *wrong(r"\mathrm{H}_2\mathrm{O}", r"\mathrm{H}_2", r"\mathrm{H}_2\mathrm{S}"),
    ],
    "numbers without end": [
        ("9^{9^{9}}", "9^{9^{9}}", True),
        *wrong("42", "9^{9^{9}}", "9^{9^{9^9}}", "((10^3)!)!", "(10^9)!", "e^{e^{e^{e^{e}}}}"),
        *wrong("42", r"\sin(9^{9^9})", r"\{9^{9^9}, 1\}", r"9^{9^9}\%"),
        *wrong("x", "x^{9^{9^9}}", "(x+1)^{10^6}"),
        ("2^{100}+1", "2^{100}", False),
        ("5050", r"\sum_{n=1}^{100} n", True),
    ],
}
"""Gold, content of the box, whether they are equal."""

TEXTS: list[tuple[str, str, bool]] = [
    *right("5", "\\boxed{**5**}", "\\boxed{`5`}", "Answer: **5** (five)", "**Final answer:** 5 ✅"),
    *right("5", "Answer:\n* 5", "in \\boxed{answer}. So \\boxed{5}", "so \\boxed{5} in \\boxed{answer}"),
    *right("5", "\\boxed{4}. No wait, \\boxed{5}", "\\boxed{4} \\quad \\text{or rather} \\quad \\boxed{5}"),
    ("6", "Answer: ~~5~~ 6 or 5", False),
    ("-5", "-5", True),
    *wrong("5", "-5", "\\boxed{4}, \\boxed{5}", "$\\boxed{4} \\quad \\text{and} \\quad \\boxed{5}$"),
    *wrong("5", "The answer is $\\ne 5$"),
    ("-10/9", "-\\frac{10}{9}", True),
    ("x + 1", "- x + 1", True),
    *right("23", "\\boxed {23}", "\\boxed\n{23}", "\\fbox{23}"),
    *right("23", "\\boxed{23}. I put it in \\boxed{} as asked.", "\\boxed 23", "$\\boxed{\\large 23}$"),
    *right("23", "\\boxed{\\textbf{23}}"),
    ("4", "\\boxed{4}. No wait, \\boxed{5}", False),
    ("4, 5", "$\\boxed{4} \\quad \\text{and} \\quad \\boxed{5}$", True),
    *right("34", "Final Answer: The largest $n$ is 34.", "Answer: it is 34."),
    ("34", "Final Answer: The largest $n$ is 35.", False),
    ("x", "The answer is $x$, not 5.", True),
    ("1/2", "\\boxed\\frac{1}{2}", True),
    ("2", "The answer is 2 2/3", False),
    ("\\frac83", "The answer is 2 2/3.", True),
    ("0.00015", "**Answer:** 1.5e-4", True),
    *right("42", "First $41$ then $42$", "So x = 42"),
    ("-3", "$-3$", True),
    ("3", "__import__('os').getcwd()", False),
    # Labels and marks
    *right("5", "答案：5", "**5**"),
    ("12.5", "Antwort: 12,5", True),
    ("-7", "The answer is −7.", True),
    *right("6", "The answer is 6, not 5.", "It is not 5 but 6. Thus $\\boxed{6}$"),
    *right("6", "Each pack has 4 or 5 cards, so there are 6.", "So one needs at least 6."),
    ("2.5 hours", "It takes 2 hours 30 minutes.", True),
    ("150 minutes", "It takes 2 hours and 30 minutes.", True),
    *wrong("150 minutes", "It takes 150 seconds.", "It takes -2 hours 30 minutes."),
    ("30", "It takes 2 hours 30 minutes.", False),
    ("3:00 p.m.", "The train arrives at 3 p.m.", True),
    ("3:00 p.m.", "The train arrives at 3 a.m.", False),
    ("12", "The answer is 12 apples to share among 4 children.", True),
    ("5 m/s", "The speed is 5 meters per second.", True),
    *right("12 ft^2", "The area is 12 square feet.", "The area is 12 feet squared."),
    ("5 m", "The length is 5 miles.", False),
    ("3", "She has 3 feet of rope.", True),
    # Hedges
    *wrong("2.5 hours", "It is not 2 hours 30 minutes.", "It takes 2 hours 30 minutes or 3 hours."),
    *wrong("2.5 hours", "It takes 3 hours or 2 hours 30 minutes."),
    *wrong("5", "There are 6 cards or 5 cards.", "so x is at most 5", "The answer is \\leq 5"),
    *wrong("5", "The answer is ≤ 5", "The answer is not 5.", "The answer is at least 5."),
    *wrong("5", "The answer is 5 or 6.", "The answer could be 5, or 6, or 7.", "4 or 5"),
    *wrong("5", "I think 5 is not the answer", "Answer: anything but 5", "The answer is ±5"),
    *wrong("5", "The answer is 5x", "It is not \\boxed{5}", "\\boxed{6}, not \\boxed{5}"),
    *wrong("5", "\\boxed{6} and maybe \\boxed{5}"),
    *wrong("6", "There are 5 or 6 cards.", "The answer is 5 or 6.", "between 5 and 6", "$x \\ne \\boxed{6}$"),
    *wrong("6 feet", "It is 5 or 6 feet long.", "It is 5 feet or 6 feet."),
    ("6", "\\boxed{6}, not \\boxed{5}", True),
]
"""Gold, the whole text, whether it gives the gold."""


def is_equal(gold: str, text: str) -> bool:
    question = ask(boxed_gold(gold), text)
    if question.difference is not None or not question.pairs:
        return question.difference is None
    return bool(work([list(pair) for pair in question.pairs])["equal"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BOXED)
def test_answers_in_boxes(kind: str) -> None:
    wrong = [case for case in BOXED[kind] if is_equal(case[0], f"\\boxed{{{case[1]}}}") != case[2]]
    assert wrong == []


@pytest.mark.parametrize(("gold", "text", "equal"), TEXTS)
def test_answers_in_texts(gold: str, text: str, equal: bool) -> None:
    assert is_equal(gold, text) == equal


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "x.\uff4eame",
        "S('1')",
        "1 if 1 else 2",
        "[1]",
        "2(3)",
        "1_000",
        "\uff11",
        "1 .real",
    ],
)
def test_arithmetic_reads_nothing_but_arithmetic(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        arithmetic(text)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(("text", "value"), [("1+2*3", 7), ("-(2**3)/4", -2), ("2--1", 3), ("1.5*2", 3)])
def test_arithmetic(text: str, value: float) -> None:
    assert float(arithmetic(text).doit()) == value
