"""Knowledge of transformers: KV caches and ``generate``."""
