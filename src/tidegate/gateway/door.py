"""The door: who asks, what they may claim, and how much they may send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil

from tidegate.api.errors import ApiError
from tidegate.api.identity import Asking, Claim, Identities
from tidegate.config import ApiKey, Config, GatewayKey
from tidegate.gateway.rates import Charge, Rate, Rates


class Door:
    """Everything that is asked of a request before it may wait. Names of headers are in lower case.

    `refused` counts refusals by the error's code.
    """

    def __init__(self, config: Config) -> None:
        self.refused: Counter[str] = Counter()
        self._rates = Rates()
        self.reload(config)

    def reload(self, config: Config) -> None:
        """Another configuration holds from now on; what was used of a rate stays used."""
        self._gateway = config.gateway
        self._identities = Identities(config, config.gateway.api_keys)

    def key_of(self, headers: Mapping[str, str]) -> ApiKey | None:
        """The API key of a request, asked for before its body is read; None where none are configured.

        Raises ApiError 401 if it is missing or unknown.
        """
        try:
            return self._identities.key_of(headers)
        except ApiError as refusal:
            self._count(refusal)
            raise

    def claim(self, headers: Mapping[str, str], body: Asking, key: ApiKey | None) -> Claim:
        """The tenant, class, priority and promises of a request with this key.

        Raises ApiError 400 for unknown names, 403 for what the key may not claim.
        """
        try:
            return self._identities.claim(body, headers, key)
        except ApiError as refusal:
            self._count(refusal)
            raise

    def charge(self, key: ApiKey | None, claim: Claim, tokens: int, now: float) -> Charge:
        """Count one request of `tokens` tokens, estimated, against every rate that holds for it.

        `Charge.settle` corrects that once it is known what it used. Raises ApiError 429 that says when to come back.
        """
        rates = []
        if isinstance(key, GatewayKey):
            rates.append(Rate(("key", key.key), key.requests_per_minute, key.tokens_per_minute))
        own = self._gateway.rates.get(claim.slo_class)
        if own is not None:
            whose = ("tenant", claim.slo_class, claim.tenant)
            rates.append(Rate(whose, own.requests_per_minute, own.tokens_per_minute))
        found = self._rates.charge(rates, tokens, now)
        if isinstance(found, Charge):
            return found
        self.refused["rate_limit_exceeded"] += 1
        limit = found.rate.requests if found.unit == "requests" else found.rate.tokens
        whom = "this API key" if rates.index(found.rate) == 0 and isinstance(key, GatewayKey) else "a tenant"
        of_class = "" if whom == "this API key" else f" of class {claim.slo_class!r}"
        seconds = ceil(found.seconds)
        raise ApiError(
            429,
            f"{whom} may send {limit} {found.unit} a minute{of_class}; come back in {seconds} s",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(seconds)},
        )

    def may_see(self, key: ApiKey | None, tenant: str) -> bool:
        """Whether whoever has `key` is told of the requests of `tenant`."""
        return key is None or key.tenant is None or key.tenant == tenant

    def _count(self, refusal: ApiError) -> None:
        self.refused[refusal.code or "bad_request"] += 1
