"""A taskset of verifiers: guess a number with hints, in an environment of several turns."""

import verifiers.v1 as vf

__all__ = ["Guessing", "GuessingEnv"]


class GuessingData(vf.TaskData):
    secret: int


class GuessingTask(vf.Task[GuessingData]):
    @vf.reward(weight=0.5)
    async def found(self, task, trace) -> float:
        return float(trace.last_reply == str(task.secret))

    @vf.stop
    async def gives_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "no"


class GuessingConfig(vf.TasksetConfig):
    numbers: int = 3
    system: str | None = None


class Guessing(vf.Taskset[GuessingTask, GuessingConfig]):
    def load(self):
        for secret in range(self.config.numbers):
            data = GuessingData(prompt="0?", system_prompt=self.config.system, secret=secret)
            yield GuessingTask(data, self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    """Half of the reward is 1 over the number of guesses."""

    async def run(self, task, agents):
        secret = task.data.secret
        guesses = 1
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and segment.last_reply != str(secret):
                if segment.last_reply == "again":
                    await agents.player.run(task)
                hint = "?"
                if segment.last_reply != "no":
                    hint = "<" if secret < int(segment.last_reply) else ">"
                segment = await talk.turn(hint)
                guesses += 1
        talk.trace.record_reward("quick", 1 / guesses, 0.5)
