"""What a user runs: each module without a leading underscore is a job, found by its file name.

The only package that knows Hydra, the pipeline and the engine all three; nothing imports it.
"""
