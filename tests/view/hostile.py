"""Rollouts that attack whoever shows them: 50 and more, by name, as the lines of a file.

Where one of them succeeds, it sets ``window.attacked`` or asks ``http://attacked.example``, so that a
test in a browser sees it. None does anything else.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

JSON = dict[str, Any]

SCRIPT = "<script>window.attacked=1</script>"
IMAGE = '<img src=x onerror="window.attacked=1">'
SVG = f'<svg xmlns="http://www.w3.org/2000/svg" onload="window.attacked=1">{SCRIPT}</svg>'
LINK = "javascript:window.attacked=1"
REMOTE = "http://attacked.example/"
PAGE = "data:text/html;base64,PHNjcmlwdD53aW5kb3cub3BlbmVyLmF0dGFja2VkPTE8L3NjcmlwdD4="
SVG_URL = (
    "data:image/svg+xml;base64,PHN2ZyB4bWxucz0iaHR0cDovL3d3dy53My5vcmcvMjAwMC9zdmciIG9ubG9hZD0id2luZG93LmF0dGFja2Vk"
    "PTEiLz4="
)
MIXED = f'"><{SCRIPT[1:]}{IMAGE}{SVG}\'"`--></style></textarea>{SCRIPT}'
"""Script for every place in HTML."""


def hostile(large: bool = True) -> dict[str, bytes]:
    """Lines by name; ``large`` are those of 10 MB and of 100,000 turns too."""
    found = {name: orjson.dumps(made) for name, made in _texts()}
    found |= {name: orjson.dumps(made) for name, made in _fields()}
    found |= {name: orjson.dumps(made) for name, made in _media()}
    found |= {name: orjson.dumps(made) for name, made in _wrong_types()}
    found |= dict(_odd_json())
    if large:
        found |= dict(_large())
    return found


def write_hostile(path: Path, large: bool = True) -> list[str]:
    """Write all of them into a file, and a torn line at its end; the names, in order."""
    found = hostile(large)
    path.write_bytes(b"".join(line + b"\n" for line in found.values()) + b'{"reward": 1.0, "response": {"out')
    return list(found)


def _rollout(text: Any = "hello", **more: Any) -> JSON:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "hello"}]},
        "agent_ref": {"name": "agent"},
        **{"_ng_task_index": 0, "_ng_rollout_index": 0},
        "response": {"output": [said]},
        "reward": 1.0,
        **more,
    }


TEXTS = {
    "script in text": MIXED,
    "script in a code block": f"```html\n{MIXED}\n```\n`{SCRIPT}`",
    "fence that names a script": f'```"><img src=x onerror=window.attacked=1>\n{SCRIPT}\n```',
    "links": f"[a]({LINK}) [b]({PAGE}) <{LINK}> [c](JaVaScRiPt:window.attacked=1) [d](\x01{LINK})",
    "links in HTML": f'<a href="{LINK}">a</a><a href="{PAGE}" target=_blank>b</a><base href="{REMOTE}">',
    "link with a title": f'[a](https://a.example "{IMAGE}") [b]: {LINK} "x"\n[b]',
    "remote images": f"![a]({REMOTE}a.png) <img src={REMOTE}b> ![c]({SVG_URL}) ![d]({LINK})",
    "remote style": f'<link rel=stylesheet href="{REMOTE}"><style>@import url({REMOTE})</style>',
    "frames": f'<iframe src="{REMOTE}"></iframe><iframe srcdoc="{SCRIPT}"></iframe><object data="{PAGE}">',
    "forms": f'<form action="{REMOTE}"><input name=a><button>x</button></form>',
    "refresh": f'<meta http-equiv="refresh" content="0;url={REMOTE}">',
    "formulas": f"$\\href{{{LINK}}}{{x}}$ $$\\includegraphics{{{REMOTE}}}$$ "
    f"$\\htmlData{{a=b}}{{x}}$ $<b>{IMAGE}$",
    "endless formula": "$\\def\\a{\\a\\a}\\a$ $" + "{" * 2000 + "$ $" + "\\sqrt{" * 2000 + "$",
    "table": f"| a | {IMAGE} |\n|---|---|\n| {SCRIPT} | [x]({LINK}) |",
    "templates": "{{constructor.constructor('window.attacked=1')()}} ${window.attacked=1} <%= 1 %> {% x %}",
    "deep markdown": ">" * 5000 + " a\n" + "[" * 5000 + "\n" + "*a " * 5000 + "\n" + "- " * 2000,
    "slow patterns": "a" * 50_000 + "!" + "`" * 20_000 + "_" * 20_000 + "<" * 20_000 + "$" * 9_999,
    "right to left": "\u202egpj.exe\u202c \u2066\u2067abc\u2069 \u200f\u061c \u202e" * 50,
    "invisible": "a\u200bb\u200c\u200d\ufeff\u00ad" * 100 + "Z" + "\u0300" * 2000,
    "control characters": "\x00\x01\x07\x08\x1b[31mred\x1b]8;;" + REMOTE + "\x1b\\x\x7f\x85\u2028\u2029",
    "one long word": "W" * 100_000,
}
"""What a model says."""


def _texts() -> Iterator[tuple[str, JSON]]:
    for name, text in TEXTS.items():
        yield name, _rollout(text)


def _fields() -> Iterator[tuple[str, JSON]]:
    """Script in every other place that is shown."""
    item: JSON = {
        "type": "function_call",
        "name": MIXED,
        "call_id": MIXED,
        "arguments": orjson.dumps({MIXED: MIXED}).decode(),
    }
    output = {"type": "function_call_output", "call_id": MIXED, "output": MIXED}
    tool = {"type": "function", "name": MIXED, "description": MIXED, "parameters": {MIXED: {MIXED: MIXED}}}
    texts = {"stage": "verify", "version": MIXED, "prompt": MIXED, "answer": MIXED}
    steps: list[list[Any]] = [
        ["model", 0, 1, 0, 0, None, None, None, MIXED, texts],
        ["model", 0, 1, 0, 0, None, None, None, MIXED, {"version": MIXED}],
        ["tool", 1, 1, 0, 0, MIXED, None, None],
    ]
    timeline = {"began": 1.8e9, "dur": 9, "agent": MIXED, "servers": [MIXED], "steps": steps}
    branch = {"input": [{"role": "user", "content": MIXED}], "response": {"output": [item]}, "context": 10**9}
    places: dict[str, JSON] = {
        "script in a call": {"response": {"output": [item, output], "tools": [tool], "instructions": MIXED}},
        "arguments that are no JSON": {"response": {"output": [{**item, "arguments": MIXED}]}},
        "script in reasoning": {
            "response": {
                "output": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": MIXED}]}]
            }
        },
        "script in types": {"response": {"output": [{"type": MIXED, "role": MIXED, "content": MIXED}]}},
        "script in the prompt": {
            "responses_create_params": {
                "input": MIXED,
                "instructions": MIXED,
                "tools": [tool],
                "model": MIXED,
            }
        },
        "chat messages": {
            "responses_create_params": {
                "input": [
                    {"role": "system", "content": MIXED},
                    {
                        "role": "assistant",
                        "content": MIXED,
                        "tool_calls": [{"id": MIXED, "function": {"name": MIXED}}],
                    },
                    {"role": "tool", "tool_call_id": MIXED, "content": MIXED},
                ]
            }
        },
        "script in names": {"agent_ref": {"name": MIXED}, "_ng_rollout_id": MIXED, "_ng_task_index": MIXED},
        "script in the verdict": {MIXED: MIXED, "extracted": MIXED, "list": [MIXED], "link": LINK},
        "script in components": {"reward_components": {MIXED: 1.0, "b": MIXED}, "verify_reward": MIXED},
        "script in a failure": {
            "_ng_failure_class": MIXED,
            "failure": {"kind": MIXED, "detail": MIXED, "stage": MIXED, "server": MIXED, "trace": MIXED},
        },
        "script in the timeline": {"_ng_timeline": timeline},
        "steps out of time": {
            "_ng_timeline": {
                **timeline,
                "dur": -1,
                "steps": [["tool", -1e13, 1e13, 0, 0, MIXED, 0, 0], ["tool", 1, 1, 0, 99, MIXED, 0, 0]],
            }
        },
        "script in branches": {"branches": [branch, {}, branch]},
        "keys of JavaScript": {
            "__proto__": {"attacked": 1},
            "constructor": {"prototype": {"attacked": 1}},
            "toString": 1,
            "hasOwnProperty": 0,
        },
        "paths": {
            "_ng_rollout_id": "../../../etc/passwd",
            "agent_ref": {"name": "..%2f..%2f"},
            "file": "/etc/passwd",
        },
        "many fields": {**{f"field {number}": number for number in range(5000)}},
        "many tools": {
            "response": {"output": [{"type": "function_call", "name": f"t{n}\n"} for n in range(1500)]}
        },
    }
    for name, place in places.items():
        yield name, _rollout(**place)
    yield (
        "SQL",
        _rollout(
            '" OR 1=1; DROP TABLE rollouts; --',
            agent_ref={"name": "'; DROP TABLE rollouts; --"},
            **{'f" TEXT); --': "x"},
        ),
    )


def _media() -> Iterator[tuple[str, JSON]]:
    for name, url in (("script", LINK), ("page", PAGE), ("SVG", SVG_URL), ("remote", f"{REMOTE}a.png")):
        parts = [
            {"type": "input_image", "image_url": url},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url, "format": MIXED}},
            {"type": "input_file", "file_data": url, "filename": MIXED},
        ]
        yield (
            f"media: {name}",
            _rollout(responses_create_params={"input": [{"role": "user", "content": parts}]}),
        )


def _wrong_types() -> Iterator[tuple[str, JSON]]:
    """Another type wherever one is expected."""
    for name, value in (
        ("numbers", 7),
        ("texts", "x"),
        ("lists", [1, [2]]),
        ("objects", {"a": {}}),
        ("nothing", None),
    ):
        yield (
            f"{name} everywhere",
            {
                **dict.fromkeys(_rollout(), value),
                **dict.fromkeys(("_ng_timeline", "_ng_latency_s", "_ng_rollout_id"), value),
                **dict.fromkeys(("_ng_failure_class", "failure", "model_usage", "branches"), value),
                **dict.fromkeys(("captured_input", "instance_config"), value),
            },
        )
        item = dict.fromkeys(("role", "content", "name", "arguments", "output", "call_id", "summary"), value)
        tokens = dict.fromkeys(("prompt_token_ids", "generation_token_ids", "generation_log_probs"), value)
        inner = [
            {**item, **tokens, "type": kind} for kind in ("message", "function_call", "reasoning", value)
        ]
        output = {"output": [*inner, value], "tools": [value], "usage": value, "instructions": value}
        yield (
            f"{name} in items",
            _rollout(responses_create_params={"input": inner, "tools": value}, response=output),
        )
    yield "nothing", {}


def _odd_json() -> Iterator[tuple[str, bytes]]:
    whole = orjson.dumps(_rollout("odd"))
    yield "NaN", whole.replace(b'"reward":1.0', b'"reward":NaN,"a":Infinity,"b":-Infinity,"c":1e999')
    yield "integers without end", whole.replace(b'"reward":1.0', b'"reward":1,"a":' + b"9" * 5000)
    yield (
        "duplicate keys",
        whole[:-1] + b',"reward":0.5,"reward":0.25,"response":{"output":[]},"agent_ref":{"name":"b"}}',
    )
    yield "half a character", whole.replace(b"odd", b"\\ud83d \\ude00")
    yield "no UTF-8", whole.replace(b"odd", b"\xff\xfe\xc3\x28")
    yield "deep nesting", whole[:-1] + b',"deep":' + b"[" * 5000 + b"]" * 5000 + b"}"
    yield (
        "deeper nesting than Python",
        whole[:-1] + b',"deep":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
    )
    yield "a list", b"[1, 2, 3]"
    yield "a text", b'"hello"'
    yield "no JSON", b"<html>" + SCRIPT.encode() + b"</html>"
    yield "zero bytes", b"\x00" * 1000
    yield "carriage return", whole + b"\r"
    yield "byte order mark", b"\xef\xbb\xbf" + whole


def _large() -> Iterator[tuple[str, bytes]]:
    ten = 10_000_000
    yield "10 MB of text", orjson.dumps(_rollout("word " * (ten // 5)))
    yield "10 MB without a space", orjson.dumps(_rollout("x" * ten))
    yield "10 MB of markup", orjson.dumps(_rollout(IMAGE * (ten // len(IMAGE))))
    yield "10 MB in a field", orjson.dumps(_rollout(extracted="y" * ten, **{"k" * ten: 1}))
    yield (
        "10 MB of arguments",
        orjson.dumps(
            _rollout(
                response={
                    "output": [
                        {"type": "function_call", "name": "t", "arguments": '{"a": "' + "z" * ten + '"}'}
                    ]
                }
            )
        ),
    )
    turn = [
        {"type": "function_call", "name": "t", "call_id": "c", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ]
    yield "100,000 turns", orjson.dumps(_rollout(response={"output": turn * 100_000}))
    branch = {"input": [{"role": "user", "content": "b"}], "response": {"output": turn}}
    yield "10,000 branches", orjson.dumps(_rollout(branches=[branch] * 10_000))
    bundle = {
        **{"prompt_token_ids": list(range(1000)), "generation_token_ids": list(range(200_000))},
        "generation_log_probs": [-0.5] * 200_000,
    }
    yield (
        "200,000 tokens",
        orjson.dumps(_rollout(response={"output": [{"type": "message", "role": "assistant", **bundle}]})),
    )
