"""Read exported files with the libraries that they are for, and print what these made of them as JSON.

Run by `test_export_libraries.py` in the venv of `make interop`: ``python read_with_library.py NAME FOLDER``.
Everything is local: a byte-level tokenizer with a ChatML template, and a model of a few weights.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and tools -%}<tools>{{ tools | tojson }}</tools>{%- endif -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
<call>{{ call.function.name }} {{ arguments if arguments is string else arguments | tojson }}</call>
{%- endfor -%}
<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def byte_tokenizer():
    import tiny

    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def verl(folder):
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    tokenizer = byte_tokenizer()
    config = OmegaConf.create(
        {"cache_dir": str(folder / "cache"), "max_prompt_length": 2000, "filter_overlong_prompts_workers": 1}
    )
    tasks = RLHFDataset(str(folder / "tasks.parquet"), tokenizer, config)
    rollouts = RLHFDataset(str(folder / "rollouts.parquet"), tokenizer, config)
    batch = collate_fn([rollouts[i] for i in range(len(rollouts))])
    sft = MultiTurnSFTDataset(
        str(folder / "rollouts.parquet"),
        tokenizer,
        {"pad_mode": "no_padding", "max_length": 5000, "truncation": "error"},
    )
    items = [sft[i] for i in range(len(sft))]
    outputs = [
        AgentLoopOutput(**row["rollout"]).as_dict() for row in map(rollouts.__getitem__, range(len(rollouts)))
    ]
    keys = ("raw_prompt", "data_source", "reward_model", "index", "extra_info")
    return {
        "tasks": [{key: tasks[i][key] for key in keys} for i in range(len(tasks))],
        "batch": {key: list(batch[key]) for key in ("raw_prompt", "reward", "messages")},
        "learned": [tokenizer.decode(item["input_ids"][item["loss_mask"] == 1]) for item in items],
        "rendered": [tokenizer.decode(item["input_ids"]) for item in items],
        "outputs": [
            {
                key: output[key].tolist()
                for key in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
            }
            for output in outputs
        ],
    }


def trl(folder):
    import torch
    from datasets import load_dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = str(folder / "model")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(model)
    loaded = {
        kind: load_dataset("parquet", data_files=str(folder / f"{kind}.parquet"))["train"]
        for kind in ("completion", "tokens")
    }
    settings = {
        "output_dir": str(folder / "out"),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "max_length": None,
    }

    def sft(kind, **more):
        torch.manual_seed(0)
        trainer = SFTTrainer(
            model, SFTConfig(**settings, **more), train_dataset=loaded[kind], processing_class=tokenizer
        )
        return [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]

    def learned(example):
        return tokenizer.decode([label for label in example["labels"] if label != -100])

    return {
        "loaded": {kind: list(rows) for kind, rows in loaded.items()},
        "completion": [learned(example) for example in sft("completion", assistant_only_loss=True)],
        "rendered": [tokenizer.decode(example["input_ids"]) for example in sft("completion")],
        "tokens": [{key: example[key] for key in ("input_ids", "labels")} for example in sft("tokens")],
    }


def openrlhf(folder):
    from datasets import load_dataset
    from openrlhf.datasets import PromptDataset, SFTDataset

    tokenizer = byte_tokenizer()
    rows = load_dataset("parquet", data_files=str(folder / "rollouts.parquet"))["train"]

    def strategy(**data):
        args = SimpleNamespace(data=SimpleNamespace(apply_chat_template=True, **data))
        return SimpleNamespace(args=args, is_rank_0=lambda: False)

    prompts = PromptDataset(rows, tokenizer, strategy(input_key="prompt", label_key="label"))
    sft = SFTDataset(
        rows,
        tokenizer,
        5000,
        strategy(input_key="messages", output_key=None),
        multiturn=True,
        num_processors=1,
    )
    items = [sft[i] for i in range(len(sft))]
    return {
        "prompts": [prompts[i] for i in range(len(prompts))],
        # A position's loss is on the token after it.
        "learned": [tokenizer.decode(ids[0][1:][mask[0][:-1] == 1]) for ids, _, mask in items],
    }


def verifiers(folder):
    from verifiers.v1.trace import WireTrace
    from verifiers.v1.utils.trace_store import read_episodes, write_episode

    episodes = read_episodes(folder, WireTrace)
    with tempfile.TemporaryDirectory() as again:
        for episode in episodes:
            write_episode(Path(again), episode)
        assert len(read_episodes(Path(again), WireTrace)) == len(episodes)
    traces = [episode.traces[0] for episode in episodes]
    return [
        {
            "ok": trace.ok,
            "reward": trace.reward,
            "trainable": trace.agent.trainable,
            "error": trace.last_error.type if trace.last_error else None,
            "truncated": trace.is_truncated,
            "usage": trace.usage.model_dump() if trace.usage else None,
            "messages": [message.model_dump(exclude_none=True) for message in trace.messages],
            "branches": [
                {"token_ids": b.token_ids, "sampled_mask": b.sampled_mask, "logprobs": b.logprobs}
                for b in trace.branches
            ],
        }
        for trace in traces
    ]


def harbor(folder):
    from harbor.models.trajectories import Trajectory
    from harbor.utils.trajectory_validator import TrajectoryValidator

    found = []
    for path in sorted((folder / "trajectories").iterdir()):
        validator = TrajectoryValidator()
        assert validator.validate(path), validator.errors
        found.append(Trajectory.model_validate_json(path.read_bytes()).to_json_dict())
    return found


if __name__ == "__main__":
    readers = {f.__name__: f for f in (verl, trl, openrlhf, verifiers, harbor)}
    print(json.dumps(readers[sys.argv[1]](Path(sys.argv[2])), default=str))
