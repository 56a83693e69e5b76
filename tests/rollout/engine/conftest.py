import jax
import pytest
import rollout_reference as ref
from scheduler_cases import PROMPTS, go, spec_of


@pytest.fixture(scope="module")
def base(make_mesh):
    """The plain rollout up to max_lens and beyond, and a complete one of an earlier policy."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        spec = spec_of(**ref.ONE_BUCKET)
        plain, _ = go(spec)
        endless, _ = go(spec, max_lens=None)
        old, _ = ref.run(spec, ref.policy(0.1, ref.ONE_LAYER)[1], PROMPTS)
        yield ref.host(plain), ref.host(endless), ref.host(ref.as_drafts(old))
