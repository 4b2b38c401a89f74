"""Facts that are passed between all others: problems, devices, suites, measurements."""
