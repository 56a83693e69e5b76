"""Prompts and chat messages to a response's text, as it is sampled."""

from collections.abc import Callable

import numpy as np

from specrl_jax.data.prompts import encode_prompts, eval_batches, make_example
from specrl_jax.data.tokenizer import Messages
from specrl_jax.evaluation.saved_policy import SavedPolicy
from specrl_jax.inputs import one_line
from specrl_jax.rollout.generate import generate

_SLOTS = 64  # prompts are padded to multiples of so many tokens, so that programs are few


class Responder:
    """Answers with one policy; temperature 0 is greedy."""

    def __init__(self, policy: SavedPolicy, temperature: float):
        self._policy = policy
        self._temperature = temperature
        self._weights = policy.weights()
        self._turn = 0
        response_len = policy.config.rollout.response_len
        self.prompt_len = policy.model.max_positions - response_len  # tokens of a prompt at most

    @property
    def keeps_history(self) -> bool:
        """Return True if a prompt may be a chat; else every prompt stands for itself."""
        return bool(self._policy.config.tokenizer.chat)

    def fits(self, prompt: str | Messages) -> bool:
        return len(self._encoded(prompt)) <= self.prompt_len

    def respond(self, prompt: str | Messages, report: Callable[[str], None]) -> str:
        """The response's text; report: gets its pieces as they come. ValueError in one line where
        the prompt does not fit."""
        policy = self._policy
        length = len(self._encoded(prompt))
        if not 0 < length <= self.prompt_len:
            rule = f"1 to {self.prompt_len} tokens (the model's positions - rollout.response_len)"
            raise ValueError(f"the prompt must have {rule}, got {length}")
        slots = min(-(-length // _SLOTS) * _SLOTS, self.prompt_len)
        encoded = encode_prompts([make_example(prompt, "", "chat", {})], policy.tokenizer, slots)
        prompts = eval_batches(encoded, policy.batch_size(1))[0][0]
        spec = policy.spec(slots, 1, self._temperature)
        noise = policy.noise(self._turn)
        self._turn += 1
        ids = []
        text = ""

        def decode(new: np.ndarray) -> None:
            nonlocal text
            ids.extend(new.tolist())
            whole = policy.tokenizer.decode(ids)
            if not whole.endswith("\ufffd"):  # else a character of several tokens is unfinished
                report(whole[len(text) :])
                text = whole

        generate(spec, self._weights, prompts, noise, report=decode)
        whole = policy.tokenizer.decode(ids)
        report(whole[len(text) :])
        return whole

    def _encoded(self, prompt: str | Messages) -> list[int]:
        with one_line("the prompt must be text of the tokenizer"):
            return self._policy.tokenizer.encode_prompt(prompt)
