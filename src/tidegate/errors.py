"""Every error Tidegate raises on purpose.

TidegateError
├── InputError              the user can mend it: the CLI prints one line and exits with 2
│   ├── ConfigError         a configuration file or option is wrong
│   ├── UnsupportedModel    a model whose architecture the torch executor refuses, by name
│   └── MissingExtra        an optional part is not installed; the message names the extra
├── RequestRefused          the door refuses a request; carries the reason's name
│   └── Draining            the engine finishes what it has and takes nothing new
├── IllegalTransition       a status change that the table in core/request.py does not allow
├── KvError                 a block was freed twice, or the pool's counts do not add up
└── EngineDead              the engine loop failed; every waiting client gets this
"""

from __future__ import annotations


class TidegateError(Exception):
    """Base of every error that Tidegate raises on purpose."""


class InputError(TidegateError):
    """Bad input. The message says in one line what is wrong and how to mend it."""


class ConfigError(InputError):
    """A configuration file or an option is wrong."""


class UnsupportedModel(InputError):
    """The model's architecture is not one the torch executor runs exactly."""


class MissingExtra(InputError):
    """An optional dependency is not installed."""


class RequestRefused(TidegateError):
    """A request was refused at the door.

    `reason` is one of core.request.Rejection's values; `retry_after` is in seconds,
    None where trying again cannot help.
    """

    def __init__(self, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class Draining(RequestRefused):
    """The engine finishes what it has and takes nothing new."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("draining", "the server is shutting down; try another one or try again later", retry_after)


class IllegalTransition(TidegateError):
    """A request was asked to make a status change that is not in the table."""


class KvError(TidegateError):
    """The KV pool's bookkeeping was violated: a double free, or counts that do not add up."""


class EngineDead(TidegateError):
    """The engine loop failed and serves nobody any more."""
