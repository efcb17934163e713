"""Draws one token for each row of logits, each row by its own request's settings.

Knows the order of the work: logits are adjusted by each row's rules; then greedy rows are an argmax, and the others are
drawn at their own uniform number. It keeps no state, so a draw depends on its own row alone.
Shape suffixes: M rows to draw for, R of them that are not greedy, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.adjust import adjust, is_adjusted
from engine.sampling.chance import Choose, choose
from engine.sampling.drawn import Drawn
from engine.sampling.logprobs import candidates, portions, rows_at_once, scored
from engine.sampling.rng import uniform
from engine.sequence import Sequence
from engine.transfer import Fetch, sent
from engine.types import NOTHING_LEFT, Draw

_MAX_REDRAWS = 16


class _Row(NamedTuple):
    """Who a row of logits is drawn for: sample ``sample_index`` of the sequence's request."""

    seq: Sequence
    sample_index: int


def wants_likeliest_only(seq: Sequence) -> bool:
    """Whether the draw for ``seq`` is the largest of its plain logits and that one's log probability, and nothing more."""
    sampling = seq.request.sampling
    asks_for_more = sampling.uses_beams or sampling.logprobs or sampling.logprob_token_ids
    return sampling.greedy and not asks_for_more and seq.num_draws == 1 and not is_adjusted(seq)


