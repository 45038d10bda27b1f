"""Builds what a release consists of: `make release` (CONTRIBUTING.md)."""
