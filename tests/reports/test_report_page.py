"""The report: figures by hand, hostile text, and the page in a browser, by mouse and keys."""

import json
import math
import re

import pytest
from browser import PROGRAM, Page
from recorded_runs import response, two_epochs, write_run
from small_runs import launch

from specrl_jax.reports import report_charts, report_page, rollout_viewer, runs

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x00\u2028\ud83d <!-- __PLOTLY__"


# Figures ------------------------------------------------------------------------------------


def test_the_headline_by_hand(tmp_path):
    run = runs.read_run(write_run(tmp_path / "a"))
    (one,) = runs.series([run])
    figures = {name: (mean, spread) for name, mean, spread in runs.headline(one)}
    assert figures["held-out reward, first"] == ("0.250", "")
    assert figures["held-out reward, last"] == ("0.750", "")
    assert figures["tokens reused"][0] == "37.5%"  # 900 of 2,400
    assert figures["the same, later epochs"][0] == "75.0%"
    # Without steps 1 and 6, which compiled: 2 s against 1 s, 4 s against 3 s.
    assert figures["rollout speed-up over its first epoch"][0] == "2.00×"
    assert figures["whole-step speed-up over its first epoch"][0] == "1.33×"
    assert figures["tokens generated"][0] == "1,500"
    assert figures["seconds of all steps, including compilation"][0] == "31"


def test_no_speed_up_without_a_plain_first_epoch(tmp_path):
    run = runs.read_run(write_run(tmp_path / "a"))
    later = runs.RecordedRun(run.workdir, run.config, [r for r in run.records if r["epoch"] == 2])
    assert runs.speed_up(later, "step") is None
    compiled = [r | {"time/compile": 9.0} if r["epoch"] == 1 else r for r in run.records]
    assert runs.speed_up(runs.RecordedRun(run.workdir, run.config, compiled), "step") is None


def test_seeds_are_one_series_with_a_band(tmp_path):
    folders = [write_run(tmp_path / f"{draft}{seed}", seed, draft, reward=0.25 + 0.5 * seed)
               for draft in ("none", "tree") for seed in (0, 1)]  # fmt: skip
    series = runs.series([runs.read_run(folder) for folder in folders])
    assert [one.name for one in series] == ["draft = none", "draft = tree"]
    assert [len(one.runs) for one in series] == [2, 2]
    assert runs.headline(series[0])[2] == ("training reward, last epoch", "0.500", "± 0.354")
    band, line = report_charts.overview_charts(series)[0]["data"][:2]
    assert line["y"] == [0.5] * 6
    spread = math.sqrt(0.125)
    assert band["y"] == pytest.approx([0.5 + spread] * 6 + [0.5 - spread] * 6, rel=1e-5)


def test_charts_by_hand_and_as_plotly_knows_them(tmp_path):
    """Steps 1 and 6 compiled: they have no times. A metric of 0 alone has no chart."""
    import plotly.graph_objects as go

    run = runs.read_run(write_run(tmp_path / "a"))
    for record in run.steps:
        record |= {"reward/half": 0.5, "rollout/turns_mean": 0.0}
    one = runs.series([run])
    overview = report_charts.overview_charts(one)
    metrics = report_charts.metric_charts(one)
    assert [chart["title"] for chart in overview] == [
        "Reward", "Seconds per step", "Tokens of the responses", "Reward against seconds",
        "Reward against generated tokens",
    ]  # fmt: skip
    reward, seconds, *_ = overview
    assert [trace["y"] for trace in reward["data"]] == [[0.5] * 6, [0.25, 0.75]]
    assert [shape["x0"] for shape in reward["layout"]["shapes"]] == [0.5, 3.5]
    assert reward["layout"]["yaxis"]["range"] == pytest.approx([0.2, 0.8])
    assert seconds["layout"]["yaxis"]["rangemode"] == "tozero"
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in seconds["data"]} == {
        "time/step": ([2, 3, 4, 5], [4, 4, 3, 3]),
        "time/rollout": ([2, 3, 4, 5], [2, 2, 1, 1]),
        "time/update": ([2, 3, 4, 5], [1] * 4),
    }
    assert {prefix: [chart["title"] for chart in charts] for prefix, charts in metrics} == {
        "reward": ["mean", "eval", "no_signal", "half"],
        "rollout": ["tokens_generated", "tokens_reused", "row_steps"],
        "time": ["step", "rollout", "prefill", "decode", "update", "compile"],
    }
    charts = dict(metrics)
    assert charts["time"][-1]["note"].endswith("since the last record (seconds)")
    assert charts["time"][2]["data"][0]["y"] == [0.5] * 4
    for chart in [*overview, *charts["reward"], *charts["time"]]:
        go.Figure(data=chart["data"], layout=chart["layout"])
    compiled = [record | {"time/compile": 9.0} for record in run.records]
    (_, seconds, *_) = report_charts.overview_charts(
        runs.series([runs.RecordedRun(run.workdir, run.config, compiled)])
    )
    assert seconds["data"][1]["y"] == [4, 2, 2, 1, 1, 9]  # every step compiled: all are shown


