"""The proxy that the environment names for a URL (``https_proxy``, ``all_proxy``, ``no_proxy``, ...).

The rules are those of requests. aiohttp's ``trust_env`` has others, and reads the environment and
``~/.netrc`` anew for every request, which costs as much as the request; here each base URL is looked up once.
"""

from __future__ import annotations

import os
from functools import lru_cache

import aiohttp
from yarl import URL

from gym_serve.types.errors import EndpointMisconfigured


@lru_cache(maxsize=1024)
def proxy_of(base_url: str) -> URL | None:
    """The proxy's URL, with its credentials; None for a direct connection. Raises EndpointMisconfigured: the
    environment names a proxy that is none of HTTP.
    """
    from requests.utils import get_environ_proxies, select_proxy

    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    direct = direct.replace("[", "").replace("]", "")  # as requests has the hosts of IPv6
    named = select_proxy(base_url, get_environ_proxies(base_url, direct or None))
    if not named:
        return None
    try:
        url = URL(named if "://" in named else f"http://{named}")
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        shown = f"{url.scheme}://{url.host}" if url.host else "an unreadable address"
        raise EndpointMisconfigured(
            f"the proxy of the environment for {base_url} must be an HTTP proxy, got {shown}: change "
            "http_proxy, https_proxy or all_proxy, or name the host in no_proxy"
        )
    return url


def shown_error(error: Exception) -> str:
    """What an HTTP error says, but for the URL in a proxy's refusal, which has its credentials in it."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"HTTP {error.status}: {error.message}"
    return str(error)
