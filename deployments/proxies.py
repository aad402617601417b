"""The proxy that the environment names for a URL (``https_proxy``, ``no_proxy``, ...).

aiohttp's own ``trust_env`` reads the environment and ``~/.netrc`` anew for every request, which
costs as much as the request itself; here each base URL is looked up once.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL


@lru_cache(maxsize=1024)
def proxy_of(base_url: str) -> URL | None:
    """The proxy's URL, with its credentials; None for a direct connection."""
    url = URL(base_url)
    named = getproxies().get(url.scheme)
    if named is None or url.host is None or proxy_bypass(url.host):
        return None
    return URL(named)


def shown_error(error: Exception) -> str:
    """What an HTTP error says, but for the URL in a proxy's refusal, which has its credentials in it."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"HTTP {error.status}: {error.message}"
    return str(error)
