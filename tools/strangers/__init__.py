"""`make strangers`: castore under test suites that nobody here wrote, run from checkouts of their projects.

The table of suites is in suites.py. One module a stranger puts castore where the stranger's own code was: a pytest plugin, or,
for a program, a function that yields cases. running.py runs a suite and counts, left_out.py tells why a case is left out.

Must never copy, change or write into a checkout, and never count a case that did not end as one that passed.
"""
