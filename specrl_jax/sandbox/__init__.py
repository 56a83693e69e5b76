"""Processes that contain what a policy, a scorer or an environment runs."""
