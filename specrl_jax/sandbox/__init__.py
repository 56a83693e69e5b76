"""Processes that contain what others wrote, called by name."""
