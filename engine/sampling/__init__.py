"""From logits to tokens: pure transforms in a fixed order, and draws that depend on their request alone."""
