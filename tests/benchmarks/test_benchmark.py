"""Every benchmark at its smallest through launch/benchmark.py, and its parts by hand."""

import dataclasses
import json
import math
import runpy

import numpy as np
import pytest
import rollout_reference as ref
from small_runs import ONE_DEVICE, ROOT, launch, preset

from specrl_jax.benchmarks import device, host, training
from specrl_jax.benchmarks.device import decode_bytes, forward_flops
from specrl_jax.benchmarks.rollout import (
    SIZES,
    Report,
    corrupt,
    long_tailed,
    make_drafts,
    random_params,
    spread,
)
from specrl_jax.models.config import ModelConfig
from specrl_jax.types import Rollout, Tokens

LAUNCH = ROOT / "launch" / "benchmark.py"
SMALL = ("--rows=8", "--prompt-len=3", "--response-len=12", "--repeats=1",
         "--row-buckets=2", "--max-width=2")  # fmt: skip


# The commands --------------------------------------------------------------------------------


@pytest.fixture
def run(mesh, tmp_path, capsys):
    """run(*arguments) → the exit code, the cases of the JSON file and the text."""
    path = tmp_path / "figures.json"

    def call(*arguments: str) -> tuple[int, list[dict], str]:
        code = 0
        try:
            runpy.run_path(str(LAUNCH))["main"]([*arguments, f"--json={path}"])
        except SystemExit as stop:
            code = stop.code
        return code, json.loads(path.read_text())["cases"], capsys.readouterr().out

    return call


@pytest.mark.slow
def test_rollout(run):
    code, cases, text = run("rollout", *SMALL)
    assert code == 0
    kinds = [f"{d}, {lost} lost" for lost in ("nothing", "half")
             for d in ("previous", "tree", "previous+tree")]  # fmt: skip
    assert [case["drafts"] for case in cases] == ["naive loop", "no drafts", *kinds]
    by_name = {case["drafts"]: case for case in cases}
    naive, plain = cases[:2]
    assert naive["row_steps"] == 8 * 11  # every row to the longest length, but its first token
    assert plain["row_steps"] < naive["row_steps"]
    ratio = naive["seconds"]["median"] / plain["seconds"]["median"]
    assert plain["over_naive"]["median"] == pytest.approx(ratio)
    assert naive["over_naive"]["median"] == plain["over_plain"]["max"] == 1
    assert plain["reused"] == plain["drafted"] == 0
    assert by_name["previous, nothing lost"]["reused"] == 1
    assert by_name["previous, half lost"]["reused"] < 0.7
    assert all(name in text for name in by_name)


def _fail(dtype: str):
    raise ValueError("no limits\nhere")


