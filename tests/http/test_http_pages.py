"""The pages of a graph itself: graph, health, documentation, NeMo Gym's head server; request ids."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.http_servers import SECRET

from gym_serve.gateway.pages import home
from gym_serve.graph.spec import Node


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    openapi: dict[str, Any] = http.get("/openapi.json").json()
    return openapi


def test_the_graph(http: httpx.Client) -> None:
    graph = http.get("/graph").json()
    assert {section: list(servers) for section, servers in graph.items()} == {
        "models": ["policy", "told", "away"],
        "resources": ["shop"],
        "agents": ["clerk", "parrot"],
    }
    assert graph["agents"]["clerk"]["max_steps"] > 0
    assert graph["resources"]["shop"]["api_key"] == "**********"
    assert http.get("/graph/").json() == graph


class Tags(HTMLParser):
    """What a page is made of: its tags, and where its links go."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in ("href", "src")]


def test_the_root_is_a_page_that_says_what_runs(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    for name in ("policy", "told", "away", "shop", "clerk", "parrot", "default agent"):
        assert f">{name}<" in answer.text
    page = Tags()
    page.feed(answer.text)
    assert "script" not in page.tags
    assert {link.rpartition("/")[2] for link in page.links} >= {"docs", "graph", "health", "stats", "ui"}


def test_names_of_a_graph_cannot_write_its_page() -> None:
    hostile = "</code><script src=//evil.example>alert('&\"')</script>"
    nodes = {hostile: Node(hostile, "agent", f"{hostile}:Class")}
    shown = home(f"/{hostile}", nodes, hostile)
    page = Tags()
    page.feed(shown)
    plain = Tags()
    plain.feed(home("/web", {}, None))
    assert page.tags - plain.tags == {"td", "code"}
    assert all(link.startswith("/%3C/code%3E%3Cscript") for link in page.links)


def test_health_names_what_is_not_ready(http: httpx.Client) -> None:
    answer = http.get("/health")
    health = answer.json()
    assert answer.status_code == 503
    assert health["error"]["code"] == "unavailable"
    assert health["error"]["message"] == "not ready: away"
    assert health["not_ready"] == ["away"]
    states = {name: server["state"] for name, server in health["servers"].items()}
    assert states == {
        **dict.fromkeys(("policy", "told", "shop", "clerk", "parrot"), "ready"),
        "away": "unreachable",
    }
    assert http.head("/health").status_code == 503


@pytest.mark.parametrize("page", ["/graph", "/health", "/docs", "/openapi.json", "/global_config_dict_yaml"])
def test_no_page_shows_a_secret(http: httpx.Client, page: str) -> None:
    assert SECRET not in http.get(page).text


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(document).validate()
    for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)):
        found: Any = document
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
        assert found


def test_every_route_is_documented(document: dict[str, Any]) -> None:
    routes = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    environment = ("seed_session", "verify", "close_session", "aggregate_metrics", "order", "stock")
    assert routes >= {("POST", f"/shop/{route}") for route in environment}
    assert routes >= {("POST", f"/clerk/{route}") for route in ("run", "v1/responses", "aggregate_metrics")}
    assert routes >= {("POST", "/told/v1/responses"), ("POST", "/told/v1/chat/completions")}
    assert routes >= {("GET", "/told/v1/models"), ("GET", "/shop/reverify_mode")}
    pages = ("graph", "health", "pressure", "global_config_dict_yaml", "server_instances")
    assert routes >= {("POST", "/run"), *(("GET", f"/{page}") for page in pages)}
    assert [tag["name"] for tag in document["tags"]] == ["policy", "told", "away", "shop", "clerk", "parrot"]
    assert document["servers"] == [{"url": "/web"}]


