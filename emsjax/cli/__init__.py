"""The commands of `emsjax`, each with its options in a module beside it."""
