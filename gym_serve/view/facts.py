"""What the index keeps of a rollout, read from its line without decoding the rest. Pure.

61% of a line with training tokens are token ids, which no table shows. So a line is split into its top-level
keys first, and of each only what is needed is decoded. Whatever is not of the expected type counts as
missing: lines come from any program, and hold what a model wrote.

A rollout that `gym_serve` writes has the row's keys before ``response`` and the verifier's after it, so the
order says whose a key is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import msgspec
import orjson

from gym_serve.metrics import failure_class
from gym_serve.rollouts.analysis.comparison import prompt_digest

TEXT_LIMIT = 100_000
"""How many characters of a rollout can be found by their words."""
NAME_LIMIT = 100
"""The longest name of an agent, a tool, a field and so on, in characters; longer ones are cut."""
PROMPT_LIMIT = 200

UNKNOWN_MODEL = "-"
"""The model server of rollouts that do not name theirs: those of foreign agents."""

_RESERVED = frozenset(
    {
        *("responses_create_params", "response", "reward", "reward_components", "verify_reward", "error"),
        *("failure", "mask_sample", "instance_config", "model_usage", "agent_ref", "branches"),
        *("captured_input", "captured_context", "prompt", "stopped_by"),
    }
)
_MARKS = ("_ng_failure_class", "_ng_failure_terminal", "failure", "mask_sample", "instance_config")
_SCALARS = frozenset(b'"-0123456789tf')
_LONGEST_SCALAR = 1000  # bytes
_MOST_FIELDS = 64
_LARGEST_COUNT = 10**12  # a million of them can be added up
_LONGEST = 1e9  # seconds
_LATEST = 1e11  # seconds since 1970


class Usage(NamedTuple):
    """Counts of model calls, as `gym_serve.servers.usage` has them."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    unreported: int


class Facts(msgspec.Struct):
    """The facts of one rollout; None where it does not say."""

    id: str
    task: int | str
    """``_ng_task_index``, else a digest of the prompt."""
    attempt: int | None = None
    """Which of the task's rollouts it is, from 0."""
    agent: str | None = None
    environment: str | None = None
    """The server that verified it, by its timeline."""
    reward: float | None = None
    """None if it failed or is masked."""
    failure: str | None = None
    """Its `failure_class`."""
    turns: int | None = None
    """Model calls of the agent."""
    tools: tuple[str, ...] = ()
    """Names of the tools that were called, in order of their first calls."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None
    version: int | str | None = None
    """Version of the weights at its first model call."""
    last_version: int | str | None = None
    """Version of the weights at its last model call."""
    usage: dict[str, Usage] = {}
    """What its model calls used, judges included, by model server; empty if it does not say."""
    at: float | None = None
    """When it ended, in Unix seconds."""
    prompt: str = ""
    """The beginning of the last user message of its row, in one line."""
    prompt_digest: int | None = None
    """Of the whole input of its row, see `gym_serve.rollouts.analysis.comparison`."""
    text: str = ""
    """What can be searched: prompt and conversation, without instructions."""
    own: dict[str, float | int | str] = {}
    """The scalars of the verifier, ``fields.NAME``, and of the row, ``row.NAME``."""


class _Part(msgspec.Struct):
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    content: str | list[_Part] | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    weight_version: str | int | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    unreported: int | None = None
    calls: int | None = None


class _Response(msgspec.Struct):
    output: list[_Item] = []
    usage: _Usage | None = None
    created_at: float | None = None


class _Params(msgspec.Struct):
    input: str | list[_Item] | None = None


class _Input(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw(b"null")


class _Timeline(msgspec.Struct):
    began: float | None = None
    dur: float | None = None
    servers: list[str] = []
    steps: list[list[Any]] = []


class _AgentRef(msgspec.Struct):
    name: str | None = None


class _Failure(msgspec.Struct):
    detail: str | None = None


_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY = msgspec.json.Decoder()
_INPUT = msgspec.json.Decoder(_Input)
_Nested = dict[str, dict[str, _Usage]]
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (_Response, _Params, _Timeline, _AgentRef, _Failure, _Nested)
}


def facts_of(line: bytes) -> Facts:
    """The facts of a line. Raises ValueError: it is no JSON object; the message says why."""
    top = _top(line)
    facts = Facts("", 0)
    response = _read(top, "response", _Response) or _Response()
    params = _read(top, "responses_create_params", _Params) or _Params()
    facts.agent = _name((_read(top, "agent_ref", _AgentRef) or _AgentRef()).name)
    _identify(facts, top)
    _judge(facts, top)
    _measure(facts, top, response)
    _converse(facts, top, params, response)
    facts.prompt_digest = _prompt_digest(top.get("responses_create_params"))
    facts.own = _own(top)
    return facts


def top_level(line: bytes) -> dict[str, Any]:
    """A rollout, of any line that `facts_of` accepts. Numbers that are not finite are None. Raises
    ValueError: it is no JSON object."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        value = _odd(line)
    if not isinstance(value, dict):
        raise ValueError(f"a rollout must be a JSON object, got {_kind(value)}")
    return value


