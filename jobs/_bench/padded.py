"""The comparison: transformers' ``generate`` over the same requests, in batches that are padded to their longest prompt and answer.

Measures what a run of the engine measures, as far as there is such a thing; knows nothing of the engine's blocks.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from engine import Request
from jobs._bench.config import BenchConfig
from pipeline.report import peak_rss_bytes, process_seconds

if TYPE_CHECKING:
    from torch import Tensor

_PAD = 0  # any id: the mask hides it


def measure(config: BenchConfig, requests: list[Request]) -> dict[str, Any]:
    """Load the model as transformers does and answer ``requests``, ``engine.max_num_seqs`` at a time, greedily.

    A batch takes as many steps as its longest answer; only the tokens that were asked for count. ``kv_bytes_peak`` is
    what transformers' cache held at the end of its largest batch.

    Raises:
        ValueError: a setting or a row asks for what this comparison does not do; the message names the key.
    """
    _refuse(config, requests)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from engine.device import Device
    from engine.weights import checkpoint_folder

    logging.disable_progress_bar()
    device = Device.find(config.engine.device, threads=config.engine.threads)
    torch.set_num_threads(device.num_threads)
    dtype = device.dtype(config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(config.model), dtype=dtype).to(device.torch_device).eval()
    load_s = process_seconds()

    seconds: list[float] = []
    kv_bytes = 0
    size = config.engine.max_num_seqs
    start = time.perf_counter()
    for batch in (requests[first : first + size] for first in range(0, len(requests), size)):
        num_steps = max(request.sampling.max_tokens or 1 for request in batch)
        ids, mask = pad([request.prompt_token_ids for request in batch])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=num_steps,
                min_new_tokens=num_steps,
                do_sample=False,
                pad_token_id=_PAD,
                return_dict_in_generate=True,
            )
        assert out.sequences.shape[1] == ids.shape[1] + num_steps
        seconds += [time.perf_counter() - start] * len(batch)
        cache = out.cache if hasattr(out, "cache") else out.past_key_values  # its name in the first versions of transformers 5
        kv_bytes = max(kv_bytes, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
    settings = {
        "model.dtype": str(dtype).removeprefix("torch."),
        "engine.device": device.kind,
        "engine.attention": model.config._attn_implementation,
        "engine.threads": device.num_threads,
        "engine.max_num_seqs": size,
    }
    device_bytes = device.held_bytes_peak()
    return {"settings": settings, **_figures(requests, seconds, kv_bytes=kv_bytes, load_s=load_s, device_bytes=device_bytes)}


def _figures(requests: list[Request], seconds: list[float], *, kv_bytes: int, load_s: float, device_bytes: int | None) -> dict[str, Any]:
    """What a run of the engine says of itself, None where there is no such thing; ``seconds`` from the start to each answer."""
    num_generated = sum(request.sampling.max_tokens or 1 for request in requests)
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    return {
        "prompt_tokens": num_prompt,
        "cached_prompt_tokens": 0,
        "computed_prompt_tokens": num_prompt,
        "generated_tokens": num_generated,
        "prefix_hit_rate": 0.0,
        "generated_tokens_per_s": num_generated / seconds[-1],
        "total_tokens_per_s": (num_prompt + num_generated) / seconds[-1],
        "prefill_tokens_per_s": None,
        "decode_tokens_per_s": None,
        "answer_s_median": statistics.median(seconds),
        "kv_bytes_peak": kv_bytes,
        "load_s": load_s,
        "first_row_s": load_s + seconds[0],
        "wall_s": load_s + seconds[-1],
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_device_bytes": device_bytes,
        "time_split": {},
        "roof": None,
    }


def _refuse(config: BenchConfig, requests: list[Request]) -> None:
    """So that both sides do the same work: one greedy answer a row, of a given length."""
    if config.model.weights != "native":
        raise ValueError(f"model.weights: {config.model.weights} is not what bench.answered_by=transformers computes in; leave it native")
    for request in requests:
        wanted = {"sampling.temperature=0": request.sampling.temperature == 0, "sampling.n=1": request.sampling.n == 1}
        wanted |= {"sampling.ignore_eos=true": request.sampling.ignore_eos, "prompt.response_format=null": request.grammar is None}
        for setting, is_met in wanted.items():
            if not is_met:
                key = setting.partition("=")[0]
                raise ValueError(f"{key}: bench.answered_by=transformers gives a row one greedy answer of max_tokens tokens; set {setting}")


def pad(prompts: list[Any]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, each int64 [rows, longest prompt], padded on the left."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[_PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask
