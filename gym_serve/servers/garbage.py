"""The garbage collector of a process that holds thousands of rollouts.

Python's own thresholds, (700, 10, 10), let it look at the objects of all rollouts in flight again and again,
and these are no garbage: that took an eighth of an agent's CPU. It is for processes that are ours (replicas,
the command line): in a trainer's, the trainer decides.
"""

from __future__ import annotations

import gc

__all__ = ["collect_rarely"]


def collect_rarely() -> None:
    """Look less often, and no more at what is there already: what was imported stays."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
