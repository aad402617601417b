"""`JudgeCalls`: the calls of one server to its judges: bounded, cached on request, with typed failures.

`VerdictCache` is opt-in, because a cached sample is not a fresh one. A key is made of the judge, the whole
request and the number of the vote; only replies with a verdict are kept. It is SQLite, so that the replicas
on a machine share a file. A cache that fails is logged and bypassed: it costs a call, never a verdict.

What a judge is asked, and what its reply says: pure functions on text.

The text of a policy may try to address the judge: its words are escaped (`escape_labels`), and it stands
between marks that it cannot hold (`filled_in`). A reply that is empty, or that broke off before its verdict,
raises `VerifierFailed`, so that nobody is scored by it; `ask_within` asks again, about less of the text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import sqlite3
import string
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakValueDictionary

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_serve.observe.catalogue import JUDGE_CALLS
from gym_serve.servers.clients import ModelClient, name_of
from gym_serve.types.errors import (
    AuthorError,
    BadRequest,
    EndpointMisconfigured,
    GymError,
    NotFound,
    OperatorError,
    Overloaded,
    Unavailable,
    VerifierFailed,
)
from gym_serve.types.protocols import is_overflow_answer
from gym_serve.types.requests import JSON, Response, problems_of

_WORD = re.compile(r"[^\W\d_]+")
_SYMBOL = re.compile(r"[^\w\s]")
_PIECES = re.compile(r"\w+|[^\w\s]+")
_MARK = "mark"
_INSTRUCTION = 8  # minimum number of words in a prompt that gives its judge instructions

_TAIL = 20_000  # characters; verdicts are at the end, and the search for JSON can take quadratic time
_DECODER = json.JSONDecoder()


def check_fields(template: str, required: Collection[str], optional: Collection[str] = ()) -> str:
    """Check that a template has the ``required`` fields, maybe ``optional`` ones and ``{mark}``, and no
    others; return it. Raises ValueError.
    """
    fields = set(_fields(template))
    allowed = {*required, *optional, _MARK}
    if not set(required) <= fields <= allowed:
        raise ValueError(
            f"the fields of a judge prompt must be {sorted(allowed)}, got {sorted(fields)}; "
            "double other braces: {{ }}"
        )
    return template


def _fields(template: str) -> list[str]:
    return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]


def check_labels(labels: Collection[str], template: str, system_message: str | None = None) -> None:
    """Check that a prompt (`str.format`'s), or its system message, tells a judge the labels of its verdict:
    one that is asked for others never writes these.

    It may describe a label in pieces: ``Judgement: answer 'yes' if ...`` for ``Judgement: yes``, or
    ``[[rating]]`` and "a rating of 2" for ``[[2]]``. A prompt of hardly more than its fields is for a judge
    that was trained to its labels, and is not checked. Raises ValueError: it gives instructions and does not
    mention a label.
    """
    parts = string.Formatter().parse(template)  # a doubled brace ends a part, too
    literals = "".join(literal + "\n" * (field is not None) for literal, field, _, _ in parts)
    whole = f"{system_message or ''}\n{literals}"
    missing, rest = [], whole
    for label in sorted(labels, key=len, reverse=True):  # INCORRECT does not mention CORRECT
        if label not in rest and not all(_says(whole, piece) for piece in _PIECES.findall(label)):
            missing.append(label)
        rest = rest.replace(label, "\0")
    if missing and len(_WORD.findall(whole)) >= _INSTRUCTION:
        raise ValueError(
            f"the judge's prompt never mentions {' and '.join(map(repr, sorted(missing)))}, so the judge "
            "cannot answer with that; set the labels that the prompt asks for, or ask for these labels in it"
        )


def _says(text: str, piece: str) -> bool:
    """Whether a text contains a piece of a label: a whole word, or symbols."""
    if not piece[0].isalnum():
        return piece in text
    return re.search(rf"(?<!\w){re.escape(piece)}(?!\w)", text) is not None


_ROUNDS = 20
"""Spaces between the characters of one label might make another; no two real labels need more rounds."""


def escape_labels(text: str, labels: Iterable[str], max_chars: int) -> str:
    """The end of a policy's text, with a space between the characters of each of ``labels`` (and whatever
    else it must not say, see `delimiters_of`), so that a judge that quotes it gives no verdict by that.
    """
    text, labels = text[max(0, len(text) - max_chars) :], list(labels)
    for _ in range(_ROUNDS):
        if not any(label in text for label in labels):
            break
        for label in labels:
            text = text.replace(label, " ".join(label))
    return text


def filled_in(template: str, fields: Mapping[str, str]) -> str:
    """A prompt from its template. ``{mark}`` in the tags around texts becomes 16 characters of a hash of all
    texts: nobody can write these into one of them, to end it and go on in the template's words.
    """
    texts = "\0".join(fields.values()).encode("utf-8", "replace")
    return template.format(**{_MARK: hashlib.sha256(texts).hexdigest()[:16], **fields})


def delimiters_of(template: str) -> list[str]:
    """What begins and ends the texts of a template without ``{mark}``, e.g. ``</answer>``: the nearest line
    next to a field, if it has more than letters and digits. A text that contains it could go on as the
    template does.
    """
    if _MARK in _fields(template):
        return []
    parts = string.Formatter().parse(template)
    pieces = "".join(literal + "\0" * (field is not None) for literal, field, _, _ in parts).split("\0")
    after = (piece.strip().split("\n")[0] for piece in pieces[1:])
    before = (piece.strip().split("\n")[-1] for piece in pieces[:-1])
    edges = {edge.strip() for edge in (*after, *before)}
    return sorted(edge for edge in edges if len(edge) > 1 and _SYMBOL.search(edge))


def judge_messages(prompt: str, system_message: str | None = None) -> list[JSON]:
    """The ``input`` of a judge's call."""
    system = [{"role": "system", "content": system_message}] if system_message else []
    return [*system, {"role": "user", "content": prompt}]


