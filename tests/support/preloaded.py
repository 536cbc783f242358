"""Imports for the tests' preloaded process, in addition to a sweep's: the publishing process, plans, MLflow and its server."""

# ruff: noqa: F401  # imported for later forks

import gc
import logging
import math

import shortcuts

from runner.config.compose import composer
from runner.tracking import mlflow_store

with mlflow_store.settings():  # MLflow reads its log level when it is imported
    import mlflow.cli
    import mlflow.pytorch
    import mlflow.server.fastapi_app
    import mlflow.store.tracking.sqlalchemy_store
    import plotly.graph_objects
    import torch._subclasses.fake_tensor
    import torch.fx.experimental.symbolic_shapes
    import torchmetrics
    import uvicorn.protocols.http.h11_impl

    import runner.sweep.grid
    import runner.sweep.report.figures
    import runner.tools.plan.worker
    import runner.tracking.__main__
    from runner.training.stacked import check

# whether a group's jobs compute together must not depend on a measured time
check.WORTH, check.MIN_GAIN = math.inf, -math.inf
shortcuts.compose_once()
shortcuts.leave_undrawn()
composer([])([])  # loads Hydra's files and its grammar
logging.getLogger().handlers.clear()  # the handlers of MLflow's server are not for other programs
gc.freeze()  # a collection in a fork would visit all of these objects, and copy their pages
