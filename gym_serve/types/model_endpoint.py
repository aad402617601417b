"""`ModelEndpoint`: where the policy of one rollout answers, as a trainer says it (``_ng_model``).

The key is for the request to that endpoint and for nothing else. The object is therefore no JSON, so that no
writer of rows can store it by mistake; `public` is what may be stored, and its ``repr`` shows no more.

What crosses between a `callback_model` and the trainer that generates for it: tokens in, tokens out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from gym_serve.types.errors import InvalidRequest
from gym_serve.types.protocols.tokens import TOKEN_KEYS, tokens_problem
from gym_serve.types.requests import JSON

MODEL_FIELD = "_ng_model"  # of a row: where its model answers, ``{base_url, model?, api_key?, headers?}``

NO_ADDRESS = "must be an http(s) URL with a host, and without a user, a query or a fragment"
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_HEADER = re.compile(r"[A-Za-z0-9-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_OF_THE_CONNECTION = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection"})
_SHORTEST_SECRET = 8  # characters; a key such as EMPTY, or a header with a number, may stand in any text
_LONGEST = 8192  # characters of one text: more is no address, and no key


class ModelEndpoint(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """An endpoint that speaks the protocol of the model server which it replaces.

    ``over_http``: a client of the gateway named it, and not the process that runs the rollouts.
    """

    base_url: str
    model: str | None = None  # name of the model there; None for that of the model server
    api_key: str = ""  # sent as a bearer token; empty for none
    headers: dict[str, str] = {}  # msgspec copies it
    over_http: bool = False

    def __repr__(self) -> str:
        return f"ModelEndpoint({self.base_url!r}, model={self.model!r})"

    @property
    def secrets(self) -> list[str]:
        """What is taken out of messages: the key and the values of headers, if they are no short words."""
        return [text for text in (self.api_key, *self.headers.values()) if len(text) >= _SHORTEST_SECRET]

    @property
    def public(self) -> JSON:
        """What a row or a rollout keeps of it: no key, no headers."""
        return {"base_url": self.base_url, **({"model": self.model} if self.model else {})}

    @property
    def complete(self) -> JSON:
        """All of it, for a request to another graph or agent."""
        return {**self.public, "api_key": self.api_key, "headers": self.headers}

    @classmethod
    def read(cls, value: Any, *, over_http: bool = False) -> ModelEndpoint:
        """Check what a row or a caller names. The message of an error repeats no value, which may be a
        key."""
        if isinstance(value, ModelEndpoint):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"`{MODEL_FIELD}` must be an object, got {type(value).__name__}")
        if unknown := value.keys() - {"base_url", "model", "api_key", "headers"}:
            raise InvalidRequest(f"`{MODEL_FIELD}` has unknown keys ({len(unknown)}); it takes base_url, "
                                 "model, api_key and headers")  # fmt: skip
        url, model, key = str(value.get("base_url")), value.get("model"), value.get("api_key")
        headers = value.get("headers")
        if not _is_text(url) or not is_address(url):
            raise InvalidRequest(f"`{MODEL_FIELD}.base_url` {NO_ADDRESS}")
        if model is not None and not (_is_text(model) and model):
            raise InvalidRequest(f"`{MODEL_FIELD}.model` must be a name, got {type(model).__name__}")
        if key is not None and not (_is_text(key) and _VALUE.fullmatch(key)):
            raise InvalidRequest(f"`{MODEL_FIELD}.api_key` must be a string of printable ASCII characters")
        if not isinstance(headers, Mapping | None) or not all(map(_is_header, (headers or {}).items())):
            problem = "must be an object of strings, and sets no header of the connection"
            raise InvalidRequest(f"`{MODEL_FIELD}.headers` {problem}")
        return cls(url.rstrip("/"), model, key or "", dict(headers or {}), over_http)


def endpoint_of(row: Mapping[str, Any], *, over_http: bool = False) -> ModelEndpoint | None:
    """The endpoint that a row names; None if it names none. Raises as `ModelEndpoint.read`."""
    endpoint = row.get(MODEL_FIELD)
    return None if endpoint is None else ModelEndpoint.read(endpoint, over_http=over_http)


def public_row(row: JSON) -> JSON:
    """A row as it may be written and shown: its endpoint without key and headers."""
    endpoint = row.get(MODEL_FIELD)
    if endpoint is None:
        return row
    try:
        public = ModelEndpoint.read(endpoint).public
    except InvalidRequest:
        public = {}
    return {**row, MODEL_FIELD: public}


def is_address(url: str) -> bool:
    """Whether a text is the base of an API's URLs: with a host and a port that may exist; without a query,
    which would swallow the path, and without credentials, which belong into headers."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        return bool(_URL.fullmatch(url) and parts.hostname and parts.port != 0)  # a ValueError of any other
    except ValueError:
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _is_header(item: tuple[Any, Any]) -> bool:
    name, value = item
    named = _is_text(name) and bool(_HEADER.fullmatch(name)) and name.lower() not in _OF_THE_CONNECTION
    return named and _is_text(value) and bool(_VALUE.fullmatch(value))


@dataclass(frozen=True)
class PolicyRequest:
    """One generation that the policy is asked for."""

    prompt_ids: list[int]
    """Tokens of the prompt. A later turn of an episode begins with exactly the tokens of the turns before."""
    sampling: JSON
    """``max_tokens``, ``temperature``, ``top_p``, ``stop``, ``seed`` and the like, as far as the row and the
    model server say them, with the names of vLLM's sampling parameters."""
    episode: str | None = None
    """The same for all requests of an episode, to find the engine that has its prefix cached."""
    id: str = ""
    """Names the request."""
    pictures: Sequence[str] = ()
    """The pictures of the prompt as data URLs, in their order; its tokens have the place of each, as wide as
    the model's processor makes it."""


@dataclass(frozen=True)
class PolicyAnswer:
    """The generation of the policy for one request.

    Raises:
        InvalidRequest: the lengths differ, or a value is no token id or no log-probability.
    """

    token_ids: Sequence[int]
    """The tokens, including the one that ends the turn."""
    logprobs: Sequence[float]
    """The natural-log probability of each, of the distribution that it was drawn from."""
    finish_reason: Literal["stop", "length"] = "stop"
    """Whether the model ended its turn, or was cut off."""
    versions: str | Sequence[str] | None = None
    """Version of the weights: one for all tokens, or one for each; None for the model server's."""

    def __post_init__(self) -> None:
        bundle = dict(zip(TOKEN_KEYS, ([], list(self.token_ids), list(self.logprobs)), strict=True))
        if problem := tokens_problem(bundle):
            raise InvalidRequest(f"a policy's answer must have matching tokens: {problem}")
        if self.finish_reason not in ("stop", "length"):
            raise InvalidRequest(f"`finish_reason` must be stop or length, got {self.finish_reason!r:.40}")
        if not isinstance(self.versions, str | None) and len(self.versions) != len(self.token_ids):
            raise InvalidRequest(
                f"`versions` must be one, or one for each of {len(self.token_ids)} tokens, "
                f"got {len(self.versions)}"
            )

    @property
    def spans(self) -> list[JSON] | None:
        """`versions` as ``[{version, start, end}]``; None where it has none."""
        if self.versions is None or not self.token_ids:
            return None
        each: Any = [self.versions] * len(self.token_ids) if isinstance(self.versions, str) else self.versions
        spans: list[JSON] = []
        for at, version in enumerate(each):
            if spans and spans[-1]["version"] == str(version):
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": str(version), "start": at, "end": at + 1})
        return spans
