"""Constructs NeMo Gym's servers from import paths and settings. Everything that imports `nemo_gym` is here.

NeMo Gym starts a server as a script in its own folder. So files in its settings that exist there become
absolute paths, and the folder is put at the front of the import path; a second server whose neighbours have
the same names is refused.

`GraphServers` replaces NeMo Gym's HTTP client: a call uses the transport to the server of the graph, within
the deadline of the calling operation. If that is overloaded or unreachable, the failure is raised instead of
answered: most of NeMo Gym's verifiers do not check the status, and would reward a missing answer.

`AsgiApp`: NeMo Gym's web applications in this process, without a port; `McpTools`: their MCP tools.

An exception of the application reaches the caller unchanged. Start and end run in one task of their own,
because what a lifespan opens must be closed by the task that opened it. NeMo Gym's `MCPResourcesServer`
answers each JSON-RPC message with JSON, and a header names the session, so no MCP client is needed.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import aiohttp
import httpx
import orjson
from pydantic import BaseModel, SecretStr, ValidationError
from yarl import URL

from gym_serve.servers.clients import Client
from gym_serve.servers.tools import ToolDescription, is_tool_name
from gym_serve.servers.transport import encode
from gym_serve.types.errors import GraphError, NotFound, Rejected, ToolFailed
from gym_serve.types.requests import JSON, problems_of


class ServerAnswer:
    """A JSON answer, with those members of `aiohttp.ClientResponse` that NeMo Gym's servers read."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.cookies: dict[str, str] = {}
        self.content = self
        self._body = body

    @property
    def ok(self) -> bool:
        return self.status < 400

    async def read(self) -> bytes:
        return self._body

    async def text(self) -> str:
        return self._body.decode()

    async def json(self, **_: Any) -> Any:
        return orjson.loads(self._body)

    def raise_for_status(self) -> None:
        """Raise `aiohttp.ClientResponseError` for a status of 400 or more, as aiohttp's own response does."""
        if not self.ok:
            url = URL("http://in-process")
            info = aiohttp.RequestInfo(url, "POST", None, url)  # type: ignore[arg-type]
            message = self._body[:1000].decode("utf-8", "replace")
            raise aiohttp.ClientResponseError(info, (), status=self.status, message=message)


class GraphServers:
    """The servers of the graph, by the names that a hosted server knows; messages name ``setting``."""

    def __init__(self, servers: Mapping[str, Client], setting: str) -> None:
        self._servers = servers
        self._setting = setting

    async def request(self, server_name: str, url_path: str, json: Any = None) -> ServerAnswer:
        """Call a route of a server, such as ``/v1/responses``; of a pydantic model, the set fields are sent.
        Raises NotFound: no server of the graph stands for that name; Retryable: the server is overloaded or
        unreachable.
        """
        client = self._servers.get(server_name)
        if client is None:
            names = ", ".join(sorted(self._servers)) or "none"
            raise NotFound(f"{self._setting} has no server for {server_name!r}; it has {names}")
        body = json.model_dump(mode="json", exclude_unset=True) if isinstance(json, BaseModel) else json
        try:
            return ServerAnswer(200, encode(await client.fetch(url_path.lstrip("/"), body)))
        except Rejected as error:
            return ServerAnswer(error.status, encode(error.to_body()))


_FOLDERS: list[Path] = []  # the folders of this process's hosted servers, on the import path


