"""Decides what each step computes: who runs, who waits, who gives way, who is finished.

Works on ints alone: there are no phases, a prefill, a prefix hit, a decode and a recompute are all "compute the pending
tokens"; how a plan becomes tensors is not its business.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence as SequenceOf
from itertools import islice
from typing import TYPE_CHECKING

from engine.kv.manager import BlockManager, Edge
from engine.rules import Vocabulary
from engine.scheduler.admission import Admission
from engine.scheduler.ahead import go_on
from engine.scheduler.answers import answer, beam_answers, error
from engine.scheduler.beams import Beams
from engine.scheduler.headroom import Headroom
from engine.scheduler.policy import PrefixFirst
from engine.scheduler.stopping import ending
from engine.sequence import Sequence
from engine.stats import Stats
from engine.types import NOTHING_LEFT, Chunk, Completion, Draw, Request, StepPlan

if TYPE_CHECKING:
    from engine.grammar.compiler import Grammars

# Waiting sequences that are looked at in one step; the rest are behind them in prefix order and would share their fate.
_SCAN_FACTOR = 2

# Log probabilities that requests in flight may hold at once, beside those of the drawn tokens: about 120 bytes each in
# Python, so half a GB. A request that asks for more than that runs when no other holds any.
MAX_LOGPROBS = 1 << 22


class Scheduler:
    """Continuous batching over ``kv``'s blocks.

    Args:
        max_num_seqs: most sequences in flight.
        max_num_batched_tokens: token budget of a step.
        max_model_len: most tokens of a prompt and its answer; also bounded by the pool.
        eos_token_ids: tokens that end an answer.
        vocab_size: token ids from here on are unknown to the model.
        vocabulary: reads stop texts and writes the answers' text; without one completions have none.
        grammars: compiles the forms that requests ask for; without them such requests are refused.
        admission: ``safe`` admits only who can run to the end, so that nobody is preempted; ``optimistic`` is about throughput.
    """

    def __init__(
        self,
        *,
        kv: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        vocab_size: int,
        vocabulary: Vocabulary | None = None,
        grammars: Grammars | None = None,
        stats: Stats | None = None,
        admission: str = "optimistic",
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "each running sequence needs a token a step"
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocabulary = vocabulary
        self.admission = Admission(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            vocabulary=vocabulary,
            grammars=grammars,
        )
        self.headroom = Headroom(kv, admission=admission, max_num_seqs=max_num_seqs)
        self.stats = stats or Stats()
        self.waiting = PrefixFirst(block_size=kv.block_size)
        kv.serve(self.waiting)
        self.running: list[Sequence] = []  # oldest admission first
        self._samples: dict[str | int, list[Completion]] = {}  # finished samples of each request in flight
        self._num_logprobs: dict[str | int, int] = {}  # of each request that has begun and asks for some
        # Steps since the last draw. The oldest sequence computes a token in each and never gives way, so it draws (or is
        # scored) within max_len steps: more of them are a fault of ours, and a watchdog in schedule says so.
        self._num_barren_steps = 0

    @property
    def max_len(self) -> int:
        """Most tokens of a prompt and its answer: the one limit that counts."""
        return self.admission.max_len

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, request: Request) -> Completion | None:
        """Queue ``request``; what can never be served comes straight back as an error completion.

        Raises:
            ValueError: a request with this id is in flight.
        """
        if request.id in self._samples:
            raise ValueError(f"request id {request.id!r} is in flight already; ids must differ")
        seq = self.admission.sequence(request)
        if isinstance(seq, Completion):
            return seq
        if seq.num_pending == 0:  # a prompt of one token that is only scored: there is nothing to compute
            return answer(seq, ("length", None), vocabulary=self.vocabulary)
        self._samples[request.id] = []
        self.waiting.add(seq)
        return None

    def schedule(self) -> StepPlan:
        """The next step's chunks, decodes first; every running sequence has its blocks when this returns."""
        num_preemptions = self.stats.num_preemptions
        chunks = self._continue_running()
        if self.stats.num_preemptions == num_preemptions:
            chunks += self._admit(self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks))
        if self.has_work and (not chunks or self._num_barren_steps > self.max_len):
            raise RuntimeError(f"no progress, so the engine would run for ever: {self._state()}")
        return self._plan(chunks)

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after ``plan``, whose draws are not known yet; None where it hangs on them, or where there would be nothing to do."""
        chunks = go_on(plan, self.running, kv=self.kv, budget=self.max_num_batched_tokens)
        if chunks is None:
            return None
        chunks += self._admit(self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks))
        return self._plan(chunks) if chunks else None

    def _plan(self, chunks: list[Chunk]) -> StepPlan:
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        plan = StepPlan(tuple(chunks), copies=self.kv.take_copies(), loads=self.kv.take_loads())
        self.stats.num_blocks_loaded += len(plan.loads)
        return plan

    def commit(self, plan: StepPlan, draws: SequenceOf[Draw]) -> list[Completion]:
        """Apply a step's draws: advance, publish full blocks, fork samples, stop what is done. Returns what finished.

        A request's completions come together, in sample order, when its last sample is done. What was computed for a sequence
        that is gone meanwhile is dropped.
        """
        results = iter(draws)
        advanced: list[Sequence] = []
        searches: dict[Beams, None] = {}
        broken: dict[str | int, Completion] = {}
        for chunk in plan.chunks:
            seq = chunk.seq
            scored = list(islice(results, len(chunk.scores))) if chunk.scores else []
            drawn = list(islice(results, seq.num_draws)) if chunk.samples else []
            if not seq.blocks:
                continue
            seq.num_unknown = 0
            seq.num_computed += chunk.num_tokens
            if (failed := _first_failed(scored) or _first_failed(drawn)) is not None:
                broken[seq.request.id] = _failure(seq, failed)  # what it computed is nothing to share
                continue
            self.kv.publish(seq)
            seq.prompt_scores += scored
            if drawn and seq.num_generated == 0:
                self.stats.record_first_token(seq.submitted_s)
            if drawn and seq.beams is not None:
                seq.beams.offer(seq, drawn)
                searches[seq.beams] = None
            elif drawn:
                advanced += self._append(seq, drawn)
            elif seq.num_pending == 0:
                advanced.append(seq)  # its prompt is scored and nothing is to be drawn
        assert next(results, None) is None, "more draws than the plan asked for"
        if self.kv.num_held == 0:
            return []
        self._num_barren_steps = 0 if advanced or searches or broken else self._num_barren_steps + 1
        self.stats.record_step(
            num_seqs=len(plan.chunks),
            num_tokens=plan.num_tokens,
            num_waiting=len(self.waiting),
            num_held=self.kv.num_held,
            num_idle=self.kv.num_idle,
            num_stored=self.kv.num_stored(self.running),
            block_size=self.kv.block_size,
        )
        for request_id in broken:
            self.abort(request_id)
        done = list(broken.values())
        for seq in advanced:
            done += self._finish(seq)
        for beams in searches:
            done += self._search_on(beams)
        return done

    def abort(self, request_id: str | int) -> bool:
        """Forget a request wherever it is; all its blocks come back. False where it is unknown or finished."""
        return self.abort_all([request_id]) == 1

    def abort_all(self, request_ids: Collection[str | int]) -> int:
        """``abort`` for many, in one pass over the queue; how many of them were in flight."""
        known = {request_id for request_id in request_ids if self._forget(request_id) is not None}
        for seq in [seq for seq in (*self.running, *self.waiting) if seq.request.id in known]:
            self._drop(seq)
        return len(known)

    @property
    def _num_free_places(self) -> int:
        """Sequences that may start to run; a search keeps the places that its beams will need."""
        return self.max_num_seqs - sum(seq.num_places for seq in self.running)

    def _continue_running(self) -> list[Chunk]:
        """A token for each running sequence, so that all go on; prefills share the rest of the budget, oldest first.

        Each takes the blocks it needs. Where there are none, others give way, never the oldest: so it comes to its end.
        """
        chunks: dict[Sequence, Chunk] = {}
        budget = self.max_num_batched_tokens - len(self.running)
        for seq in tuple(self.running):
            num_tokens = min(seq.num_pending, budget + 1)
            while seq.blocks and not self.kv.reserve(seq, num_tokens):
                loser = min(self.running[1:], key=self.kv.num_own_computed)
                self._preempt(loser)
                budget += chunks.pop(loser).num_tokens if loser in chunks else 1
            if seq.blocks:
                chunks[seq] = _chunk(seq, num_tokens)
                budget -= num_tokens - 1
        return list(chunks.values())

    def _preempt(self, seq: Sequence) -> None:
        self.stats.num_preemptions += 1
        seq.num_lost = seq.num_computed
        self.running.remove(seq)
        self.kv.release(seq)
        self.waiting.resume(seq)

    def _admit(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        num_places = self._num_free_places
        if budget == 0 or num_places <= 0 or not len(self.waiting):
            return chunks
        to_come = self.headroom.to_come(self.running)
        in_flight = {edge for seq in self.running if (edge := self.kv.next_edge(seq)) is not None}
        gate = b""  # tokens that are being computed right now: who begins with them waits
        for seq in self.waiting.candidates(limit=_SCAN_FACTOR * self.max_num_seqs):
            if budget == 0 or num_places < seq.num_places:
                break
            if not self._logprobs_fit(seq) or (gate and seq.begins_with(gate)):
                continue
            prefix = self.kv.match(seq)
            if self._twin_is_computing(self.kv.edge_after(seq, prefix), in_flight):
                gate = seq.tokens[: (len(prefix) + 1) * self.kv.block_size].tobytes()
                continue
            spare = to_come + self.headroom.of(seq) - self.kv.blocks_for(len(seq.tokens))
            if not self.kv.admit(seq, prefix, spare=spare):
                break
            to_come += self.headroom.of(seq)
            self.waiting.remove(seq)
            self.running.append(seq)
            num_places -= seq.num_places
            self._count_admission(seq)
            chunks.append(_chunk(seq, min(seq.num_pending, budget)))
            budget -= chunks[-1].num_tokens
            if (edge := self.kv.next_edge(seq)) is not None:
                in_flight.add(edge)
        return chunks

    def _logprobs_fit(self, seq: Sequence) -> bool:
        held = 0 if seq.num_logprobs == 0 or seq.request.id in self._num_logprobs else sum(self._num_logprobs.values())
        return held == 0 or held + seq.num_logprobs <= MAX_LOGPROBS

    @staticmethod
    def _twin_is_computing(edge: Edge | None, in_flight: Collection[Edge]) -> bool:
        """The twin gate: the next block of a waiting sequence is being computed right now, so waiting makes it free."""
        return edge is not None and edge in in_flight

    def _count_admission(self, seq: Sequence) -> None:
        if seq.num_cached is None:
            seq.num_cached = seq.num_computed
            if seq.num_logprobs:
                self._num_logprobs[seq.request.id] = seq.num_logprobs
            self.stats.num_prompt_tokens += seq.num_prompt
            self.stats.num_cached_tokens += seq.num_cached
        else:
            self.stats.num_recomputed_tokens += seq.num_lost - seq.num_computed

    def _append(self, seq: Sequence, drawn: list[Draw]) -> list[Sequence]:
        """Give ``seq`` its draw, and each further draw to a sample that forks off. Returns all of them."""
        self.stats.num_generated_tokens += len(drawn)
        if len(drawn) == 1:
            seq.append(drawn[0])
            return [seq]
        forks = range(1, len(drawn))
        samples = [seq, *(seq.fork(sample_index=index, watch=self.admission.watch(seq.request, seq.rules)) for index in forks)]
        for sample, draw in zip(samples, drawn, strict=True):
            sample.append(draw)
        self._branch(seq, samples)
        return samples

    def _branch(self, seq: Sequence, branch: list[Sequence]) -> None:
        """Let ``seq`` go on as ``branch``, itself and forks of it: these share its blocks, or wait for a place."""
        runs = seq in self.running
        for child in branch[1:] if runs else branch:
            if runs and self._num_free_places > 0 and self.headroom.has_room_for_fork(seq, self.running):
                self.kv.fork(seq, child)
                self.running.append(child)
            else:
                child.num_lost = len(child.tokens) - 1
                self.waiting.resume(child)

    def _search_on(self, beams: Beams) -> list[Completion]:
        """Let ``beams`` pick when the last one has its candidates; gives the answers when the search is over.

        Until then those that wait hold neither blocks nor places, or the others might never find any.
        """
        if beams.request.id not in self._samples:
            return []
        if not beams.is_complete:
            self._let_go(beams.ready)
            return []
        branches = beams.pick()
        self._let_go([beam for beam, branch in branches.items() if not branch])
        for beam, branch in branches.items():
            self._branch(beam, branch)
        if not beams.is_done:
            return []
        self._forget(beams.request.id)
        answers = beam_answers(beams, vocabulary=self.vocabulary)
        self.stats.num_generated_tokens += sum(len(completion.token_ids) for completion in answers)
        return answers

    def _let_go(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq in self.running:
                self._drop(seq)

    def _finish(self, seq: Sequence) -> list[Completion]:
        """The completions of ``seq``'s request if its newest token ended it and it was the last sample, else nothing."""
        reason = ending(seq)
        if reason is None or seq.request.id not in self._samples:
            return []
        self._drop(seq)
        self.headroom.learn(seq)
        samples = self._samples[seq.request.id]
        samples.append(answer(seq, reason, vocabulary=self.vocabulary))
        if len(samples) < seq.request.sampling.n:
            return []
        self._forget(seq.request.id)
        return sorted(samples, key=lambda completion: completion.sample_index)

    def _forget(self, request_id: str | int) -> list[Completion] | None:
        """The request is in flight no more; its finished samples, None where it was not."""
        self._num_logprobs.pop(request_id, None)
        return self._samples.pop(request_id, None)

    def _drop(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
            self.kv.release(seq)
        else:
            self.waiting.remove(seq)

    def _state(self) -> str:
        """For whoever reads it at night: who runs, who waits, and where the blocks are."""
        oldest = self.running[0] if self.running else next(iter(self.waiting))
        return (
            f"{len(self.running)} running, {len(self.waiting)} waiting, {self._num_barren_steps} steps without a draw; of "
            f"{self.kv.num_blocks} blocks {self.kv.num_held} are held and {self.kv.num_cached} cached; the first in line is request "
            f"{oldest.request.id!r}, {oldest.num_computed} of its {len(oldest.tokens)} tokens computed, {len(oldest.blocks)} blocks"
        )


def _first_failed(draws: list[Draw]) -> Draw | None:
    for draw in draws:
        if draw.token_id < 0:
            return draw
    return None


def _failure(seq: Sequence, draw: Draw) -> Completion:
    if draw.token_id == NOTHING_LEFT:
        rules = "allowed_token_ids, bad_words, min_tokens and logit_bias"
        return error(seq.request, "bad_params", f"sampling: {rules} together leave no token to draw at place {seq.num_generated}")
    return error(seq.request, "numerical_error", f"the model gave logits that are not numbers at token {len(seq.tokens)}")


def _chunk(seq: Sequence, num_tokens: int) -> Chunk:
    samples = seq.draws and num_tokens == seq.num_pending
    return Chunk(seq, seq.num_computed, num_tokens, samples=samples, scores=seq.scores_in(seq.num_computed, num_tokens))
