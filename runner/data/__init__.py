"""Loads data sets, from files or built in, splits them, and serves them as batches on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

#: the public names: what configurations and other programs may name
if TYPE_CHECKING:
    from runner.data.array_files import array_inputs as array_inputs
    from runner.data.array_files import arrays as arrays
    from runner.data.builtin.generated import mnist1d as mnist1d
    from runner.data.builtin.generated import playground as playground
    from runner.data.builtin.generated import synthetic as synthetic
    from runner.data.builtin.scikit import digits as digits
    from runner.data.builtin.scikit import scikit as scikit
    from runner.data.hub.datasets import huggingface as huggingface
    from runner.data.hub.datasets import read_rows as read_rows
    from runner.data.language.text import text as text
    from runner.data.language.tokens import TextReader as TextReader
    from runner.data.language.tokens import TokensReader as TokensReader
    from runner.data.language.tokens import tokens as tokens
    from runner.data.language.tokens import write_tokens as write_tokens
    from runner.data.tables.table import TableReader as TableReader
    from runner.data.tables.table import table as table
    from runner.data.vision.images import images as images
    from runner.data.vision.images import read_images as read_images
else:
    from runner.config.allowed import exports

    __getattr__, __dir__, __all__ = exports(__name__)
