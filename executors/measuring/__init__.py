"""Calibrations fitted to what this machine does."""
