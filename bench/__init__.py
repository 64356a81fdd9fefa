"""The command line: runs comparisons and shows their records. Nothing imports it but its own tests."""
