"""What a step costs, by a formula instead of a GPU. Pure: the standard library alone, no clock, no files."""
