"""`genrm_model`: a generative reward model, whose chat template has roles of its own.

It compares two responses, in messages of the roles ``response_1``, ``response_2`` and maybe ``principle``.
Responses has no such roles, so here input messages may have them, as with NVIDIA NeMo Gym's ``genrm_model``.
"""

from __future__ import annotations

from gym_serve.deployments.chat_model import ChatModel
from gym_serve.types.errors import BadRequest
from gym_serve.types.protocols import responses_to_chat
from gym_serve.types.requests import JSON, input_items, message_text

_ROLES = frozenset({"response_1", "response_2", "principle"})


class GenrmModel(ChatModel):
    """A generative reward model behind Chat Completions endpoints."""

    async def responses(self, body: JSON) -> JSON:
        items = input_items(body["input"])
        compared = [item for item in items if isinstance(item, dict) and item.get("role") in _ROLES]
        history = items[: len(items) - len(compared)]
        if any(item is not other for item, other in zip(items[len(history) :], compared, strict=True)):
            raise BadRequest(f"input: the messages of the roles {', '.join(sorted(_ROLES))} come last")
        chat = responses_to_chat({**body, "input": history}, reasoning=self.config.reasoning_input)
        chat["messages"] += [{"role": item["role"], "content": message_text(item)} for item in compared]
        metadata = self.metadata()
        return self._response(body, await self.complete_chat(chat), metadata)
