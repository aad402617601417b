"""`EndpointConfig`: the settings of every model behind HTTP endpoints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StringConstraints

from gym_serve.servers import ModelServer

__all__ = ["EndpointConfig", "Urls"]

# Neither a query, which would swallow the path, nor credentials, which belong into headers.
_Url = Annotated[
    str,
    StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"),
    AfterValidator(lambda url: url.rstrip("/")),
]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Urls = Annotated[list[_Url], BeforeValidator(_as_list), Field(min_length=1)]
"""One base URL, or a list of them."""


class EndpointConfig(ModelServer.Config):
    """Settings of the endpoints."""

    base_url: Urls
    """The endpoint, e.g. ``http://host:8000/v1``, or a list of them: the calls of one episode
    go to one of them, and to another when it is gone."""
    model: str
    """Name of the model at the endpoint; it replaces the request's."""
    api_key: SecretStr = SecretStr("EMPTY")
    """The key of the API, sent as a bearer token."""
    api_key_header: str = Field("Authorization", pattern=r"^[A-Za-z0-9-]+$")
    """The header that carries the key; one of another name has the key alone, without ``Bearer``
    (Azure's is ``api-key``)."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Further headers of every request."""
    query: dict[str, str] = Field(default_factory=dict)
    """Query of every request, e.g. Azure's ``{api-version: 2024-10-21}``. A key has its place in ``api_key``
    or ``headers``: what is here is shown."""
    timeout: float = Field(600.0, gt=0)
    """Seconds for one call, its retries included."""
    max_retries: int = Field(3, ge=0)
    """Further attempts after a 429, a 5xx or a broken connection."""
    max_answer_mb: int = Field(256, ge=1)
    """Megabytes of an answer at most, tokens and log-probabilities included. Who sends more is broken, and
    that is a failure: so set it above what the model can write, which is 1 KB a token at most, times
    1 + ``top_logprobs``."""
    hedge_after: float | None = Field(None, gt=0)
    """Seconds after which a call that has no answer is made at another endpoint as well; the first answer
    counts. By default no call is made twice."""
    health_interval: float | None = Field(None, gt=0)
    """Seconds between two looks at each endpoint (``GET {base_url}/models``), so that no call has to find
    out that it is gone. By default a call finds out, and goes to another one."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Limit of each endpoint: further calls wait. Each replica of this server counts for itself: with
    ``num_replicas: n``, give an n-th of what the endpoint allows."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Likewise for tokens, prompt and answer together."""
