"""A run's policy as a Hugging Face directory: weights, tokenizer, generation settings, model card.

`transformers` and anything that reads its directories can load it. It is complete or absent.
"""

import contextlib
import functools
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from ml_collections import ConfigDict

from specrl_jax.config import flatten
from specrl_jax.data.prompts import encode_prompts, load_examples
from specrl_jax.evaluation.saved_policy import SavedPolicy
from specrl_jax.inputs import reason, user_path
from specrl_jax.models import hf, lora
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.difference import compare
from specrl_jax.models.parameters import ADAPTERS, Params
from specrl_jax.models.transformer import Transformer, param_count
from specrl_jax.rollout.stop_strings import parse_stop
from specrl_jax.sharding import put, shards
from specrl_jax.telemetry.metrics import read_metrics


def check_out(out: Path) -> None:
    """Raise a one-line ValueError if `out` is a file or a non-empty directory."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"--out must be a new or an empty directory, {out} already exists")


def export(policy: SavedPolicy, run: Path, out: Path, presets: Mapping[str, ConfigDict]) -> str:
    """Write `policy` of the run in `run` to `out`; a one-line ValueError if `out` is in use.

    presets: configurations by name; the closest is used for the command in the model card.

    Returns a line on how far the weights are from the policy when read in bfloat16; "" without
    adapters, as the weights are then the policy's own.
    """
    check_out(out)
    model = policy.model.replace(lora=None)
    params = policy.params if policy.model.lora is None else lora.merge(policy.model, policy.params)
    sampling = policy.config.rollout
    generation = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,  # 0: off, where transformers would default to 50
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.response_len,
    }
    if strings := parse_stop(sampling.stop):
        generation["stop_strings"] = list(strings)
    with _complete(out) as folder:
        policy.tokenizer.save(folder)
        hf.save(
            folder,
            model,
            params,
            token_ids=policy.tokenizer.token_ids,
            generation=generation,
        )
        card = model_card(policy, read_metrics(run), training_command(policy.config, presets))
        (folder / "README.md").write_text(card, encoding="utf-8")
    return "" if policy.model.lora is None else _distance_in_bfloat16(policy, params)


def _distance_in_bfloat16(policy: SavedPolicy, merged: Params) -> str:
    """Return in one line how far logits of merged weights in bfloat16 are from the policy's.

    The policy applies its adapters next to the weights. In merged weights a change smaller than the
    last bit is lost.
    """
    tokens = _held_out_tokens(policy)
    if tokens is None:
        return "weights read in bfloat16 were not compared: the held-out prompts cannot be read"
    model = policy.model.replace(dtype="bfloat16", kernels=())
    # Equally many rows on each batch shard: some prompts twice.
    rows = -(-len(tokens) // shards("batch")) * shards("batch")
    placed = put(np.resize(tokens, (rows, tokens.shape[1])), "batch", None)

    @functools.partial(jax.jit, static_argnums=0)
    def logits(model: ModelConfig, params: Params) -> Array:
        transformer = Transformer(model, params)
        return transformer.logits(transformer(placed)[0])

    own = logits(model, policy.params)
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), merged)
    far = jnp.max(jnp.abs(logits(model.replace(lora=None), weights) - own))
    base = {name: x for name, x in policy.params["layers"].items() if name not in ADAPTERS}
    base = policy.params | {"layers": base}
    learned = jnp.max(jnp.abs(logits(model.replace(lora=None), base) - own))
    return (
        f"weights read in bfloat16: logits within {far:.2g} of the policy's on {len(tokens)} "
        f"held-out prompts, where the adapters changed them by up to {learned:.2g}"
    )


_PROMPTS = 4  # to compare, and tokens of each: a large policy may be on a CPU
_TOKENS = 64


def _held_out_tokens(policy: SavedPolicy) -> np.ndarray | None:
    """Return the first held-out prompts, cut to equal lengths, int32 [n, T]; None if none."""
    try:
        examples = load_examples(policy.config).eval[:_PROMPTS]
    except ValueError:
        return None
    if not examples:
        return None
    encoded = encode_prompts(examples, policy.tokenizer, policy.config.data.prompt_len)
    if not len(encoded.lens):
        return None
    return encoded.tokens[:, : min(int(encoded.lens.min()), _TOKENS)]


# Relative to the weights' norm. Four bits a weight (Q4_0) change 7 to 9 % of it, and independently
# trained models differ by more than all of it.
_OTHER_MODEL = 0.5


def export_adapters(policy: SavedPolicy, out: Path, base: str = "") -> str:
    """Write only the adapters of `policy` to `out`, in PEFT's format, with the tokenizer.

    base: the model that they belong to, for peft to load; "": `model.source`. Returns in one line
    how far the weights of `base` are from those that the adapters were trained on. Raises a
    one-line ValueError if the run trained none, if peft cannot load their base, if `base` is
    another model, or if `out` is in use.
    """
    check_out(out)
    source = policy.config.model.source
    if policy.model.lora is None:
        raise ValueError(
            f"--adapters needs a run with lora.rank > 0, {policy.name} trained all weights; leave "
            "the flag out"
        )
    if not source:
        raise ValueError(
            f"--adapters needs a run with a model.source, {policy.name} has random weights; "
            "leave the flag out: its weights are written with the adapters added"
        )
    named = base or source
    if named.endswith(".gguf") or named.startswith("pypi:"):
        raise ValueError(
            f"--base must name the model in Hugging Face's format: peft cannot read {named!r}"
        )
    field = "--base" if base else "model.source"
    if hf.reads_images(named, field):
        raise ValueError(
            f"--adapters cannot be used with {named!r}: its weights have other names in "
            "peft, since it also reads images; leave the flag out"
        )
    said = _compare_base(policy, base) if base else f"base: {source}, as the run read it"
    path = user_path(named, field)
    with _complete(out) as folder:
        policy.tokenizer.save(folder)
        base = str(path.resolve()) if path.exists() else named
        hf.save_adapters(folder, policy.model, lora.adapters_of(policy.params), base)
    return said


def _compare_base(policy: SavedPolicy, base: str) -> str:
    """Return in one line how far the weights of `base` are from the adapters' base weights."""
    source = policy.config.model.source
    gap = compare(source, base, policy.model, lora.adapters_of(policy.params))
    if not gap.tensor:
        return f"base: {base} has the weights of {source}, on which the adapters were trained"
    differs = f"{base} differs from {source} by {_percent(gap.relative)} of the weights' norm"
    if gap.relative > _OTHER_MODEL:
        raise ValueError(f"--base must be the model that the adapters were trained on: {differs}")
    line = (
        f"base: {differs}, at most {gap.largest:.2g} in {gap.tensor}; what was learned is "
        f"{_percent(gap.learned)}"
    )
    if gap.relative < gap.learned:
        return line
    return f"{line}, less than the difference: without --adapters the run's own weights are written"