def is_own(key: str) -> bool:
    """Whether a key is one of the verifier's own, after the response, or of the row, before it."""
    return key not in _RESERVED and not key.startswith("_ng_")


def _top(line: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _TOP.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = top_level(line)
    return _TOP.decode(orjson.dumps(value))


def _odd(line: bytes) -> Any:
    """JSON that orjson refuses: NaN, integers without end, half of a surrogate pair, broken UTF-8."""
    try:
        text = line.decode("utf-8-sig", errors="replace")
        value = json.loads(text, parse_constant=lambda name: None, parse_int=_integer, parse_float=_float)
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace").decode()
        return orjson.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg}, at character {error.pos}") from None


def _integer(digits: str) -> int | float | None:
    if len(digits) < 19:
        return int(digits)
    return _float(digits)


def _float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _read(top: Mapping[str, msgspec.Raw], key: str, kind: type[Any]) -> Any:
    """The value of a key as ``kind``; None if it is absent or something else."""
    raw = top.get(key)
    if raw is None:
        return None
    try:
        return _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _lenient(kind, top_level(b'{"":%b}' % bytes(raw))[""])
    except ValueError:
        return None


def _lenient(kind: Any, value: Any) -> Any:
    """As much of a value as has the right types; None for one that is of another."""
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if not isinstance(value, dict):
            return None
        fields = ((field.name, field.type) for field in msgspec.structs.fields(kind) if field.name in value)
        values = {name: _lenient(type_, value[name]) for name, type_ in fields}
        return kind(**{name: item for name, item in values.items() if item is not None})
    if kind is msgspec.Raw:
        return msgspec.Raw(b"[..]" if value else b"")
    if args == (Any,):
        return value if isinstance(value, list) else None
    if origin is list and isinstance(value, list):
        items = (_lenient(args[0], item) for item in value)
        return [(get_origin(args[0]) or args[0])() if item is None else item for item in items]
    if origin is dict and isinstance(value, dict):
        return {key: _lenient(args[1], of) for key, of in value.items() if isinstance(of, dict)}
    if origin in (Union, UnionType):
        return next((item for arg in args if (item := _lenient(arg, value)) is not None), None)
    if kind is float and type(value) is int:
        return value
    return value if type(value) is kind else None


def _identify(facts: Facts, top: Mapping[str, msgspec.Raw]) -> None:
    task = _scalar(top.get("_ng_task_index"))
    if type(task) is int or (isinstance(task, str) and task):
        facts.task = _name(task) if isinstance(task, str) else task
    else:
        prompt = top.get("responses_create_params") or top.get("prompt") or b""
        facts.task = hashlib.blake2b(bytes(prompt), digest_size=8).hexdigest()
    attempt = _scalar(top.get("_ng_rollout_index"))
    facts.attempt = attempt if type(attempt) is int else None
    id_ = _scalar(top.get("_ng_rollout_id"))
    facts.id = _name(id_) if isinstance(id_, str) and id_ else f"{facts.task}-{facts.attempt or 0}"


