"""When a sequence is finished and what to call it.

Looks at a sequence's tokens and its rules; it does not know blocks or the queue.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.rules import Decoder
from engine.sequence import Sequence
from engine.types import FinishReason

Ending = tuple[FinishReason, int | str | None]


class TextWatch:
    """The text of one answer as it grows, searched for stop texts across token borders.

    Only rows that ask for ``stop`` have one; the others are decoded when they are done.
    """

    def __init__(self, decoder: Decoder, *, stop: SequenceOf[str], include_stop: bool) -> None:
        self._decoder = decoder
        self._stop = stop
        self._include_stop = include_stop
        self._text: str | None = None

    def add(self, token_id: int, *, armed: bool) -> str | None:
        """Take one more token; the stop text that ends the answer now, of several the one that begins first.

        While not ``armed`` nothing stops, and what stands in the text then does not stop it later either.
        """
        old_length = len(self._decoder.text)
        new = self._decoder.add(token_id)
        if not armed or not new:
            return None
        text = self._decoder.text
        found = []
        for stop in self._stop:
            place = text.find(stop, max(0, old_length - len(stop) + 1))  # it may have begun in the old text, not ended
            if place >= 0:
                found.append((place, len(stop), stop))
        if not found:
            return None
        place, length, stop = min(found)
        self._text = text[: place + length if self._include_stop else place]
        return stop

    def finish(self) -> str:
        """The answer's text: up to the stop text where one was met, else all of it, what was held back included."""
        if self._text is None:
            self._decoder.finish()
            self._text = self._decoder.text
        return self._text


def ending(seq: Sequence) -> Ending | None:
    """The finish reason and stop reason of ``seq`` after its newest token, or None while it goes on.

    An end token, a stop token or a stop text gives ("stop", the id or the text); ``max_tokens`` gives ("length", None);
    the context's end before that gives ("length", "context"). Stops do not count before ``min_tokens`` tokens are there
    beside the one that would stop.
    """
    sampling, token_id = seq.request.sampling, seq.tokens[-1]
    if not seq.draws:
        return "length", None
    armed = seq.num_generated > sampling.min_tokens
    if token_id in seq.rules.end_reasons and armed:
        return "stop", seq.rules.end_reasons[token_id]
    if seq.watch is not None and (stop := seq.watch.add(token_id, armed=armed)) is not None:
        return "stop", stop
    if seq.num_generated >= sampling.max_tokens:
        return "length", None
    if len(seq.tokens) >= seq.max_len:
        return "length", "context"
    return None
