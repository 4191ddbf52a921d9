"""The benchmark stand behind `make bench`: castore beside its peers, on one machine, in the same minutes.

A *suite* is one file in `tools/bench/suites/`. It yields *rows*; a row is one question ("whole get of 512 MB")
put to several *contestants*. Contestants run interleaved (A B C A B C ...), with their caches dropped or warmed
alike, and a row reports medians, spread and ratios, because ratios travel between machines and absolutes do not.
What no contestants run for (a simulation, memory counted) is a *study*: a table, with a plot if it has one.

To add a suite, write `suites/NAME.py` with `TITLE`, `ABOUT` and `rows(bench)`: see `harness.Suite`.
"""
