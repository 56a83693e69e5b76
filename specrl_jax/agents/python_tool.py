"""Environment `python`: the policy calls Python, and reads what its code has printed.

The code runs in a separate program (`code_process`), which lasts for the episode and whose memory
never contained the answer; both have the rights and limits of the episode. No JAX.
"""

import contextlib
import logging

from specrl_jax.agents.environment_protocol import Step
from specrl_jax.agents.tool_calls import BEGIN, END, Call, CallError, clean_code, read_calls
from specrl_jax.rewards.code import CodeProcess
from specrl_jax.rewards.scorers import score_exact, score_math, score_reasoning_gym

MAX_OUTPUT = 2_000  # characters of a call's output; longer output is cut
_TOOL = "python"
_USAGE = f'a call is {BEGIN}CODE{END}, or has "name": "{_TOOL}", "arguments": {{"code": CODE}}'


class PythonTool:
    """Reply to a response's calls with their output; one without calls is the final answer.

    Names persist between calls, and `_` is the last value. A final answer that equals the problem's
    has reward 1; any other is scored by the problem's reasoning-gym scorer, or by `math`.
    """

    starts_program = True
    call_end = END
    after_timeout = Step("Python was restarted: names and files are gone\n", role="tool")

    @staticmethod
    def prepare() -> None:
        """Import what scores final answers."""
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # avoids a line per odd answer
        score_math("so 2", "2", "", {})
        with contextlib.suppress(ImportError):
            import reasoning_gym  # noqa: F401

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        self._problem = {"answer": answer, "task": task, "metadata": metadata}
        self._process: CodeProcess | None = None

    def step(self, response: str) -> tuple[str, float, bool, str]:
        calls = read_calls(response, _TOOL)
        if not calls:
            return "", _score(response, **self._problem), True, "tool"
        return "".join(map(self._answer, calls)), 0.0, False, "tool"

    def _answer(self, call: Call | CallError) -> str:
        """Return the output of a call, or why there is none."""
        if isinstance(call, CallError):
            return f"error: {call.reason}; {_USAGE}\n"
        code = call.arguments.get("code")
        if call.name != _TOOL or not isinstance(code, str):
            return f"error: {_USAGE}\n"
        if self._process is None:
            self._process = CodeProcess()
        (output,) = self._process.ask("console", clean_code(code), MAX_OUTPUT)
        return output


def _score(response: str, answer: str, task: str, metadata: dict) -> float:
    if score_exact(response, answer, task, metadata):
        return 1.0
    item = metadata.get("metadata")
    if isinstance(item, dict) and item.get("source_dataset") == task:
        return score_reasoning_gym(response, answer, task, metadata)
    try:
        return score_math(response, answer, task, metadata)
    except ValueError:  # the problem's answer is not mathematics
        return 0.0
