"""Data sets that are here without a download: of scikit-learn, and generated ones."""
