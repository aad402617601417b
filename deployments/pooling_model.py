"""`pooling_model`: a classifier or a reward head behind vLLM's own routes (0.11 to 0.33):

POST /pooling   {messages, task: "classify", use_activation}  ->  {data: [{index, data: [float]}], usage}
POST /classify  {messages | input}  ->  {data: [{index, label, probs: [float], num_classes}], usage}
"""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import Any

from pydantic import Field

from gym_serve.deployments.endpoints import EndpointConfig
from gym_serve.deployments.upstream import UpstreamModel
from gym_serve.servers import Operation
from gym_serve.servers.context import current
from gym_serve.types.errors import BadRequest, InvalidRequest, NotFound, Unavailable
from gym_serve.types.protocols.content import shown
from gym_serve.types.requests import JSON


class PoolingModel(UpstreamModel):
    """A model that scores, behind one endpoint or several."""

    class Config(EndpointConfig):
        """Settings of the backend; the two routes stand beside ``/v1``."""

        extra_body: JSON = Field(default_factory=dict)
        """Default fields of every request, e.g. ``{truncate_prompt_tokens: -1}``."""
        timeout: float = Field(60.0, gt=0)
        """Seconds for one call, its retries included."""

    config: Config

    async def responses(self, body: JSON) -> JSON:
        raise NotFound("this model scores and writes nothing: it answers pooling and classify")

    async def score(self, route: str, body: JSON) -> JSON:
        """The backend's answer to a body as vLLM has it. Raises BadRequest: the backend refuses it, or it
        does not fit the context; Retryable: it is overloaded, unavailable or too slow, or answers no scores.
        """
        config = self.config
        request = {**config.extra_body, **body, "model": config.model}
        call = current().within(config.timeout)
        answer = await self._upstream.post(f"/{route}", request, call, below_v1=False)
        if answer is None:
            raise BadRequest("the conversation does not fit the model's context; see truncate_prompt_tokens")
        return _checked_scores(route, answer, _inputs_of(request))

    def operations(self) -> dict[str, Operation]:
        form = {"type": "object"}
        names = {"pooling": "Raw scores (vLLM's /pooling)", "classify": "Probabilities (vLLM's /classify)"}
        own = {op: Operation(partial(self._op, op), name, form, form) for op, name in names.items()}
        return {**own, "v1/models": super().operations()["v1/models"]}

    async def _op(self, route: str, body: Any) -> JSON:
        if not isinstance(body, dict) or not ("messages" in body or "input" in body):
            raise InvalidRequest("messages or input: what is to be scored is missing")
        return await self.score(route, body)


def _inputs_of(request: JSON) -> int:
    inputs = None if "messages" in request else request.get("input")
    texts = isinstance(inputs, list) and inputs and not all(type(token) is int for token in inputs)
    return len(inputs) if texts and isinstance(inputs, list) else 1


def _checked_scores(route: str, answer: Any, inputs: int) -> JSON:
    """An answer that has a score for every input."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or len(data) != inputs:
        raise Unavailable(f"the answer of /{route} has no data for {inputs} inputs: {shown(answer)}")
    key = "probs" if route == "classify" else "data"
    for index, entry in enumerate(data):
        scores = entry.get(key) if isinstance(entry, dict) else None
        # `encoding_format: base64` is a text.
        if not (isinstance(scores, str) and scores and key == "data") and not _are_numbers(scores):
            raise Unavailable(f"the answer of /{route} has no scores in data[{index}].{key}: {shown(scores)}")
    whole: JSON = answer
    return whole


def _are_numbers(value: Any) -> bool:
    """Whether it is a list of finite numbers that is not empty, or a list of such lists."""
    if not isinstance(value, list) or not value:
        return False
    if isinstance(value[0], list):
        return all(map(_are_numbers, value))
    return set(map(type, value)) <= {int, float} and all(map(isfinite, value))