def test_a_tools_arguments_and_answer_have_their_real_schemas(document: dict[str, Any]) -> None:
    order = document["paths"]["/shop/order"]["post"]
    assert order["summary"] == "Order things."
    schema = order["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["order"]["description"] == "the things."
    checker = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    assert checker.is_valid({"order": {"lines": [{"item": "tea"}], "payment": {"by": "card", "number": 1}}})
    assert not checker.is_valid({"order": {"lines": [{"item": "tea"}], "payment": {"by": "cheque"}}})
    assert not checker.is_valid({"order": {"lines": [{"count": 2}], "payment": {"by": "cash"}}})
    receipt = order["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(receipt["properties"]) == {"items", "orders"}
    payment = document["components"]["schemas"]["shop.order.Order"]["properties"]["payment"]
    assert payment["discriminator"]["mapping"]["card"] == "#/components/schemas/shop.order.Card"


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    elements: list[tuple[str, dict[str, Any]]] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            elements.append((tag, dict(attrs)))

    Parser().feed(answer.text)
    assert not [tag for tag, _ in elements if tag in ("link", "img", "iframe")]
    assert [attributes["src"] for tag, attributes in elements if tag == "script"] == ["/web/docs.js"]
    links = [attributes["href"] for tag, attributes in elements if tag == "a"]
    assert [link for link in links if not link.startswith("#")] == ["/web/openapi.json"]
    script = http.get("/docs.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert (
        "script-src 'self'; connect-src 'self'; require-trusted-types-for"
        in answer.headers["content-security-policy"]
    )
    assert "/shop/order" in answer.text
    assert "Order things." in answer.text


def test_a_client_of_nemo_gym_finds_the_agents_and_runs_them(http: httpx.Client, url: str) -> None:
    config = yaml.safe_load(json.loads(http.get("/global_config_dict_yaml").content))
    addresses = {}
    for name, instance in config.items():
        for agent in (instance.get("responses_api_agents") or {}).values():
            addresses[name] = f"http://{agent['host']}:{agent['port']}"
    assert addresses == {"clerk": f"{url}/clerk", "parrot": f"{url}/parrot"}
    params = {"input": "Tea?", "tools": []}
    row = {"responses_create_params": params, "agent_ref": {"name": "parrot"}}
    with httpx.Client(timeout=60) as elsewhere:
        rollout = elsewhere.post(f"{addresses['parrot']}/run", json=row).json()
    assert rollout["response"]["output"][-1]["content"][0]["text"] == "Tea?"
    assert rollout["reward"] == 0.0


def test_the_config_has_the_references_between_servers(http: httpx.Client) -> None:
    config = yaml.safe_load(http.get("/global_config_dict_yaml").json())
    assert {name: list(instance) for name, instance in config.items()} == {
        "policy": ["responses_api_models"],
        "told": ["responses_api_models"],
        "away": ["responses_api_models"],
        "shop": ["resources_servers"],
        "clerk": ["responses_api_agents"],
        "parrot": ["responses_api_agents"],
    }
    clerk = config["clerk"]["responses_api_agents"]["simple_agent"]
    assert clerk["model_server"] == {"type": "responses_api_models", "name": "policy"}
    assert clerk["resources_server"] == {"type": "resources_servers", "name": "shop"}
    assert set(clerk) == {"entrypoint", "host", "port", "model_server", "resources_server"}


def test_server_instances(http: httpx.Client, url: str) -> None:
    instances = {instance["process_name"]: instance for instance in http.get("/server_instances").json()}
    assert list(instances) == ["policy", "told", "away", "shop", "clerk", "parrot"]
    shop = instances["shop"]
    assert (shop["server_type"], shop["url"]) == ("resources_servers", f"{url}/shop")
    assert shop["port"] == httpx.URL(url).port
    assert http.get(f"{instances['told']['url']}/v1/models").status_code == 200


def ids(http: httpx.Client, path: str, sent: str | None) -> list[str]:
    answer = http.get(path, headers={} if sent is None else {"x-request-id": sent})
    return answer.headers.get_list("x-request-id")


@pytest.mark.parametrize("path", ["/graph", "/nothing", "/told/v1/models"])
def test_the_request_id_comes_back(http: httpx.Client, path: str) -> None:
    assert ids(http, path, "run-7:3/a.b") == ["run-7:3/a.b"]
    (made,) = ids(http, path, None)
    assert made not in ("", ids(http, path, None)[0])


@pytest.mark.parametrize("unfit", ["two words", "x" * 200, "a\tb", "a;b"])
def test_an_unfit_request_id_is_replaced(http: httpx.Client, unfit: str) -> None:
    first = ids(http, "/graph", unfit)[0]
    assert re.fullmatch(r"[0-9a-f]{32}", first)
