"""NeMo Gym's configs as graphs: inclusion, inheritance, interpolation, types, settings, secrets."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.graph import load_graph, resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.interop.nemo_gym import Imported, import_config
from gym_serve.interop.nemo_gym.configs import Translator, merged
from gym_serve.types.errors import GraphError, GymError, InvalidRequest

runner = CliRunner()

POLICY = """
policy_model:
  responses_api_models:
    vllm_model:
      entrypoint: app.py
      base_url: ${policy_base_url}
      api_key: ${policy_api_key}
      model: ${policy_model_name}
      uses_reasoning_parser: true
      sampling_overrides: null
"""
QUIZ = """
quiz:
  resources_servers:
    mcqa:
      entrypoint: app.py
      grading_mode: null
      domain: knowledge
      verified: false
quiz_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      max_steps: 4
      resources_server: {type: resources_servers, name: quiz}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
      - {name: train, type: train, jsonl_fpath: quiz/train.jsonl, num_repeats: 8, license: MIT}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def imported(tmp_path: Path, text: str, **options: Any) -> Imported:
    return import_config([write(tmp_path, "quiz.yaml", text)], **options)


def graph_of(found: Imported) -> dict[str, Any]:
    graph: dict[str, Any] = found.config["applications"][0]["args"]
    return graph


def problems_of(tmp_path: Path, text: str, **options: Any) -> list[str]:
    with pytest.raises(GraphError) as caught:
        imported(tmp_path, text, **options)
    return caught.value.problems


def test_a_config_becomes_a_graph(tmp_path: Path) -> None:
    found = imported(tmp_path, QUIZ + POLICY)
    assert graph_of(found) == {
        "models": {
            "policy_model": {
                "type": "chat_model",
                "base_url": "${POLICY_BASE_URL}",
                "api_key": "${POLICY_API_KEY:-}",
                "model": "${POLICY_MODEL_NAME}",
                "parse_think_tags": True,
            }
        },
        "resources": {"quiz": {"type": "mcqa"}},
        "agents": {
            "quiz_agent": {
                "type": "simple_agent",
                "max_steps": 4,
                "resources": "quiz",
                "model": "policy_model",
            }
        },
    }
    assert found.variables == {
        "POLICY_BASE_URL": "policy_base_url",
        "POLICY_API_KEY": "policy_api_key",
        "POLICY_MODEL_NAME": "policy_model_name",
    }
    assert found.datasets == [
        {"agent": "quiz_agent", "name": "train", "type": "train", "rows": "quiz/train.jsonl", "repeats": 8}
    ]
    assert found.notes == []


def test_the_file_is_valid_and_holds_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "graph.yaml", imported(tmp_path, QUIZ + POLICY).yaml())
    monkeypatch.setenv("POLICY_BASE_URL", "http://localhost:9000/v1")
    monkeypatch.setenv("POLICY_MODEL_NAME", "m")
    source = load_graph(file)
    assert (source.name, source.route_prefix) == ("quiz", "/quiz")
    graph = resolve(source.spec, literal_secrets=False)
    assert graph.default_agent == "quiz_agent"
    assert graph.nodes["quiz_agent"].references == {"model": "policy_model", "resources": "quiz"}


def test_a_policy_that_is_not_in_the_configs_is_added(tmp_path: Path) -> None:
    found = imported(tmp_path, QUIZ)
    assert graph_of(found)["models"]["policy_model"]["base_url"] == "${POLICY_BASE_URL}"
    assert found.notes == ["policy_model is in none of the configs: a chat_model was put in its place"]


