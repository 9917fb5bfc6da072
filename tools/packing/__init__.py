"""Parts of tools/pack.py: inputs (sources), text to tokens (encoding), the dataset folder (dataset)."""
