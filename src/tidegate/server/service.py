"""From a validated body to requests in the engine, and from their stream to an answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tidegate.api.errors import ApiError
from tidegate.api.identity import Claim
from tidegate.core.request import Request
from tidegate.core.slo import shortest
from tidegate.engine.loop import Engine
from tidegate.engine.output import Delta, OutputState
from tidegate.engine.sampling import SamplingParams
from tidegate.engine.stream import Stream
from tidegate.errors import RequestRefused, TidegateError
from tidegate.server.faults import as_api_error, as_event
from tidegate.server.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from tidegate.server.shapes import Shape, usage
from tidegate.server.text import ServedModel, Vocabulary

_MAX_SEQUENCES = 128

NO_LIMITS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Answering:
    """An answer in the making: its identity, its shape and the stream it is made from.

    `per_prompt` sequences belong to each prompt. `begin` raises nothing once the stream is open.
    """

    id: str
    model: str
    created: int
    claim: Claim
    shape: Shape
    stream: Stream
    per_prompt: int
    include_usage: bool

    async def whole(self) -> dict[str, Any]:
        """The complete answer. Whoever gives up waiting for it gives its requests up."""
        outputs = [Delta() for _ in self.stream.request_ids]
        try:
            async for index, delta in self.stream:
                outputs[index].absorb(delta)
        finally:
            self.stream.abort()
        return {
            **self._head(self.shape.whole_object),
            "choices": [self.shape.whole(index, delta) for index, delta in enumerate(outputs)],
            "usage": usage(outputs, self.per_prompt),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, an error in the middle included."""
        head = self._head(self.shape.chunk_object)
        if self.include_usage:
            head["usage"] = None
        lasts = [Delta() for _ in self.stream.request_ids]
        try:
            async for index, delta in self.stream:
                lasts[index] = delta
                if delta.text or delta.logprobs or delta.finish_reason is not None:
                    yield _event({**head, "choices": [self.shape.chunk(index, delta)]})
            if self.include_usage:
                yield _event({**head, "choices": [], "usage": usage(lasts, self.per_prompt)})
            yield b"data: [DONE]\n\n"
        except TidegateError as error:
            yield as_event(error)
        finally:
            self.stream.abort()

    def _head(self, kind: str) -> dict[str, Any]:
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        if self.claim.service_tier is not None:
            head["service_tier"] = self.claim.service_tier
        return head


