"""The KV cache: which blocks there are and who holds them (host side), and what lies in them (device side)."""
