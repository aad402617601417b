"""prime-rl (0.8): an env server on its ZMQ protocol, for any graph.

    python -m gym_serve.interop.prime_rl graphs/weather.yaml --address tcp://127.0.0.1:5000

It answers ``run``, ``health`` and ``cancel``, frames of request id, method and MessagePack, as the env server
of verifiers does. A run brings its task, which is a row, and the client of the model. A rollout that failed
is an episode that is not ``ok``. Episodes and traces name the task by verifiers' key and hash, which prime-rl
checks. Traces have no form for what a model is given for a picture: rows and rollouts with pictures or sound
are refused. What an answer is depends on the verifiers that prime-rl has, which a request does not tell:

- 0.3 (prime-rl 0.8): the frames request id and MessagePack, with the whole episode.
- 0.4: the frames request id, ``reply`` and MessagePack. Before it, each trace is sent as one ``delta``; the
  reply has the rest of the episode, and the size of each trace.

Source: verifiers 0.3 and 0.4, ``v1/serve/{types,client,server,delta}.py``, ``v1/configs/client.py`` and
``v1/task.py``; prime-rl at 559b447, ``orchestrator/dispatcher.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args
from uuid import uuid4

import msgspec

from gym_serve.client.gym import AsyncGym, Gym
from gym_serve.interop.export.traces import verifiers_episode
from gym_serve.training.episodes import endpoints_of, refuse_unseen
from gym_serve.training.rollout import Rollout
from gym_serve.types import rows
from gym_serve.types.errors import InvalidRequest, WaitTooLong
from gym_serve.types.requests import JSON
from gym_serve.types.rows import failed_rollout, with_prompt

__all__ = ["EnvServer", "main"]

logger = logging.getLogger("gym_serve")

Version = Literal["0.3", "0.4"]

_HEADER = ("version", "id", "verifiers", "task")
_LISTS = ("nodes", "calls", "errors", "extra_usage")
_MODELS = ("prompt", "skills", "artifacts", "timeout", "resources")
"""The keys of a task's data whose values are models of verifiers; a user's own keep what is None in them."""
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"}


class EnvServer:
    """Serves a graph to prime-rl at ``tcp://host:port``, in the protocol of a version of ``verifiers``. A
    rollout is tried ``attempts`` times if its failure is worth it; ``options`` are `Gym.from_graph`'s. Raises
    InvalidRequest: there is no such version; GraphError: the graph has problems, or no model that an agent
    names.
    """

    def __init__(
        self,
        graph: Any,
        address: str = "tcp://127.0.0.1:5000",
        *,
        verifiers: Version = "0.4",
        overrides: Mapping[str, Any] | None = None,
        attempts: int = 3,
        **options: Any,
    ) -> None:
        try:
            import zmq
            import zmq.asyncio
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"the env server for prime-rl needs {error.name}: pip install 'gym-serve[prime-rl]'",
                name=error.name,
            ) from error
        if verifiers not in get_args(Version):
            raise InvalidRequest(f"`verifiers` must be {' or '.join(get_args(Version))}, got {verifiers!r}")
        replaced = endpoints_of(graph, overrides or {}, return_token_ids=True)
        self._gym = Gym.from_graph(graph, overrides=replaced, **options)
        self._attempts = attempts
        self._with_deltas = verifiers == "0.4"
        self._running: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def serve(self) -> None:
        """Answer, until cancelled; then all runs are cancelled, and the graph is stopped."""
        try:
            while True:
                frames = await self._socket.recv_multipart()
                if len(frames) != 4:
                    logger.warning("a message of prime-rl must have 4 frames, got %d", len(frames))
                    continue
                client, request, method, payload = frames
                work = asyncio.ensure_future(self._answer(client, request, method, payload))
                if method == b"run":
                    self._running[client, request] = work
                    key = (client, request)
                    work.add_done_callback(partial(lambda key, _: self._running.pop(key, None), key))
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._socket.close()
            self._context.term()
            await asyncio.to_thread(self._gym.shutdown)

    async def _answer(self, client: bytes, request: bytes, method: bytes, payload: bytes) -> None:
        answer: JSON = {"success": True, "error": None}
        try:
            body = msgspec.msgpack.decode(payload)
            if method == b"run":
                episode = await self._run(body)
                if self._with_deltas:
                    answer |= await self._send_deltas(client, request, episode)
                else:
                    answer["episode"] = episode
            elif method == b"cancel":
                run = self._running.get((client, str(body.get("request_id")).encode()))
                answer["cancelled"] = run is not None and run.cancel()
            elif method != b"health":
                raise InvalidRequest(f"unknown method {method[:40]!r}; there are run, health and cancel")
        except asyncio.CancelledError:
            answer = {"success": False, "error": "the run was cancelled"}
        except Exception as error:  # of one request: the others go on
            logger.warning("a request of prime-rl failed: %s", error)
            answer = {"success": False, "error": f"{type(error).__name__}: {error}"}
        kind = [b"reply"] if self._with_deltas else []
        await self._socket.send_multipart([client, request, *kind, msgspec.msgpack.encode(answer)])

    async def _send_deltas(self, client: bytes, request: bytes, episode: JSON) -> JSON:
        traces = episode.pop("traces")
        for trace in traces:
            delta = msgspec.msgpack.encode(_delta(trace))
            await self._socket.send_multipart([client, request, b"delta", delta])
        sizes = [{"id": t["id"], "nodes": len(t["nodes"]), "calls": len(t["calls"])} for t in traces]
        return {"head": episode, "traces": sizes}

    async def _run(self, body: Any) -> JSON:
        if not isinstance(body, dict) or not isinstance(body.get("task_data"), dict):
            raise InvalidRequest("`task_data` must be an object")
        client, sampling = body.get("client") or {}, body.get("sampling") or {}
        endpoint = {"base_url": client.get("base_url"), "model": body.get("model")}
        endpoint["headers"] = client.get("headers") or {}
        if key := os.environ.get(str(client.get("api_key_var"))):
            endpoint["api_key"] = key
        sampling = {key: value for key, value in sampling.items() if value is not None}
        params = {name: sampling.pop(key) for key, name in _SAMPLING.items() if key in sampling}
        row = row_of(body["task_data"])
        refuse_unseen(row, sees=False)
        if sampling:
            row["extra_body"] = {**(row.get("extra_body") or {}), **sampling}
        try:
            (rollout,) = await AsyncGym.of(self._gym).run(
                [row], endpoint=endpoint, params=params, attempts=self._attempts, max_failures=1
            )
        except WaitTooLong as error:  # prime-rl decides about what fails; one rollout does not end its run
            rollout = rows.Rollout(failed_rollout(with_prompt(row), error))
        if rollout.failure is None and await AsyncGym.of(self._gym).compares(rollout):
            single = "and prime-rl asks for single ones"
            raise InvalidRequest(f"the environment rewards groups of rollouts, {single}")
        refuse_unseen(rollout, sees=False)
        episode = verifiers_episode(Rollout.read(dict(rollout)))
        for record in (episode, *episode["traces"]):
            record["id"] = uuid4().hex  # of all rollouts of all servers: prime-rl tells traces apart by it
            record["task"] = _dispatched(body["task_data"])
        return episode


def _dispatched(data: JSON) -> JSON:
    """The task of a run, named as verifiers names it: by a hash of its data, without what is not set."""
    present = {key: value for key, value in data.items() if value is not None}
    settled = {key: _set(value) if key in _MODELS else value for key, value in present.items()}
    name = hashlib.sha256(json.dumps(settled, sort_keys=True).encode()).hexdigest()
    return {"type": "Task", "data": data, "key": name, "hash": name}


def _set(value: Any) -> Any:
    """A value of verifiers' own models without the keys that are None."""
    if isinstance(value, dict):
        return {key: _set(each) for key, each in value.items() if each is not None}
    return [_set(each) for each in value] if isinstance(value, list) else value


