"""Keys and values in bfloat16: exact for a bfloat16 model, half the bytes of float32.

Knows nothing but its dtype; engine/kv/formats/_plain.py does the work.
"""

import torch

from engine.kv.formats._plain import PlainFormat

FORMAT = PlainFormat(torch.bfloat16)
