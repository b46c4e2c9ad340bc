"""Logits to token ids for a whole batch, each row by its own request's parameters.

Rows are grouped once per batch composition; a batch in which everybody is greedy is one argmax. The order
of what is applied to a row: logit bias, `min_tokens`, penalties, grammar, temperature, `min_p`, `top_k`,
`top_p`. Log-probabilities are those of the model, before all that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tidegate.core.plan import Join
from tidegate.core.request import FinishReason
from tidegate.engine.sampling import SamplingParams, TokenLogprobs
from tidegate.executors.torch.draw import LARGEST, Draw, draw, is_random, uniforms
from tidegate.executors.torch.grammar import Grammar, GrammarCompiler
from tidegate.executors.torch.penalties import Penalties

DRAWN_SEED_LIMIT = 1 << 63


@dataclass(slots=True)
class Sampled:
    """`[E]` token ids on the device, and what `StepResult` wants beside them."""

    tokens: torch.Tensor
    finished: list[tuple[int, FinishReason]] = field(default_factory=list)
    details: dict[int, object] = field(default_factory=dict)


@dataclass(slots=True)
class Groups:
    """Which rows of a batch need what; rows are indices into the emitting rows."""

    slots: np.ndarray
    random: torch.Tensor
    draw: Draw
    seeds: np.ndarray
    penalised: torch.Tensor
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    min_tokens: list[int]
    grammars: list[tuple[int, Grammar]]
    logprobs: list[tuple[int, int]]


class Sampler:
    """Sampling state by slot. Requests come with `join`, and go with `leave`."""

    def __init__(
        self, compiler: GrammarCompiler, vocab_size: int, eos: frozenset[int], max_num_seqs: int, device: torch.device
    ) -> None:
        self._compiler = compiler
        self._eos = eos
        self._device = device
        self._penalties = Penalties(vocab_size, device)
        self._params: list[SamplingParams] = [SamplingParams(temperature=0.0)] * max_num_seqs
        self._grammars: list[Grammar | None] = [None] * max_num_seqs
        self._plain = np.ones(max_num_seqs, bool)
        self._index = np.zeros(max_num_seqs, np.int64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._fresh_seeds = np.random.default_rng()
        self._groups: Groups | None = None

    def join(self, join: Join) -> None:
        """Take over a slot for a request; a resumed one goes on where its emitted outputs end."""
        slot, params = join.slot, _params(join.handle)
        self.leave(slot)
        self._params[slot] = params
        self._plain[slot] = is_plain(params)
        self._index[slot] = join.outputs
        seed = params.seed if params.seed is not None else int(self._fresh_seeds.integers(DRAWN_SEED_LIMIT))
        self._seed[slot] = np.uint64(seed % (1 << 64))
        split = len(join.tokens) - join.outputs
        if is_penalised(params):
            self._penalties.join(slot, params, join.tokens[:split], join.tokens[split:])
        if params.json_schema is not None:
            self._grammars[slot] = self._compiler.grammar(params.json_schema, join.tokens[split:])

    def leave(self, slot: int) -> None:
        """Forget a slot's request. Harmless for an empty slot."""
        self._penalties.leave(slot)
        self._grammars[slot] = None
        self._plain[slot] = True
        self._groups = None

    def sample(self, logits: torch.Tensor, slots: np.ndarray) -> Sampled:
        """One token per row of `logits` `[E, vocab]`, whose requests sit in `slots` `[E]`.

        May overwrite `logits`. Advances the state of every row by one output.
        """
        if self._plain[slots].all():
            self._index[slots] += 1
            return Sampled(best_tokens(logits))
        groups = self._group(slots)
        logits = logits.float()
        raw = {row: torch.log_softmax(logits[row], -1) for row, _ in groups.logprobs}
        self._adjust(logits, groups)
        tokens = best_tokens(logits)
        if len(groups.random):
            at = uniforms(groups.seeds, self._index[slots[groups.random.cpu().numpy()]])
            tokens[groups.random] = draw(logits[groups.random], groups.draw, torch.from_numpy(at).to(self._device))
        return self._advance(tokens, raw, groups)

    def _adjust(self, logits: torch.Tensor, groups: Groups) -> None:
        """Everything that changes logits before temperature, in place."""
        if groups.bias is not None:
            rows, ids, values = groups.bias
            logits.index_put_((rows, ids), values, accumulate=True)
        for row in groups.min_tokens:
            slot = int(groups.slots[row])
            params = self._params[slot]
            if self._index[slot] < params.min_tokens:
                logits[row, sorted(self._eos | set(params.stop_token_ids))] = float("-inf")
        if len(groups.penalised):
            logits[groups.penalised] = self._penalties.apply(
                logits[groups.penalised], groups.slots[groups.penalised.cpu().numpy()]
            )
        if groups.grammars:
            rows = torch.tensor([row for row, _ in groups.grammars], device=self._device)
            forbidden = self._compiler.forbidden([grammar for _, grammar in groups.grammars], logits.shape[1])
            logits[rows] = logits[rows].masked_fill(forbidden.to(self._device), float("-inf"))

    def _advance(self, tokens: torch.Tensor, raw: dict[int, torch.Tensor], groups: Groups) -> Sampled:
        """Book the sampled tokens and gather what the result carries beside them."""
        self._index[groups.slots] += 1
        if len(groups.penalised):
            rows = groups.penalised
            self._penalties.count(groups.slots[rows.cpu().numpy()], tokens[rows])
        sampled = Sampled(tokens)
        for row, grammar in groups.grammars:
            reason = grammar.advance(int(tokens[row]))
            if reason is not None:
                sampled.finished.append((row, reason))
        for row, count in groups.logprobs:
            sampled.details[row] = token_logprobs(raw[row], int(tokens[row]), count)
        return sampled

    def _group(self, slots: np.ndarray) -> Groups:
        """The groups of this batch, kept while the very same array comes again."""
        if self._groups is None or self._groups.slots is not slots:
            self._groups = self._make_groups(slots)
        return self._groups

    def _make_groups(self, slots: np.ndarray) -> Groups:
        params = [self._params[s] for s in slots]
        random = [row for row, p in enumerate(params) if is_random(p)]
        grammars = [(row, self._grammars[s]) for row, s in enumerate(slots)]
        return Groups(
            slots=slots,
            random=self._rows(random),
            draw=Draw.of([params[row] for row in random], self._device),
            seeds=self._seed[slots[random]],
            penalised=self._rows([row for row, p in enumerate(params) if is_penalised(p)]),
            bias=self._bias(params),
            min_tokens=[row for row, p in enumerate(params) if p.min_tokens and p.json_schema is None],
            grammars=[(row, grammar) for row, grammar in grammars if grammar is not None],
            logprobs=[(row, p.logprobs) for row, p in enumerate(params) if p.logprobs is not None],
        )

    def _bias(self, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        triples = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
        if not triples:
            return None
        rows, ids, values = zip(*triples, strict=True)
        added = torch.tensor(values, dtype=torch.float64, device=self._device).clamp(-LARGEST, LARGEST)
        return self._rows(rows), self._rows(ids), added.float()

    def _rows(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self._device)


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The first greatest token id of each row of `logits` `[E, vocab]`, as `[E]` int64.

    On a CPU by numpy, whose argmax of float32 is vectorised: over ten times faster than torch's.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    return logits.argmax(-1)


def is_penalised(params: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def is_plain(params: SamplingParams) -> bool:
    """Whether the request's next token is the bare argmax."""
    return (
        not is_random(params)
        and not is_penalised(params)
        and not params.logit_bias
        and not params.min_tokens
        and params.json_schema is None
        and params.logprobs is None
    )


def token_logprobs(logprobs: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """The entry of one sampled token out of its row's log-probabilities `[vocab]`."""
    if count == 0:
        return TokenLogprobs(float(logprobs[token]))
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _params(handle: object) -> SamplingParams:
    params = getattr(handle, "params", None)
    return params if isinstance(params, SamplingParams) else SamplingParams(temperature=0.0)