def test_configs_override_what_they_include_and_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path, "gym/servers/quiz.yaml", QUIZ + POLICY)
    step = "quiz_agent: {responses_api_agents: {simple_agent: {max_steps: %d}}}\n"
    write(tmp_path, "gym/a.yaml", "config_paths: [servers/quiz.yaml]\n" + step % 5)
    top = write(tmp_path, "gym/deep/er/config.yaml", "config_paths: [a.yaml, servers/quiz.yaml]\n")
    last = write(tmp_path, "last.yaml", step % 7)
    assert graph_of(import_config([top]))["agents"]["quiz_agent"]["max_steps"] == 5
    assert graph_of(import_config([top, last]))["agents"]["quiz_agent"]["max_steps"] == 7
    assert import_config([top]).config["applications"][0]["name"] == "er"
    assert import_config([top], name="mine").config["applications"][0]["route_prefix"] == "/mine"


def test_files_that_include_one_another_are_read_once(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "config_paths: [b.yaml]\n" + QUIZ)
    b = write(tmp_path, "b.yaml", "config_paths: [a.yaml]\n" + POLICY)
    assert graph_of(import_config([b])).keys() == {"models", "resources", "agents"}


INHERITING = """
math_quiz:
  _inherit_from: quiz
  resources_servers:
    mcqa: {grading_mode: lenient_boxed}
math_quiz_agent:
  _inherit_from: quiz_agent
  responses_api_agents:
    simple_agent:
      resources_server: {name: math_quiz}
judge_model:
  _copy: policy_model
  responses_api_models:
    vllm_model: {model: judge}
"""


def test_instances_inherit_and_copy(tmp_path: Path) -> None:
    graph = graph_of(imported(tmp_path, QUIZ + POLICY + INHERITING))
    assert graph["resources"] == {"math_quiz": {"type": "mcqa", "grading_mode": "lenient_boxed"}}
    assert graph["agents"].keys() == {"math_quiz_agent"}
    assert graph["agents"]["math_quiz_agent"]["resources"] == "math_quiz"
    assert [(name, model["model"]) for name, model in graph["models"].items()] == [
        ("policy_model", "${POLICY_MODEL_NAME}"),
        ("judge_model", "judge"),
    ]


def test_chains_deleted_keys_and_directives_in_values(tmp_path: Path) -> None:
    more = """
third: {_inherit_from: math_quiz}
third_agent:
  _inherit_from: math_quiz_agent
  responses_api_agents:
    simple_agent:
      _delete_key: max_steps, other
      resources_server: {name: third}
      max_empty_turns: "${copy:numbers.turns}"
numbers: {turns: 3}
other_model:
  responses_api_models: "${copy:policy_model.responses_api_models}"
"""
    graph = graph_of(imported(tmp_path, QUIZ + POLICY + INHERITING + more))
    assert graph["resources"] == {"third": {"type": "mcqa", "grading_mode": "lenient_boxed"}}
    assert graph["agents"]["third_agent"] == {
        "type": "simple_agent",
        "resources": "third",
        "model": "policy_model",
        "max_empty_turns": 3,
    }
    assert graph["models"]["other_model"] == graph["models"]["policy_model"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {_inherit_from: quizz}\n" + QUIZ, "there is no 'quizz' in the configs; did you mean 'quiz'?"),
        ("a: {_inherit_from: b}\nb: {_copy: a}\n", "in a circle: b -> a -> b"),
        ("a: {_inherit_from: [b]}\n", "_inherit_from must be the path of a value in the config"),
        ("config_paths: [none.yaml]\n", "config_paths: there is no file none.yaml"),
        ("config_paths: none.yaml\n", "config_paths must be a list of paths"),
        ("- a\n", "must be a mapping of servers by name"),
        ("a: [\n", "invalid YAML"),
        ("a: 1\na: 2\n", "the key is repeated"),
    ],
)
def test_configs_that_cannot_be_followed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        imported(tmp_path, text)
    assert "quiz.yaml" in caught.value.message


