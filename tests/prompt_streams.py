"""Small sets of prompts, and streams of them."""

from small_runs import preset

from specrl_jax.data.curriculum import make_stream
from specrl_jax.data.prompts import encode_prompts, make_example
from specrl_jax.data.tokenizer import CharacterTokenizer


def encoded_set(total, prompt_len=6):
    examples = [make_example(f"{i}>", str(i), "t", {}) for i in range(total)]
    return encode_prompts(examples, CharacterTokenizer("0123456789 <>"), prompt_len)


def prompts_of(batch):
    return [e.prompt for e in batch.examples]


def stream_of(name, encoded, size=3, seed=5, total_steps=10, **changes):
    config = preset("tiny")
    config.seed = seed
    config.rollout.prompts_per_step = size
    config.curriculum.update(changes, name=name)
    return make_stream(config, encoded, total_steps)


def ids_of(batch):
    return [example.prompt_id for example in batch.examples]