def _delta(trace: JSON) -> JSON:
    """A whole trace as the only delta of it."""
    return {
        "trace": trace["id"],
        "open": {key: trace[key] for key in _HEADER},
        **{key: trace[key] for key in _LISTS},
        "set": {key: value for key, value in trace.items() if key not in (*_HEADER, *_LISTS)},
    }


def row_of(task: Mapping[str, Any]) -> JSON:
    """The row of a task: its ``row``, else its own keys. Raises InvalidRequest: it has no prompt."""
    row = task.get("row")
    fields = dict(row if isinstance(row, dict) else task)
    if "responses_create_params" not in fields and not fields.get("prompt"):
        raise InvalidRequest("`task_data` must be a row, and has no `prompt` or `responses_create_params`")
    return fields


def main() -> None:
    """Serve a graph file, until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m gym_serve.interop.prime_rl", description=__doc__)
    parser.add_argument("graph", help="a graph file")
    parser.add_argument("--address", default="tcp://127.0.0.1:5000", help="where to listen")
    versions = get_args(Version)
    parser.add_argument("--verifiers", choices=versions, default="0.4", help="the version of prime-rl's")
    parser.add_argument("--no-ray", action="store_true", help="run the graph in this process")
    arguments = parser.parse_args()

    async def serve() -> None:
        server = EnvServer(
            arguments.graph, arguments.address, verifiers=arguments.verifiers, ray=not arguments.no_ray
        )
        print(f"env server at {server.address}", flush=True)
        await server.serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
