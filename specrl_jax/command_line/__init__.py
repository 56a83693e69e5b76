"""What users type: flags, configuration files, their presets, and errors in one line."""
