"""Benchmarks of the library; `emsjax.benchmarks.registry` lists them."""
