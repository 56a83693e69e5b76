"""A taskset of verifiers whose environment has two agents."""

import verifiers.v1 as vf
from guessing_taskset import Guessing

__all__ = ["Talk", "TwoSeats"]


class TwoSeats(Guessing):
    pass


class TalkConfig(vf.EnvConfig):
    assistant: vf.AgentConfig = vf.AgentConfig()
    user: vf.AgentConfig = vf.AgentConfig()


class Talk(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        await agents.assistant.run(task)
