"""How one generation is sampled: the fields of a chat body that a `BatchedEngine` knows, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gym_serve.deployments.endpoints import as_list
from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import problems_of

_MISSING: dict[str, Any] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "top_logprobs")),
    **dict.fromkeys(("prompt_logprobs", "stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids")),
    **{"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0},
}  # what vLLM knows, or knew once, and this engine does not; each with the value that asks for nothing


class Sampling(BaseModel):
    """The parameters, with OpenAI's names and defaults."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    max_tokens: int | None = Field(None, ge=1)  # most tokens; None: as many as fit the context
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)  # 0 takes the likeliest token
    top_p: float = Field(1.0, gt=0, le=1)  # the smallest set of tokens with this probability
    top_k: int = 0  # the likeliest so many tokens; 0 or less: all
    # Texts before which the generation ends.
    stop: Annotated[list[str], BeforeValidator(as_list), Field(max_length=16)] = []
    seed: int | None = None  # makes the draws of this generation repeatable
    ignore_eos: bool = False  # go on after a token that ends the turn
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}  # added to the logits, by token id

    @classmethod
    def of(cls, chat: Mapping[str, Any]) -> Sampling:
        """The parameters of a body of ``POST /v1/chat/completions``. Raises BadRequest: one that this engine
        lacks, or a value that makes no sense.
        """
        for key, nothing in _MISSING.items():
            if chat.get(key) and chat[key] != nothing:
                raise BadRequest(f"{key}: this engine cannot do that; use vllm_engine")
        if chat.get("n") not in (None, 1):
            raise BadRequest("n: this engine gives one choice for a call")
        settings = {key: chat[key] for key in cls.model_fields if chat.get(key) is not None}
        if chat.get("max_completion_tokens") is not None:
            settings["max_tokens"] = chat["max_completion_tokens"]
        try:
            return cls(**settings)
        except ValidationError as error:
            raise BadRequest(problems_of(error, "sampling")[0]) from None
