"""What the scheduler may use, and its rules of thumb. Sizes are tokens or blocks, as each says."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.errors import ConfigError

HEADROOMS = ("none", "watermark", "quantile", "declared")
OVERSIZES = ("refuse", "clip")


@dataclass(frozen=True, slots=True)
class Limits:
    """Raises ConfigError for values that contradict each other.

    num_blocks, block_size: the KV pool, in blocks of `block_size` tokens
    max_num_seqs: seats, requests that run at once
    max_num_batched_tokens: tokens one step computes at most
    max_model_len: tokens (prompt + output) the model handles; None is no limit
    headroom: blocks that must stay free beside an admission: "none"; "watermark", a share of the pool;
        "quantile", what everybody is predicted to still grow by; "declared", whatever everybody may still
        grow by (nobody is ever evicted for memory)
    watermark: that share, 0 to 1
    headroom_quantile: the share of outputs, 0 to 1, that a prediction of head-room "quantile" is to cover;
        None is 0.9 there, and elsewhere the only value
    oversize: a request that outgrows the whole pool is refused ("refuse"), or ends with `length_kv` ("clip")
    partial_prefills: unfinished prompts at once; None is no limit
    prefix_caching: computed blocks are kept for others while memory lasts
    bypass_bound: steps that a request which passes a blocked head may last, and so the most by which it
        can delay a head whose start was misjudged
    resume_span: outputs of growth that must be covered before a preempted request returns
    max_preemptions: after so many, a request returns only with its whole footprint, and is never a victim again
    nearly_done: a request with at most so many outputs to come is not evicted while others can be
    max_resources: different `Request.resource` labels that run at once (adapter slots); None is no limit
    resource_patience: seconds that a request may be passed by others because its label has no slot; after
        that nobody behind it starts on the label that is given up for it. 0 is strictly in order
    stall_steps: a decode that lacks a block waits for an end that is known to come within so many steps
    host_blocks, disk_blocks: blocks to which KV can be swapped, in host memory and in a file; 0 is none
    draft_tokens: tokens that every decode computes beside its own, out of the step's budget (speculation).
        None of them is taken as an output yet, and no blocks are reserved for their KV
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    headroom: str = "watermark"
    watermark: float = 0.01
    headroom_quantile: float | None = None
    oversize: str = "refuse"
    partial_prefills: int | None = None
    prefix_caching: bool = True
    bypass_bound: int = 60
    resume_span: int = 128
    max_preemptions: int = 8
    stall_steps: int = 2
    nearly_done: int = 4
    host_blocks: int = 0
    disk_blocks: int = 0
    draft_tokens: int = 0
    max_resources: int | None = None
    resource_patience: float = 5.0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        counts = ("bypass_bound", "resume_span", "max_preemptions", "stall_steps", "nearly_done", "draft_tokens")
        for name in (*counts, "host_blocks", "disk_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2 (a prompt and an output), not {self.max_model_len}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request decodes one token a step"
            )
        if self.max_num_batched_tokens < self.max_num_seqs * self.tokens_per_decode:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}) * (1 + draft_tokens ({self.draft_tokens})): every running request computes "
                "its draft tokens in a step as well"
            )
        if self.headroom not in HEADROOMS:
            raise ConfigError(f"headroom must be one of {', '.join(HEADROOMS)}, not {self.headroom!r}")
        if self.oversize not in OVERSIZES:
            raise ConfigError(f"oversize must be one of {', '.join(OVERSIZES)}, not {self.oversize!r}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be in [0, 1), not {self.watermark}")
        if self.headroom_quantile is not None:
            if self.headroom != "quantile":
                raise ConfigError(f'headroom_quantile does nothing with headroom "{self.headroom}"')
            if not 0 < self.headroom_quantile <= 1:
                raise ConfigError(f"headroom_quantile must be above 0 and at most 1, not {self.headroom_quantile}")
        if self.max_resources is not None and self.max_resources < 1:
            raise ConfigError(f"max_resources must be at least 1, not {self.max_resources}")
        if not self.resource_patience >= 0:
            raise ConfigError(f"resource_patience must be at least 0, not {self.resource_patience}")
        if self.partial_prefills is not None and self.partial_prefills < 1:
            raise ConfigError(f"partial_prefills must be at least 1, not {self.partial_prefills}")

    @property
    def tokens_per_decode(self) -> int:
        """Tokens of a step's budget that one decode takes."""
        return 1 + self.draft_tokens

    @property
    def pool_tokens(self) -> int:
        """KV tokens the whole pool holds."""
        return self.num_blocks * self.block_size
