"""An endpoint of a policy, as trainers have it: chat completions over HTTP that return their tokens.

It goes on from the tokens that it finds on messages, as the endpoints of NeMo RL do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from gym_serve.deployments.callback_model import CallbackModel
from gym_serve.deployments.tokenizing import Generation
from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec
from support.in_process import serving

Sample = Callable[[list[int], dict[str, Any]], Any]
"""Token ids, log-probabilities and ``stop`` or ``length`` for a prompt and its sampling. A coroutine function
is cancelled with its request; another one runs in a thread."""


@contextmanager
def endpoint(tokenizer: Any, sample: Sample, *, processor: Any = None) -> Iterator[str]:
    """Serve a policy from a thread; the base URL, with ``/v1``. ``processor``: of one that reads pictures."""

    class Policy(CallbackModel):
        """Samples here instead of in a trainer."""

        requires: ClassVar[Mapping[str, str]] = {}

        def load_tokenizer(self) -> Any:
            return tokenizer

        def load_processor(self) -> Any:
            return processor

        async def generate(self, prompt: list[int], sampling: dict[str, Any], pictures: Any) -> Generation:
            if inspect.iscoroutinefunction(sample):
                return Generation(*await sample(prompt, sampling))
            return Generation(*await asyncio.to_thread(sample, prompt, sampling))

    policy = {"type": Policy, "tokenizer": "its own", "pictures": processor is not None}
    graph = resolve(GraphSpec(models={"policy": policy}))
    with serving(lambda url: {"": graph}, watched=True) as url:
        yield f"{url}/policy/v1"
