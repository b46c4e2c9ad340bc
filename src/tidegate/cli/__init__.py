"""The command line. Reads files and the environment."""
