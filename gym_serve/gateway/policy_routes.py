"""``/{model}/policy/...``: how a trainer that reaches a graph over HTTP steers its policy (docs/http.md).

Whoever may send them decides where the graph sends its prompts and its key. So a graph without a token
refuses those that change something. So does a graph without Ray, whose trainer is its own process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from gym_serve.gateway import wire
from gym_serve.gateway.host import Host, Steering
from gym_serve.servers.model import VERSION, HoldMode
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.errors import BadRequest, Forbidden, NotFound
from gym_serve.types.exact import exact_json
from gym_serve.types.requests import JSON, parse

POLICY = "policy/"
"""Begins the operations."""

_Url = Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", max_length=8192)]
_Text = Annotated[str, Field(min_length=1, max_length=8192)]


_FORM = ConfigDict(extra="forbid", strict=True)


class PauseBody(BaseModel):
    """The body of ``/policy/pause``; see `Policy.pause`."""

    model_config = _FORM

    mode: HoldMode = "keep"


class VersionBody(BaseModel):
    """The body of ``/policy/version``."""

    model_config = _FORM

    version: _Text = Field(description="Name of the weights, which further calls carry.")


class EndpointsBody(BaseModel):
    """The body of ``/policy/endpoints``; see `Policy.set_endpoints`."""

    model_config = _FORM

    base_urls: list[_Url] = Field(min_length=1, max_length=1024, description="The new endpoints.")
    model: _Text | None = Field(None, description="The new name of the model there; the old one if left out.")
    version: _Text | None = Field(None, description="Name of the weights there; the old one if left out.")


class NoBody(BaseModel):
    """The body of ``/policy/resume``: empty."""

    model_config = _FORM


BODIES: Mapping[str, type[BaseModel]] = {
    f"{POLICY}pause": PauseBody,
    f"{POLICY}resume": NoBody,
    f"{POLICY}version": VersionBody,
    f"{POLICY}endpoints": EndpointsBody,
}
"""The bodies of those that change something, by operation."""


async def steer(
    request: Request,
    model: str,
    op: str,
    *,
    transport: Transport,
    host: Host,
    settings: Mapping[str, Any],
    secured: bool,
    limit: int,
) -> Response:
    """Answer a request.

    Args:
        settings: those of the model, as ``/graph`` shows them.
        secured: whether the graph has a token.
        limit: the most bytes of a body.

    Raises:
        NotFound: there is no such operation, or it changes something and the graph runs without Ray.
        Forbidden: the graph has no token.
        GymError: it is refused, or a replica did not answer.
    """
    if op not in BODIES:
        raise NotFound(f"{model} has no route /{op[:100]}; it has {', '.join(BODIES)}")
    methods = ("GET", "POST") if op == f"{POLICY}version" else ("POST",)
    if wrong := wire.wrong_method(request, *methods):
        return wrong
    if request.method != "POST":
        state: JSON = (await transport.call(Call(VERSION))).json()
        if (updates := await host.updates(model)) is not None:
            state["updates"] = updates
        return wire.answer(Reply.of(state))
    if not secured:
        raise Forbidden(
            f"{op} needs a graph with a token, as whoever sends it decides what the policy is; "
            'give the graph one (auth_token: "${GYM_TOKEN}")'
        )
    policy = host.steering(model)
    body = await wire.body_of(request, limit)
    try:
        content = exact_json(body) if body else {}
    except ValueError as error:
        raise BadRequest(f"the body must be JSON: {error}") from None
    wanted: Any = parse(TypeAdapter(BODIES[op]), content, "body")
    if isinstance(wanted, PauseBody):
        await policy.hold(wanted.mode)
    elif isinstance(wanted, VersionBody):
        await policy.set_version(wanted.version)
    elif isinstance(wanted, EndpointsBody):
        await _move(policy, model, settings, wanted)
    else:
        await policy.release()
    return wire.answer(Reply.of({}))


async def _move(policy: Steering, model: str, settings: Mapping[str, Any], wanted: EndpointsBody) -> None:
    if "base_url" not in settings:
        raise BadRequest(f"{model} ({settings.get('type')}) has no endpoints that could be moved")
    urls = wanted.base_urls
    changes: JSON = {"base_url": urls if len(urls) > 1 else urls[0]}
    if wanted.model is not None:
        changes["model"] = wanted.model
    await policy.change(changes)
    if wanted.version is not None:
        await policy.set_version(wanted.version)
