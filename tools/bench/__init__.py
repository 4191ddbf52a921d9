"""The benchmarks behind `make bench`: castore beside its peers, on one machine, in the same minutes.

A *suite* is one file in `tools/bench/suites/`. It yields *rows*. A row is one question ("whole get of 512
MB") put to several *contestants*. Contestants run interleaved (A B C A B C ...), with their caches dropped or
warmed alike. A row reports medians, spread and ratios, because ratios hold on other machines and absolute
figures do not.
A *study* is a table without contestants (a simulation, memory counted), with a plot if it has one.

To add a suite, write `suites/NAME.py` with `TITLE`, `ABOUT` and `rows(bench)`: see `harness.Suite`.
"""
