"""What a user writes: an environment, an agent, a trainer's loop. `make types` checks it as a user would."""

from pydantic import BaseModel

from gym_serve import AgentServer, Episode, Gym, ResourcesServer, Response, Verdict, VerifyRequest, tool


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


async def train() -> None:
    with Gym.from_graph("graph.yaml", ray=False) as gym:
        async for rollout in gym.rollouts([{"prompt": "Hi"}], repeats=8):
            reward: float = rollout["reward"]
            print(reward)
        async for group in gym.groups("rows.jsonl", size=8):
            print([r["reward"] for r in group.rollouts])
