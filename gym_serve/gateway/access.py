"""Who may call a graph over HTTP.

A client of a graph spends the API key of its model. So a graph without a token answers only this machine,
unless its file says ``insecure: true``. Web pages in a browser on this machine are refused too: those of
another origin, and those whose host name was pointed here (DNS rebinding). A graph may have several tokens,
each of which is accepted, so that a new one can be handed out before the old one is removed.

A person in a browser types the token once (`gym_serve.gateway.pages`) and has a *pass* from then on: a
cookie that no script can read, that ends after twelve hours, and that every gateway of the graph checks by
the token that it was made with. Browsers send cookies to all ports of a host, and with the requests of any
page there. So a pass lets in only what the graph's own pages ask for, and a request that changes something
also needs the header ``X-Gym-Serve: 1``, which no page of another origin can send.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from pydantic import SecretStr
from starlette.requests import Request

from gym_serve.types.errors import Forbidden, Unauthorized

PASS_COOKIE = "gym_serve_pass"
PASS_SECONDS = 12 * 3600
"""For how long a pass is good."""

_PORTS = {"http": ":80", "https": ":443"}
_READS = ("GET", "HEAD")
_OWN = (
    "same-origin",
    "none",
)  # values of `Sec-Fetch-Site`: the page itself, or the person at the address bar


class Access:
    """Checks whether a request may be answered. ``insecure``: whether an open graph may be called by any host
    name and from anywhere."""

    def __init__(self, tokens: Sequence[SecretStr], *, insecure: bool) -> None:
        self._tokens = [token.get_secret_value().encode() for token in tokens]
        self._insecure = insecure

    @property
    def secured(self) -> bool:
        return bool(self._tokens)

    def check_origin(self, request: Request) -> None:
        """Refuse requests of web pages other than the graph's own. Raises Forbidden: the page has another
        origin, or calls an open graph by a foreign host name."""
        host = request.headers.get("host", "").lower()
        for origin in request.headers.getlist("origin"):
            if not _is_same(origin.lower(), host):
                raise Forbidden(f"the web page's origin must be the graph's own, got {origin[:100]!r}")
        if not self._tokens and not self._insecure and not _is_local_name(host):
            raise Forbidden(
                "a graph without auth_token must be called by IP address or as localhost, got "
                f"{host[:100]!r}; give it an auth_token, or write insecure: true into its file"
            )

    def is_anonymous(self, request: Request) -> bool:
        """Whether a request has no token, although one is needed."""
        shown = {"authorization", "x-api-key"} & set(request.headers) or PASS_COOKIE in request.cookies
        return self.secured and not shown

    def check_token(self, request: Request) -> None:
        """Refuse a request without a valid token or pass. Raises Unauthorized: it has none, or a wrong one;
        Forbidden: it has a pass, but does not come from a page of the graph."""
        if not self._tokens:
            return
        headers = request.headers
        if PASS_COOKIE in request.cookies and not {"authorization", "x-api-key"} & set(headers):
            self._check_pass(request, request.cookies[PASS_COOKIE])
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if key := headers.get("x-api-key"):  # as clients of Anthropic's Messages send it
            scheme, token = "bearer", key
        # Header values are Latin-1 to Starlette: this restores the bytes that were sent.
        if scheme.lower() != "bearer" or not self._is_token(token.strip().encode("latin-1")):
            raise Unauthorized("send the graph's auth_token as 'Authorization: Bearer <token>'")

    def pass_of(self, token: str) -> str:
        """A pass for whoever knows a token. Raises Unauthorized: nobody has this token."""
        token_bytes = token.strip().encode("utf-8", "replace")
        if not self._is_token(token_bytes):
            raise Unauthorized("This is not a token of the graph")
        end = int(time.time()) + PASS_SECONDS
        return f"{end}.{_seal(token_bytes, end)}"

    def _check_pass(self, request: Request, credential: str) -> None:
        if request.headers.get("sec-fetch-site", "none") not in _OWN:
            raise Forbidden("a browser's pass is good for the graph's own pages only")
        if request.method not in _READS and request.headers.get("x-gym-serve") != "1":
            raise Forbidden("with a browser's pass, a change needs the header X-Gym-Serve: 1")
        end, _, seal = credential.partition(".")
        seconds = int(end) if end.isascii() and end.isdecimal() and len(end) < 16 else 0
        shown = seal.encode("latin-1", "replace")
        matches = sum(hmac.compare_digest(shown, _seal(token, seconds).encode()) for token in self._tokens)
        if not matches or seconds < time.time():
            raise Unauthorized("the browser's pass is over; sign in again")

    def _is_token(self, credential: bytes) -> bool:
        # All tokens are compared, so that the time does not reveal which one matched.
        return sum(hmac.compare_digest(credential, token) for token in self._tokens) > 0


def _seal(token: bytes, end: int) -> str:
    """What only a holder of the token can make, and what tells nothing of it."""
    return hmac.new(token, b"gym_serve pass %d" % end, hashlib.sha256).hexdigest()


def exposure(host: str | None, tokens: Sequence[SecretStr], *, insecure: bool) -> str | None:
    """Why a graph must not answer at an address; None if it may. ``host``: where Serve listens; None if it
    does not."""
    if host is None or tokens or insecure or is_loopback(host):
        return None
    return (
        f"auth_token: Serve listens on {host}, which other machines reach, and the graph has no token. "
        'Give it one (auth_token: "${GYM_TOKEN}"), or start Serve with http_options: {host: 127.0.0.1}; or '
        "write insecure: true, if anyone who reaches it may use the graph and the key of its model"
    )


def open_ray(*, insecure: bool) -> str | None:
    """Why a graph must not run on a Ray without a token; None if its file says that it may."""
    if insecure:
        return None
    return (
        "insecure: this Ray asks for no token: whoever reaches a port of it, from any machine, runs code "
        "with your rights. Start it, and this process, with RAY_AUTH_MODE=token (`ray get-auth-token "
        "--generate` makes a token), or write insecure: true into the graph's file"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_same(origin: str, host: str) -> bool:
    try:
        page = urlsplit(origin)
    except ValueError:
        return False
    port = _PORTS.get(page.scheme, "")
    return bool(page.netloc) and page.netloc.removesuffix(port) == host.removesuffix(port)


def _is_local_name(host: str) -> bool:
    """Whether no web page of another machine can have this ``Host``: an address, or localhost."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
