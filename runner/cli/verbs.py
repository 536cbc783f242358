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
        "measures a run's best weights again, on its own val and test splits or on other data",
        switches=("--track",),
        keys=(*COMPUTING, "data", "train.eval_batch_size", "tracking.uri"),
        more="data=..., data.path=...: other data, all of it measured unless it brings splits; --track: to MLflow too",
    ),
    "predict": Verb(
        "says what a run's best weights make of new rows",
        flags={"--input": "FILE", "--output": "FILE", "--batch-size": "ROWS"},
        switches=("--keep",),
        needs=("--input", "--output"),
        keys=COMPUTING,
        more="outputs: .csv .tsv .parquet .feather .jsonl .npz; --keep: the input's columns beside the answers",
    ),
    "export": Verb(
        "writes a run's model for use without this package, checked against the original",
        flags={"--format": "FORMAT", "--output": "PATH"},
        switches=("--predictions",),
        needs=("--format",),
        more="formats: safetensors onnx pt2 mlflow; --predictions: with what the task makes of the outputs, e.g. probabilities",
    ),
    "serve": Verb(
        "serves a run's model over HTTP, with MLflow's scoring server on 127.0.0.1",
        flags={"--port": "PORT"},
        switches=("--predictions",),
        more='POST /invocations with {"inputs": [...]}; --predictions: probabilities instead of the model\'s raw outputs',
    ),
    "register": Verb(
        "makes a run's model a version of a model in MLflow's registry",
        flags={"--name": "NAME", "--alias": "ALIAS"},
        switches=("--again",),
        needs=("--name",),
        keys=("tracking.uri",),
        more="--again: a new version though this model is one already",
    ),
    "explain": Verb(
        "replays a run to the step that spoilt it, and says which operation, line and rows did it",
        flags={"--step": "N"},
        switches=("--time", "--trace"),
        keys=COMPUTING[:1],
        more="--step: of a run without a loss that is not finite, e.g. one at which the loss leapt; the run's folder stays as it is\n"
        "--time: where the run's time went, and what would save most; --trace: 20 of its steps again, into profile/, for perfetto",
    ),
    "lr-find": Verb(
        "trains a few steps with a rising learning rate, and says which rate to take",
        flags={"--steps": "STEPS", "--from": "RATE", "--to": "RATE"},
        keys=ANY_KEY,
        is_of_a_run=False,
        more="leaves lr_find.png and lr_find.json in a folder below outputs/, and no run",
    ),
    "tune": Verb(
        "measures which settings are fastest on this machine and leave the numbers as they are",
        flags={"--seconds": "SECONDS", "--name": "NAME"},
        switches=("--precision",),
        keys=ANY_KEY,
        is_of_a_run=False,
        more="writes conf/tuned/NAME.yaml, for `python -m runner ... tuned=NAME`; --precision: others too, which changes numbers",
    ),
}
