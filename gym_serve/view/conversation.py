"""One rollout as people read it: items, verdict, judge, failure, timeline, branches.

Nothing of a rollout is trusted, neither types nor sizes. A long text is cut, and of a long conversation the
middle is left out; both are said, and `items_between` has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from gym_serve.capture import prefixes
from gym_serve.metrics import MASKED
from gym_serve.types.exact import exact_bytes
from gym_serve.types.requests import JSON
from gym_serve.types.timeline import Timeline
from gym_serve.view.facts import is_own
from gym_serve.view.queries import table_row
from gym_serve.view.runs import Reading

MOST_ITEMS = 2000
_LONGEST_TEXT = 100_000  # characters of one item, in a whole rollout
_LONGEST_ALONE = 20_000_000  # likewise, if it is asked for alone
_ALL_TEXT = 4_000_000  # characters of all items; each has some of the rest
_LEAST_TEXT = 1000
_LONGEST_MEDIA = 8_000_000  # characters of base64
_LONGEST_FIELD = 65_536  # bytes of JSON
_MOST_STEPS = 5000
_MOST_BRANCHES = 200
_MOST_COMPARED = 2000  # items of a branch
_MOST_ATTEMPTS = 200
_OF_A_STEP = (
    *("kind", "start", "duration", "queued", "server", "replica", "stage", "name", "status", "version"),
    *("input_tokens", "cached_tokens", "output_tokens", "retries", "time_to_first_token"),
)
_DATA_URL = re.compile(r"data:([\w.+/-]{1,100})(?:;[\w=.+-]{1,100})*;base64,", re.ASCII)
_MEDIA = {
    "input_image": "image",
    "image_url": "image",
    "output_image": "image",
    "input_audio": "audio",
    "output_audio": "audio",
    "input_file": "file",
    "file": "file",
}


def read_rollout(reading: Reading, n: int, begin: int | None = None, end: int | None = None) -> JSON:
    """A rollout for the page. ``begin``/``end``: which items; by default the first and the last thousand.
    Raises NotFound: there is no such rollout, or no longer."""
    raw = reading.rollout(n)
    row = table_row(reading, n)
    return {
        "run": reading.run.id,
        "n": n,
        **shown_rollout(raw, row, begin, end),
        "neighbours": {"attempts": attempts_at(reading, row["task"], n)},
    }


def shown_rollout(raw: JSON, row: JSON, begin: int | None = None, end: int | None = None) -> JSON:
    """A rollout for the page, without its place in a file."""
    params = _object(raw.get("responses_create_params"))
    response = _object(raw.get("response"))
    everything = _Conversation(raw, params, response)
    cut: list[str] = []
    items, omitted = everything.shown(begin, end, cut)
    if everything.cut:
        cut.append("branches")
    own, verdict = _keys(raw, cut)
    return {
        "id": row["id"],
        "task": row["task"],
        "attempt": row["attempt"],
        "summary": row,
        "instructions": _instructions(params, response, cut),
        "tools": _tools(params, response, cut),
        "items": items,
        "omitted": omitted,
        "total": len(everything.items),
        "verdict": {
            "reward": row["reward"],
            "reward_components": _field(raw.get("reward_components"), "verdict.reward_components", cut),
            "verify_reward": _field(raw.get("verify_reward"), "verdict.verify_reward", cut),
            "fields": verdict,
        },
        "judge": _judge(raw, cut),
        "failure": _failure(raw, row),
        "timeline": _timeline(raw),
        "branches": everything.branches,
        "row": own,
        "cut": list(dict.fromkeys(cut)),
    }


def attempts_at(reading: Reading, task: str, n: int) -> list[JSON]:
    """The rollouts of the task of rollout ``n``."""
    rows = reading.sql(
        "SELECT n, reward, failure FROM rollouts WHERE task = (SELECT task FROM rollouts WHERE n = ?)"
        " ORDER BY attempt, n LIMIT ?",
        (n, _MOST_ATTEMPTS),
    )
    run = reading.run.id
    return [{"run": run, "n": at, "reward": reward, "failure": failure} for at, reward, failure in rows]


class _Conversation:
    """All items of a rollout: those of the verified conversation, and after them those of the branches."""

    def __init__(self, raw: JSON, given: JSON, response: JSON) -> None:
        captured = "captured_input" in raw
        prompt = _items(raw.get("captured_input") if captured else given.get("input"))
        output = _items(response.get("output"))
        self.items = [*prompt, *output]
        self.turns = _turns(self.items, len(prompt))
        self.branches: list[JSON] = []
        others = [branch for branch in _list(raw.get("branches")) if isinstance(branch, dict)]
        self.cut = len(others) > _MOST_BRANCHES
        if others:
            self._branch(others)

    def _branch(self, others: Sequence[JSON]) -> None:
        """Where each branch leaves the conversations before it; what it shares is there once."""
        main = list(range(len(self.items)))
        self.branches.append({"id": 0, "parent": None, "items": main})
        known = [_prefixes(self.items)]
        for number, branch in enumerate(others[:_MOST_BRANCHES], 1):
            items = [*_items(branch.get("input")), *_items(_object(branch.get("response")).get("output"))]
            own = _prefixes(items)
            parent, end = _common(own, known)
            shared = [] if parent is None else self.branches[parent]["items"][:end]
            begin = len(self.items)
            self.items += items[len(shared) :]
            self.turns += _turns(items, 0)[len(shared) :]
            indices = [*shared, *range(begin, len(self.items))]
            self.branches.append({"id": number, "parent": parent, "items": indices})
            known.append(own)

    def shown(self, begin: int | None, end: int | None, cut: list[str]) -> tuple[list[JSON], int]:
        """Items for the page, and how many in the middle are left out."""
        count = len(self.items)
        if begin is not None or end is not None:
            first = min(max(begin or 0, 0), count)
            chosen = list(
                range(first, max(first, min(count if end is None else end, first + MOST_ITEMS, count)))
            )
        elif count > MOST_ITEMS:
            half = MOST_ITEMS // 2
            chosen = [*range(half), *range(count - half, count)]
        else:
            chosen = list(range(count))
        left = _LONGEST_ALONE if len(chosen) == 1 else _ALL_TEXT
        longest = _LONGEST_ALONE if len(chosen) == 1 else _LONGEST_TEXT
        entries = []
        for index in chosen:
            allowed = min(longest, max(_LEAST_TEXT, left))
            item = _shown(self.items[index], allowed, cut, index)
            left -= len(item["text"]) + len(item["arguments_text"] or "")
            entries.append({"index": index, **item, "turn": self.turns[index]})
        return entries, 0 if begin is not None or end is not None else count - len(chosen)


def _common(own: dict[bytes, int], known: Sequence[dict[bytes, int]]) -> tuple[int | None, int]:
    """Which of some conversations shares the most items with another one at its beginning, and how many."""
    best: tuple[int | None, int] = (None, 0)
    for number, prefixes_ in enumerate(known):
        end = max((end for digest, end in own.items() if prefixes_.get(digest) == end), default=0)
        if end > best[1]:
            best = (number, end)
    return best


def _prefixes(items: list[JSON]) -> dict[bytes, int]:
    """Digests of the beginnings of a conversation, and where each ends."""
    try:
        return {digest: end for end, digest in prefixes(items[:_MOST_COMPARED])}
    except Exception:  # items of any form; a branch without a known parent is shown whole
        return {}


def _items(given: Any) -> list[JSON]:
    """The items of an input or an output; messages of Chat Completions become items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    items: list[JSON] = []
    for item in given if isinstance(given, list) else ():
        if not isinstance(item, dict):
            items.append({"type": "other", "content": _text(item)})
            continue
        if item.get("role") == "tool":
            output = item.get("content")
            items.append(
                {"type": "function_call_output", "call_id": item.get("tool_call_id"), "output": output}
            )
            continue
        calls = item.get("tool_calls")
        if not (isinstance(calls, list) and calls):
            items.append(item)
            continue
        if item.get("content"):
            items.append({key: value for key, value in item.items() if key != "tool_calls"})
        for call in calls:
            function = _object(_object(call).get("function"))
            items.append({"type": "function_call", "call_id": _object(call).get("id"), **function})
    return items


