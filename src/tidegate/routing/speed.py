"""How fast an engine is, learned from outside: from first tokens and from how long decodes took."""

from __future__ import annotations

from math import inf
from typing import Final

FORGET: Final = 0.99
"""An observation counts so many times what the next one counts: half of the weight lies on the last 70."""
OUTLIER: Final = 3.0
"""Relative errors beyond so many times the usual one weigh less and less."""
RIDGE: Final = 0.5
"""How many observations as large as the others the prior weighs."""
BASE_S: Final = 0.01
TOKEN_S: Final = 1e-4
OUTPUT_S: Final = 0.02
SOON: Final = 32
"""Each of so many first observations tells; after them, of which one changes little, the fit is made anew, and others
that learn from it are told, at every `RARELY`th."""
RARELY: Final = 4


class TwoTerms:
    """y = a * u + b * v, fitted to what was observed.

    Least squares with exponential forgetting, a ridge that ties what was hardly observed to a prior, and weights that
    fall with the square of the error beyond a bound (robust regression by reweighting; Huber, Ann. Math. Statist.
    1964). Errors are relative, since noise grows with what is measured. Neither term is ever below 0.

    like: whose terms are the prior, as they are when they are needed; None takes those given for ever
    seen: how much was observed
    """

    __slots__ = ("_like", "_prior", "_scale", "_sums", "a", "b", "seen")

    def __init__(self, a: float, b: float, like: TwoTerms | None = None) -> None:
        if not (a > 0 and b > 0):
            raise ValueError(f"the prior's terms must be above 0, not {a} and {b}")
        self.a, self.b = a, b
        self.seen = 0
        self._prior = a, b
        self._like = like
        self._scale = 0.5
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, w u u, w u v, w v v, w u y, w v y

    def newcomer(self) -> TwoTerms:
        """Terms that are taken to be like these until something is observed."""
        return TwoTerms(*self._prior, self)

    def observe(self, u: float, v: float, y: float) -> bool:
        """Whether the terms are another fit now. Ignores what is no measurement: y not above 0 or not finite, u and v
        both 0."""
        if not 0.0 < y < inf or u + v <= 0:
            return False
        expected = self.a * u + self.b * v
        less, more = (y, expected) if y < expected else (expected, y)
        unit = less if less > more / 4 else more / 4  # the smaller, within reason
        size, bound = (more - less) / unit, OUTLIER * self._scale
        self.seen += 1
        share = 1.0 / (self.seen + 2) if self.seen < 30 else 1 / 32
        scale = self._scale + share * ((size if size < bound else bound) - self._scale)
        self._scale = scale if scale > 0.01 else 0.01
        w = (1.0 if size <= bound else (bound / size) ** 2) / (unit * unit)
        n, uu, uv, vv, uy, vy = self._sums
        self._sums = (
            n * FORGET + 1.0, uu * FORGET + w * u * u, uv * FORGET + w * u * v, vv * FORGET + w * v * v,
            uy * FORGET + w * u * y, vy * FORGET + w * v * y,
        )  # fmt: skip
        if self.seen > SOON and self.seen % RARELY:
            return False
        self._solve()
        return True

    def _solve(self) -> None:
        a0, b0 = self._prior if self._like is None else (self._like.a, self._like.b)
        n, uu, uv, vv, uy, vy = self._sums
        more = 1.0 + RIDGE / n
        uy, vy = uy + uu * a0 * (more - 1.0), vy + vv * b0 * (more - 1.0)
        uu, vv = uu * more, vv * more
        determinant = uu * vv - uv * uv  # above 0 (Cauchy-Schwarz) unless one of the two was never observed
        if determinant > 0:
            a, b = (uy * vv - vy * uv) / determinant, (vy * uu - uy * uv) / determinant
        else:
            a, b = (uy / uu, b0) if uu else (a0, vy / vv)
        if a < 0:
            a, b = 0.0, vy / vv
        elif b < 0:
            a, b = uy / uu, 0.0
        self.a, self.b = a, b


class Speed:
    """What a request costs at one engine, in seconds. An engine of which nothing was seen is taken to be as `typical`.

        to the first token: base_s + token_s * prompt tokens to compute, with those waiting there
        of its decoding:    output_s * outputs + stall_s * prompt tokens computed there meanwhile

    typical: learns from all engines that share it, and is the prior of each; None has a prior of its own
    token_s: that prior: seconds a prompt token, above 0
    """

    __slots__ = ("_own", "_typical", "decode", "first")

    def __init__(self, typical: Speed | None = None, *, token_s: float = TOKEN_S, base_s: float = BASE_S) -> None:
        self._typical = typical
        if typical is None:
            self._own = TwoTerms(base_s, token_s), TwoTerms(OUTPUT_S, token_s)
            self.first, self.decode = self._own
        else:
            self._own = typical._own[0].newcomer(), typical._own[1].newcomer()
            self.first, self.decode = typical.first, typical.decode

    @property
    def base_s(self) -> float:
        """Seconds to a first token when there is nothing to compute."""
        return self.first.a

    @property
    def token_s(self) -> float:
        """Seconds that a prompt token adds to the time to the first token."""
        return self.first.b

    @property
    def output_s(self) -> float:
        """Seconds an output while nobody's prompt is computed."""
        return self.decode.a

    @property
    def stall_s(self) -> float:
        """Seconds by which one prompt token that is computed there delays everybody who decodes."""
        return self.decode.b

    @property
    def seen(self) -> int:
        """First tokens of its own from which it was learned."""
        return self._own[0].seen

    def first_token(self, tokens: int, seconds: float) -> None:
        """A first token came after `seconds`, of a request that found or brought so many prompt tokens to compute."""
        self.first = self._own[0]
        if self.first.observe(1.0, tokens, seconds) and self._typical is not None:
            self._typical.first_token(tokens, seconds)

    def decoded(self, outputs: int, prompt_tokens: int, seconds: float) -> None:
        """`outputs` followed a first token within `seconds`, while so many tokens of other prompts were computed."""
        self.decode = self._own[1]
        if self.decode.observe(outputs, prompt_tokens, seconds) and self._typical is not None:
            self._typical.decoded(outputs, prompt_tokens, seconds)
