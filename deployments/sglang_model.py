"""`sglang_model`: a policy behind SGLang's own ``/generate``: tokens in, tokens and log-probabilities out.

    POST /generate       {rid, input_ids, sampling_params, return_logprob}
                      -> {meta_info: {finish_reason: {type}, output_token_logprobs: [[logprob, token, text]],
                                      prompt_tokens, cached_tokens, weight_version, weight_versions}}
    POST /abort_request  {rid}

Every attempt has an id of its own, by which it is aborted where nobody waits for it any more. A trainer that
changes weights aborts what runs: SGLang answers with the tokens so far, and the generation goes on after
them. One that a grammar constrains begins anew, as SGLang would begin its grammar anew. Source: SGLang's
http_server.py, tokenizer_manager.py and weight_versions.py, November 2026.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from gym_serve.deployments.connections import Answer, Connections, Request
from gym_serve.deployments.endpoints import Endpoint
from gym_serve.deployments.tokenizing import Generation, TokenizingModel
from gym_serve.deployments.upstream import RowEndpointModel
from gym_serve.observe.logs import fault
from gym_serve.servers.context import CallContext, current
from gym_serve.types.errors import BadRequest, DeadlineExceeded, EndpointMisconfigured, GymError, Unavailable
from gym_serve.types.protocols.tokens import TOKEN_KEYS, VERSIONS_KEY, token_versions, tokens_problem
from gym_serve.types.requests import JSON

_GENERATE, _ABORT = "/generate", "/abort_request"
_ABORT_SECONDS = 5.0
_PAUSE_SECONDS = 0.2  # before a generation that was aborted without a token is asked for again

_NAMES = {
    **{name: name for name in ("temperature", "top_p", "min_p", "stop", "stop_token_ids", "ignore_eos")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")},
    **{"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"},
}  # SGLang's names of vLLM's sampling parameters
_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
_UNSAID = "default"  # SGLang's version of weights of which nobody said one


class SglangConnections(Connections):
    """Connections to SGLang: a request whose caller has left is aborted by its id."""

    _aborts: set[asyncio.Task[None]]

    async def open(self) -> None:
        self._aborts = set()
        await super().open()

    async def close(self) -> None:
        if self.are_open:
            await asyncio.gather(*self._aborts)
        await super().close()

    async def send(self, endpoint: Endpoint, request: Request) -> Answer:
        if request.path != _GENERATE:
            return await super().send(endpoint, request)
        rid = uuid.uuid4().hex  # SGLang refuses an id that it has, as of an attempt whose connection broke
        data = b'%b,"rid":"%b"}' % (request.data[:-1], rid.encode())
        try:
            return await super().send(endpoint, request._replace(data=data))
        except (asyncio.CancelledError, DeadlineExceeded):
            abort = asyncio.ensure_future(self._abort(endpoint, rid))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise

    async def _abort(self, endpoint: Endpoint, rid: str) -> None:
        call = CallContext().within(_ABORT_SECONDS)
        request = Request(_ABORT, orjson.dumps({"rid": rid}), call, below_v1=False, tokens=0)
        try:
            await super().send(endpoint, request)
        except GymError as error:  # it generates for nobody until it notices that itself
            fault(None, f"abort {error.code}", f"a generation could not be aborted: {error.message}")


class SglangModel(TokenizingModel, RowEndpointModel):
    """A policy behind SGLang's native endpoint."""

    requires: ClassVar[Mapping[str, str]] = {"transformers": "gym-serve[sglang]"}

    class Config(TokenizingModel.Config, RowEndpointModel.Config):
        """Settings of the engine; its routes stand beside ``/v1``."""

        model: str = ""
        """Name of the model in answers, by default the server's: ``/generate`` has one model."""

    config: Config

    def connections(self) -> Connections:
        return SglangConnections(self.config)

    def params_of(self, body: JSON) -> JSON:
        return {**body, "model": self.model_name or self.name}

    async def generate(self, prompt: list[int], sampling: JSON, pictures: Sequence[str]) -> Generation | None:
        call = current().within(self.config.timeout)
        params = sampling_params(sampling)
        limit = params["max_new_tokens"]
        nothing = generation = Generation([], [], "length")
        while True:
            version = self.weight_version
            context = prompt + generation.token_ids
            request = _request(context, params, len(generation.token_ids), pictures)
            answer = await self._upstream.post(_GENERATE, request, call, below_v1=False)
            if answer is None and params["max_new_tokens"] is not None:  # does the prompt alone fit?
                params["max_new_tokens"] = None
                continue
            if answer is None:  # of what an abort had cut off, the context is full
                return generation._replace(finish_reason="length") if generation.token_ids else None
            part = read_generation(answer, len(context))
            generation = _joined(generation, part, version)
            if part.finish_reason != "abort":
                return generation
            if limit is not None and len(generation.token_ids) >= limit:
                return generation._replace(finish_reason="length")
            if any(name in params for name in _CONSTRAINTS):
                generation = nothing
            if not part.token_ids:
                await asyncio.sleep(_PAUSE_SECONDS)


