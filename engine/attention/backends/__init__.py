"""Attention backends, one module each; the file name is the value of ``engine.attention``."""
