"""Hosts of our policies that are not ours. Each imports its foreign package only when it is used."""
