"""What goes back to whoever asked: a finished sequence as a completion with its text, a refusal as one that says why.

Knows sequences and the tokenizer; when a sequence is finished is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

from engine.rules import Vocabulary
from engine.scheduler.beams import Beams
from engine.scheduler.stopping import Ending, ending
from engine.sequence import Sequence
from engine.types import Completion, Request


def answer(seq: Sequence, reason: Ending, *, vocabulary: Vocabulary | None) -> Completion:
    """The completion of ``seq``, which ended for ``reason``; without a ``vocabulary`` it has no text."""
    return Completion(
        request_id=seq.request.id,
        sample_index=seq.sample_index,
        token_ids=tuple(seq.tokens[seq.num_prompt :]),
        text=None if vocabulary is None else _text(seq, reason, vocabulary=vocabulary),
        logprobs=tuple(seq.logprobs),
        top_logprobs=tuple(seq.top_logprobs),
        prompt_logprobs=tuple(score.logprob for score in seq.prompt_scores) if seq.scores_prompt else None,
        prompt_top_logprobs=tuple(score.top for score in seq.prompt_scores if score.top),
        finish_reason=reason[0],
        stop_reason=reason[1],
        num_prompt_tokens=seq.num_prompt,
        num_cached_tokens=seq.num_cached or 0,
    )


def beam_answers(beams: Beams, *, vocabulary: Vocabulary | None) -> list[Completion]:
    """The ``n`` best answers of a search that is done, the best first; an error where so many are not possible."""
    num_wanted = beams.request.sampling.n
    if len(beams.finished) < num_wanted:
        message = f"sampling.n: {num_wanted} answers asked for; the other settings leave {len(beams.finished)} that are possible"
        return [error(beams.request, "bad_params", message)]
    completions = []
    for rank, (score, seq) in enumerate(beams.finished[:num_wanted]):
        reason = ending(seq)
        assert reason is not None, "finished without a reason"
        completions.append(replace(answer(seq, reason, vocabulary=vocabulary), sample_index=rank, beam_score=score))
    return completions


def error(request: Request, code: str, message: str) -> Completion:
    return Completion(
        request_id=request.id,
        finish_reason="error",
        num_prompt_tokens=len(request.prompt_token_ids),
        error_code=code,
        error_message=message,
    )


def _text(seq: Sequence, reason: Ending, *, vocabulary: Vocabulary) -> str:
    """The answer as text, without the token that ended it; with ``include_stop_str_in_output`` a stop text stays."""
    sampling = seq.request.sampling
    finish_reason, stop_reason = reason
    if seq.watch is not None:
        text = seq.watch.finish()
        met_as_token = finish_reason == "stop" and seq.tokens[-1] in seq.rules.end_reasons
        return text + stop_reason if met_as_token and isinstance(stop_reason, str) and sampling.include_stop_str_in_output else text
    end = len(seq.tokens) - (finish_reason == "stop")
    return vocabulary.decode(seq.tokens[seq.num_prompt : end].tolist(), skip_special_tokens=sampling.skip_special_tokens)
