"""What an engine answers to a question of the gateway's own, as far as it may be long."""

from __future__ import annotations

from aiohttp import ClientResponse


async def read_whole(answer: ClientResponse, most: int) -> bytes:
    """The whole body. Raises ValueError where it has more than `most` bytes, without having read much more."""
    read = bytearray()
    async for part in answer.content.iter_chunked(2**16):
        read += part
        if len(read) > most:
            raise ValueError(f"more than {most} bytes")
    return bytes(read)
