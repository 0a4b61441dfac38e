"""The commands that measure: what `emsjax profile` and `emsjax bench` do with their options."""
