"""Shapes of a run from its configuration alone: no weights, no data."""

import dataclasses

import jax

from specrl_jax import abstract
from specrl_jax.algorithms.update_spec import make_update_spec
from specrl_jax.compile.shapes import AbstractRun
from specrl_jax.data.curriculum import count_steps
from specrl_jax.models.load import load_shape
from specrl_jax.text.tokenizer import OF_ALPHABET, load_tokenizer
from specrl_jax.training.build import policy_schedule, training_spec
from specrl_jax.training.choices import frozen_of

UNKNOWN_PROMPTS = 8_192  # training prompts if data.prompts is 0: all of a data set


def abstract_run(config) -> AbstractRun:
    """Return the shapes of a configuration's run on the mesh in use.

    Raises ValueError as `build.build` does.
    """
    vocab_size = 0
    eos_ids = None
    pad_id = 0
    if config.tokenizer.source in OF_ALPHABET:
        tokenizer = load_tokenizer(config)
        vocab_size = tokenizer.vocab_size
        eos_ids = tokenizer.eos_ids
        pad_id = tokenizer.pad_id
    model = load_shape(config, vocab_size)
    # Which token ends a response only changes a constant of the programs.
    rollout = training_spec(config, model, eos_ids or (model.vocab_size - 1,), pad_id)
    evaluation = rollout.for_evaluation(config.evaluate.samples, config.evaluate.temperature)
    prompts = config.data.prompts or UNKNOWN_PROMPTS
    steps = count_steps(config, prompts)
    has_head = rollout.draft_head is not None
    schedule = policy_schedule(config, steps)
    recipe = frozen_of(config)
    frozen = recipe and recipe.shape(config, vocab_size)
    update_spec = make_update_spec(config, model, schedule, has_head, frozen)
    key = abstract.placed(jax.eval_shape(lambda: jax.random.key(0)))
    mesh = jax.sharding.get_mesh()
    run = AbstractRun(config, model, rollout, evaluation, update_spec, prompts, key, mesh)
    return dataclasses.replace(run, frozen_model=frozen)
