"""The configuration: one folder a group, one YAML file an option. Holds no code."""
