"""State that a run keeps from its start: its reference, and a record of its model and data."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.data.prompts import digest
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.lora import adapted
from specrl_jax.models.transformer import Params
from specrl_jax.process.checkpoint import checksum
from specrl_jax.training.run import Run, stage_digests
from specrl_jax.types import StatePart


@dataclasses.dataclass(frozen=True)
class Reference(StatePart):
    """Policy before step 1: the KL penalty is measured against it, and adapters modify it."""

    params: Params  # float32; with adapters, as returned by `lora.freeze`
    saved: bool  # a warm-up trained it, so checkpoints contain it; else its source is read again
    adapters: Params | None = None  # if the warm-up trained adapters of `params`

    def policy(self, model: ModelConfig) -> Params:
        return self.params if self.adapters is None else adapted(model, self.adapters, self.params)

    def arrays(self) -> Params:
        if self.adapters is not None:
            return {"adapters": self.adapters}
        # In float32, as a run may resume on a machine that computes in another type.
        return jax.tree.map(lambda x: x.astype(jnp.float32), self.params) if self.saved else {}

    def host(self) -> dict[str, Any]:
        return {"dtype": self.params["embed"].dtype.name}

    def restore(self, host, arrays: Params) -> "Reference":
        if self.adapters is not None:
            return dataclasses.replace(self, **arrays)
        if not self.saved:
            return self
        params = jax.tree.map(lambda x, own: x.astype(own.dtype), arrays, self.params)
        return dataclasses.replace(self, params=params)


@dataclasses.dataclass(frozen=True)
class RunOrigin(StatePart):
    """Model and data that a run started with; a resume rejects others."""

    source: str  # of the config
    shape: dict[str, Any]  # without what depends on the machine
    weights: int  # their checksum, before a warm-up
    data: dict[str, str]  # digests by name: of held-out prompts, and of what stages have read
    is_reference: bool  # the reference is read from the source again

    @classmethod
    def of(cls, run: Run, params: Params, is_reference: bool) -> "RunOrigin":
        """Describe the model of `params`, as returned by `build`."""
        shape = json.loads(json.dumps(dataclasses.asdict(run.model), default=str))
        for name in ("dtype", "remat", "kernels", "unused_ids", "lora"):
            del shape[name]
        ids = [prompts.ids[:real] for prompts, real in run.held_out]
        tokens = [prompts.tokens[:real] for prompts, real in run.held_out]
        held_out = {"held-out prompts": digest(*ids, *tokens)} if ids else {}
        frozen = {"weights that are not trained": run.frozen.digest} if run.frozen else {}
        return cls(
            source=run.config.model.source,
            shape=shape,
            weights=checksum(params),
            data=stage_digests(run.stages) | held_out | frozen,
            is_reference=is_reference,
        )

    def host(self) -> dict[str, Any]:
        return {"shape": self.shape, "weights": self.weights, "data": self.data}

    def restore(self, host: dict[str, Any], arrays) -> "RunOrigin":
        changed = [
            f"{name} was {host['shape'][name]}, now {value}"
            for name, value in self.shape.items()
            if host["shape"][name] != value
        ]
        if self.is_reference and host["weights"] != self.weights:
            changed.append("its weights, which the run still needs, have changed")
        if changed:
            raise ValueError(
                f"model.source must be the model that the run started with, got {self.source!r}: "
                f"{'; '.join(changed)}; put its files back, or start a new run"
            )
        for what, now in self.data.items():
            before = host["data"].get(what, now)
            if before != now:
                raise ValueError(
                    f"data must be as in the checkpoint: the {what} were {before}, are {now}; set "
                    "back the data, the tokenizer or the chat template"
                )
        return dataclasses.replace(self, **host | {"data": self.data | host["data"]})