VALUES: dict[str, Any] = {
    "given": "chosen",
    "empty": None,
    "through": "${given}",
    "circle": "${circle_too}",
    "circle_too": "x${circle}",
    "nested": {"deep": [{"value": "found"}], "token": "hunter2"},
    "my_api_key": "hunter2",
    "mapping": {"a": "${name}", "b": [1, None]},
    "server": {"models": {"type": {"key": "...", "model": "sibling"}, "above": "uncle"}},
}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${name}", "${NAME}"),
        ("${oc.env:URL}", "${URL}"),
        ("${oc.env:URL,http://h/v1}", "${URL:-http://h/v1}"),
        ("${oc.env:URL,null}", "${URL:-}"),
        ("${oc.env:URL,''}", "${URL:-}"),
        ("${oc.env:URL,MISSING}", "${URL}"),
        ("${oc.env:A,${oc.env:B,c}}", "${A:-${B:-c}}"),
        ("${oc.decode:${oc.env:A,5}}", "${A:-5}"),
        ("${oc.select:name,x}", "${NAME:-x}"),
        ("${oc.select:name,${other}}", "${NAME:-${OTHER}}"),
        ("${oc.select:given,x}", "chosen"),
        ("${oc.select:empty,x}", "${EMPTY:-x}"),
        ("${oc.select:a.b.c,x}", "${A_B_C:-x}"),
        ("${given}", "chosen"),
        ("${nested.deep[0].value}", "found"),
        ("${.model}", "sibling"),
        ("${..above}", "uncle"),
        ("${through}", "chosen"),
        ("http://${host}:${port}/v1", "http://${HOST}:${PORT}/v1"),
        ("a \\${literal}", "a $${literal}"),
        ("???", "${SERVER_KEY}"),
        ("${my_api_key}", "${MY_API_KEY}"),
        ("${nested.token}", "${NESTED_TOKEN}"),
        ("${mapping}", {"a": "${NAME}", "b": [1, None]}),
        ("plain", "plain"),
        (3, 3),
        (["${given}", {"x": "${name}"}], ["chosen", {"x": "${NAME}"}]),
    ],
)
def test_interpolations(value: Any, expected: Any) -> None:
    translator = Translator(VALUES)
    assert translator.translate(value, ("server", "models", "type", "key")) == expected
    assert translator.problems == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("${circle}", "circle_too: ${circle} leads in a circle"),
        ("${nested.nowhere}", "server.key: ${nested.nowhere} leads to nothing in the configs"),
        ("${....up}", "server.key: ${....up} leads out of the config"),
        ("${sum:1,2}", "server.key: there is no counterpart of ${sum:...}; write the value itself"),
        ("${open", "server.key: a ${ without its }: '${open'"),
        ("x ${mapping}", "server.key: a mapping or a list within a text"),
    ],
)
def test_interpolations_that_lead_nowhere(value: str, problem: str) -> None:
    translator = Translator(VALUES)
    translator.translate(value, ("server", "key"))
    assert problem in translator.problems


@given(st.text(alphabet="${}:,.oc env[]\\\"'a1?-", max_size=40))
def test_any_text_is_translated_or_a_problem(text: str) -> None:
    translator = Translator(VALUES)
    translated = translator.translate(text, ("server", "models", "type", "key"))
    assert isinstance(translated, str | int | float | bool | list | dict | None)
    assert all(isinstance(problem, str) for problem in translator.problems)


VALUE = st.recursive(
    st.sampled_from([None, 1, "x", "???"]),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)


@given(VALUE, VALUE)
def test_merging_again_changes_nothing_and_what_is_missing_is_kept(a: Any, b: Any) -> None:
    assert merged(a, a) == a
    assert merged(a, {}) == (a if isinstance(a, dict) else {})
    assert merged(a, "???") == a
    assert merged(merged(a, b), b) == merged(a, b)


def test_unknown_types_are_named_with_what_to_do(tmp_path: Path) -> None:
    unknown = QUIZ.replace("    mcqa:", "    mcqaa:").replace("    simple_agent:", "    simpel_agent:")
    assert problems_of(tmp_path, unknown + POLICY) == [
        "quiz.resources_servers.mcqaa: there is no such resources type here; to host NeMo Gym's, "
        "import the config from a checkout of NeMo Gym, or install nemo-gym",
        "quiz_agent.responses_api_agents.simpel_agent: there is no such agent type here; of NeMo Gym's "
        "servers, agents cannot be hosted: docs/foreign-environments.md lists those with a counterpart, and "
        "docs/harnesses.md runs a program such as a coding agent",
    ]


