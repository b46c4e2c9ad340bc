"""How long a step takes, learned from the engine's own steps.

    seconds = base + prefill * prefill tokens + decode * decode tokens + context * KV tokens that decodes read

Weighted least squares over the recent past: normal equations with exponential forgetting (every step
counts `FORGET` times what the one after it counts), a small ridge that ties what was never measured to
the prior, and weights that fall with the square of the error beyond a bound, against outliers (robust
regression by reweighting; Huber, Ann. Math. Statist. 1964). Steps are weighed by their *relative* error,
since the noise of a step's duration grows with the step. A step costs a fixed number of additions; the
four unknowns are solved for only when enough steps have come to change them.

Honest limits: the time of a chunk's attention to its own earlier tokens is not told apart from its other
work, and a knee (a GPU that turns from memory-bound to compute-bound) is met by a straight line through
the recent past.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol


class StepModel(Protocol):
    """Predicts seconds; told of every step that was measured."""

    @property
    def decode(self) -> float:
        """Seconds of one decode step at the present batch."""
        ...

    @property
    def single(self) -> float:
        """Seconds of a step that decodes one request, behind no context: no step is shorter."""
        ...

    @property
    def learns(self) -> bool:
        """Whether `observe` changes anything."""
        ...

    def service(self, prefill_tokens: float, outputs: float) -> float:
        """Seconds to compute `prefill_tokens` and then `outputs` one by one, alone."""
        ...

    def prefill(self, tokens: float) -> float:
        """Seconds that `tokens` of a prompt add to the steps that compute them."""
        ...

    def step(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        """Seconds of one step: prompt tokens, decode tokens, and KV tokens that the decodes read."""
        ...

    def observe(self, prefill_tokens: int, decodes: int, context_tokens: int, seconds: float) -> None:
        """A step of this size took so long on the device."""
        ...


class Coefficients(NamedTuple):
    """Seconds: of any step, per prefill token, per decode token, per KV token read."""

    base: float = 0.0198
    prefill: float = 1e-4
    decode: float = 2e-4
    context: float = 1e-8


class LearnedStepTime:
    """A `StepModel` fitted online. `prior` (all above 0) is believed until steps were measured.

    scale: mean relative error of recent steps, outliers clipped
    """

    __slots__ = ("_batch", "_context", "_prior", "_steps", "_sums", "coefficients", "scale")

    learns: ClassVar[bool] = True

    # A step counts FORGET times what the next one counts: half the weight lies on the last 350 or so.
    FORGET = 0.998
    # Solved after each of the first so many steps, then once in as many.
    REFIT = 16
    # Relative errors beyond so many times the scale weigh less and less.
    OUTLIER = 3.0
    # Seconds.
    SHORTEST = 1e-9
    # What the prior weighs, in steps, for a term that makes up a whole step.
    RIDGE = 1e-4

    def __init__(self, prior: Coefficients | None = None) -> None:
        self._prior = prior or Coefficients()
        if not all(c > 0 for c in self._prior):
            raise ValueError(f"the prior's coefficients must be above 0, not {self._prior}")
        self.coefficients = self._prior
        self.scale = 0.5
        self._steps = 0
        self._batch, self._context = 1.0, 0.0
        # The upper triangle of X'WX by rows, then X'Wy; x = (1, prefill, decodes, context).
        self._sums = [0.0] * 14

    @property
    def decode(self) -> float:
        return self.step(0, self._batch, self._context)

    @property
    def single(self) -> float:
        return self.step(0, 1)

    def service(self, prefill_tokens: float, outputs: float) -> float:
        c = self.coefficients
        return prefill_tokens * c.prefill + outputs * (c.base + c.decode)

    def prefill(self, tokens: float) -> float:
        return tokens * self.coefficients.prefill

    def step(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        c = self.coefficients
        return c.base + c.prefill * prefill_tokens + c.decode * decodes + c.context * context_tokens

    def observe(self, prefill_tokens: int, decodes: int, context_tokens: int, seconds: float) -> None:
        """Ignores what is no duration of a step (under a nanosecond, not finite)."""
        if not self.SHORTEST <= seconds < float("inf"):
            return
        if decodes:
            self._batch, self._context = decodes, context_tokens
        expected = self.step(prefill_tokens, decodes, context_tokens)
        unit = min(max(seconds, expected / 4), max(expected, seconds / 4))  # the smaller, within reason
        self._add(
            self._weight((seconds - expected) / unit) / (unit * unit), prefill_tokens, decodes, context_tokens, seconds
        )
        self._steps += 1
        if self._steps <= self.REFIT or not self._steps % self.REFIT:
            self.coefficients = self._solve()

    def _weight(self, error: float) -> float:
        """The weight of a step by its relative error, by which the scale is updated as well."""
        size, bound = abs(error), self.OUTLIER * self.scale
        rate = max(1.0 / (self._steps + 2), 1 / 32)
        self.scale = max(0.005, self.scale + rate * (min(size, bound) - self.scale))
        return 1.0 if size <= bound else (bound / size) ** 2

    def _add(self, w: float, p: float, d: float, k: float, y: float) -> None:
        s, f = self._sums, self.FORGET
        wp, wd, wk = w * p, w * d, w * k
        self._sums = [
            s[0] * f + w, s[1] * f + wp, s[2] * f + wd, s[3] * f + wk,
            s[4] * f + wp * p, s[5] * f + wp * d, s[6] * f + wp * k,
            s[7] * f + wd * d, s[8] * f + wd * k, s[9] * f + wk * k,
            s[10] * f + w * y, s[11] * f + wp * y, s[12] * f + wd * y, s[13] * f + wk * y,
        ]  # fmt: skip

    def _solve(self) -> Coefficients:
        """Least squares with the ridge; a term that would come out negative is left out."""
        s, prior = self._sums, self._prior
        a = [[s[0], s[1], s[2], s[3]], [s[1], s[4], s[5], s[6]], [s[2], s[5], s[7], s[8]], [s[3], s[6], s[8], s[9]]]
        ridge = [self.RIDGE / (c * c) for c in prior]
        for i in range(4):
            a[i][i] += ridge[i]
        b = [s[10 + i] + ridge[i] * prior[i] for i in range(4)]
        terms = [0, 1, 2, 3]
        while True:
            # Unknowns in units of the prior: seconds per step and per KV token differ by six digits.
            scaled = [[a[i][j] * prior[i] * prior[j] for j in terms] for i in terms]
            found = _eliminate(scaled, [b[i] * prior[i] for i in terms], self.RIDGE)
            least = min(found)
            if least >= 0:
                break
            del terms[found.index(least)]
        values = [0.0] * 4
        for i, x in zip(terms, found, strict=True):
            values[i] = x * prior[i]
        return Coefficients(*values)


def _eliminate(a: list[list[float]], b: list[float], ridge: float) -> list[float]:
    """Solve `a x = b` for a symmetric `a` (changed in place) no eigenvalue of which is under `ridge`: Gauss without
    pivoting. No pivot is under it then but for rounding, which steps of very different sizes let swallow it.
    """
    n = len(b)
    for i in range(n):
        a[i][i] = max(a[i][i], ridge)
        for j in range(i + 1, n):
            factor = a[j][i] / a[i][i]
            for k in range(i, n):
                a[j][k] -= factor * a[i][k]
            b[j] -= factor * b[i]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (b[i] - sum(a[i][k] * x[k] for k in range(i + 1, n))) / a[i][i]
    return x
