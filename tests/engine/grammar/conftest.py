"""A small byte-level vocabulary, and an engine over it whose device draws from made-up logits with the real sampler."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.grammar.compiler import Grammars
from engine.kv.manager import BlockManager
from engine.loop import Engine
from engine.sampling.sampler import Sampler
from engine.scheduler.scheduler import Scheduler
from engine.tokenizer import Tokenizer

SPOKEN = [
    '{"name": "Ada", "age": 36, "tags": ["one", "two"], "ok": true, "none": null}',
    "the quick brown fox\n  jumps, over 12.50 or -3e8 dogs",
]


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A byte-level BPE over all 256 bytes, with a few words and pieces of JSON, two end tokens and one other control word."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>", "<|stop|>", "<|user|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(SPOKEN * 4, trainer)
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"}, eos_token_ids=[backend.token_to_id("<|stop|>")])


class MadeUpLogits:
    """A device whose logits depend on the tokens so far alone; ``taste`` [V] says what it likes everywhere."""

    def __init__(self, sampler: Sampler, taste: np.ndarray) -> None:
        self.sampler = sampler
        self.taste = taste

    def run(self, plan):
        seqs = [chunk.seq for chunk in plan.sampling]
        return self.sampler.draw(torch.stack([self.logits(seq) for seq in seqs]), seqs) if seqs else []

    def logits(self, seq) -> torch.Tensor:
        noise = np.random.default_rng(seq.tokens.tolist()).normal(scale=2.0, size=len(self.taste))
        return torch.from_numpy((noise + self.taste).astype(np.float32))


@pytest.fixture(scope="session")
def grammars(byte_tokenizer):
    return Grammars(byte_tokenizer, vocab_size=byte_tokenizer.vocab_size)


@pytest.fixture(scope="session")
def made_up_engine(byte_tokenizer, grammars):
    def build(*, num_blocks: int = 512, max_num_seqs: int = 64, max_model_len: int = 2048, taste: np.ndarray | float = 0.0) -> Engine:
        scheduler = Scheduler(
            kv=BlockManager(num_blocks=num_blocks, block_size=4, prefix_cache=True),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            max_model_len=max_model_len,
            eos_token_ids=byte_tokenizer.eos_token_ids,
            vocab_size=byte_tokenizer.vocab_size,
            vocabulary=byte_tokenizer,
            grammars=grammars,
        )
        sampler = Sampler(num_valid_tokens=byte_tokenizer.vocab_size, seed=0)
        return Engine(scheduler=scheduler, runner=MadeUpLogits(sampler, np.broadcast_to(taste, byte_tokenizer.vocab_size)))

    return build