def test_device(run, monkeypatch):
    """Every part returns its figure; one that fails is a line, and the others continue."""
    monkeypatch.setattr(device, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(device, "STEP_ROWS", (8,))
    monkeypatch.setattr(device, "_limits", _fail)
    monkeypatch.setattr(device, "LAST_BEGIN", float("inf"))
    code, cases, text = run("device", *SMALL)
    assert code == 1
    rows = {case["figure"]: case for case in cases}
    assert rows["limits"]["note"] == "ValueError: no limits"
    assert [name for name, row in rows.items() if row.get("met") == "failed"] == ["limits"]
    figures = ("decode, width 1", "decode, width 2", "suffix drafts", "prefill, prompts",
               "prefill, verification")  # fmt: skip
    for name in figures:
        assert 0 < rows[f"{name}, tiny"]["value"] < math.inf
    steps = [rows[f"step, width {width}, 8 rows, tiny"] for width in (1, 2)]
    assert steps[0]["value"] == 1
    assert steps[1]["met"] == ("yes" if steps[1]["value"] <= 1.5 else "no")
    kernels = [row for name, row in rows.items() if "attention" in name]
    assert len(kernels) == 6  # outputs, three gradients, two widths
    assert all(row["note"] == "by the reference" and row["value"] < 1e-5 for row in kernels)
    assert "100% of the drafts accepted" in rows["prefill, verification, tiny"]["note"]
    # Every response is among the stored ones: two tokens a step, after the first.
    assert rows["suffix drafts, tiny"]["note"].startswith("12 tokens in 6 steps")
    goals = [(row["goal"], row["met"]) for row in rows.values() if row.get("goal") == ">= 0.7"]
    assert goals == [(">= 0.7", "yes" if rows["decode, width 1, tiny"]["value"] >= 0.7 else "no")]
    assert "figure" in text


def test_kernels_are_compared_with_the_reference(mesh, monkeypatch):
    """A backend that is wrong is seen."""
    true = device.attention.attend_packed

    def attend_packed(*args, kernels, **options):
        return true(*args, **options) * (1.05 if kernels else 1.0)

    monkeypatch.setattr(device.attention, "attend_packed", attend_packed)
    size = SIZES["tiny"]
    size = dataclasses.replace(size, model=size.model.replace(kernels=("packed",)))
    rows = list(device._kernels("tiny", size))
    assert [row["met"] for row in rows] == ["no"] * 4 + ["yes"] * 2
    assert rows[0]["value"] == pytest.approx(0.05, abs=1e-5)
    assert rows[0]["note"] == "by a kernel"


def test_training(run, monkeypatch):
    """Each kind of draft trains; one that fails is a row, and the others continue."""
    cases = dict(list(training.CASES.items())[:2]) | {"wrong": {"rollout.draft": "previous+trees"}}
    monkeypatch.setattr(training, "CASES", cases)
    code, rows, text = run("training", *SMALL)
    assert code == 1
    assert [row["drafts"] for row in rows] == list(cases)
    plain, previous, wrong = rows
    assert previous["over_plain"] == pytest.approx(plain["step"] / previous["step"])
    assert plain["start_to_first_step"] >= plain["build"] + plain["compile"] + plain["first_step"]
    assert wrong["note"].startswith("KeyError")
    assert "memory: the compiler reports 0.0" in text


def test_host(run, monkeypatch):
    """Every part has seconds; rows of a group share their prompt, and all end in their slots."""
    monkeypatch.setattr(host, "ROWS", 32)
    code, cases, text = run("host")
    assert code == 0
    names = ["pack all rows: log-probs", "pack 1 mini-batches", "pack rows as they start"]
    fills = [f"slots of rows that start: {name}" for name in host.FILLS]
    assert [case["part"] for case in cases] == names + fills
    for case in cases[: len(names)]:
        assert case["seconds"] > 0
        assert case["of_a_step"] == pytest.approx(case["seconds"] / 261.8)
    for case in cases[len(names) :]:
        shares = [case[name] for name in ("fill", "empty", "repeated", "rejected")]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
        # One group starts: nothing is computed twice, and nothing is behind a rejection.
        assert (case["calls"], case["repeated"]) == (1, 0)
        assert (case["rejected"] > 0) == ("half" in case["part"])
    assert "host: 32 rows" in text
    config = preset("qwen3_1p7b")
    rows = host.random_rows(config, 151_936, 32)
    assert rows.tokens.shape == (32, 1_024 + 4_096)
    assert 100 <= rows.prompt_lens.min() <= rows.prompt_lens.max() <= 400
    assert 1 <= rows.response_lens.min() <= rows.response_lens.max() <= 4_096
    for first in range(0, 32, 8):
        group = range(first, first + 8)
        size = rows.prompt_lens[first]
        assert all(rows.prompt_lens[row] == size for row in group)
        prompts = rows.tokens[first : first + 8, :size]
        assert np.array_equal(prompts, np.tile(prompts[:1], (8, 1)))
    ends = rows.prompt_lens + rows.response_lens
    assert all(not row[end:].any() for row, end in zip(rows.tokens, ends))


def test_random_policies_do_not_repeat_themselves(mesh):
    """With a tied head and plain random weights the last token is the likeliest next one."""
    model = SIZES["tiny"].model.replace(vocab_size=512)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 32)).astype(np.int32)
    logits = ref.full_logits(model, random_params(model), tokens)
    assert 1.2 < logits.std() < 2.8
    repeats = np.take_along_axis(logits, tokens[:, :, None], axis=2)[..., 0]
    assert abs(repeats.mean()) < 1.0
    assert np.mean(logits.argmax(-1) == tokens) < 0.1


@pytest.fixture
def measured(tmp_path):
    """measured(benchmark, *flags) → the cases, from a separate process."""

    def call(benchmark: str, *flags: str) -> list[dict]:
        shared = ("--config=tests/small_runs.py", "--config.rollout.adaptive=False", "--drift=1",
                  "--repeats=2", f"--json={tmp_path / 'figures.json'}")  # fmt: skip
        done = launch(str(LAUNCH), benchmark, *shared, *flags, **ONE_DEVICE)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "figures.json").read_text())["cases"]

    return call


@pytest.mark.slow
def test_rules(measured):
    """Lenience keeps more, and no rule more than it; match hardly keeps what a large step moved,
    and more on the noise that wrote it."""
    flags = ("updates.learning_rate=0.1", "rollout.lenience=1.65", "rollout.stored_logprobs=8")
    cases = measured("rules", *(f"--config.{flag}" for flag in flags))
    kept = {x["rule"]: x["kept_of_draft"] for x in cases}
    assert kept["no drafts"] == 0
    assert kept["ratio, ℓ=1.65"] > kept["ratio, ℓ=1"] > kept["match"]
    assert kept["block"] > kept["match"]
    assert kept["match, reused noise"] > kept["match"]
    assert kept["tree"] == kept["tree, reused noise"] == 0
    assert all(x["row_steps"] > 0 for x in cases)
    assert cases[0]["over_plain"]["median"] == 1


