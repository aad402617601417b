"""Who decides how a model samples: one place for the precedence.

Lowest first: the deployment's ``extra_body``, the row's ``metadata.extra_body``, explicit fields of
the request, the deployment's overrides. The last is what keeps training on-policy whatever a caller
sends. Chat-template arguments follow the same order, merged key by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

__all__ = ["apply_sampling", "metadata_object"]


def apply_sampling(
    chat: Mapping[str, Any],
    *,
    extra_body: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> JSON:
    """The body for a chat backend with everybody's sampling parameters merged in.

    Args:
        chat: body of ``POST /v1/chat/completions``.
        extra_body: the deployment's defaults.
        chat_template_kwargs: the deployment's chat-template arguments.
        overrides: values that always hold, whoever asked for something else.

    Raises:
        BadRequest: ``metadata.extra_body`` or either ``chat_template_kwargs`` is no JSON object.
    """
    metadata = chat.get("metadata")
    body: JSON = {**(extra_body or {}), **metadata_object(metadata, "extra_body")}
    # An explicit null says "no preference": it must not hide a value from below.
    body.update((key, value) for key, value in chat.items() if value is not None or key not in body)
    template = {
        **(chat_template_kwargs or {}),
        **metadata_object(metadata, "chat_template_kwargs"),
        **_object(body.get("chat_template_kwargs"), "chat_template_kwargs"),
    }
    if template:
        body["chat_template_kwargs"] = template
    body.update(overrides or {})
    return body


def metadata_object(metadata: Any, key: str) -> JSON:
    """The object under ``metadata[key]``: a JSON string (as OpenAI's metadata wants it) or an object.

    Raises:
        BadRequest: it is neither.
    """
    value = metadata.get(key) if isinstance(metadata, dict) else None
    if isinstance(value, str) and value:
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"metadata.{key} is no JSON: {error}") from None
    return _object(value, f"metadata.{key}")


def _object(value: Any, where: str) -> JSON:
    if not value:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{where} is an object, not {type(value).__name__}")
    return dict(value)
