"""Output formats, one module each; the file name is the value of the config group ``output``."""
