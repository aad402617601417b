"""`llama_cpp_engine` on a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.batched_engines import BatchedEngineTests, LogProbs
from support.engines import TOOLS
from support.tiny_gguf import log_probs_by_llama_cpp, make_tiny_gguf

from gym_serve.deployments.llama_cpp_engine import LlamaCppEngine
from gym_serve.types.errors import BadRequest, GraphError

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama(tiny_gguf: Path) -> AsyncIterator[LlamaCppEngine]:
    engine = LlamaCppEngine(name="policy", model=str(tiny_gguf), threads=1)
    await engine.start()
    yield engine
    await engine.stop()


class TestLlamaCppEngine(BatchedEngineTests):
    """Those that every engine has to pass."""

    tolerance = 0.03  # its cache holds half precision

    @pytest.fixture
    def engine(self, llama: LlamaCppEngine) -> LlamaCppEngine:
        return llama

    @pytest.fixture
    def log_probs(self, tiny_gguf: Path) -> LogProbs:
        return partial(log_probs_by_llama_cpp, tiny_gguf)


async def test_a_slot_keeps_what_it_has_read(llama: LlamaCppEngine) -> None:
    body = {"input": "a prompt of its own: zq", "max_output_tokens": 8, "temperature": 0}
    first, second = [await llama.responses(body) for _ in range(2)]
    assert second["output"][-1]["generation_token_ids"] == first["output"][-1]["generation_token_ids"]
    usage = second["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


async def test_a_prompt_longer_than_a_pass_does_not_stop_others(llama: LlamaCppEngine) -> None:
    bodies = [{"input": "x y " * n, "max_output_tokens": 5, "temperature": 0} for n in (1, 400, 2, 600)]
    alone = [await llama.responses(body) for body in bodies]
    together = await asyncio.gather(*map(llama.responses, bodies))
    one, other = ([r["output"][-1]["generation_token_ids"] for r in rs] for rs in (alone, together))
    assert one == other


async def test_more_calls_than_slots_wait(llama: LlamaCppEngine) -> None:
    bodies = [{"input": f"{n}", "max_output_tokens": 4} for n in range(3 * llama.config.slots)]
    for response in await asyncio.gather(*map(llama.responses, bodies)):
        assert response["output"][-1]["generation_token_ids"]


async def test_a_template_without_tools_gets_them_as_text(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
        "+ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    engine = LlamaCppEngine(model=str(make_tiny_gguf(tmp_path / "plain.gguf", template=template)), threads=1)
    await engine.start()
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
    results = [{"type": "function_call_output", "call_id": "c", "output": text} for text in ("sunny", "12")]
    items = [{"role": "user", "content": "hi"}, call, *results]
    tools = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
    tokens = await engine.render({"tools": tools}, engine.chat_body({"input": items})["messages"])
    text = b"".join(map(engine._tokenizer.bytes_of, tokens)).decode()
    await engine.stop()
    assert text.startswith("<|im_start|>system\nYou have access to the following tools:")
    assert json.dumps(TOOLS[0]["description"]) in text
    assert (
        "<tool_call>\n"
        + json.dumps({"name": "get_weather", "arguments": {"city": "Oslo"}})
        + "\n</tool_call>"
    ) in text
    assert (
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\n12\n</tool_response><|im_end|>"
    ) in text


async def test_a_file_that_is_no_gguf_is_an_error_of_the_graph(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF, not")
    with pytest.raises(GraphError, match="cannot use this file"):
        await LlamaCppEngine(model=str(tmp_path / "no.gguf")).start()
    missing = LlamaCppEngine.Config(model=str(tmp_path / "missing.gguf"), weight_updates=True)
    problems = list(LlamaCppEngine.preflight(missing))
    assert len(problems) == 2
    assert "missing.gguf" in problems[0]
    assert "weight_updates" in problems[1]


async def test_its_weights_stay(llama: LlamaCppEngine) -> None:
    with pytest.raises(BadRequest, match="weight"):
        await llama.update_weights(Path("other"), "1")
