"""OpenHands on one task: its default agent, in the folder that it is started in."""

import os

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent

llm = LLM(
    model="openai/policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    reasoning_effort=None,
)
conversation = Conversation(agent=get_default_agent(llm=llm, cli_mode=True), workspace=os.getcwd())
conversation.send_message(os.environ["GYM_SERVE_PROMPT"])
conversation.run()
