"""A decoder's weights as step.h wants them, and its steps and logits as calls on tensors.

Knows the C structures and the packed layout's sizes; the sequences, blocks and draws of a step are others' business.
Shape suffixes: T tokens of the step, M rows whose hidden state is wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.cpu.attention import KVLayout, KVPool, PagedAttention
from engine.kv.format import Filling
from engine.layers.decoder import Decoder, DecoderLayer
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm

_PANEL = 64  # outputs of a panel, and what float32 vectors are padded to: gemm.h's kPanel
_INPUT_STEP = 32  # what inputs are padded to: gemm.h's kInputStep


class _Weights(ctypes.Structure):
    _fields_ = (("panels", c_void_p), ("scales", c_void_p), ("bias", c_void_p), ("num_in", c_int32), ("num_out", c_int32))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Weights) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("kv", KVLayout),
        ("rms_norm_eps", c_float),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cos_sin", c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("attention", c_void_p),
        ("pools", ctypes.POINTER(KVPool)),
        ("num_moves", c_int64),
        ("moves", c_void_p),
        ("num_full", c_int64),
        ("full", c_void_p),
        ("num_wanted", c_int64),
        ("wanted", c_void_p),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
    )


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the argument types of the functions used here."""
    library.pagemill_panel_bytes.argtypes = (c_int32, c_int32, c_int32)
    library.pagemill_panel_bytes.restype = c_int64
    library.pagemill_pack.argtypes = (c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p, c_void_p)
    library.pagemill_linear.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32)
    library.pagemill_greedy.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p, c_void_p)
    library.pagemill_workspace_create.argtypes = (c_void_p, c_int64, c_int32)
    library.pagemill_workspace_create.restype = c_void_p
    library.pagemill_workspace_destroy.argtypes = (c_void_p,)
    library.pagemill_step.argtypes = (c_void_p, c_void_p, c_void_p)


