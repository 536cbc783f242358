"""The tags and the description that the user gives a run or a sweep: `tracking.tags` and `tracking.description`."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from runner.errors import without_password

NOTE = "mlflow.note.content"  # the tag that MLflow shows as a run's description, in Markdown


def user_tags(cfg: DictConfig) -> dict[str, str]:
    """The tags by name; in a list of names each has the text `true`."""
    tags = OmegaConf.to_container(cfg.tracking.tags, resolve=True) if cfg.tracking.tags else {}
    named = tags if isinstance(tags, dict) else dict.fromkeys(tags or (), True)
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in named.items()}
    return {str(name): without_password(text) for name, text in texts.items()}


def described(cfg: DictConfig, note: str) -> str:
    """The user's description, with the note of the run or the sweep below it."""
    return "\n\n".join(filter(None, (without_password(cfg.tracking.description or ""), note)))
