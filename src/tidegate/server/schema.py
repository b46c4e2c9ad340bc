"""What a client may ask, with OpenAI's names. An option that would do nothing is an error, not a silence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

_NO_TOOLS = "is not supported: this server does not call tools"
_NO_MEDIA = "is not supported: this server reads and writes text"
UNSUPPORTED = {
    "audio": _NO_MEDIA,
    "modalities": _NO_MEDIA,
    "prediction": "is not supported: outputs cannot be predicted by the client",
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "parallel_tool_calls": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "best_of": "is not supported: ask for `n` and choose among them",
    "suffix": "is not supported: the model does not fill in the middle",
    "echo": "is not supported: the client has the prompt already",
    "store": "is not supported: nothing is stored",
    "reasoning_effort": "is not supported: the model does not reason apart",
    "web_search_options": "is not supported: this server does not search",
}

# Values that ask for nothing: clients send them unasked.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "tool_calls": ([],),
    "annotations": ([],),
    "detail": ("auto",),
}

# Logits are divided by these numbers in float32: below the bounds the quotient is infinite.
_COLDEST = 1e-5
_WEAKEST_REPETITION = 0.01


def _hot_enough(temperature: float) -> float:
    if 0 < temperature < _COLDEST:
        raise ValueError(f"temperature must be 0 (greedy) or at least {_COLDEST}: logits divided by less overflow")
    return temperature


Text = Annotated[str, Field(max_length=4 << 20)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenPrompt = Annotated[list[TokenId], Field(min_length=1)]

PromptText = Annotated[Text, Field(min_length=1)]
Prompts = (
    Annotated[list[PromptText], Field(min_length=1)] | TokenPrompt | Annotated[list[TokenPrompt], Field(min_length=1)]
)


class _Body(BaseModel):
    """Null means absent, and so does a value that asks for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        return {
            name: value
            for name, value in data.items()
            if value is not None and (name in known or value not in _NEUTRAL.get(name, ()))
        }


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    """One turn of a chat. `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(_Body):
    include_usage: bool = False


class TextFormat(_Body):
    type: Literal["text"]


class JsonObjectFormat(_Body):
    type: Literal["json_object"]


class NamedSchema(_Body):
    """`strict` changes nothing: the output always follows the schema."""

    name: str = Field(default="response", max_length=64)
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(_Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Generation(_Body):
    """What both ways of asking share: sampling, and who asks how urgently."""

    model: str | None = Field(default=None, max_length=256)
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, AfterValidator(_hot_enough)] = Field(
        default=1.0, ge=0, le=100, description=f"0 is greedy; otherwise at least {_COLDEST}"
    )
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=1 << 31, description="0 and -1 are off")
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=_WEAKEST_REPETITION, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default={}, max_length=1024)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = []
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=1 << 31)
    response_format: ResponseFormat | None = None

    service_tier: str | None = Field(default=None, max_length=64, description="auto, default, or a configured one")
    metadata: dict[str, Annotated[str, Field(max_length=512)]] = Field(
        default={}, max_length=16, description="slo_class names the request's class; other entries are the client's own"
    )
    priority: int | None = Field(default=None, ge=-1_000_000, le=1_000_000, description="lower is more urgent")
    queue_ttl: float | None = Field(
        default=None, gt=0, le=86_400, description="seconds that it may wait to begin, at most what its class allows"
    )
    user: str | None = Field(default=None, max_length=256, description="the tenant, where no API key names it")
    cache_salt: str = Field(default="", max_length=256, description="only requests of one salt share cached prefixes")

    @model_validator(mode="after")
    def _fits_together(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed where stream is true")
        return self


class CompletionRequest(Generation):
    prompt: PromptText | Prompts
    max_tokens: Count = 16
    logprobs: int | None = Field(default=None, ge=0, le=20)


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _asks_once(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed where logprobs is true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
