"""`RunLog`: the lines of a run by cursor, from which a client goes on where its connection broke.

Pure: no task, no clock, no I/O. A line is kept until the client acknowledges it, by asking for those behind
it. So a client that asks again with the last cursor that it has seen gets every line once, however many
connections break. What is kept is bounded: a full log is to get no lines beyond those of rollouts that run
already.
"""

from __future__ import annotations

from gym_serve.types.errors import Conflict, InvalidRequest


class RunLog:
    """Lines with the cursors 1, 2, ...

    Args:
        window: bytes of unacknowledged lines from which on the log is full.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._lines: dict[int, bytes] = {}
        self.acknowledged = 0
        """The cursor up to which lines are dropped."""
        self.last = 0
        """The cursor of the newest line; 0 if there is none."""
        self.size = 0
        """Bytes of the lines that are kept."""
        self.ended = False
        """Whether the newest line is the last one."""

    @property
    def full(self) -> bool:
        """Whether nothing new should be begun before the client acknowledges lines."""
        return self.size >= self._window

    def add(self, fields: bytes, *, last: bool = False) -> None:
        """Append a line.

        Args:
            fields: the members of its JSON object beside the cursor, without braces and line breaks.
            last: whether it is the last one.
        """
        assert not self.ended, "the log has ended"
        self.last += 1
        line = b'{"cursor":%d,%s}\n' % (self.last, fields)
        self._lines[self.last] = line
        self.size += len(line)
        self.ended = last

    def acknowledge(self, cursor: int) -> None:
        """Drop the lines up to a cursor.

        Raises:
            InvalidRequest: there is no such line yet.
            Conflict: later lines were acknowledged before: those between are dropped already.
        """
        if cursor > self.last:
            raise InvalidRequest(
                f"`after` must be a cursor that the run has sent, at most {self.last}, got {cursor}"
            )
        if cursor < self.acknowledged:
            raise Conflict(
                f"the lines up to {self.acknowledged} are dropped, because a request with "
                f"after={self.acknowledged} said that they had come; got after={cursor}"
            )
        while self.acknowledged < cursor:
            self.acknowledged += 1
            self.size -= len(self._lines.pop(self.acknowledged))

    def after(self, cursor: int, most: int) -> tuple[bytes, int]:
        """The next lines, at least one if there is one, and the cursor of the last of them.

        Args:
            cursor: that of the last line that was read.
            most: bytes at which to stop.
        """
        found: list[bytes] = []
        size = 0
        while cursor < self.last and size < most:
            cursor += 1
            found.append(self._lines[cursor])
            size += len(found[-1])
        return b"".join(found), cursor
