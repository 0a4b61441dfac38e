"""What commands and benchmarks share: values of options, models by name, and what is printed."""
