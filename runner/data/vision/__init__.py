"""Folders of images: found, decoded, scaled and augmented."""
