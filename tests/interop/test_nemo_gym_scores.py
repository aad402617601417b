"""Benchmarks of NeMo Gym: the same completions get the scores that its own program gives them."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from venvs import ROOT, printed

from gym_serve.evaluation.benchmark import Benchmark
from gym_serve.interop.nemo_gym.benchmarks import HOME, nemo_gym_benchmark
from gym_serve.testing import TestClient

VENV = Path(os.environ.get("NEMO_GYM_VENV", ROOT / ".venv-nemo-gym"))
PACKAGES = next(VENV.glob("lib/python*/site-packages"), VENV)

pytestmark = [
    pytest.mark.interop,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (PACKAGES / "math_verify").exists(), reason=f"{VENV} is not as `make interop` builds it"
    ),
]

NAMES = [
    *("aime24", "aime25", "aime26", "apex25", "apex_shortlist", "hendrycks_math", "hmmt_feb25", "hmmt_nov25"),
    *("math-500", "mmlu", "mmlu_pro", "mmlu-redux", "gpqa", "supergpqa", "global-piqa", "longcodebench"),
]
"""Those of servers for which gym_serve has its own, without a judge. Not among them: gsm8k, whose server
refuses the numbers that its script writes; others whose scripts need more than rows of a hub."""


UNLIKE = {
    "math_with_judge": {
        *("12", "The answer is 12.", "**12**"),  # a final answer without a box
        "\\boxed{13} no, \\boxed{12}",  # which takes the first one back
    },
    "mcqa": {"Antwort: B", "Respuesta: A", "答案：C"},  # "Answer:" in the language of the answer
}
"""By environment, completions that are right here and wrong there, as the READMEs of these say."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NeMo Gym's layout, with benchmarks that are written to."""
    folder = tmp_path_factory.mktemp("nemo-gym")
    shutil.copytree(PACKAGES / "benchmarks", folder / "benchmarks")
    for other in (
        "environment_servers",
        "resources_servers",
        "responses_api_agents",
        "responses_api_models",
    ):
        (folder / other).symlink_to(PACKAGES / other)
    return folder


@pytest.fixture(scope="module")
def theirs(home: Path) -> dict[str, Any]:
    result: dict[str, Any] = printed(VENV, "nemo_gym_scores.py", *NAMES, folder=home)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_completions_get_the_scores_of_nemo_gyms_own_program(
    name: str, home: Path, theirs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME, str(home))
    benchmark = Benchmark.model_validate({**nemo_gym_benchmark(name), "name": "theirs"})
    rows = [row for _, row, _ in benchmark.rows() if row is not None]
    expected = theirs[name]
    assert [row["responses_create_params"]["input"] for row in rows] == expected["prompts"]
    settings = {key: value for key, value in benchmark.environment.items() if key != "type"}
    rewards = []
    with TestClient(benchmark.server(**settings)) as client:
        for row in rows:
            with client.episode(row) as episode:
                rewards += [episode.verify(completion).reward for completion in expected["completions"]]
    cases = [(row["expected_answer"], completion) for row in rows for completion in expected["completions"]]
    different = {
        (*case, ours, given)
        for case, ours, given in zip(cases, rewards, expected["rewards"], strict=True)
        if ours != given
    }
    unlike = UNLIKE[benchmark.environment["type"]]
    assert [one for one in different if one[1] not in unlike or one[2:] != (1.0, 0.0)] == []
    assert {0.0, 1.0} <= set(rewards), "right and wrong completions"
