"""The only place that touches a GPU during a search: a worker process, and what it measures with."""
