"""The calls to flash-attn, held against its published signatures by a stand-in that does what these promise, in float32."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from engine.attention.backends import flash
from engine.attention.select import select


class Recorder:
    """flash-attn's functions with the signatures of its versions 2.8 and 3, parameter for parameter.

    Each call is checked for what the documentation asks (dtypes, shapes, strides, block sizes), recorded, and answered from
    its arguments alone: block tables, lengths, and the mask that is aligned to the bottom right.
    """

    def __init__(self) -> None:
        self.calls = []

    def library(self, version):
        kvcache = self.kvcache_2 if version == 2 else self.kvcache_3
        return flash.Library(version=version, flash_attn_with_kvcache=kvcache, flash_attn_varlen_func=self.varlen_2)

    def varlen_2(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert k.shape[1] % 256 == 0
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
        self.calls.append("varlen")
        return self.answer(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, softmax_scale, causal, window_size, softcap)

    def kvcache_2(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        assert k_cache.shape[1] % 256 == 0 and k is None and v is None
        num_seqs, num_queries = q.shape[:2]
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries
        self.calls.append("kvcache")
        flat = self.answer(
            q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap
        )
        return flat.view(q.shape)

    def kvcache_3(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        assert k is None and v is None and max_seqlen_q == cu_seqlens_q.diff().max()
        self.calls.append("kvcache")
        return self.answer(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, causal, window_size, softcap)

    @staticmethod
    def answer(q, k_cache, v_cache, starts, lengths, tables, scale, causal, window_size, softcap):
        for ints in (starts, lengths, tables):
            assert ints.dtype == torch.int32 and ints.is_contiguous()
        for values in (q, k_cache, v_cache):
            assert values.dtype == q.dtype in (torch.bfloat16, torch.float16) and values.stride(-1) == 1
        assert starts[0] == 0 and starts[-1] == len(q) and len(starts) - 1 == len(lengths) == len(tables)
        assert tables.max() < len(k_cache) and q.shape[2] == k_cache.shape[3] and causal
        left, right = window_size
        assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
        out = torch.empty_like(q)
        group = q.shape[1] // k_cache.shape[2]
        for (start, end), length, table in zip(starts.unfold(0, 2, 1).tolist(), lengths.tolist(), tables, strict=True):
            k, v = (pool[table.long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for pool in (k_cache, v_cache))
            scores = torch.einsum("thd,phd->htp", q[start:end].float(), k) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
            behind = (torch.arange(end - start) + length - (end - start))[:, None] - torch.arange(length)
            seen = (behind >= 0) & ((behind <= left) if left >= 0 else True)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[start:end] = torch.einsum("htp,phd->thd", weights, v).to(q.dtype)
        return out


def steps(world):
    """Kinds of step by name, and the calls that version 2 needs for each."""
    decodes = [(c, len(c.q_PHD) - 1, len(c.q_PHD)) for c in (world.conversation(n) for n in (1, 17, 256, 257, 600))]
    chunks = [(c, start, end) for c, start, end in ((world.conversation(300), 100, 280), (world.conversation(40), 0, 40))]
    return {
        "decodes": (decodes, ["kvcache"]),
        "chunks": (chunks, ["varlen"]),
        "chunks between decodes": ([*decodes[:2], *chunks, *decodes[2:]], ["kvcache", "varlen"]),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (100, 30.0)])
@pytest.mark.parametrize(("version", "block_size"), [(2, 256), (2, 512), (3, 16), (3, 1)])
def test_calls_mean_the_step(paged_world, version, block_size, window, soft_cap, dtype):
    recorder = Recorder()
    world = paged_world(
        backend=lambda spec: flash.Backend(spec, library=recorder.library(version)),
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        block_size=block_size,
        num_blocks=10_000 // block_size,
        dtype=dtype,
        window=window,
        soft_cap=soft_cap,
    )
    assert flash.refuse_version(world.spec, version) is None
    for kind, (chunks, calls) in steps(world).items():
        recorder.calls.clear()
        results = world.attend(chunks)
        assert recorder.calls == (calls if version == 2 else ["kvcache"]), kind
        for result, chunk in zip(results, chunks, strict=True):
            torch.testing.assert_close(result.double(), world.expected(*chunk), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(("version", "block_size"), [(2, 256), (3, 16)])
def test_a_fixed_plan_serves_one_step_after_another(paged_world, version, block_size):
    """The same tensors, filled again: what the calls read lies where it lay."""
    recorder = Recorder()
    world = paged_world(
        backend=lambda spec: flash.Backend(spec, library=recorder.library(version)),
        block_size=block_size,
        num_blocks=10_000 // block_size,
        dtype=torch.bfloat16,
    )
    plan = world.backend.fixed_plan(num_seqs=5, num_blocks=1024 // block_size)
    for lengths in ((1, 17, 256, 257, 600), (300, 2, 2, 16, 1)):
        decodes = [(c, len(c.q_PHD) - 1, len(c.q_PHD)) for c in map(world.conversation, lengths)]
        world.backend.refill(plan, world.inputs(decodes))
        q_THD = torch.cat([c.q_PHD[-1:] for c, _, _ in decodes])
        for result, decode in zip(world.backend.attend(q_THD, world.store.layer(0), plan).split(1), decodes, strict=True):
            torch.testing.assert_close(result.double(), world.expected(*decode), rtol=2**-7, atol=2**-9)
    assert recorder.calls == ["kvcache"] * 2


@pytest.mark.parametrize(
    ("version", "change", "reason"),
    [
        (2, {"dtype": torch.float32}, r"bfloat16 or float16 and the model in float32; set model\.dtype"),
        (2, {"kv_format": "fp8"}, r"kv_cache\.format=bf16, not fp8"),
        (2, {"kv_format": "fp16"}, r"kv_cache\.format=bf16, not fp16"),
        (2, {"head_dim": 100}, "this model's is 100"),
        (3, {"head_dim": 320}, "this model's is 320"),
        (2, {"block_size": 16}, r"a multiple of 256 tokens, and kv_cache\.block_size is 16"),
        (3, {"batch_invariant": True}, r"engine\.attention=triton"),
    ],
)
def test_refuses_with_the_reason(paged_world, version, change, reason):
    spec = replace(paged_world(dtype=torch.bfloat16, block_size=256, num_blocks=4).spec, **change)
    assert re.search(reason, flash.refuse_version(spec, version))


def test_refuses_where_there_is_no_gpu(paged_world):
    with pytest.raises(ValueError, match=r"engine\.attention: 'flash' cannot serve this run: flash-attn runs on an NVIDIA GPU, not on cpu"):
        select("flash", spec=paged_world(dtype=torch.bfloat16).spec)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((7, 5), r"compute capability 8\.0 or more, and this one's is 7\.5"),
        ((8, 0), r"not installed; pip install --no-build-isolation 'pagemill\[flash\]'"),
    ],
)
def test_refuses_an_old_gpu_and_a_missing_package(paged_world, monkeypatch, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: None)
    spec = replace(paged_world(dtype=torch.bfloat16).spec, device=torch.device("cuda"))
    with pytest.raises(ValueError, match=rf"engine\.attention: 'flash' cannot serve this run: .*{reason}"):
        select("flash", spec=spec)


@pytest.mark.parametrize(
    ("capability", "packages", "version"),
    [
        ((7, 5), {"flash_attn"}, None),
        ((8, 0), set(), None),
        ((8, 0), {"flash_attn", "flash_attn_interface"}, 2),
        ((9, 0), {"flash_attn", "flash_attn_interface"}, 3),
        ((9, 0), {"flash_attn"}, 2),
        ((10, 0), {"flash_attn", "flash_attn_interface"}, 2),
    ],
)
def test_the_version_is_the_newest_that_runs_there(monkeypatch, capability, packages, version):
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: name if name in packages else None)
    assert flash.installed_version(capability) == version


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (100, 30.0)])
def test_the_installed_package_means_the_same(paged_world, window, soft_cap):
    if not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU here")
    sizes = {"num_heads": 6, "num_kv_heads": 2, "dtype": torch.bfloat16, "block_size": 256, "num_blocks": 40, "device": "cuda"}
    if (reason := flash.refuse(paged_world(**sizes).spec)) is not None:
        pytest.skip(reason)
    world = paged_world(backend="flash", window=window, soft_cap=soft_cap, **sizes)
    for kind, (chunks, _) in steps(world).items():
        for result, chunk in zip(world.attend(chunks), chunks, strict=True):
            bound = world.expected(*chunk, of_values=torch.abs) * 2**-7 + 1e-5
            assert ((result.double() - world.expected(*chunk)).abs() <= bound).all(), kind
