"""Preflight: the settings of all ranks and hosts, compared and checked."""
