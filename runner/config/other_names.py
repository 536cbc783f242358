"""Maps words of other frameworks to the settings that mean the same here: Lightning, Hugging Face, Keras, argparse scripts."""

from __future__ import annotations

from runner.errors import nearest

#: by key: other names for it, by their last part; the key takes the value that was typed, if it fits
KEYS = {
    "optimizer.lr": "lr learning_rate base_lr initial_lr init_lr",
    "optimizer.weight_decay": "weight_decay wd",
    "train.num_epochs": "epoch epochs max_epochs n_epochs nb_epochs num_train_epochs total_epochs",
    "train.num_steps": "steps max_steps n_steps total_steps num_train_steps iterations max_iters num_iterations",
    "train.batch_size": "bs batch train_batch_size per_device_train_batch_size",
    "train.eval_batch_size": "test_batch_size val_batch_size per_device_eval_batch_size",
    "train.accumulate_steps": "accumulate_grad_batches gradient_accumulation_steps grad_accum_steps accumulation_steps",
    "train.clip_grad_norm": "clip grad_clip clip_grad gradient_clip_val max_grad_norm grad_norm_clip clip_norm clipnorm",
    "train.ema_decay": "ema",
    "train.early_stopping.patience": "patience early_stopping_patience",
    "train.early_stopping.metric": "monitor metric_for_best_model",
    "train.max_seconds": "max_time time_limit",
    "train.compile": "torch_compile compile_model",
    "train.evaluate_every_steps": "eval_steps eval_interval",
    "train.checkpoint_every_steps": "save_steps save_interval",
    "train.check": "debug fast_dev_run dry_run smoke_test",
    "train.num_processes": "nproc nproc_per_node world_size",
    "data.num_workers": "workers n_workers dataloader_num_workers",
    "data.val_fraction": "val_split validation_split val_size valid_fraction",
    "data.test_fraction": "test_split test_size",
    "data.path": "data_dir data_path dataset_path train_file",
    "metrics.every": "log_every log_interval log_every_n_steps logging_steps",
    "model.dropout": "dropout drop_rate dropout_rate",
    "model.hidden_sizes": "hidden hidden_size hidden_dim hidden_dims hidden_units hidden_layers",
    "model.weights": "init_from pretrained_weights",
    "placement.strategy": "strategy",
    "tracking.experiment": "experiment_name project project_name wandb_project",
    "tracking.uri": "tracking_uri mlflow_uri mlflow_tracking_uri",
    "tracking.tags": "tags",
    "tracking.enabled": "logger",
    "device": "gpu gpus n_gpu n_gpus ngpu ngpus num_gpus gpu_id use_gpu cuda use_cuda accelerator devices",
    "seed": "random_seed manual_seed random_state seed_everything",
    "name": "run_name exp_name",
    "hydra.run.dir": "output_dir out_dir outdir save_dir log_dir default_root_dir",
    "model": "arch architecture net network backbone",
    "data": "dataset datamodule",
    "optimizer": "optim opt",
    "scheduler": "sched lr_scheduler lr_schedule",
    "task": "loss loss_fn criterion objective",
}
#: by key or group: other names for its values and options
VALUES = {
    "device": {"cuda": "gpu nvidia true yes on 1", "cpu": "false no none off", "all": "2 3 4 8"},
    "train.precision": {
        "fp16": "16 16-mixed 16-true half float16 mixed amp mixed_float16",
        "bf16": "bf16-mixed bf16-true bfloat16 mixed_bfloat16",
        "fp32": "32 32-true full single float float32 none",
        "fp64": "64 64-true double float64",
    },
    "train.early_stopping.mode": {"min": "minimize lower", "max": "maximize higher"},
    "task": {
        "regression": "mse mse_loss mseloss l2 mean_squared_error",
        "regression task.loss=mae": "mae l1 l1_loss l1loss mean_absolute_error",
        "regression task.loss=huber": "huber huber_loss huberloss smooth_l1",
        "classification": "ce nll bce cross_entropy crossentropy crossentropyloss nll_loss bce_with_logits",
    },
    "data": {
        "table": "csv tsv parquet feather tabular pandas",
        "arrays": "npz npy numpy safetensors",
        "images": "image imagefolder image_folder folder",
        "huggingface": "hf hub",
        "text": "txt",
    },
    "task.metrics": {
        "f1": "f1_score f_score",
        "recall": "sensitivity tpr",
        "specificity": "tnr",
        "auroc": "auc roc roc_auc roc_auc_score",
        "average_precision": "ap auprc pr_auc",
        "iou": "jaccard jaccard_index jaccard_score",
        "mcc": "matthews matthews_corrcoef matthews_corr_coef",
        "kappa": "cohen cohen_kappa cohen_kappa_score",
        "calibration_error": "ece",
        "exact_match": "subset_accuracy",
        "r2": "r2_score r_squared",
    },
    "scheduler": {
        "constant": "none null",
        "cosine": "cosineannealing cosineannealinglr warmup_cosine cosine_with_warmup",
        "plateau": "reducelronplateau reduce_lr_on_plateau reduce_on_plateau",
    },
}
#: what else a key needs that the default configuration does not have
WITH = {"model.hidden_sizes": "model=mlp", "optimizer.weight_decay": "", "hydra.run.dir": ""}
#: names of data sets that users look for and that no option has
ELSEWHERE = {"mnist", "fashionmnist", "cifar", "cifar10", "cifar100", "svhn", "imagenet", "stl10", "imdb", "coco"}
COMMANDS = {
    "run": "train",
    "fit": "train",
    "test": "evaluate",
    "validate": "evaluate",
    "eval": "evaluate",
    "continue": "resume",
    "infer": "predict",
    "sweep": "train -m",
    "help": "--help",
    "version": "--version",
}
#: by what it means: words that say it with any value that does not switch them off
MEANINGS = {
    "device=mps": "mps use_mps",
    "device=cpu": "no_cuda no_gpu cpu use_cpu disable_cuda",
    "train.precision=fp16": "amp use_amp fp16 half",
    "train.precision=bf16": "bf16",
    "train.precision=tf32": "tf32",
    "python -m runner resume last": "resume ckpt_path resume_from resume_from_checkpoint checkpoint",
}
NO = {"0", "false", "no", "none", "null", "off"}


