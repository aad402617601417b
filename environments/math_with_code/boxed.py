r"""Finding the answer in a response: the last ``\boxed{}``, wherever it stands.

Pure functions that take time linear in the text, which is a model's and thus hostile.
"""

from __future__ import annotations

import json
import re

from gym_serve.servers import Response
from gym_serve.types.requests import message_text

__all__ = ["boxed_answer", "last_box", "same_text"]

_BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("\\text{", "}"))


def boxed_answer(response: Response) -> str | None:
    """The answer of a response: that of the last message which has one, else of the last tool output."""
    for message in reversed(response.messages):
        if (answer := last_box(message_text(message))) is not None:
            return answer
    for output in reversed(response.tool_outputs.values()):
        if (answer := last_box(_printed(output))) is not None:
            return answer
    return None


def last_box(text: str) -> str | None:
    r"""What is in the last ``\boxed{}``; None if there is none, or it is empty or not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : brace.start()].strip() or None
    return None


def same_text(expected: str, answer: str) -> bool:
    """Whether two answers are the same but for space and delimiters around them."""
    return bool(_bare(expected)) and _bare(expected) == _bare(answer)


def _bare(text: str) -> str:
    text = " ".join(text.split())
    for left, right in _DELIMITERS:
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            inner = text[len(left) : -len(right)]
            # Else these are several formulas: "$1$ and $2$".
            if _is_balanced(inner) if right == "}" else left not in inner and right not in inner:
                text = inner.strip()
    return text


def _is_balanced(text: str) -> bool:
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += 1 if brace.group() == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _printed(output: str) -> str:
    """Standard output of an execution; the whole text if it is no answer of `execute_python`."""
    try:
        result = json.loads(output)
    except (ValueError, RecursionError):
        return output
    stdout = result.get("stdout") if isinstance(result, dict) else None
    return stdout if isinstance(stdout, str) else ""
