"""A model by LiteLLM's name, by its own SDK in the venv of `make interop`."""

import pytest
from venvs import INTEROP, needs, printed

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300), needs(INTEROP, "litellm")]


def test_an_episode_a_stream_and_what_goes_wrong() -> None:
    found = printed(INTEROP, "run_litellm.py")
    assert found["items"] == ["function_call", "function_call_output", "message"]
    assert (found["usage"], found["reward"]) == (2, 0.0)
    assert found["streamed"] == found["said"] != ""
    assert found["chunks"] > 1
    nowhere, gone = found["failures"]["nowhere"], found["failures"]["gone"]
    assert nowhere[0] == "EndpointMisconfigured"
    assert "unknown server 'no'" in nowhere[1]
    assert gone[0] == "Unavailable"
    assert "secret-key-1" not in str(found)