@pytest.mark.parametrize("agent", ["harness_agent", "swe_agents", "hermes_agent"])
def test_an_agent_in_a_sandbox_is_none_of_ours(tmp_path: Path, agent: str) -> None:
    (problem,) = problems_of(tmp_path, QUIZ.replace("    simple_agent:", f"    {agent}:") + POLICY)
    assert problem.startswith(f"quiz_agent.responses_api_agents.{agent}: there is no such agent type here; ")
    assert "did you mean" not in problem
    assert ("gym_serve's harness_agent is another one" in problem) == (agent == "harness_agent")
    assert problem.endswith("docs/harnesses.md runs a program such as a coding agent")


def test_a_server_that_calls_its_judge_by_address_is_refused(tmp_path: Path) -> None:
    code = write(tmp_path, "resources_servers/riddles/riddle_app.py", "from . import panel")
    write(tmp_path, "resources_servers/riddles/panel.py", "url = get_server_url(name)")
    (problem,) = problems_of(tmp_path, HOSTED)
    assert problem.startswith("riddles.resources_servers.riddles: it calls a model by its address, and a ")
    assert problem.endswith(": docs/foreign-environments.md")
    code.with_name("panel.py").unlink()
    assert "riddles" in graph_of(imported(tmp_path, HOSTED))["resources"]


def test_a_counterpart_whose_packages_are_missing_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "gym_serve.environments.instruction_following"
    for name in (package, f"{package}.worker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "langdetect", None)
    (problem,) = problems_of(tmp_path, QUIZ.replace("    mcqa:", "    instruction_following:") + POLICY)
    what = "quiz: instruction_following of NeMo Gym is the type instruction_following here: cannot import "
    assert problem.startswith(what)
    assert "pip install 'gym-serve[instruction-following]'" in problem


def test_unknown_types_may_be_left_out_with_all_that_refer_to_them(tmp_path: Path) -> None:
    other = QUIZ.replace("quiz", "other").replace("    mcqa:", "    codex:")
    found = imported(tmp_path, QUIZ + other + POLICY, skip_unknown=True)
    assert graph_of(found)["agents"].keys() == {"quiz_agent"}
    assert found.notes[0].startswith("other.resources_servers.codex: there is no such resources type here")
    assert found.notes[1:] == ["other_agent: left out, because it refers to other"]
    assert problems_of(tmp_path, other, skip_unknown=True) == ["no server is left"]


HOSTED = """
judge:
  responses_api_models:
    vllm_model: {base_url: "http://j/v1", model: judge}
riddles:
  resources_servers:
    riddles:
      entrypoint: riddle_app.py
      domain: other
      num_workers: 4
      rounds: null
      judge_model_server: {type: responses_api_models, name: judge}
      judge_responses_create_params: {input: []}
      stop_token: "</s>"
      search: {api_key: "${search_key}", engines: [{password: hush}]}
riddles_agent:
  responses_api_agents:
    simple_agent:
      resources_server: {type: resources_servers, name: riddles}
      model_server: {type: responses_api_models, name: policy_model}
"""


def test_what_has_no_counterpart_is_hosted(tmp_path: Path) -> None:
    write(tmp_path, "resources_servers/riddles/riddle_app.py", "")
    requirements = "-e nemo-gym[dev] @ ../../\n# needed\nriddlelib>=2  # for fun\n\nnumpy\n"
    write(tmp_path, "resources_servers/riddles/requirements.txt", requirements)
    config = write(tmp_path, "resources_servers/riddles/configs/riddles.yaml", HOSTED)
    found = import_config([config])
    assert graph_of(found)["resources"]["riddles"] == {
        "type": "nemo_gym",
        "server": "resources_servers.riddles.riddle_app",
        "config": {
            "rounds": None,
            "judge_model_server": {"type": "responses_api_models", "name": "judge"},
            "judge_responses_create_params": {"input": []},
            "stop_token": "</s>",
            "search": {"engines": [{}]},
        },
        "secrets": {
            "search.api_key": "${SEARCH_KEY}",
            "search.engines.0.password": "${RIDDLES_SEARCH_ENGINES_0_PASSWORD}",
        },
        "servers": {"judge": "judge"},
    }
    assert "hush" not in found.yaml()
    assert any("riddlelib>=2, numpy" in note for note in found.notes)
    assert any("hosted" in note for note in found.notes)
    graph = GraphSpec.model_validate(graph_of(found))
    shown = json.dumps(resolve(graph, env=dict.fromkeys(found.variables, "http://key/v1")).public())
    assert '"servers": {"judge": "judge"}' in shown
    assert '"search.api_key": "**********"' in shown


@pytest.mark.parametrize("name", ["openenv", "workplace_assistant"])
def test_a_type_of_the_same_name_that_is_something_else_is_hosted(tmp_path: Path, name: str) -> None:
    text = f"theirs:\n  resources_servers:\n    {name}: {{entrypoint: app.py, env_class: maze.Maze}}\n"
    (problem,) = problems_of(tmp_path, text)
    assert f"gym_serve's {name} is another one" in problem
    write(tmp_path, f"resources_servers/{name}/app.py", "")
    graph = graph_of(import_config([write(tmp_path, "theirs.yaml", text)]))
    assert graph["resources"]["theirs"]["type"] == "nemo_gym"
    assert graph["resources"]["theirs"]["server"] == f"resources_servers.{name}.app"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("example_single_tool_call", "simple_weather"),
        ("example_multi_step", "multi_step_synonyms"),
        ("example_session_state_mgmt", "session_counter"),
        ("example_tool_call_multireward", "tool_call_multireward"),
        ("single_step_tool_use_with_argument_comparison", "tool_argument_comparison"),
    ],
)
def test_servers_with_a_counterpart_of_another_name(tmp_path: Path, theirs: str, ours: str) -> None:
    write(tmp_path, f"resources_servers/{theirs}/app.py", "")  # the counterpart goes before hosting
    found = imported(tmp_path, QUIZ.replace("mcqa", theirs).replace("grading_mode: null", "") + POLICY)
    assert graph_of(found)["resources"] == {"quiz": {"type": ours}}
    assert found.notes == []


