"""Environment `python`: the policy calls Python, and reads what its code has printed.

The code runs in a program of its own (`code_process`), which lasts for the episode and whose memory
never held the answer; the rights and limits of both are those of the episode. No JAX.
"""

import contextlib
import json
import logging

from specrl_jax.rewards.code import CodeProcess
from specrl_jax.rewards.environment_protocol import Step
from specrl_jax.rewards.scorers import score_exact, score_math, score_reasoning_gym

MAX_OUTPUT = 2_000  # characters of a call's output; a longer one is cut
CALL, CALL_END = "<tool_call>", "</tool_call>"
_USAGE = f'a call is {CALL}CODE{CALL_END}, or has "name": "python", "arguments": {{"code": CODE}}'


class PythonTool:
    """Answer a response that ends in a call by its output; take any other as the final answer.

    Names stay from call to call, and `_` is the last value. A final answer that equals the
    problem's has reward 1; another one what the problem's scorer of reasoning-gym says, or `math`.
    """

    starts_program = True
    after_timeout = Step("Python was restarted: names and files are gone\n", role="tool")

    @staticmethod
    def prepare() -> None:
        """Import what scores final answers."""
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # else a line per odd answer
        score_math("so 2", "2", "", {})
        with contextlib.suppress(ImportError):
            import reasoning_gym  # noqa: F401

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        self._problem = {"answer": answer, "task": task, "metadata": metadata}
        self._process: CodeProcess | None = None

    def step(self, response: str) -> tuple[str, float, bool, str]:
        call = find_call(response)
        if call is None:
            return "", _score(response, **self._problem), True, "tool"
        try:
            code = read_call(call)
        except ValueError as error:
            return f"ValueError: {error}\n", 0.0, False, "tool"
        if self._process is None:
            self._process = CodeProcess()
        (output,) = self._process.ask("console", code, MAX_OUTPUT)
        return output, 0.0, False, "tool"


def find_call(response: str) -> str | None:
    """Return what is between the tags at the end of a response; None where it ends otherwise.

    The last tag may be missing, as where `reward.keep_stop` is False.
    """
    _, begin, rest = response.rpartition(CALL)
    call, _, after = rest.partition(CALL_END)
    return call.strip() if begin and not after.strip() else None


def read_call(call: str) -> str:
    """Return the code of a call: it is code, or JSON with a name and arguments.

    Raises ValueError in one line where it calls another tool.
    """
    try:
        values = json.loads(call)
    except (ValueError, RecursionError):
        return call
    if not isinstance(values, dict) or "name" not in values:
        return call
    arguments = values.get("arguments")
    code = arguments.get("code") if isinstance(arguments, dict) else None
    if values["name"] != "python" or not isinstance(code, str):
        raise ValueError(_USAGE)
    return code


def _score(response: str, answer: str, task: str, metadata: dict) -> float:
    if score_exact(response, answer, task, metadata):
        return 1.0
    item = metadata.get("metadata")
    if isinstance(item, dict) and item.get("source_dataset") == task:
        return score_reasoning_gym(response, answer, task, metadata)
    try:
        return score_math(response, answer, task, metadata)
    except ValueError:  # the problem's answer is no mathematics
        return 0.0
