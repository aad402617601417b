"""Servers of each kind for tests of the graph file: settings of many forms, no behaviour."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr, field_validator

from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph, GraphSpec
from gym_serve.servers import (
    AgentClient,
    AgentServer,
    ModelClient,
    ModelServer,
    ResourcesServer,
    Verdict,
    VerifyRequest,
)
from gym_serve.types.errors import GraphError


class Login(BaseModel):
    """A setting with a secret inside."""

    user: str
    password: SecretStr


class FakeModel(ModelServer):
    class Config(ModelServer.Config):
        base_url: str = "http://localhost"
        model: str
        api_key: SecretStr | None = None
        headers: dict[str, SecretStr] = Field(default_factory=dict)
        logins: list[Login] = Field(default_factory=list)
        temperature: float = Field(1.0, ge=0)

        @field_validator("model")
        @classmethod
        def _no_spaces(cls, model: str) -> str:
            if " " in model:
                raise ValueError(f"no spaces in {model}")
            return model

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}


class FakeEnvironment(ResourcesServer):
    class Config(ResourcesServer.Config):
        judge: ModelClient | None = None
        judges: list[ModelClient] = Field(default_factory=list)
        panel: dict[str, ModelClient] = Field(default_factory=dict)

    async def verify(self, request: VerifyRequest, session: Any) -> Verdict:
        return Verdict(reward=0.0)


class FakeAgent(AgentServer):
    class Config(AgentServer.Config):
        max_steps: int = 8
        critic: ModelClient | AgentClient | None = None

    async def act(self, episode: Any) -> None: ...


class Unsure(ModelServer):
    """Its validator breaks on any setting."""

    class Config(ModelServer.Config):
        model: str

        @field_validator("model")
        @classmethod
        def _break(cls, model: str) -> str:
            raise KeyError(model)

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}


def graph(**changes: Any) -> dict[str, Any]:
    """A sound graph: one policy, one environment, one agent."""
    return {
        "models": {"policy": {"type": FakeModel, "model": "m"}},
        "resources": {"math": {"type": FakeEnvironment}},
        "agents": {"math_agent": {"type": FakeAgent, "model": "policy", "resources": "math"}},
        **changes,
    }


def with_policy(**settings: Any) -> dict[str, Any]:
    """A sound graph but for further settings of its policy."""
    return graph(models={"policy": {"type": FakeModel, "model": "m", **settings}})


def resolved(content: dict[str, Any], **options: Any) -> Graph:
    """The graph of ``content``, without variables by default."""
    return resolve(GraphSpec(**content), **{"env": {}, **options})


def problems(content: dict[str, Any], **options: Any) -> list[str]:
    """What is wrong with ``content``."""
    with pytest.raises(GraphError) as caught:
        resolved(content, **options)
    return caught.value.problems


class WithVariable(FakeModel):
    """Says what it sees of its environment."""

    @classmethod
    def preflight(cls, config: Any) -> Iterator[str]:
        yield f"GS_PREFLIGHT is {os.environ.get('GS_PREFLIGHT')!r}"
