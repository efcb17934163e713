"""Beam search for one request: which candidates go on, which are finished answers, and when to stop.

Owns the ranking alone; the beams are ordinary sequences whose blocks, places and steps are the scheduler's business. The
search is that of transformers' ``generate`` with ``do_sample=False``, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from engine.sequence import Sequence
from engine.types import Draw, Request


class Candidate(NamedTuple):
    """A beam and a token that it may go on with; ``logprob`` is the sum over its answer, this token included."""

    logprob: float
    beam: Sequence
    draw: Draw

    @property
    def ends(self) -> bool:
        return self.draw.token_id in self.beam.rules.end_reasons or len(self.beam.tokens) + 1 >= self.beam.max_len


class Hypothesis(NamedTuple):
    """A finished answer, which holds no blocks. ``score`` is its summed log probability / length ** length_penalty."""

    score: float
    seq: Sequence


class Beams:
    """The search that begins with ``root``, a sequence of the prompt alone.

    Attributes:
        finished: the best answers so far, the best first, ``num_beams`` at most.
        is_done: nothing is left to search.
    """

    def __init__(self, root: Sequence) -> None:
        self.request: Request = root.request
        self.finished: list[Hypothesis] = []
        self.is_done = False
        self._max_length = root.max_len - root.num_prompt
        self._open: dict[Sequence, float] = {root: 0.0}  # the beams, best first, and their summed log probabilities
        self._candidates: dict[Sequence, SequenceOf[Draw]] = {}

    def offer(self, beam: Sequence, candidates: SequenceOf[Draw]) -> None:
        """Take the best next tokens of ``beam``, the best first; at least ``num_beams`` of them do not end it."""
        assert beam in self._open and beam not in self._candidates, "not a beam, or asked twice"
        self._candidates[beam] = candidates

    @property
    def ready(self) -> list[Sequence]:
        """The beams that have their candidates and wait for the others."""
        return list(self._candidates)

    @property
    def is_complete(self) -> bool:
        return len(self._candidates) == len(self._open)

    def pick(self) -> dict[Sequence, list[Sequence]]:
        """Choose among all beams' candidates; of equal ones the better beam's, then the lower token id.

        Returns each old beam with the beams that it goes on as: none, itself, or itself and forks that hold no blocks
        yet. Every one has its new token.
        """
        assert self.is_complete, "a beam's candidates are missing"
        num_beams = self.request.sampling.num_beams
        candidates = (
            Candidate(logprob + draw.adjusted_logprob, beam, draw)
            for beam, logprob in self._open.items()
            for draw in self._candidates[beam]
            if draw.adjusted_logprob > -math.inf
        )
        ranked = sorted(candidates, key=lambda candidate: -candidate.logprob)
        self._finish([candidate for candidate in ranked[:num_beams] if candidate.ends])
        going_on = [candidate for candidate in ranked if not candidate.ends][:num_beams]
        self.is_done = self._is_settled(going_on)
        return self._grow([] if self.is_done else going_on)

    def _finish(self, ended: list[Candidate]) -> None:
        sampling = self.request.sampling
        for logprob, beam, draw in ended:
            seq = beam.fork()
            seq.append(draw)
            self.finished.append(Hypothesis(self._score(logprob, length=seq.num_generated), seq))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[sampling.num_beams :]

    def _is_settled(self, going_on: list[Candidate]) -> bool:
        """Whether the best open beam has no hope to beat the worst answer; how long it may still grow is a guess."""
        sampling = self.request.sampling
        if not going_on:
            return True
        if len(self.finished) < sampling.num_beams:
            return False
        if sampling.early_stopping is True:
            return True
        best = going_on[0]
        grows = sampling.early_stopping == "never" and sampling.length_penalty > 0
        length = self._max_length if grows else best.beam.num_generated + 1
        return self._score(best.logprob, length=length) <= self.finished[-1].score

    def _score(self, logprob: float, *, length: int) -> float:
        return logprob / math.pow(length, self.request.sampling.length_penalty)

    def _grow(self, going_on: list[Candidate]) -> dict[Sequence, list[Sequence]]:
        branches: dict[Sequence, list[Sequence]] = {beam: [] for beam in self._open}
        grown: list[tuple[Sequence, Candidate]] = []
        for candidate in going_on:
            branch = branches[candidate.beam]
            branch.append(candidate.beam.fork() if branch else candidate.beam)
            grown.append((branch[-1], candidate))
        for beam, candidate in grown:  # only now, since a fork copies its parent's tokens
            beam.append(candidate.draw)
        self._open = {beam: candidate.logprob for beam, candidate in grown}
        self._candidates = {}
        return branches
