"""How fast one linear layer is: torch's product and the CPU's own packed ones, at a model's shapes and a step's numbers of rows.

    python tests/bench/gemm.py [--rows 1 16 64 256 512] [--shapes 576x960 1536x576] [--threads 2] [--copies 16] [--seconds 0.2]

The shapes (inputs x outputs) are the embedded model's: attention in and out, feed-forward in and out, head. Each product goes
round ``copies`` different weights, as a model's layers do, so that they come from memory and not from a cache. A figure is
GFLOP/s, 2 x rows x inputs x outputs by the mean time of the best round. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import engine  # noqa: F401  before torch, whose threads it tells how to wait

# isort: split
import torch
from torch import Tensor

from engine.device import usable_cpus
from engine.kernels.cpu import build
from engine.kernels.cpu.decoder import PackedLinear

SHAPES = ("576x960", "576x576", "576x3072", "1536x576", "576x49152")
Product = Callable[[Tensor], Tensor]


def kinds(num_threads: int) -> dict[str, Callable[[Tensor], Product]]:
    """Name -> what makes a product of a bf16 weight [outputs, inputs]; the own ones only where the kernels run."""

    def plain(dtype: torch.dtype) -> Callable[[Tensor], Product]:
        def make(weight: Tensor) -> Product:
            held = weight.to(dtype)
            return lambda x: torch.nn.functional.linear(x.to(dtype), held)

        return make

    found = {"torch fp32": plain(torch.float32), "torch bf16": plain(torch.bfloat16)}
    try:
        library = build.load()
    except build.Unavailable:
        return found
    return found | {
        "own bf16": lambda weight: PackedLinear(library, weight, num_threads=num_threads),
        "own int8": lambda weight: PackedLinear(library, weight, int8=True, num_threads=num_threads),
    }


def seconds_of(products: list[Product], x: Tensor, *, budget: float) -> float:
    """Seconds of one product: the best round over all of them, by their number."""
    rounds: list[float] = []
    begin = time.perf_counter()
    while len(rounds) < 2 or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        for product in products:
            product(x)
        rounds.append((time.perf_counter() - start) / len(products))
    return min(rounds)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 512])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="INxOUT")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--copies", type=int, default=16, help="different weights of each shape; the head has one")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    made = kinds(options.threads)
    print(f"{'GFLOP/s':>12} {'rows':>5} " + " ".join(f"{kind:>10}" for kind in made))
    for shape in options.shapes:
        num_in, num_out = map(int, shape.split("x"))
        num_copies = options.copies if num_in * num_out < 2**24 else 1
        weights = [torch.randn(num_out, num_in).bfloat16() for _ in range(num_copies)]
        products = {kind: [make(weight) for weight in weights] for kind, make in made.items()}
        for num_rows in options.rows:
            x = torch.randn(num_rows, num_in).bfloat16()
            work = 2 * num_rows * num_in * num_out
            rates = [work / seconds_of(of_kind, x, budget=options.seconds) / 1e9 for of_kind in products.values()]
            print(f"{shape:>12} {num_rows:>5} " + " ".join(f"{rate:>10.1f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