def _plain(name: str) -> str:
    return name.rpartition(".")[2].lower().replace("-", "_")


def keys_for(name: str) -> list[str]:
    """Return the keys that another framework's word means, e.g., `train.num_epochs` for `trainer.max_epochs`."""
    return [key for key, names in KEYS.items() if _plain(name) in names.split()]


def keys_like(name: str) -> list[str]:
    """Return the keys whose names in other frameworks `word` is a misspelling of."""
    hits = nearest(_plain(name), [name for names in KEYS.values() for name in names.split()], cutoff=0.9)
    return [key for hit in hits[:1] for key in keys_for(hit)]


def value_for(key: str, value: str) -> str:
    """Return the word that this project has for a value of a key: `fp16` for `half`."""
    known = VALUES.get(key, {})
    return next((ours for ours, names in known.items() if value.lower() in names.split()), value)


def overrides_for(name: str, value: str) -> list[str]:
    """Return an override, or a whole command, that says what another framework's KEY=VALUE says; or none."""
    is_off = value.strip("'\"[] ").lower() in NO
    return [] if is_off else [text for text, words in MEANINGS.items() if _plain(name) in words.split()]


def suggest_keys(wanted: str, known: list[str]) -> list[str]:
    """Return the keys that `wanted` certainly means: other frameworks' names for them, or misspellings of them."""
    if hits := [key for key in keys_for(wanted) if key in known]:
        return hits
    parent, _, leaf = wanted.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    longer = [name for name in siblings if parent and len(leaf) > 2 and name.startswith(leaf)]
    if hits := nearest(leaf, siblings) or longer:
        return [siblings[hit] for hit in hits]
    names = [key.rpartition(".")[2] for key in known]
    near = leaf if leaf in names else next(iter(nearest(leaf, names)), None)
    hits = [key for key, name in zip(known, names, strict=True) if name == near]
    if len(hits) > 1 and parent:
        hits = [hit for hit in hits if nearest(parent, [hit.rpartition(".")[0]])]
    return hits[:3] or [key for key in keys_like(wanted) if key in known]
