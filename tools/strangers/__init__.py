"""`make strangers`: castore under the test suites of other projects, run from checkouts of those projects.

The table of suites is in suites.py. For each stranger, one module puts castore in the place of the stranger's
code: a pytest plugin or, for a program, a function that yields cases. running.py runs a suite and counts,
left_out.py has the reason for each case that is left out.

Must never copy, change or write into a checkout, and never count a case that did not end as passed.
"""
