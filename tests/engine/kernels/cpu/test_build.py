"""Compiling, caching and loading, on a library of three lines; and that the process has one OpenMP runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.cpu import build

SOURCE = """
#include <omp.h>
extern "C" int answer() { return %d; }
extern "C" int count_threads() {
    int n = 0;
#pragma omp parallel num_threads(2) reduction(+ : n)
    n += 1;
    return n;
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "source"
    source.mkdir()
    (source / "answer.cpp").write_text(SOURCE % 42)
    try:
        build.open_library(source, tier="portable")
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    return source


def cached(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "kernels").iterdir())


def test_a_library_is_built_once_and_again_when_a_source_changes(folder):
    (first,) = cached(folder)
    before = first.stat().st_mtime_ns
    library = build.open_library(folder, tier="portable")
    assert (library.answer(), library.count_threads()) == (42, 2)
    assert cached(folder) == [first] and first.stat().st_mtime_ns == before
    (folder / "answer.cpp").write_text(SOURCE % 43)
    assert build.open_library(folder, tier="portable").answer() == 43
    assert len(cached(folder)) == 2


@pytest.mark.parametrize("damage", [lambda content: content[:1000], lambda content: b"", lambda content: content[:-40] + bytes(40)])
def test_a_damaged_file_is_built_again(folder, damage):
    (folder / "answer.cpp").write_text(SOURCE % 44)
    (whole,) = cached(folder)
    build.open_library(folder, tier="portable")
    (path,) = set(cached(folder)) - {whole}
    content = path.read_bytes()
    path.unlink()  # never write into a file that a process may have mapped
    path.write_bytes(damage(content))
    assert build.open_library(folder, tier="portable").answer() == 44
    assert len(path.read_bytes()) == len(content)


def test_two_processes_may_build_at_once(folder):
    (folder / "answer.cpp").write_text(SOURCE % 45)
    program = (
        "import sys; from pathlib import Path; from engine.kernels.cpu import build;"
        "print(build.open_library(Path(sys.argv[1]), tier='portable').answer())"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in started] == ["45", "45"]
    assert len(cached(folder)) == 2, "a temporary file is left"


def test_without_a_compiler_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(build.Unavailable, match=r"no C\+\+ compiler \(no-such-compiler\).*CXX"):
        build.open_library(folder, tier="portable")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.Unavailable, match=r"no C\+\+ compiler .*install g\+\+"):
        build.open_library(folder, tier="portable")


def test_what_the_compiler_refuses_is_told(folder):
    (folder / "answer.cpp").write_text("int answer() { return nothing_known; }")
    with pytest.raises(build.Unavailable, match=r"could not compile answer\.cpp: .*nothing_known"):
        build.open_library(folder, tier="portable")


def test_a_cache_that_cannot_be_written_is_told(folder, tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "a file"))
    with pytest.raises(build.Unavailable, match=r"cannot write the cache folder .*PAGEMILL_CACHE"):
        build.open_library(folder, tier="portable")


def test_a_cpu_without_the_instructions_is_told(folder, monkeypatch):
    monkeypatch.setattr(build, "cpu_flags", lambda: {"avx2", "avx512f"})
    with pytest.raises(build.Unavailable, match="this CPU lacks avx512_bf16, "):
        build.open_library(folder, tier="avx512")
    monkeypatch.delenv("PAGEMILL_KERNELS", raising=False)
    assert build.tier_here() == "portable"


def test_the_switch(monkeypatch):
    for asked in ("off", "fast"):
        monkeypatch.setenv("PAGEMILL_KERNELS", asked)
        with pytest.raises(build.Unavailable, match=f"PAGEMILL_KERNELS={asked}"):
            build.tier_here()
    monkeypatch.setenv("PAGEMILL_KERNELS", "portable")
    assert build.tier_here() == "portable"


def test_what_stops_the_kernels_is_logged_once(monkeypatch, caplog):
    monkeypatch.setenv("PAGEMILL_KERNELS", "off")
    build._attempt.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(build.Unavailable):
                build.load()
    finally:
        build._attempt.cache_clear()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["the CPU kernels are not used, torch does their work: PAGEMILL_KERNELS=off"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mapped files")
def test_the_process_has_one_openmp_runtime(library):
    mapped = {line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    runtimes = {Path(path).resolve() for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(runtimes) == 1, runtimes
