"""Tasks of Inspect's own shapes, for `test_inspect_tasks`."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig
from inspect_ai.scorer import (
    Score,
    answer,
    choice,
    f1,
    includes,
    match,
    mean,
    model_graded_qa,
    pattern,
    scorer,
)
from inspect_ai.solver import (
    chain_of_thought,
    generate,
    multiple_choice,
    prompt_template,
    self_critique,
    solver,
    system_message,
    use_tools,
)
from inspect_ai.tool import think

SUMS = [
    Sample(input="2 + 2?", target="4"),
    Sample(input="17 * 23?", target="391", metadata={"level": "hard"}),
]
CHOICES = [Sample(input="Which is ice?", choices=["water", "fire", "sand"], target="A")]


@task
def sums() -> Task:
    return Task(
        dataset=MemoryDataset(SUMS),
        solver=[
            system_message("You are precise."),
            prompt_template("Say it: {prompt}"),
            generate(max_tokens=50),
        ],
        scorer=match(numeric=True),
        config=GenerateConfig(temperature=0.5, stop_seqs=["<end>"]),
        epochs=2,
    )


@task
def thoughts() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=[chain_of_thought(), generate()], scorer=answer("line"))


@task
def contained() -> Task:
    return Task(dataset=MemoryDataset(SUMS), scorer=[includes(), f1()])


@task
def boxed() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=generate(), scorer=pattern(r"ANSWER: (\d+)"))


@task
def choices() -> Task:
    return Task(dataset=MemoryDataset(CHOICES), solver=multiple_choice(), scorer=choice())


@task
def several_choices() -> Task:
    samples = [Sample(input="Which flow?", choices=["water", "rock", "oil"], target=["A", "C"])]
    solver = multiple_choice(multiple_correct=True, cot=True)
    return Task(dataset=MemoryDataset(samples), solver=solver, scorer=choice())


@scorer(metrics={"*": [mean()]})
def lengths():
    async def score(state, target):
        text = state.output.completion
        return Score(value={"words": len(text.split()), "has_target": target.text in text})

    return score


@solver
def shouted():
    async def solve(state, generate):
        state = await generate(state)
        state.output.completion = state.output.completion.upper()
        return state

    return solve


@task
def measured() -> Task:
    talk = [ChatMessageSystem(content="Be brief."), ChatMessageUser(content="What is 4?")]
    return Task(
        dataset=MemoryDataset([Sample(input=talk, target="FOUR")]), solver=shouted(), scorer=lengths()
    )


@task
def judged() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=generate(), scorer=model_graded_qa())


@task
def criticised() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=[generate(), self_critique()], scorer=includes())


@task
def twice() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=[generate(), generate()], scorer=includes())


@solver
def insisting():
    async def solve(state, generate):
        state = await generate(state)
        return await generate(state) if state.output.completion == "no" else state

    return solve


@task
def asks_again() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=insisting(), scorer=includes())


@task
def with_tools() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=[use_tools(think()), generate()], scorer=includes())


@task
def in_a_sandbox() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=generate(), scorer=includes(), sandbox="local")


@task
def shuffled() -> Task:
    return Task(dataset=MemoryDataset(CHOICES), solver=multiple_choice(shuffle=True), scorer=choice())


@task
def unscored() -> Task:
    return Task(dataset=MemoryDataset(SUMS), solver=generate())
