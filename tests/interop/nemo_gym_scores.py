"""Prepare benchmarks of NeMo Gym by their own scripts, and score completions by their own servers.

Run by `test_nemo_gym_scores.py` with the Python of a venv that has NeMo Gym, in a folder in its layout:
``python nemo_gym_scores.py NAME...``. No hub is reachable: what the scripts download are rows of the
published schemas, made by rule. Prints, by benchmark, the messages that NeMo Gym makes of its rows, and the
rewards of the completions.
"""

import asyncio
import csv
import importlib
import io
import json
import sys
import tarfile
from pathlib import Path
from unittest.mock import MagicMock, patch

import datasets
import nemo_gym.global_config
from nemo_gym.prompt import apply_prompt_to_row, load_prompt_config
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

ANSWERS = ["12", "\\frac{3}{4}", "x^2 + 1", "(1, 2)"]
CHOICES = ["iron", "salt", "water", "air"]
COMPLETIONS = [
    *(f"So it is \\boxed{{{answer}}}." for answer in [*ANSWERS, "3/4", "0.75", "1+x^2", "13", ""]),
    *("The answer is 12.", "12", "\\boxed{13} no, \\boxed{12}", "\\boxed{12} or \\boxed{13}", "**12**"),
    *("Answer: A", "Answer: **B**", "answer: c", "Answer: \\boxed{D}", "The best answer is (B)."),
    *(
        "\\boxed{A}",
        "\\boxed{B}",
        "\\boxed{\\text{C}}",
        "\\boxed{iron}",
        "\\boxed{E}",
        "\\boxed{A}\\boxed{B}",
    ),
    *(
        "A",
        "(B)",
        "B.",
        "It is iron.",
        "Answer: iron",
        "Answer: A or B",
        "Answer: A\nAnswer: B",
        "",
        "I pass.",
    ),
    *("Antwort: B", "Respuesta: A", "答案：C", "उत्तर: D", "Answer: A\n\nBut wait, what of B?"),
]


def math_rows():
    return [{"problem": f"What is {{{answer}}}?", "answer": answer} for answer in ANSWERS]


def choice_rows():
    for number, letter in enumerate("ABCD"):
        yield {
            **{"question": f" Which is {CHOICES[number]}? ", "options": CHOICES, "choices": CHOICES},
            **{"answer": number, "answer_letter": letter, "correct_letter": letter, "answer_index": number},
            **{"category": "math", "subject": "anatomy", "source": "made", "uuid": str(number)},
            **{
                "error_type": "ok",
                "correct_answer": letter,
                "discipline": "a",
                "field": "b",
                "subfield": "c",
            },
            **{"difficulty": "easy", "is_calculation": False, "Question": f"Which is {CHOICES[number]}?"},
            **{"Correct Answer": CHOICES[number], "prompt": "How does one melt ice?", "label": number % 2},
            **{f"Incorrect Answer {n}": CHOICES[number - n] for n in (1, 2, 3)},
            **{"solution0": "warm it", "solution1": "cool it"},
            **{"repo": "a/b", "prompt_goal": "what", "is_hard": False},
        }


def load_dataset(repository, *arguments, **options):
    """What is on the hub under a name, by the schema of its card."""
    if repository.startswith(("MathArena/", "HuggingFaceH4/", "math-ai/", "Hothan/")):
        return math_rows()
    rows = list(choice_rows())
    if repository == "TIGER-Lab/MMLU-Pro":
        return [{**row, "answer": "ABCD"[row["answer"]]} for row in rows]
    return rows if "split" in options else {"train": rows}


def urlretrieve(url, file):
    """What is at an address."""
    if url.endswith("data.tar"):
        table = io.StringIO()
        csv.writer(table).writerows(
            [row["question"], *CHOICES, "ABCD"[row["answer"]]] for row in choice_rows()
        )
        data = table.getvalue().encode()
        with tarfile.open(file, "w") as archive:
            member = tarfile.TarInfo("data/test/anatomy_test.csv")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    elif "grade-school-math" in url:
        rows = [{"question": f"{n} + 2?", "answer": f"<<{n}+2>>\n#### {n + 2:,}"} for n in (10, 202, 1998)]
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        rows = [{**row, "solution": "So it is.", "level": 1, "subject": "Algebra"} for row in math_rows()]
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(name):
    """The config of a benchmark, as NeMo Gym reads it with a policy beside it."""
    files = [f"benchmarks/{name}/config.yaml", "responses_api_models/vllm_model/configs/vllm_model.yaml"]
    policy = {"policy_base_url": "http://x", "policy_api_key": "x", "policy_model_name": "x"}
    given = OmegaConf.create({"config_paths": files, "skip_venv_if_present": True, **policy})
    parsed = nemo_gym.global_config.GlobalConfigDictParser().parse_no_environment(given)
    return OmegaConf.to_container(parsed, resolve=True)


def lines(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def only(mapping):
    [value] = mapping.values()
    return value


async def scores(name):
    config = config_of(name)
    agents = [
        only(one["responses_api_agents"])
        for one in config.values()
        if isinstance(one, dict) and "responses_api_agents" in one
    ]
    [agent] = [one for one in agents if any(data["name"] for data in one.get("datasets") or ())]
    [data] = agent["datasets"]
    importlib.import_module(f"benchmarks.{name}.prepare").prepare()
    rows = lines(data["jsonl_fpath"])
    if data.get("prompt_config"):
        prompt = load_prompt_config(data["prompt_config"])
        rows = [apply_prompt_to_row(row, prompt) for row in rows]
    named = agent["resources_server"]["name"]
    [(kind, settings)] = config[named]["resources_servers"].items()
    module = importlib.import_module(f"resources_servers.{kind}.app")
    [server_class] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and hasattr(value, "verify") and value.__module__ == module.__name__
    ]
    server_config = server_class.model_fields["config"].annotation.model_validate(
        {"host": "localhost", "port": 1, **settings, "name": named}
    )
    server = server_class(config=server_config, server_client=MagicMock(spec=ServerClient))
    request = server_class.verify.__annotations__["body"]
    rewards = []
    for row in rows:
        for completion in COMPLETIONS:
            body = request.model_validate({**row, "response": response_of(completion)})
            rewards.append((await server.verify(body)).reward)
    prompts = [row["responses_create_params"]["input"] for row in rows]
    return {"prompts": prompts, "completions": COMPLETIONS, "rewards": rewards}


def response_of(text):
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    frame = {"id": "r", "created_at": 0, "model": "model", "object": "response", "tools": []}
    return {**frame, "output": [message], "tool_choice": "auto", "parallel_tool_calls": True}


def main():
    sys.path.insert(0, "")  # the benchmarks of this folder
    sys.modules["tiktoken"] = MagicMock()  # it loads what counts tokens from a network
    sys.modules["tiktoken"].get_encoding.return_value.encode = lambda text, **options: text.split()
    languages = patch.object(datasets, "get_dataset_config_names", lambda repository: ["eng_latn"])
    loading = patch.object(datasets, "load_dataset", load_dataset)
    settings = patch.object(nemo_gym.global_config, "get_global_config_dict", dict)
    with languages, loading, settings, patch("urllib.request.urlretrieve", urlretrieve):
        found = {name: asyncio.run(scores(name)) for name in sys.argv[1:]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
