"""What the Makefile runs beside the package itself: the benchmark stand and the demo. Not shipped."""