def _percent(share: float) -> str:
    """Return a share with two digits: 0.0714 is 7.1 %, and 1.234 is 120 %."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def push(out: Path, hub_id: str) -> str:
    """Upload an exported directory to a model on the hub, which is created private if new.

    Returns its address. Raises a one-line ValueError.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(hub_id, private=True, exist_ok=True)
        return str(api.upload_folder(folder_path=str(out), repo_id=hub_id))
    except Exception as error:  # the library and its HTTP client share no base class
        raise ValueError(f"--push={hub_id} failed, {out} is complete: {reason(error)}") from error


@contextlib.contextmanager
def _complete(out: Path) -> Iterator[Path]:
    """Yield a folder next to `out` that is renamed to it at the end."""
    folder = out.absolute().with_name(f"{out.absolute().name}.partial")
    if folder.exists():
        raise ValueError(f"{folder} is left from an interrupted export; remove it")
    folder.mkdir(parents=True)
    try:
        yield folder
        folder.rename(out)  # an empty directory is replaced
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def training_command(config: ConfigDict, presets: Mapping[str, ConfigDict]) -> str:
    """Return a command that trains with `config`, from the preset with the fewest differences."""
    fields = dict(flatten(config))

    def changes(name: str) -> dict[str, Any]:
        given = dict(flatten(presets[name]))
        return {f: x for f, x in fields.items() if f not in given or repr(given[f]) != repr(x)}

    nearest = min(presets, key=lambda name: len(changes(name)))
    flags = [shlex.quote(f"--config.{field}={value}") for field, value in changes(nearest).items()]
    return " \\\n  ".join([f"python launch/train.py --config={nearest}", *flags])


def model_card(policy: SavedPolicy, metrics: list[dict[str, Any]], command: str) -> str:
    """Return README.md of an exported policy; metrics: the run's records, by step."""
    config = policy.config
    source = policy.config.model.source
    is_hub_id = source and ":" not in source and not Path(source).expanduser().exists()
    base = f"base_model: {source}\n" if is_hub_id else ""
    task = f"{config.data.name or Path(config.data.path).name} ({config.data.source})"
    judge = f"environment {config.environment.name}" if config.environment.name else ""
    rewards = {r["step"]: f"{r['reward/eval']:.3f}" for r in metrics if "reward/eval" in r}
    measured = bool(rewards)
    rewards = {policy.step: "not measured"} | rewards
    # The mark is inside a cell: Markdown drops text after the last one.
    rows = [
        f"| **{step}, this policy** | **{value}** |"
        if step == policy.step
        else f"| {step} | {value} |"
        for step, value in sorted(rewards.items())
    ]
    evaluation = config.evaluate
    sampling = config.rollout
    cut = f", top-k {sampling.top_k}" if sampling.top_k else ""
    cut += f", top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    table = "\n".join(["| step | held-out reward |", "|---|---|", *rows])
    through = "the chat template" if config.tokenizer.chat else "no template: the text as it is"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [reinforcement-learning, specrl_jax]
{base}---

# {Path(policy.name).resolve().name}, step {policy.step}

A {policy.model.family} policy of {param_count(policy.model) / 1e6:.2f}M parameters, trained from
{source or "random weights"} by reinforcement learning with speculative rollouts (specrl_jax).

* **Task**: {task}; reward: {judge or config.reward.name}.
* **Prompts** go through {through}; at most {config.data.prompt_len} tokens in training.
* **Tokens** are those of tokenizer.json, which `PreTrainedTokenizerFast` reads as it is.
* **Responses** were sampled at temperature {config.rollout.temperature:g}{cut}, up to
  {config.rollout.response_len} tokens, as in generation_config.json.

## Held-out reward

Mean over {evaluation.samples} response(s) a prompt at temperature {evaluation.temperature:g}{cut}.

{table if measured else "Not measured in this run."}

## The command

```bash
{command}
```
"""
