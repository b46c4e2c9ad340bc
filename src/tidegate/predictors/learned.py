"""Predictions of trees that `tidegate predictor train` grew: the file, its checks, and its evaluation.

The file is JSON with numbers and names, so that reading one can run nothing, and evaluating it needs
nothing but Python. What may stand in a file is bounded here, and with it what a prediction can cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError

from tidegate.core.predict import within_declared
from tidegate.core.view import Described, RequestView
from tidegate.errors import ConfigError, InputError

MAX_BYTES = 4 * 2**20
MAX_QUANTILES = 3
MAX_TREES = 30
MAX_DEPTH = 3
MAX_NAMES = 1000
MAX_LOG_TOKENS = 20.0
REMEMBERED = 4096

FEATURES = ("prompt_tokens", "priority", "tenant", "slo_class")

_STRICT = ConfigDict(extra="forbid", strict=True)

Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(gt=0, lt=1)]
Index = Annotated[int, Strict(), Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Names:
    """Each known name as a number, and the number of all others: the mean log length of its requests."""

    __pydantic_config__ = _STRICT

    known: Annotated[dict[str, Number], Field(max_length=MAX_NAMES)]
    other: Number


@dataclass(frozen=True, slots=True)
class Tree:
    """One regression tree, a node in each place of its lists; the first is the root.

    feature:     index in FEATURES of what a node asks for; -1 is a leaf
    threshold:   of that feature; up to it goes left
    left, right: the places of the children, both further back than the node itself
    value:       what a leaf adds to the log length
    """

    __pydantic_config__ = _STRICT

    feature: list[Annotated[int, Strict(), Field(ge=-1, lt=len(FEATURES))]]
    threshold: list[Number]
    left: list[Index]
    right: list[Index]
    value: list[Number]

    def __post_init__(self) -> None:
        size = len(self.feature)
        if not 1 <= size < 2 ** (MAX_DEPTH + 1):
            raise ValueError(f"has {size} nodes; from 1 to {2 ** (MAX_DEPTH + 1) - 1} are allowed")
        if any(len(column) != size for column in (self.threshold, self.left, self.right, self.value)):
            raise ValueError("has lists of different lengths")
        depth = [0] * size
        for node in range(size):
            if self.feature[node] < 0:
                continue
            for child in (self.left[node], self.right[node]):
                if not node < child < size:
                    raise ValueError(f"has a node {node} whose child is {child}")
                depth[child] = max(depth[child], depth[node] + 1)
        if max(depth) > MAX_DEPTH:
            raise ValueError(f"is {max(depth)} deep; {MAX_DEPTH} is allowed")


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The trees of one quantile: the log length is `base` and what each tree adds to it."""

    __pydantic_config__ = _STRICT

    quantile: Share
    base: Number
    trees: Annotated[list[Tree], Field(max_length=MAX_TREES)]


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """What a file holds: an ensemble for each quantile, ascending, over the same features."""

    __pydantic_config__ = _STRICT

    format: Literal["tidegate-predictor-1"]
    tenants: Names
    slo_classes: Names
    ensembles: Annotated[list[Ensemble], Field(min_length=1, max_length=MAX_QUANTILES)]

    def __post_init__(self) -> None:
        if any(a >= b for a, b in pairwise(self.quantiles)):
            raise ValueError("must hold its ensembles by ascending quantile")

    @property
    def quantiles(self) -> tuple[float, ...]:
        return tuple(ensemble.quantile for ensemble in self.ensembles)


_MODEL = TypeAdapter(LearnedModel)


def load_model(path: Path) -> LearnedModel:
    """Read what `save_model` wrote. Raises InputError naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}") from e
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is no file of `tidegate predictor train`: it is larger than {MAX_BYTES} bytes")
    try:
        return _MODEL.validate_json(content)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        raise InputError(f"{path} is no file of `tidegate predictor train`: {f'{where} {message}'.strip()}") from e


def save_model(model: LearnedModel, path: Path) -> None:
    """Write the file. One that is there is replaced."""
    try:
        path.write_bytes(_MODEL.dump_json(model))
    except OSError as e:
        raise InputError(f"cannot write {path}: {e.strerror or e}") from e


class LearnedPredictor:
    """Quantiles of the output length, from what is known when a request arrives; nothing is learned while serving.

    `exp(base + sum of the trees)`, capped by what was declared. `output_tokens` is the learned `quantile`;
    a share that was not learned is answered by the next larger one that was, or else by the largest. Larger
    shares never get smaller answers. Trees are bounded (MAX_QUANTILES, MAX_TREES, MAX_DEPTH) and evaluated once for
    what a request shows; the last REMEMBERED answers are kept. Bad at traffic that has changed since.

    Raises ConfigError for a quantile that the model has not learned.
    """

    def __init__(self, model: LearnedModel, quantile: float) -> None:
        if quantile not in model.quantiles:
            known = ", ".join(f"{q:g}" for q in model.quantiles)
            raise ConfigError(f"the predictor has not learned quantile {quantile:g}, but {known}; ask for one of these")
        self._quantiles = model.quantiles
        self._quantile = quantile
        self._tenants = model.tenants
        self._classes = model.slo_classes
        self._ensembles = [(e.base, [_nested(tree) for tree in e.trees]) for e in model.ensembles]
        # By what a request shows rather than by its id: such an answer cannot go stale, and equal requests share it.
        self._answers = lru_cache(maxsize=REMEMBERED)(self._evaluate)

    def output_tokens(self, r: RequestView) -> float:
        return self.output_quantile(r, self._quantile)

    def output_quantile(self, r: RequestView, share: float) -> float:
        answers = self._answers(r.prompt_tokens, r.priority, r.tenant, r.slo_class)
        learned = min(bisect_left(self._quantiles, share), len(answers) - 1)
        return within_declared(r, answers[learned])

    def observe(self, r: Described, outputs: int) -> None:
        """What was learned stands."""

    def _evaluate(self, prompt_tokens: int, priority: int, tenant: str, slo_class: str) -> tuple[float, ...]:
        """Tokens at each learned quantile, none smaller than the one before it."""
        tenants, classes = self._tenants, self._classes
        features = (
            prompt_tokens,
            priority,
            tenants.known.get(tenant, tenants.other),
            classes.known.get(slo_class, classes.other),
        )
        answers: list[float] = []
        largest = 0.0
        for base, trees in self._ensembles:
            largest = max(largest, exp(min(log_tokens(base, trees, features), MAX_LOG_TOKENS)))
            answers.append(largest)
        return tuple(answers)


Node: TypeAlias = "float | tuple[int, float, Node, Node]"
"""A leaf's value, or (feature, threshold, left, right): in Python quicker to walk than lists of indices."""


def log_tokens(base: float, trees: Sequence[Node], features: Sequence[float]) -> float:
    """The log length at which `trees` arrive for `features` (in the order of FEATURES)."""
    total = base
    for node in trees:
        while isinstance(node, tuple):
            feature, threshold, left, right = node
            node = left if features[feature] <= threshold else right
        total += node
    return total


def _nested(tree: Tree, at: int = 0) -> Node:
    if tree.feature[at] < 0:
        return tree.value[at]
    children = _nested(tree, tree.left[at]), _nested(tree, tree.right[at])
    return (tree.feature[at], tree.threshold[at], *children)