def make_server(path: str, settings: Mapping[str, Any], name: str, servers: GraphServers) -> Any:
    """Construct a `SimpleResourcesServer` of NeMo Gym by ``package.module:Class``, or the module's only
    server class. Raises GraphError: NeMo Gym is not installed, there is no such class, or the settings do not
    fit it.
    """
    try:
        base = importlib.import_module("nemo_gym.base_resources_server")
    except ImportError as error:
        raise GraphError(
            f"a hosted NeMo Gym server needs nemo-gym, on Python 3.12 or later ({error}); "
            "pip install nemo-gym==0.4.0 as docs/foreign-environments.md describes"
        ) from None
    module_name, _, class_name = path.partition(":")
    try:
        _add_folder(module_name)
        module = importlib.import_module(module_name)
        cls = getattr(module, class_name) if class_name else _only_server(module, base.SimpleResourcesServer)
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(f"server: cannot import {path}: {type(error).__name__}: {error}") from error
    # The fields that place a server on a network have no meaning here, and no default there.
    placed = {"host": "in-process", "port": 0, "entrypoint": "app.py", "name": name}
    fields = {**placed, **with_paths(settings, Path(inspect.getfile(cls)).parent)}
    try:
        config = cls.model_fields["config"].annotation.model_validate(fields)
        return cls(config=config, server_client=_client(servers))
    except ValidationError as error:  # its own words would quote the settings, secrets too
        problems = problems_of(error, "settings")
        raise GraphError([f"config.{problem} ({path})" for problem in problems]) from None
    except Exception as error:
        raise GraphError(f"config: {path}: {type(error).__name__}: {error}") from error


def with_secrets(settings: Mapping[str, Any], secrets: Mapping[str, SecretStr]) -> dict[str, Any]:
    """``settings`` with each secret at its path of keys and indices; what is in the way is replaced."""
    filled: dict[str, Any] = dict(settings)
    for path, secret in secrets.items():
        filled = _with_secret(filled, path.split("."), secret.get_secret_value())
    return filled


def _with_secret(value: Any, keys: list[str], secret: str) -> Any:
    if not keys:
        return secret
    key, *below = keys
    if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
        at = int(key)
        return [*value[:at], _with_secret(value[at], below, secret), *value[at + 1 :]]
    held = value if isinstance(value, Mapping) else {}
    return {**held, key: _with_secret(held.get(key), below, secret)}


