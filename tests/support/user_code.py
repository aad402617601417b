"""What a user writes: an environment, an agent, a trainer's loop. `make types` checks it as a user would."""

from pydantic import BaseModel

from gym_serve import (
    AgentServer,
    Episode,
    Failure,
    Gym,
    ResourcesServer,
    Response,
    Row,
    Verdict,
    VerifyRequest,
    tool,
)


class Account(ResourcesServer):
    class Row(BaseModel):
        opening: int
        closing: int

    class Session(BaseModel):
        balance: int = 0

    class Config(ResourcesServer.Config):
        overdraft: int = 0

    config: Config

    async def seed(self, row: Row, session: Session) -> None:
        session.balance = row.opening

    @tool
    async def pay(self, amount: int, to: str, session: Session) -> str:
        """Pay someone."""
        session.balance -= amount
        return f"Paid {amount} to {to}."

    async def verify(self, row: Row, response: Response, session: Session) -> float:
        return float(session.balance == row.closing)


class Old(ResourcesServer):
    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=float("yes" in request.response.last_text))


class Twice(AgentServer):
    async def act(self, episode: Episode) -> None:
        for _ in range(2):
            await episode.generate()


class Opening(Row):
    opening: int
    closing: int


def explain(failure: Failure) -> str:
    return f"{failure['stage']}: {failure['kind']} ({failure['detail']})"


async def train() -> None:
    rows: list[Opening] = [{"prompt": "Spend it all.", "opening": 100, "closing": 0}]
    with Gym.from_graph("graph.yaml", ray=False) as gym:
        async for rollout in gym.rollouts([{"prompt": "Hi"}], repeats=8):
            reward: float = rollout["reward"]
            print(reward)
        for rollout in gym.run(rows, repeats=8):
            print(rollout.rollout_id, rollout.reward, rollout["closing"], rollout.response.output_text)
            if rollout.failure is not None:
                print(explain(rollout.failure))
            ids: list[list[int]] = [call["generation_token_ids"] for call in rollout.tokens]
            print(ids)
        async for group in gym.groups("rows.jsonl", size=8):
            print([r.reward for r in group.rollouts])
