"""A taskset of verifiers with tools that share a state: reach a total."""

import verifiers.v1 as vf

__all__ = ["LedgerTaskset"]


class LedgerData(vf.TaskData):
    answer: int


class LedgerState(vf.State):
    total: int = 0


class Ledger(vf.Toolset[vf.ToolsetConfig, LedgerState]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.limit = task.answer

    @vf.tool
    async def add(self, amount: int) -> str:
        """Add to the total."""
        if amount > self.limit:
            raise ValueError(f"at most {self.limit}")
        self.state.total += amount
        return f"total {self.state.total}"


class Bell(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    def ring(self) -> str:
        """Ring."""
        return "ding"


class LedgerTask(vf.Task[LedgerData, LedgerState]):
    @classmethod
    def toolsets(cls, config):
        return [Ledger(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.state.total == task.answer)


class LedgerTaskset(vf.Taskset[LedgerTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Bell(vf.SharedToolsetConfig())]

    def load(self):
        for total in range(1, 4):
            yield LedgerTask(LedgerData(prompt=f"{total}!", answer=total), self.config.task)
