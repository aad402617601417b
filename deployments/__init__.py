"""Models and agents, each a server that a graph deploys by its ``type``.

Models, by what they speak to:

- `chat_model` (with `genrm_model`), `openai_model`, `pooling_model`: HTTP endpoints
- `vllm_engine`, `hf_engine`: an engine inside the replica (`engine_model` is their base class)
- `callback_model`, `sglang_model`: an engine elsewhere that takes and gives tokens (`tokenizing`)
- `scripted_model`: no model at all, for first runs and tests

Agents, by who runs the loop:

- `simple_agent`, `single_turn_agent`, `refinement_agent`, `user_simulator_agent`, `gymnasium_agent`: this
  process
- `remote_agent`, `harness_agent`: an external agent or harness
"""