class Sampler:
    """Ids from ``num_valid_tokens`` on (padding rows of the embedding, which no tokenizer knows) are never drawn.

    ``seed`` keys the draws of requests without a seed of their own. ``choose`` is how a token is picked once its row's
    uniform number is known: torch's way, or a device's own.
    """

    def __init__(self, *, num_valid_tokens: int, seed: int, choose: Choose = choose) -> None:
        self.num_valid_tokens = num_valid_tokens
        self.seed = seed
        self.choose = choose

    def draw(self, logits_MV: Tensor, seqs: SequenceOf[Sequence]) -> list[Draw]:
        """Float32 logits [M, V], row m for the next token of ``seqs[m]`` -> ``seqs[m].num_draws`` draws for each row.

        The draws of one row are for the sequence's own sample and those that fork from it, by sample index. A
        draw's logprob is the log-softmax of the plain logits, over all V, at the drawn token. Of equal largest logits the
        lowest id wins. A row whose logits hold NaN or +inf gives token id NOT_A_NUMBER, one whose own rules rule out every
        token NOTHING_LEFT; both leave the others alone. The draws of a beam are its candidates, the best first.
        """
        return self.launch(logits_MV, seqs).read()

    def launch(self, logits_MV: Tensor, seqs: SequenceOf[Sequence]) -> Drawn:
        """``draw`` without waiting for the device, but for beams and grammars, which need to know what is drawn."""
        # A draw takes a row of logits to itself, so those of a step with many a row are made in portions.
        draws = portions([seq.num_draws for seq in seqs], at_once=rows_at_once(logits_MV))
        return Drawn.joined([self._draw_all(logits_MV[rows], seqs[rows]) for rows in draws])

    def _draw_all(self, logits_MV: Tensor, seqs: SequenceOf[Sequence]) -> Drawn:
        of_beams = [m for m, seq in enumerate(seqs) if seq.request.sampling.uses_beams]
        if not of_beams:
            return self._draw(logits_MV, seqs)
        of_samples = [m for m, seq in enumerate(seqs) if not seq.request.sampling.uses_beams]
        ranked = candidates(logits_MV[of_beams], [seqs[m] for m in of_beams], num_valid_tokens=self.num_valid_tokens)
        draws_of = dict(zip(of_beams, ranked, strict=True))
        token_ids_M = torch.zeros(len(seqs), dtype=torch.int64, device=logits_MV.device)
        if of_samples:
            samples = [seqs[m] for m in of_samples]
            drawn = self._draw(logits_MV[of_samples], samples)
            token_ids_M[of_samples] = drawn.token_ids_M
            draws = iter(drawn.read())
            draws_of |= {m: list(islice(draws, seq.num_draws)) for m, seq in zip(of_samples, samples, strict=True)}
        return Drawn(token_ids_M, lambda: [draw for m in range(len(seqs)) for draw in draws_of[m]])

    def _draw(self, logits_MV: Tensor, seqs: SequenceOf[Sequence]) -> Drawn:
        device = logits_MV.device
        rows = [_Row(seq, seq.sample_index + index) for seq in seqs for index in range(seq.num_draws)]
        firsts = [m for m, row in enumerate(rows) if row.sample_index == row.seq.sample_index]
        if len(rows) > len(seqs):
            logits_MV = logits_MV.repeat_interleave(torch.tensor([seq.num_draws for seq in seqs], device=device), dim=0)
        plain_MV = logits_MV[:, : self.num_valid_tokens]
        valid_MV = adjust(plain_MV, [row.seq for row in rows])
        nothing_left = None if valid_MV is plain_MV else Fetch(valid_MV.amax(-1).isneginf())
        token_ids_M = self._choose(valid_MV, rows)
        self._keep_to_grammars(token_ids_M, valid_MV, rows)
        params = [row.seq.request.sampling for row in rows]
        scores = scored(
            logits_MV,
            token_ids_M,
            num_top=[p.logprobs or 0 for p in params],
            extra_ids=[p.logprob_token_ids for p in params],
        )

        def read() -> list[Draw]:
            empty = [False] * len(rows) if nothing_left is None else nothing_left.tolist()
            draws = zip(empty, scores(), strict=True)
            return [Draw(NOTHING_LEFT, math.nan) if is_empty and draw.token_id >= 0 else draw for is_empty, draw in draws]

        first_ids_M = token_ids_M if len(firsts) == len(rows) else token_ids_M[sent(firsts, dtype=torch.int64, device=device)]
        return Drawn(first_ids_M, read)

    def _choose(self, logits_MV: Tensor, rows: list[_Row], *, attempt: int = 0) -> Tensor:
        by_chance = [m for m, row in enumerate(rows) if not row.seq.request.sampling.greedy]
        if len(by_chance) == len(rows):
            return self._draw_by_chance(logits_MV, rows, attempt=attempt)
        token_ids_M = logits_MV.argmax(-1)  # of equal ones the first
        if by_chance:
            index_R = sent(by_chance, dtype=torch.int64, device=logits_MV.device)
            token_ids_M[index_R] = self._draw_by_chance(logits_MV[index_R], [rows[m] for m in by_chance], attempt=attempt)
        return token_ids_M

    def _keep_to_grammars(self, token_ids_M: Tensor, logits_MV: Tensor, rows: list[_Row]) -> None:
        """Draw again in place, without that token, where the draw leaves no room to end in time.

        So a token is drawn by its share among all that fit, without a look at each. After a few tries the row is closed.
        """
        in_grammar = [(m, row.seq.grammar) for m, row in enumerate(rows) if row.seq.grammar is not None]
        for attempt in range(1, _MAX_REDRAWS + 1):
            in_grammar = [(m, grammar) for m, grammar in in_grammar if not grammar.fits(int(token_ids_M[m]))]
            if not in_grammar:
                return
            index_R = torch.tensor([m for m, _ in in_grammar], device=logits_MV.device)
            logits_MV[index_R, token_ids_M[index_R]] = -torch.inf
            token_ids_M[index_R] = self._choose(logits_MV[index_R], [rows[m] for m, _ in in_grammar], attempt=attempt)
        for m, grammar in in_grammar:
            if not grammar.fits(int(token_ids_M[m])):
                token_ids_M[m] = grammar.closing_token_id

    def _draw_by_chance(self, logits_RV: Tensor, rows: list[_Row], *, attempt: int) -> Tensor:
        chance_R = [
            uniform(seq.request, engine_seed=self.seed, sample_index=sample_index, position=seq.num_generated, attempt=attempt)
            for seq, sample_index in rows
        ]
        return self.choose(logits_RV, [row.seq for row in rows], chance_R)
