"""Connections between replicas where Ray runs with TLS: a real CA, real sockets, and a real Ray."""

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
import trustme
from support.no_parts import no_parts
from support.processes import RAY_TOKEN

from gym_serve.cluster.routing.rpc import Address, Channel, ConnectTimeoutError, Listener
from gym_serve.cluster.routing.rpc import network as tls_module
from gym_serve.servers.transport import Call, Reply

ROOT = Path(__file__).parents[2]
HERE = "127.0.0.1"

Certify = Callable[..., dict[str, str]]


async def echo(call: Call) -> Reply:
    return Reply(200, call.body, call.session)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certify(authority: trustme.CA, tmp_path: Path) -> Certify:
    """Ray's settings for a certificate: ``certify(*names, of=CA) -> variables``."""
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())

    def variables(*names: str, of: trustme.CA = authority) -> dict[str, str]:
        made = of.issue_cert(*names)
        made.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
        with (tmp_path / "certificate.pem").open("wb") as file:
            file.writelines(blob.bytes() for blob in made.cert_chain_pems)
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(tmp_path / "certificate.pem"),
            "RAY_TLS_SERVER_KEY": str(tmp_path / "key.pem"),
            "RAY_TLS_CA_CERT": str(tmp_path / "ca.pem"),
        }

    return variables


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Make settings those of this process from now on."""

    def use(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        tls_module._context.cache_clear()

    yield use
    tls_module._context.cache_clear()


async def test_calls_are_encrypted(certify: Certify, use: Callable[..., None]) -> None:
    use(certify(HERE))
    listener = Listener(echo, no_parts, lambda: 0)
    address = await listener.start(HERE)
    channel = await Channel.open(address)
    body = b"x" * 5_000_000
    replies = await asyncio.gather(*(channel.call(Call("op", body)) for _ in range(5)))
    assert [reply.body for reply in replies] == [body] * 5
    assert channel._socket.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
    await channel.close()
    await listener.stop()


async def test_a_plain_connection_is_refused(
    certify: Certify, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(certify(HERE))
    listener = Listener(echo, no_parts, lambda: 0)
    address = await listener.start(HERE)
    monkeypatch.setenv("RAY_USE_TLS", "0")
    with pytest.raises(ConnectTimeoutError):
        await Channel.open(address)
    await listener.stop()


@pytest.mark.parametrize("whose", ["none", "another CA's"])
async def test_a_caller_needs_a_certificate_of_the_cluster(
    certify: Certify, use: Callable[..., None], authority: trustme.CA, whose: str
) -> None:
    """The token alone is not enough."""
    use(certify(HERE))
    listener = Listener(echo, no_parts, lambda: 0)
    address = await listener.start(HERE)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if whose != "none":
        trustme.CA().issue_cert(HERE).configure_cert(context)
    async with aiohttp.ClientSession() as client:
        with pytest.raises((aiohttp.ClientError, OSError)):
            await client.ws_connect(
                f"wss://{HERE}:{address.port}/",
                headers={"authorization": f"Bearer {address.token}"},
                ssl=context,
            )
    await listener.stop()


@pytest.mark.parametrize(
    ("names", "foreign"), [((HERE,), True), (("10.1.2.3",), False)], ids=["another CA's", "another node's"]
)
async def test_a_replica_that_is_another_is_not_called(
    certify: Certify, use: Callable[..., None], names: tuple[str, ...], foreign: bool
) -> None:
    other = trustme.CA() if foreign else None
    impostor = certify(*names, of=other) if other else certify(*names)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(impostor["RAY_TLS_SERVER_CERT"], impostor["RAY_TLS_SERVER_KEY"])
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            heard.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(listen, HERE, 0, ssl=context)
    use(certify(HERE))
    with pytest.raises(ConnectTimeoutError, match="certificate verify failed"):
        await Channel.open(Address(HERE, server.sockets[0].getsockname()[1], "the-token"))
    server.close()
    await server.wait_closed()
    assert b"the-token" not in b"".join(heard)


async def test_a_certificate_that_others_would_refuse_is_told_at_the_start(
    certify: Certify, use: Callable[..., None]
) -> None:
    use(certify("node.example"))
    listener = Listener(echo, no_parts, lambda: 0)
    with pytest.raises(
        ConnectionError, match=r"must be signed by .*ca.pem and name the IP address 127.0.0.1"
    ):
        await listener.start(HERE)
    await listener.stop()


SCRIPT = """
import asyncio, json, sys
import aiohttp, ray
from gym_serve import Gym
from gym_serve.cluster.routing.rpc import Directory

async def plain(address):
    async with aiohttp.ClientSession() as client:
        try:
            await client.ws_connect(f"ws://{address.host}:{address.port}/",
                                    headers={"authorization": f"Bearer {address.token}"})
        except aiohttp.ClientError as error:
            return type(error).__name__

with Gym.from_graph("graphs/weather.yaml") as gym:
    rollouts = list(gym.run("environments/simple_weather/data/example.jsonl", limit=3))
    refused = {}
    for server in ("weather", "policy", "weather_agent"):
        (address,) = asyncio.run(Directory(gym.name, server).all()).values()
        refused[server] = asyncio.run(plain(address))
print(json.dumps({"rewards": [r["reward"] for r in rollouts], "refused": refused}))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rollouts_on_a_ray_with_tls(certify: Certify, tmp_path: Path) -> None:
    variables = certify(HERE, "localhost", *_addresses_of_this_machine())
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "POLICY_"))}
    env |= {**variables, **RAY_TOKEN}
    if "RAY_TMPDIR" in os.environ:
        env["RAY_TMPDIR"] = os.environ["RAY_TMPDIR"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["rewards"] == [1.0] * 3
    assert set(told["refused"]) == {"weather", "policy", "weather_agent"}
    assert None not in told["refused"].values()


def _addresses_of_this_machine() -> set[str]:
    import ray.util

    return {ray.util.get_node_ip_address()}
