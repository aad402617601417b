"""The next action of a conversation, compared with the expected one (see README.md)."""

from gym_serve.environments.tool_argument_comparison.server import ToolArgumentComparison

__all__ = ["ToolArgumentComparison"]
