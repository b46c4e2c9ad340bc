"""What a comparison of runs tells, section by section. observe/report.py puts it on a page."""
