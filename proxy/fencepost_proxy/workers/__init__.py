"""Several processes behind the same listeners."""
