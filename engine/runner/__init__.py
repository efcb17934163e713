"""One plan on the device: its tensors, the forward pass, the draws."""
