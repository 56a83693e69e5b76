"""A rollout's memory as the operating system sees it, against `rollout.max_rows`.

Minutes, hence slow. `PYTHONPATH=tests python tests/rollout/test_cache_memory.py ROWS` prints what
one process measures.
"""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

MIB = 2**20
ROWS = 32
CACHE = ROWS * 262 * 8 * 2**10  # bytes of so many rows' cache
SLACK = 24 * MIB  # weights, tokens, logits, and what the allocator rounds up


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Peak(threading.Thread):
    """Samples the resident set every 2 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = _resident(), threading.Event()

    def run(self):
        while not self.over.is_set():
            self.most = max(self.most, _resident())
            time.sleep(0.002)


def measure(max_rows: int) -> dict[str, int]:
    """Bytes that a rollout of 128 rows x 262 slots x 8 KiB adds to the process, once compiled."""
    import jax
    import rollout_reference as ref

    from specrl_jax.models.config import ModelConfig
    from specrl_jax.sharding import make_mesh

    jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1]))
    model = ModelConfig(16, 64, 64, 4, 4, 4, 64)
    spec = ref.make_spec(
        model,
        accept="match",
        slots=256,
        eos=(99,),
        row_buckets=5,
        max_rows=max_rows,
    )
    weights, prompts = ref.policy(0.0, model)[1], ref.random_prompts(32)
    max_lens = np.random.default_rng(0).integers(16, 257, 128).astype(np.int32)
    for _ in range(2):  # the first compiles
        before = _resident()
        peak = _Peak()
        peak.start()
        rollout, _ = ref.run(spec, weights, prompts, max_lens=max_lens)
        tokens = np.asarray(rollout.tokens.ids)
        peak.over.set()
        peak.join()
    checksum = int((tokens * np.arange(1, 257)).sum())
    return {"added": peak.most - before, "checksum": checksum}


@pytest.mark.slow
def test_few_rows_take_no_more_than_their_caches_while_they_move():
    measured = {}
    for max_rows in (0, ROWS):
        # Large arrays go back to the system as soon as they are freed.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        done = subprocess.run(
            [sys.executable, __file__, str(max_rows)],
            env=environment, capture_output=True, text=True, timeout=900, check=True,
        )  # fmt: skip
        measured[max_rows] = json.loads(done.stdout)
        print(max_rows, measured[max_rows])
    assert measured[0]["checksum"] == measured[ROWS]["checksum"]
    assert measured[0]["added"] > 3 * CACHE  # all rows at once
    assert measured[ROWS]["added"] <= 1.5 * CACHE + SLACK  # half of it as the batch shrinks


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
