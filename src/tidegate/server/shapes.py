"""The two shapes of OpenAI's answers, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from typing_extensions import TypedDict

from tidegate.api.errors import unserved
from tidegate.core.request import FinishReason
from tidegate.engine.detokenize import TokenTable
from tidegate.engine.output import Delta
from tidegate.engine.sampling import TokenLogprobs

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.LENGTH_KV: "length"}


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class ChatMessage(TypedDict):
    role: str
    content: str


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class _Answer(TypedDict):
    id: str
    object: str
    created: int
    model: str
    usage: Usage


class CompletionAnswer(_Answer):
    choices: list[CompletionChoice]


class ChatAnswer(_Answer):
    choices: list[ChatChoice]


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    object: str
    data: list[Model]


class Shape(Protocol):
    """How one way of asking is answered.

    `chunk` is a choice of a streamed answer, `whole` one of a complete answer. A shape serves one
    answer: it remembers where each of its sequences is.
    """

    whole_object: str
    chunk_object: str

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]: ...
    def whole(self, index: int, delta: Delta) -> dict[str, Any]: ...


class CompletionShape:
    """`/v1/completions`: a choice is text."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, table: TokenTable, sequences: int, logprobs: int | None) -> None:
        self._table = table
        self._logprobs = logprobs
        self._offsets = [0] * sequences

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": None if self._logprobs is None else self._of(index, delta.logprobs),
            "finish_reason": finish_reason(delta.finish_reason),
        }

    whole = chunk

    def _of(self, index: int, entries: Sequence[tuple[int, TokenLogprobs]]) -> CompletionLogprobs:
        tokens = [self._table(token)[0] for token, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        tops = [{self._table(t)[0]: p for t, p in entry.top} for _, entry in entries] if self._logprobs else None
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for _, entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatShape:
    """`/v1/chat/completions`: a choice is the assistant's message. The first chunk of each names the role."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, table: TokenTable, sequences: int, logprobs: bool) -> None:
        self._table = table
        self._logprobs = logprobs
        self._silent = set(range(sequences))

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        message = {"content": delta.text} if delta.text or index in self._silent else {}
        if index in self._silent:
            self._silent.discard(index)
            message = {"role": "assistant", **message}
        return {"index": index, "delta": message, **self._rest(delta)}

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": delta.text}, **self._rest(delta)}

    def _rest(self, delta: Delta) -> dict[str, Any]:
        logprobs = {"content": [self._entry(t, p) for t, p in delta.logprobs]} if self._logprobs else None
        return {"logprobs": logprobs, "finish_reason": finish_reason(delta.finish_reason)}

    def _entry(self, token: int, entry: TokenLogprobs) -> TokenLogprob:
        return {**self._one(token, entry.logprob), "top_logprobs": [self._one(t, p) for t, p in entry.top]}

    def _one(self, token: int, logprob: float) -> TopLogprob:
        text, exact = self._table(token)
        return {"token": text, "logprob": logprob, "bytes": list(exact)}


def finish_reason(reason: FinishReason | None) -> str | None:
    """OpenAI's name of an end. An end that is no answer raises ApiError."""
    if reason is None:
        return None
    if reason not in _FINISH:
        raise unserved(reason)
    return _FINISH[reason]


def usage(lasts: Sequence[Delta], per_prompt: int) -> Usage:
    """The cost of all sequences, from their last deltas; each prompt counts once, whatever `n` (`per_prompt`)."""
    ends = [delta.usage for delta in lasts if delta.usage is not None]
    prompts = ends[::per_prompt]
    prompt_tokens = sum(end.prompt_tokens for end in prompts)
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
    }
