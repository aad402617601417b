"""Answers that a hostile model may give, for every verifier: none of them may cost more than a zero.

    for name, output in answers(row, tools): ...

Each payload comes as the whole text, in the places where verifiers look for answers (a box, tags, a label, a
code block), and as the arguments of calls. A program in it harms nothing but its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from support.environments import called, said

__all__ = ["CODE", "PAYLOADS", "answers"]

JSON = dict[str, Any]

MEGABYTE = 1 << 20

CODE = [
    # Names that Python reads as others: it takes the NFKC form of an identifier
    "x.ｎame",
    "(1).ｒeal",
    "().__cｌass__.__base__",
    "ｅval('1')",
    "𝐞𝐱𝐞𝐜('1')",
    "ｇetattr(𝘪𝘯𝘵, '__doc__')",
    "﹍﹍import﹍﹍('os')",
    "(1).ﬁeld",
    # Chains to what runs code
    "__import__('os').system('false')",
    "().__class__.__base__.__subclasses__()",
    "(1).__class__.__mro__[-1].__subclasses__()",
    "x.func.__globals__['__builtins__']['eval']('1')",
    "Symbol(chr(120)).name",
    "sympify(1)",
    "S(str(1))",
    "Lambda(x, x).name",
    "getattr(int, 1)",
    "open(chr(47))",
    "exec(chr(112))",
    "breakpoint()",
    "print(1)",
    # Text that is built
    "'__imp' + 'ort__'",
    "'e' 'val'",
    "chr(101) + chr(118) + chr(97) + chr(108)",
    "x.name + y.name",
    "'{0.__class__}'.format(1)",
    "'%c' % 24",
    "f'{1}'",
    "f'{__import__(\"os\")}'",
    "'24'.join(())",
    "b'24'.decode()",
    # Everything of the language that is no arithmetic
    "lambda: 1",
    "(lambda: 24)()",
    "(lambda f: f(f))(lambda f: f(f))",
    "(y := 24)",
    "[24 for _ in (1,)][0]",
    "[print(1)]",
    "{24}.pop()",
    "(yield 24)",
    "(await x)",
    "24 if 1 else 2",
    "24 == 24",
    "24 and 24",
    "~-25",
    "24 @ 1",
    "1 << 10**10",
    "int(24)",
    "max(24, 1)",
    "True * 24",
    "24j",
    "...",
    "24 # comment",
    "24\n24",
    "24; import os",
    "24\\\n",
    "24\0",
    "*24",
    "**24",
    # Work without end
    "9**9**9**9",
    "(10**6)**(10**6)",
    "2**-(10**10)",
    "((((10**100)**100)**100)**100)**100",
    "factorial(factorial(factorial(9)))",
    "9!!!!!!!!",
    "((9!)!)!",
    "binomial(10**9, 5*10**8)",
    "exp(exp(exp(exp(exp(9)))))",
    "gamma(10**10)",
    "(x+1)**100000",
    "1e999999999",
    "-" * 5000 + "1",
    "(" * 5000 + "1" + ")" * 5000,
    "sin(" * 1000 + "1" + ")" * 1000,
    "[" * 5000 + "]" * 5000,
    "1" + "+1" * 4000,
    "9" * 9000,
    "x**" * 300 + "x",
    "'x' * 10**10",
]
"""Python where an answer is expected, S1's kind: it runs code, or works without end, if it is evaluated."""