def test_only_models_can_be_called_by_a_hosted_server(tmp_path: Path) -> None:
    text = HOSTED.replace(
        "{type: responses_api_models, name: judge}", "{type: resources_servers, name: quiz}"
    )
    write(tmp_path, "resources_servers/riddles/riddle_app.py", "")
    problems = problems_of(tmp_path, QUIZ + text + POLICY)
    assert problems == [
        "resources.riddles.servers.quiz: must be a model, got 'quiz', which is an environment"
    ]


def test_keys_that_nemo_gym_takes_from_the_command_line(tmp_path: Path) -> None:
    text = "search:\n  resources_servers:\n    google_search: {entrypoint: app.py}\n"
    found = imported(tmp_path, text)
    assert graph_of(found)["resources"]["search"] == {
        "type": "google_search",
        "google_api_key": "${SEARCH_GOOGLE_API_KEY}",
        "google_cx": "${SEARCH_GOOGLE_CX}",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x: 1\n", "the configs have no servers"),
        (QUIZ.replace("name: quiz}", "name: quizz}"), "there is no server 'quizz'; did you mean 'quiz'?"),
        (QUIZ.replace("name: quiz}", 'name: "???"}'), "the name of the server is left open"),
        (
            "a: {resources_servers: {mcqa: {}, other: {}}}\n",
            "a must have one server type with one implementation",
        ),
        ("a: {resources_servers: {mcqa: 3}}\n", "must be a mapping of settings"),
        (QUIZ.replace("grading_mode: null", "grading_mode: x"), "resources.quiz.grading_mode: must be"),
    ],
)
def test_configs_with_problems(tmp_path: Path, text: str, problem: str) -> None:
    assert any(problem in found for found in problems_of(tmp_path, text))