class Service:
    """Opens requests in one engine with one model.

    `max_waiting` requests may wait at once, and `class_max_waiting` of a class (None, or absent: no end): what is
    more than that in one body can never be taken, so it is told that and not to come back later. `queue_ttl` is how
    long requests of a class may wait, in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        *,
        max_waiting: int | None = None,
        class_max_waiting: Mapping[str, int | None] = NO_LIMITS,
        queue_ttl: Mapping[str, float | None] = NO_LIMITS,
    ) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self._class_max_waiting = class_max_waiting
        self._queue_ttl = queue_ttl
        self.vocabulary = Vocabulary(model)
        self.model = model.model_name
        self._eos = tuple(model.eos_token_ids)

    async def complete(self, body: CompletionRequest, claim: Claim, arrival: float) -> tuple[str, Stream]:
        prompts = await self.vocabulary.of_prompt(body)
        return await self._open("cmpl", body, prompts, body.max_tokens, body.logprobs, claim, arrival)

    async def chat(self, body: ChatRequest, claim: Claim, arrival: float) -> tuple[str, Stream]:
        prompt = await self.vocabulary.of_messages(body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return await self._open("chatcmpl", body, [prompt], body.limit, logprobs, claim, arrival)

    def answering(self, id: str, stream: Stream, shape: Shape, body: Generation, claim: Claim) -> Answering:
        return Answering(
            id=id,
            model=self.model,
            created=int(time.time()),
            claim=claim,
            shape=shape,
            stream=stream,
            per_prompt=body.n,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )

    async def _open(
        self,
        kind: str,
        body: Generation,
        prompts: list[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        claim: Claim,
        arrival: float,
    ) -> tuple[str, Stream]:
        self._check_size(body, prompts, max_tokens, claim)
        schema = await self._schema(body)
        id = f"{kind}-{uuid.uuid4().hex}"
        requests = []
        for index in range(len(prompts) * body.n):
            prompt = prompts[index // body.n]
            params = self._params(body, index % body.n, logprobs, schema)
            requests.append(
                Request(
                    id if len(prompts) * body.n == 1 else f"{id}-{index}",
                    token_ids=prompt,
                    max_tokens=max_tokens,
                    arrival=arrival,
                    tenant=claim.tenant,
                    slo_class=claim.slo_class,
                    priority=claim.priority,
                    slo=claim.slo,
                    queue_ttl=shortest(body.queue_ttl, self._queue_ttl.get(claim.slo_class)),
                    cache_salt=body.cache_salt,
                    handle=OutputState(params, self.vocabulary.backend, self._eos, prompt),
                )
            )
        try:
            return id, await self.engine.submit(requests)
        except RequestRefused as refusal:
            fault = as_api_error(refusal)
            fault.headers["x-request-id"] = id
            raise fault from refusal

    def _check_size(self, body: Generation, prompts: list[list[int]], max_tokens: int | None, claim: Claim) -> None:
        sequences = len(prompts) * body.n
        if sequences > _MAX_SEQUENCES:
            raise ApiError(
                400, f"{len(prompts)} prompts times n={body.n} is more than {_MAX_SEQUENCES} sequences", param="n"
            )
        of_class = self._class_max_waiting.get(claim.slo_class)
        most, option = (self.max_waiting, "scheduler.max_waiting")
        if of_class is not None and (most is None or of_class < most):
            most, option = of_class, f"classes.{claim.slo_class}.max_waiting"
        if most is not None and sequences > most:
            what = f"{len(prompts)} prompts times n={body.n}" if len(prompts) > 1 else f"n={body.n}"
            raise ApiError(
                400,
                f"{what} is {sequences} sequences, and only {most} may wait at once; ask for fewer, or raise {option}",
                param="n" if body.n > 1 else "prompt",
            )
        if max_tokens is None:
            return
        if body.min_tokens > max_tokens:
            what = f"min_tokens {body.min_tokens} is more than max_tokens {max_tokens}"
            raise ApiError(400, what, param="min_tokens")
        for prompt in prompts:
            self._check_length(len(prompt), max_tokens)

    def _check_length(self, prompt: int, max_tokens: int) -> None:
        limit = self.vocabulary.max_model_len
        if prompt + max_tokens > limit:
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens and max_tokens is {max_tokens}: {prompt + max_tokens} together, and "
                f"the model holds {limit}; ask for at most {limit - prompt}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    async def _schema(self, body: Generation) -> dict[str, Any] | None:
        match body.response_format:
            case JsonObjectFormat():
                schema: dict[str, Any] = {"type": "object"}
            case JsonSchemaFormat(json_schema=named):
                schema = dict(named.schema_)
            case _:
                return None
        if body.ignore_eos:
            raise ApiError(400, "ignore_eos and response_format exclude each other: JSON ends", param="ignore_eos")
        await self.vocabulary.check_schema(schema)
        return schema

    def _params(
        self, body: Generation, copy: int, logprobs: int | None, schema: dict[str, Any] | None
    ) -> SamplingParams:
        """Sampling of the `copy`-th sequence of a prompt. With a seed, copies differ by theirs."""
        self.vocabulary.check_ids(body.stop_token_ids, "stop_token_ids")
        return SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(0, body.top_k),
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=None if body.seed is None else (body.seed + copy) % (1 << 63),
            logprobs=logprobs,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            min_tokens=body.min_tokens,
            logit_bias=self._bias(body),
            json_schema=schema,
        )

    def _bias(self, body: Generation) -> dict[int, float]:
        bias = {}
        for name, value in body.logit_bias.items():
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise ApiError(400, f"logit_bias: {name[:40]!r} is not a token id", param="logit_bias")
            bias[int(name)] = value
        self.vocabulary.check_ids(list(bias), "logit_bias")
        return bias


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
