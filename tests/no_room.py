"""A process that saves checkpoints where a file may have 200 kB, as on a full disk.

python tests/no_room.py --folder=FOLDER
"""

import pathlib
import resource

import numpy as np
from absl import flags

from specrl_jax import cli

_FOLDER = flags.DEFINE_string("folder", None, "where to save")


def main() -> None:
    import jax

    from specrl_jax.checkpoint import Checkpointer
    from specrl_jax.sharding import make_mesh

    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    # Noise is not made smaller by compression.
    noise = np.random.default_rng(0).standard_normal((2, 300_000), np.float32)
    with (
        jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1])),
        Checkpointer(pathlib.Path(_FOLDER.value), keep_last=2) as checkpoints,
    ):
        arrays = {"first": jax.numpy.asarray(noise[0]), "second": jax.numpy.asarray(noise[1])}
        for step in range(3):
            checkpoints.save(step, arrays, {"step": step})


if __name__ == "__main__":
    cli.run(main)
