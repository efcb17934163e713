"""Fills a decoder from a folder of safetensors, memory-mapped, with the decoder's fused projections put together.

Knows the checkpoint's file layout and tensor names; where the folder came from is the checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.layers.decoder import Decoder
from engine.layers.share import WHOLE, Share
from engine.weights.checkpoint import checkpoint_folder, folder_spec, read_json

# A decoder's projection -> the checkpoint's tensors that it stacks, row over row.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# What a rank has of a projection where several share the model: rows of those that lead to its heads and inner numbers,
# the matching columns of those that lead back. It has the whole of every other tensor.
_CUT_BY_ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_CUT_BY_COLUMN = ("o_proj", "down_proj")


def load_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, batch_invariant: bool = False, share: Share = WHOLE
) -> Decoder:
    """The decoder at ``model.path``, or one rank's ``share`` of it, with its weights in ``dtype`` on ``device``.

    No more of the files is read than that share. Weights that are in ``dtype`` already and not fused stay memory-mapped on the CPU.

    Raises:
        ValueError: no such model, no safetensors, missing tensors or wrong shapes; the message names ``model.path``.
    """
    folder = checkpoint_folder(config)
    decoder = Decoder(folder_spec(folder), batch_invariant=batch_invariant, share=share)
    checkpoint = _Safetensors(folder)
    wanted = {name: _sources(name) for name, _ in decoder.named_parameters()}
    checkpoint.require({source for sources in wanted.values() for source in sources}, tied=decoder.spec.tie_word_embeddings)
    for name, sources in wanted.items():
        parts = [checkpoint.get(source, share=share) for source in sources]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        _assign(decoder, name, tensor.to(device=device, dtype=dtype), folder=folder)
    return decoder.to(device).eval()


def _sources(name: str) -> tuple[str, ...]:
    """The checkpoint's names for a decoder's parameter."""
    path = name if name.startswith("lm_head.") else f"model.{name}"
    for fused, parts in _FUSED.items():
        if f".{fused}." in path:
            return tuple(path.replace(fused, part) for part in parts)
    return (path,)


def _assign(decoder: Decoder, name: str, tensor: Tensor, *, folder: Path) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = decoder.get_submodule(owner_name)
    expected = getattr(owner, leaf).shape
    if tensor.shape != expected:
        raise ValueError(
            f"model.path: {' + '.join(_sources(name))} in {folder} has shape {list(tensor.shape)}, "
            f"but config.json asks for {list(expected)}"
        )
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    if decoder.spec.tie_word_embeddings and name == "embed_tokens.weight":
        decoder.lm_head.weight = decoder.embed_tokens.weight


def _counted(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class _Safetensors:
    """The tensors of a folder by name, one file or several behind an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        for path in self._paths():
            if not path.is_file():
                raise ValueError(f"model.path: {folder} lacks {path.name}, which its index names; fetch the model again")
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ValueError(f"model.path: {path} is damaged ({error}); fetch the model again") from None
            self.files |= dict.fromkeys(file.keys(), file)

    def _paths(self) -> list[Path]:
        index, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if index.is_file():
            return [self.folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
        if single.is_file():
            return [single]
        pickles = sorted(path.name for path in [*self.folder.glob("*.bin"), *self.folder.glob("*.pt"), *self.folder.glob("*.pth")])
        hint = f"{pickles[0]} is a pickle, which may run code when read, so it is not; " if pickles else ""
        raise ValueError(f"model.path: {self.folder} has no model.safetensors; {hint}save the model with save_pretrained")

    def require(self, names: Collection[str], *, tied: bool) -> None:
        """Exactly ``names``: a tensor too many means another model than config.json's, which would answer nonsense."""
        missing = sorted(name for name in names if name not in self.files)
        if missing:
            raise ValueError(f"model.path: the weights in {self.folder} lack {_counted(missing)}")
        derived = ("rotary_emb.inv_freq", *(("lm_head.weight",) if tied else ()))  # older checkpoints carry them along
        unknown = sorted(name for name in self.files if name not in names and not name.endswith(derived))
        if unknown:
            raise ValueError(
                f"model.path: the weights in {self.folder} hold {_counted(unknown)}, which config.json does not account for; "
                "it may be another model's, or the weights are quantised in a way that is not served"
            )

    def get(self, name: str, *, share: Share = WHOLE) -> Tensor:
        """The tensor of this name, or what ``share`` has of it."""
        projection, leaf = name.split(".")[-2:]
        if share.num_ranks == 1 or projection not in (*_CUT_BY_ROW, *_CUT_BY_COLUMN):
            return self.files[name].get_tensor(name)
        if projection in _CUT_BY_ROW:
            return self._part(name, axis=0, share=share)
        if leaf == "weight":
            return self._part(name, axis=1, share=share)
        bias: Tensor = self.files[name].get_tensor(name)  # is added to a sum over the ranks, so one has it
        return bias if share.rank == 0 else torch.zeros_like(bias)

    def _part(self, name: str, *, axis: int, share: Share) -> Tensor:
        tensor = self.files[name].get_slice(name)
        size = tensor.get_shape()[axis]
        if size % share.num_ranks:
            raise ValueError(
                f"model.path: {name} in {self.folder} has shape {tensor.get_shape()}, which does not follow from config.json; "
                "it may be another model's"
            )
        part = slice(size // share.num_ranks * share.rank, size // share.num_ranks * (share.rank + 1))
        return tensor[part] if axis == 0 else tensor[:, part]
