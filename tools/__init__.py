"""The programs that the Makefile runs beside the package: benchmarks, demo, torture and strangers.

Not shipped.
"""
