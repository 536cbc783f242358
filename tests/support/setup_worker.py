"""Replace Ray's file of this name, by which a raylet starts a worker: request a forked one from the preloaded process."""

import argparse
import json
import os

from forked_programs import Forked

parser = argparse.ArgumentParser()
parser.add_argument("--serialized-runtime-env-context", default="{}")
parser.add_argument("--language")
asked, words = parser.parse_known_args()
os.environ.update(json.loads(asked.serialized_runtime_env_context).get("env_vars") or {})
Forked(words)  # Ray reads its environment when it is imported, so the preloaded process does not import it
