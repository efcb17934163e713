"""Which tokens run in the next step; plain ints, no tensors."""
