"""Every kernel compiles for the GPUs that it is meant for, within their shared memory; no GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")

# The least shared memory that a program may have, in bytes, on GPUs of compute capability 8.0 and more: that of 8.6 and 8.9.
SHARED_BYTES = 99 * 1024

SCRIPT = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.kernels.triton import attention, elementwise, sampling

capability, dtype = int(sys.argv[1]), sys.argv[2]
INTS, LONGS, FLOATS, DOUBLES, DATA = "*i32", "*i64", "*fp32", "*fp64", "*" + dtype

def build(kernel, types, constants, num_warps=4):
    kinds = {name: DATA if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    signature = kinds | types | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name.endswith(("_ptr", "_stride", "size"))}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    assert len(compiled.asm["cubin"]) > 0
    print(kernel.__name__, compiled.metadata.shared)

itemsize = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
for rows, head_dim in ((16, 64), (64, 128), (64, 256)):
    shape = attention.Shape.fitting(num_heads=14, num_kv_heads=2, head_dim=head_dim, block_size=16, rows=rows, itemsize=itemsize)
    kinds = dict.fromkeys(("tokens_ptr", "positions_ptr", "targets_ptr", "seq_ptr", "begin_ptr", "end_ptr", "tables_ptr"), INTS)
    kinds |= {"partial_ptr": FLOATS, "lse_ptr": FLOATS, "score_scale": "fp32", "cap": "fp32"}
    sizes = {"NUM_HEADS": 14, "GROUP": 7, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "QUERIES": shape.tile_queries}
    sizes |= {"M": shape.rows, "L": shape.kv_tile, "D": head_dim, "CAPPED": True, "WINDOWED": True, "WIDENED": False}
    build(attention._attend_item, kinds, sizes, shape.num_warps)
kinds = {"partial_ptr": FLOATS, "lse_ptr": FLOATS, "merged_ptr": INTS, "parts_ptr": INTS}
build(attention._merge, kinds, {"NUM_HEADS": 14, "HEAD_DIM": 80, "D": 128})
for added in (False, True):
    build(elementwise._norm, {"eps": "fp32"}, {"WIDTH": 4096, "ADDED": added})
build(elementwise._silu_and_mul, {}, {"PIECE": 4096})
kinds = {"slots_ptr": LONGS, "positions_ptr": LONGS, "cos_ptr": FLOATS, "sin_ptr": FLOATS, "eps": "fp32"}
for normed in (False, True):
    sizes = {"NUM_HEADS": 14, "NUM_KV_HEADS": 2, "BLOCK_SIZE": 16, "HEAD_DIM": 80, "HALF": 64, "N": 8, "NORMED": normed}
    build(elementwise._rotate_and_store, kinds, sizes)
kinds = {"logits_ptr": FLOATS, "token_ids_ptr": LONGS, "chance_ptr": DOUBLES, "temperature_ptr": FLOATS, "log_min_p_ptr": FLOATS}
build(sampling._draw, kinds | {"top_k_ptr": INTS, "top_p_ptr": DOUBLES}, {"W": 4096}, 8)
"""


COMMON = [(80, "bf16"), (90, "bf16")]
OTHERS = [(capability, dtype) for capability in (80, 89, 90, 100) for dtype in ("bf16", "fp16", "fp32")]


@pytest.mark.parametrize(
    ("capability", "dtype"), [*COMMON, *(pytest.param(*other, marks=pytest.mark.full) for other in OTHERS if other not in COMMON)]
)
def test_kernels_compile(capability, dtype, tmp_path):
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability), dtype], env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) == 10
    assert max(int(shared) for _, shared in kernels) <= SHARED_BYTES, kernels
