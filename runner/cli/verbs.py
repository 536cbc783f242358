"""Lists what each verb after training takes: flags, switches, and the keys that may be changed."""

from __future__ import annotations

from dataclasses import dataclass, field

ANY_KEY = ("",)
#: of a run's computing, for all verbs that compute
COMPUTING = ("device", "train.precision", "backends.")


@dataclass(frozen=True)
class Verb:
    """What a verb takes, and what its --help says."""

    does: str
    flags: dict[str, str] = field(default_factory=dict)  # those with a value, and what it is called
    switches: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # beginnings of the keys that may be changed
    is_of_a_run: bool = True
    more: str = ""


VERBS = {
    "evaluate": Verb(
        "evaluate a run's best weights again, on its splits or on other data",
        switches=("--track",),
        keys=(*COMPUTING, "data", "train.eval_batch_size", "tracking.uri"),
        more="data=..., data.path=...: evaluate all of this data, or its splits if it has any; --track: log the results to MLflow",
    ),
    "predict": Verb(
        "write predictions of a run's best weights for new data",
        flags={"--input": "FILE", "--output": "FILE", "--batch-size": "ROWS"},
        switches=("--keep",),
        needs=("--input", "--output"),
        keys=COMPUTING,
        more="outputs: .csv .tsv .parquet .feather .jsonl .npz; --keep: write the input columns too",
    ),
    "export": Verb(
        "export a run's model for use without this package, and check it against the original",
        flags={"--format": "FORMAT", "--output": "PATH"},
        switches=("--predictions",),
        needs=("--format",),
        more="formats: safetensors onnx pt2 mlflow; --predictions: export predictions, e.g., probabilities, instead of raw outputs",
    ),
    "serve": Verb(
        "serve a run's model over HTTP with MLflow's scoring server on 127.0.0.1",
        flags={"--port": "PORT"},
        switches=("--predictions",),
        more='POST /invocations with {"inputs": [...]}; --predictions: probabilities instead of the model\'s raw outputs',
    ),
    "register": Verb(
        "register a run's model as a version in MLflow's registry",
        flags={"--name": "NAME", "--alias": "ALIAS"},
        switches=("--again",),
        needs=("--name",),
        keys=("tracking.uri",),
        more="--again: add a version even if this model is already registered",
    ),
    "explain": Verb(
        "replay a run to the step that went wrong, and name the operation, line and examples",
        flags={"--step": "N"},
        switches=("--time", "--trace"),
        keys=COMPUTING[:1],
        more="--step N: explain step N instead of the first NaN, e.g., a loss spike; the run directory does not change\n"
        "--time: show where the time went, and what would save most; --trace: trace 20 steps again, in profile/, for Perfetto",
    ),
    "lr-find": Verb(
        "train a few steps with a rising learning rate, and suggest a rate",
        flags={"--steps": "STEPS", "--from": "RATE", "--to": "RATE"},
        keys=ANY_KEY,
        is_of_a_run=False,
        more="writes lr_find.png and lr_find.json to a directory in outputs/, and no run",
    ),
    "tune": Verb(
        "measure which settings are fastest on this machine with the same numbers",
        flags={"--seconds": "SECONDS", "--name": "NAME"},
        switches=("--precision",),
        keys=ANY_KEY,
        is_of_a_run=False,
        more="writes conf/tuned/NAME.yaml for `python -m runner ... tuned=NAME`; --precision: try other precisions too (other numbers)",
    ),
}
