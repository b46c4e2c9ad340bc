"""What the gateway reads of a body; the rest of it passes unseen."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidegate.api.errors import ApiError

_NONE = msgspec.Raw(b"")


class Body(msgspec.Struct, gc=False):
    """The fields of a request's JSON object that say who asks, how much, and with which text.

    Text stays as it came: two prompts with one beginning have one beginning as JSON, too.
    """

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    sent_metadata: dict[str, str] | None = msgspec.field(default=None, name="metadata")
    service_tier: str | None = None
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.sent_metadata or {}

    @property
    def outputs(self) -> int | None:
        """Output tokens asked for at most, of all sequences together; None where nothing was said."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if most is None else max(0, most) * max(1, self.n or 1)

    @property
    def text(self) -> list[bytes]:
        """What becomes the prompt, in the order in which chat templates lay it out. JSON, without closing brackets:
        those of a conversation move on with every turn."""
        parts = (self.tools, self.messages, self.prompt, self.input)
        return [bytes(part).rstrip(b'"]} \r\n\t') for part in parts if part]


_decoder = msgspec.json.Decoder(Body)


def look_in(body: bytes) -> Body:
    """What a body says; 400 where it is no JSON object or a field is of another kind."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.strip("`.") or None
        raise ApiError(400, f"{param or 'the body'}: {what[:200]}", param=param and param[:200]) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


NOTHING = Body()
"""What a body says that is not looked into."""