def test_settings_without_a_counterpart_are_noted(tmp_path: Path) -> None:
    text = QUIZ.replace("max_steps: 4", "max_steps: 4\n      nudge: true\n      quiet: false")
    found = imported(tmp_path, text + POLICY)
    assert found.notes == ["quiz_agent: simple_agent has no setting 'nudge', it was left out"]


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({"uses_reasoning_parser": True}, {"parse_think_tags": True}),
        (
            {"uses_reasoning_parser": True, "uses_interleaved_reasoning": False},
            {"parse_think_tags": True, "reasoning_input": "drop"},
        ),
        ({"uses_reasoning_parser": False}, {"parse_think_tags": False, "reasoning_input": "think_tags"}),
        (
            {"uses_reasoning_parser": True, "preserve_reasoning_in_assistant_content": True},
            {"parse_think_tags": True, "reasoning_input": "think_tags"},
        ),
        ({"return_token_id_information": True}, {"return_token_ids": True}),
    ],
)
def test_settings_of_vllm_models(tmp_path: Path, switches: dict[str, bool], expected: dict[str, Any]) -> None:
    settings = {"base_url": "http://h/v1", "model": "m", **switches}
    config = {"policy_model": {"responses_api_models": {"vllm_model": settings}}}
    graph = graph_of(imported(tmp_path, yaml.safe_dump(config)))
    assert graph["models"]["policy_model"] == {
        "type": "chat_model",
        "base_url": "http://h/v1",
        "model": "m",
        **expected,
    }


JUDGED = """
lc:
  resources_servers:
    equivalence_llm_judge:
      entrypoint: app.py
      judge_model_server: {type: responses_api_models, name: policy_model}
      judge_prompt_template_fpath: ../../benchmarks/lc/judge.txt
      judge_endpoint_max_concurrency: null
      judge_system_message: null
      judge_equal_label: "Judgement: yes"
      judge_not_equal_label: "Judgement: no"
      extraction_length_threshold: null
lc_agent:
  responses_api_agents:
    simple_agent:
      max_steps: null
      skip_verification: true
      resources_server: {type: resources_servers, name: lc}
      model_server: {type: responses_api_models, name: policy_model}
"""
JUDGE_PROMPT = """\

Judge whether the answer matches the reference, which costs ${x} dollars.
Judgement: answer 'yes' or 'no'.

{expected_answer}
{generated_answer}
"""


def test_judges_keep_their_prompt_their_nulls_and_their_limit(tmp_path: Path) -> None:
    write(tmp_path, "resources_servers/equivalence_llm_judge/app.py", "")
    config = write(tmp_path, "resources_servers/equivalence_llm_judge/configs/lc.yaml", JUDGED)
    assert_refused = pytest.raises(
        GraphError, match=r"judge_prompt_template_fpath: there is no file '\.\./\.\."
    )
    with assert_refused:
        import_config([config])
    prompt = JUDGE_PROMPT.replace("{x}", "{{x}}")
    write(tmp_path, "benchmarks/lc/judge.txt", prompt)
    found = import_config([config])
    graph = write(tmp_path, "graph.yaml", found.yaml())
    assert "|-\n" in graph.read_text(), "people read the prompt line by line"
    lines = {"POLICY_BASE_URL": "http://h/v1", "POLICY_MODEL_NAME": "m"}
    nodes = resolve(load_graph(graph).spec, env=lines).nodes
    judged = nodes["lc"].settings
    assert judged["judge_prompt_template"] == prompt.strip()
    assert (judged["judge_max_concurrency"], judged["extraction_length_threshold"]) == (None, None)
    assert judged["judge_equal_label"] == "Judgement: yes"
    assert "judge_system_message" not in judged, "null is what it is anyway"
    agent = nodes["lc_agent"].settings
    assert (agent["max_steps"], agent["skip_verification"]) == (None, True)
    assert found.notes == ["policy_model is in none of the configs: a chat_model was put in its place"]


