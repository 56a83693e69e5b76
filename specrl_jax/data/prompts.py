"""Rows of a dataset to encoded prompts.

Takes `config.data` and a tokenizer; returns `Prompts`. A prompt's id is the hash of its content, so
stored drafts and noise still match after a restart, a reshuffle or a change of format. Rows that
differ only in other columns are one problem, unless the reward reads these.
"""

import collections
import dataclasses
import hashlib
import json
import math
import pkgutil
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.agents.environments import ENVIRONMENTS
from specrl_jax.data.messages import asks, canonical, check_text, read_prompt, with_instruction
from specrl_jax.data.readers import READERS, Row
from specrl_jax.inputs import answer_pattern, is_blank, json_value, jsonable, one_line
from specrl_jax.rewards.scorers import scorers_of
from specrl_jax.text.tokenizer import Tokenizer
from specrl_jax.types import FILLER_TASK, Example, Prompts

_NUMBER_WITH_COMMAS = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and held-out problems: no prompt_id twice, no question in both."""

    train: list[Example]  # without the held-out questions
    eval: list[Example]
    duplicates: int  # rows left out as duplicates
    empty: int  # rows left out, as they have no question


@dataclasses.dataclass(frozen=True)
class EncodedDataset(Prompts):
    """All N problems of a dataset, as one batch."""

    dropped: int  # problems left out, as they exceed P tokens
    spelled: int  # problems that spell out control tokens


# --- examples -------------------------------------------------------------------------------------


def load_examples(config: Any) -> Dataset:
    """Return training and held-out problems of `config.data`, at most data.prompts and
    data.eval_prompts of them (0: all).

    Raises a one-line ValueError if data, a field or an answer is missing.
    """
    data = config.data
    rows = READERS[data.source].train_and_eval(data, config.seed)
    train, held_out = ([*map(_example_maker(config), part)] for part in rows)
    empty = (train + held_out).count(None)
    held_out, repeated = _unique(held_out, config)
    held_out = held_out[: data.eval_prompts or None]
    train, repeated_in_train = _unique(train, config, held_out)
    train = train[: data.prompts or None]
    return Dataset(train, held_out, repeated + repeated_in_train, empty)


def load_warmup_examples(config: Any, count: int, dataset: Dataset) -> list[Example]:
    """Return up to `count` warm-up problems, none of them held out: further ones of an endless
    source, otherwise the first training problems (0: all)."""
    reader = READERS[config.data.source]
    if not reader.endless:
        return dataset.train[: count or None]
    rows = reader.more(config.data, config.seed, count)
    return examples_of(config, rows, dataset.eval)


def examples_of(
    config: Any, rows: Sequence[Row], held_out: Sequence[Example] = ()
) -> list[Example]:
    """Return the problems in rows under `config.data`, without duplicates and held-out ones."""
    return _unique([*map(_example_maker(config), rows)], config, held_out)[0]


def _example_maker(config: Any) -> Callable[[Row], Example | None]:
    """Return a function from row to `Example`, None without a question; errors name the row."""
    data = config.data
    # Only the last part of a path: an id must not depend on the data's location.
    task = Path(data.name or data.path).name.split(":")[0]
    task = task.removesuffix(".jsonl").removesuffix(".parquet")
    render = None
    if data.render:
        with one_line(f"data.render must be 'module:function', got {data.render!r}"):
            render = pkgutil.resolve_name(data.render)
    pattern = answer_pattern(data.answer_pattern, "data.answer_pattern")
    scorers = scorers_of(config.reward.name)
    # A task's own scorer reads the whole row.
    needs_answer = any(scorer.source != data.source for scorer in scorers)
    scorers = [] if config.environment.name else scorers
    compares = any(scorer.compares for scorer in scorers)
    checks = [scorer.check for scorer in scorers if scorer.check is not None]
    field = "answer_pattern" if data.answer_pattern else "answer_field"
    answer_source = data.render or f"data.{field} {data[field]}"

    def read(row: dict) -> tuple[Any, str]:
        if render is not None:
            with one_line(f"data.render must fit the data, {data.render!r} fails"):
                prompt, answer = render(row)
                return prompt, str(_known(answer, data.render))
        answer = _answer(row, data, pattern, needs_answer)
        return _field(row, data.prompt_field, "data.prompt_field"), answer

    def check(answer: str, row: dict) -> None:
        if compares and is_blank(answer):
            rule = "must have an answer for every prompt"
            raise ValueError(f"{answer_source} {rule}, got {answer!r}")
        for check_tests in checks:
            rule = f"must have tests that reward.name = {config.reward.name} can read"
            with one_line(f"{answer_source} {rule}"):
                check_tests(answer, row)

    def make(row: Row) -> Example | None:
        try:
            prompt, answer = read(row.values)
            prompt = read_prompt(prompt)
            if not asks(prompt):
                return None
            metadata = jsonable(row.values)
            check(answer, metadata)
            prompt = with_instruction(prompt, data.instruction)
        except ValueError as error:
            raise ValueError(f"{error} ({row.where})") from error
        return make_example(prompt, answer, task, metadata)

    return make


def _known(answer: Any, field: str) -> Any:
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        raise ValueError(f"{field} must have an answer for every prompt, got {answer}")
    return answer


def _field(row: dict, path: str, field: str) -> Any:
    """Return the value under a name, or under names joined by dots ("reward.ground_truth")."""
    value: Any = row
    for part in [path] if path in row else path.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"{field} must be one of the columns {', '.join(row)}, got {path!r}")
        value = value[part]
    return value


def _answer(row: dict, data: Any, pattern: re.Pattern | None, needed: bool) -> str:
    value = _field(row, data.answer_field, "data.answer_field")
    if value is None and not needed:
        return ""
    value = _known(value, f"data.answer_field {data.answer_field}")
    text = value if isinstance(value, str) else json.dumps(value, default=json_value)
    if pattern is None:
        return text
    answers = [match[1] for match in pattern.finditer(text) if match[1] is not None]
    if not answers:
        raise ValueError(
            f"data.answer_pattern must match every answer, {data.answer_pattern!r} "
            f"is not in {text[-60:]!r}"
        )
    answer = answers[-1].strip()
    return answer.replace(",", "") if _NUMBER_WITH_COMMAS.fullmatch(answer) else answer


def make_example(
    prompt: str | tuple[dict, ...], answer: str, task: str, metadata: dict[str, Any]
) -> Example:
    """Return an `Example` whose id is blake2b-64 of (prompt, answer, task) as JSON."""
    return Example(_content_id(prompt, answer, task), prompt, answer, task, metadata)


def _content_id(*content: Any) -> str:
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    # JSON allows broken surrogates, which have no UTF-8.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _unique(
    examples: Sequence[Example | None], config: Any, held_out: Sequence[Example] = ()
) -> tuple[list[Example], int]:
    """Return examples without duplicates and held-out questions, and the number left out.

    In an environment the answer belongs to the question: it is what the policy asks for. A reward
    that reads all columns keeps all rows that differ in one. If they share question and answer, the
    id of each is that of the whole row.
    """

    def question(example: Example) -> str:
        return canonical(example.prompt) + (example.answer if environment else "")

    def row_id(e: Example) -> str:
        return _content_id(e.prompt, e.answer, e.task, e.metadata) if reads_all else e.prompt_id

    environment = config.environment.name
    if environment:
        reads_all = environment not in ENVIRONMENTS
    else:
        reads_all = any(scorer.reads_row for scorer in scorers_of(config.reward.name))
    examples = [example for example in examples if example is not None]
    asked = set(map(question, held_out))
    kept: dict[str, Example] = {}
    for example in examples:
        if question(example) not in asked:
            kept.setdefault(row_id(example), example)
    counts = collections.Counter(example.prompt_id for example in kept.values())
    unique = [
        example if counts[example.prompt_id] == 1 else dataclasses.replace(example, prompt_id=name)
        for name, example in kept.items()
    ]
    return unique, len(examples) - len(unique)


# --- encoding, batches ----------------------------------------------------------------------------


def encode_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, prompt_len: int
) -> EncodedDataset:
    """Return problems as [N, prompt_len]; longer prompts are left out. ValueError without one."""
    if not examples:
        raise ValueError("data must have at least one prompt, got none")
    encoded = [tokenizer.encode_prompt(example.prompt) for example in examples]
    kept = [i for i, tokens in enumerate(encoded) if 0 < len(tokens) <= prompt_len]
    if not kept:
        shortest = min(map(len, encoded))
        raise ValueError(
            f"data.prompt_len must fit at least one prompt, got {prompt_len} with {len(encoded)} "
            f"prompts, the shortest of {shortest} tokens"
        )
    tokens, lens = right_padded([encoded[i] for i in kept], prompt_len, tokenizer.pad_id)
    chosen = tuple(examples[i] for i in kept)
    ids = words([example.prompt_id for example in chosen])
    spelled = sum(bool(tokenizer.control_letters(example.prompt)) for example in chosen)
    return EncodedDataset(tokens, lens, ids, chosen, len(encoded) - len(kept), spelled)


def right_padded(
    rows: Sequence[Sequence[int]], width: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of token ids as int32 [N, width], and their lengths, int32 [N]."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def digest(*arrays: np.ndarray) -> str:
    """Return 16 hexadecimal digits, equal if the arrays have the same bytes."""
    return hashlib.blake2b(b"".join(x.tobytes() for x in arrays), digest_size=8).hexdigest()


def words(ids: Sequence[str]) -> np.ndarray:
    """uint32 [N, 2]: "0000000100000002" → [1, 2]."""
    pairs = [(int(x[:8], 16), int(x[8:], 16)) for x in ids]
    return np.array(pairs, np.uint32).reshape(len(pairs), 2)


def eval_batches(encoded: EncodedDataset, size: int) -> list[tuple[Prompts, int]]:
    """Return all problems in order: (batch of exactly `size` prompts, number of real ones).

    The last batch is padded with one-token prompts after the real ones. They have their own ids: a
    repeated prompt would share its noise with the first.
    """
    total = len(encoded.examples)
    missing = -total % size
    filler = tuple(make_example("", str(i), FILLER_TASK, {}) for i in range(missing))
    tokens = np.full((missing, encoded.tokens.shape[1]), encoded.tokens[0, 0], np.int32)
    ids = words([example.prompt_id for example in filler])
    padded = Prompts.concatenate(encoded, Prompts(tokens, np.ones(missing, np.int32), ids, filler))
    starts = range(0, total, size)
    return [(padded.select(range(s, s + size)), min(size, total - s)) for s in starts]


# --- solutions, demonstrations --------------------------------------------------------------------


def solution(example: Example, field: str) -> str | None:
    """Return the worked solution of a problem; None if it has none.

    field: `data.solution_field`, its column; "": the answer. ValueError if there is no such
    column, or it is not text.
    """
    value = example.answer
    if field:
        value = _field(example.metadata, field, "data.solution_field")
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, str):
        raise ValueError(f"data.solution_field must be text, got {str(value)[:60]!r}")
    check_text("data.solution_field", value)
    return value if value.strip() else None


def encode_solutions(
    examples: Sequence[Example], tokenizer: Tokenizer, field: str, response_len: int
) -> dict[str, np.ndarray]:
    """Return the solutions' tokens with their end, int32 [<= response_len], by prompt_id.

    Solutions that are missing or longer are left out.
    """
    encoded = {}
    for example in examples:
        text = solution(example, field)
        tokens = [] if text is None else encode_response(text, tokenizer)
        if 0 < len(tokens) <= response_len:
            encoded[example.prompt_id] = np.array(tokens, np.int32)
    return encoded


def encode_response(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a whole response including its end, even if the text already has one; []
    if it has nothing else."""
    said = _without_ends(text, tokenizer.ends)
    return [*tokenizer.encode(said), tokenizer.end_id] if said.strip() else []


def _without_ends(text: str, ends: tuple[str, ...]) -> str:
    """Return the text without ends of a response and the blanks after them."""
    while text.endswith(ends) or text.rstrip().endswith(ends):
        text = text if text.endswith(ends) else text.rstrip()
        text = text.removesuffix(next(filter(text.endswith, ends)))
    return text


def demonstrations(
    examples: Sequence[Example], mistake_rate: float, seed: int, field: str = ""
) -> list[tuple[Any, str]]:
    """Return (prompt, solution) pairs; each digit of a solution is wrong at `mistake_rate`.

    field: see `solution`; problems without a solution are left out.

    The mistakes leave the policy something to learn. They depend only on seed and prompt_id.
    """
    pairs = []
    for example in examples:
        text = solution(example, field)
        if text is None:
            continue
        rng = np.random.default_rng([seed, int(example.prompt_id, 16)])
        wrong = rng.random(len(text)) < mistake_rate
        shift = rng.integers(1, 10, len(text))
        text = "".join(
            str((int(c) + s) % 10) if w and c in "0123456789" else c
            for c, w, s in zip(text, wrong, shift.tolist())
        )
        pairs.append((example.prompt, text))
    return pairs
