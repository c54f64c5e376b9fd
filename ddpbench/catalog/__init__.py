"""WHAT can be measured: one table a file, one entry to add one."""
