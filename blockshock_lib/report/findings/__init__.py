"""All records weighed together: the law beside the measurement, what would change the answer, a prediction."""
