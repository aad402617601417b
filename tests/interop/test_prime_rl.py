"""The env server for prime-rl, by its protocol. `make interop` holds verifiers' own client against it."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from support.bells import bell_graph, sample
from support.endpoint import endpoint
from support.eyes import PROMPT
from support.letters import Letters

from gym_serve import InvalidRequest
from gym_serve.interop.prime_rl import EnvServer, row_of

zmq = pytest.importorskip("zmq", reason="pip install 'gym-serve[prime-rl]'")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with endpoint(Letters(), sample) as url:
        yield url


class Client:
    """A client of one socket."""

    def __init__(self, address: str) -> None:
        import zmq.asyncio

        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.deltas: dict[bytes, list[Any]] = {}

    async def send(self, id_: str, method: str, **body: Any) -> None:
        await self.socket.send_multipart([id_.encode(), method.encode(), msgspec.msgpack.encode(body)])

    async def answer(self) -> tuple[str, Any]:
        """The next reply, with the deltas of its traces before it; verifiers before 0.4 has none of them."""
        while True:
            id_, *kinds, payload = await self.socket.recv_multipart()
            if not kinds:
                return id_.decode(), msgspec.msgpack.decode(payload)
            (kind,) = kinds
            decoded = msgspec.msgpack.decode(payload)
            if kind == b"reply":
                return id_.decode(), {**decoded, "deltas": self.deltas.pop(id_, [])}
            assert kind == b"delta"
            self.deltas.setdefault(id_, []).append(decoded)

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


@asynccontextmanager
async def serving(verifiers: Any = "0.4") -> AsyncIterator[Client]:
    server = EnvServer(bell_graph(), "tcp://127.0.0.1:0", verifiers=verifiers, attempts=1, ray=False)
    work = asyncio.ensure_future(server.serve())
    client = Client(server.address)
    try:
        yield client
    finally:
        client.close()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_runs_health_and_what_cannot_be_run(url: str) -> None:
    given = {"client": {"type": "eval", "base_url": url, "api_key_var": "NO_SUCH_KEY"}, "model": "policy"}
    sampling = {"temperature": 1.0, "max_tokens": 300, "top_k": 5, "top_p": None}
    async with serving() as client:
        await client.send("h", "health")
        assert await client.answer() == ("h", {"success": True, "error": None, "deltas": []})
        for word in ("ring", "refuse", "break"):
            await client.send(word, "run", task_data={"prompt": word}, sampling=sampling, **given)
        await client.send("none", "run", task_data={"idx": 3}, sampling={}, **given)
        await client.send("what", "dance")
        found = dict([await client.answer() for _ in range(5)])
    assert [found[word]["head"]["ok"] for word in ("ring", "refuse", "break")] == [True, True, False]
    (trace,) = found["ring"]["deltas"]
    sizes = {"id": trace["trace"], "nodes": len(trace["nodes"]), "calls": len(trace["calls"])}
    assert found["ring"]["traces"] == [sizes]
    assert trace["set"]["rewards"] == {"reward": {"score": 1.0}}
    sampled = [node for node in trace["nodes"] if node.get("sampled")]
    assert len(sampled) == 2
    assert all(len(node["logprobs"]) == sum(node["mask"]) > 0 for node in sampled)
    assert "the bell is broken" in str(found["break"]["deltas"][0]["errors"])
    assert not found["none"]["success"]
    assert "prompt" in found["none"]["error"]
    assert "dance" in found["what"]["error"]


async def test_what_a_trace_cannot_hold_is_refused(url: str) -> None:
    given = {"client": {"base_url": url, "api_key_var": "NO_SUCH_KEY"}, "model": "policy", "sampling": {}}
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    async with serving() as client:
        for part in (PROMPT, sound):
            task = {"prompt": [{"role": "user", "content": [part]}]}
            await client.send("r", "run", task_data=task, **given)
            _, answer = await client.answer()
            assert f"takes text only, got {part['type']}" in answer["error"]


async def test_verifiers_before_0_4_gets_an_episode_in_one_piece(url: str) -> None:
    given = {"client": {"base_url": url, "api_key_var": "NO_SUCH_KEY"}, "model": "policy", "sampling": {}}
    async with serving("0.3") as client:
        await client.send("h", "health")
        assert await client.answer() == ("h", {"success": True, "error": None})
        await client.send("r", "run", task_data={"prompt": "ring"}, **given)
        id_, answer = await client.answer()
    assert (id_, answer["success"]) == ("r", True)
    (trace,) = answer["episode"]["traces"]
    assert trace["rewards"] == {"reward": {"score": 1.0}}
    assert answer["episode"]["ok"]


async def test_a_trace_has_an_id_of_its_own_and_names_its_task_as_verifiers_does(url: str) -> None:
    given = {"client": {"base_url": url, "api_key_var": "NO_SUCH_KEY"}, "model": "policy", "sampling": {}}
    task = {"idx": 3, "id": None, "timeout": {"agent": None}, "row": {"prompt": "ring", "note": None}}
    async with serving("0.3") as client:
        for id_ in ("a", "b"):
            await client.send(id_, "run", task_data=task, **given)
        episodes = [(await client.answer())[1]["episode"] for _ in range(2)]
    ids = [each["id"] for episode in episodes for each in (episode, *episode["traces"])]
    assert len(set(ids)) == 4
    # What is None in verifiers' own keys is not set; what is in a user's is.
    named = b'{"idx": 3, "row": {"note": null, "prompt": "ring"}, "timeout": {}}'
    digest = hashlib.sha256(named).hexdigest()
    for episode in episodes:
        for each in (episode, *episode["traces"]):
            assert each["task"] == {"type": "Task", "data": task, "key": digest, "hash": digest}


async def test_a_run_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(prompt: list[int], sampling: dict[str, Any]) -> Any:
        loop.call_soon_threadsafe(asked.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        return sample(prompt, sampling)

    monkeypatch.setitem(os.environ, "POLICY_KEY", "a-key")
    with endpoint(Letters(), hang) as url:
        async with serving() as client:
            told = {"base_url": url, "api_key_var": "POLICY_KEY"}
            await client.send(
                "a", "run", task_data={"prompt": "ring"}, client=told, model="policy", sampling={}
            )
            await asked.wait()
            await client.send("b", "cancel", request_id="a")
            await client.send("c", "cancel", request_id="unknown")
            found = dict([await client.answer() for _ in range(3)])
            go.set()
    assert (found["a"]["success"], found["b"]["cancelled"], found["c"]["cancelled"]) == (False, True, False)


def test_the_row_of_a_task() -> None:
    assert row_of({"row": {"prompt": "x"}, "idx": 1}) == {"prompt": "x"}
    assert row_of({"prompt": "x", "idx": 1}) == {"prompt": "x", "idx": 1}
    with pytest.raises(InvalidRequest):
        row_of({"idx": 1})


def test_a_version_of_verifiers_that_nobody_knows() -> None:
    with pytest.raises(InvalidRequest, match=r"must be 0\.3 or 0\.4, got '0\.2'"):
        EnvServer(bell_graph(), verifiers="0.2", ray=False)  # type: ignore[arg-type]
