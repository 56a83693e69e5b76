"""The notebooks run from top to bottom, and are committed as they ran.

Their outputs are written anew by `AGAIN`, in the clone's directory on a machine that does nothing
else: they show seconds.
"""

import re
import subprocess
import sys
import tomllib
import types

import nbclient
import nbformat
import pytest
from small_runs import ONE_DEVICE, ROOT

from specrl_jax.process import hardware

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
LARGEST = 400_000  # bytes
AGAIN = "jupyter execute --inplace notebooks/*.ipynb"
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook) -> list[str]:
    """What the cells printed, and their Markdown."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [x.get("text") or x.get("data", {}).get("text/markdown", "") for x in outputs]


def images(notebook) -> int:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture
def run(monkeypatch):
    """Runs a notebook in place, on its own kernel; returns it with its new outputs."""
    monkeypatch.delenv("MPLBACKEND")
    monkeypatch.setenv("PYTHONPATH", "")  # the notebook finds the checkout by itself
    for name, value in ONE_DEVICE.items():
        monkeypatch.setenv(name, value)

    def execute(name: str):
        notebook, folder = read(name), str(ROOT / "notebooks")
        resources = {"metadata": {"path": folder}}
        limits = {"timeout": 1800, "startup_timeout": 600, "iopub_timeout": 120}
        nbclient.NotebookClient(notebook, resources=resources, **limits).execute()
        assert images(notebook) == images(read(name))
        return notebook

    return execute


# As committed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_is_committed_with_all_outputs(name):
    notebook = read(name)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == [*range(1, len(counts) + 1)], f"execute it again: {AGAIN}"
    assert images(notebook) > 0, f"execute it again: {AGAIN}"
    assert NOTEBOOKS[name].stat().st_size < LARGEST
    for text in texts(notebook):
        assert not re.search(r"(?<![\w.])/(tmp|home|root|work|usr|var|content)/", text)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_has_the_badge_and_the_repository_of_the_package(name):
    notebook, repository = read(name), URL.removeprefix("https://github.com/")
    page = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb"
    badge = f"[![Open in Colab]({BADGE})]({page})"
    assert notebook.cells[0].source.startswith(badge)
    assert page in (ROOT / "README.md").read_text()
    assert f'os.environ.get("SPECRL_JAX_URL", "{URL}.git")' in code_cells(notebook)[0].source


def test_the_first_cell_is_the_same_in_all():
    assert len({code_cells(read(name))[0].source for name in NOTEBOOKS}) == 1


@pytest.mark.parametrize(
    ("colab", "accelerator", "package"),
    [(True, "", "."), (True, "cuda", ".[cuda]"), (True, "tpu", ".[tpu]"), (False, "cuda", "")],
)
def test_the_first_cell_installs_on_colab_only(colab, accelerator, package, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(hardware, "accelerator", lambda: accelerator)

    def record(command, **_):
        commands.append(command)
        (tmp_path / "specrl-jax" / "configs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "specrl-jax" / "configs" / "grpo.py").touch()

    monkeypatch.setattr(subprocess, "run", record)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("SPECRL_JAX_URL", "https://example.org/fork.git")
    monkeypatch.chdir(tmp_path if colab else ROOT / "notebooks")
    if colab:
        monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    first = code_cells(read("quickstart"))[0].source
    exec(first, {})
    exec(first, {})  # a second time, as after a restart: the clone is there
    clones = [command for command in commands if command[0] == "git"]
    installs = [command for command in commands if "pip" in command]
    assert (len(clones), len(installs)) == ((1, 2) if colab else (0, 0))
    assert all(command[-2:] == ["-e", package] for command in installs)
    assert all("https://example.org/fork.git" in command for command in clones)
    assert sys.path[0] == str(tmp_path / "specrl-jax" if colab else ROOT)


# As run -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_exactness_tells_exact_rules_from_others(run):
    """Distances from the policy: by formula, and of the package's samples."""
    (table,) = (text for text in texts(run("exactness")) if text.startswith("| rule"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) == 8
    for _, _, exact, kept, kept_sampled, distance, distance_sampled in rows:
        assert (exact == "yes") == (float(distance) == 0)
        assert float(distance_sampled) == pytest.approx(float(distance), abs=6e-3)
        assert float(kept_sampled) == pytest.approx(float(kept), abs=1e-2)


@pytest.mark.slow
def test_your_own_task_is_learned(run):
    (output,) = (text for text in texts(run("your_own_task")) if "held-out reward: first" in text)
    first, last = re.search(r"held-out reward: first ([\d.]+).* last ([\d.]+)", output).groups()
    assert float(first) < 0.1
    assert float(last) > 0.6


@pytest.mark.slow
def test_quickstart_reuses_tokens(run):
    output = "\n".join(texts(run("quickstart")))
    assert "128 held out" in output
    assert float(re.search(r"later epochs +([\d.]+)%", output)[1]) > 50


@pytest.mark.slow
def test_lenience_sweep_has_a_table_of_three_values(run):
    (table,) = (x for x in texts(run("lenience_sweep")) if x.startswith("| "))
    reused = next(line for line in table.splitlines() if "later epochs" in line)
    shares = [float(share) for share in re.findall(r"([\d.]+)% ±", reused)]
    assert len(shares) == 3
    assert shares[0] < shares[1] < shares[2]
