"""Keys and values in float16: exact for a float16 model, finer than bfloat16 but with a narrower range.

Knows nothing but its dtype; engine/kv/formats/_plain.py does the work.
"""

import torch

from engine.kv.formats._plain import PlainFormat

FORMAT = PlainFormat(torch.float16)
