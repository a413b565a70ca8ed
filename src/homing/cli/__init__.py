"""The command line: `homing run`, `homing demo`."""