def whole_text(response: JSON) -> str:
    """The text of all assistant messages of a Response. Raises VerifierFailed: it is not a Response."""
    return _checked(response).output_text


def final_text(response: JSON) -> str:
    """The last part of the message that ends a Response; empty if another item ends it. Raises
    VerifierFailed: it is not a Response.
    """
    reply = _checked(response)
    messages = reply.messages
    if not messages or messages[-1] is not reply.output[-1]:
        return ""
    content: Any = messages[-1].get("content")
    if isinstance(content, list):
        part = content[-1] if content else None
        content = part.get("text") if isinstance(part, dict) else None
    return content if isinstance(content, str) else ""


_THINK = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)\s{0,8}>", re.IGNORECASE)
_NOTHING = re.compile(r"[\s.,;:!*_`'\"\])}>]*")
_SAME_LINE = re.compile(r"(?:[ \t,/|]|\bor\b|\band\b)*", re.IGNORECASE)


def without_thoughts(text: str) -> str:
    """A reply without its reasoning: what stands in ``<think>`` tags, or before a lone ``</think>``."""
    kept: list[str] = []
    depth = start = 0
    for tag in _THINK.finditer(text):
        if tag[1]:
            kept = [] if depth == 0 else kept  # a template opened it
            depth = max(0, depth - 1)
        else:
            if depth == 0:
                kept.append(text[start : tag.start()])
            depth += 1
        start = tag.end()
    return "".join(kept) + (text[start:] if depth == 0 else "")


