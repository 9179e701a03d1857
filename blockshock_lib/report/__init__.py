"""Records frame in; table, figure, verdict or page out. Reads records only: a run can be redrawn without a GPU."""
