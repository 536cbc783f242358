"""How much each key mattered in a search, asked of its study on disk when the report is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILE = "optuna.db"  # in a sweep's folder
#: with fewer whole trials the shares are noise
LEAST_TRIALS = 11


def read_importance(folder: Path) -> dict[str, float]:
    """Shares of the first objective's variance by key, the largest first; they sum to 1. Imports Optuna: a second.

    {} without a study that can be read, without Optuna, with fewer than LEAST_TRIALS whole trials, or where no value
    differs: the report stands without it.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        import optuna  # heavy and optional
        import sqlalchemy
    except ImportError:
        return {}
    storage = None
    try:
        storage = optuna.storages.RDBStorage(str(sqlalchemy.URL.create("sqlite", database=str(path))))
        return _shares(storage)
    except (ValueError, RuntimeError, optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError):
        return {}
    finally:
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()


def _shares(storage: Any) -> dict[str, float]:
    """Raises: ValueError or RuntimeError when no key is in every trial, or all of them reached the same value."""
    import optuna

    studies = storage.get_all_studies()
    if not studies:
        return {}
    study = optuna.load_study(study_name=studies[0].study_name, storage=storage)
    whole = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(whole) < LEAST_TRIALS:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)  # the same folder gives the same report
    found = optuna.importance.get_param_importances(study, evaluator=evaluator, target=lambda trial: trial.values[0])
    return {key: float(share) for key, share in found.items()}