def labels_in(text: str, labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """All labels in a text, each with its place; the longer of two at one place."""
    pattern = "|".join(map(re.escape, sorted(labels, key=len, reverse=True)))
    return [(match[0], *match.span()) for match in re.finditer(pattern, text)]


def verdict_in(text: str, labels: Sequence[str]) -> str | None:
    """The label that a text ends with; None if it has none, or if a line of nothing but different labels
    contradicts itself.
    """
    text = without_thoughts(text)
    labels_there = labels_in(text, labels)
    if not labels_there:
        return None
    last = labels_there[-1]
    if len({label for label, _, _ in labels_there}) == 1:
        return last[0]
    bare, _, _ = zip(*labels_there, strict=True)
    if _SAME_LINE.fullmatch(re.sub("|".join(map(re.escape, bare)), "", text.strip())):
        return None
    return last[0] if _NOTHING.fullmatch(text, last[2]) else None


def contradicts(text: str, labels: Sequence[str]) -> bool:
    """Whether a text has several labels, and gives none of them as its verdict."""
    return verdict_in(text, labels) is None and bool(labels_in(without_thoughts(text), labels))


def label_of(response: JSON, text: str, labels: Sequence[str]) -> str | None:
    """The label of a reply; None if it is complete and has none, or contradicts itself. Raises
    VerifierFailed: it is empty, or broke off before its verdict.
    """
    label, reason = verdict_in(text, labels), response.get("incomplete_details")
    if label is not None and reason and not _is_first_or_last(label, without_thoughts(text)):
        label = None  # of a thought, behind which another may have come
    if label is None:
        if reason:
            problem = f"the judge's reply broke off before its verdict: {reason}"
            raise VerifierFailed(problem) from BrokenReply()
        if not response.get("output"):
            raise VerifierFailed("the judge's reply is empty") from BrokenReply()
    return label


class BrokenReply(Exception):
    """The cause of a failure that the text of a policy can bring about: it made a model ramble past its
    limit, or say nothing (see `ask_within`).
    """


def _is_first_or_last(label: str, text: str) -> bool:
    start, end = text.find(label), text.rfind(label) + len(label)
    return _NOTHING.fullmatch(text, end) is not None or not text[:start].strip(" \n\t*_`'\"([{<#")


def _checked(response: JSON) -> Response:
    try:
        return Response.model_validate(response)
    except ValidationError as error:
        problem = problems_of(error, "reply")[0]
        raise VerifierFailed(f"the judge's reply is not a Response: {problem}") from None


def json_objects(text: str) -> Iterator[JSON]:
    """The JSON objects at the end of a reply, the last one first; those of its reasoning left out."""
    yield from reversed(list(_found(without_thoughts(text)[-_TAIL:])))


def _found(text: str) -> Iterator[JSON]:
    place = text.find("{")
    while place >= 0:
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
        else:
            yield value
        place = text.find("{", place)


V = TypeVar("V")
T = TypeVar("T")

Protocol = Literal["responses", "chat_completions", "pooling", "classify"]
"""How a judge is asked: for text, or for scores (vLLM's routes of pooling models)."""

_BUSY_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer(Generic[V]):
    """One call of a judge: its body, and the verdict of the reply, None if it gives none."""

    request: JSON
    response: JSON
    verdict: V | None

    def to_json(self) -> JSON:
        """The call as a verdict of the environment reports it."""
        call = {"responses_create_params": self.request, "response": self.response}
        return {**call, "verdict_label": self.verdict}


class JudgeCalls:
    """Calls judges, ``max_concurrency`` at a time. A server manages it (`Server.manage`)."""

    def __init__(self, max_concurrency: int | None, cache: VerdictCache | None = None) -> None:
        self._slots = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._cache = cache
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Nothing to do: the cache is open."""

    async def stop(self) -> None:
        if self._cache is not None:
            self._cache.close()

    async def ask(
        self,
        model: ModelClient,
        request: JSON,
        read: Callable[[JSON], V | None],
        *,
        protocol: Protocol = "responses",
        judge: int = 0,
        vote: int = 0,
    ) -> Answer[V]:
        """Make a call to a judge; ``read`` returns the verdict of a reply, or None. Raises VerifierFailed:
        the judge was too slow, or its reply is malformed, or (because of a `BadRequest`) it does not take the
        request; Overloaded, Unavailable: it is waited for as a policy is; OperatorError; AuthorError: the
        model's code is wrong.
        """
        if self._cache is None:
            return await self._asked(model, request, read, protocol)
        key = self._cache.key(judge, protocol, request, vote)
        # The rollouts of a group often ask the same question at the same time.
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            kept = await self._cache.get(key)
            with suppress(VerifierFailed):  # it has no verdict any more if the labels have changed
                if kept is not None and (verdict := read(kept)) is not None:
                    JUDGE_CALLS.add(name_of(model, "judge"), "cached")
                    return Answer(request, kept, verdict)
            answer = await self._asked(model, request, read, protocol)
            if answer.verdict is not None:
                await self._cache.put(key, answer.response)
            return answer

    async def _asked(
        self, model: ModelClient, request: JSON, read: Callable[[JSON], V | None], protocol: Protocol
    ) -> Answer[V]:
        outcome = "failed"
        try:
            async with self._slots:
                response = await _called(model, protocol, request)
            verdict = read(response)
            outcome = "no_verdict" if verdict is None else "verdict"
        finally:
            JUDGE_CALLS.add(name_of(model, "judge"), outcome)
        return Answer(request, response, verdict)


async def _called(model: ModelClient, protocol: Protocol, request: JSON) -> JSON:
    try:
        if protocol == "responses":
            answer: JSON = await model.responses(request)
        elif protocol == "chat_completions":
            answer = await model.chat_completions(request)
        else:
            answer = await model.fetch(protocol, request)
    except (AuthorError, OperatorError, Overloaded, Unavailable):
        raise
    except NotFound as error:
        raise EndpointMisconfigured(error.message, server=error.server) from None
    except GymError as error:
        # Also if retrying the call is useless: the response is sound and may be scored again later.
        message, wait = f"the judge failed: {error.message}", error.retry_after
        raise VerifierFailed(message, server=error.server, retry_after=wait) from error
    if is_overflow_answer(answer):
        refusal = BadRequest("the prompt does not fit its context")
        raise VerifierFailed(f"the judge failed: {refusal.message}") from refusal
    return answer


async def ask_within(ask: Callable[[int], Awaitable[T]], chars: int) -> T:
    """Ask a judge about a policy's text (``chars`` of it at first); about less of it if the judge refuses it
    or gives a `BrokenReply`, and at last about nothing. Else a policy could make a failure of its zero.
    Raises GymError: the judge failed for another reason, or does so without the text, too.
    """
    for limit in (chars, chars // 8, chars // 64):
        try:
            return await ask(limit)
        except GymError as error:
            if not isinstance(error.__cause__ or error, BadRequest | BrokenReply):
                raise
            logger.info("a judge gives no verdict on %d characters: %s", limit, error.message)
    return await ask(0)


class CacheSettings(BaseModel):
    """Settings of the cache."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
    """The SQLite file, on a local disk. It is created with its folder if missing, and grows without limit."""
    model: str = Field(min_length=1)
    """Name and version of the judge's model: part of the key, because the file outlives the graph."""


class VerdictCache:
    """Replies by request. Raises BadRequest: the file cannot be opened."""

    def __init__(self, settings: CacheSettings) -> None:
        self._model = settings.model
        self._lock = threading.Lock()
        try:
            settings.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                settings.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, reply BLOB)")
        except (OSError, sqlite3.Error) as error:
            raise BadRequest(f"cannot open the verdict cache {settings.path}: {error}") from None

    def key(self, judge: int, protocol: str, request: JSON, vote: int) -> bytes:
        """The key of a call: of a judge, for a repetition (``vote``)."""
        parts = [self._model, judge, protocol, request, vote]
        try:
            written = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # a lone surrogate, which models can produce, or an integer over 64 bits
            written = json.dumps(parts, sort_keys=True).encode()  # `exact_bytes` makes one of two surrogates
        return hashlib.sha256(written).digest()

    async def get(self, key: bytes) -> JSON | None:
        rows = await asyncio.to_thread(self._execute, "SELECT reply FROM replies WHERE key = ?", key)
        try:
            return orjson.loads(rows[0][0]) if rows else None
        except orjson.JSONDecodeError as error:
            logger.warning("the verdict cache holds an entry that is not JSON: %s", error)
            return None

    async def put(self, key: bytes, reply: JSON) -> None:
        insert = "INSERT OR REPLACE INTO replies VALUES (?, ?)"
        await asyncio.to_thread(self._execute, insert, key, orjson.dumps(reply))

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _execute(self, statement: str, *values: bytes) -> list[Any]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            logger.warning("the verdict cache failed: %s", error)
            return []
