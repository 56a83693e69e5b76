"""The family that docs/your_model.md adds, against transformers' class."""

import re

import jax
import numpy as np
import pytest
from references.make_references import SIZES, TINY, logits, tiny_model
from small_runs import ROOT

from specrl_jax.models import hf
from specrl_jax.models.families import FAMILIES
from specrl_jax.models.transformer import Transformer, place_params
from specrl_jax.sharding import put

ROW = re.search(
    r"own family in a row\n.*?```python\n(.*?)```",
    (ROOT / "docs" / "your_model.md").read_text(),
    re.DOTALL,
)[1]


def test_a_family_is_a_row(mesh, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    settings = {
        "num_hidden_layers": 3,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    monkeypatch.setitem(TINY, "ministral", ("ministral", settings))
    theirs = tiny_model("ministral", seed=5)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"model_type must be one of .*, got 'ministral'"):
        hf.load(str(tmp_path / "theirs"))

    before = dict(FAMILIES)
    try:
        exec(ROW, {})
        config, params = hf.load(str(tmp_path / "theirs"))
        assert config.local_layers == (True, False, True)
        tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (8, 30), np.int32)

        def forward(params, tokens):
            model = Transformer(config, params)
            return model.logits(model(tokens)[0])

        placed = place_params(config, params)
        ours = np.asarray(jax.jit(forward)(placed, put(tokens, "batch", None)))
        hf.save(tmp_path / "ours", config, params)
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(back) is type(theirs)
        assert back.config.layer_types == settings["layer_types"]
        for model in (back, theirs):
            np.testing.assert_allclose(ours, logits(model.double(), tokens), atol=1e-4)
    finally:
        FAMILIES.clear()
        FAMILIES.update(before)
