"""Command lines of users: flags, configuration files, their presets, and errors in one line."""
