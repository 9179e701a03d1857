"""HTML pages that open offline and run no script but ours: a run's notebook, and the list of all runs."""