def _prompt_digest(params: msgspec.Raw | None) -> int | None:
    if params is None:
        return None
    try:
        return prompt_digest(orjson.loads(bytes(_INPUT.decode(params).input)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, orjson.JSONDecodeError):
        return None


def _judge(facts: Facts, top: Mapping[str, msgspec.Raw]) -> None:
    facts.failure = _name(failure_class({name: _decoded(top.get(name)) for name in _MARKS}))
    if facts.failure is not None:
        return
    reward = _scalar(top.get("reward"))
    facts.reward = _between(float(reward) if isinstance(reward, bool) else reward, -1e100, 1e100)


def _measure(facts: Facts, top: Mapping[str, msgspec.Raw], response: _Response) -> None:
    timeline: _Timeline = _read(top, "_ng_timeline", _Timeline) or _Timeline()
    for step in timeline.steps:
        _take_step(facts, step, timeline.servers)
    stages: dict[str, dict[str, _Usage]] = _read(top, "model_usage", _Nested) or {}
    usages = [*stages.get("model", {}).values()]
    if not usages and response.usage is not None:
        usages = [response.usage]
        stages = {**stages, "model": {UNKNOWN_MODEL: response.usage}}
    facts.usage = _by_model(stages)
    if usages:
        facts.input_tokens = _small(sum(_count(usage.input_tokens) for usage in usages))
        facts.output_tokens = _small(sum(_count(usage.output_tokens) for usage in usages))
        facts.turns = facts.turns or _small(sum(_count(usage.calls) for usage in usages)) or None
    facts.seconds = _between(_scalar(top.get("_ng_latency_s")), 0, _LONGEST)
    if facts.seconds is None and timeline.dur is not None:
        facts.seconds = _between(timeline.dur / 1e6, 0, _LONGEST)
    if timeline.began is not None:
        facts.at = _between(timeline.began + (timeline.dur or 0.0) / 1e6, 0, _LATEST)
    else:
        facts.at = _between(response.created_at, 0, _LATEST)


def _by_model(stages: Mapping[str, Mapping[str, _Usage]]) -> dict[str, Usage]:
    by_model: dict[str, Usage] = {}
    for servers in stages.values():
        for server, usage in servers.items():
            tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.unreported)
            sums = by_model.get(name := server[:NAME_LIMIT], (0, 0, 0, 0))
            by_model[name] = Usage(*(_small(a + _count(b)) for a, b in zip(sums, tokens, strict=True)))
    return by_model


def _take_step(facts: Facts, step: list[Any], servers: list[str]) -> None:
    """A step of a timeline (docs/formats.md): its first items are kind, ts, dur, queued and server."""
    kind, server = step[0] if step else None, step[4] if len(step) > 4 else None
    if kind == "model":
        more = step[-1] if isinstance(step[-1], dict) else {}
        if more.get("stage") is None:
            facts.turns = (facts.turns or 0) + 1
            version = more.get("version")
            if isinstance(version, str | int):
                _take_version(facts, version)
    elif kind in ("verify", "seed") and isinstance(server, int) and 0 <= server < len(servers):
        facts.environment = _name(servers[server].partition("/")[0])


