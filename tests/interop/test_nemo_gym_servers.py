"""Every resources server of NeMo Gym: hosted, it gives the verdicts that it gives in NeMo Gym.

`nemo_gym_servers.py` runs all of them, both ways, with the rows and rollouts that they ship. The table in
docs/foreign-environments.md is made of what it found; with ``SERVERS_TABLE=1`` it is written.
"""

import os

import pytest
from venvs import FOREIGN, ROOT, needs, printed

pytestmark = [pytest.mark.interop, pytest.mark.timeout(3600), needs(FOREIGN, "nemo_gym")]

PAGE = ROOT / "docs" / "foreign-environments.md"
BEGIN, END = "<!-- made by tests/interop/test_nemo_gym_servers.py -->\n", "<!-- end -->\n"
UNCHECKED = {  # not started here at all
    "competitive_coding_challenges": "needs 27 GB of test data",
    "critpt": "sends answers to an external service, 70 at once",
    "genrm_compare": "judges groups of rollouts, which gym_serve compares itself",
    "longmt_eval": "needs torch, and weights from a hub",
    "vlm_eval_kit": "clones its code and installs it when it starts",
    "gdpval": "calls its judge by address",
    "xstest": "calls its judge by address",
}
NO_START = {
    "aviary": "needs `fhaviary`, and data from a hub",
    "bigcodebench": "needs `uv`, and makes a virtual environment of Python 3.10 when it starts",
    "bird_sql": "downloads its databases when it starts",
    "code_fim": "needs `human_eval_infilling`, which is not on PyPI",
    "cvdp": "needs `nltk`, and Apptainer",
    "ether0": "clones its code when it starts",
    "evalplus": "needs `evalplus`, and downloads its tasks",
    "finance_sec_search": "needs `beautifulsoup4`, and downloads a list from the SEC",
    "ifbench": "clones its code when it starts",
    "instruction_following": "needs `verifiable_instructions`, which is not on PyPI",
    "newton_bench": "clones its code when it starts, and asks a model of OpenAI",
    "ns_tools": "calls another resources server",
    "openenv": "needs environments of OpenEnv that are not on PyPI; use `type: openenv`",
    "rdkit_chemistry": "calls another resources server",
    "spider2_lite": "downloads its databases when it starts",
    "wmt_translation": "needs `sacrebleu`, and torch for COMET",
}
NOT_AS_RECORDED = {
    "blackjack": "the cards are random",
    "browsecomp_advanced_harness": "it has no rollouts",
    "indirect_prompt_injection": "NeMo Gym gives another reward now",
    "jailbreak_detection": "it has no rollouts",
    "math_advanced_calculations": "the rollouts are of rows that it does not have",
    "math_formal_lean": "needs a sandbox with Lean",
    "math_with_code": "NeMo Gym gives another reward now",
    "multichallenge": "it has no rollouts",
    "over_refusal_detection": "it has no rollouts",
    "proof_judge": "what the judge said is not recorded",
    "proof_verification": "what the judge said is not recorded",
    "ruler": "the rollouts are of rows that it does not have",
    "simpleqa": "NeMo Gym reads another grade in what the judge said",
    "speed_bench": "needs the metrics of a vLLM server",
    "structured_outputs": "the rollouts are of rows that it does not have",
    "swerl_gen": "needs Apptainer",
    "tales": "needs `tale-suite` and six packages of games",
    "tavily_search": "it has no rollouts",
    "terminus_judge": "NeMo Gym gives another reward now",
    "verifif": "needs a judge at `judge_base_url`",
    "workplace_assistant": "the rollouts are of rows that it does not have",
}
TIMED = {"code_gen", "math_with_code", "math_with_judge", "swerl_gen"}  # a busy machine has other verdicts
SERVERS = sorted(
    path.parent.name
    for path in FOREIGN.glob("lib/python*/site-packages/resources_servers/*/configs")
    if path.parent.name != "gymnasium"  # what stepped servers are derived from
)


@pytest.fixture(scope="module")
def found():
    return printed(FOREIGN, "nemo_gym_servers.py", *(name for name in SERVERS if name not in UNCHECKED))


def test_every_server_starts_here_if_it_starts_in_nemo_gym(found):
    assert {name for name in found if "failed" in found[name]} == NO_START.keys()
    for name in NO_START:
        assert "original" in found[name]["failed"], f"{name} starts in NeMo Gym"


def test_verdicts_tools_judges_and_metrics_are_as_in_nemo_gym(found):
    started = {name: result for name, result in found.items() if "failed" not in result}
    differ = {name: result["differences"] for name, result in started.items() if result["differences"]}
    unexplained = differ.keys() - TIMED
    assert unexplained == set(), {name: differ[name] for name in unexplained}


def test_recorded_rewards(found):
    started = {name: result for name, result in found.items() if "failed" not in result}
    differ = {name for name, result in started.items() if not is_as_recorded(result)}
    assert differ - TIMED == NOT_AS_RECORDED.keys() - TIMED


def is_as_recorded(result):
    return 0 < result["replayed"] == result["as_recorded"]


def test_the_table_of_the_documentation_says_what_was_found(found):
    others = NOT_AS_RECORDED | NO_START | UNCHECKED
    whole = [f"`{name}`" for name in SERVERS if name not in others]
    made = (
        f"Of the {len(SERVERS)} resources servers of NeMo Gym 0.4.0, {len(whole)} give every reward that "
        f"was\nrecorded, {len(NOT_AS_RECORDED)} start but cannot give all of them, and "
        f"{len(NO_START | UNCHECKED)} do not start here.\n\n"
        "| server | recorded rewards that it gives | why not all |\n|---|---|---|\n"
        f"| {', '.join(whole)} | all | |\n"
    )
    for name, why in sorted(others.items()):
        result = found.get(name, {})
        given = f"{result['as_recorded']} of {result['replayed']}" if result.get("replayed") else "none"
        made += f"| `{name}` | {given if name in NOT_AS_RECORDED else 'does not start'} | {why} |\n"
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    table, end, after = rest.partition(END)
    assert begin
    assert end
    if os.environ.get("SERVERS_TABLE"):
        PAGE.write_text(before + begin + made + end + after)
    else:
        assert table == made, "run this with SERVERS_TABLE=1"


def test_some_servers_on_ray():
    names = ["format_verification", "mcqa", "reasoning_gym", "xlam_fc"]
    found = printed(FOREIGN, "host_nemo_gym_on_ray.py", *names)
    for name in names:
        assert len(found["rewards"][name]) == 5
        assert all(then == now for then, now in found["rewards"][name]), name
    assert {kind for kind, _ in found["failures"]} == {"VerifierFailed"}
    assert set(found["states"].values()) == {"ready"}, "code that asks for NeMo Gym's config ends no replica"
