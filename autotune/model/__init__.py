"""The arithmetic of the field: work, traffic, occupancy."""
