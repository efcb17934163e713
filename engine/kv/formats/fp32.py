"""Keys and values in float32: exact for a float32 model.

Knows nothing but its dtype; engine/kv/formats/_plain.py does the work.
"""

import torch

from engine.kv.formats._plain import PlainFormat

FORMAT = PlainFormat(torch.float32)
