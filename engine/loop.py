"""The engine's loop: requests in, completions out, one step after the other.

It owns the order of things and the bounded window of waiting requests; what a step computes is the scheduler's decision
and how it is computed is the runner's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from engine.kv.persist import SavedBlocks
from engine.scheduler.scheduler import Scheduler
from engine.stats import Stats
from engine.types import Completion, Draw, Request, StepPlan

if TYPE_CHECKING:
    from engine.config import EngineConfig, KVCacheConfig, ModelConfig
    from engine.tokenizer import Tokenizer

# Requests that may wait at once: enough for prefix order to find twins, little enough for memory to stay flat.
_MAX_WAITING = 8192

_LOG = logging.getLogger(__name__)


class Runner(Protocol):
    """What the loop needs of a device."""

    def run(self, plan: StepPlan) -> list[Draw]:
        """Compute the plan's chunks; for each in plan order its scores, then its ``num_draws`` draws (negative ids: engine.types)."""
        ...

    def read_block(self, block: int) -> bytes:
        """All that a full block holds, as a plan's ``loads`` take it."""
        ...


class Engine:
    """Paged-KV, continuous-batching generation: ``submit`` and ``step``, or ``generate`` for both."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        saved: SavedBlocks | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """``saved``: where blocks go that several requests shared, when the engine is closed; then ``on_close`` is called."""
        self.saved = saved
        self._warned = False
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.on_close = on_close

    @classmethod
    def load(cls, path: str, *, dtype: str = "auto", kv_format: str = "auto", **settings: object) -> Engine:
        """Load the model at ``path`` (folder, hub id or .gguf); ``settings`` are EngineConfig's fields."""
        from engine.config import EngineConfig, KVCacheConfig, ModelConfig

        return cls.from_config(
            model=ModelConfig(path=path, dtype=dtype),
            engine=EngineConfig(**settings),  # type: ignore[arg-type]
            kv_cache=KVCacheConfig(format=kv_format),
        )

    @classmethod
    def from_config(
        cls, *, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig, tokenizer: Tokenizer | None = None
    ) -> Engine:
        """Build every part from its settings; a ``tokenizer`` that is loaded already is used as it is.

        Raises:
            ValueError: a setting cannot be served on this machine or by this model; the message names the key.
        """
        from engine.build import build

        return build(model=model, engine=engine, kv_cache=kv_cache, tokenizer=tokenizer)

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer: the one limit that admission uses."""
        return self.scheduler.max_len

    def submit(self, request: Request) -> Completion | None:
        """Queue ``request``. What can never be served (too long, empty) comes straight back as an error completion."""
        if self.saved is not None and request.sampling.prompt_logprobs is not None and not self._warned:
            self._warned = True
            _LOG.warning("kv_cache.persist: nothing is read or kept for prompts that are scored themselves, which are computed whole")
        return self.scheduler.add(request)

    def step(self) -> list[Completion]:
        """Compute one step over everything in flight; returns what finished with it."""
        with self.stats.time("schedule"):
            plan = self.scheduler.schedule()
        draws = self.runner.run(plan)
        with self.stats.time("schedule"):
            return self.scheduler.commit(plan, draws)

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Answer ``requests`` as they come; completions are yielded as they finish, in any order.

        Requests are pulled while the model runs, at most a bounded number ahead, so memory is flat for any input size.
        A None among them says "nothing before something has finished". Closing the iterator aborts what is in flight.
        """
        source = iter(requests)
        in_flight: set[str | int] = set()
        exhausted = False
        try:
            while not exhausted or self.scheduler.has_work:
                if not exhausted:
                    pulled, exhausted = self._pull(source)
                    for request in pulled:
                        if (refused := self.submit(request)) is not None:
                            yield refused
                        else:
                            in_flight.add(request.id)
                if self.scheduler.has_work:
                    for completion in self.step():
                        in_flight.discard(completion.request_id)
                        yield completion
        finally:
            self.scheduler.abort_all(in_flight)

    def _pull(self, source: Iterator[Request | None]) -> tuple[list[Request], bool]:
        """A step's worth of new requests, and whether the source has ended. Little by little: the first step is soon."""
        pulled: list[Request] = []
        room = _MAX_WAITING - len(self.scheduler.waiting)
        while len(pulled) < min(room, self.scheduler.max_num_seqs):
            try:
                request = next(source)
            except StopIteration:
                return pulled, True
            if request is None:
                break
            pulled.append(request)
        return pulled, False

    def close(self) -> None:
        """Let go of the model and the KV pool; the engine answers nothing any more. Shared blocks are saved before, if anywhere."""
        if self.saved is not None:
            self.saved.keep(self.scheduler.kv.shared_nodes(), read_block=self.runner.read_block)
        del self.runner
        self.on_close()
