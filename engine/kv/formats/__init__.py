"""How keys and values are stored, one module each; the file name is the value of ``kv_cache.format``."""