class PackedLinear:
    """A linear layer's weights in panels, as they are or, with ``int8``, rounded to 8 bits by output.

    With int8 its inputs are rounded too, in groups of 64, each time. ``num_gates`` > 0 says that the rows are so many gates
    and then as many ups.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        num_gates: int = 0,
        int8: bool = False,
        num_threads: int = 1,
    ) -> None:
        declare(library)
        assert weight.dtype == torch.bfloat16 and weight.stride(1) == 1
        self._library = library
        self.num_threads = num_threads
        self.num_out, self.num_in = weight.shape
        num_outputs = 2 * _padded(num_gates, _PANEL // 2) if num_gates else self.num_out
        self.panels = torch.empty(library.pagemill_panel_bytes(num_outputs, self.num_in, int8), dtype=torch.uint8)
        self.scales = torch.empty(_padded(num_outputs, _PANEL), dtype=torch.float32) if int8 else None
        self.bias = None if bias is None else _vector(bias)
        self.struct = _Weights(self.panels.data_ptr(), _address(self.scales), _address(self.bias), self.num_in, num_outputs)
        library.pagemill_pack(
            weight.data_ptr(), weight.stride(0), self.num_out, self.num_in, num_gates, self.panels.data_ptr(), _address(self.scales)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """bf16 [rows, num_in], or padded as ``padded_inputs`` does -> float32 [rows, num_out]."""
        x = padded_inputs(x)
        out = torch.empty(len(x), self.num_out, dtype=torch.float32)
        self._library.pagemill_linear(
            ctypes.byref(self.struct), x.data_ptr(), x.stride(0), len(x), out.data_ptr(), out.stride(0), self.num_threads
        )
        return out

    def greedy(self, x: Tensor, *, num_valid: int) -> tuple[Tensor, Tensor]:
        """Rows as for a call -> each row's lowest id below ``num_valid`` with the largest result, int32 [rows], and its
        log-softmax over all results, float32 [rows]: NaN where a result is no finite number."""
        x = padded_inputs(x)
        token_ids, logprobs = torch.empty(len(x), dtype=torch.int32), torch.empty(len(x), dtype=torch.float32)
        results = token_ids.data_ptr(), logprobs.data_ptr()
        self._library.pagemill_greedy(ctypes.byref(self.struct), x.data_ptr(), x.stride(0), len(x), num_valid, self.num_threads, *results)
        return token_ids, logprobs


def padded_inputs(x: Tensor) -> Tensor:
    """Rows with zeros up to a multiple of 32 numbers, as the products read them."""
    assert x.dtype == torch.bfloat16
    return F.pad(x, (0, -x.shape[1] % _INPUT_STEP)).contiguous()


class PackedDecoder:
    """The weights of a bf16 ``decoder``, packed one by one, and room for steps of up to ``max_tokens`` tokens.

    ``int8`` rounds all projections and their inputs to 8 bits, the head's included.

    The packed copies take the place of the decoder's own projections, which are let go as they are packed, so that both
    are never whole in memory at once; the embedding is shared.
    """

    def __init__(
        self, library: ctypes.CDLL, decoder: Decoder, *, layout: KVLayout, max_tokens: int, int8: bool = False, num_threads: int = 1
    ) -> None:
        declare(library)
        spec = decoder.spec
        self._library = library
        self._kept: list[object] = [decoder.embed_tokens.weight]  # what the structures point into
        self._row_size = _padded(spec.hidden_size, _INPUT_STEP)
        self._int8 = int8
        self.max_tokens = max_tokens
        self.num_threads = num_threads
        self.head = PackedLinear(library, decoder.lm_head.weight, int8=int8, num_threads=num_threads)
        _release(decoder.lm_head)
        self._layers = (_Layer * spec.num_layers)(*(self._pack(layer, num_gates=spec.intermediate_size) for layer in decoder.layers))
        half = spec.head_dim // 2
        cos_sin = torch.cat((decoder.rotary.cos[:, :half], decoder.rotary.sin[:, :half]), dim=1)
        self._kept.append(cos_sin)
        self._model = _Model(
            layers=self._layers,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            kv=layout,
            rms_norm_eps=spec.rms_norm_eps,
            embedding=decoder.embed_tokens.weight.data_ptr(),
            final_norm=self._norm(decoder.norm),
            cos_sin=cos_sin.data_ptr(),
        )
        workspace = library.pagemill_workspace_create(ctypes.byref(self._model), max_tokens, num_threads)
        weakref.finalize(self, library.pagemill_workspace_destroy, workspace)
        self._workspace: int = workspace

    def step(
        self,
        *,
        token_ids_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        wanted_M: Tensor,
        attention: PagedAttention,
        pools: Sequence[KVPool],
        filling: Filling | None = None,
    ) -> Tensor:
        """Int64 ids, positions, slots and wanted rows of T -> bf16 [M, E padded to 32], the final norm applied.

        ``pools`` has each layer's keys and values, which get the step's own; ``attention`` is planned for the step, and
        ``filling`` has the blocks that get full where these are quantised.
        """
        assert len(token_ids_T) <= self.max_tokens, "more tokens than the workspace has room for"
        assert attention.num_threads == self.num_threads, "an attention's lots are those of its threads"
        hidden_ME = torch.zeros(len(wanted_M), self._row_size, dtype=torch.bfloat16)
        step = _Step(
            num_tokens=len(token_ids_T),
            token_ids=token_ids_T.data_ptr(),
            positions=positions_T.data_ptr(),
            slots=slots_T.data_ptr(),
            attention=attention.handle,
            pools=(KVPool * len(pools))(*pools),
            num_moves=0 if filling is None else filling.moves_2M.shape[1],
            moves=None if filling is None else filling.moves_2M.data_ptr(),
            num_full=0 if filling is None else filling.full_2F.shape[1],
            full=None if filling is None else filling.full_2F.data_ptr(),
            num_wanted=len(wanted_M),
            wanted=wanted_M.data_ptr(),
            hidden=hidden_ME.data_ptr(),
            hidden_stride=hidden_ME.stride(0),
        )
        self._library.pagemill_step(ctypes.byref(self._model), self._workspace, ctypes.byref(step))
        return hidden_ME

    def _pack(self, layer: DecoderLayer, *, num_gates: int) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            qkv=self._linear(attention.qkv_proj),
            o=self._linear(attention.o_proj),
            gate_up=self._linear(mlp.gate_up_proj, num_gates=num_gates),
            down=self._linear(mlp.down_proj),
            input_norm=self._norm(layer.input_layernorm),
            post_attention_norm=self._norm(layer.post_attention_layernorm),
            q_norm=self._norm(attention.q_norm),
            k_norm=self._norm(attention.k_norm),
        )

    def _linear(self, linear: Linear, *, num_gates: int = 0) -> _Weights:
        packed = PackedLinear(self._library, linear.weight, bias=linear.bias, num_gates=num_gates, int8=self._int8)
        _release(linear)
        self._kept.append(packed)
        return packed.struct

    def _norm(self, norm: RMSNorm | None) -> int | None:
        if norm is None:
            return None
        vector = _vector(norm.weight)
        self._kept.append(vector)
        return int(vector.data_ptr())


def _address(x: Tensor | None) -> int | None:
    return None if x is None else int(x.data_ptr())


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _vector(x: Tensor) -> Tensor:
    """float32 with zeros up to a multiple of 64 numbers."""
    return F.pad(x.detach().float(), (0, -len(x) % _PANEL)).contiguous()


def _release(linear: Linear) -> None:
    """Let go of a layer's weight where it is its own; a tied one stays with the embedding."""
    linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
