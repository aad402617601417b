"""`refinement_agent`: attempt, verify, critique, and again, until the verifier is content.

All attempts are one conversation: ``response.output`` holds the items of the first attempt, a ``user``
message with the critique, the items of the second attempt, and so on. So the tokens of one attempt are a
prefix of the next one's prompt. ``all_attempts`` says which items are whose, and what each was worth:

    {"turn_index": 0, "items": [0, 3], "reward": 0.0, "verdict": {}, "generation": "...", "critique": "..."}

The rollout's ``reward`` and verdict are those of the last attempt. The verifier is asked once per attempt, in
the episode's session, with that attempt's items as the response and ``turn_index`` among the row's keys. It
takes part with two optional fields, as in NeMo Gym's ``proof_refinement_agent``: ``needs_correction``,
whether to go on, and ``correction_prompt``, the critique.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.judging import ask_within
from gym_serve.servers import Episode, ModelClient, Response
from gym_serve.types.errors import Unavailable
from gym_serve.types.requests import JSON, message_text

_CRITIC = """\
You review an answer to a task, which is known to be wrong. Point out the mistakes, briefly and concretely. \
Do not solve the task and do not give the right answer."""


class _RefinedEpisode(Episode):
    """An episode that is verified once per attempt."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._verdict: JSON | None = None

    async def judge(self, turn_index: int, items: list[JSON]) -> JSON:
        if self.response is None:
            raise Unavailable("the agent made no model call, so there is nothing to verify", stage="verify")
        row = {**self.row, "turn_index": turn_index}
        response = {**self.response, "output": items}
        verdict = await self.stage("verify", lambda: self._resources.verify(row, response, self.session))
        # A foreign server echoes the request: its response is one attempt, not the episode.
        echoed = {*row, "response"} - {"reward"}
        self._verdict = {key: value for key, value in verdict.items() if key not in echoed}
        return self._verdict

    async def verify(self) -> JSON:
        """The verdict on the last attempt, which is known."""
        return self._verdict if self._verdict is not None else await super().verify()


class RefinementAgent(SimpleAgent):
    """Attempts with a critique in between; each is the loop of `simple_agent`."""

    class Config(SimpleAgent.Config):
        """Settings of the attempts. ``max_steps`` and ``max_empty_turns`` hold for each of them."""

        max_attempts: int = Field(3, ge=1)
        """Attempts per episode at most."""
        target_reward: float = 1.0
        """The reward that ends the episode, unless the verifier says ``needs_correction``."""
        critique_fields: tuple[str, ...] = ("correction_prompt",)
        """Fields of the verdict to look for a critique in, the first one with a text counts."""
        critic: ModelClient | None = None
        """A model that writes the critique where the verifier does not. It sees the task and the answer."""
        critic_prompt: str = _CRITIC
        """The critic's system prompt."""
        critic_params: dict[str, Any] = Field(default_factory=dict)
        """Further keys of the critic's Responses bodies: ``temperature``, ``max_output_tokens``, ..."""
        skip_verification: Literal[False] = False
        """Not possible: the verifier judges each attempt."""
        retry_prompt: str = "This is not right. Find the mistake and give a corrected answer."
        """The critique where there is no other."""

    config: Config

    async def act(self, episode: Episode) -> None:
        assert isinstance(episode, _RefinedEpisode)  # `_episode` makes no other
        attempts: list[JSON] = []
        episode.fields["all_attempts"] = attempts
        for turn_index in range(self.config.max_attempts):
            start = len(episode.items)
            await super().act(episode)
            items = episode.items[start:]
            verdict = await episode.judge(turn_index, items)
            attempts.append(
                {
                    "turn_index": turn_index,
                    "items": [start, start + len(items)],
                    "reward": verdict["reward"],
                    "verdict": verdict,
                    "generation": Response(output=items).last_text,
                    "critique": None,
                }
            )
            episode.fields["total_turns"] = turn_index + 1
            if episode.incomplete or self._done(verdict) or turn_index + 1 == self.config.max_attempts:
                return
            critique = await self._critique(episode, attempts[-1])
            attempts[-1]["critique"] = critique
            episode.append_items([{"type": "message", "role": "user", "content": critique}])

    def _done(self, verdict: JSON) -> bool:
        needs_correction = verdict.get("needs_correction")
        if isinstance(needs_correction, bool):
            return not needs_correction
        return bool(verdict["reward"] >= self.config.target_reward)

    async def _critique(self, episode: Episode, attempt: JSON) -> str:
        for name in self.config.critique_fields:
            text = attempt["verdict"].get(name)
            if isinstance(text, str) and text.strip():
                return text
        if (critic := self.config.critic) is not None:
            task, answer = _task(episode.row), attempt["generation"]

            async def ask(chars: int) -> JSON:
                text = f"The task:\n\n{task}\n\nThe answer:\n\n{answer[:chars]}"
                texts = {"system": self.config.critic_prompt, "user": text}
                messages = [{"role": role, "content": content} for role, content in texts.items()]
                body = {**self.config.critic_params, "input": messages}
                return await episode.stage("model", lambda: critic.responses(body))

            response = await ask_within(ask, len(answer))  # the critic may not take what the policy wrote
            output = [item for item in response["output"] if isinstance(item, dict)]
            if text := Response(output=output).last_text.strip():
                return text
        return self.config.retry_prompt

    def _episode(self, row: JSON) -> Episode:
        return _RefinedEpisode(row, self.policy, self.config.resources, self._timeouts, self._limits)


def _task(row: JSON) -> str:
    items = row["responses_create_params"]["input"]
    if isinstance(items, str):
        return items
    return "\n\n".join(message_text(item) for item in items if item.get("role") == "user")
