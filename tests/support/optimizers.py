"""The settings of optimizers whose steps our kernels or formulas take: one table for all tests that compare them."""

from functools import partial

import torch

from runner.training.muon import Muon

ADAM, ADAMW, SGD = (partial(kind, fused=True) for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))


def muon(parameters, **settings):
    """Create a Muon with separate groups for matrices, like make_optimizer()."""
    own = list(parameters)
    matrices, others = ([each for each in own if (each.dim() >= 2) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
    return Muon([group for group in groups if group["params"]], fused=True, **settings)


DIRECT = {
    "adam": partial(ADAM, lr=0.01),
    "adam with decay": partial(ADAM, lr=0.01, weight_decay=0.1),
    "adam upwards": partial(ADAM, lr=0.01, maximize=True),
    "adamw": partial(ADAMW, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-5),
    "adamw upwards": partial(ADAMW, lr=0.01, weight_decay=0.1, maximize=True),
    "muon": partial(muon, lr=0.01, weight_decay=0.1),
    "muon as it was first": partial(muon, lr=0.01, adjust_lr_fn="original", nesterov=False, ns_steps=3, adamw_lr=0.02),
    "sgd": partial(SGD, lr=0.1),
    "sgd with decay": partial(SGD, lr=0.1, weight_decay=0.1),
    "sgd upwards": partial(SGD, lr=0.01, maximize=True),
    "sgd with momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd with dampened momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.5),
}
