"""Structured output: which tokens may come next so that an answer keeps to a schema, a pattern or a list of choices.

Knows text and token ids; it has never heard of logits, blocks or the queue.
"""
