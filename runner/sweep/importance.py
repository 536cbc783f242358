"""A search's study on disk goes in; how much each key mattered comes out."""

from __future__ import annotations

from pathlib import Path

FILE = "optuna.db"  # in a sweep's folder
#: Optuna's own advice: with fewer whole trials the shares are noise
LEAST_TRIALS = 11


def read_importance(folder: Path) -> dict[str, float]:
    """Shares of the first objective's variance by key, the largest first; they sum to 1. Imports Optuna: a second.

    {} without a study, without Optuna, with fewer than LEAST_TRIALS whole trials, or where nothing varied.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        import optuna  # heavy and optional
    except ImportError:
        return {}
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    try:
        studies = storage.get_all_studies()
        if not studies:
            return {}
        study = optuna.load_study(study_name=studies[0].study_name, storage=storage)
        whole = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
        if len(whole) < LEAST_TRIALS:
            return {}
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)  # the same folder gives the same report
        try:
            found = optuna.importance.get_param_importances(
                study, evaluator=evaluator, target=lambda trial: trial.values[0]
            )
        except (ValueError, RuntimeError):  # no key is in every trial, or all of them reached the same value
            return {}
        return {key: float(share) for key, share in found.items()}
    finally:
        storage.remove_session()
        storage.engine.dispose()
