"""The supervised stage against a plain loop, and what it refuses."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_runs
from small_models import random_params

from specrl_jax.algorithms.scoring import RowTokens
from specrl_jax.algorithms.update_spec import make_update_spec
from specrl_jax.data import prompts
from specrl_jax.models import transformer
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Transformer
from specrl_jax.text.tokenizer import CharacterTokenizer
from specrl_jax.training import warmup

MODEL = ModelConfig(
    vocab_size=16, embed_dim=16, mlp_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
)
# Four demonstrations: repeat the last token of the prompt, then end (1).
PROMPT_LENS = np.array([1, 2, 1, 2], np.int32)
RESPONSE_LENS = np.array([2, 2, 2, 2], np.int32)
TOKENS = np.array([[5, 5, 1, 0, 0], [6, 5, 5, 1, 0], [7, 7, 1, 0, 0], [5, 8, 8, 1, 0]], np.int32)
DATA = RowTokens(TOKENS, PROMPT_LENS, RESPONSE_LENS, slots=3)


@functools.cache
def _update_spec():
    # The budget is not one of demonstrations.
    config = small_runs.small_config({"updates.token_budget": 20})
    return make_update_spec(config, MODEL, optax.constant_schedule(0.0))


def _params(seed: int = 0):
    return transformer.place_params(MODEL, random_params(MODEL, 0.3, seed=seed))


@jax.jit(static_argnums=1)
def _plain_loss(params, rows: tuple[int, ...]):
    """Mean negative log-likelihood of the responses' tokens, row by row without padding."""
    total = count = 0
    model = Transformer(MODEL, params)
    for b in rows:
        tokens = TOKENS[b, : PROMPT_LENS[b] + RESPONSE_LENS[b]]
        logits = model.logits(model(jnp.asarray(tokens)[None])[0])
        log_p = jax.nn.log_softmax(jax.sharding.reshard(logits, jax.P(None, None, None))[0])
        for j in range(PROMPT_LENS[b], len(tokens)):
            total, count = total - log_p[j - 1, int(tokens[j])], count + 1
    return total / count


@pytest.mark.parametrize("devices", [1, 2])
def test_three_steps_are_those_of_a_plain_loop(make_mesh, devices):
    settings = types.SimpleNamespace(steps=3, batch_size=2, learning_rate=0.01)
    with jax.set_mesh(make_mesh(devices, 1, 1)):
        got = warmup.supervise(_update_spec(), _params(), DATA, settings, seed=5)[0]
    rng = np.random.default_rng([5, 3])
    order = np.concatenate([rng.permutation(4) for _ in range(2)])[:6].reshape(3, 2)
    rates = [0.01 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * n / 3))) for n in range(3)]
    with jax.set_mesh(make_mesh(1, 1, 1)):
        params = _params()
        moments = optax.scale_by_adam()
        state = moments.init(params)
        for rows, rate in zip(order, rates, strict=True):
            grads = jax.grad(_plain_loss)(params, tuple(rows.tolist()))
            norm = optax.tree.norm(grads)
            grads = jax.tree.map(lambda g, n=norm: g / jnp.maximum(n, 1), grads)
            step, state = moments.update(grads, state)
            params = jax.tree.map(lambda p, s, r=rate: p - r * (s + 1e-4 * p), params, step)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, params)


def test_divergence_is_one_line_with_its_field(mesh):
    settings = types.SimpleNamespace(steps=1, batch_size=2, learning_rate=1e30)
    message = r"^warm-up: weight_norm is inf by step 1; lower sft.learning_rate, now 1e\+30$"
    with pytest.raises(FloatingPointError, match=message):
        warmup.supervise(_update_spec(), _params(), DATA, settings, seed=5)


@pytest.fixture
def parts(mesh):
    """(config, tokenizer, data set) of a small run with a short warm-up."""
    config = small_runs.small_config({"sft.steps": 2, "sft.mistake_rate": 0.5})
    return config, CharacterTokenizer(config.tokenizer.alphabet), prompts.load_examples(config)


