"""From a problem to its stored record: the search, its steps and its budget."""
