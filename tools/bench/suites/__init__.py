"""One file a suite: see `tools.bench.harness.Suite`."""
