"""Commands around training; they import the method and are never imported by it."""
