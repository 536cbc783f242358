"""`ray start` without a time limit, and without parts that no test needs: the autoscaler, the dashboard and the server of
Ray's client, which may start late, in the middle of a test.

Its workers are forked from the tests' preloaded process, if its socket is given (setup_worker.py).
"""

import os
import time
from pathlib import Path

from forked_programs import DOOR
from ray._private import node, ray_constants, services
from ray.scripts.scripts import main
from waiting import LONGEST

asked = services.get_node


def get_node(*args):
    """Ray gives a node only 30 s to start (2.60, node.py), however busy the machine is."""
    end = time.monotonic() + LONGEST
    while True:
        try:
            return asked(*args)
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # conftest hides the machine's GPUs; Ray counts the simulated ones
services.get_node = get_node
node.Node.start_api_server = node.Node.start_ray_client_server = lambda *_, **__: None
if os.environ.get(DOOR):
    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name(ray_constants.SETUP_WORKER_FILENAME))
main()
