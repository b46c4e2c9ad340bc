"""The command line. Reads files and the environment; nobody imports it."""
