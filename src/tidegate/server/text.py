"""Prompts to token ids: templates, tokenising, and what the model's vocabulary allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer

from tidegate.api.errors import ApiError
from tidegate.engine.detokenize import TokenTable
from tidegate.errors import InputError
from tidegate.server.schema import ChatRequest, CompletionRequest, Message

T = TypeVar("T")

# Tokenising this many characters takes about a millisecond; longer texts go to a thread.
_INLINE_CHARACTERS = 4096


class ChatTokenizer(Protocol):
    """What the server needs of a transformers tokenizer."""

    backend_tokenizer: Tokenizer
    chat_template: Any

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


class ServedModel(Protocol):
    """What the server needs of an executor beside its steps. Sizes are tokens.

    `check_schema` raises InputError for a JSON schema that cannot constrain an output.
    """

    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: Any

    @property
    def tokenizer(self) -> Any: ...
    def check_schema(self, schema: Mapping[str, object]) -> None: ...


class Vocabulary:
    """The tokenizer of one model, and what its vocabulary and length allow."""

    def __init__(self, model: ServedModel) -> None:
        self._tokenizer: ChatTokenizer = model.tokenizer
        self.backend = self._tokenizer.backend_tokenizer
        self.table = TokenTable(self.backend)
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self._check_schema = model.check_schema
        self._longest = max(map(len, self.backend.get_vocab()), default=1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidegate-tokenizer")

    async def of_prompt(self, body: CompletionRequest) -> list[list[int]]:
        """Token ids of every prompt. 400 for empty or over-long ones and for ids the model lacks."""
        prompts = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
        return [await self._of(prompt) for prompt in prompts]

    async def of_messages(self, body: ChatRequest) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's turn."""
        if not self._tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
        size = sum(len(message.text) for message in body.messages)
        self._check_characters(size, "messages")
        text = await self._aside(size, lambda: self._render(body.messages))
        return self._checked(await self._encode(text, special=False), "messages")

    async def check_schema(self, schema: Mapping[str, Any]) -> None:
        """400 for a JSON schema that cannot constrain an output."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._check_schema, schema)
        except InputError as error:
            raise ApiError(400, str(error), param="response_format") from None

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """400 for a token id outside the model's vocabulary."""
        for token in ids:
            if token >= self.vocab_size:
                raise ApiError(
                    400, f"token id {token} is not in the vocabulary of {self.vocab_size} tokens", param=param
                )

    async def _of(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            self._check_characters(len(prompt), "prompt")
            return self._checked(await self._encode(prompt, special=True), "prompt")
        self.check_ids(prompt, "prompt")
        return self._checked(prompt, "prompt")

    def _check_characters(self, characters: int, param: str) -> None:
        """Refuse what cannot fit whatever its tokens are, before it costs the time to find out."""
        least = characters // (4 * self._longest)
        if least >= self.max_model_len:
            raise _too_long(f"at least {least}", self.max_model_len, param)

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise ApiError(400, "the prompt is empty; the model needs at least one token", param=param)
        if len(ids) >= self.max_model_len:
            raise _too_long(str(len(ids)), self.max_model_len, param)
        return ids

    async def _encode(self, text: str, special: bool) -> list[int]:
        return await self._aside(len(text), lambda: self.backend.encode(text, add_special_tokens=special).ids)

    def _render(self, messages: Sequence[Message]) -> str:
        turns = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text}
            for message in messages
        ]
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # noqa: BLE001 - templates raise what they like about turns they do not want
            why = f"the model's chat template refuses these messages: {error}"
            raise ApiError(400, why, param="messages") from None

    async def _aside(self, characters: int, work: Callable[[], T]) -> T:
        """Do short work here and long work in a thread, so that no prompt holds up the other clients."""
        if characters < _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _too_long(tokens: str, limit: int, param: str) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {tokens} tokens; the model holds {limit} in all, prompt and output; shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )
