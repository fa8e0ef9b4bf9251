"""Object names.

Every object name that Millrace reads or writes is built and parsed in this package, and nowhere
else. Numbers are zero-padded, so that a listing is in order.
"""
