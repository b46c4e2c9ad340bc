"""From sampled token ids to what a client sees: text, stop tokens, stop strings, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.request import FinishReason
from tidegate.engine.detokenize import Detokenizer
from tidegate.engine.sampling import SamplingParams, TokenLogprobs
from tidegate.engine.stops import StopStrings


@dataclass(slots=True)
class Usage:
    """Tokens of one request: given, produced (a stop token included), and taken from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Delta:
    """What is new in one sequence.

    text:          complete characters, stop strings and their possible beginnings left out
    token_ids:     every sampled token, a stop token included
    logprobs:      (token id, log-probabilities) of every token but a stop token, where asked for
    finish_reason: set in a sequence's last delta, together with `usage`
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def absorb(self, later: Delta) -> None:
        """Append what came after."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.usage = later.usage


class OutputState:
    """The output of one sequence as it grows. It is the `Request.handle` that an executor finds in `Join`.

    An executor reads `params` and nothing else; it never changes anything here. `eos_token_ids` end the
    sequence unless `params.ignore_eos`; `prompt` (token ids) is the context of the first output's text.
    """

    __slots__ = ("_delta", "_detokenizer", "_outputs", "_stop_ids", "_stops", "ended", "params")

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer,
        eos_token_ids: Iterable[int] = (),
        prompt: list[int] | None = None,
    ) -> None:
        self.params = params
        self.ended = False
        self._stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self._stops = StopStrings(params.stop)
        self._detokenizer = Detokenizer(tokenizer, prompt or ())
        self._outputs = 0
        self._delta = Delta()

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Take the next sampled token. True if the sequence ends with it."""
        self._outputs += 1
        delta = self._delta
        delta.token_ids.append(token)
        free = self._outputs > self.params.min_tokens
        if free and token in self._stop_ids:
            self.ended = True
            return True
        if logprobs is not None:
            delta.logprobs.append((token, logprobs))
        text = self._detokenizer.feed(token)
        if text:
            delta.text += self._stops.feed(text) if free else text
            self.ended = self._stops.found
        return self.ended

    def close(self, reason: FinishReason, usage: Usage) -> None:
        """The sequence is over: show what was held back and say why and at what cost it ended."""
        self.ended = True
        delta = self._delta
        delta.text += self._stops.feed(self._detokenizer.flush())
        delta.text += self._stops.flush()
        delta.finish_reason = reason
        delta.usage = usage

    def take(self) -> Delta:
        """What is new since the last call."""
        delta, self._delta = self._delta, Delta()
        return delta


def output_of(handle: object) -> OutputState:
    """A request's handle as what it is in an engine. TypeError if somebody hung something else there."""
    if not isinstance(handle, OutputState):
        raise TypeError(f"the engine serves requests whose handle is an OutputState, not {type(handle).__name__}")
    return handle


class OutputProcessor:
    """Feeds each step's tokens to the sequences that hold its slots, and finds those that end.

    Plans come in the order in which they were executed.
    """

    def __init__(self, slots: int) -> None:
        self._states: list[OutputState | None] = [None] * slots

    def process(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result with every end that the text or a stop token shows, ready for `Scheduler.apply`.

        A token that was computed for a sequence after its end (the pipeline ran ahead) changes nothing.
        """
        for slot in plan.left:
            self._states[slot] = None
        for join in plan.joined:
            self._states[join.slot] = output_of(join.handle)
        ends = dict(result.finished)
        for index, slot in enumerate(plan.emitting()):
            state = self._states[slot]
            if state is None or state.ended:
                continue
            detail = result.details.get(index)
            if state.push(result.tokens[index], detail if isinstance(detail, TokenLogprobs) else None):
                ends.setdefault(index, FinishReason.STOP)
            elif index in ends:
                state.ended = True
        return replace(result, finished=tuple(ends.items()))
