"""Which settings exclude or need each other: one table, with the reason and what to type instead.

A new rule is one entry of RULES. check() raises every clash at once; why_not() answers for a change that is only
considered (`tune`, sweeps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config import validate
from runner.config.identity import as_text
from runner.errors import Problem, refuse


@dataclass(frozen=True)
class Situation:
    """What a rule may depend on besides the settings. None: not known yet, and rules about it do not apply."""

    device: str | None = None  # such as "cuda:0"
    num_processes: int | None = None
    slot: str | None = None  # the device that a sweep has given its job
    has_pruner: bool | None = None  # a search may end the run early
    is_member: bool | None = None  # trained together with other jobs of a sweep
    rows: str | None = None  # the training data: "tensors", "dataset", or your "loader" or "iterable"
    is_on_device: bool | None = None  # a step reads its examples there
    has_validation: bool | None = None
    has_hook_metric: bool | None = None  # a hook may report the metric that epochs are compared by
    metric_schedule: str | None = None  # a schedule that needs a metric
    closure_optimizer: str | None = None  # an optimizer that computes the loss several times in a step
    shares_tensors: bool | None = None  # a task whose turns compute something once for all


#: a value that a condition compares with, or a question about the value
Condition = Any | Callable[[Any], bool]


@dataclass(frozen=True)
class Rule:
    """Settings that clash when all conditions hold."""

    conditions: Mapping[str, Condition]  # by dotted key of a setting, or by name of a field of Situation
    reason: str  # may name fields of Situation in braces
    fixes: str  # what to type instead, separated by blanks, the most useful first


def is_set(value: Any) -> bool:
    return bool(value)


def is_empty(value: Any) -> bool:
    return not value


def is_several(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def is_some(value: Any) -> bool:
    return str(value).isdigit() and int(value) > 0  # `data` is an open group, where numbers may be texts


GRAPH, SPLIT = {"train.cuda_graph": True}, {"train.on_oom": "split"}
COMPILE, RECOMPUTE = {"train.compile": True}, {"train.recompute": is_set}
TURNS, GUARDED = {"optimizer.turns": is_set}, {"placement.guard": "always"}
FP16, FP64 = {"train.precision": "fp16"}, {"train.precision": "fp64"}
SEVERAL, FSDP = {"num_processes": is_several}, {"placement.strategy": "fsdp"}
DIVIDED, MEMBER = {**FSDP, **SEVERAL}, {"is_member": True}
SKIP, ROLLBACK = {"train.on_nonfinite": "skip"}, {"train.on_nonfinite": "rollback"}
CLOSURE, SHARED = {"closure_optimizer": is_set}, {**TURNS, "shares_tensors": True}
ON_DEVICE, WORKERS = {"data.residency": "device"}, {"data.num_workers": is_some}
NO_VALIDATION = {"has_validation": False}

NO_GRAPH, EAGER, ONE_PROCESS = "train.cuda_graph=false", "train.compile=false", "train.num_processes=1"
FIRST_STEP, DDP, ALONE = "placement.guard=first_step", "placement.strategy=ddp", "sweep.batch=off"
VALIDATE, FAIL = "data.val_fraction=0.1", "train.on_nonfinite=fail"

REPLAYED = "the second forward pass restores the generators of the first, which only the host can do"
CLOSES = "{closure_optimizer} computes the loss as often as it needs"
SHARES = "the task's turns share tensors with their gradients"
CUT = "parts are cut from weights as torch lays them out"

# fmt: off
RULES = (
    # CUDA graphs
    Rule({**GRAPH, "device": lambda device: not device.startswith("cuda")},
         "CUDA graphs need an NVIDIA GPU, and this run is on {device}", f"{NO_GRAPH} device=cuda"),
    Rule({**GRAPH, **SPLIT}, "a captured step is of one size", "train.on_oom=fail"),
    Rule({**GRAPH, "data.residency": "stream"},
         "a captured step reads its examples on the device", "data.residency=auto"),
    Rule({**GRAPH, "is_on_device": False},
         "a captured step reads its examples on the device, and they are streamed", f"data.residency=device {NO_GRAPH}"),
    Rule({**GRAPH, **GUARDED}, "the guard can't watch a captured step", FIRST_STEP),
    Rule({**GRAPH, **FP16}, "a captured update can't scale gradients", f"{NO_GRAPH} train.precision=bf16"),
    Rule({**TURNS, **GRAPH}, "a graph holds one optimizer's step", f"{NO_GRAPH} train.compile=true"),
    Rule({**RECOMPUTE, **GRAPH}, REPLAYED, f"{NO_GRAPH} train.recompute=[]"),
    # compiled steps
    Rule({**RECOMPUTE, **COMPILE}, REPLAYED, f"{EAGER} train.recompute=[]"),
    Rule({**COMPILE, **GUARDED}, "the guard watches single operations, and a compiled step has none", FIRST_STEP),
    # what is trained
    Rule({"model.head_only": True, "model.lora": is_set},
         "`model.lora` freezes the head, unless its `train` names it", "model.head_only=false model.lora=null"),
    # float64
    Rule({**FP64, **GRAPH}, "a captured step reads its rates as 32-bit numbers", NO_GRAPH),
    Rule({**FP64, "data.augment": is_set}, "augmented images are float32", "data.augment=null"),
    # steps that are not finite
    Rule({**SKIP, **GRAPH}, "a captured update can't be skipped", f"{FAIL} {NO_GRAPH}"),
    Rule({**SKIP, **FP16}, "fp16 skips steps with a scale", f"{FAIL} train.precision=bf16"),
    Rule({**SKIP, **CLOSURE}, CLOSES, FAIL),
    Rule({**SKIP, **DIVIDED}, "no process has all gradients", f"{FAIL} {DDP}"),
    Rule({**ROLLBACK, **SEVERAL}, "one process would roll back before the others", f"{FAIL} {ONE_PROCESS}"),
    # several optimizers
    Rule({**TURNS, "optimizer.groups": is_set},
         "each optimizer has its own parameters and settings", "optimizer.groups=null"),
    Rule({**SHARED, **COMPILE}, SHARES, EAGER),
    Rule({**SHARED, **SPLIT}, SHARES, "train.on_oom=fail"),
    # an optimizer with a closure
    Rule({**CLOSURE, **COMPILE}, CLOSES, EAGER),
    Rule({**CLOSURE, **GRAPH}, CLOSES, NO_GRAPH),
    Rule({**CLOSURE, **FP16}, CLOSES, "train.precision=fp32"),
    Rule({**CLOSURE, **SEVERAL}, CLOSES, ONE_PROCESS),
    # several processes
    Rule({**SPLIT, **SEVERAL},
         "processes that wait for each other can't each repeat a step in parts", f"train.on_oom=fail {ONE_PROCESS}"),
    Rule({**GRAPH, **SEVERAL}, "a captured step does not wait for other processes", f"{NO_GRAPH} {ONE_PROCESS}"),
    Rule({**TURNS, **SEVERAL},
         "gradients are exchanged once a step, and optimizers that take turns have several losses in one", ONE_PROCESS),
    Rule({**SEVERAL, "has_pruner": True},
         "a search asks one process whether its trial continues", f"hydra.sweeper.pruner=none {ONE_PROCESS}"),
    Rule({**SEVERAL, "slot": lambda slot: slot != "cpu"}, "a sweep gives each of its jobs one device", ONE_PROCESS),
    # a model divided among processes
    Rule({**FSDP, "train.hooks": is_set},
         "a hook sees a whole model, and with fsdp each process has a part of it", f"{DDP} train.hooks=[]"),
    Rule({**DIVIDED, **COMPILE}, "the exchanges around each block can't be compiled", EAGER),
    Rule({**DIVIDED, **FP16}, "fp16 scales by gradients that no process has whole", "train.precision=bf16"),
    Rule({**DIVIDED, "placement.init": "device"}, "it builds the whole model on each device", "placement.init=host"),
    Rule({**DIVIDED, **GUARDED}, "the guard would watch the exchanges", FIRST_STEP),
    Rule({**DIVIDED, "optimizer._target_": "runner.training.Muon"},
         "muon looks at whole matrices, and each process has a part of every weight", f"{DDP} optimizer=adamw"),
    Rule({**DIVIDED, "backends.cpu.channels_last": True}, CUT, "backends.cpu.channels_last=null"),
    Rule({**DIVIDED, "backends.cuda.channels_last": True}, CUT, "backends.cuda.channels_last=null"),
    Rule({**DIVIDED, "backends.cpu.onednn": True},
         "a layer's weight comes in parts, and only torch multiplies these", "backends.cpu.onednn=null"),
    # jobs of a sweep that are trained together
    Rule({**MEMBER, **TURNS}, "optimizer.turns has several optimizers", ALONE),
    Rule({**MEMBER, **FP16}, "train.precision=fp16 scales each loss separately", ALONE),
    Rule({**MEMBER, "train.on_nonfinite": lambda value: value != "fail"}, "train.on_nonfinite looks at one run", ALONE),
    Rule({**MEMBER, **RECOMPUTE}, "train.recompute takes each model's forward pass twice", ALONE),
    Rule({**MEMBER, **GRAPH}, "train.cuda_graph=true", ALONE),
    Rule({**MEMBER, "train.profile": is_set}, "train.profile traces one run's steps", ALONE),
    Rule({**MEMBER, "train.max_seconds": is_set}, "train.max_seconds is the time of each", ALONE),
    Rule({**MEMBER, "train.num_processes": is_several}, "several processes", ALONE),
    # what the data allows
    Rule({**ON_DEVICE, "rows": "dataset"},
         "a Dataset is read example by example and can't be moved to the device whole; return tensors for that",
         "data.residency=stream"),
    Rule({**ON_DEVICE, "rows": lambda rows: rows in ("loader", "iterable")},
         "your DataLoader is read batch by batch; return tensors for that", "data.residency=auto"),
    Rule({**WORKERS, "rows": "loader"},
         "your DataLoader has its own: DataLoader(..., num_workers=...)", "data.num_workers=0"),
    Rule({**WORKERS, "rows": "iterable"},
         "each process would read all of your IterableDataset, and an epoch would end before its other examples; return"
         " DataLoader(dataset, num_workers=...), where __iter__ takes its part by get_worker_info()",
         "data.num_workers=0"),
    Rule({**NO_VALIDATION, "metric_schedule": is_set, "has_hook_metric": False},
         "{metric_schedule} needs a validation split", f"{VALIDATE} scheduler=cosine"),
    Rule({**NO_VALIDATION, "train.early_stopping.patience": is_set, "has_hook_metric": False},
         "early stopping needs a validation split", f"{VALIDATE} train.early_stopping.patience=null"),
    Rule({**NO_VALIDATION, "train.evaluate_every_steps": is_set, "train.hooks": is_empty, "train.stop_when": is_empty},
         "evaluation during an epoch needs a validation split", f"{VALIDATE} train.evaluate_every_steps=null"),
)
# fmt: on


def check(cfg: DictConfig, situation: Situation) -> None:
    """Raise a RunnerError with every clash of a configuration."""
    refuse(clashes(cfg, situation))


def clashes(cfg: DictConfig, situation: Situation) -> list[Problem]:
    """Return an error for each clash of a configuration."""
    return [_error(rule, cfg, situation) for rule in RULES if _holds(rule, cfg, situation, {})]


def why_not(cfg: DictConfig, changes: Mapping[str, Any], situation: Situation = Situation()) -> str:
    """Return why changes would clash with other settings, or "" if they would not.

    changes: Values by dotted key of a setting, or by field of Situation.
    """
    touched = [rule for rule in RULES if changes.keys() & rule.conditions.keys()]
    clash = next((rule for rule in touched if _holds(rule, cfg, situation, changes)), None)
    return clash.reason.format_map(vars(situation)) if clash else ""


def _holds(rule: Rule, cfg: DictConfig, situation: Situation, changes: Mapping[str, Any]) -> bool:
    for key, wanted in rule.conditions.items():
        value = changes[key] if key in changes else _value(key, cfg, situation)
        if value is None and hasattr(situation, key):
            return False
        if not (wanted(value) if callable(wanted) else type(value) is type(wanted) and value == wanted):
            return False
    return True


def _value(key: str, cfg: DictConfig, situation: Situation) -> Any:
    return getattr(situation, key) if hasattr(situation, key) else validate.value(cfg, key)


def _error(rule: Rule, cfg: DictConfig, situation: Situation) -> Problem:
    typed = [_typed(key, validate.value(cfg, key)) for key in rule.conditions if "." in key]
    if "num_processes" in rule.conditions:
        typed.append(f"train.num_processes={situation.num_processes}")
    reason = rule.reason.format_map(vars(situation))
    return Problem.suggest(" ".join(typed), reason, rule.fixes.split(), code="conflict")


def _typed(key: str, value: Any) -> str:
    if OmegaConf.is_dict(value) or (OmegaConf.is_list(value) and any(map(OmegaConf.is_dict, value))):
        return key
    return f"{key}={as_text(value)}"
