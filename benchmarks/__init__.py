"""Benchmarks of saving and loading; see save_load.py."""
