"""Two runs side by side: what became wrong, slower or larger."""
