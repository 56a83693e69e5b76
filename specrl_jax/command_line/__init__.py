"""Command lines of users: flags, configuration files, their presets, and one-line errors."""
