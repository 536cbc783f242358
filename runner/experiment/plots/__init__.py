"""What a run measured and predicted goes in; its pictures come out, as PNG files."""
