"""Generate command lines that a user may type from a seed, and report the effect of each in an empty directory."""

import contextlib
import functools
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import yaml
from omegaconf import OmegaConf
from waiting import LONGEST

from runner import cli
from runner.cli import commands
from runner.cli.table import COMMANDS
from runner.config import validate
from runner.config.compose import CONF, composer

#: ends every case, whatever it sets or breaks
BASE = (
    "train.num_steps=2",
    "train.max_seconds=2",
    "train.batch_size=16",
    "tracking.enabled=false",
    "device=cpu",
    "model=linear",
)
TABLES = ("data=synthetic data.num_rows=60 data.num_features=3 data.limit=40", "data=iris data.limit=40")
IMAGES = "data=digits data.limit=40"
#: by group: the options that have the keys, with data that fits
CHOICES = {
    "optimizer": [f"optimizer={name}" for name in ("adam", "adamw", "sgd")],
    "scheduler": [f"scheduler={name}" for name in ("constant", "cosine", "plateau")],
    "model": ["model=linear", "model=mlp", *(f"model={name} {IMAGES}" for name in ("cnn", "vit", "resnet", "autoencoder"))],
    "task": ["task=classification", "task=own", "task=autoencoding model=autoencoder", "task=regression data=diabetes"],
    "train": [""],
    "data": [*TABLES, IMAGES, "data=playground", "data=table", "data=arrays", "data=text model=gpt task=language"],
    "metrics": [""],
    "placement": [""],
    "backends": [""],
    "tracking": [""],
    "sweep": [""],
    "hydra": [""],
    "seed": [""],
    "name": [""],
    "device": [""],
}  # fmt: skip
NUMBERS = ["nan", "inf", "-inf", "-1", "0", "1", "2", "3", "0.5", ".5", "1e-400", "1e400", "1e18", "9" * 40, "-" + "9" * 40,
           "9223372036854775808", "1_0", "0x10", "1.0", "-0.0"]  # fmt: skip
TEXTS = ["''", '""', "a", "x" * 300, "é😀", "'a b'", '"it\'s"', "'\\''", "auto", "none", "off", "min", "val/loss", "a/b", "../a",
         "/proc/nope/x", "~", "-", "--", "'#'", "'a: b'", "'%'", "'a\tb'", "'*'", "NOPE", "???", "a=b", "'['", "'1'", "1.2.3",
         "${oc.env:NOT_SET}", "${oc.env:NUM}", "${nothing}", "${model}", "${.}", "${facts.num_steps}", "'${'", "${now:%Y}",
         "${hydra:job.num}", "runner.models.MLP", "torch.nn.Linear", "torch.optim.LBFGS", "os.getcwd", "nn.Linear"]  # fmt: skip
OTHERS = ["null", "true", "false", "[]", "{}", "[null]", "[[]]", "{a:1}", "{'':1}", "{_target_:torch.nn.ReLU}", "{_target_:a}",
          "[1,2]", "[a,1.5,null]", "{a:{b:[{}]}}", "[0]", "[-1]", "[true]", "{1:2}", "{_partial_:true}", "[" * 30 + "]" * 30, ""]  # fmt: skip
KEYWORDS = ["train.num_step", "modle", "optimizer.lr", "lr", "model.dropout", "data.limit", "train", "hydra.run.dir", "a.b.c", "",
            "device", "model", "experiment", "optimizer", "seed", "hydra/launcher", "data@b", "hydra.mode", "=", "model.hidden_sizes"]  # fmt: skip
SIGNS = ["", "", "", "+", "~", "++", "-", "--", "+~", "~~"]
VERBS = [*(verb for verb in COMMANDS if verb != "devices"), "trian", "help", "run", "evalute", "tests", "resumee", "list"]  # fmt: skip
FLAGS = ["--cfg", "--cfg=job", "-c", "job", "hydra", "all", "--package", "-p", "--info", "-i", "--help", "-h", "--version",
         "--resolve", "-r", "--run", "-cn", "-cd", "-cp", "--config-name", "--config-dir=a", "rerun", "--allow", "--allow=os", "--trust",
         "--json", "--anyway", "--device", "--lr", "-x", "--", "-", "---", "--port", "--port=a", "--port=99999999", "--format", "onnx",
         "--input", "--output", "--name", "--alias", "--host", "--step", "-sc", "--shell-completion", "-m", "--multirun"]  # fmt: skip
ARGUMENTS = ["last", "outputs", ".", "..", "nowhere", "/", "/proc/self", "a" * 300, "0123abcd", "é", "'", '"', "*", "a\nb", "multirun/a/b/0",
             "tracking.uri=", "tracking.uri=a", "tracking.uri=sqlite:////proc/nope/x.db", "tracking.uri=http://[", "tracking.uri=databricks"]  # fmt: skip


@dataclass(frozen=True)
class Done:
    """The effect of a command line."""

    words: list[str]
    code: int | None  # None: it raised an exception, or took too long
    shown: str
    left: list[str]  # files and directories
    statuses: list[str]  # of its runs
    seconds: float

    @property
    def wrong(self) -> str:
        """Return the error that a user would see, or "" if there is none."""
        if self.code is None:
            return "it did not come back"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        if "error: unexpected error" in self.shown:
            return "nobody foresaw it"
        if "Traceback" in self.shown:
            return "a traceback"
        if self.code == 2 and self.left:
            return f"left {self.left[:5]}"
        if self.code == 2 and "error: " not in self.shown and "usage:" not in self.shown:
            return "no words of it"
        if self.code == 1 and "failed" not in self.statuses:
            return "exit code 1 without a run that failed"
        return ""

    def __str__(self):
        return f"{self.wrong or 'as it should'} (exit code {self.code}, {self.seconds:.1f} s): {self.words}\n{self.shown[-3000:]}"


