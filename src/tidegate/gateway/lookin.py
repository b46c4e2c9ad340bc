"""What the gateway reads of a body; the rest of it passes unseen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated

import msgspec

from tidegate.api.errors import ApiError

_NONE = msgspec.Raw(b"")
# Cheap signs of bytes that stand in a body, and these: a data URL's, and those of sound. Some write "/" as "\/".
_EMBEDDED, _SOUND = b";base64,", b'"input_audio"'
_BYTES = re.compile(rb'("data:[^",]{0,256};base64,|"data"\s*:\s*")([A-Za-z0-9+/=\\]{64,})')
# What is reckoned with fits a float and what is remembered is short, whatever a client says; as of the server.
_Number = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_Priority = Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)]
_Tenant = Annotated[str, msgspec.Meta(max_length=256)]
_Model = Annotated[str, msgspec.Meta(max_length=1024)]


class Body(msgspec.Struct, gc=False):
    """The fields of a request's JSON object that say who asks, how much, and with which text.

    Text stays as it came: two prompts with one beginning have one beginning as JSON, too.
    """

    model: _Model | None = None
    stream: bool | None = None
    max_tokens: _Number | None = None
    max_completion_tokens: _Number | None = None
    n: _Number | None = None
    sent_metadata: dict[str, str] | None = msgspec.field(default=None, name="metadata")
    service_tier: str | None = None
    priority: _Priority | None = None
    user: _Tenant | None = None
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
        return None if most is None else min(max(0, most) * max(1, self.n or 1), 2**31)

    @property
    def text(self) -> list[bytes]:
        """What becomes the prompt, in the order in which chat templates lay it out. JSON, without closing brackets:
        those of a conversation move on with every turn. Of images and the like that stand in it a digest is left."""
        parts = (self.tools, self.messages, self.prompt, self.input)
        return [_without_data(bytes(part)).rstrip(b'"]} \r\n\t') for part in parts if part]


def all_text(text: list[bytes]) -> bool:
    """Whether a body's `text` is all that its prompt is made of, as far as it shows."""
    return not any(map(_embeds, text))


def _embeds(part: bytes) -> bool:
    return part.count(_EMBEDDED) > 0 or part.count(_SOUND) > 0


def _without_data(part: bytes) -> bytes:
    """An image's bytes are no text: what tokens they make, nobody here knows, but it is another prompt with each."""
    return _BYTES.sub(_digest, part) if _embeds(part) else part


def _digest(found: re.Match[bytes]) -> bytes:
    return found[1] + blake2b(found[2], digest_size=16).hexdigest().encode()


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