def sampling_params(sampling: JSON) -> JSON:
    """SGLang's ``sampling_params`` for parameters with vLLM's names; ``max_new_tokens`` is always said, as
    its default is 128. Raises BadRequest: SGLang has no such parameter or form of a constraint.
    """
    for name in ("bad_words", "allowed_token_ids"):
        if sampling.get(name):
            raise BadRequest(f"{name}: SGLang has no such sampling parameter")
    params = {theirs: sampling[ours] for ours, theirs in _NAMES.items() if sampling.get(ours) is not None}
    if (top_k := sampling.get("top_k")) is not None:
        params["top_k"] = top_k if type(top_k) is int and top_k > 0 else -1
    return {"max_new_tokens": None, **params, **_constraint(sampling)}


def _constraint(sampling: JSON) -> JSON:
    form = sampling.get("response_format")
    kind = form.get("type") if isinstance(form, dict) else None
    if isinstance(form, dict) and kind == "json_schema":
        return {"json_schema": _as_text((form.get("json_schema") or {}).get("schema"))}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if form is not None and kind != "text":
        raise BadRequest(f"response_format: sglang_model knows no type {kind!r:.40}")
    wanted = sampling.get("structured_outputs")
    options = {k: v for k, v in wanted.items() if v is not None} if isinstance(wanted, dict) else {}
    match options:
        case {"json": schema}:
            return {"json_schema": _as_text(schema)}
        case {"regex": str(pattern)}:
            return {"regex": pattern}
        case {"choice": list(texts)}:
            return {"regex": f"({'|'.join(re.escape(str(text)) for text in texts)})"}
        case {"grammar": str(grammar)}:
            return {"ebnf": grammar}
        case {"structural_tag": tag}:
            return {"structural_tag": _as_text(tag)}
        case {"json_object": True}:
            return {"json_schema": '{"type": "object"}'}
    if options:
        raise BadRequest(f"structured_outputs: sglang_model knows none of {', '.join(sorted(options))[:80]}")
    return {}


def _as_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else orjson.dumps(schema).decode()


def _request(tokens: list[int], params: JSON, generated: int, pictures: Sequence[str]) -> JSON:
    """The body for a prompt, of which the last ``generated`` tokens were generated before an abort."""
    left = {
        name: max(least, params[name] - generated)
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0))
        if params.get(name) is not None
    }
    shown = {"image_data": list(pictures)} if pictures else {}
    return {"input_ids": tokens, **shown, "sampling_params": {**params, **left}, "return_logprob": True}


def read_generation(answer: Any, prompt: int) -> Generation:
    """What SGLang's answer to a prompt of so many tokens says; ``finish_reason`` may also be ``abort``.
    Raises Unavailable: it is malformed; EndpointMisconfigured: SGLang cut the prompt.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    kind = reason.get("type") if isinstance(reason, dict) else None
    if not isinstance(meta, dict) or kind not in ("stop", "length", "abort"):
        raise Unavailable(f"SGLang's answer has no finish_reason of stop, length or abort, got {kind!r:.40}")
    if kind != "abort" and type(cut := meta.get("prompt_tokens")) is int and cut != prompt:
        raise EndpointMisconfigured(
            f"SGLang read {cut} tokens of a prompt of {prompt}: start it without --allow-auto-truncate"
        )
    entries = meta.get("output_token_logprobs") or []
    if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) >= 2 for e in entries):
        raise Unavailable("SGLang's answer has output_token_logprobs that are no list of [logprob, token]")
    tokens, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    if problem := tokens_problem(dict(zip(TOKEN_KEYS, ([], tokens, logprobs), strict=True))):
        raise Unavailable(f"SGLang's tokens are unusable: {problem}")
    if not tokens and meta.get("completion_tokens"):
        raise Unavailable("SGLang's answer has tokens without log-probabilities")
    cached = meta.get("cached_tokens")
    versions = _versions(meta, len(tokens))
    return Generation(tokens, logprobs, kind, versions, cached if type(cached) is int else None)


def _versions(meta: JSON, count: int) -> list[JSON] | None:
    """Versions of the weights behind the tokens, as SGLang has them; None where nobody told it one."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    versions = token_versions({VERSIONS_KEY: spans, TOKEN_KEYS[1]: [0] * count})
    return spans if versions and set(versions) != {_UNSAID} else None


def _joined(before: Generation, part: Generation, version: str | None) -> Generation:
    """A generation that goes on after an abort."""
    if not before.token_ids:
        if part.finish_reason != "abort" or not part.token_ids:
            return part
        return part._replace(versions=part.versions or _one(version, part))
    if not part.token_ids:
        return before._replace(finish_reason=part.finish_reason)
    after, begin = part.versions or _one(version, part), len(before.token_ids)
    moved = [{**s, "start": s["start"] + begin, "end": s["end"] + begin} for s in after or ()]
    return Generation(
        before.token_ids + part.token_ids,
        before.logprobs + part.logprobs,
        part.finish_reason,
        before.versions + moved if before.versions and moved else None,
        before.cached,
    )


def _one(version: str | None, part: Generation) -> list[JSON] | None:
    return None if version is None else [{"version": version, "start": 0, "end": len(part.token_ids)}]
