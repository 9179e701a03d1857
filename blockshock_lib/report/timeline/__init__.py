"""The traces of profiled calls: what each rank did, and when."""
