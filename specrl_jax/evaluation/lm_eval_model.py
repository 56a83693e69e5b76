"""A policy as a model of lm-eval (EleutherAI's lm-evaluation-harness), and its tasks' figures.

Imports lm-eval, which is an extra: import this module only where its tasks are asked for.
"""

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from lm_eval import evaluator, utils
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from specrl_jax.data.prompts import EncodedDataset, eval_batches, make_example, right_padded, words
from specrl_jax.evaluation.saved_policy import SavedPolicy
from specrl_jax.inputs import one_line
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.logprobs import map_tokens, pick, token_logprobs
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout.generate import generate
from specrl_jax.sharding import put

_SLOTS = 64  # rows are padded to multiples of so many tokens, so that programs are few


def measure(policy: SavedPolicy, names: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """A row for each figure of lm-eval's tasks, or of task files (YAML); limit: 0 for none.

    Prompts go through the chat template where the run's do. Raises ValueError in one line.
    """
    with one_line(f"--tasks=lm_eval:{names[0]} must be a task of lm-eval whose data can be read"):
        files = [Path(name) for name in names if Path(name).is_file()]
        results = evaluator.simple_evaluate(
            PolicyLM(policy),
            tasks=[_task_in(Path(name)) if Path(name) in files else name for name in names],
            task_manager=TaskManager(
                include_path=[str(file.parent) for file in files] or None,
                include_defaults=len(files) < len(names),  # to find them takes seconds
            ),
            limit=limit or None,
            apply_chat_template=bool(policy.config.tokenizer.chat),
            log_samples=False,
        )
    rows = []
    for task, values in results["results"].items():
        count = results["n-samples"].get(task, {}).get("effective")
        same = {"task": task, "decoding": "lm-eval", "prompts": count}
        for key, value in values.items():
            name, _, choice = key.partition(",")
            if name.endswith("_stderr") or not isinstance(value, float | int) or not choice:
                continue
            row = same | {"measure": key.removesuffix(",none"), "value": float(value)}
            error = values.get(f"{name}_stderr,{choice}")
            known = isinstance(error, float) and math.isfinite(error)
            rows.append(row | ({"ci95": 1.96 * error} if known else {}))
    return rows


def _task_in(file: Path) -> str:
    """The name that a task file gives its task."""
    named = re.search(r"^task:\s*(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if named is None:
        raise ValueError(f"{file} must say task: NAME")
    return named[1]


class PolicyLM(TemplateLM):
    """lm-eval's requests, answered by a policy. Contexts that are too long lose their beginning."""

    def __init__(self, policy: SavedPolicy):
        super().__init__()
        self._policy, self._weights = policy, policy.weights()

    @property
    def eot_token_id(self) -> int:
        return self._policy.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return [*self._policy.tokenizer.prefix, self.eot_token_id][0]

    @property
    def tokenizer_name(self) -> str:
        return self._policy.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str:
        return ""  # the tokenizer's own is used

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if not add_generation_prompt:
            raise ValueError("lm-eval tasks that prefill an answer are not supported with a chat")
        return self._policy.tokenizer.templated(chat_history)

    def tok_encode(self, string: str, **_) -> list[int]:
        return list(self._policy.tokenizer.encode(string))

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """log π of whole texts, in windows of the model's positions that overlap by one token."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._policy.model.max_positions - 1,
                context_len=1,
            )
            pairs = map(utils.make_disjoint_window, windows)
            scores = self._loglikelihood_tokens([(None, *pair) for pair in pairs])
            totals.append(sum(score for score, _ in scores))
        return totals

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        """(log π of the continuation in nats, whether it is the greedy one) of each request."""
        most, prefix = self._policy.model.max_positions, list(self._policy.tokenizer.prefix)
        rows = []
        for _, context, continuation in requests:
            begins = context[: len(prefix)] == prefix
            tokens = [*([] if begins else prefix), *context, *continuation][-most:]
            rows.append((tokens, min(len(continuation), len(tokens) - 1)))
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        size, results = self._policy.batch_size(len(rows)), [(0.0, True)] * len(rows)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            slots = min(-(-len(rows[chosen[0]][0]) // _SLOTS) * _SLOTS, most)
            tokens = np.zeros((size, slots), np.int32)
            for row, i in enumerate(chosen):
                tokens[row, : len(rows[i][0])] = rows[i][0]
            chunk = self._policy.config.rollout.logits_chunk
            placed = put(tokens, "batch", None)
            scored = _score(self._policy.model, chunk, self._policy.params, placed)
            logprobs, greedy = jax.device_get(scored)
            for row, i in enumerate(chosen):
                of_continuation = slice(len(rows[i][0]) - 1 - rows[i][1], len(rows[i][0]) - 1)
                total = float(logprobs[row, of_continuation].sum(dtype=np.float64))
                results[i] = total, bool(greedy[row, of_continuation].all())
        return results

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Responses up to the first of each request's stop strings, greedy unless it samples."""
        requests, texts = [request.args for request in requests], {}
        groups: dict[tuple, list[int]] = {}
        for i, (_, settings) in enumerate(requests):
            warmth = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
            most = self._policy.config.rollout.response_len
            length = min(int(settings.get("max_gen_toks", most)), self._longest_response())
            groups.setdefault((float(warmth), length), []).append(i)
        for (warmth, length), members in groups.items():
            answers = self._generate([requests[i][0] for i in members], warmth, length)
            for i, text in zip(members, answers, strict=True):
                stops = requests[i][1].get("until") or []
                stops = [stops] if isinstance(stops, str) else stops
                ends = [text.find(stop) for stop in stops if stop and stop in text]
                texts[i] = text[: min(ends, default=len(text))]
        return [texts[i] for i in range(len(requests))]

    def _longest_response(self) -> int:
        return max(self._policy.model.max_positions // 2, 1)

    def _generate(self, contexts: list[str], temperature: float, length: int) -> list[str]:
        policy, prefix = self._policy, list(self._policy.tokenizer.prefix)
        ids = [self.tok_encode(text) or [self.prefix_token_id] for text in contexts]
        ids = [x if x[: len(prefix)] == prefix else prefix + x for x in ids]
        ids = [x[-(policy.model.max_positions - length) :] for x in ids]
        # Numbered, as the same context may come twice and is then sampled twice.
        examples = tuple(make_example(x, str(i), "lm_eval", {}) for i, x in enumerate(contexts))
        tokens, lens = right_padded(ids, max(map(len, ids)), policy.tokenizer.pad_id)
        numbers = words([example.prompt_id for example in examples])
        encoded = EncodedDataset(tokens, lens, numbers, examples, dropped=0)
        spec, texts = policy.spec(tokens.shape[1], 1, temperature, length), []
        for prompts, real in eval_batches(encoded, policy.batch_size(len(ids))):
            rollout = generate(spec, self._weights, prompts, policy.noise()).rollout
            rows, ends = jax.device_get((rollout.tokens, rollout.lens))
            texts += [policy.tokenizer.decode(rows[i, : ends[i]]) for i in range(real)]
        return texts


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(
    config: ModelConfig, chunk: int, params: Params, tokens_BT: Array
) -> tuple[Array, Array]:
    """log π of tokens 1 ... T - 1 [B, T - 1] in nats, and whether each is a likeliest one."""
    model = Transformer(config, params)
    hidden, _ = model(tokens_BT)

    def of_chunk(logits: Array, tokens: Array) -> tuple[Array, Array]:
        best = jnp.max(logits, axis=-1)
        return token_logprobs(logits, tokens), pick(logits, tokens) >= best

    return map_tokens(of_chunk, model, hidden[:, :-1], tokens_BT[:, 1:], chunk)
