"""What a worker of structured_outputs does: parse a model's text, and validate the value.

It runs in a process with a limit of CPU time and memory: no check of the text's size foresees everything that
parsers and validators do with it.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypedDict

from typing_extensions import NotRequired

from gym_serve.environments.structured_outputs.coercion import coerce_csv, coerce_xml
from gym_serve.environments.structured_outputs.parsing import Format, Unparsable, parse_text
from gym_serve.environments.structured_outputs.schemas import strict_schema
from gym_serve.types.errors import InvalidRequest

__all__ = ["Checked", "Document", "Fault", "check", "warm_up", "work"]

Fault = Literal[
    "parse_error", "validation_error", "tool_arguments_parse_error", "missing_tool_payload_key", "invalid_row"
]


class Document(TypedDict):
    """What is to be checked."""

    schema: str
    """The schema as JSON."""
    text: str
    """A document, or the arguments of a function call."""
    format: Format | None
    """Format of a document; None for arguments."""
    key: str | None
    """The argument that holds the value; None if all arguments are the value."""
    coerce: bool
    """Read the text of XML elements as the types of the schema."""


class Checked(TypedDict):
    """What came of it; empty if the value fits."""

    fault: NotRequired[Fault]
    """What is wrong with it; ``invalid_row`` if it is the schema."""
    message: NotRequired[str]
    """The same as a sentence."""


def check(document: Document) -> Checked:
    """Parse a text, and validate its value."""
    try:
        schema = strict_schema(document["schema"])
        value: Any = parse_text(document["text"], document["format"] or "json")
        if document["format"] == "csv":
            value = coerce_csv(value, schema.schema)
        elif document["format"] == "xml" and document["coerce"]:
            value = coerce_xml(value, schema.schema)
        if (key := document["key"]) is not None:
            if not isinstance(value, dict) or key not in value:
                message = f"there is no argument {json.dumps(key)}"
                return {"fault": "missing_tool_payload_key", "message": message}
            value = value[key]
        problem = schema.problem_of(value)
    except Unparsable as error:
        fault: Fault = "parse_error" if document["format"] else "tool_arguments_parse_error"
        return {"fault": fault, "message": str(error)}
    except InvalidRequest as error:
        return {"fault": "invalid_row", "message": error.message}
    return {} if problem is None else {"fault": "validation_error", "message": problem}


def warm_up() -> None:
    """Import the parsers, and build the schema of schemas."""
    check({"schema": '{"type": "object"}', "text": "{}", "format": "json", "key": None, "coerce": False})


def work(request: Document) -> Checked:
    """`check`, with a message that is not too long to send."""
    checked = check(request)
    return {**checked, "message": checked["message"][:500]} if "message" in checked else checked
