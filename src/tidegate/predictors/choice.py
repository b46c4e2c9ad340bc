"""The predictor that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from tidegate.config import PredictorConfig
from tidegate.core.predict import HistoryPredictor, NoisyPredictor, OraclePredictor, Predictor
from tidegate.predictors.learned import LearnedPredictor, load_model


def build_predictor(predictor: PredictorConfig) -> Predictor:
    """What `[predictor]` describes, without any history yet.

    Raises InputError where the file of a learned one cannot be read or has not learned that quantile.
    """
    built: Predictor
    if predictor.path is not None:
        built = LearnedPredictor(load_model(Path(predictor.path)), predictor.quantile)
    elif predictor.kind == "oracle":
        built = OraclePredictor()
    else:
        built = HistoryPredictor(predictor.quantile)
    return NoisyPredictor(built, predictor.noise, predictor.seed) if predictor.noise else built
