"""`gym_serve.testing.TestClient`: an environment in a unit test."""

import asyncio

import pytest
from pydantic import BaseModel

from gym_serve import InvalidRequest, NotFound, ResourcesServer, ToolFailed, Verdict, VerifyRequest, tool
from gym_serve.testing import TestClient


class AccountRequest(VerifyRequest):
    closing: int


class Account(ResourcesServer):
    """A balance, and payments."""

    closed = 0

    class Session(BaseModel):
        balance: int = 0

    async def seed(self, row: dict, session: Session) -> dict:
        if "opening" not in row:
            raise InvalidRequest("opening: an integer is missing")
        session.balance = row["opening"]
        return {"currency": "EUR"}

    @tool
    async def pay(self, amount: int, to: str, session: Session) -> str:
        """Pay someone."""
        if amount > session.balance:
            raise ValueError(f"the balance is {session.balance}")
        session.balance -= amount
        return f"Paid {amount} to {to}."

    async def verify(self, request: AccountRequest, session: Session) -> Verdict:
        right = session.balance == request.closing
        return Verdict(reward=float(right), said=request.response.last_text)

    async def close(self, session: Session) -> None:
        self.closed += 1


def test_an_episode() -> None:
    account = Account()
    with TestClient(account) as client:
        assert client.tools["pay"]["parameters"]["required"] == ["amount", "to"]
        with client.episode(opening=100, closing=70) as episode:
            assert episode.fields == {"currency": "EUR"}
            assert episode.call("pay", amount=30, to="Ada") == "Paid 30 to Ada."
            verdict = episode.verify("Done.")
            assert (verdict.reward, verdict.model_dump()["said"]) == (1.0, "Done.")
        assert account.closed == 1


def test_episodes_have_sessions_of_their_own() -> None:
    with TestClient(Account()) as client:
        one, other = client.episode(opening=5, closing=5), client.episode({"opening": 9}, closing=4)
        other.call("pay", amount=5, to="Ada")
        assert [one.verify().reward, other.verify().reward] == [1.0, 1.0]
        assert len(client.environment.sessions) == 2
        one.close()
        one.close()
        assert len(client.environment.sessions) == 1


def test_what_fails_in_a_graph_raises_the_same_error() -> None:
    with TestClient(Account()) as client:
        with pytest.raises(InvalidRequest, match="opening"):
            client.episode()
        with client.episode(opening=1) as episode:
            with pytest.raises(InvalidRequest, match="valid integer"):
                episode.call("pay", amount="many", to="Ada")
            with pytest.raises(ToolFailed, match="the balance is 1"):
                episode.call("pay", amount=5, to="Ada")
            with pytest.raises(NotFound, match="did you mean 'pay'"):
                episode.call("pya", amount=5)
            with pytest.raises(InvalidRequest, match="closing"):
                episode.verify()


async def test_it_works_inside_a_running_loop() -> None:
    with TestClient(Account()) as client, client.episode(opening=1, closing=1) as episode:
        await asyncio.sleep(0)
        assert episode.verify([]).reward == 1.0


def test_a_response_can_be_given_as_items_or_whole() -> None:
    message = {"type": "message", "role": "assistant", "content": "Hi"}
    with TestClient(Account()) as client, client.episode(opening=1, closing=1) as episode:
        said = [
            episode.verify(given).model_dump()["said"]
            for given in ("Hi", [message], {"id": "r", "output": [message]})
        ]
    assert said == ["Hi"] * 3
