"""Benchmark of ragged attention: `python -m pallas_kernels.benchmark --output FILE.json`.

Decoding and prefill at the head shapes of OPT models, against cuDNN's attention
over a padded batch, and against the rate at which the device reads memory. All
outputs are compared before anything is timed.

A program is a chain of calls, each one's output the next one's query, over so many
caches that the GPU's L2 keeps none of them from one use to the next. A chain that
decodes has at least 32 calls, one for each layer of OPT-6.7B: the plan that the calls
share is then spread over as many of them as in a real forward. Rates count the
committed keys and values, once each; they follow from median times.
"""