def test_labels_that_the_judges_prompt_never_mentions_are_refused(tmp_path: Path) -> None:
    write(
        tmp_path,
        "benchmarks/lc/judge.txt",
        "Compare them, then end with [[A=B]] or [[A!=B]], and nothing more.",
    )
    write(
        tmp_path,
        "judge.txt",
        "Compare them, then end with [[A=B]] or with [[A!=B]] and nothing more than that.\n"
        "{expected_answer} {generated_answer}",
    )
    config = write(tmp_path, "lc.yaml", JUDGED.replace("../../benchmarks/lc/judge.txt", "judge.txt"))
    with pytest.raises(GraphError, match="never mentions 'Judgement: no' and 'Judgement: yes'"):
        import_config([config])


def test_long_names_that_are_cut_stay_apart(tmp_path: Path) -> None:
    stem = "a_very_long_name_that_goes_on_and_on_until_it_is_longer_than_a_graph_allows"
    text = QUIZ.replace("quiz_agent:", f"{stem}_agent:").replace("quiz:", f"{stem}_server:", 1)
    graph = graph_of(imported(tmp_path, text.replace("name: quiz}", f"name: {stem}_server}}") + POLICY))
    (server,), ((agent, settings),) = graph["resources"], graph["agents"].items()
    assert server != agent
    assert settings["resources"] == server


def test_queries_are_judged_alone_as_in_nemo_gym(tmp_path: Path) -> None:
    settings = {"judge_model_server": {"type": "responses_api_models", "name": "policy_model"}}
    config = {"sql": {"resources_servers": {"text_to_sql": settings}}}
    graph = graph_of(imported(tmp_path, yaml.safe_dump(config)))
    assert graph["resources"]["sql"] == {
        "type": "text_to_sql",
        "judge": "policy_model",
        "check_execution": False,
    }


def test_judges_are_references_and_their_parameters_have_no_input(tmp_path: Path) -> None:
    settings = {
        "judge_model_server": {"type": "responses_api_models", "name": "policy_model"},
        "judge_responses_create_params": {"input": [], "temperature": 0.0},
    }
    config = {"maths": {"resources_servers": {"math_with_judge": settings}}}
    graph = graph_of(imported(tmp_path, yaml.safe_dump(config)))
    assert graph["resources"]["maths"] == {
        "type": "math_with_judge",
        "judge": "policy_model",
        "judge_responses_create_params": {"temperature": 0.0},
    }


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("hunter2", "${GPT_API_KEY}"),
        ("${oc.env:KEY,hunter2}", "${KEY}"),
        ("${openai_api_key}", "${OPENAI_API_KEY}"),
        ("${file_api_key}", "${FILE_API_KEY}"),
    ],
)
def test_secrets_are_never_copied(tmp_path: Path, key: str, variable: str) -> None:
    settings = {"openai_base_url": "http://h/v1", "openai_model": "m", "openai_api_key": key}
    config = {"gpt": {"responses_api_models": {"openai_model": settings}}, "file_api_key": "hunter2"}
    found = imported(tmp_path, yaml.safe_dump(config))
    assert graph_of(found)["models"]["gpt"]["api_key"] == variable
    assert "hunter2" not in found.yaml() + str(found)


def test_names_that_a_graph_cannot_have_are_changed(tmp_path: Path) -> None:
    text = QUIZ.replace("quiz_agent:", '"2nd quiz/agent":').replace("name: quiz}", "name: v1}")
    found = imported(tmp_path, text.replace("\nquiz:", "\nv1:") + POLICY)
    assert graph_of(found)["agents"].keys() == {"s_2nd_quiz_agent"}
    assert graph_of(found)["resources"].keys() == {"s_v1"}
    assert graph_of(found)["agents"]["s_2nd_quiz_agent"]["resources"] == "s_v1"
    assert "v1: is called s_v1 here; rows must use that name" in found.notes