PAYLOADS: dict[str, str | Callable[[], str]] = {
    # Size
    "1 MB of a": lambda: "a" * MEGABYTE,
    "1 MB of spaces": lambda: " " * MEGABYTE,
    "1 MB of lines": lambda: "a\n" * (MEGABYTE // 2),
    "1 MB of digits": lambda: "9" * MEGABYTE,
    "20,000 characters, one word": lambda: "ab" * 10_000,
    "5,000 words": lambda: "word " * 5_000,
    "an integer of 10^4 digits": lambda: "9" * 10_000,
    "a negative decimal of 10^4 digits": lambda: "-0." + "1" * 10_000,
    "an integer of 10^4 hexadecimal digits": lambda: "0x" + "f" * 10_000,
    "exponents": "1e999999999 -1e-999999999 1e400",
    "no numbers": "NaN Infinity -Infinity inf nan",
    "nothing": "",
    "groups of digits": lambda: "1" + ",000" * 20_000,
    # Nests
    "100,000 brackets": lambda: "[" * 100_000,
    "20,000 brackets": lambda: "[" * 20_000,
    "20,000 empty lines": lambda: "a" + "\n" * 20_000 + "a",
    "20,000 tabs": lambda: "a" + "\t" * 20_000 + "a",
    "5,000 sentences": lambda: "a. " * 5_000,
    "JSON, 10,000 deep": lambda: '{"a":' * 10_000 + "1" + "}" * 10_000,
    "JSON, 500 deep": lambda: '{"a":' * 500 + "1" + "}" * 500,
    "XML, 10,000 deep": lambda: "<a>" * 10_000 + "</a>" * 10_000,
    "parentheses, 5,000 deep": lambda: "(" * 5_000 + "1" + ")" * 5_000,
    "fractions, 2,000 deep": lambda: "\\frac{1}{" * 2_000 + "2" + "}" * 2_000,
    "boxes, 20,000 deep": lambda: "\\boxed{\\text{" * 20_000 + "1" + "}" * 40_000,
    "tags without end": lambda: "<answer>" * 50_000 + "<think>" * 50_000 + "```" * 50_000,
    "labels": lambda: "Answer: " * 50_000,
    "emphasis": lambda: "*" * 20_000 + "\n" + "**a" * 10_000,
    # Bombs
    "a tower of powers": "9^{9^{9^{9^9}}}",
    "a power in Python": "9**9**9**9",
    "a factorial": "(10^9)!",
    "a sum": "\\sum_{k=1}^{10^7} \\frac{1}{k}",
    "an integral": "\\int_0^1 e^{x^2} \\sin(x^{100}) dx",
    "an expansion": "(x+y+z+w)^{200}",
    "a set": lambda: "\\{" + ",".join(map(str, range(10_000))) + "\\}",
    "YAML, billions of laughs": lambda: (
        "a: &a [x]\n"
        + "".join(
            f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        )
    ),
    "YAML, a sexagesimal number": lambda: "a: 1" + ":59" * 10_000,
    "YAML, tags": "!!python/object/apply:os.system [exit]\n--- !!binary é\n--- !!timestamp x",
    "XML, billions of laughs": lambda: (
        "<!DOCTYPE a [<!ENTITY a0 'x'>"
        + "".join(f"<!ENTITY a{n + 1} '{f'&a{n};' * 10}'>" for n in range(9))
        + "]><a>&a9;</a>"
    ),
    "XML, an external entity": '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>',
    "TOML, dotted keys": lambda: ".".join(["a"] * 9_000) + " = 1",
    "CSV, a quote without end": lambda: 'a,b\n"' + "x," * 40_000,
    "CSV, 50,000 columns": lambda: "a," * 50_000 + "\n" + "1," * 50_000,
    "JSON, equal keys": lambda: "{" + ",".join(['"a": 1'] * 10_000) + "}",
    "JSON, 10,000 different objects": lambda: "[" + ",".join(f'{{"n": {n}}}' for n in range(9_000)) + "]",
    "JSON, half of a pair in a key": '{"\\ud83d": {"\\ud83d": 1}}',
    "a key that backtracks": '{"' + "a" * 27 + '!": 1}',
    "a text that backtracks": "a" * 40 + "!" + "\t" * 20_000 + "x",
    "formats of Python": "{0.__class__} %s %(x)s {} {{}} ${HOME} `id` $(id)",
    "a template": "{{ cycler.__init__.__globals__ }} <script>alert(1)</script> '; DROP TABLE rows; --",
    # Unicode
    "a lone surrogate": "4\ud800\udfff2",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x85\u2028\u2029",
    "directions": "\u202e42\u202c\u2066\u200f\ufeff",
    "marks on marks": lambda: "e" + "\u0301" * 20_000,
    "long decompositions": "\ufdfa" * 5_000,
    "digits of other scripts": "٤٢ ४२ 𝟒𝟐 ４２ ② ⅳ ½ ² 四十二",
    "letters of other scripts": "Ａ а А ᴬ 𝐀 ǅ ß ﬁ İ ı K Å",
    "minus signs": "−5 –5 ‐5 ﹣5 －5",
    "emoji": "👩‍👩‍👧‍👦" * 2_000,
    # Programs
    "a program that does not end": "```python\nwhile True:\n    pass\n```",
    "a program that takes memory": "```python\nx = []\nwhile True:\n    x.append(bytearray(1 << 20))\n```",
    "a program that prints": "```python\nwhile True:\n    print('x' * 100_000)\n```",
    "a program that recurses": (
        "```python\nimport sys\nsys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1) + 1\nprint(f(0))\n```"
    ),
    "a program that ends itself": "```python\nimport os\nos.kill(os.getpid(), 9)\n```",
    "a program that leaves": "```python\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n```",
    "a program with a deep value": "```python\nx = []\nfor _ in range(100_000):\n    x = [x]\nprint(x)\n```",
    "a query that does not end": (
        "```sql\nWITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r\n```"
    ),
    "a query that takes memory": "```sql\nSELECT hex(zeroblob(900000000)) || randomblob(900000000)\n```",
    "a query that reads a file": "```sql\nATTACH '/etc/passwd' AS x; SELECT load_extension('x')\n```",
}
"""Texts by name; a function makes those that are long."""

SHAPES: dict[str, list[Any]] = {
    "no output": [],
    "no content": [{"type": "message", "role": "assistant"}],
    "content that is null": [{"type": "message", "role": "assistant", "content": None}],
    "content that is a number": [{"type": "message", "role": "assistant", "content": 5}],
    "parts that are none": [{"type": "message", "role": "assistant", "content": [None, 5, "x", [], {}]}],
    "text that is none": [{"type": "message", "role": "assistant", "content": [{"text": {"a": 1}}]}],
    "a refusal": [
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    ],
    "only reasoning": [{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "42"}]}],
    "reasoning that is none": [{"type": "reasoning", "summary": "x", "content": 5}],
    "types that are none": [{"type": None}, {"type": 5}, {}, {"role": "assistant", "content": "x"}],
    "a call without anything": [{"type": "function_call"}],
    "a call of nothing": [{"type": "function_call", "call_id": None, "name": None, "arguments": None}],
    "a call of a number": [{"type": "function_call", "call_id": 1, "name": 5, "arguments": {"a": 1}}],
    "an output without a call": [{"type": "function_call_output", "call_id": "x", "output": {"a": [1]}}],
    "2,000 messages": said("a \\boxed{1}") * 2_000,
}
"""Outputs by name that are not of the form that an endpoint gives."""


