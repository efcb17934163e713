"""What `pagemill bench` is made of: the workload, one measured point, the machine, the table."""