@pytest.mark.slow
def test_heads(measured):
    """No row differs; each place of a draft has a rate, and both updates have seconds."""
    cases = measured("heads", "--config.rollout.max_width=4")
    assert [x["drafts"] for x in cases[:3]] == ["no drafts", "coupled", "greedy"]
    assert [x["step"] for x in cases[:6]] == [0] * 3 + [1] * 3
    assert all(x["rows_that_differ"] == 0 for x in cases[:6])
    for case in (*cases[1:3], *cases[4:6]):
        rates = [case[f"draft_{place}"] for place in (1, 2, 3)]
        assert 1 <= case["tokens_a_pass"] == pytest.approx(1 + np.sum(np.cumprod(rates)))
    without, beside = cases[6:]
    assert without["times_as_long"]["median"] == 1
    assert beside["seconds"]["median"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout", "--repeats=0"], "--repeats must be >= 1, got 0"),
        (["device", "--rows=12"], "--rows must be a multiple of 8, got 12"),
        (["rollout", "--size=huge"], "--size must be one of tiny, 27m, smollm2, qwen3_1p7b"),
        (["device", "--json=/nowhere/x.json"], "--json: no directory /nowhere"),
        (["rollout", "--repeat=4"], "unknown arguments: --repeat=4, did you mean --repeats?"),
        (["speed"], "invalid choice: 'speed'"),
    ],
)
def test_a_mistake_is_one_line(mesh, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(LAUNCH))["main"](arguments)
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in said
    assert len(said.splitlines()) == 1


# Lengths, drafts, reports --------------------------------------------------------------------


def test_lengths_worked_row():
    """z of 1/8, 3/8, ...: -1.150, -0.319, ...; 4 · 8^(z / 1.150) is 0.5, 2.25, 7.12, 32."""
    assert sorted(long_tailed(4, 32, 4.0).tolist()) == [1, 2, 7, 32]


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_corruption_replaces_its_share_by_other_tokens(rate):
    tokens = np.random.default_rng(0).integers(0, 7, (100, 400))
    corrupted = corrupt(tokens, rate, 7, np.random.default_rng(1))
    assert set(np.unique(corrupted)) <= set(range(7))
    deviation = math.sqrt(rate * (1 - rate) / tokens.size)
    assert abs(np.mean(corrupted != tokens) - rate) <= 4 * deviation


def test_previous_and_tree_drafts_are_copies_of_their_own(mesh):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 16, (16, 6)).astype(np.int32)
    logprobs = -rng.random((16, 6)).astype(np.float32)
    lens = np.arange(1, 17, dtype=np.int32).clip(max=6)
    rollout = Rollout(Tokens(ids, sampling_logprobs=logprobs), lens, prefix_lens=lens * 0)
    drafts, history = make_drafts(rollout, 0.5, 16, rng)
    assert np.array_equal(drafts.lens, rollout.lens)
    assert np.array_equal(drafts.tokens.sampling_logprobs, rollout.tokens.sampling_logprobs)
    tokens, lens = history
    assert tokens.shape == (2, 1, 8, 6)  # one generation
    assert np.array_equal(lens, rollout.lens.reshape(2, 1, 8))
    copies = (np.asarray(drafts.tokens.ids), np.asarray(tokens).reshape(16, 6))
    assert not np.array_equal(*copies)
    assert all(0.2 < np.mean(copy != rollout.tokens.ids) < 0.8 for copy in copies)


def test_bytes_and_operations_worked_rows():
    """2 layers of width 4: 4 x 8 + 2 x 4 x 4 + 8 x 4 + 3 x 4 x 6 = 168 weights, norms 8 a layer."""
    model = ModelConfig(10, 4, 6, 2, 4, 2, 2, dtype="bfloat16")
    # 2 layers x 3 rows x 5 slots x keys and values x 2 heads x 2 x 2 bytes.
    cache = 2 * 3 * 5 * 2 * 2 * 2 * 2
    weights = 2 * (168 + 8) + 40 + 4
    for tied in (True, False):  # of an untied embedding only the head is read
        shape = model.replace(tie_embeddings=tied)
        assert decode_bytes(shape, 3, 5) == 2 * weights + cache
        # 2 operations a weight and token; attention: scores and sums of 5 slots by 4 heads of 2.
        both = weights + 2 * 2 * 5 * 4 * 2
        assert forward_flops(shape, 21, 5) == 2 * 21 * both
        assert forward_flops(shape, 21, 5, scored=1) == 2 * (21 * both - 20 * 40)


def test_a_report(mesh, tmp_path):
    rows = [{"case": "a", "seconds": spread([1, 3, 20]), "tokens": 12_345},
            {"case": "b", "over_plain": 2.0 / 3}]  # fmt: skip
    report = Report("title", rows)
    title, _, *table = report.to_text().splitlines()
    assert title == "title"
    assert [line.split() for line in table] == [
        ["case", "seconds", "tokens", "over", "plain"],
        ["a", "3", "(1-20)", "12,345", "-"], ["b", "-", "-", "0.667"],
    ]  # fmt: skip
    report.write_json(tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["cases"] == rows
