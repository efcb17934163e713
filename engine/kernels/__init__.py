"""Code for one kind of hardware, behind plain functions; it knows numbers in memory, not whose they are."""
