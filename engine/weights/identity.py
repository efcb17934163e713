"""What a model is, by content: a folder that moved is the same model, and one whose files were replaced is another.

Reads files and no meaning; where they lie is the checkpoint's business.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from engine.config import ModelConfig
from engine.weights.cache import cache_root
from engine.weights.checkpoint import checkpoint_folder, tokenizer_folder

_MODEL_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_EDGE, _PAGE, _NUM_PAGES = 2**20, 2**12, 256


def model_identity(config: ModelConfig) -> dict[str, str]:
    """File name -> what it holds, for every file that answers depend on; the chat template is not among them.

    A .gguf file counts by its sha256 and a hub id by its commit. In a folder the small files count by their sha256, and
    weights by a sha256 over their size, their header, the first and last MiB of their tensors and some pages all over between:
    to read all of them at every start would take longer than to load them, and training changes whole tensors, if not all.

    Raises:
        ValueError: there is no such model; the message names the key.
    """
    folder = checkpoint_folder(config, weights=False)
    if folder.parent == cache_root() / "gguf":
        found = {"gguf": folder.name.partition("-")[0]}
    elif folder.parent.name == "snapshots":
        found = {"commit": folder.name}
    else:
        found = _whole(folder, _MODEL_FILES) | {path.name: _samples(path) for path in sorted(folder.glob("*.safetensors"))}
        if config.tokenizer is None:
            found |= _whole(folder, _TOKENIZER_FILES)
    return found if config.tokenizer is None else found | _whole(tokenizer_folder(config.tokenizer), _TOKENIZER_FILES)


def _whole(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names if (folder / name).is_file()}


def _samples(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(struct.pack("<Q", size))
    with path.open("rb") as stream:
        head = stream.read(8)
        digest.update(head)
        (num_header,) = struct.unpack("<Q", head.ljust(8, b"\0"))
        digest.update(stream.read(min(num_header, size) + _EDGE))
        start = stream.tell()
        for place in range(start, size, max(_PAGE, (size - start) // _NUM_PAGES)):
            stream.seek(place)
            digest.update(stream.read(_PAGE))
        stream.seek(max(size - _EDGE, start))
        digest.update(stream.read())
    return digest.hexdigest()
