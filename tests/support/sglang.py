"""A server that speaks the part of SGLang's native protocol that `sglang_model` uses.

SGLang itself needs a GPU. The routes, fields and errors are those of its source (http_server.py,
tokenizer_manager.py, weight_versions.py and sampling_params.py, November 2026); tokens come from a model that
really samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from aiohttp import web

from support.threaded import ThreadedServer

Draws = Callable[[Sequence[int], np.random.Generator, float], Iterator[tuple[int, float]]]
"""Tokens after a prompt, each with its log-probability at a temperature."""

_KNOWN = frozenset(
    {"max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema"}
    | {"regex", "ebnf", "structural_tag", "ignore_eos", "logit_bias", "sampling_seed"}
)


class SglangServer(ThreadedServer):
    """An engine on loopback, in a thread of its own.

    Args:
        draws: what generates.
        end: the token that ends a turn.
        context: most tokens of a prompt and its generation.

    Attributes:
        version: of the weights. `update` sets it; until then it is ``default``, as in SGLang.
        requests: bodies of ``/generate``.
        headers: their headers.
        aborted: the ids that ``/abort_request`` named.
        broken: answers that take the place of the next ones: a status and a body.
        steps: tokens that may be generated before each further one waits for `step`; None for no limit.
    """

    def __init__(self, draws: Draws, end: int, context: int = 10_000) -> None:
        routes = {"/generate": self._generate, "/abort_request": self._abort}
        super().__init__(routes, shutdown_timeout=1.0)
        self._draws, self._end, self._context = draws, end, context
        self.version = "default"
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.aborted: list[str] = []
        self.broken: list[tuple[int, Any]] = []
        self.steps: int | None = None
        self._running: dict[str, asyncio.Event] = {}
        self._seeds = count(1)  # one generator per request: its draws are not those of who comes first

    @property
    def running(self) -> int:
        """Generations under way."""
        return len(self._running)

    def abort_all(self) -> None:
        """What ``/pause_generation`` and ``/update_weight_version`` do by default."""
        for event in list(self._running.values()):
            self._loop.call_soon_threadsafe(event.set)

    async def _stop(self) -> None:
        self.abort_all()
        await super()._stop()

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self._running:
            self._running[rid].set()
        return web.Response(status=200)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers)
        if self.broken:
            status, said = self.broken.pop(0)
            return web.json_response(said, status=status)
        params, prompt, rid = body["sampling_params"], body["input_ids"], body["rid"]
        if refused := self._refused(params, prompt, rid):
            return web.json_response({"error": {"message": refused}}, status=400)
        return web.json_response(await self._answer(rid, prompt, params))

    def _refused(self, params: dict[str, Any], prompt: list[int], rid: str) -> str | None:
        if unknown := params.keys() - _KNOWN:
            return f"Unexpected keyword argument '{min(unknown)}'"
        if rid in self._running:
            return f"Duplicate request ID detected: {rid}"
        if len(prompt) >= self._context:
            return (
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self._context} tokens)."
            )
        limit = params.get("max_new_tokens", 128)
        if limit is not None and limit + len(prompt) > self._context:
            return (
                f"Requested token count exceeds the model's maximum context length of {self._context} tokens."
            )
        return None

    async def _answer(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        limit = params.get("max_new_tokens", 128)
        limit = self._context - len(prompt) if limit is None else limit
        aborted = self._running[rid] = asyncio.Event()
        made: list[tuple[int, float]] = []
        spans: list[dict[str, Any]] = []
        reason: dict[str, Any] = {"type": "length", "length": limit}
        random = np.random.default_rng(next(self._seeds))
        try:
            for token in self._draws(prompt, random, params.get("temperature") or 1.0):
                while self.steps is not None and len(made) >= self.steps and not aborted.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0)
                if aborted.is_set():
                    said = {"message": "Aborted", "status_code": None, "err_type": None}
                    reason = {"type": "abort", **said}
                    break
                made.append(token)
                if spans and spans[-1]["version"] == self.version:
                    spans[-1]["end"] = len(made)
                else:
                    spans.append({"version": self.version, "start": len(made) - 1, "end": len(made)})
                if token[0] == self._end and not params.get("ignore_eos"):
                    reason = {"type": "stop", "matched": self._end}
                    break
                if len(made) >= limit:
                    break
        finally:
            del self._running[rid]
        return {
            "text": "",
            "output_ids": [token for token, _ in made],
            "meta_info": {
                "id": rid,
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(made),
                "cached_tokens": 0,
                "weight_version": self.version,
                "weight_versions": spans or [{"version": self.version, "start": 0, "end": 0}],
                "output_token_logprobs": [[log_prob, token, None] for token, log_prob in made],
                "e2e_latency": 0.01,
            },
        }
