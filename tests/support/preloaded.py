"""Imported by the session's warm process, beside what a sweep's has: the publishing process, plans, MLflow and its server."""

# ruff: noqa: F401  # imported to be there

import gc
import logging

import shortcuts

from runner.config.compose import composer
from runner.tracking import mlflow_store

with mlflow_store.settings():  # MLflow reads its log's level when it is imported
    import mlflow.cli
    import mlflow.pytorch
    import mlflow.server.fastapi_app
    import mlflow.store.tracking.sqlalchemy_store
    import torch._subclasses.fake_tensor
    import torch.fx.experimental.symbolic_shapes
    import torchmetrics
    import uvicorn.protocols.http.h11_impl

    import runner.plan.worker
    import runner.tracking.__main__

shortcuts.parse_once()
shortcuts.leave_undrawn()
composer([])([])  # what Hydra reads and its grammar learns is there already
logging.getLogger().handlers.clear()  # what MLflow's server has set up is for no other program
gc.freeze()  # a collection in a fork would look through all of these, and copy their pages
