"""What the operations share: choice of an implementation, checks of shapes, gathers."""
