"""What is known of each kernel family: one module per family, and the estimate that asks them."""
