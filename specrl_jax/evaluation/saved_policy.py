"""A policy that is read, not trained: the checkpoint of a run, or a model directory.

`run_config` or `model_config` returns its configuration, `open_policy` its weights. Nothing is
written: a run may be training in the directory. The mesh is this machine's, not the run's.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from specrl_jax import registry
from specrl_jax.config import flatten
from specrl_jax.data.prompts import encode_prompts, eval_batches, make_example
from specrl_jax.inputs import one_line, read_json, resolve_source
from specrl_jax.models import hf, lora
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.load import load_policy, load_shape
from specrl_jax.models.transformer import Params, abstract_params, abstract_trained, rollout_weights
from specrl_jax.process import runtime
from specrl_jax.process.checkpoint import Checkpointer, checksum
from specrl_jax.rollout.generate import RolloutSpec, generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey, Purpose
from specrl_jax.rollout.stop_strings import make_stop_strings, write_stop
from specrl_jax.settings import schema
from specrl_jax.sharding import shards
from specrl_jax.text.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from specrl_jax.types import Prompts

BEST = "best"
LAST = "last"
_SLOTS = 64  # prompts are padded to multiples of this many tokens, which keeps programs few


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """Weights and everything needed to respond to a prompt."""

    name: str  # the work directory or the model
    step: int  # of the checkpoint; 0 for a model
    config: ConfigDict
    model: ModelConfig
    params: Params  # stored layout; with the run's adapters, see `lora.adapted`
    tokenizer: Tokenizer

    def weights(self) -> Params:
        """Return the rollout's copy of the weights."""
        return rollout_weights(self.model, self.params)

    def spec(self, prompt_slots: int, samples: int, temperature: float) -> RolloutSpec:
        """Return the spec of a rollout of `samples` responses per prompt."""
        tokenizer = self.tokenizer
        config = self.config.copy_and_resolve_references()
        config.data.prompt_len = prompt_slots
        spec = RolloutSpec.from_config(
            config,
            self.model,
            eos_ids=tuple(tokenizer.eos_ids),
            pad_id=tokenizer.pad_id,
            stop=make_stop_strings(config, tokenizer),
        )
        return spec.for_evaluation(samples, temperature)

    def noise(self, step: int | None = None) -> NoiseKey:
        """Return the noise of the run's evaluation at a step; None: the checkpoint's step."""
        key = jax.random.key(self.config.seed)
        return NoiseKey(key, self.step if step is None else step, Purpose.EVALUATE)

    def batch_size(self, prompts: int, samples: int = 1) -> int:
        """Return prompts per rollout: about as many rows as in the run's evaluation."""
        settings = self.config.evaluate
        pieces = shards("batch")
        size = max(settings.batch_size * settings.samples // samples, 1)
        return -(-min(size, prompts) // pieces) * pieces

    def prompts(self, prompt: str, answer: str = "") -> Prompts:
        """Return a rollout's batch with this prompt first.

        answer: of the problem, for an environment. Raises a one-line ValueError if the prompt does
        not fit.
        """
        with one_line("the prompt must be text of the tokenizer"):
            length = len(self.tokenizer.encode_prompt(prompt))
        longest = self.model.max_positions - self.config.rollout.response_len
        if not 0 < length <= longest:
            rule = f"1 to {longest} tokens (the model's positions - rollout.response_len)"
            raise ValueError(f"the prompt must have {rule}, got {length}")
        slots = min(-(-length // _SLOTS) * _SLOTS, longest)
        encoded = encode_prompts([make_example(prompt, answer, "chat", {})], self.tokenizer, slots)
        return eval_batches(encoded, self.batch_size(1))[0][0]

    def answer(self, weights: Params, prompt: str, number: int) -> str:
        """Return the text of a response, sampled as in the run's evaluation.

        weights: from `weights`. number: of the prompt, so each has its own noise. Raises ValueError
        as `prompts` does.
        """
        prompts = self.prompts(prompt)
        spec = self.spec(prompts.tokens.shape[1], 1, self.config.evaluate.temperature)
        rollout = generate(spec, weights, Requests(prompts, self.noise(number))).rollout
        tokens, lens = jax.device_get((rollout.tokens.ids, rollout.lens))
        ids = tokens[0, : lens[0]].tolist()
        decode = self.tokenizer.decode
        return (
            spec.stop.cut(ids, decode, self.config.reward.keep_stop) if spec.stop else decode(ids)
        )


def open_policy(
    run: Path | None,
    model: str,
    step: str,
    defaults: ConfigDict,
    change: Callable[[ConfigDict], ConfigDict] = lambda config: config,
) -> SavedPolicy:
    """Return the policy of checkpoint `step` in a work directory, or of `model`.

    step: best, last, or a number. model: as `model.source`. defaults: every field, for a model.
    change: the user's changes to the configuration. Sets the mesh. Raises a one-line ValueError.
    """
    if run is None:
        config = change(model_config(model, defaults))
        runtime.start(config, training=False)
        tokenizer = load_tokenizer(config)
        shape, params = load_policy(config, tokenizer.vocab_size, tokenizer.unused_ids)
        shape = shape.replace(lora=None)  # nothing is trained
        return SavedPolicy(model, 0, config, shape, params, tokenizer)
    saved = run_config(run)
    config = saved.copy_and_resolve_references()
    config.mesh.data = -1
    config.mesh.fsdp = 1
    config.mesh.tensor = 1
    config.model.attention = "auto"  # the run's kernel may be for another kind of device
    config = change(config)
    if config.lora != saved.lora:
        raise ValueError("lora.* must be left out: the run's adapters cannot be changed")
    runtime.start(config, training=False)
    tokenizer = load_tokenizer(config)
    shape = load_shape(config, tokenizer.vocab_size, tokenizer.unused_ids)
    number, params = _read_params(run, step, config, shape, tokenizer)
    return SavedPolicy(str(run), number, config, shape, params, tokenizer)


def run_config(workdir: Path) -> ConfigDict:
    """Return the configuration of a run; a one-line ValueError if the directory has none."""
    path = workdir / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--run must be the work directory of a run, got {workdir}: no {path.name}"
        )
    values = read_json(path)
    values.pop("resume_from", None)  # what the run started from is not a field
    config = ConfigDict(values)
    registry.load(values.get("recipes", ""))
    schema().check_version(dict(flatten(config)), str(path))
    return config


def model_config(source: str, defaults: ConfigDict) -> ConfigDict:
    """Return the configuration to read a model with: `defaults` without its task.

    Prompts go through the model's chat template, if it has one. Temperature, top-k, top-p, maximum
    response length and stop strings are from its generation_config.json, else 1, off, off, 512
    tokens and none.
    """
    tokenizer = HuggingFaceTokenizer(source, chat=False, field="--model")
    shape = hf.load_config(source, "--model")
    path = resolve_source(source, "--model", ("*.json",)) / "generation_config.json"
    said = read_json(path) if path.is_file() else {}
    strings = said.get("stop_strings") or []
    strings = [strings] if isinstance(strings, str) else strings
    response_len = min(said.get("max_new_tokens") or 512, shape.max_positions // 2)
    config = defaults.copy_and_resolve_references()
    config.update_from_flattened_dict({
        "model.source": source, "tokenizer.source": "",
        "tokenizer.chat": tokenizer.has_chat_template,
        "data.prompt_len": min(1024, shape.max_positions - response_len),
        "rollout.response_len": response_len, "rollout.stop": write_stop(strings),
        "sft.steps": 0, "evaluate.batch_size": 32,
        "evaluate.temperature": float(said.get("temperature") or 1.0),
        "rollout.top_k": int(said.get("top_k") or 0),
        "rollout.top_p": float(said.get("top_p") or 1.0),
    })  # fmt: skip
    config.data.options = ConfigDict()
    return config


def _read_params(
    run: Path, step: str, config: ConfigDict, shape: ModelConfig, tokenizer: Tokenizer
) -> tuple[int, Params]:
    """Read (step, weights) of a checkpoint and verify their checksums."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{run} has no checkpoint; train it first")
    with Checkpointer(folder, read_only=True) as checkpoints:
        number = _number(checkpoints, step)
        like: dict[str, Any] = {"train": {"policy": {"params": abstract_trained(shape)}}}
        own_base = shape.lora and config.sft.steps and not config.model.source
        if own_base:
            like["reference"] = abstract_params(shape)
        arrays, host = checkpoints.restore(number, like, partial=True)
    params = arrays["train"]["policy"]["params"]
    if shape.lora is None:
        return number, params
    base = arrays["reference"] if own_base else _read_base(config, tokenizer, host)
    # In the run's compute type, whatever this machine computes in.
    base_params = lora.freeze(shape.replace(dtype=host["reference"]["dtype"]), base)
    return number, lora.adapted(shape, params, base_params)


def _read_base(config: ConfigDict, tokenizer: Tokenizer, host: dict[str, Any]) -> Params:
    """Read the weights that a run's adapters were trained for; host: of its checkpoint."""
    params = load_policy(config, tokenizer.vocab_size, tokenizer.unused_ids)[1]
    if checksum(params) != host["origin"]["weights"]:
        raise ValueError(
            "model.source must be the model that the run's adapters were trained for, "
            f"{config.model.source!r} has other weights now; put its files back"
        )
    return params


def _number(checkpoints: Checkpointer, step: str) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"{checkpoints.directory} has no checkpoint; train the run first")
    if step == LAST:
        return steps[-1]
    if step != BEST:
        if not step.isdecimal():
            rule = f"{BEST}, {LAST} or the number of a step"
            raise ValueError(f"--step must be {rule}, got {step!r}")
        return int(step)
    best = checkpoints.best_step()
    if best is None:
        there = ", ".join(map(str, steps))
        raise ValueError(
            f"--step must be {LAST} or one of {there}: no checkpoint in {checkpoints.directory} "
            "has a held-out reward"
        )
    return best
