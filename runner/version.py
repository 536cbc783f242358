"""The version, which the package's metadata is made of; and when it was imported, which is before all else of it."""

import time

__version__ = "0.1.0"

#: on perf_counter's clock: of `python -m runner`, when its command began
IMPORTED = time.perf_counter()
