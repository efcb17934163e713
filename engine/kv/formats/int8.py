"""Keys and values as 8-bit integers: half the bytes of bfloat16, and hardly a change in what the model says.

Keys have a scale for each channel of a block, since their outliers keep to a few channels; values one for each token.
"""

import torch

from engine.kv.formats._eight_bits import EightBits
from engine.kv.formats._quantised import QuantisedFormat

FORMAT = QuantisedFormat(
    keys=EightBits(torch.int8, largest=127.0, per="channel"),
    values=EightBits(torch.int8, largest=127.0, per="token"),
)
