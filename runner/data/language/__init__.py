"""Texts and files of tokens: rows with a target, and windows for a language model."""