def answers(
    row: JSON, tools: Iterable[str], *, calls: bool = True, code: bool = True
) -> Iterator[tuple[str, list[Any]]]:
    """Names and output items of all answers to a row.

    Args:
        row: the row; its tools are called.
        tools: further tools that are called.
        calls: whether payloads come as arguments, too.
        code: whether `CODE` is among them.
    """
    given = row.get("responses_create_params", {}).get("tools") or []
    parameters = {tool["name"]: list(tool["parameters"]["properties"]) for tool in given if "name" in tool}
    names = [*parameters, *tools, "any_tool"]
    name = names[0]
    keys = parameters.get(name) or ["x"]
    for what, made in PAYLOADS.items():
        text = made if isinstance(made, str) else made()
        yield f"{what}: the text", said(text)
        yield f"{what}: in every place", said(_everywhere(text[: MEGABYTE // 5]))
        if calls:
            yield f"{what}: the arguments", [called(name, text)]
            yield f"{what}: in the arguments", [called(name, dict.fromkeys(keys, text)), *said("Done.")]
    for text in CODE if code else ():
        yield f"code {text[:40]!r}: in every place", said(_everywhere(text))
    if calls and code:
        yield (
            "code: in the arguments",
            [called(name, dict.fromkeys(keys, text), f"call_{n}") for n, text in enumerate(CODE)],
        )
    for what, output in SHAPES.items():
        yield what, output
    yield "2,000 calls", [called(name, dict.fromkeys(keys, n), f"call_{n}") for n in range(2_000)]
    yield "calls of all tools", [called(one, '{"a": [{}]}', f"call_{n}") for n, one in enumerate(names)]


def _everywhere(text: str) -> str:
    bare = text.removeprefix("```python\n").removeprefix("```sql\n").removesuffix("\n```")
    return (
        f"Answer: {text}\n<think>{text}</think><answer>{text}</answer><action>{text}</action>\n"
        f"```\n{bare}\n```\nThe final answer is \\boxed{{{text}}}"
    )
