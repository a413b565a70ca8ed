"""What do episodes look like through four servers of several workers each? `homing rl demo` shows it."""
