"""Keys and values as 8-bit floats (e4m3, Micikevicius et al. 2022): half the bytes of bfloat16.

Such a float carries its own exponent; one scale for each head of a block keeps outliers within its range.
"""

import torch

from engine.kv.formats._eight_bits import EightBits
from engine.kv.formats._quantised import QuantisedFormat

FORMAT = QuantisedFormat(
    keys=EightBits(torch.float8_e4m3fn, largest=448.0, per="block"),
    values=EightBits(torch.float8_e4m3fn, largest=448.0, per="block"),
)