def test_long_names_keep_what_tells_them_apart(tmp_path: Path) -> None:
    family = "general_" + 12 * "quiz_"
    text = re.sub(r"\bquiz(?=[_:}])", family + "quiz", QUIZ)
    graph = graph_of(imported(tmp_path, text + POLICY))
    ((environment,), (agent,)) = graph["resources"], graph["agents"]
    assert environment != agent
    assert agent.endswith("quiz_agent")
    assert graph["agents"][agent]["resources"] == environment


def test_names_that_are_changed_stay_apart(tmp_path: Path) -> None:
    names = ["v1", "health", "s_health", "quiz one", "quiz/one", "x" * 70, "x" * 71]
    config = {name: {"resources_servers": {"mcqa": {}}} for name in names}
    graph = graph_of(imported(tmp_path, yaml.safe_dump(config)))
    assert len(graph["resources"]) == len(names)


CONFIG = st.recursive(
    st.sampled_from([None, 1, "???", "quiz", "${quiz}", "${a.b}", "policy_model", "x"]),
    lambda inner: (
        st.dictionaries(
            st.sampled_from(
                [
                    "quiz",
                    "resources_servers",
                    "mcqa",
                    "_inherit_from",
                    "_copy",
                    "_delete_key",
                    "type",
                    "name",
                    "a",
                ]
            ),
            inner,
            max_size=4,
        )
        | st.lists(inner, max_size=2)
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.sampled_from(["quiz", "policy_model", "a", "config_paths"]), CONFIG, max_size=3))
def test_any_config_is_a_graph_or_a_typed_error(tmp_path_factory: Any, config: dict[str, Any]) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(config))
    with suppress(GymError):
        assert yaml.safe_load(import_config([file]).yaml())["applications"]


def test_the_command_prints_or_writes_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(write(tmp_path, "quiz.yaml", QUIZ + POLICY))
    printed = runner.invoke(main, ["import-nemo-gym", config])
    assert printed.exit_code == 0, printed.output
    assert yaml.safe_load(printed.stdout)["applications"][0]["name"] == "quiz"
    assert "data set: agent quiz_agent, name train, type train, rows quiz/train.jsonl" in printed.stderr
    out = tmp_path / "graphs" / "quiz.yaml"
    refused = runner.invoke(main, ["import-nemo-gym", config, "-o", str(out)])
    assert refused.exit_code == 1
    # No folder is created silently: a misspelt path would be hard to find.
    assert "does not exist; create it first" in refused.output
    out.parent.mkdir()
    written = runner.invoke(main, ["import-nemo-gym", config, "-o", str(out)])
    assert written.exit_code == 0, written.output
    assert out.read_text() == printed.stdout
    monkeypatch.setenv("POLICY_BASE_URL", "http://localhost:9000/v1")
    monkeypatch.setenv("POLICY_MODEL_NAME", "m")
    validated = runner.invoke(main, ["validate", str(out)])
    assert validated.exit_code == 0, validated.output
    report = json.loads(runner.invoke(main, ["import-nemo-gym", config, "--json"]).stdout)
    assert report["ok"] is True
    assert report["graph"] == yaml.safe_load(printed.stdout)


def test_the_command_reports_problems_and_writes_nothing(tmp_path: Path) -> None:
    config = str(write(tmp_path, "quiz.yaml", QUIZ.replace("    mcqa:", "    codex:")))
    out = tmp_path / "graph.yaml"
    result = runner.invoke(main, ["import-nemo-gym", config, "-o", str(out)])
    assert result.exit_code == 1
    assert f"1 problem in {config}:" in result.stderr
    assert not out.exists()
    report = json.loads(runner.invoke(main, ["import-nemo-gym", config, "--json"]).stdout)
    assert report["problems"][0].startswith("quiz.resources_servers.codex: there is no such")
    missing = runner.invoke(main, ["import-nemo-gym", "none.yaml"])
    assert (missing.exit_code, missing.stderr) == (1, "no such file: none.yaml\n")
    assert runner.invoke(main, ["import-nemo-gym"]).exit_code == 2
