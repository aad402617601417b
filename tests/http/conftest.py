"""One graph for the tests over HTTP, in this process or on a cluster, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from support.http_servers import GRAPH, SECRET
from support.in_process import serving

from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Its address in this process; modules about a cluster have another one of this name."""
    with serving(lambda url: {"/web": resolve(GraphSpec.model_validate(GRAPH))}, watched=True) as url:
        yield f"{url}/web"


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """A client that keeps no cookies between tests."""
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def told(url: str) -> Iterator[openai.OpenAI]:
    """The official client, pointed at the model that does what it is told."""
    with openai.OpenAI(base_url=f"{url}/told/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def failure() -> Callable[[httpx.Response], dict[str, Any]]:
    """Checks the form of a failure, and gives what is in it."""

    def read(answer: httpx.Response) -> dict[str, Any]:
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert error["message"]
        assert SECRET not in answer.text
        assert isinstance(error["retryable"], bool)
        return {"status": answer.status_code, **error}

    return read
