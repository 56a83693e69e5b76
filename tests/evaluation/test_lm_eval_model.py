"""A policy in lm-eval, offline: task files of our own, against log-probs and tokens by hand."""

import json
import types

import jax
import numpy as np
import pytest
from small_runs import small_config

pytest.importorskip("lm_eval", reason="needs pip install '.[eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and what it imports

from specrl_jax.data.tokenizer import load_tokenizer  # noqa: E402
from specrl_jax.evaluation import lm_eval_model  # noqa: E402
from specrl_jax.evaluation.chat import Responder  # noqa: E402
from specrl_jax.evaluation.saved_policy import SavedPolicy  # noqa: E402
from specrl_jax.models.load import load_policy  # noqa: E402
from specrl_jax.models.transformer import Transformer  # noqa: E402

CONTEXTS = ["7>", "3<", "0>"]  # of one length: few programs
CHOICES = ["7", "1 3", ";"]


@pytest.fixture
def policy(mesh):
    """Random weights, whose answers are long, of a policy of characters."""
    config = small_config({"data.prompt_len": 8, "rollout.response_len": 8})
    tokenizer = load_tokenizer(config)
    model, params = load_policy(config, tokenizer.vocab_size)
    return SavedPolicy("random", 0, config, model, params, tokenizer)


def _logprobs(policy, context: str, continuation: str) -> tuple[float, bool]:
    """Token by token, without padding."""
    before, after = map(policy.tokenizer.encode, (context, continuation))
    model = Transformer(policy.model, policy.params)
    logits = jax.device_get(model.logits(model(np.array([[*before, *after]]))[0]))[0]
    rows = jax.nn.log_softmax(logits[len(before) - 1 : -1])
    right = [int(row.argmax()) == token for row, token in zip(rows, after)]
    return float(sum(row[token] for row, token in zip(rows, after))), all(right)


def _requests(*args) -> list:
    return [types.SimpleNamespace(args=x) for x in args]


def test_loglikelihoods(policy):
    model = lm_eval_model.PolicyLM(policy)
    pairs = [(context, choice) for context in CONTEXTS for choice in CHOICES]
    expected = [_logprobs(policy, *pair) for pair in pairs]
    results = model.loglikelihood(_requests(*pairs), disable_tqdm=True)
    np.testing.assert_allclose([x for x, _ in results], [x for x, _ in expected], rtol=1e-5)
    assert [greedy for _, greedy in results] == [greedy for _, greedy in expected]
    # A text without context follows the end token; in windows, token by token.
    alone = model.loglikelihood(_requests(("", "1 2 3")), disable_tqdm=True)[0][0]
    assert model.loglikelihood_rolling(_requests(("1 2 3",)))[0] == pytest.approx(alone)
    longer = model.loglikelihood_rolling(_requests(("1 2 3 4 5 6 7 8 9 0 1 2",)))[0]
    assert np.isfinite(longer)
    assert longer < alone


def test_answers_end_at_the_first_stop_string(policy):
    model, responder = lm_eval_model.PolicyLM(policy), Responder(policy, 0.0)
    whole = ["".join(responder.respond(context)) for context in CONTEXTS]
    settings = {"until": [], "max_gen_toks": 8}
    assert model.generate_until(_requests(*((x, settings) for x in CONTEXTS))) == whole
    assert any(len(text) > 2 for text in whole)
    stop = {"until": [whole[0][2:3], whole[0][1:2]], "max_gen_toks": 8}
    cut = min(whole[0].find(x) for x in stop["until"])
    assert model.generate_until(_requests((CONTEXTS[0], stop))) == [whole[0][:cut]]
    sampled = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    assert len(set(model.generate_until(_requests(*[("7>", sampled)] * 8)))) > 1


def test_task_files(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"context": x, "choices": CHOICES, "label": i % 2} for i, x in enumerate(CONTEXTS)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    answer = "".join(Responder(policy, 0.0).respond(CONTEXTS[0]))
    for name, lines in {
        "choose": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: label\n"
        'target_delimiter: ""\nmetric_list: [{metric: acc}]',
        "write": f"output_type: generate_until\ndoc_to_target: {json.dumps(answer)}\n"
        "generation_kwargs: {until: [], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\ndoc_to_text: context\n{lines}\nmetadata: {{version: 1}}\n"
        )
    files = [str(tmp_path / f"{name}.yaml") for name in ("choose", "write")]
    measured = lm_eval_model.measure(policy, files, limit=0)
    values = {(row["task"], row["measure"]): row for row in measured}
    best = [int(np.argmax([_logprobs(policy, x, y)[0] for y in CHOICES])) for x in CONTEXTS]
    right = np.mean([row["label"] == choice for row, choice in zip(rows, best)])
    assert values["choose", "acc"]["value"] == pytest.approx(right)
    assert values["choose", "acc"]["prompts"] == 3
    wrote = ["".join(Responder(policy, 0.0).respond(x)) == answer for x in CONTEXTS]
    assert values["write", "exact_match"]["value"] == pytest.approx(np.mean(wrote))
    (tmp_path / "none.yaml").write_text("output_type: generate_until\n")
    with pytest.raises(ValueError, match=r"^--tasks=lm_eval:/.*none.yaml must say task: NAME$"):
        lm_eval_model.measure(policy, [str(tmp_path / "none.yaml")], limit=0)
