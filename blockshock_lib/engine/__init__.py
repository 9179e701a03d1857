"""The one experiment engine. It knows the protocol in `study.py`, and no study, method or metric by name."""