@functools.cache
def keys_of(group, choice):
    """Return every key of a group that the option has."""
    cfg = composer([])(choice.split())
    return [key for key in validate.all_keys(cfg) if key.split(".")[0] == group and not key.startswith("hydra.runtime")]


@functools.cache
def _holder():
    return tempfile.TemporaryDirectory(prefix="whole-commands-")


def folder():
    return _holder().name


@functools.cache
def written(words):
    """Write a file with these overrides and BASE in another directory: each typed override makes an error slower."""
    said = dict(word.split("=") for word in [*BASE, *words.split()])
    cfg = yaml.safe_load((CONF / "config.yaml").read_text())
    for entry in cfg["defaults"]:
        if isinstance(entry, dict):
            entry.update({group: said.pop(group) for group in list(entry) if group in said})
    values = OmegaConf.from_dotlist([f"{key}={text}" for key, text in said.items()])
    file = Path(folder()) / f"c{len(list(Path(folder()).iterdir()))}.yaml"
    file.write_text(yaml.safe_dump({"defaults": cfg["defaults"], **OmegaConf.to_container(values)}))
    return file.stem


def value(draw, depth=0):
    """Return a value as it is typed after a key."""
    kind = draw.random()
    if kind < 0.1 and depth < 2:
        inner = [value(draw, depth + 1) for _ in range(draw.randint(1, 3))]
        return f"[{','.join(inner)}]"
    if kind < 0.15 and depth < 2:
        return f"{{{draw.choice(['a', '_target_', 'lr', 'x y'])}:{value(draw, depth + 1)}}}"
    return draw.choice(draw.choice([NUMBERS, TEXTS, OTHERS]))


def with_values(draw):
    """Return a command line that sets one or two arbitrary keys to any value."""
    group = draw.choice(list(CHOICES))
    choice = draw.choice(CHOICES[group])
    keys = draw.sample(known := keys_of(group, choice), min(len(known), draw.choice([1, 1, 1, 2])))
    data = "" if "data=" in choice else draw.choice(TABLES)
    words = ["-cd", folder(), "-cn", written(f"{data} {choice}")]
    for key in keys:
        sign = draw.choice(["", "", "", "", "", "", "+", "++", "~"])
        below = draw.choice(["", "", "", "", "", "", "", ".a", ".x.y"])
        typed = value(draw)
        words.append(f"{sign}{key}{below}={typed}" if sign != "~" else f"~{key}")
    return words


def command_line(draw):
    """Return verbs, flags and overrides at odd places. One in twelve requests two jobs."""
    small = (
        ["-cd", folder(), "-cn", written(draw.choice(TABLES))] if draw.random() < 0.7 else [*BASE, *TABLES[1].split()]
    )
    words = [
        draw.choice(
            [
                lambda: draw.choice(FLAGS),
                lambda: draw.choice(ARGUMENTS),
                lambda: f"{draw.choice(SIGNS)}{draw.choice(KEYWORDS)}={value(draw)}",
                lambda: f"{draw.choice(SIGNS)}{draw.choice(KEYWORDS)}",
                lambda: draw.choice(small),
            ]
        )()
        for _ in range(draw.randint(1, 4))
    ]
    if draw.random() < 1 / 12:
        sweep = draw.choice(
            [
                "seed=1,2",
                "optimizer.lr=0.1,nope",
                "model=linear,nope",
                "seed=1,1",
                "data.limit=40,0",
                "train.batch_size=4,8",
            ]
        )
        return [*small, *draw.choice([["-m"], ["-m", "-m"], []]), sweep, *draw.choice([[], [], words[:1]])]
    if draw.random() < 0.6:
        return [draw.choice(VERBS), *words]
    words = [*small, *words]
    if draw.random() < 0.3:
        words += draw.sample(words, 1)
    if draw.random() < 0.3:
        draw.shuffle(words)
    return words


def cases(seed, make, num):
    draw = random.Random(f"{seed} {make.__name__}")
    return [make(draw) for _ in range(num)]


def do(words):
    """Run a command in an empty directory."""
    out = io.StringIO()
    before = Path.cwd(), list(sys.path), dict(os.environ), signal.getsignal(signal.SIGALRM)
    begun, code = time.monotonic(), None
    with tempfile.TemporaryDirectory() as top:
        here = Path(top) / "a" / "here"
        here.mkdir(parents=True)
        os.chdir(here)
        os.environ["NUM"] = "3"
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(round(LONGEST))
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.redirect_stdout(out))
                stack.enter_context(contextlib.redirect_stderr(out))
                stack.enter_context(warnings.catch_warnings())
                stack.enter_context(mock.patch.object(commands, "_become", lambda *_: sys.exit(0)))
                stack.enter_context(mock.patch("tempfile.tempdir", top))
                warnings.simplefilter("ignore")
                code = cli.main(list(words))
        except BaseException as error:
            out.write(f"{type(error).__name__}: {error}")
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before[3])
            os.chdir(before[0])
            sys.path[:] = before[1]
            os.environ.clear()
            os.environ.update(before[2])
        if "error: unexpected error" in out.getvalue():
            out.write("".join(log.read_text()[-2500:] for log in Path(top).rglob("runner*.log")))
        left = sorted(str(path.relative_to(top)) for path in Path(top).rglob("*"))
        left = [
            name for name in left if name not in ("a", "a/here") and not name.startswith(("runner-", "torchinductor_"))
        ]
        summaries = [json.loads(path.read_text()) for path in Path(top).rglob("summary.json")]
    return Done(
        list(words), code, out.getvalue(), left, [each["status"] for each in summaries], time.monotonic() - begun
    )


class TooLongError(BaseException):
    """The alarm's exception."""


def _too_long(*_):
    raise TooLongError
