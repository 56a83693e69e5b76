"""Local layers in the engine of rollouts, with windows shorter than the sequences."""

import numpy as np
import pytest
import rollout_reference as ref
from test_transformer import FAMILIES


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral", "smollm3", "olmo3"])
def test_a_rollout_with_drafts_equals_the_naive_loop(mesh, name):
    """Rows start with a prompt and a draft, then decode; the loop recomputes whole sequences."""
    model = FAMILIES[name]
    assert model.sliding_window < 6
    spec = ref.make_spec(model, slots=10, prompt_slots=6)
    prompts = ref.random_prompts(4)
    drafts = ref.old_drafts(spec, prompts, 0.1)
    params, weights = ref.policy(0.0, model)
    rollout, _ = ref.run(spec, weights, prompts, step=1, drafts=drafts, log_lenience=0.2)
    reference = ref.Reference(spec, params, prompts, step=1, drafts=drafts, log_lenience=0.2)
    ref.check_same(rollout, reference)
    # A draft and a response are longer than the window.
    assert np.max(rollout.prefix_lens) > model.sliding_window
    assert np.max(rollout.lens - rollout.prefix_lens) > model.sliding_window