def _converse(facts: Facts, top: Mapping[str, msgspec.Raw], params: _Params, response: _Response) -> None:
    texts: list[str] = []
    items = params.input
    if isinstance(items, str):
        facts.prompt = items
        texts.append(items)
    else:
        for item in items or ():
            if item.role in ("system", "developer"):
                continue
            message = " ".join(_texts(item))
            texts.append(message)
            if item.role == "user":
                facts.prompt = message
    facts.prompt = " ".join(facts.prompt[: 4 * PROMPT_LIMIT].split())[:PROMPT_LIMIT]
    tools: dict[str, None] = {}
    calls = 0
    unversioned = facts.version is None  # the timeline tells it of calls that are no items, too
    for item in response.output:
        if item.type is not None and item.type.endswith("_call"):
            tools[_one_line(item.name or item.type)] = None
        calls += len(item.prompt_token_ids) > 2
        if unversioned and item.weight_version is not None:
            _take_version(facts, item.weight_version)
        texts.extend(_texts(item))
    facts.tools = tuple(tools)[:_MOST_FIELDS]
    if facts.turns is None:
        facts.turns = calls or _runs_of_the_assistant(response.output) or None
    failure = _read(top, "failure", _Failure) if facts.failure else None
    if failure is not None and failure.detail:
        texts.append(failure.detail)
    facts.text = _joined(texts)


def _texts(item: _Item) -> Iterator[str]:
    for content in (item.content, item.summary, item.output):
        if isinstance(content, str):
            yield content
        else:
            for part in content or ():
                yield part.text or part.refusal or ""
    if item.name:
        yield item.name
    if item.arguments:
        yield item.arguments


def _joined(texts: Iterable[str]) -> str:
    left, kept = TEXT_LIMIT, []
    for text in texts:
        if left <= 0:
            break
        kept.append(text[:left])
        left -= len(text)
    return "\n".join(kept)


def _runs_of_the_assistant(output: Iterable[_Item]) -> int:
    runs, before = 0, False
    for item in output:
        is_assistants = item.role == "assistant" or item.type in ("reasoning", "function_call")
        runs += is_assistants and not before
        before = is_assistants
    return runs


def _own(top: Mapping[str, msgspec.Raw]) -> dict[str, float | int | str]:
    own: dict[str, dict[str, float | int | str]] = {"row": {}, "fields": {}}
    of = "row"
    for key, raw in top.items():
        of = "fields" if key == "response" else of
        if is_own(key) and len(own[of]) < _MOST_FIELDS and (value := _scalar(raw)) is not None:
            scalar = int(value) if isinstance(value, bool) else value
            own[of][key[:NAME_LIMIT]] = scalar[:PROMPT_LIMIT] if isinstance(scalar, str) else scalar
    return {f"{of}.{name}": value for of, values in own.items() for name, value in values.items()}


def _decoded(raw: msgspec.Raw | None) -> Any:
    """A value, whatever it is; None if it cannot be decoded."""
    if raw is None:
        return None
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _scalar(raw: msgspec.Raw | None) -> Any:
    """A text, a number or a boolean; None for all else, and for what is too long for a table."""
    if raw is None:
        return None
    data = bytes(raw)
    if not data or data[0] not in _SCALARS:
        return None
    if len(data) > _LONGEST_SCALAR:
        return _ANY.decode(data)[:_LONGEST_SCALAR] if data[0] == ord('"') else None
    try:
        value = _ANY.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return float(value)
    return value


def _version(value: str | int | None) -> int | str | None:
    """A version: a number where it is one, so that versions are in order."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 18 else _name(value)
    return value if value is None or abs(value) < 1 << 63 else str(value)[:NAME_LIMIT]


def _take_version(facts: Facts, version: str | int) -> None:
    """Note the version of the next model call."""
    facts.last_version = _version(version)
    if facts.version is None:
        facts.version = facts.last_version


def _name(value: str | None) -> Any:
    return value[:NAME_LIMIT] if value else None


def _one_line(value: str) -> str:
    return " ".join(value[:NAME_LIMIT].split()) or "?"


def _count(value: int | None) -> int:
    return value if value is not None and value >= 0 else 0


def _small(value: int) -> int:
    return min(value, _LARGEST_COUNT)


def _between(value: Any, low: float, high: float) -> float | None:
    """A number in a range that figures can be made of; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return None
    return float(value)