def test_several_series_have_one_baseline_and_one_key(tmp_path):
    """Tree drafts take a third of the seconds of the plain run with the same seed."""
    import plotly.graph_objects as go

    folders = [write_run(tmp_path / f"{draft},seed={seed}", seed, draft)
               for draft in ("tree", "none") for seed in (0, 1)]  # fmt: skip
    for folder in folders[:2]:
        path = folder / "metrics.jsonl"
        fast = [{k: x / 3 if k[:5] == "time/" else x for k, x in json.loads(line).items()}
                for line in path.read_text().splitlines()]  # fmt: skip
        path.write_text("".join(json.dumps(x) + "\n" for x in fast))
    data = report_page._data([runs.read_run(folder) for folder in folders], "none")
    assert [one["name"] for one in data["series"]] == ["none", "tree"]
    figures = [{name: mean for name, mean, _ in one["figures"]} for one in data["series"]]
    assert [x["rollout speed-up over none"] for x in figures] == ["1.00×", "3.00×"]
    assert [x["whole-step speed-up over none"] for x in figures] == ["1.00×", "3.00×"]
    assert dict(data["fields"])["rollout.draft"] == ["none", "tree"]
    assert dict(data["fields"])["seed"] == ["0, 1", "0, 1"]
    for chart in data["overview"] + data["metrics"][0][1]:
        named = [trace["name"] for trace in chart["data"] if trace.get("showlegend", True)]
        assert not {"none", "tree"} & set(named)  # the page has one key for all charts
        go.Figure(data=chart["data"], layout=chart["layout"])
    dashes = {trace["name"]: trace["line"]["dash"] for trace in data["overview"][1]["data"]}
    assert dashes["time/rollout"] == dashes["tree, time/rollout"] == "dot"


def test_the_viewer_by_hand(tmp_path):
    run = runs.read_run(write_run(tmp_path / "a", lines=two_epochs()))
    (prompt,) = rollout_viewer.viewer(run, 1 << 20)["prompts"]
    row = prompt["columns"][1]["rows"][0]
    assert (row["t"], row["s"], row["a"]) == (["1", " ", "2", ""], "rrds", [4] * 4)
    # Rewards 0 and 1: mean 0.5, standard deviation √0.5.
    assert [r["advantage"] for r in prompt["columns"][1]["rows"]] == [-0.707, 0.707]


def episode():
    """Three turns: a tool replies to the first, a user says nothing to the second."""
    turns = [
        {"end": 2, "reward": 0.25, "role": "tool"},
        {"end": 5, "reward": 0.0, "role": "user"},
        {"end": 7, "reward": 0.5, "role": ""},
    ]
    tokens = ["[1+1]", "", "2", "\n", "[]", "4", ""]
    return response(2, 1, 0, tokens, "sseesss", reward=0.75, turns=turns)


def test_the_parts_of_an_episode_by_hand(tmp_path):
    run = runs.read_run(write_run(tmp_path / "a", lines=[episode(), *two_epochs()]))
    (prompt,) = rollout_viewer.viewer(run, 1 << 20)["prompts"]
    row, other = prompt["columns"][0]["rows"][:2]
    assert row["parts"] == [
        (0, "assistant", 0.25), (2, "tool", None), (4, "assistant", 0.0), (5, "user", None),
        (5, "assistant", 0.5),
    ]  # fmt: skip
    assert other["parts"] == []


