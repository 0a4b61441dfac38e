"""Benchmark of ragged attention: `python -m pallas_kernels.benchmark --output FILE.json`.

It compares decoding and prefill, at the head shapes of OPT models and of one with grouped
heads, with cuDNN's attention over a padded batch, and with the rate at which the device
reads memory. All outputs are compared before anything is timed. The update of the caches is timed
as well; `python -m pallas_kernels.benchmark.products` times products with weights.

A program is a chain of calls, in which each output is the next query, over so many
caches that the GPU's L2 cache holds none of them from one use to the next. A chain that
decodes has at least 32 calls, one for each layer of OPT-6.7B: the cost of the plan that the
calls share is then spread over as many of them as in a real forward. Rates count the
committed keys and values, once each, and are computed from median times.
"""
