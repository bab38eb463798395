"""One process, one device."""
