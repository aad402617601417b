"""OpenAI's Responses and Chat Completions, Anthropic's Messages, and everything between them.

Pure functions on decoded JSON: they do no I/O, never change what they are given, and build plain
dicts. What one protocol cannot say in the other raises `BadRequest` with its place in the body; an
answer of a backend that makes no sense raises `Unavailable`.
"""

from gym_serve.types.protocols.answers import (
    chat_to_response,
    check_completion,
    check_response,
    context_overflow_response,
    is_overflow_answer,
    response_to_chat,
)
from gym_serve.types.protocols.chat_stream import ChunkJoiner, CompletionStream, chat_chunks
from gym_serve.types.protocols.content import inline_audio, split_think, wrap_think
from gym_serve.types.protocols.items import (
    assistant_items,
    input_form,
    is_answer,
    message_item,
    messages_to_items,
    new_id,
)
from gym_serve.types.protocols.messages import (
    MessageStream,
    error_message,
    message_events,
    message_to_params,
    response_to_message,
)
from gym_serve.types.protocols.refusals import generation_in, refusal, says_full, wait_of
from gym_serve.types.protocols.requests import (
    ReasoningForm,
    apply_sampling,
    chat_to_params,
    responses_to_chat,
)
from gym_serve.types.protocols.response_stream import (
    FINAL_EVENTS,
    ResponseStream,
    chat_sse,
    event_object,
    final_event,
    item_events,
    read_events,
    response_events,
    responses_sse,
)
from gym_serve.types.protocols.tokens import (
    TOKEN_KEYS,
    Tokens,
    completion_tokens,
    responses_usage,
    tokens_of,
    usage_sum,
)

__all__ = [
    "FINAL_EVENTS",
    "TOKEN_KEYS",
    "ChunkJoiner",
    "CompletionStream",
    "MessageStream",
    "ReasoningForm",
    "ResponseStream",
    "Tokens",
    "apply_sampling",
    "assistant_items",
    "chat_chunks",
    "chat_sse",
    "chat_to_params",
    "chat_to_response",
    "check_completion",
    "check_response",
    "completion_tokens",
    "context_overflow_response",
    "error_message",
    "event_object",
    "final_event",
    "generation_in",
    "inline_audio",
    "input_form",
    "is_answer",
    "is_overflow_answer",
    "item_events",
    "message_events",
    "message_item",
    "message_to_params",
    "messages_to_items",
    "new_id",
    "read_events",
    "refusal",
    "response_events",
    "response_to_chat",
    "response_to_message",
    "responses_sse",
    "responses_to_chat",
    "responses_usage",
    "says_full",
    "split_think",
    "tokens_of",
    "usage_sum",
    "wait_of",
    "wrap_think",
]