def test_the_configured_stage_is_a_function_of_the_config(parts, capsys):
    config, tokenizer, dataset = parts
    one, two = (
        warmup.warm_up(config, _update_spec(), _params(), tokenizer, dataset)[0] for _ in range(2)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert not np.allclose(one["embed"], _params()["embed"])
    out = capsys.readouterr().out
    assert "warm-up: 2 supervised steps of 8 on " in out
    assert "50% of their digits wrong" in out
    assert "step 2: " in out


def test_demonstrations_that_do_not_fit_are_left_out(parts, monkeypatch):
    """They end with the end of sequence, which needs a slot too."""
    config, tokenizer, dataset = parts
    seen = []
    monkeypatch.setattr(warmup, "supervise", lambda *args: seen.append(args[2]))
    make = lambda prompt, answer: prompts.make_example(prompt, answer, "", {})  # noqa: E731
    pairs = [("1>", "12345"), ("2>", "123456"), ("123>", "1"), ("3>", "4")]
    monkeypatch.setattr(warmup, "load_warmup_examples", lambda *_: [make(*pair) for pair in pairs])
    config.sft.mistake_rate = 0.0
    warmup.warm_up(config, None, None, tokenizer, dataset)
    (data,) = seen
    one, three = tokenizer.encode("1>"), tokenizer.encode("3>")
    answers = [[*tokenizer.encode("12345"), 1, 0], [*tokenizer.encode("4"), 1, *[0] * 5]]
    np.testing.assert_array_equal(data.tokens, [[*one, *answers[0]], [*three, *answers[1]]])
    np.testing.assert_array_equal(data.prompt_lens, [2, 2])
    np.testing.assert_array_equal(data.response_lens, [6, 2])


def test_solutions_of_a_file_but_not_of_what_is_held_out(parts, tmp_path, monkeypatch, capsys):
    """The first three problems: one without a solution, one that is too long, and one that fits."""
    config, _, _ = parts
    solutions = ["1 2", None, "1 2 3 4 5", "9", "8"]
    rows = [
        {"q": f"{i}>", "answer": f"{i};{i}", "work": text} for i, text in enumerate(solutions, 3)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.data.update({"source": "jsonl", "path": str(path), "prompts": 0, "eval_prompts": 1})
    config.data.update({"prompt_field": "q", "answer_pattern": ";(.)", "solution_field": "work"})
    config.sft.update({"mistake_rate": 0.0, "examples": 3})
    tokenizer = CharacterTokenizer(config.tokenizer.alphabet)
    seen = []
    monkeypatch.setattr(warmup, "supervise", lambda *args: seen.append(args[2]))
    warmup.warm_up(config, None, None, tokenizer, prompts.load_examples(config))
    assert capsys.readouterr().out == (
        "warm-up: 2 supervised steps of 8 on 1 demonstrations; left out: 1 without a solution and "
        "1 too long\n"
    )
    np.testing.assert_array_equal(seen[0].tokens, [[*tokenizer.encode("3>1 2"), 1, 0, 0, 0]])
    np.testing.assert_array_equal(seen[0].prompt_lens, [2])
    config.sft.examples = 0
    warmup.warm_up(config, None, None, tokenizer, prompts.load_examples(config))
    np.testing.assert_array_equal(seen[1].tokens[:, 0], tokenizer.encode("36"))  # 7 is held out
    config.data.solution_field = "works"
    line = small_runs.line_of(
        warmup.warm_up, config, None, None, tokenizer, prompts.load_examples(config)
    )
    assert line == ("data.solution_field must be one of the columns q, answer, work, got 'works'")


def test_no_shape_depends_on_the_number_of_demonstrations(mesh, monkeypatch):
    shapes, real = [], warmup._run

    def run(*args):
        shapes.append(jax.tree.map(lambda x: x.shape, args[2]))
        return real(*args)

    monkeypatch.setattr(warmup, "_run", run)
    settings = types.SimpleNamespace(steps=14, batch_size=2, learning_rate=0.01)
    for total in (1, 4):
        data = RowTokens(*(x[:total] for x in DATA[:3]), slots=3)
        warmup.supervise(_update_spec(), _params(), data, settings, seed=5)
    assert len(shapes) == 14
    assert all(shape == shapes[0] for shape in shapes)


def test_no_demonstration_that_fits_is_one_line(parts):
    config, tokenizer, dataset = parts
    config.rollout.response_len = 1
    with pytest.raises(ValueError, match=r"^rollout.response_len must fit the demo[^\n]*, got 1$"):
        warmup.warm_up(config, None, None, tokenizer, dataset)
