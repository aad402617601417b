"""A policy and a judge on one GPU of a Ray, each with its share: speed, new weights, exact log-probabilities.

    python -m benchmarks.gpu [--device cuda] [--hidden 1024] [--layers 28] [--rollouts 256] [--tokens 128]

The policy has random weights, by default in the shape of Qwen3-0.6B but for its small vocabulary, so that no
download is needed; the judge is the tiny model, and is held to its two verdicts. Both are `hf_engine`s
with a part of the GPU (`num_gpus: 0.5` and `0.25`). Printed are:

- tokens per second, with every rollout in flight; a rollout is one answer and one verdict
- seconds that new weights take from this process into the engine
- the largest difference of log-probabilities between the engine and a forward pass of the same model here

``--device cpu`` with a small model tries the benchmark itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness.reports import table
from gym_serve import Gym
from gym_serve.deployments.hf_engine.tiny_model import make_tiny_model
from gym_serve.training import TrainingSample, samples
from gym_serve.training.weights import encoded


def make_policy(folder: Path, *, hidden: int, layers: int, seed: int = 0) -> Path:
    """A model with the tiny model's tokenizer, and random weights of this size."""
    import torch  # here and below: the other benchmarks' venv has no torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    make_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=128 if hidden >= 1024 else 32,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def graph(policy: Path, judge: Path, device: str, in_flight: int) -> dict[str, Any]:
    """The graph: policy and judge on their shares of the GPU."""
    gpu = device == "cuda"
    engine = {
        "type": "hf_engine",
        "device": device,
        "max_batch": in_flight,
        "max_ongoing_requests": in_flight,
    }
    verdict = {"structured_outputs": {"choice": ["[[A=B]]", "[[A!=B]]"]}, "max_tokens": 16}
    return {
        "models": {
            "policy": engine
            | {"model": str(policy), "dtype": "bfloat16" if gpu else "float32", "weight_updates": True}
            | {"num_gpus": 0.5 if gpu else 0},
            "judge": engine | {"model": str(judge), "extra_body": verdict, "num_gpus": 0.25 if gpu else 0},
        },
        "resources": {
            "judged": {
                "type": "equivalence_llm_judge",
                "judge": "judge",
                "max_ongoing_requests": in_flight,
                "check_twice_swap": False,
            }
        },
        "agents": {
            "agent": {
                "type": "single_turn_agent",
                "model": "policy",
                "resources": "judged",
                "max_ongoing_requests": in_flight,
            }
        },
    }


def difference(model: Any, sample: TrainingSample) -> float:
    """The largest difference of log-probabilities between a sample and `model`, over its generated tokens."""
    import torch

    start = len(sample.prompt_ids)
    ids = torch.tensor([sample.input_ids], device=model.device)
    with torch.inference_mode():
        scores = model(ids).logits[0, start - 1 : -1].float().log_softmax(-1)
    own = scores.gather(1, ids[0, start:, None])[:, 0].tolist()
    pairs = zip(own, sample.logprobs, sample.loss_mask, strict=True)
    return max(abs(mine - its) for mine, its, trained in pairs if trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder, "policy"), hidden=arguments.hidden, layers=arguments.layers)
        judge = make_tiny_model(Path(folder, "judge"))
        begun = time.monotonic()
        spec = graph(policy, judge, arguments.device, arguments.rollouts)
        with Gym.from_graph(spec, name="gpu") as gym:
            ready = time.monotonic() - begun
            lines = [("graph ready, s", ready), *measured(gym, policy, arguments)]
    print(table(("what", "value"), lines))


def measured(gym: Gym, policy: Path, arguments: argparse.Namespace) -> list[tuple[str, float]]:
    """Lines of the table."""
    import torch
    from transformers import AutoModelForCausalLM

    row = {"prompt": "Name a colour and say why you like it.", "expected_answer": "blue"}
    params = {"temperature": 1.0, "max_output_tokens": arguments.tokens}
    rates = []
    for _ in range(3):
        begun = time.monotonic()
        rollouts = gym.run([row], repeats=arguments.rollouts, concurrency=arguments.rollouts, params=params)
        seconds = time.monotonic() - begun
        failed = [rollout for rollout in rollouts if rollout.failure is not None]
        assert not failed, failed[0].failure
        cut = [sample for rollout in rollouts for sample in samples(rollout)]
        rates.append(sum(sum(sample.loss_mask) for sample in cut) / seconds)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype).to(arguments.device).eval()
    before = [difference(model, sample) for sample in islice(cut, 32)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    begun = time.monotonic()
    data = encoded(model.state_dict().items())
    packed = time.monotonic() - begun
    gym.update_weights("policy", "1", tensors=data)
    updated = time.monotonic() - begun
    new = gym.run([row], repeats=32, params=params)
    assert all(rollout["response"]["output"] for rollout in new)
    after = [difference(model, sample) for rollout in new for sample in samples(rollout)]
    return [
        ("parameters, millions", sum(parameter.numel() for parameter in model.parameters()) / 1e6),
        ("generated tokens/s, median of 3", median(rates)),
        ("rollouts/s of the last run", arguments.rollouts / seconds),
        ("mean reward (verdicts of a random judge)", fmean(r.reward or 0.0 for r in rollouts)),
        ("new weights, MB", len(data) / 1e6),
        ("new weights, s", updated),
        ("of these packing them, s", packed),
        ("largest difference of log-probabilities", max(before)),
        ("the same with the new weights", max(after)),
    ]


if __name__ == "__main__":
    main()