def with_paths(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``settings`` with relative paths of files and folders in ``folder`` made absolute."""
    return {key: _with_path(key, value, folder) for key, value in settings.items()}


def _with_path(key: str, value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return with_paths(value, folder)
    is_path = isinstance(value, str) and value != "" and any(word in key for word in ("path", "dir", "file"))
    return str(folder / value) if is_path and (folder / value).exists() else value


def _add_folder(module_name: str) -> None:
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None or (folder := Path(spec.origin).parent) in _FOLDERS:
        return
    for other in _FOLDERS:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            is_neighbour = "." not in name and file is not None and Path(file).is_relative_to(other)
            if is_neighbour and ((folder / f"{name}.py").exists() or (folder / name).is_dir()):
                raise GraphError(
                    f"server: {module_name} and the server in {other} both have a module {name!r} of their "
                    "own; give each a deployment of its own: take one of them out of inline"
                )
    _FOLDERS.append(folder)
    sys.path.insert(0, str(folder))


def _only_server(module: ModuleType, base: type) -> Any:
    servers = [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, base) and cls.__module__ == module.__name__ and not inspect.isabstract(cls)
    ]
    # Pydantic puts a generic class with its parameters, ``Server[Env]``, into a module that derives from it.
    leaves = [cls for cls in servers if not any(cls in other.__mro__[1:] for other in servers)]
    if len(leaves) != 1:
        names = ", ".join(f"{module.__name__}:{cls.__name__}" for cls in leaves) or "none"
        what = f"{module.__name__} has {len(leaves)} server classes ({names})"
        raise GraphError(f"server: {what}; name one of them")
    return leaves[0]


def _client(servers: GraphServers) -> Any:
    """``servers`` as the `ServerClient` that NeMo Gym's servers are constructed with."""
    utils = importlib.import_module("nemo_gym.server_utils")
    config = importlib.import_module("nemo_gym.config_types").BaseServerConfig(host="in-process", port=0)
    settings = importlib.import_module("omegaconf").OmegaConf.create({})
    # Code that asks for the config of the whole of NeMo Gym gets an empty one. Without it, NeMo Gym reads the
    # command line, which is a replica's, and exits.
    os.environ.setdefault("NEMO_GYM_CONFIG_DICT", "{}")

    class GraphClient(utils.ServerClient):  # type: ignore[misc,name-defined]
        async def request(self, server_name: str, url_path: str, method: str, **kwargs: Any) -> ServerAnswer:
            return await servers.request(server_name, url_path, kwargs.get("json"))

    return GraphClient(head_server_config=config, global_config_dict=settings)


_BASE = "http://in-process"


class Answer(NamedTuple):
    """An application's answer."""

    status: int
    body: bytes


class AsgiApp:
    """A Starlette or FastAPI application."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._transport = httpx.ASGITransport(app)
        self._end = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        await ready

    async def stop(self) -> None:
        self._end.set()
        if self._life is not None:
            await self._life

    async def post(
        self, path: str, body: Any, cookies: httpx.Cookies, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A POST request with a JSON body to an escaped path; ``cookies`` receives those of the answer.
        Raises Exception: whatever the application does not catch.
        """
        headers = {**(headers or {}), "content-type": "application/json"}
        request = httpx.Request("POST", f"{_BASE}{path}", content=encode(body), headers=headers)
        cookies.set_cookie_header(request)
        response = await self._transport.handle_async_request(request)
        response.request = request
        content = await response.aread()
        cookies.extract_cookies(response)
        return Answer(response.status_code, content)

    async def _live(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.app.router.lifespan_context(self.app):
                ready.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)


_ACCEPT = {"accept": "application/json, text/event-stream"}  # MCP asks for both, whatever is answered


class McpTools:
    """The tools that a server's application offers by MCP, at ``path``."""

    def __init__(self, app: AsgiApp, path: str) -> None:
        self._app = app
        self._path = path

    async def tools(self) -> list[JSON]:
        """All tools, as a row has them (OpenAI's function tools). Raises GraphError: the server does not tell
        them, or one has a name that cannot be a route's.
        """
        tools: list[JSON] = []
        cursor: JSON = {}
        while True:
            answer = await self._ask("tools/list", cursor, {})
            result = answer.get("result")
            if not isinstance(result, dict):
                raise GraphError(f"server: it did not list its tools over MCP: {_message(answer)}")
            tools += [
                ToolDescription(
                    tool["name"], tool.get("description") or "", tool.get("inputSchema") or {"type": "object"}
                ).openai()
                for tool in result["tools"]
            ]
            if not result.get("nextCursor"):
                break
            cursor = {"cursor": result["nextCursor"]}
        odd = [tool["name"] for tool in tools if not is_tool_name(tool["name"])]
        if odd:
            raise GraphError(f"server: MCP tools have invalid names: {', '.join(map(repr, odd))}")
        return tools

    async def call(self, name: str, arguments: Any, headers: dict[str, str]) -> str:
        """The text of a tool's answer; ``headers`` name the session, see `session_headers`. Raises
        ToolFailed: it failed or refused its arguments.
        """
        answer = await self._ask("tools/call", {"name": name, "arguments": arguments}, headers)
        result = answer.get("result")
        if not isinstance(result, dict):
            raise ToolFailed(_message(answer))
        parts = result.get("content") or ()
        text = "\n".join(p["text"] if isinstance(p.get("text"), str) else f"[{p.get('type')}]" for p in parts)
        if result.get("isError"):
            raise ToolFailed(text or f"{name} failed")
        return text

    async def _ask(self, method: str, params: JSON, headers: dict[str, str]) -> JSON:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = await self._app.post(self._path, body, httpx.Cookies(), {**_ACCEPT, **headers})
        try:
            decoded = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            decoded = None
        return decoded if isinstance(decoded, dict) else {"error": {"message": repr(answer.body[:500])}}


def session_headers(seeded: Any) -> dict[str, str]:
    """The headers that name the session, as ``/seed_session`` answered them; none without MCP."""
    mcp = seeded.get("mcp") if isinstance(seeded, dict) else None
    headers = mcp.get("headers") if isinstance(mcp, dict) else None
    return {str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}


def _message(answer: JSON) -> str:
    error = answer.get("error")
    return str(error.get("message") if isinstance(error, dict) else answer)[:1000]
