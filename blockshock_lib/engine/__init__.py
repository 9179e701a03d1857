"""The one experiment engine. It knows the protocol in `protocol.py` and no method by name; a phase is a set of
toggles.
"""
