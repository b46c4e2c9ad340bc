"""A scripted executor for requests whose handle is an OutputState, and a small real tokenizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

from jinja2 import Template
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tidegate.core.plan import Join, StepPlan, StepResult
from tidegate.engine.output import OutputState
from tidegate.engine.sampling import TokenLogprobs
from tidegate.errors import InputError
from tidegate.executors.scripted import Script, ScriptedExecutor

CORPUS = [
    "The tide comes in and the gate opens; the tide goes out and the gate closes.",
    "Requests wait, requests run, requests end. Grüße, naïve café, 漢字 and 😀 take more than one byte.",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Answer = Callable[[Sequence[int], int | None], list[int]]
SPECIAL = ["<|im_start|>", "<|im_end|>"]


class SmallTokenizer:
    """A byte-level BPE of a few hundred tokens with a chat template: every text has ids, many characters several.

    What the server needs of a transformers tokenizer, without the seconds it takes to import that.
    """

    chat_template = TEMPLATE

    def __init__(self) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        self.backend_tokenizer = tokenizer
        self.eos_token_id: int = tokenizer.token_to_id("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        return Template(TEMPLATE).render(messages=conversation, add_generation_prompt=add_generation_prompt)


@cache
def small_tokenizer() -> SmallTokenizer:
    return SmallTokenizer()


def says(text: str) -> Answer:
    """A script that answers `text` and stops, whatever is asked."""
    tokenizer = small_tokenizer()
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    return lambda prompt, seed: ids


def goes_on(prompt: Sequence[int], seed: int | None) -> list[int]:
    """A script without an end."""
    return small_tokenizer().encode(" the tide comes in and goes out") * 200


class ScriptedModel:
    """An executor whose `answer(prompt ids, seed)` says which tokens a request emits.

    Every plan is held to the contract by a `ScriptedExecutor`. Steps run in a thread of their own: each
    waits for `gate` and lasts `step_seconds`; `fail` raises in the next one.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        num_blocks: int = 256,
        max_num_seqs: int = 8,
        max_model_len: int = 512,
        step_seconds: float = 0.0,
        depth: int = 2,
    ) -> None:
        self.tokenizer = tokenizer = small_tokenizer()
        self.eos_token_ids = (tokenizer.eos_token_id,)
        self.vocab_size = tokenizer.backend_tokenizer.get_vocab_size()
        self.model_name = "scripted"
        self.num_blocks = num_blocks
        self.block_size = 16
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.fail: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.checker = ScriptedExecutor(
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len, depth=depth
        )
        self._answer = answer
        self._step_seconds = step_seconds
        self._params: dict[int, OutputState] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scripted-step")

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._step, plan)

    def check_schema(self, schema: Mapping[str, object]) -> None:
        fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        if fault:
            raise InputError(f"the JSON schema cannot be used: {fault}")

    def close(self) -> None:
        self.gate.set()
        self._thread.shutdown(wait=True)

    def _step(self, plan: StepPlan) -> StepResult:
        self.gate.wait()
        if self._step_seconds:
            threading.Event().wait(self._step_seconds)
        if self.fail is not None:
            raise self.fail
        for join in plan.joined:
            assert isinstance(join.handle, OutputState)
            self._params[join.slot] = join.handle
        result = self.checker.submit(replace(plan, joined=[self._scripted(j) for j in plan.joined])).result()
        for index, slot in enumerate(plan.emitting()):
            if (count := self._params[slot].params.logprobs) is not None:
                top = tuple((t, -0.5 - t) for t in range(count))
                result.details[index] = TokenLogprobs(-0.25, top)
        return result

    def _scripted(self, join: Join) -> Join:
        assert isinstance(join.handle, OutputState)
        prompt = join.tokens[: len(join.tokens) - join.outputs]
        tokens = self._answer(prompt, join.handle.params.seed)
        # Whoever ignores the end goes on from the beginning; a length ends everybody.
        rounds = self.max_model_len // len(tokens) + 2
        return join._replace(handle=Script(tokens * rounds))
