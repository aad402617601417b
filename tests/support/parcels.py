"""An environment that says which version of a package its replica has, and of which Python."""

from __future__ import annotations

import sys
from importlib import import_module

from gym_serve import ResourcesServer, Verdict, VerifyRequest, tool


class Parcels(ResourcesServer):
    """Needs the package ``gs_parcels``, of which each replica may have another version."""

    @tool
    async def version(self) -> dict[str, str]:
        """The version, and the interpreter."""
        return {"version": import_module("gs_parcels").VERSION, "python": sys.prefix}

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=1.0)