def _turns(items: Sequence[JSON], asked: int) -> list[int | None]:
    """Which model call said each item; None for what the model did not say."""
    counted = any(item.get("prompt_token_ids") for item in items)
    turns: list[int | None] = [None] * min(asked, len(items))
    turn, before = 0, True
    for item in items[asked:]:
        kind, role = _kind(item)
        said = role == "assistant" and kind != "result"
        if said and not before and not counted:
            turn += 1
        turns.append(turn if said else None)
        before = said
        if counted and item.get("prompt_token_ids"):
            turn += 1
    return turns


def _kind(item: JSON) -> tuple[str, str]:
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        return "message", role if role in ("user", "assistant", "system", "developer", "tool") else "user"
    if kind == "reasoning":
        return "reasoning", "assistant"
    if kind == "function_call":
        return "call", "assistant"
    if isinstance(kind, str) and kind.endswith("_call_output"):
        return "result", "tool"
    if isinstance(kind, str) and kind.endswith("_call"):
        return "call", "assistant"
    return "other", "assistant"


def _shown(item: JSON, allowed: int, cut: list[str], index: int) -> JSON:
    kind, role = _kind(item)
    content = item.get("output") if kind == "result" else item.get("content") if kind == "message" else None
    if kind == "reasoning":
        content = [*_list(item.get("summary")), *_list(item.get("content"))]
    parts = (
        []
        if content is None
        else [
            _part(part, cut, index) for part in (content[:1000] if isinstance(content, list) else [content])
        ]
    )
    arguments: Any = item.get("arguments")
    text = "".join(part.get("text") or "" for part in parts)
    if kind == "call" and arguments is None:
        arguments = {key: value for key, value in item.items() if key not in ("type", "id", "status", "name")}
        arguments.pop("prompt_token_ids", None)
    elif kind == "other":
        text = _text(item.get("content") if item.get("type") == "other" else item)
    arguments_text = arguments if isinstance(arguments, str) or arguments is None else _text(arguments)
    size = len(text.encode(errors="replace")) + len((arguments_text or "").encode(errors="replace"))
    if len(text) > allowed or len(arguments_text or "") > allowed:
        cut.append(f"items[{index}]")
    name = item.get("name")
    return {
        "role": role,
        "kind": kind,
        "text": text[:allowed],
        "parts": list(_cut_parts(parts, allowed)),
        "name": str(name)[:1000] if name is not None else (item.get("type") if kind == "call" else None),
        "call_id": str(item["call_id"])[:1000] if item.get("call_id") is not None else None,
        "arguments": _json(arguments_text) if arguments_text and len(arguments_text) <= allowed else None,
        "arguments_text": arguments_text[:allowed] if arguments_text is not None else None,
        "encrypted": kind == "reasoning" and not text and bool(item.get("encrypted_content")),
        "bytes": size,
    }


