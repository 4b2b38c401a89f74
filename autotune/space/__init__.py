"""Search spaces: from a TOML file to the enumerated list of legal configs."""