def test_many_prompts_are_thinned_evenly(tmp_path):
    lines = [response(2, 1, 0, ["1", ""], "ss", prompt_id=f"{i:04x}") for i in range(100)]
    run = runs.read_run(write_run(tmp_path / "a", lines=lines))
    size = sum(path.stat().st_size for path in (tmp_path / "a" / "rollouts").iterdir())
    data = rollout_viewer.viewer(run, size // 4)
    assert (data["shown"], data["total"]) == (len(data["prompts"]), 100)
    assert 20 <= data["shown"] <= 25


# The file -----------------------------------------------------------------------------------


def test_hostile_text_stays_text_and_nothing_is_loaded(tmp_path):
    run = write_run(tmp_path / "<b>", lines=two_epochs(HOSTILE, prompt=HOSTILE))
    report_page.write_report([run], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    before, _, rest = text.partition('<script type="application/json" id="data">')
    data, _, after = rest.partition("</script>")
    assert json.loads(data)["viewer"][0]["prompts"][0]["prompt"] == HOSTILE
    assert "alert(1)" not in before + after
    assert "<title>&lt;b&gt;</title>" in before
    template = report_page.resources.files("specrl_jax.reports") / "report_page.html"
    assert not re.search(r"https?:|//cdn|@import|\bsrc=|<link", template.read_text())


def test_a_failure_is_one_warning(tmp_path):
    warnings = []
    page = report_page.ReportWriter(tmp_path / "none", True, warnings.append)
    page.refresh()
    page.refresh()
    page.close()
    assert len(warnings) == 1
    assert "training continues: " in warnings[0]
    assert "\n" not in warnings[0]
    report_page.ReportWriter(tmp_path, False, warnings.append).close()
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path):
    folders = [str(write_run(tmp_path / "runs" / f"s{seed}", seed)) for seed in (0, 1)]
    done = launch("launch/report.py", *folders)
    assert done.stdout.strip() == str(tmp_path / "runs" / "report.html"), done.stderr
    done = launch("launch/report.py", str(tmp_path))
    assert done.returncode == 2
    line = f"error: {tmp_path} must be a run's work directory, it has no metrics.jsonl\n"
    assert done.stderr == line


# In a browser -------------------------------------------------------------------------------


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
def test_the_page_by_mouse_and_keys(tmp_path):
    other = [line | {"prompt_id": "b2", "prompt": HOSTILE, "reward": 1.0} for line in two_epochs()]
    worst = {"prompt_id": "c3", "prompt": "9 9>", "reward": -1.0, "prefix_len": 0}  # reuses nothing
    worst = [line | worst for line in two_epochs()]
    run = write_run(tmp_path / "a", lines=two_epochs() + other + worst)
    report_page.write_report([run], tmp_path / "r.html")
    plain = write_run(tmp_path / "plain", draft="none", lines=worst)
    report_page.write_report([plain, run], tmp_path / "two.html")
    report_page.write_report([write_run(tmp_path / "b")], tmp_path / "empty.html")
    report_page.write_report(
        [write_run(tmp_path / "c", lines=[episode()])], tmp_path / "turns.html"
    )
    with Page(tmp_path / "profile") as page:
        for width, dark in ((1280, False), (400, True)):
            page.open(tmp_path / "r.html", width, dark)
            assert page.run("document.querySelectorAll('.js-plotly-plot').length") == 5
            page.run("""void (window.opened = new Promise(opened =>
                document.querySelector('.prefix').addEventListener('toggle', opened)))""")
            page.point(".prefix summary")
            page.run("window.opened.then(() => 0)")
            assert page.run("document.querySelectorAll('.js-plotly-plot').length") == 5 + 3
            assert page.run("document.documentElement.scrollWidth") <= width
            light = page.run("getComputedStyle(document.body).backgroundColor")
            page.point("#theme")
            assert page.run("getComputedStyle(document.body).backgroundColor") != light
            assert page.text("#prompts [aria-selected=true] span") == "2 1>"
            assert page.text(".config tr:nth-child(2) td") == "previous"
            page.press("j")
            assert "⟨202E⟩" in page.text("#group pre")
            page.press("k", "d")
            assert page.text("tbody tr:first-child td:nth-child(3) del") == "3"
            assert page.text("tbody tr:first-child td:nth-child(3) .new") == "2"
            page.point("tbody tr:first-child td:nth-child(3) .tokens span", click=False)
            # Step 5 gave it -2.5, step 2 -1: exp(-1.5).
            assert "ratio π/π_old 0.223" in page.text("#tip")
            assert "first sampled 4 steps ago" in page.text("#tip")
            page.run("document.querySelectorAll('.tokens')[1].focus()")
            page.press("Escape")
            assert page.text("#tip") == ""
            page.press("End", "ArrowLeft")
            assert "token 3 of 4" in page.text("#tip")
            page.press("/", "z", "z")
            assert page.text("#group") == "No prompt matches."
        page.open(tmp_path / "two.html")
        assert page.text(".figures tbody tr:nth-child(2) th") == "draft = previous"
        assert page.run("document.querySelectorAll('.swatches').length") == 1
        assert page.text("#prompts [aria-selected=true] span") == "2 1>"  # of the run that reuses
        page.open(tmp_path / "turns.html")
        assert "reward 0.75 · 3 turns" in page.text("tbody td small")
        said = page.text("tbody .tokens").split("assistant · reward ")
        assert [part[:4] for part in said] == ["", "0.25", "0.00", "0.50"]
        assert said[1].endswith("tool2↵\n")
        page.open(tmp_path / "empty.html")
        assert "--config.log.rollouts=1.0" in page.text("#shown")
        assert page.errors == []
        assert all(url.startswith(("file:", "data:")) for url in page.requests)


def cells(page) -> list[bool]:
    """For each visible response: whether it is one of the requested ones."""
    return page.run("[...document.querySelectorAll('#group tbody td')].map(x => x.className == '')")


def listed(page) -> list[str]:
    return page.run("[...document.querySelectorAll('#prompts li span')].map(x => x.textContent)")


def fill(page, name: str, value: str) -> None:
    page.run(f"document.querySelector('#{name}').value = {value!r}")
    page.run(f"document.querySelector('#{name}').dispatchEvent(new Event('input'))")


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
def test_filters_links_and_epochs(tmp_path):
    """Prompt a1 is an episode and four responses, b2 four, one of which failed and was cut."""
    others = [line | {"prompt_id": "b2", "prompt": "7 7>"} for line in two_epochs()]
    others[1] |= {"failed": True, "ended": False, "reward": 0.0}
    lines = [episode() | {"sample": 2}, *two_epochs(), *others]
    report_page.write_report([write_run(tmp_path / "a", lines=lines)], tmp_path / "r.html")
    with Page(tmp_path / "profile") as page:
        page.open(tmp_path / "r.html")
        assert sorted(listed(page)) == ["2 1>", "7 7>"]
        page.point("#failed")
        assert listed(page) == ["7 7>"]
        assert cells(page) == [False, False, True, False]
        assert "1 prompts, 1 matching responses" in page.text("#shown")
        page.point("#cut")
        assert listed(page) == ["7 7>"]
        page.point("#reset")
        fill(page, "fewest-turns", "2")
        assert listed(page) == ["2 1>"]
        assert sum(cells(page)) == 1
        fill(page, "fewest-turns", "4")
        assert page.text("#group") == "No prompt matches."
        page.point("#reset")
        fill(page, "least", "0.5")
        fill(page, "most", "0.9")
        assert listed(page) == ["2 1>"]  # the episode's 0.75
        page.point("#reset")
        # The address of a prompt and its step, in the same page and anew.
        page.press("j")
        there = page.run("location.href")
        assert "run=a" in there
        chosen = page.text("#prompts [aria-selected=true] span")
        page.press("k")
        assert page.text("#prompts [aria-selected=true] span") != chosen
        page.run(f"void (location.hash = new URL({there!r}).hash)")
        page.run("new Promise(done => setTimeout(done, 50))")
        assert page.text("#prompts [aria-selected=true] span") == chosen
        page.run("void (location.hash = '#prompt=gone')")
        assert page.errors == []
        page.open(tmp_path / "r.html", fragment="prompt=b2&step=5")
        assert page.text("#prompts [aria-selected=true] span") == "7 7>"
        assert page.run("document.querySelector('#group a').hash.includes('prompt=b2')")
        assert page.errors == []


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
def test_epochs_steps_of_charts_and_equal_prompts(tmp_path):
    lines = []
    for epoch in range(1, 13):
        for name in ("a1", "b2"):
            lines.append(response(3 * epoch, epoch, 0, ["1", ""], "ss", prompt_id=name))
            lines.append(response(3 * epoch, epoch, 1, ["2", ""], "ss", prompt_id=name))
    folder = write_run(tmp_path / "a", lines=lines)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(7, 37):
            record = {"step": step, "epoch": -(-step // 3), "reward/mean": 0.5}
            record |= {"time/step": 2.0, "rollout/tokens_generated": 10}
            file.write(json.dumps(record) + "\n")
    report_page.write_report([folder], tmp_path / "r.html")
    with Page(tmp_path / "profile") as page:
        for width in (1280, 400):
            page.open(tmp_path / "r.html", width)
            assert page.run("document.documentElement.scrollWidth") <= width
            assert listed(page) == ["2 1>", "2 1>"]
            assert page.text("#prompts li small").startswith("a1 · reward")
            page.run("document.querySelector('#epoch').value = 2")
            page.run("document.querySelector('#epoch').dispatchEvent(new Event('change'))")
            assert page.text("#group thead th:nth-child(2)").startswith("epoch 3step 9, reward")
            assert page.run("location.hash").endswith("step=9")
            # Steps 0 to 36 of the first chart: step 20 is nearest to 21, which is recorded.
            for plot, point in ((0, 20), (3, 20)):
                page.run("document.querySelector('#epoch').value = 0")
                page.run(f"""(() => {{
                    const plot = document.querySelectorAll('.js-plotly-plot')[{plot}];
                    const trace = plot.data[0], steps = trace.customdata ?? trace.x;
                    const i = steps.indexOf({point}), {{xaxis, yaxis}} = plot._fullLayout;
                    window.spot = [xaxis.l2p(trace.x[i]) + xaxis._offset,
                                   yaxis.l2p(trace.y[i]) + yaxis._offset]; }})()""")
                page.point(".js-plotly-plot", nth=plot, at=page.run("window.spot"))
                assert page.text("#group thead th:nth-child(2)").startswith("epoch 7step 21, ")
        assert page.errors == []


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
def test_cases_can_be_hidden(tmp_path):
    folders = [write_run(tmp_path / f"{draft},seed=0", draft=draft, lines=two_epochs())
               for draft in ("none", "tree")]  # fmt: skip
    report_page.write_report(folders, tmp_path / "r.html")
    seen = "[...document.querySelectorAll('.js-plotly-plot')[0].data].map(x => x.visible)"
    with Page(tmp_path / "profile") as page:
        page.open(tmp_path / "r.html")
        assert page.run(seen) == [True] * 6
        page.point(".swatches input")
        assert page.run(seen) == [False] * 2 + [True] * 4
        rows = (
            "[...document.querySelectorAll('tr[data-case]')].map(x => [x.dataset.case, x.hidden])"
        )
        assert page.run(rows) == [["none", True], ["tree", False]] * 2
        assert page.run("document.querySelector('#run').value") == "1"
        page.point(".swatches input")
        assert page.run(seen) == [True] * 6
        assert page.run(rows) == [["none", False], ["tree", False]] * 2
        assert page.errors == []


def test_the_reward_against_what_it_cost(tmp_path):
    """Totals that a run recorded count; of a run without them the sums do."""
    folder = write_run(tmp_path / "a")
    run = runs.read_run(folder)
    charts = {x["title"]: x for x in report_charts.overview_charts(runs.series([run]))}
    seconds = charts["Reward against seconds"]["data"]
    assert [trace["x"] for trace in seconds] == [[6, 10, 14, 17, 20, 31], [0, 31]]
    assert [trace["customdata"] for trace in seconds] == [[1, 2, 3, 4, 5, 6], [0, 6]]
    tokens = charts["Reward against generated tokens"]["data"]
    assert tokens[0]["x"] == [400, 800, 1200, 1300, 1400, 1500]
    assert {trace["meta"] for trace in seconds + tokens} == {runs.series([run])[0].name}
    later = [r | {"time/total": 100 + r["step"]} for r in run.records]  # of another run
    resumed = runs.RecordedRun(run.workdir, run.config, later)
    chart = report_charts.overview_charts(runs.series([resumed]))[3]
    assert chart["data"][0]["x"] == [101, 102, 103, 104, 105, 106]
    nothing = [{"step": 1, "epoch": 1, "reward/mean": 0.5}]
    bare = runs.RecordedRun(run.workdir, run.config, nothing)
    titles = [chart["title"] for chart in report_charts.overview_charts(runs.series([bare]))]
    assert titles == ["Reward"]