def _cut_parts(parts: list[JSON], allowed: int) -> Iterator[JSON]:
    """Parts whose texts have so many characters together."""
    for part in parts:
        text = part.get("text")
        if text is None:
            yield part
        elif allowed > 0:
            yield {**part, "text": text[:allowed]}
            allowed -= len(text)


def _part(part: Any, cut: list[str], index: int) -> JSON:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        return {"type": "text", "text": _text(part)}
    kind = part.get("type")
    if kind == "refusal" or (isinstance(part.get("refusal"), str) and "text" not in part):
        return {"type": "refusal", "text": _text(part.get("refusal"))}
    if isinstance(kind, str) and kind in _MEDIA:
        return _media(_MEDIA[kind], part, cut, index)
    text = part.get("text")
    return {"type": "text", "text": text if isinstance(text, str) else _text(part)}


def _media(kind: str, part: JSON, cut: list[str], index: int) -> JSON:
    """An image, a sound or a file: its data in base64, else where it is."""
    inner = _object(part.get(kind)) or _object(part.get(f"input_{kind}")) or _object(part.get("image_url"))
    names = ("image_url", "url", "data", "file_data", "file_url")
    source = next((v for name in names for v in (part.get(name), inner.get(name)) if isinstance(v, str)), "")
    name = part.get("filename") or inner.get("filename") or part.get("file_id")
    media: JSON = {"type": kind, "name": str(name)[:200] if name else None}
    match = _DATA_URL.match(source[:300])
    form = inner.get("format") or part.get("format")
    if match is not None:
        media |= {"media_type": match[1], "data": source[match.end() :]}
    elif kind == "audio" and source and form:
        media |= {"media_type": f"audio/{str(form)[:20]}", "data": source}
    else:
        media |= {"media_type": None, "data": source[:2000]}  # an address, which is never loaded
    if len(media["data"]) > _LONGEST_MEDIA:
        cut.append(f"items[{index}]")
        media |= {"data": None, "bytes": len(source) * 3 // 4}
    return media


def _instructions(given: JSON, response: JSON, cut: list[str]) -> str | None:
    instructions = given.get("instructions") or response.get("instructions")
    if instructions is None or instructions == "":
        return None
    text = instructions if isinstance(instructions, str) else _text(instructions)
    if len(text) > _LONGEST_TEXT:
        cut.append("instructions")
    return text[:_LONGEST_TEXT]


def _tools(given: JSON, response: JSON, cut: list[str]) -> list[JSON]:
    tools = _list(response.get("tools")) or _list(given.get("tools"))
    found = []
    for tool in tools[:1000]:
        own = _object(tool)
        of = _object(own.get("function")) or own
        name = of.get("name") or own.get("type") or "?"
        shown = {"name": str(name)[:1000], "description": _text(of.get("description") or "")[:_LONGEST_TEXT]}
        found.append({**shown, "parameters": _field(of.get("parameters"), "tools", cut)})
    return found


def _keys(raw: JSON, cut: list[str]) -> tuple[JSON, JSON]:
    """The row's own keys, and the verifier's."""
    row: JSON = {}
    verdict: JSON = {}
    after = False
    for key, value in raw.items():
        after = after or key == "response"
        if key == "responses_create_params":
            rest = {k: v for k, v in _object(value).items() if k not in ("input", "tools", "instructions")}
            if rest:
                row[key] = rest
        elif key == "prompt":
            continue  # it is the input
        elif is_own(key) and after:
            verdict[key] = _field(value, f"verdict.fields.{key}", cut)
        elif key == "agent_ref" or (is_own(key) and not after):
            row[key] = _field(value, f"row.{key}", cut)
    if len(exact_bytes(row)) > _LONGEST_FIELD * 4:
        cut.append("row")
        row = {key: _text(value)[:1000] for key, value in list(row.items())[:200]}
    return row, verdict


def _field(value: Any, name: str, cut: list[str]) -> Any:
    """A value of any size, cut to its beginning as a text."""
    try:
        text = exact_bytes(value)
    except (TypeError, ValueError):  # nested more deeply than it writes
        cut.append(name[:200])
        return "(nested too deeply to be shown)"
    if len(text) <= _LONGEST_FIELD:
        return value
    cut.append(name[:200])
    return (
        value[:_LONGEST_FIELD] if isinstance(value, str) else text[:_LONGEST_FIELD].decode(errors="replace")
    )


def _judge(raw: JSON, cut: list[str]) -> list[JSON]:
    """What the environment asked its models, by the timeline, else by the verifier."""
    timeline = Timeline.of(raw)
    calls = [
        {"model": step.server, "prompt": step.prompt, "answer": step.answer, "seconds": step.duration}
        for step in (timeline.steps if timeline is not None else ())
        if step.kind == "model" and step.stage is not None and (step.prompt or step.answer)
    ]
    if not calls:
        for call in _list(raw.get("judge_evaluations")):
            params = _object(_object(call).get("responses_create_params"))
            answered = _object(_object(call).get("response"))
            calls.append(
                {
                    "model": str(answered.get("model") or params.get("model") or "judge"),
                    "prompt": "\n\n".join(map(_said, _items(params.get("input")))),
                    "answer": "\n\n".join(map(_said, _items(answered.get("output")))),
                    "seconds": None,
                }
            )
    return [{**call, **_cut_texts(call, cut)} for call in calls[:50]]


def _cut_texts(call: JSON, cut: list[str]) -> JSON:
    if any(len(call[key] or "") > _LONGEST_TEXT for key in ("prompt", "answer")):
        cut.append("judge")
    return {key: call[key][:_LONGEST_TEXT] if call[key] is not None else None for key in ("prompt", "answer")}


def _said(item: JSON) -> str:
    text: str = _shown(item, _LONGEST_TEXT, [], 0)["text"]
    return text


def _failure(raw: JSON, row: JSON) -> JSON | None:
    if row["failure"] is None:
        return None
    failure = _object(raw.get("failure"))
    trace = failure.get("trace") or failure.get("traceback")
    message = failure.get("detail") or raw.get("error") or ""
    if row["failure"] == MASKED:
        message = f"its environment leaves it out of scores; the reward was {_text(raw.get('reward'))[:100]}"
    return {
        "class": row["failure"],
        "message": str(message)[:_LONGEST_TEXT],
        "terminal": bool(raw.get("_ng_failure_terminal")),
        "stage": str(failure["stage"])[:100] if failure.get("stage") else None,
        "server": str(failure["server"])[:100] if failure.get("server") else None,
        "status": failure.get("status") if type(failure.get("status")) is int else None,
        "trace": _text(trace)[:_LONGEST_TEXT] if trace else None,
    }


def _timeline(raw: JSON) -> JSON | None:
    timeline = Timeline.of(raw)
    if timeline is None:
        return None
    return {
        "began": timeline.began,
        "duration": timeline.duration,
        "queued": timeline.queued,
        "agent": timeline.agent,
        "steps": [
            {**{name: getattr(step, name) for name in _OF_A_STEP}, "finish": step.finish_reason}
            for step in timeline.steps[:_MOST_STEPS]
        ],
        "omitted": max(0, len(timeline.steps) - _MOST_STEPS),
    }


def _object(value: Any) -> JSON:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return exact_bytes(value).decode()
    except (TypeError, ValueError):
        return "(nested too deeply to be shown)"


def _json(text: str) -> Any:
    try:
        value = orjson.loads(text)
        orjson.dumps(value)
    except (orjson.JSONDecodeError, TypeError):
        return None
    return value
