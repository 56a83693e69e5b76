"""notebooks/idea.ipynb: its rollouts are the package's, token for token, on the same noise."""

import types

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
import rollout_reference as ref
from small_runs import ROOT

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import place_params, rollout_weights
from specrl_jax.rollout.sampling import Purpose, exponentials

GROUP = 4


@pytest.fixture(scope="module")
def idea():
    """Definitions of the notebook, without its runs."""
    notebook = nbformat.read(ROOT / "notebooks" / "idea.ipynb", as_version=4)
    run = next(i for i, x in enumerate(notebook.cells) if x.source.startswith("## Run it"))
    defined = {}
    for cell in notebook.cells[2:run]:
        if cell.cell_type == "code":
            exec(cell.source, defined)
    with jax.numpy_rank_promotion("allow"):  # as it is outside of tests
        yield types.SimpleNamespace(**defined)


def _model(idea) -> ModelConfig:
    return ModelConfig(
        idea.V, idea.D, idea.F, idea.L, idea.N, idea.N, idea.H, rope_theta=1e4, norm_eps=1e-6
    )


def _prompts(idea):
    rows = idea.make_prompts(np.random.default_rng(5), 6)
    return rows, ref.make_prompts(rows.tolist(), idea.P)


def _seeds(prompts, step: int, purpose: Purpose):
    ids = ref.put(np.repeat(prompts.ids, GROUP, axis=0), "batch", None)
    samples = ref.put(np.tile(np.arange(GROUP, dtype=np.int32), len(prompts.lens)), "batch")
    return ref.seeds_of(jax.random.key(ref.KEY), int(purpose), jnp.uint32(step), ids, samples)


def _gumbel(idea, prompts, step: int) -> np.ndarray:
    """The package's noise as the notebook wants it: minus the log of each candidate's time."""
    seeds = _seeds(prompts, step, Purpose.SAMPLE)
    positions = ref.put(np.tile(np.arange(idea.R, dtype=np.int32), (len(seeds), 1)), "batch", None)
    ids = jnp.arange(idea.V)[None, None]
    return -np.log(np.asarray(jax.jit(exponentials)(seeds, positions, ids)))


def _same(got, rollout) -> None:
    tokens, lens, kept, _ = got
    inside = np.arange(tokens.shape[1]) < lens[:, None]
    np.testing.assert_array_equal(lens, rollout.lens)
    np.testing.assert_array_equal(kept, rollout.prefix_lens)
    np.testing.assert_array_equal(tokens[inside], np.asarray(rollout.tokens.ids)[inside])


@pytest.mark.parametrize(("accept", "lenience"), [("match", 1.0), ("ratio", 1.0), ("ratio", 2.0)])
def test_rollouts_are_the_packages(idea, mesh, accept, lenience):
    """The first without drafts, the next, of a changed policy, with them: on its noise or new."""
    model = _model(idea)
    rows, prompts = _prompts(idea)
    rows = np.repeat(rows, GROUP, axis=0)
    before = idea.init(jax.random.key(0))
    after = jax.tree.map(lambda x: 1.3 * x, before)
    spec = ref.make_spec(
        model, accept=accept, slots=idea.R, prompt_slots=idea.P, group=GROUP, eos=(idea.END,)
    )
    weights = [rollout_weights(model, place_params(model, x)) for x in (before, after)]

    first = idea.rollout(before, rows, _gumbel(idea, prompts, 1))
    theirs, _ = ref.run(spec, weights[0], prompts, step=1)
    _same(first, ref.host(theirs))

    tokens, lens, *_ = first
    step = 1 if accept == "match" else 2
    uniforms = ref.uniforms(_seeds(prompts, 2, Purpose.ACCEPT), jnp.arange(idea.R)[None])
    old = np.asarray(theirs.tokens.sampling_logprobs)[:, : idea.R]
    again = idea.rollout(
        after, rows, _gumbel(idea, prompts, step), tokens, lens, getattr(idea, accept),
        uniforms=np.asarray(uniforms), old_logprobs=old, lenience=lenience,
    )  # fmt: skip
    theirs, _ = ref.run(
        spec, weights[1], prompts, step=step, drafts=ref.as_drafts(theirs),
        log_lenience=np.log(lenience),
    )  # fmt: skip
    _same(again, ref.host(theirs))
    assert 0 < again[2].sum() < again[1].sum()  # drafts are kept in part
