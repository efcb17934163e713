"""Compiles the C++ files beside it into one shared library, keeps that in the user's cache folder, and loads it.

Knows compilers, caches and OpenMP runtimes, nothing of what the functions compute.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

import torch  # noqa: F401  it brings the OpenMP runtime that the library runs on

from engine.device import cpu_flags, usable_cpus
from engine.weights.cache import cache_root, replacing

Tier = Literal["avx512", "portable"]
TIERS: tuple[Tier, ...] = get_args(Tier)  # best first

# What the CPU must have for a tier, and how its code is compiled. gcc 12 knows no newer -march with these instructions.
_NEEDED_FLAGS: dict[Tier, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_bf16", "avx512_vnni"}),
    "portable": frozenset(),
}
_TIER_FLAGS: dict[Tier, tuple[str, ...]] = {
    "avx512": ("-march=icelake-server", "-mavx512bf16"),
    "portable": ("-march=native", "-mno-avx512f") if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",),
}
# Contraction is off so that a sum is rounded the same in every copy of a loop that the compiler makes: rows must not
# depend on the tile that they happened to be in.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-Wno-psabi", "-Wno-ignored-attributes")
_COMPILERS = ("c++", "g++", "clang++")
_DIGEST_BYTES = 32

log = logging.getLogger(__name__)


class Unavailable(Exception):
    """The kernels cannot run here; the text says why and what would help."""


def load(tier: Tier | None = None) -> ctypes.CDLL:
    """The kernels' library, of ``tier``; None takes what $PAGEMILL_KERNELS names, else the best tier that this CPU can run.

    Compiles at first use, which takes some seconds. Functions called through it release the GIL.

    Raises:
        Unavailable: switched off, no compiler, or a CPU without the instructions. The first time it is logged too.
    """
    found = _attempt(tier)
    if isinstance(found, Unavailable):
        raise found
    return found


@functools.cache
def _attempt(tier: Tier | None) -> ctypes.CDLL | Unavailable:
    """Memoised in both ways: neither the library nor the reason changes while the process lives."""
    try:
        preferred = tier_here()  # what is switched off is so for a tier that is named too
        return open_library(Path(__file__).parent, tier=tier or preferred)
    except Unavailable as reason:
        log.warning("the CPU kernels are not used, torch does their work: %s", reason)
        return reason


def open_library(folder: Path, *, tier: Tier) -> ctypes.CDLL:
    """The C++ files of ``folder`` as one library, from the cache or compiled now.

    Any number of processes may do so at once: each compiles for itself, and the same file takes its place whole.

    Raises:
        Unavailable: no compiler, it refuses the files, or this CPU lacks what the tier needs.
    """
    if missing := _NEEDED_FLAGS[tier] - cpu_flags():
        raise Unavailable(f"this CPU lacks {', '.join(sorted(missing))}, which tier {tier} needs")
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))
    command = [*_compiler(), *_FLAGS, *_TIER_FLAGS[tier]]
    path = cache_root() / "kernels" / f"{tier}-{_key(command, sources)}.so"
    shares_openmp = _share_openmp()
    if not _is_whole(path):
        _build(command, [source for source in sources if source.suffix == ".cpp"], path, link_openmp=not shares_openmp)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the library that {command[0]} built cannot be loaded ({error})") from None


def tier_here() -> Tier:
    """The tier that $PAGEMILL_KERNELS names, else the best one for this CPU. Raises Unavailable where it says off."""
    asked = os.environ.get("PAGEMILL_KERNELS", "auto")
    if asked == "off":
        raise Unavailable("PAGEMILL_KERNELS=off")
    if asked != "auto" and asked not in TIERS:
        raise Unavailable(f"PAGEMILL_KERNELS={asked} is not one of auto, off, {', '.join(TIERS)}")
    return next(tier for tier in TIERS if asked == tier or (asked == "auto" and _NEEDED_FLAGS[tier] <= cpu_flags()))


def _compiler() -> list[str]:
    """The compiler and its own arguments: $CXX, else the first that is there."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise Unavailable(f"CXX={os.environ['CXX']} cannot be read ({error})") from None
    for words in [named] if named else [[name] for name in _COMPILERS]:
        if (path := shutil.which(words[0])) is not None:
            return [path, *words[1:]]
    raise Unavailable(f"there is no C++ compiler ({named[0] if named else ', '.join(_COMPILERS)}); install g++ or set CXX")


def _key(command: list[str], sources: list[Path]) -> str:
    """Names a library by all that goes into it. A compiler is told by its version text, a CPU by its flags."""
    try:
        version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"the compiler {command[0]} does not run ({error})") from None
    digest = hashlib.sha256(version)
    digest.update("\n".join([*command, *sorted(cpu_flags())]).encode())
    for source in sources:
        digest.update(f"\n{source.name}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _build(command: list[str], sources: list[Path], path: Path, *, link_openmp: bool) -> None:
    """Compile the files at once, link them, and put the library in its place in one move."""
    log.warning("building the CPU kernels, once for this machine; about 20 s")
    with tempfile.TemporaryDirectory(prefix="pagemill-") as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(usable_cpus()) as pool:
            compiled = pool.map(lambda pair: _run([*command, "-c", str(pair[0]), "-o", str(pair[1])]), zip(sources, objects, strict=True))
            for source, result in zip(sources, compiled, strict=True):
                if result.returncode != 0:
                    raise Unavailable(f"{command[0]} could not compile {source.name}: {_first_error(result.stderr)}")
        target = Path(folder) / "kernels.so"
        # Without -fopenmp the library names no runtime of its own, and takes the one that the process has.
        flags = [word for word in command if link_openmp or word != "-fopenmp"]
        link = [*flags, "-shared", "-Wl,-Bsymbolic", *map(str, objects), "-o", str(target)]
        linked = _run(link)
        if linked.returncode != 0 or not target.exists():
            raise Unavailable(f"{command[0]} could not link the kernels: {_first_error(linked.stderr)}")
        library = target.read_bytes()
    try:
        with replacing(path) as out:  # the digest behind the library's end, where the loader does not look
            out.write(library + hashlib.sha256(library).digest())
    except ValueError as error:
        raise Unavailable(str(error)) from None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _is_whole(path: Path) -> bool:
    """Whether the file is there as it was written; loading one that was cut could end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _share_openmp() -> bool:
    """Let the library find the OpenMP runtime that torch brought. A second one in a process would fight for its cores.

    False where there is none to share.
    """
    for path in _mapped_files():
        name = Path(path).name
        if name.startswith(("libgomp", "libiomp", "libomp")):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def _mapped_files() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return [words[5] for line in lines if len(words := line.split(maxsplit=5)) == 6 and words[5].startswith("/")]


def _first_error(message: str) -> str:
    lines = [line for line in message.splitlines() if "error" in line] or message.splitlines() or ["no message"]
    return lines[0]
