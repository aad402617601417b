"""`ModelEndpoint`: where the policy of one rollout answers, as a trainer says it (``_ng_model``).

The key is for the request to that endpoint and for nothing else. The object is therefore no JSON, so that no
writer of rows can store it by mistake; `public` is what may be stored, and its ``repr`` shows no more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

MODEL_FIELD = "_ng_model"  # of a row: where its model answers, ``{base_url, model?, api_key?, headers?}``

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
    def read(cls, given: Any, *, over_http: bool = False) -> ModelEndpoint:
        """Check what a row or a caller names. The message of an error repeats no value, which may be a
        key."""
        if isinstance(given, ModelEndpoint):
            return given
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"`{MODEL_FIELD}` must be an object, got {type(given).__name__}")
        if unknown := given.keys() - {"base_url", "model", "api_key", "headers"}:
            raise InvalidRequest(f"`{MODEL_FIELD}` has unknown keys ({len(unknown)}); it takes base_url, "
                                 "model, api_key and headers")  # fmt: skip
        url, model, key = str(given.get("base_url")), given.get("model"), given.get("api_key")
        headers = given.get("headers")
        if not _is_text(url) or not _URL.fullmatch(url):
            problem = "must be an http(s) URL without a user, a query or a fragment"
            raise InvalidRequest(f"`{MODEL_FIELD}.base_url` {problem}")
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


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _is_header(item: tuple[Any, Any]) -> bool:
    name, value = item
    named = _is_text(name) and bool(_HEADER.fullmatch(name)) and name.lower() not in _OF_THE_CONNECTION
    return named and _is_text(value) and bool(_VALUE.fullmatch(value))
